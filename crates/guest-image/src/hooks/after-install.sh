#!/bin/sh
# Run by mmdebstrap outside of the new root ($1), while its index still exists. Fetches the kernel
# package without installing it, notes the archive's date, and keeps what was downloaded.
set -eu
root=$1
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"

# The newest date in the index is the image's own: the same index gives the same time stamps.
epoch=0
for release in "$root"/var/lib/apt/lists/*Release; do
	[ -e "$release" ] || continue
	date=$(sed -n 's/^Date: //p' "$release" | head -n 1)
	seconds=$(date -u -d "$date" +%s)
	if [ "$seconds" -gt "$epoch" ]; then epoch=$seconds; fi
done
echo "$epoch" >"$VMFORK_OUT/epoch"

# linux-image-cloud-amd64 is an empty package that depends on the newest kernel.
kernel=$(apt-cache depends "$VMFORK_KERNEL" | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
kernel=${kernel:-$VMFORK_KERNEL}
mkdir -p "$VMFORK_OUT/kernel"
cd "$VMFORK_OUT/kernel"
deb=$(apt-get -qq --print-uris download "$kernel" | awk '{ print $2; exit }')
# apt takes a file that is there already, if its checksum is right.
if [ -e "$VMFORK_ARCHIVES/$deb" ]; then cp "$VMFORK_ARCHIVES/$deb" .; fi
apt-get -o APT::Sandbox::User=root download "$kernel"

for file in "$root"/var/cache/apt/archives/*.deb "$deb"; do
	[ -e "$file" ] || continue
	cp "$file" "$VMFORK_ARCHIVES/.new-$$"
	mv "$VMFORK_ARCHIVES/.new-$$" "$VMFORK_ARCHIVES/$(basename "$file")"
done
