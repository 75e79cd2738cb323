#!/bin/sh
# mk/schemathesis.sh [SEED]: compares what vmforkd does with docs/openapi.json, by requests made
# from that.
#
# schemathesis sends valid and invalid requests to a daemon and checks each reply against the
# document. The daemon has an empty state folder and a network namespace of its own. schemathesis
# prints its seed; the same seed makes the same requests. VMFORK_EXAMPLES: requests per operation
# when fuzzing (default 50). Needs root and, the first time, PyPI: without one of them it says so
# and ends well.
. "$(dirname "$0")/env.sh"

left_out() {
	echo "left out: schemathesis, so the API against its document too: $1" >&2
	exit 0
}

# The folder has the version, so that another one is installed again.
version=4.32.5
tool=$CACHE/schemathesis-$version
[ "$(id -u)" = 0 ] || left_out "the daemon needs root"
[ -x "${VMFORK_OUT:-$OUT}/bin/vmforkd" ] || die "there is no ${VMFORK_OUT:-$OUT}/bin/vmforkd" "make build"
if [ ! -x "$tool/bin/schemathesis" ]; then
	# Whole or not at all: what was half installed is made again.
	rm -rf "$tool" "$tool.new"
	"$PYTHON" -m venv "$tool.new" || left_out "no venv (apt-get install python3-venv)"
	"$tool.new/bin/pip" install --quiet --disable-pip-version-check --requirement mk/schemathesis.txt ||
		left_out "PyPI cannot be reached"
	# Its scripts name the old folder; `python -m` works in the new one.
	mv "$tool.new" "$tool"
fi

if [ -z "${VMFORK_SCHEMATHESIS_WORK:-}" ]; then
	# Not below the checkout: the users of QEMU could not reach it.
	VMFORK_SCHEMATHESIS_WORK=$(mktemp -d /tmp/vmfork-schemathesis.XXXXXX)
	export VMFORK_SCHEMATHESIS_WORK
	trap 'rmdir "$VMFORK_SCHEMATHESIS_WORK"' EXIT
	trap 'exit 130' INT TERM
	unshare --net --mount --pid --mount-proc --fork --kill-child "$0" "$@"
	exit
fi

seed=${1:-$(date +%s)}
port=7070
work=$VMFORK_SCHEMATHESIS_WORK
daemon=
clean_up() {
	[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
	[ -z "$daemon" ] || wait "$daemon" || true
}
trap clean_up EXIT
trap 'exit 130' INT TERM

ip link set lo up
# Requests name folders of the host: the daemon can write to none but its own.
mount -t tmpfs -o size=512M,mode=0755 tmpfs "$work"
mount -o remount,bind,ro /
mkdir "$work/state"
umask 077
echo 0123456789abcdef0123456789abcdef >"$work/token"
# No request reaches a real store: there is no network, and the endpoint refuses at once.
AWS_ENDPOINT_URL=http://127.0.0.1:9 AWS_ALLOW_HTTP=true AWS_ACCESS_KEY_ID=none AWS_SECRET_ACCESS_KEY=none \
	"${VMFORK_OUT:-$OUT}/bin/vmforkd" --state "$work/state" --socket "$work/state/vmforkd.sock" --listen "127.0.0.1:$port" --token-file "$work/token" --pool 0 \
	2>"$work/log" &
daemon=$!

echo "seed $seed (again: mk/schemathesis.sh $seed)" >&2
status=0
cd "$work"
export SCHEMATHESIS_HOOKS="$ROOT/mk/schemathesis_hooks.py"
"$tool/bin/python" -m schemathesis.cli --config-file "$ROOT/mk/schemathesis.toml" run "$ROOT/docs/openapi.json" \
	--url "http://127.0.0.1:$port" --header "Authorization: Bearer $(cat "$work/token")" \
	--wait-for-schema 10 --phases coverage,fuzzing --seed "$seed" \
	--max-examples "${VMFORK_EXAMPLES:-50}" --continue-on-failure --request-timeout 60 --no-color || status=$?
if grep -q 'panicked' "$work/log"; then
	grep -A 5 'panicked' "$work/log" >&2
	echo "error: vmforkd panicked" >&2
	status=1
fi
if ! kill -0 "$daemon" 2>/dev/null; then
	tail -n 20 "$work/log" >&2
	echo "error: vmforkd ended" >&2
	status=1
fi
[ "$status" = 0 ] || echo "again: mk/schemathesis.sh $seed" >&2
exit "$status"
