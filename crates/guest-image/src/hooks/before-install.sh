#!/bin/sh
# Run by mmdebstrap outside of the new root ($1): gives apt what earlier builds downloaded.
set -eu
mkdir -p "$1/var/cache/apt/archives"
for deb in "$VMFORK_ARCHIVES"/*.deb; do
	[ -e "$deb" ] || continue
	cp "$deb" "$1/var/cache/apt/archives/"
done
