"""How long the parent stands still, by its memory and by what it is doing; and where that time
goes."""

from __future__ import annotations

import contextlib
import time

from .. import world as w

TITLE = "The parent's pause"

POOL = 2
SETTLE_S = 0.3

#: What the guest does meanwhile: arguments of `dirty` after the region's size.
LOADS = {"idle": None, "100 MB/s": "100 scatter 0 1", "all it can": "0 scatter 0 1"}

STAGES = ("quiesce_ms", "stop_ms", "disks_ms", "freeze_ms", "state_ms", "cont_ms", "derive_ms")


def run(world: w.World) -> None:
    for mib in world.pick((512, 1024, 2048, 4096), (512, 1024)):
        with world.daemon(pool=POOL) as (_daemon, client):
            vm = world.run(client, memory_mib=mib)
            w.end_all(vm.fork(1))  # the pool learns the shape
            dirty = w.put(vm, "dirty")
            region = f"{dirty} /dev/shm/region {mib // 4}"
            vm.exec(f"{region} 0 seq 1 1", check=True)
            for load, arguments in LOADS.items():
                writer = w.background(vm, f"{region} {arguments}") if arguments else contextlib.nullcontext()
                with writer:
                    _measure(world, client, vm, mib, load)
            if mib == 4096 or world.quick:
                _much_dirty(world, client, vm, dirty, mib)


def _measure(
    world: w.World, client: w.vmfork.Client, vm: w.vmfork.VM, mib: int, load: str, before: str = ""
) -> None:
    labels = {"memory": f"{mib} MiB", "load": load}
    for _ in world.rounds(f"pause, {mib} MiB, {load}"):
        world.drained(vm)
        if before:
            vm.exec(before, check=True)
        # What the last round left to do is none of this one's: the pool's refill, and the end of a
        # QEMU.
        world.pool_is_full(client, POOL)
        time.sleep(SETTLE_S)
        stolen = w.stolen_ms()
        fork = vm.fork(1).raise_for_errors()
        world.figures.series("pause_ms", **labels).add(fork.pause_ms)
        if w.stolen_ms() == stolen:
            # The others are longer by what others did on this processor, which says nothing of
            # vmfork.
            world.figures.series("pause_undisturbed_ms", **labels).add(fork.pause_ms)
        for stage in STAGES:
            value = getattr(fork.stages, stage)
            if value is not None:
                world.figures.series(f"stage_{stage}", **labels, stage=stage.removesuffix("_ms")).add(value)
        w.end_all(fork)


def _much_dirty(world: w.World, client: w.vmfork.Client, vm: w.vmfork.VM, dirty: str, mib: int) -> None:
    """Half of all memory written anew before each fork."""
    text = f"{mib // 2048} GiB dirty" if mib >= 2048 else f"{mib // 2} MiB dirty"
    vm.exec("rm -f /dev/shm/region")
    write = f"{dirty} /dev/shm/much {mib // 2} 0 seq {mib // 2} $$"
    _measure(world, client, vm, mib, text, write)
