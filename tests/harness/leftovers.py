"""What a daemon may leave behind when it ends: nothing.

Several daemons run at a time, in this test process and in others. So each finding is attributed to
the daemon that left it:

- a process by the mark in its environment (`VMFORK_OWNER`, the state folder). An orphan of this
  test process without a mark counts for every daemon of it;
- a mount and a socket by its path, which is below the daemon's folder;
- a cgroup by the id of its VM, which the daemon's journal names;
- a file in /dev/shm by its owner, which is one of the users that the daemon runs QEMUs as. A new
  file of root's counts for every daemon if its name says `vmfork`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from . import processes

#: Children of ours that `subprocess` waits for; everything else that becomes our child is an
#: orphan.
started: dict[int, subprocess.Popen[bytes]] = {}

MARK = "VMFORK_OWNER"
#: Users that a daemon runs QEMUs as, from its `--qemu-uid-base` on.
UIDS = 65_536
CGROUPS = Path("/sys/fs/cgroup")


def spawn(argv: list[str], **options: object) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, known to the watch."""
    process: subprocess.Popen[bytes] = subprocess.Popen(argv, **options)  # type: ignore[call-overload]
    started[process.pid] = process
    return process


def orphans() -> list[processes.Process]:
    """Live processes below this test process that outlived who started them.

    Holders are left out: they outlive a killed daemon on purpose. `Daemon.close` asserts their end.
    """
    known = {pid for pid, process in started.items() if process.poll() is None}
    return [process for process in processes.orphans(known) if not process.is_holder]


def owner(process: processes.Process) -> str | None:
    """The state folder of the daemon that started it, as its environment tells."""
    return _variables(process.pid).get(MARK)


def _variables(pid: int) -> dict[str, str]:
    try:
        environment = (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in environment.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def processes_of(state: Path) -> list[processes.Process]:
    """Live processes that the daemon of a state folder left, and orphans here that no daemon owns
    up to."""
    # The daemon resolves the folder before it marks what it starts.
    ours = {str(state), os.path.realpath(state)}
    here = orphans()
    # Those of a daemon that runs are in use: another one may have been refused the same folder.
    in_use = {one.pid for pid, process in list(started.items()) if process.poll() is None for one in processes.below(pid)}
    live = [one for one in processes.everybody() if one.state not in "ZX" and not one.is_holder]
    marked = [one for one in live if owner(one) in ours]
    found = {one.pid: one for one in marked if one.pid not in in_use and not _is_daemon(one)}
    found.update({one.pid: one for one in here if owner(one) is None})
    return list(found.values())


def _is_daemon(process: processes.Process) -> bool:
    """A `vmforkd` is told apart: a daemon may have been started by a program that another one
    marked."""
    return process.comm == "vmforkd" and process.pid in started


@dataclass(frozen=True)
class Owned:
    """By what a daemon's leftovers are known as its own."""

    #: Its state folder and its socket are below.
    folder: Path
    uid_base: int
    vm_ids: Collection[str] = field(default_factory=frozenset)

    def has_uid(self, uid: int) -> bool:
        return self.uid_base <= uid < self.uid_base + UIDS

    def has_path(self, path: str) -> bool:
        path = path.lstrip("@")
        return path == str(self.folder) or path.startswith(f"{self.folder}/")

    def has_cgroup(self, path: str) -> bool:
        return Path(path).name.removeprefix("vm-") in self.vm_ids


@dataclass(frozen=True)
class Host:
    """What is on the host, as far as daemons could add to it."""

    #: Files in /dev/shm, with their owners.
    shm: dict[str, int]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    sockets: frozenset[str]

    @staticmethod
    def now() -> Host:
        mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        sockets = {
            line.split()[7]
            for line in Path("/proc/net/unix").read_text().splitlines()[1:]
            if len(line.split()) > 7
        }
        return Host(_shared_memory(), frozenset(mounts), frozenset(cgroups()), frozenset(sockets))

    def added_since(self, before: Host, owned: Owned) -> list[str]:
        """What is here now, was not ``before``, and is the daemon's."""
        found = [
            f"/dev/shm/{name}"
            for name, uid in sorted(self.shm.items())
            if name not in before.shm and (owned.has_uid(uid) or (uid == 0 and "vmfork" in name))
        ]
        found += [f"mount {path}" for path in sorted(self.mounts - before.mounts) if owned.has_path(path)]
        found += [f"socket {path}" for path in sorted(self.sockets - before.sockets) if owned.has_path(path)]
        new = sorted(self.cgroups - before.cgroups)
        found += [f"cgroup {path}" for path in new if owned.has_cgroup(path)]
        # The folder of all VMs' cgroups goes with the last daemon.
        if not any_daemon():
            found += [f"cgroup {path}" for path in new if Path(path).name == "vmfork"]
        return found


def any_daemon() -> bool:
    return any(process.comm == "vmforkd" and process.state not in "ZX" for process in processes.everybody())


def vm_ids(state: Path) -> set[str]:
    """The ids of VMs that a daemon has had since it started, by its journal and by their
    folders."""
    found: set[str] = set()
    try:
        journal = (state / "journal.jsonl").read_text(errors="replace")
    except FileNotFoundError:
        return found
    for line in journal.splitlines():
        found.update(re.findall(r'"(?:id|vm)":\s*"([^"]+)"', line))
    if (state / "vms").is_dir():
        found.update(os.listdir(state / "vms"))
    return found


def _shared_memory() -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in os.scandir("/dev/shm"):
        try:
            found[entry.name] = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:
            continue
    return found


def cgroups(root: Path = CGROUPS) -> list[str]:
    """The cgroups of VMs, and the folder that they are in."""
    found: list[str] = []
    for folder, names, _files in os.walk(root):
        found.extend(str(Path(folder, name)) for name in names if name == "vmfork" or name.startswith("vm-"))
    return found
