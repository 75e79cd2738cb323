#!/bin/sh
# The demonstration: a guest image with a real data set, a daemon, and the job.
. "$(dirname "$0")/env.sh"

mk/image.sh demo
step "starting vmforkd" "$OUT/bin/vmfork" daemon start
PYTHONPATH=$ROOT/sdk/python/src PATH=$OUT/bin:$PATH
export PYTHONPATH PATH
exec python3 examples/demo.py "$@"
