"""What a daemon may leave behind when it ends: nothing."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import processes

#: Children of ours that `subprocess` waits for; everything else that becomes our child is an orphan.
started: dict[int, subprocess.Popen[bytes]] = {}


def spawn(argv: list[str], **options: object) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, known to the watch."""
    process: subprocess.Popen[bytes] = subprocess.Popen(argv, **options)  # type: ignore[call-overload]
    started[process.pid] = process
    return process


def orphans() -> list[processes.Process]:
    """Live processes that outlived who started them.

    But holders: they outlive a daemon that was killed, on purpose. `Daemon.close` asserts their end.
    """
    known = {pid for pid, process in started.items() if process.poll() is None}
    return [process for process in processes.orphans(known) if not process.is_holder]


@dataclass(frozen=True)
class Host:
    """What is on the host, as far as daemons could add to it."""

    shm: frozenset[str]
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
        return Host(
            frozenset(os.listdir("/dev/shm")), frozenset(mounts), frozenset(_cgroups()), frozenset(sockets)
        )

    def added_since(self, before: Host, folder: Path) -> list[str]:
        """What is here now and was not ``before``; mounts and sockets where they are of ``folder``."""
        found = [f"/dev/shm/{name}" for name in sorted(self.shm - before.shm)]
        found += [f"mount {path}" for path in sorted(self.mounts - before.mounts) if _in(path, folder)]
        found += [f"socket {path}" for path in sorted(self.sockets - before.sockets) if _in(path, folder)]
        found += [f"cgroup {path}" for path in sorted(self.cgroups - before.cgroups)]
        return found


def _in(path: str, folder: Path) -> bool:
    return path.lstrip("@") == str(folder) or path.lstrip("@").startswith(f"{folder}/")


def _cgroups() -> list[str]:
    root = Path("/sys/fs/cgroup")
    found: list[str] = []
    for folder, names, _files in os.walk(root):
        found.extend(str(Path(folder, name)) for name in names if "vmfork" in name)
    return found
