#!/bin/sh
# All tests: the quick part, then the built programs from outside; beside them what takes a kernel
# or a guest (mk/beside.sh). Arguments go to pytest. mk/soak.sh has the long tests.
#
#   VMFORK_TEST_ALL=1        run also slow tests, and what has passed with the same inputs. CI does.
. "$(dirname "$0")/env.sh"

VMFORK_TEST_CACHE=$VMFORK_CACHE
VMFORK_OUT=$TEST_OUT
VMFORK_TEST_TIMES=$TIMES/black-box.json
export VMFORK_TEST_CACHE VMFORK_OUT VMFORK_TEST_TIMES

guest_library() { make --no-print-directory -C guest/c check BUILD="$TARGET/guest-c"; }

join_beside() {
	wait "$beside" && return
	cat "$TIMES/beside.log" >&2
	die "what ran beside the black-box tests failed" "read the words above"
}

end_beside() {
	if [ -e "$TIMES/beside.rc" ]; then
		[ "$(cat "$TIMES/beside.rc")" = 0 ] || cat "$TIMES/beside.log" >&2
	else
		say "not finished: what ran beside the other tests"
	fi
	# Until it has begun its own process group, there is only the one process.
	kill -- -"$beside" 2>/dev/null || kill "$beside" 2>/dev/null || true
	wait "$beside" || true
}

# What the black-box tests depend on; nothing if that can't be told.
black_box_inputs() {
	told=$(mktemp)
	{
		(cd "$TEST_OUT" && find . ! -type d -print0 | sort -z | xargs -0 sha256sum) &&
			cat "$CACHE/test-images/images/"*/image.json && test_inputs ':!tests/test_*.py'
	} >"$told" && sha256sum <"$told" | cut -d ' ' -f 1
	rm -f "$told"
}

# Without arguments, what has passed with the same programs, files and host is not run again.
skip_unchanged() {
	VMFORK_TEST_PASSED=$TARGET/test-passed/black-box
	export VMFORK_TEST_PASSED
	[ "$#" = 0 ] && [ -z "${VMFORK_TEST_ALL:-}${VMFORK_TEST_SEED:-}${PYTEST_ADDOPTS:-}" ] || return 0
	VMFORK_TEST_INPUTS=$(black_box_inputs)
	export VMFORK_TEST_INPUTS
}

# Something has changed while they ran.
forget_changed() {
	[ -n "${VMFORK_TEST_INPUTS:-}" ] || return 0
	began_with=$VMFORK_TEST_INPUTS
	unset VMFORK_TEST_INPUTS
	[ "$(black_box_inputs)" = "$began_with" ] || rm -rf "$TARGET/test-passed/black-box"
}

black_box() {
	# Who names tests means all of them.
	[ "$#" != 0 ] || [ -n "${VMFORK_TEST_ALL:-}" ] || set -- -m "not soak and not slow"
	"$PYTHON" -m pytest -p no:cacheprovider -n 3 --dist loadgroup --durations=40 tests "$@"
}

began=$(date +%s)
rm -rf "$TIMES"
# The tests' own store shares the downloads.
mkdir -p "$TIMES" "$CACHE/test-images" "$VMFORK_CACHE"
[ -e "$CACHE/test-images/cache" ] || ln -s "$VMFORK_CACHE" "$CACHE/test-images/cache"

mk/build.sh tests
# Not by `set -m`, which takes a terminal. A shell without one lets what it starts in the background
# ignore Ctrl-C.
setsid mk/beside.sh >"$TIMES/beside.log" 2>&1 &
beside=$!
trap end_beside EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mk/check.sh
step "guest library" guest_library
# Tests that compare what image builds leave behind must not see this one.
flock "$CACHE/test-images/lock" true
skip_unchanged "$@"
step "black box tests" black_box "$@"
forget_changed
step "what is left of the integration tests" join_beside
trap - EXIT
[ -n "${VMFORK_TEST_ALL:-}" ] || say "slow tests were left out; VMFORK_TEST_ALL=1 make test runs them"
say "all tests passed in $(($(date +%s) - began)) s; the time of each step and test: ${TIMES#"$ROOT/"}/"
cat "$TIMES/steps" >&2
