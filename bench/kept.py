"""Programs in stored snapshots: kept with their working set, started again from a store that is not
in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import world as w
from .workloads import Workload

#: The guest image with the programs.
IMAGE = "bench"

#: How long the working set is recorded, while the parent does the job once.
RECORD_S = 30.0

#: Of the rounds of a run: each takes a quarter of a minute.
SHARE = 0.1

#: After so long the host may be as fast as it wants.
STALE_MS = 15_000

#: What comes before anyone asks, and with which snapshot (Twinkle's figure 7).
MODES = {
    "none": ("zeros", "none"),
    "f": ("f", "none"),
    "fd": ("f", "demand"),
    "fdw": ("f", "all"),
}


def warm(
    world: w.World, client: w.vmfork.Client, program: Workload, mib: int, set_mib: int = 0, name: str = "parent"
) -> tuple[w.vmfork.VM, bytes]:
    """A VM whose program has its data set, and has done its job once, with the answer."""
    vm = world.run(client, memory_mib=mib, image=IMAGE, name=name)
    vm.exec(program.load.replace("@SET@", str(set_mib)), check=True, timeout_s=600)
    return vm, vm.exec(program.job, check=True, timeout_s=600).stdout


def recorded(client: w.vmfork.Client, vm: w.vmfork.VM, name: str, job: str, **options: str) -> None:
    """Keep it, with the working set of one more job."""
    client.snapshots.create(vm, name, wait=False, full=True, record_s=RECORD_S, **options)
    vm.exec(job, check=True, timeout_s=600)
    w.eventually(lambda: client.snapshots.profile(name).runs > 0, RECORD_S + 120, "the working set is stored", every_s=0.5)


def timed(vm: w.vmfork.VM, job: str, answer: bytes) -> float:
    begin = w.now_ms()
    got = vm.exec(job, check=True, timeout_s=600).stdout
    took = w.now_ms() - begin
    if got != answer:
        raise RuntimeError(f"{job!r} answered {got!r}, and {answer!r} before")
    return took


@dataclass
class Yardstick:
    """A VM like the one that is kept, which is never stopped and does the same job beside each run
    that is measured.

    A host's speed changes by a third within minutes: what is far apart in time can't be compared.
    """

    vm: w.vmfork.VM
    job: str
    answer: bytes
    #: ms that the job took here, last time, and when that was.
    last_ms: float
    measured_ms: float

    @classmethod
    def warm(cls, world: w.World, client: w.vmfork.Client, program: Workload, mib: int, set_mib: int = 0) -> Yardstick:
        vm, answer = warm(world, client, program, mib, set_mib, name="yardstick")
        return cls(vm, program.job, answer, timed(vm, program.job, answer), w.now_ms())

    def measure(self, vm: w.vmfork.VM, answer: bytes) -> tuple[float, float]:
        """The ms that the job takes in another VM, and how many times those it takes here, right
        before and right after."""
        if w.now_ms() > self.measured_ms + STALE_MS:
            self._measure_here()
        before, took = self.last_ms, timed(vm, self.job, answer)
        self._measure_here()
        return took, took / ((before + self.last_ms) / 2)

    def _measure_here(self) -> None:
        self.last_ms = timed(self.vm, self.job, self.answer)
        self.measured_ms = w.now_ms()


@contextmanager
def started(
    client: w.vmfork.Client,
    daemon: w.Daemon,
    snapshot: str,
    prefetch: str,
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[w.vmfork.VM, float, float]]:
    """A VM of a snapshot, from a store that is not in memory: with the ms until its vCPUs ran, and
    until it answered.

    ``before`` is done first, and counts for the answer.
    """
    w.eventually(lambda: client.host().cache_bytes == 0, 60, "caches of earlier ones are gone", every_s=0.05)
    pool = client.host().pool
    # The first start tells what QEMU is to be kept waiting.
    if pool.hits + pool.misses:
        w.eventually(lambda: client.host().pool.waiting >= 1, 60, "a QEMU waits", every_s=0.05)
    _forget_files(daemon.state / "snapshots")
    begin = w.now_ms()
    before()
    result = client.snapshots.start(snapshot, prefetch=prefetch).raise_for_errors()
    [vm] = result
    vm.exec(["true"], check=True)
    first_ms = w.now_ms() - begin
    [info] = result.results
    try:
        yield vm, info.running_ms or 0.0, first_ms
    finally:
        vm.remove(force=True)


def _forget_files(folder: Path) -> None:
    """Take the store's files out of the host's page cache, as if they had not been read for
    long."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
