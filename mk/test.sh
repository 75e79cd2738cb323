#!/bin/sh
# Everything: the quick part, then what takes a kernel, a guest or the network, then the built
# programs from outside. pytest's arguments may be given.
. "$(dirname "$0")/env.sh"

VMFORK_TEST_CACHE=$VMFORK_CACHE
export VMFORK_TEST_CACHE

guest_library() {
	if grep -q '^check:' guest/c/Makefile 2>/dev/null; then
		make --no-print-directory -C guest/c check BUILD="$TARGET/guest-c"
	fi
	if [ -d guest/python/tests ]; then
		(cd guest/python && "$PYTHON" -m pytest -q -p no:cacheprovider tests)
	fi
}

# The lock-free parts in all orders of their steps. Other flags: a folder of its own.
loom() {
	RUSTFLAGS='--cfg loom' \
		cargo test --quiet -p vmfork-engine -p vmfork-tap --lib loom --target-dir "$TARGET/loom"
}

# So many seconds for each target: enough to see that it runs and that old findings stay mended. On the
# stable toolchain, with seeds mutated at random, so that it is the same everywhere.
FUZZ_SECONDS=3
fuzz() {
	VMFORK_FUZZ_STABLE=1 CARGO_TARGET_DIR=$TARGET/fuzz fuzz/smoke.sh "$FUZZ_SECONDS"
}

# Without a network and without the packages its tests are skipped, and counted as such; or fail, if they must not be.
other_qemu() {
	mk/qemu-backports.sh && return
	[ -z "${VMFORK_TEST_STRICT:-}" ] || die "the packages of bookworm-backports' QEMU are missing"
	echo "left out: the tests of bookworm-backports' QEMU" >&2
}

# The same of the S3 server, which takes Go to build.
s3_server() {
	mk/versitygw.sh
	if [ -n "${VMFORK_TEST_STRICT:-}" ] && ! ls -d "$CACHE"/versitygw-v*/versitygw >/dev/null 2>&1; then
		die "versitygw is missing" "mk/versitygw.sh says why"
	fi
}

documentation() { RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet; }

# The tests' own store shares the downloads.
mkdir -p "$CACHE/test-images" "$VMFORK_CACHE"
[ -e "$CACHE/test-images/cache" ] || ln -s "$VMFORK_CACHE" "$CACHE/test-images/cache"

began=$(date +%s)
mk/check.sh
step "S3 server" s3_server
# Without backtraces: a handler that panics on purpose would bury what failed.
step "integration tests" env RUST_BACKTRACE=0 cargo test --workspace --quiet --test '*' -- --nocapture
step "documentation" documentation
step "guest library" guest_library
step "model checker" loom
step "fuzzing" fuzz
step "QEMU of bookworm-backports" other_qemu
step "black box tests" "$PYTHON" -m pytest -p no:cacheprovider tests "$@"
say "all tests passed in $(($(date +%s) - began)) s"
