#!/bin/sh
# Run by mmdebstrap outside of the new root ($1): gives apt what earlier builds downloaded.
set -eu
# Manual pages are left out, but some packages (Java's) can't be installed without the folders.
for section in 1 2 3 4 5 6 7 8; do
	mkdir -p "$1/usr/share/man/man$section"
done
mkdir -p "$1/var/cache/apt/archives"
for deb in "$VMFORK_ARCHIVES"/*.deb; do
	[ -e "$deb" ] || continue
	cp "$deb" "$1/var/cache/apt/archives/"
done
