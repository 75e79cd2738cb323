#!/bin/sh
# The long tests: ten times the repetitions and cases, the long black-box tests, long fuzzing. They
# add a real S3 server, a second QEMU, and the API against its document. mk/test.sh has one small
# case of each.
#
#   VMFORK_TEST_SEED=N       repeat the run that printed this seed
#   VMFORK_SOAK_MINUTES=N    begin new rounds, each with the next seed, for N minutes.
#                            0, the default, is one round.
. "$(dirname "$0")/env.sh"

TIMES=$TARGET/soak-times
: "${VMFORK_SOAK_MINUTES:=0}"
: "${VMFORK_TEST_SEED:=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"
VMFORK_SOAK=10
VMFORK_TEST_CACHE=$VMFORK_CACHE
VMFORK_OUT=$TEST_OUT
# What fails here is run again by mk/test.sh.
VMFORK_TEST_PASSED=$TARGET/test-passed/black-box
export VMFORK_TEST_SEED VMFORK_SOAK VMFORK_TEST_CACHE VMFORK_OUT VMFORK_TEST_PASSED

FUZZ_SECONDS=60
# proptest's own default is 256.
PROPTEST_CASES=2560
export PROPTEST_CASES

# Where they can't be had, their tests are skipped by name; with VMFORK_TEST_STRICT=1 they fail.
s3_server() { mk/versitygw.sh; }
other_qemu() { mk/qemu-backports.sh || echo "left out: the tests of bookworm-backports' QEMU" >&2; }
unit() { PROPTEST_RNG_SEED=$VMFORK_TEST_SEED tests_cargo --lib --bins; }
integration() { PROPTEST_RNG_SEED=$VMFORK_TEST_SEED RUST_BACKTRACE=0 tests_cargo --test '*' -- --nocapture; }
fuzz() { CARGO_TARGET_DIR=$TARGET/fuzz fuzz/smoke.sh "$FUZZ_SECONDS"; }
api() { mk/schemathesis.sh "$VMFORK_TEST_SEED"; }
black_box() {
	VMFORK_TEST_TIMES=$TIMES/black-box-$VMFORK_TEST_SEED.json \
		"$PYTHON" -m pytest -p no:cacheprovider -n 2 --dist loadgroup --durations=40 \
		-m "soak or not soak" tests "$@"
}

rm -rf "$TIMES"
mkdir -p "$TIMES" "$CACHE/test-images" "$VMFORK_CACHE"
[ -e "$CACHE/test-images/cache" ] || ln -s "$VMFORK_CACHE" "$CACHE/test-images/cache"
began=$(date +%s)
step "S3 server" s3_server
step "QEMU of bookworm-backports" other_qemu
step "fsx and pjdfstest" mk/guest-programs.sh
mk/build.sh tests
rounds=0
while :; do
	say "a round with VMFORK_TEST_SEED=$VMFORK_TEST_SEED"
	step "unit tests" unit
	step "integration tests" integration
	step "fuzzing" fuzz
	step "API against its document" api
	step "black box tests" black_box "$@"
	rounds=$((rounds + 1))
	[ $(($(date +%s) - began)) -lt $((VMFORK_SOAK_MINUTES * 60)) ] || break
	VMFORK_TEST_SEED=$((VMFORK_TEST_SEED + 1))
done
say "all passed: $rounds rounds in $(($(date +%s) - began)) s; the time of each step and test: ${TIMES#"$ROOT/"}/"
cat "$TIMES/steps" >&2
