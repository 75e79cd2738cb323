#!/bin/bash
# rustc with clippy in it: one pass lints and builds. cargo calls it for the workspace's own crates, by
# RUSTC_WORKSPACE_WRAPPER. bash: dash drops variables like CARGO_BIN_EXE_vmfork-agent from the environment.
exec clippy-driver "$@" -D warnings
