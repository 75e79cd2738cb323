"""Stored snapshots: how soon a VM runs, and how fast its program goes on, by what is brought in before it asks.

After Twinkle (INFOCOM 2011), tables I and II, figures 6 and 7, with the programs of `bench/workloads.py`. For each: a VM with a warm
data set is kept as a snapshot and ended; then it is started again and again, each time with the host's page cache dropped, under

- *none*: zero pages stored and fetched like any others, everything on demand;
- *f*: zero pages never travel; on demand;
- *fd*: with demand prediction;
- *fdw*: with the working set loaded beside the start, too.

What is compared with: the same job in the VM that never stopped; in a clone of it, whose memory is all there but whose code TCG has to
translate anew as it has to after a start (`clone`); and QEMU's own restore of all memory, from a file in memory. One program is
also started from other sources: raw files, and an S3 server that answers after 1 and 10 ms, from which the snapshot is pulled meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import s3

from .. import workloads
from .. import world as w
from ..rawqemu import RawVm, restore, save
from ..workloads import Workload

TITLE = "Stored snapshots"

#: The guest image with the programs.
IMAGE = "bench"

#: How long the working set is recorded, while the parent does the job once.
RECORD_S = 30.0

#: MiB of a guest's memory, and of the data set in it where that can be chosen.
SMALL, LARGE = (1024, 512), (4096, 1024)

#: Of the rounds of a run: each takes a quarter of a minute.
SHARE = 0.1

MODES = {
    "none": ("zeros", "none"),
    "f": ("f", "none"),
    "fd": ("f", "demand"),
    "fdw": ("f", "all"),
}



def run(world: w.World) -> None:
    w.images.build(IMAGE)
    large = [workloads.SCAN, workloads.FILES]
    sizes = [(SMALL, world.pick(workloads.ALL, [workloads.SCAN, workloads.PYTHON])), (LARGE, world.pick(large, []))]
    for (mib, set_mib), programs in sizes:
        for program in programs:
            _program(world, program, mib, set_mib)
        if programs:
            _restore(world, mib, set_mib)
    _sources(world, workloads.PYTHON, *SMALL)
    _many(world)


def _program(world: w.World, program: Workload, mib: int, set_mib: int) -> None:
    labels = {"program": program.name, "memory": f"{mib} MiB"}
    what = f"{program.name}, {mib} MiB"
    series = world.figures.series
    with world.daemon(pool=2, image=IMAGE) as (daemon, client):
        vm, answer = _warm(world, client, program, mib, set_mib)
        for _ in world.rounds(f"{what}: never stopped", share=SHARE):
            series("job_ms", start="never stopped", **labels).add(_timed(vm, program.job, answer))
        for _ in world.rounds(f"{what}: a clone", share=SHARE):
            with vm.fork(1).raise_for_errors() as (clone,):
                clone.exec(["true"], check=True)
                series("job_ms", start="clone", **labels).add(_timed(clone, program.job, answer))
        for compression in ("none", "zstd"):
            kept = client.snapshots.create(vm, compression, wait=True, full=True, compression=compression, record_s=0)
            share = 100 * kept.stored_bytes / (mib << 20)
            series("stored_percent", compression=compression, **labels).add(share)
            # Else the next one would find its chunks there.
            client.snapshots.remove(compression)
        client.snapshots.create(vm, "zeros", wait=True, keep_zero_pages=True, record_s=0)
        _recorded(client, vm, "f", program.job)
        series("create_pause_ms", **labels).add(client.snapshots.get("f").pause_ms)
        vm.remove(force=True)
        for mode, (snapshot, prefetch) in MODES.items():
            for _ in world.rounds(f"{what}: {mode}", share=SHARE):
                with _started(client, daemon, snapshot, prefetch) as (vm, running_ms, first_ms):
                    took = _timed(vm, program.job, answer)
                    memory = vm.inspect().memory
                series("start_running_ms", mode=mode, **labels).add(running_ms)
                series("start_answer_ms", mode=mode, **labels).add(first_ms)
                series("job_ms", start=mode, **labels).add(took)
                series("remote_faults", mode=mode, **labels).add(memory.store_faults.remote)
                series("predicted_faults", mode=mode, **labels).add(memory.store_faults.predicted)
                series("zero_faults", mode=mode, **labels).add(memory.faults.zero + memory.faults.mapped)
                series("read_MiB", of="chunks", mode=mode, **labels).add(memory.source.chunk / (1 << 20))
                series("read_MiB", of="before anyone asked", mode=mode, **labels).add(memory.prefetched_bytes / (1 << 20))


def _warm(world: w.World, client: w.vmfork.Client, program: Workload, mib: int, set_mib: int) -> tuple[w.vmfork.VM, bytes]:
    """A VM whose program has its data set, and has done its job once, with the answer."""
    vm = world.run(client, memory_mib=mib, image=IMAGE)
    vm.exec(program.load.replace("@SET@", str(set_mib)), check=True, timeout_s=600)
    return vm, vm.exec(program.job, check=True, timeout_s=600).stdout


def _recorded(client: w.vmfork.Client, vm: w.vmfork.VM, name: str, job: str, **options: str) -> None:
    """Keep it, with the working set of one more job."""
    client.snapshots.create(vm, name, wait=False, full=True, record_s=RECORD_S, **options)
    vm.exec(job, check=True, timeout_s=600)
    w.eventually(lambda: client.snapshots.profile(name).runs > 0, RECORD_S + 120, "the working set is stored", every_s=0.5)


def _timed(vm: w.vmfork.VM, job: str, answer: bytes) -> float:
    begin = w.now_ms()
    got = vm.exec(job, check=True, timeout_s=600).stdout
    took = w.now_ms() - begin
    if got != answer:
        raise RuntimeError(f"{job!r} answered {got!r}, and {answer!r} before")
    return took


@contextmanager
def _started(
    client: w.vmfork.Client,
    daemon: w.Daemon,
    snapshot: str,
    prefetch: str,
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[w.vmfork.VM, float, float]]:
    """A VM of a snapshot, from a store that is not in memory: with the ms until its vCPUs ran, and until it answered.

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
    """Take the store's files out of the host's page cache, as if they had not been read for long."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _restore(world: w.World, mib: int, set_mib: int) -> None:
    """QEMU's own way: all memory read before anything runs."""
    with RawVm.boot(world.image, memory_mib=mib) as source:
        source.exec(f"mount -o remount,size=90% /dev/shm; head -c {set_mib}M /dev/urandom > /dev/shm/set")
        for _ in world.rounds(f"QEMU's restore, {mib} MiB", share=SHARE):
            state = save(source)
            try:
                _, load_ms = restore(state, source)
            finally:
                state.close()
            world.figures.series("restore_ms", memory=f"{mib} MiB").add(load_ms)


