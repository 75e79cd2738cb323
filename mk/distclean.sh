#!/bin/sh
# What `make clean` keeps because it was downloaded.
. "$(dirname "$0")/env.sh"
rm -rf "$CACHE"
