#!/bin/sh
# Ends what a killed daemon of this state folder left: processes, cgroups, mounts. Nothing of
# another's. mk/leftovers.sh [CGROUPS]: where the cgroup hierarchy is.
. "$(dirname "$0")/env.sh"

cgroups=${1:-/sys/fs/cgroup}/vmfork
# The daemon writes it so, whatever it was told.
state=$(realpath -m "$VMFORK_STATE")

lines() { { tr '\0' '\n' <"$1" || true; } 2>/dev/null; }

# A process that a daemon started has the folder in its environment, and so has the daemon's holder.
# It is exactly that folder, and none below or beside it. A daemon has it in its command line, or
# else in its environment.
is_ours() {
	lines "$1/environ" | grep -qxF -e "VMFORK_OWNER=$state" -e "VMFORK_HOLDER=$state" && return
	is_daemon "$1" || return
	if lines "$1/cmdline" | grep -q '^--state'; then
		lines "$1/cmdline" | grep -qxF -e "$state" -e "--state=$state" \
			-e "$VMFORK_STATE" -e "--state=$VMFORK_STATE"
	else
		lines "$1/environ" | grep -qxF -e "VMFORK_STATE=$state" -e "VMFORK_STATE=$VMFORK_STATE"
	fi
}

is_daemon() {
	case $(readlink "$1/exe" 2>/dev/null || true) in
	*/vmforkd | */'vmforkd (deleted)') ;;
	*) return 1 ;;
	esac
}

other_daemons=0
killed=
for process in /proc/[0-9]*; do
	if is_ours "$process"; then
		kill -KILL "${process#/proc/}" 2>/dev/null || true
		killed="$killed $process"
	elif is_daemon "$process"; then
		other_daemons=1
	fi
done
# Those that have gone, and those that only their parent still has to wait for.
for process in $killed; do
	for _ in $(seq 100); do
		lines "$process/cmdline" | grep -q . || break
		sleep 0.1
	done
done

# A VM's cgroup bears its id, as its folder does. The kernel removes empty ones only.
for vm in "$state"/vms/*/; do
	rmdir "$cgroups/vm-$(basename "$vm")" 2>/dev/null || true
done
# Another daemon would miss it.
if [ "$other_daemons" = 0 ]; then rmdir "$cgroups" 2>/dev/null || true; fi

# Mounts below the state folder, innermost first. The daemon unmounts its own; this is for one that
# died.
awk '{ print $5 }' /proc/self/mountinfo | grep -F "$state/" | sort -r | while read -r mount; do
	umount "$mount"
done
