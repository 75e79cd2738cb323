#!/bin/sh
# Leaves nothing on the machine but the checkout and its downloads.
. "$(dirname "$0")/env.sh"

if [ -S "$VMFORK_SOCKET" ] && [ -x "$OUT/bin/vmfork" ]; then
	step "stopping vmforkd" "$OUT/bin/vmfork" daemon stop --force || true
fi
mk/leftovers.sh
case $VMFORK_STATE in
/var/lib/vmfork-dev/?* | "$ROOT"/?*)
	rm -rf "$VMFORK_STATE"
	rmdir /var/lib/vmfork-dev 2>/dev/null || true
	;;
*) echo "kept: VMFORK_STATE=$VMFORK_STATE, which is not this checkout's own" >&2 ;;
esac
rm -rf "$OUT"
if command -v cargo >/dev/null 2>&1; then cargo clean --quiet; else rm -rf "$TARGET"; fi
rm -rf fuzz/target
rm -rf "$CACHE/test-images" "$CACHE/test-programs" "$CACHE/mypy" "$CACHE/ruff"
find . -name __pycache__ -type d -prune -exec rm -rf {} +
