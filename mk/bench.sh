#!/bin/sh
# The benchmark, with the default image.
. "$(dirname "$0")/env.sh"

mk/image.sh default
PYTHONPATH=$ROOT/sdk/python/src PATH=$OUT/bin:$PATH
export PYTHONPATH PATH
exec "$PYTHON" -m bench "$@"
