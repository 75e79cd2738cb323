#!/bin/bash
# A rustc that lints with clippy while it builds. Then rustdoc reads the same crate: `cargo doc`
# would check all dependencies once more. Cargo calls this for the workspace's own crates, by
# RUSTC_WORKSPACE_WRAPPER. It is bash, because dash drops CARGO_BIN_EXE_vmfork-agent and other names
# with a hyphen from the environment.
set -eu

case " $* " in
# Tests run for seconds, and optimising them takes minutes. The crates that they test as their
# dependencies are optimised as Cargo.toml says.
*" --test "*) exec clippy-driver "$@" -D warnings -C opt-level=0 ;;
# Build scripts, and what cargo asks about rustc.
*" --crate-name ___ "* | *" --crate-name build_script_"*) exec clippy-driver "$@" -D warnings ;;
*" --crate-name "*) clippy-driver "$@" -D warnings ;;
*) exec clippy-driver "$@" -D warnings ;;
esac

# What rustdoc takes of a rustc's arguments. Each crate has a folder of its own, since several at a
# time would write the same search index.
shift
kept=(-D warnings)
while [ "$#" -gt 0 ]; do
	case $1 in
	--emit=*) ;;
	--out-dir)
		kept+=(--out-dir "$2/../lint-doc/$CARGO_CRATE_NAME")
		shift
		;;
	--crate-type)
		kept+=("$1" "$2")
		[ "$2" = lib ] || kept+=(--document-private-items -A rustdoc::private-intra-doc-links)
		shift
		;;
	*) kept+=("$1") ;;
	esac
	shift
done
exec rustdoc "${kept[@]}"
