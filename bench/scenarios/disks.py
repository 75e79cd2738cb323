"""Writable disks: what they add to a fork, how quick they are, and what they take on the host.

This module has the forks. :mod:`bench.disk_speed` has reads and writes of a guest, and
:mod:`bench.disk_host` the host's side, with what there is without vmfork.

VMs with different disks run side by side, and each round forks every one of them. So each round
compares them under the same conditions, however loaded the machine is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import metrics
from harness.metrics import Between

from .. import disk_host, disk_speed
from .. import world as w

TITLE = "Writable disks"

GB, TB = 10**9, 10**12
#: Of the image that a first fork has.
IMAGE_BYTES = 8000 << 20
#: A blank disk's size is a multiple of this.
PAGE_BYTES = 4096

MEMORY_MIB = 256
POOL = 1
SETTLE_S = 0.3

#: Those of the pause.
STAGES = ("stop", "disks", "freeze", "state", "cont")
#: Those of a clone, until it runs.
CLONES_STAGES = ("clone_attach", "clone_bind", "clone_load")

IDLE, WRITES = "idle", "writes all the time"


@dataclass(frozen=True)
class Case:
    """A VM with some blank disks of one size."""

    disks: int
    size: str = "none"
    size_bytes: int = 0

    @property
    def labels(self) -> dict[str, object]:
        return {"disks": self.disks, "size": self.size}

    @property
    def name(self) -> str:
        return f"{self.disks}-of-{self.size.replace(' ', '-').lower()}"

    def new(self) -> list[w.vmfork.NewDisk]:
        size_bytes = self.size_bytes // PAGE_BYTES * PAGE_BYTES
        return [w.vmfork.NewDisk.blank(f"d{number}", size_bytes) for number in range(self.disks)]


NONE = Case(0)
CASES = (
    NONE,
    Case(1, "1 GB", GB),
    Case(2, "1 GB", GB),
    Case(6, "1 GB", GB),
    Case(1, "100 GB", 100 * GB),
    Case(2, "100 GB", 100 * GB),
    Case(1, "1 TB", TB),
)
#: The number of disks is part of a machine's shape, their size is not.
SHAPES = len({case.disks for case in CASES})


def run(world: w.World) -> None:
    _by_disks(world)
    _by_written(world)
    _first_forks(world)
    disk_speed.run(world)
    disk_host.run(world)


def _by_disks(world: w.World) -> None:
    with world.daemon(pool=POOL) as (daemon, client):
        vms = [(case, _boot(world, client, case)) for case in CASES]
        for _case, vm in vms:
            w.end_all(vm.fork(1))  # the pool learns the shape
        for number in world.rounds(f"forks with {len(CASES)} sets of disks"):
            # Each case is the first one in its turn.
            turn = number % len(vms)
            found = {}
            for case, vm in vms[turn:] + vms[:turn]:
                found[case] = _fork(world, daemon, vm, {**case.labels, "load": IDLE})
            _added(world, found)


def _boot(world: w.World, client: w.vmfork.Client, case: Case) -> w.vmfork.VM:
    return world.run(client, memory_mib=MEMORY_MIB, name=f"with-{case.name}", disks=case.new())


@dataclass(frozen=True)
class Forked:
    """What one fork took, in ms."""

    pause: float
    running: float
    disturbed: bool


def _fork(world: w.World, daemon: w.Daemon, vm: w.vmfork.VM, labels: dict[str, object], shapes: int = SHAPES) -> Forked:
    world.drained(vm)
    with daemon.client() as client:
        world.pool_is_full(client, POOL * shapes)
    time.sleep(SETTLE_S)
    before, stolen = metrics.read(daemon), w.stolen_ms()
    fork = vm.fork(1).raise_for_errors()
    disturbed = w.stolen_ms() != stolen
    counted = Between(before, metrics.read(daemon))
    (result,) = fork.results
    if not result.pooled or result.running_ms is None or result.ready_ms is None:
        raise RuntimeError(f"a clone of `{vm.name}` was not pooled, or was not ready: {result}")
    series = world.figures.series
    series("disks_pause_ms", **labels).add(fork.pause_ms)
    if not disturbed:
        series("disks_pause_undisturbed_ms", **labels).add(fork.pause_ms)
    for stage in STAGES:
        series("disks_stage_ms", **labels, stage=stage).add(getattr(fork.stages, f"{stage}_ms"))
    for stage in CLONES_STAGES:
        series("disks_clone_stage_ms", **labels, stage=stage).add(1000 * counted.value("vmfork_fork_stage_seconds_sum", stage=stage))
    series("disks_clone_running_ms", **labels).add(result.running_ms)
    series("disks_clone_ready_ms", **labels).add(result.ready_ms)
    w.end_all(fork)
    return Forked(fork.pause_ms, result.running_ms, disturbed)


def _added(world: w.World, found: dict[Case, Forked]) -> None:
    """Over the VM without a disk, in the same round."""
    without = found[NONE]
    for case, forked in found.items():
        if case == NONE:
            continue
        world.figures.series("disks_added_to_pause_ms", **case.labels).add(forked.pause - without.pause)
        if not (forked.disturbed or without.disturbed):
            world.figures.series("disks_added_to_undisturbed_pause_ms", **case.labels).add(forked.pause - without.pause)
        world.figures.series("disks_added_to_clone_ms", **case.labels).add(forked.running - without.running)


def _by_written(world: w.World) -> None:
    """Of a disk of 100 GB, by what was written since the last fork; and while the guest writes."""
    case = Case(1, "100 GB", 100 * GB)
    amounts: Sequence[tuple[str, str]] = world.pick(
        (
            ("nothing", ""),
            ("100 MB", "write seq 4 100"),
            ("100 MB, all over it", "write random 8 25600"),
            ("1 GB", "write seq 4 1000"),
        ),
        (("nothing", ""), ("1 GB", "write seq 4 1000")),
    )
    with world.daemon(pool=POOL) as (daemon, client):
        vm = _boot(world, client, case)
        w.end_all(vm.fork(1))
        diskio = w.put(vm, "diskio")
        for number in world.rounds("forks by what was written", share=0.5):
            for written, arguments in amounts:
                if arguments:
                    span_mib = 1024 if "seq" in arguments else case.size_bytes >> 20
                    vm.exec(f"{diskio} /dev/vdb {span_mib} {arguments} {number}", check=True)
                _fork(world, daemon, vm, {"written": written, "load": IDLE}, shapes=1)
        with w.background(vm, f"{diskio} /dev/vdb 1024 write random 4 0 1"):
            for _ in world.rounds("forks while the guest writes", share=0.5):
                _fork(world, daemon, vm, {"written": "4 KiB pages", "load": WRITES}, shapes=1)


def _first_forks(world: w.World) -> None:
    """The first fork of a VM, which nothing was prepared for: with a disk that begins with a large
    file, and without a disk."""
    large, plain = "8 GB", "none"
    with tempfile.TemporaryDirectory() as folder, world.daemon(pool=POOL) as (_daemon, client):
        file = Path(folder) / "image"
        with file.open("wb") as out:
            block = bytes(1 << 20)
            for _ in range(IMAGE_BYTES >> 20):
                out.write(block)
        disks = {large: [w.vmfork.NewDisk.file("image", str(file))], plain: []}
        shapes = set()
        for number in world.rounds(f"first forks, with an image of {large} and without", share=0.3):
            for image in (large, plain) if number % 2 else (plain, large):
                vm = world.run(client, memory_mib=MEMORY_MIB, name=f"first-{number}", disks=disks[image])
                shapes.add(image)
                world.pool_is_full(client, POOL * len(shapes))
                time.sleep(SETTLE_S)
                began = w.now_ms()
                fork = vm.fork(1).raise_for_errors()
                world.figures.series("disks_first_fork_ms", image=image).add(w.now_ms() - began)
                w.end_all([*fork, vm])
