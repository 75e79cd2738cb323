#!/bin/sh
# The demonstration: a guest image with a real data set, and a real job on the clones of a VM.
# Options are those of examples/demo.py.
. "$(dirname "$0")/env.sh"

[ "$(id -u)" = 0 ] || die "the demonstration starts VMs, which only root may" "run it as root: sudo make demo"
# Another daemon that the user works with is not meant.
unset VMFORK_HOST VMFORK_TOKEN
# All clones of the demonstration in QEMUs that wait.
: "${VMFORK_POOL:=8}"
PYTHONPATH=$ROOT/sdk/python/src PATH=$OUT/bin:$PATH PYTHONDONTWRITEBYTECODE=1
export VMFORK_POOL PYTHONPATH PATH PYTHONDONTWRITEBYTECODE

mk/image.sh demo
say "a real job on the clones of a running VM"
# Debian's Python, for which the packages are: another may come first in PATH.
exec "$PYTHON" examples/demo.py --output "$OUT/demo.sam" "$@"
