#!/bin/sh
# Builds what tests file systems inside guests, into .cache: fsx and pjdfstest, for
# tests/test_disk_programs.py. Once there, no network is needed. Where they can't be built it says
# so, and those tests are left out.
. "$(dirname "$0")/env.sh"

fsx=0.3.2
pjdfstest=0.2.2
to=$CACHE/guest-programs-$fsx-$pjdfstest
[ ! -x "$to/bin/pjdfstest" ] || exit 0

# Whole or not at all: the folder is renamed at the end.
rm -rf "$to.new"
if cargo install --quiet --locked --no-track --root "$to.new" --target-dir "$to.new/target" "fsx@$fsx" "pjdfstest@$pjdfstest"; then
	rm -rf "$to.new/target" "$to"
	mv "$to.new" "$to"
else
	rm -rf "$to.new"
	printf 'left out: fsx and pjdfstest, so the tests of file systems by them too\n' >&2
fi