def _sources(world: w.World, program: Workload, mib: int, set_mib: int) -> None:
    """One program from other places: files that are not compressed, files that are, and over a network of 1 and 10 ms."""
    if s3.program() is None:
        world.note("no S3 server (mk/versitygw.sh builds it): not started from one")
        return
    labels = {"program": program.name, "memory": f"{mib} MiB"}
    series = world.figures.series

    def measure(client: w.vmfork.Client, daemon: w.Daemon, source: str, name: str, location: str | None) -> None:
        for mode in ("f", "fdw"):
            for _ in world.rounds(f"{program.name} from {source}: {mode}", share=SHARE):
                pull = (lambda: client.snapshots.pull(name, location)) if location else (lambda: None)
                with _started(client, daemon, name, MODES[mode][1], pull) as (vm, _, first_ms):
                    took = _timed(vm, program.job, answer)
                if location:
                    w.eventually(lambda: client.snapshots.get(name).state == "ready", 120, "all of it is here", every_s=0.1)
                    client.snapshots.remove(name)
                series("source_answer_ms", source=source, mode=mode, **labels).add(first_ms)
                series("source_job_ms", source=source, mode=mode, **labels).add(took)

    with s3.server() as server:
        with world.daemon(pool=2, image=IMAGE, env=server.environment()) as (daemon, client):
            vm, answer = _warm(world, client, program, mib, set_mib)
            for compression in ("none", "zstd"):
                _recorded(client, vm, compression, program.job, compression=compression)
            vm.remove(force=True)
            client.snapshots.push("zstd", server.location)
            measure(client, daemon, "raw files", "none", None)
            measure(client, daemon, "zstd", "zstd", None)
        for delay_ms in (1, 10):
            with (
                s3.relay(server.port, delay_ms / 1000) as port,
                world.daemon(pool=2, image=IMAGE, env=server.environment(port)) as (daemon, client),
            ):
                measure(client, daemon, f"S3 at {delay_ms} ms", "zstd", server.location)


def _many(world: w.World) -> None:
    """Fifty VMs of one snapshot, one after the other, all of which go on."""
    count = 10 if world.quick else 50
    with world.daemon(pool=4) as (daemon, client):
        vm = world.run(client, memory_mib=512)
        vm.exec("head -c 100M /dev/urandom > /dev/shm/set", check=True)
        client.snapshots.create(vm, "many", wait=True, record_s=0)
        vm.remove(force=True)
        vms: list[w.vmfork.VM] = []
        for number in range(count):
            world.say(f"{number + 1} of {count} VMs of one snapshot", fleeting=True)
            w.eventually(lambda: client.host().pool.waiting >= 1, 60, "a QEMU waits", every_s=0.05)
            begin = w.now_ms()
            vms += client.snapshots.start("many").raise_for_errors()
            vms[-1].exec(["true"], check=True)
            took = w.now_ms() - begin
            place = "first" if number < count // 10 else "last" if number >= count - count // 10 else "between"
            world.figures.series("many_answer_ms", vm=place).add(took)
        w.end_all(vms)
