#!/bin/sh
# Rust is not installed by us, only looked at: a clear word instead of a strange compile error.
. "$(dirname "$0")/env.sh"

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
how="install Rust $wanted or newer, for instance with rustup (https://rustup.rs): rustup toolchain install stable"

command -v cargo >/dev/null 2>&1 || die "cargo is not installed (looked in PATH and ~/.cargo/bin)" "$how"
command -v rustc >/dev/null 2>&1 || die "rustc is not installed (looked in PATH and ~/.cargo/bin)" "$how"
found=$(rustc --version | sed -n 's/^rustc \([0-9]*\.[0-9]*\).*/\1/p')
[ -n "$found" ] || die "rustc does not tell its version: $(rustc --version 2>&1 | head -n 1)" "$how"
oldest=$(printf '%s\n%s\n' "$found" "$wanted" | sort -V | head -n 1)
[ "$oldest" = "$wanted" ] || die "rustc $found is too old, vmfork needs $wanted" "$how"
target=x86_64-unknown-linux-gnu
libdir=$(rustc --print target-libdir --target "$target" 2>/dev/null || true)
[ -d "$libdir" ] || die "Rust's standard library for $target is missing" "rustup target add $target"
