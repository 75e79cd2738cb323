#!/bin/sh
# All tests: the quick part, then what takes a kernel or a guest, then the built programs from
# outside. Arguments go to pytest. mk/soak.sh has the long tests.
. "$(dirname "$0")/env.sh"

VMFORK_TEST_CACHE=$VMFORK_CACHE
VMFORK_OUT=$TEST_OUT
VMFORK_TEST_TIMES=$TIMES/black-box.json
export VMFORK_TEST_CACHE VMFORK_OUT VMFORK_TEST_TIMES

guest_library() { make --no-print-directory -C guest/c check BUILD="$TARGET/guest-c"; }

# Without backtraces: a handler that panics on purpose would bury what failed.
integration() { RUST_BACKTRACE=0 tests_cargo --test '*' -- --nocapture; }

# The lock-free parts in all orders of their steps.
loom() {
	RUSTFLAGS='--cfg loom' \
		cargo test --quiet -p vmfork-engine -p vmfork-tap --lib loom --target-dir "$TARGET/loom"
}

documentation() { RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet; }

guest_image() { (cd tests && PYTHONPATH=../sdk/python/src "$PYTHON" -c 'from harness import images; images.build()'); }

# Runs beside Rust's tests, which mostly wait.
beside() {
	step "guest image" guest_image
	step "documentation" documentation
	step "model checker" loom
}
join_beside() {
	wait "$beside" && return
	cat "$TIMES/beside.log" >&2
	die "the guest image, the documentation or the model checker failed" "read the words above"
}

black_box() { "$PYTHON" -m pytest -p no:cacheprovider -n 2 --dist loadgroup --durations=40 tests "$@"; }

began=$(date +%s)
rm -rf "$TIMES"
# The tests' own store shares the downloads.
mkdir -p "$TIMES" "$CACHE/test-images" "$VMFORK_CACHE"
[ -e "$CACHE/test-images/cache" ] || ln -s "$VMFORK_CACHE" "$CACHE/test-images/cache"

mk/build.sh tests
beside >"$TIMES/beside.log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mk/check.sh
step "integration tests" integration
step "guest library" guest_library
step "guest image, documentation and model checker, what is left of them" join_beside
trap - EXIT
step "black box tests" black_box "$@"
say "all tests passed in $(($(date +%s) - began)) s; the time of each step and test: ${TIMES#"$ROOT/"}/"
cat "$TIMES/steps" >&2
