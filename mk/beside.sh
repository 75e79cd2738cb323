#!/bin/sh
# What runs beside Rust's tests, which mostly wait. mk/test.sh starts it in a process group of its
# own, to end all of it at once.
. "$(dirname "$0")/env.sh"

guest_image() { (cd tests && PYTHONPATH=../sdk/python/src "$PYTHON" -c 'from harness import images; images.build()'); }

documentation() { RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --quiet; }

# The lock-free parts in all orders of their steps.
loom() {
	RUSTFLAGS='--cfg loom' \
		cargo test --quiet -p vmfork-engine -p vmfork-tap --lib loom --target-dir "$TARGET/loom"
}

step "guest image" guest_image
step "documentation" documentation
step "model checker" loom
