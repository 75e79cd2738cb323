#!/bin/sh
# mk/build.sh [tests]: builds everything and lays it out as an installation would. With `tests` the
# programs are those of the tests' profile, in target/out in place of out.
#
#   out/bin/{vmfork,vmforkd}
#   out/lib/vmfork/libvmfork_tap.so   preloaded into QEMU
#   out/lib/vmfork/vmfork-agent       static; /init of guest images
#   out/lib/vmfork/vmfork-holder      keeps the daemon's sockets while it restarts
#   out/lib/vmfork/guest/             laid over the root of guest images: C library, Python module
#   out/lib/vmfork/images/*.json      specs of guest images
#
# The programs find the rest at ../lib/vmfork from themselves, or where VMFORK_LIBDIR says.
. "$(dirname "$0")/env.sh"

if [ "${1:-}" = tests ]; then
	OUT=$TEST_OUT
	built=$TARGET/debug
	programs() { tests_cargo --all-targets --no-run; }
else
	built=$TARGET/release
	programs() { cargo build --release -p vmfork-daemon -p vmfork-cli -p vmfork-holder; }
fi

triple=x86_64-unknown-linux-gnu
lib=$OUT/lib/vmfork
guest=$lib/guest

# place MODE FILE TO: whole or not at all, also while the old one runs.
place() {
	mkdir -p "$(dirname "$3")"
	cmp -s "$2" "$3" && return
	install -m "$1" "$2" "$3.new"
	mv "$3.new" "$3"
}

shim() { cargo build --profile tap -p vmfork-tap; }
# --target keeps RUSTFLAGS away from build scripts; a folder of its own keeps the rest from being
# built again each time.
agent() {
	RUSTFLAGS='-C target-feature=+crt-static' \
		cargo build --profile guest --target "$triple" -p vmfork-agent --target-dir "$TARGET/guest"
}

step "programs" programs
step "shim" shim
step "guest agent" agent
place 755 "$built/vmfork" "$OUT/bin/vmfork"
place 755 "$built/vmforkd" "$OUT/bin/vmforkd"
place 644 "$TARGET/tap/libvmfork_tap.so" "$lib/libvmfork_tap.so"
place 755 "$built/vmfork-holder" "$lib/vmfork-holder"
place 755 "$TARGET/guest/$triple/guest/vmfork-agent" "$lib/vmfork-agent"
for spec in guest/image/*.json; do
	place 644 "$spec" "$lib/images/$(basename "$spec")"
done

# The guest's folder is built again and swapped in: what was removed from the sources must go.
rm -rf "$guest.new" "$guest.old"
mkdir -p "$guest.new"
if [ -f guest/c/Makefile ]; then
	step "guest library: C" \
		make --no-print-directory -C guest/c install BUILD="$TARGET/guest-c" DESTDIR="$guest.new" \
		PREFIX=/usr LIBDIR=/usr/lib/x86_64-linux-gnu
fi
packages=$guest.new/usr/lib/python3/dist-packages
mkdir -p "$packages"
for source in guest/python guest/python/src; do
	for module in "$source"/*.py "$source"/*/__init__.py; do
		[ -f "$module" ] || continue
		case $module in
		*/tests/* | */test_*.py | */conftest.py | */setup.py) ;;
		*/__init__.py) cp -R "$(dirname "$module")" "$packages/" ;;
		*) cp "$module" "$packages/" ;;
		esac
	done
done
find "$packages" -name __pycache__ -prune -exec rm -rf {} +
# Compiled here rather than by every VM; never checked, since the image is read-only.
"$PYTHON" -m compileall -q --invalidation-mode unchecked-hash -s "$guest.new" "$packages"
find "$guest.new" -type d -exec chmod 755 {} +
if [ -d "$guest" ]; then mv "$guest" "$guest.old"; fi
mv "$guest.new" "$guest"
rm -rf "$guest.old"
