#!/bin/sh
# mk/share-host.sh PROGRAM…: runs it while no black-box test has the host for itself (pytest's mark
# `alone`, tests/conftest.py). Cargo calls it for each test program that runs beside those tests.
locks=$(dirname "$0")/../.cache/test-locks
mkdir -p "$locks"
# At the gate waits a test that wants the host for itself: it goes first. What the program starts
# does not keep the lock.
flock --shared "$locks/gate" true
case $1 in
*/build_and_boot-*)
	if [ -z "${VMFORK_TEST_ALL:-}" ]; then
		echo "slow, left out: two builds of an image; VMFORK_TEST_ALL=1 runs them" >&2
		exit
	fi
	;;
esac
exec flock --shared --close "$locks/host" "$@"
