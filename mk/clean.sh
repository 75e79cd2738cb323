#!/bin/sh
# Leaves nothing on the machine but the checkout and its downloads.
. "$(dirname "$0")/env.sh"

if [ -S "$VMFORK_SOCKET" ] && [ -x "$OUT/bin/vmfork" ]; then
	step "stopping vmforkd" "$OUT/bin/vmfork" daemon stop --force || true
fi
# VMs that a killed daemon left: known by the state folder in their command line or environment.
for process in /proc/[0-9]*; do
	case $(readlink "$process/exe" 2>/dev/null || true) in
	*/qemu-system-* | */vmforkd) ;;
	*) continue ;;
	esac
	if cat "$process/cmdline" "$process/environ" 2>/dev/null | tr '\0' '\n' | grep -qF "$VMFORK_STATE/"; then
		kill -KILL "${process#/proc/}" 2>/dev/null || true
	fi
done
# Mounts below the state folder, innermost first. The daemon unmounts its own; this is for one that died.
awk '{ print $5 }' /proc/self/mountinfo | grep -F "$VMFORK_STATE/" | sort -r | while read -r mount; do
	umount "$mount"
done
case $VMFORK_STATE in
/var/lib/vmfork-dev/?* | "$ROOT"/?*)
	rm -rf "$VMFORK_STATE"
	rmdir /var/lib/vmfork-dev 2>/dev/null || true
	;;
*) echo "kept: VMFORK_STATE=$VMFORK_STATE, which is not this checkout's own" >&2 ;;
esac
rm -rf "$OUT"
if command -v cargo >/dev/null 2>&1; then cargo clean --quiet; else rm -rf "$TARGET"; fi
rm -rf "$CACHE/test-images" "$CACHE/test-programs" "$CACHE/mypy" "$CACHE/ruff"
find . -name __pycache__ -type d -prune -exec rm -rf {} +
