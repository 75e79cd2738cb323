"""Stored snapshots: how soon a VM runs, and how fast its program goes on, by what is brought in before it asks.

After Twinkle (INFOCOM 2011), tables I and II, figures 6 and 7, with programs of ours. For each: a VM with a warm data set is
kept as a snapshot and ended; then it is started again and again, each time with the host's page cache dropped, under

- *none*: zero pages stored and fetched like any others, everything on demand;
- *f*: zero pages never travel; on demand;
- *fd*: with demand prediction;
- *fdw*: with the working set loaded beside the start, too.

What is compared with: the same job in the VM that never stopped; in a clone of it, whose memory is all there but whose code TCG has to
translate anew as it has to after a start (`clone`); and QEMU's own restore of all memory, from a file in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import world as w
from ..rawqemu import RawVm, restore, save

TITLE = "Stored snapshots"

#: How long the working set is recorded, while the parent does the job once.
RECORD_S = 30.0


@dataclass(frozen=True)
class Program:
    """A program with a data set in a VM's memory, and a fixed job on it."""

    name: str
    #: Shell, once, in the VM that is kept.
    load: str
    #: Shell; what it prints is the answer, the same each time.
    job: str


PROGRAMS = [
    # Memory-bound: all of a large data set once.
    Program("scan", "head -c @HALF@M /dev/urandom > /dev/shm/set; cat /dev/shm/set | wc -c", "cat /dev/shm/set | wc -c"),
    # A service of which a part is asked for: a dictionary of 200,000 entries, 500 of them looked up.
    Program(
        "python",
        "cat > /run/service.py <<'END'\n"
        "import os\n"
        "d = {f'key{n}': f'value{n}' * 4 for n in range(200_000)}\n"
        "for name in ('in', 'out'):\n"
        "    os.mkfifo(f'/run/{name}')\n"
        "while True:\n"
        "    with open('/run/in') as f: step = int(f.read())\n"
        "    answer = sum(len(d[f'key{n}']) for n in range(0, 200_000, step))\n"
        "    with open('/run/out', 'w') as f: f.write(str(answer))\n"
        "END\n"
        "(python3 /run/service.py > /dev/null 2>&1 < /dev/null &)\n"
        "while [ ! -p /run/out ]; do sleep 0.2; done; echo 400 > /run/in; cat /run/out",
        "echo 400 > /run/in; cat /run/out",
    ),
    # Ordinary programs, many small files: everything that is installed is read and sorted.
    Program(
        "files",
        "cat /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* 2> /dev/null | head -c @QUARTER@M > /dev/shm/set; ls -lR /usr | sort | cksum",
        "ls -lR /usr | sort | cksum",
    ),
]

MODES = {
    "none": ("zeros", "none"),
    "f": ("f", "none"),
    "fd": ("f", "demand"),
    "fdw": ("f", "all"),
}


def run(world: w.World) -> None:
    for mib in world.pick((1024, 4096), (1024,)):
        for program in world.pick(PROGRAMS, PROGRAMS[:2]):
            _program(world, program, mib)
        _restore(world, mib)
    _many(world)


def _program(world: w.World, program: Program, mib: int) -> None:
    labels = {"program": program.name, "memory": f"{mib} MiB"}
    load = program.load.replace("@HALF@", str(mib // 2)).replace("@QUARTER@", str(mib // 4))
    with world.daemon(pool=2) as (daemon, client):
        vm = world.run(client, memory_mib=mib)
        vm.exec(load, check=True, timeout_s=600)
        job = program.job
        answer = vm.exec(job, check=True, timeout_s=600).stdout
        for _ in world.rounds(f"{program.name}, {mib} MiB: never stopped", share=0.2):
            world.figures.series("job_ms", start="never stopped", **labels).add(_timed(vm, job, answer))
        for _ in world.rounds(f"{program.name}, {mib} MiB: a clone", share=0.2):
            with vm.fork(1).raise_for_errors() as (clone,):
                clone.exec(["true"], check=True)
                world.figures.series("job_ms", start="clone", **labels).add(_timed(clone, job, answer))
        for compression in ("none", "zstd"):
            kept = client.snapshots.create(vm, compression, wait=True, full=True, compression=compression, record_s=0)
            share = 100 * kept.stored_bytes / (mib << 20)
            world.figures.series("stored_percent", compression=compression, **labels).add(share)
            # Else the next one would find its chunks there.
            client.snapshots.remove(compression)
        client.snapshots.create(vm, "zeros", wait=True, keep_zero_pages=True, record_s=0)
        kept = client.snapshots.create(vm, "f", wait=False, full=True, record_s=RECORD_S)
        vm.exec(job, check=True, timeout_s=600)
        w.eventually(lambda: client.snapshots.profile("f").runs > 0, RECORD_S + 120, "the working set is stored", every_s=0.5)
        pause = client.snapshots.get("f").pause_ms
        world.figures.series("create_pause_ms", **labels).add(pause)
        vm.remove(force=True)
        for mode, (snapshot, prefetch) in MODES.items():
            for _ in world.rounds(f"{program.name}, {mib} MiB: {mode}", share=0.2):
                with _started(client, daemon, snapshot, prefetch) as (vm, running_ms, first_ms):
                    took = _timed(vm, job, answer)
                    memory = vm.inspect().memory
                series = world.figures.series
                series("start_running_ms", mode=mode, **labels).add(running_ms)
                series("start_answer_ms", mode=mode, **labels).add(first_ms)
                series("job_ms", start=mode, **labels).add(took)
                series("remote_faults", mode=mode, **labels).add(memory.store_faults.remote)
                series("predicted_faults", mode=mode, **labels).add(memory.store_faults.predicted)
                series("zero_faults", mode=mode, **labels).add(memory.faults.zero + memory.faults.mapped)
                series("read_MiB", of="chunks", mode=mode, **labels).add(memory.source.chunk / (1 << 20))
                series("read_MiB", of="before anyone asked", mode=mode, **labels).add(memory.prefetched_bytes / (1 << 20))


def _timed(vm: w.vmfork.VM, job: str, answer: bytes) -> float:
    begin = w.now_ms()
    got = vm.exec(job, check=True, timeout_s=600).stdout
    took = w.now_ms() - begin
    if got != answer:
        raise RuntimeError(f"{job!r} answered {got!r}, and {answer!r} before")
    return took


@contextmanager
def _started(
    client: w.vmfork.Client, daemon: w.Daemon, snapshot: str, prefetch: str
) -> Iterator[tuple[w.vmfork.VM, float, float]]:
    """A VM of a snapshot, from a store that is not in memory: with the ms until its vCPUs ran, and until it answered."""
    w.eventually(lambda: client.host().cache_bytes == 0, 60, "caches of earlier ones are gone", every_s=0.05)
    w.eventually(lambda: client.host().pool.waiting >= 1, 60, "a QEMU waits", every_s=0.05)
    _forget_files(daemon.state / "snapshots")
    begin = w.now_ms()
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


def _restore(world: w.World, mib: int) -> None:
    """QEMU's own way: all memory read before anything runs."""
    with RawVm.boot(world.image, memory_mib=mib) as source:
        source.exec(f"mount -o remount,size=90% /dev/shm; head -c {mib // 4}M /dev/urandom > /dev/shm/set")
        for _ in world.rounds(f"QEMU's restore, {mib} MiB", share=0.2):
            state = save(source)
            try:
                _, load_ms = restore(state, source)
            finally:
                state.close()
            world.figures.series("restore_ms", memory=f"{mib} MiB").add(load_ms)


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
