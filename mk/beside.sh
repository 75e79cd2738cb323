#!/bin/sh
# What runs beside the unit tests and the black-box tests, which mostly wait. It has a process group
# of its own, so that mk/test.sh can end all of it at once.
. "$(dirname "$0")/env.sh"

guest_image() { (cd tests && PYTHONPATH=../sdk/python/src "$PYTHON" -c 'from harness import images; images.build()'); }

# The lock-free parts in all orders of their steps.
loom() {
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$ROOT/mk/if-changed.sh RUSTFLAGS='--cfg loom' \
		nice cargo test --quiet -p vmfork-engine -p vmfork-tap --lib loom --target-dir "$TARGET/loom"
}

# Without backtraces: a handler that panics on purpose would bury what failed.
integration() {
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$ROOT/mk/share-host.sh RUST_BACKTRACE=0 \
		tests_cargo --test '*' -- --nocapture
}

# What mk/test.sh reads if something else fails first.
trap 'echo $? >"$TIMES/beside.rc"' EXIT
step "guest image" guest_image
step "model checker" loom
step "integration tests" integration
