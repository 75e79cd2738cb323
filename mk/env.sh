# Sourced by the scripts beside it: where things are, and how to say what goes on.
# shellcheck shell=sh

set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
cd "$ROOT"

# rustup puts cargo where only a login shell looks.
if ! command -v cargo >/dev/null 2>&1 && [ -x "$HOME/.cargo/bin/cargo" ]; then
	PATH=$HOME/.cargo/bin:$PATH
	export PATH
fi

# shellcheck disable=SC2034 # used by those who source this
OUT=$ROOT/out
CACHE=$ROOT/.cache
# Debian's: the one that has the packages in mk/packages, and the version that guests have.
# shellcheck disable=SC2034
PYTHON=/usr/bin/python3
# shellcheck disable=SC2034
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
# What black-box tests run: laid out as $OUT is, with the programs of the tests' profile.
# shellcheck disable=SC2034
TEST_OUT=$TARGET/out

# A state folder of this checkout's own. Not inside it: a checkout below /root is closed to the
# unprivileged user that QEMU runs as. And the path of a unix socket has at most 107 bytes.
checkout=$(printf %s "$ROOT" | cksum | cut -d ' ' -f 1)
: "${VMFORK_STATE:=/var/lib/vmfork-dev/$checkout}"
: "${VMFORK_SOCKET:=$VMFORK_STATE/vmforkd.sock}"
# Base systems and downloaded packages outlive `make clean`.
: "${VMFORK_CACHE:=$CACHE/guest-images}"
export VMFORK_STATE VMFORK_SOCKET VMFORK_CACHE

say() { printf '\n=== %s\n' "$*" >&2; }

die() {
	printf 'error: %s\n' "$1" >&2
	shift
	for hint; do printf 'hint: %s\n' "$hint" >&2; done
	exit 1
}

# Where a test run keeps the time of each step, and pytest that of each test.
TIMES=$TARGET/test-times

# step TEXT COMMAND…: says what begins and how long it took; keeps the latter in $TIMES/steps.
step() {
	say "$1"
	step_name=$1
	shift
	step_began=$(date +%s)
	"$@"
	step_took=$(($(date +%s) - step_began))
	printf -- '--- %s s\n' "$step_took" >&2
	if [ -d "$TIMES" ]; then printf '%5s s  %s\n' "$step_took" "$step_name" >>"$TIMES/steps"; fi
}

# test_inputs [PATHSPEC…]: hashes of what tests may read besides the programs that they run. These
# are files of the checkout, but for what a pathspec excludes, and the host's kernel, packages and
# number of cores. What VMFORK_ variables say counts, too. It fails if any of that can't be told.
test_inputs() {
	listed=$(mktemp) || return 1
	{
		git ls-files -coz --exclude-standard -- . ':!*.rs' "$@" >"$listed" &&
			[ -s "$listed" ] && xargs -0 sha256sum <"$listed" &&
			uname -srvm && nproc && ls -l /dev/kvm /dev/userfaultfd 2>&1 &&
			grep MemTotal /proc/meminfo && cat /var/lib/dpkg/status &&
			env | grep '^VMFORK_' | grep -v '^VMFORK_TEST_\(CACHE\|TIMES\|PASSED\|INPUTS\)=' | sort
	} && rm -f "$listed" && return
	rm -f "$listed"
	return 1
}

# Lints, builds and checks docs in one pass: mk/lint-rustc.sh stands in for rustc. All tests go
# through here: with other flags or other packages cargo would build most of the workspace again.
tests_cargo() {
	RUSTC_WORKSPACE_WRAPPER=$ROOT/mk/lint-rustc.sh cargo test --workspace --quiet "$@"
}
