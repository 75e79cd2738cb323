"""Processes, by /proc. Only ever those that descend from the test run.

The test run is a *subreaper*: whatever outlives the daemon that started it becomes our child and can
be found, whatever its name, and however hard the daemon was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans below us come to us."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True)
class Process:
    """One process at one instant."""

    pid: int
    parent: int
    state: str
    comm: str
    start_ticks: int
    command: str

    def is_alive(self) -> bool:
        """Whether this very process, not another of its number, runs on (a zombie does not)."""
        now = read(self.pid)
        return now is not None and now.start_ticks == self.start_ticks and now.state not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal this very process; one that has ended is fine."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    @property
    def is_qemu(self) -> bool:
        return "qemu-system" in self.command.split("\0", 1)[0] or self.comm.startswith("qemu-system")

    @property
    def is_holder(self) -> bool:
        return self.comm == "vmfork-holder"

    def __str__(self) -> str:
        return f"{self.pid} ({self.comm}, {self.state}) {self.command.replace(chr(0), ' ')[:160]}"


def read(pid: int) -> Process | None:
    """What /proc says, or None if there is no such process."""
    folder = Path("/proc") / str(pid)
    try:
        stat = (folder / "stat").read_text()
        command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may contain some.
    begin, end = stat.index("("), stat.rindex(")")
    fields = stat[end + 2 :].split()
    return Process(pid, int(fields[1]), fields[0], stat[begin + 1 : end], int(fields[19]), command)


def everybody() -> list[Process]:
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def below(root: int) -> list[Process]:
    """All that descend from process ``root``, zombies included, itself not."""
    children: dict[int, list[Process]] = {}
    for process in everybody():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [root]
    while todo:
        for process in children.get(todo.pop(), []):
            found.append(process)
            todo.append(process.pid)
    return found


def orphans(known: set[int]) -> list[Process]:
    """Live processes that came to us, or are below one that did, apart from ``known`` children.

    Reaps dead ones. ``known`` are the children that somebody else (``subprocess``) waits for.
    """
    mine = os.getpid()
    found: list[Process] = []
    for process in everybody():
        if process.parent != mine or process.pid in known:
            continue
        if process.state == "Z":
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                pass
            continue
        found.append(process)
        found.extend(other for other in below(process.pid) if other.state != "Z")
    return found


def holder_of(state: Path) -> Process | None:
    """The live process that keeps the sockets of the daemon with this state folder."""
    words = ["--state", str(state.resolve())]
    found = [one for one in everybody() if one.is_holder and one.state not in "ZX"]
    return next((one for one in found if one.command.rstrip("\0").split("\0")[1:] == words), None)


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, its threads included, its children not."""
    stat = (Path("/proc") / str(pid) / "stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")
