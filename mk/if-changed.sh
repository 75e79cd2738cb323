#!/bin/sh
# mk/if-changed.sh PROGRAM…: runs a test program, unless the same one has passed with the same
# arguments, in the same checkout and machine. `make clean` forgets what has passed.
#
# Cargo calls it for tests whose result follows from that alone. A test with VMs runs each time.
. "$(dirname "$0")/env.sh"

inputs=$(mktemp)
trap 'rm -f "$inputs"' EXIT
if { printf '%s\0' "$@" && cat "$1" && test_inputs; } >"$inputs"; then
	key=$(sha256sum <"$inputs" | cut -d ' ' -f 1)
else
	key=
fi
passed=$TARGET/test-passed/$key
if [ -n "$key" ] && [ -e "$passed" ]; then
	echo "unchanged since it passed: ${1##*/}" >&2
	exit 0
fi
# Cargo has chosen the folder that tests expect.
cd "${CARGO_MANIFEST_DIR:-.}"
"$@"
if [ -n "$key" ]; then
	mkdir -p "${passed%/*}"
	: >"$passed"
fi
