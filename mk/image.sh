#!/bin/sh
# mk/image.sh NAME: builds the guest image of guest/image/NAME.json, unless it is there already.
. "$(dirname "$0")/env.sh"

# Below the state folder, where the build looks, but kept by `make clean`.
mkdir -p "$VMFORK_STATE" "$VMFORK_CACHE"
[ -e "$VMFORK_STATE/cache" ] || ln -s "$VMFORK_CACHE" "$VMFORK_STATE/cache"
step "guest image $1" "$OUT/bin/vmfork" image build "$1" --spec "$OUT/lib/vmfork/images/$1.json"
