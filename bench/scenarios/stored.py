"""Stored snapshots: how soon a VM runs, and how fast its program goes on, by what is brought in
before it asks.

After Twinkle (INFOCOM 2011), tables I and II, figures 6 and 7, with the programs of
`bench/workloads.py`. For each: a VM with a warm data set is kept as a snapshot and ended; then it
is started again and again, each time with the host's page cache dropped, under

- *none*: zero pages stored and fetched like any others, everything on demand;
- *f*: zero pages never travel; on demand;
- *fd*: with demand prediction;
- *fdw*: with the working set loaded beside the start, too.

What is compared with: the same job in a VM like it that never stops, right before and right after
each run (`never stopped`). What that comparison is worth is told by comparing one with a second
such VM (`twin`). For contrast, a clone, whose memory is all there but whose code TCG has to
translate anew as it has to after a start (`clone`); and QEMU's own restore of all memory, from a
file in memory.
"""

from __future__ import annotations

from .. import kept, workloads
from .. import world as w
from ..kept import MODES, SHARE
from ..rawqemu import RawVm, restore, save
from ..workloads import Workload

TITLE = "Stored snapshots"

#: MiB of a guest's memory, and of the data set in it where that can be chosen.
SMALL, LARGE = (1024, 512), (4096, 1024)

#: Whose jobs are compared one by one with those of a VM that never stops, which takes as long
#: again.
COMPARED = ("none", "fdw")


def run(world: w.World) -> None:
    w.images.build(kept.IMAGE)
    # Two sizes; the large one with what shows the size.
    large, small = world.pick([workloads.SCAN, workloads.FILES], []), world.pick(workloads.ALL, [workloads.SCAN, workloads.PYTHON])
    sizes = [(LARGE, large), (SMALL, small)]
    for (mib, set_mib), programs in sizes:
        chosen = [program for program in programs if world.programs is None or program.name in world.programs]
        for program in chosen:
            _program(world, program, mib, set_mib)
        if chosen:
            _restore(world, mib, set_mib)


def _program(world: w.World, program: Workload, mib: int, set_mib: int) -> None:
    labels = {"program": program.name, "memory": f"{mib} MiB"}
    what = f"{program.name}, {mib} MiB"
    series = world.figures.series
    with world.daemon(pool=2, image=kept.IMAGE) as (daemon, client):
        yardstick = kept.Yardstick.warm(world, client, program, mib, set_mib)
        vm, answer = kept.warm(world, client, program, mib, set_mib)

        def measure(start: str, vm: w.vmfork.VM) -> None:
            took, ratio = yardstick.measure(vm, answer)
            series("job_ms", start=start, **labels).add(took)
            series("job_ms", start="never stopped", **labels).add(yardstick.last_ms)
            series("job_ratio", start=start, **labels).add(ratio)

        if program is workloads.PYTHON:
            for _ in world.rounds(f"{what}: a twin", share=SHARE):
                measure("twin", vm)
        for _ in world.rounds(f"{what}: a clone", share=SHARE):
            with vm.fork(1).raise_for_errors() as (clone,):
                clone.exec(["true"], check=True)
                measure("clone", clone)
        for compression in ("none", "zstd"):
            stored = client.snapshots.create(vm, compression, wait=True, full=True, compression=compression, record_s=0)
            share = 100 * stored.stored_bytes / (mib << 20)
            series("stored_percent", compression=compression, **labels).add(share)
            # Else the next one would find its chunks there.
            client.snapshots.remove(compression)
        client.snapshots.create(vm, "zeros", wait=True, keep_zero_pages=True, record_s=0)
        kept.recorded(client, vm, "f", program.job)
        series("create_pause_ms", **labels).add(client.snapshots.get("f").pause_ms)
        vm.remove(force=True)
        for mode, (snapshot, prefetch) in MODES.items():
            for _ in world.rounds(f"{what}: {mode}", share=SHARE):
                with kept.started(client, daemon, snapshot, prefetch) as (vm, running_ms, first_ms):
                    if mode in COMPARED:
                        measure(mode, vm)
                    else:
                        series("job_ms", start=mode, **labels).add(kept.timed(vm, program.job, answer))
                    memory = vm.inspect().memory
                series("start_running_ms", mode=mode, **labels).add(running_ms)
                series("start_answer_ms", mode=mode, **labels).add(first_ms)
                series("remote_faults", mode=mode, **labels).add(memory.store_faults.remote)
                series("predicted_faults", mode=mode, **labels).add(memory.store_faults.predicted)
                series("zero_faults", mode=mode, **labels).add(memory.faults.zero + memory.faults.mapped)
                series("read_MiB", of="chunks", mode=mode, **labels).add(memory.source.chunk / (1 << 20))
                series("read_MiB", of="before anyone asked", mode=mode, **labels).add(memory.prefetched_bytes / (1 << 20))


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
