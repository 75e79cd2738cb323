#!/bin/sh
# Runs every fuzz target for some seconds: fuzz/smoke.sh [SECONDS]
#
# With a nightly toolchain and a C++ compiler by libFuzzer, under AddressSanitizer; without, on
# stable, by mutating seeds at random. VMFORK_FUZZ_STABLE=1 asks for the latter.
# A failing input is kept in fuzz/artifacts/TARGET/.
set -eu
cd "$(dirname "$0")"

seconds=${1:-5}
target_dir=${CARGO_TARGET_DIR:-$PWD/target}
triple=$(rustc -vV | sed -n 's/^host: //p')

say() { printf '%s\n' "$*" >&2; }

# A run still there so long after its time hangs; machines under load are slow.
hang_s=120

# bounded SECONDS PROGRAM…: in this group of processes; in one of its own the terminal's Ctrl-C
# would not reach it.
bounded() {
    bound_s=$(($1 + hang_s))
    shift
    timeout --foreground --kill-after=5 "$bound_s" "$@" || {
        say "ended with $?; 124 and 137 mean stopped after $bound_s s"
        return 1
    }
}

# `random` writes the seeds and lists the targets, whatever runs them.
cargo build --quiet --bin random --target-dir "$target_dir/stable"
random=$target_dir/stable/debug/random
"$random" seeds corpus

if [ "${VMFORK_FUZZ_STABLE:-}" != 1 ] && cargo +nightly --version >/dev/null 2>&1 &&
    command -v c++ >/dev/null; then
    say "fuzz: libFuzzer, ${seconds} s a target"
    coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    coverage="$coverage -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
    coverage="$coverage -Cllvm-args=-sanitizer-coverage-pc-table"
    coverage="$coverage -Cllvm-args=-sanitizer-coverage-trace-compares"
    # With --target, the flags do not reach build scripts.
    RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 $coverage" \
        cargo +nightly build --quiet --release -p vmfork-fuzz --features libfuzzer --config profile.release.debug-assertions=true \
        --config profile.release.overflow-checks=true --target "$triple" --target-dir "$target_dir/nightly"
    run() {
        mkdir -p "artifacts/$1" "corpus/$1"
        bounded "$2" "$target_dir/nightly/$triple/release/$1" "corpus/$1" -max_total_time="$2" \
            -rss_limit_mb=1024 -timeout=10 -verbosity=0 -print_final_stats=1 \
            -artifact_prefix="artifacts/$1/"
    }
else
    say "fuzz: no nightly toolchain or no C++ compiler (or told so): at random, ${seconds} s a target"
    run() { bounded "$2" "$random" run "$1" "$2"; }
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# On a signal dash goes without the trap above.
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# First that a bug would be found at all.
if run planted 60 >"$log" 2>&1; then
    say "fuzz: the planted bug was not found; the fuzzer does not work:"
    cat "$log" >&2
    exit 1
fi
if ! grep -q planted "$log"; then
    say "fuzz: the planted bug's target failed for another reason:"
    cat "$log" >&2
    exit 1
fi
rm -rf artifacts/planted corpus/planted

failed=0
for target in $("$random" targets); do
    [ "$target" = planted ] && continue
    if run "$target" "$seconds" >"$log" 2>&1; then
        say "fuzz: $target passes ($(sed -n 's/.*number_of_executed_units: *//p; s/.*: \([0-9]* inputs\).*/\1/p' "$log"))"
    else
        say "fuzz: $target FAILED:"
        cat "$log" >&2
        failed=1
    fi
done
exit "$failed"
