"""The most memory that is in use while something runs, as far as is seen by looking often."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import world as w

#: Looking at the files that a daemon has open takes a few ms.
LOOK_EVERY_S = 0.25
#: An hour. What comes after that is not seen.
LOOKS_MAX = 14_400


@dataclass
class Peak:
    """Bytes."""

    #: The most that one of the daemons had of its own at a time.
    own: int = 0
    #: The most in the caches of one of them.
    caches: int = 0
    #: What the machine had left when it began, and the least since.
    available_before: int = 0
    available_least: int = 0

    def look(self, daemons: Sequence[w.Daemon]) -> None:
        self.available_least = min(self.available_least, available_bytes())
        for daemon in daemons:
            assert daemon.process is not None
            self.own = max(self.own, _kib(Path("/proc") / str(daemon.process.pid) / "status", "RssAnon") << 10)
            self.caches = max(self.caches, daemon.memfd_bytes())


@contextlib.contextmanager
def watched(daemons: Sequence[w.Daemon]) -> Iterator[Peak]:
    """During the block."""
    begin = available_bytes()
    peak, done = Peak(available_before=begin, available_least=begin), threading.Event()

    def look() -> None:
        for _ in range(LOOKS_MAX):
            peak.look(daemons)
            if done.wait(LOOK_EVERY_S):
                return

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            yield peak
        finally:
            done.set()
        looking.result(60)


def available_bytes() -> int:
    return _kib(Path("/proc/meminfo"), "MemAvailable") << 10


def _kib(path: Path, key: str) -> int:
    (line,) = (line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])
