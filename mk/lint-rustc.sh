#!/bin/bash
# A rustc that lints with clippy while it builds. cargo calls it for the workspace's own crates, by
# RUSTC_WORKSPACE_WRAPPER. It is bash, because dash drops CARGO_BIN_EXE_vmfork-agent and other
# names with a hyphen from the environment.
exec clippy-driver "$@" -D warnings
