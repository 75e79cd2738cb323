"""What a clone that does nothing costs, and one that only takes fresh memory."""

from __future__ import annotations

import time

from .. import world as w

TITLE = "Memory of clones"

MIB = 1 << 20
PAGES_PER_MIB = 256
IDLE_S = 10.0


def run(world: w.World) -> None:
    for mib in world.pick((512, 2048), (512,)):
        with world.daemon(pool=2) as (_daemon, client):
            labels = {"memory": f"{mib} MiB"}
            for _ in world.rounds(f"idle clone of a first fork, {mib} MiB", share=0.1):
                vm = world.run(client, memory_mib=mib)
                _idle(world, vm, mib, {**labels, "fork": "first"})
                vm.remove(force=True)
            vm = world.run(client, memory_mib=mib)
            w.end_all(vm.fork(1))
            for _ in world.rounds(f"idle clone, {mib} MiB", share=1.0 if mib == 512 else 0.2):
                _idle(world, vm, mib, {**labels, "fork": "later"})
    _fresh(world)


def _idle(world: w.World, vm: w.vmfork.VM, mib: int, labels: dict[str, str]) -> None:
    """What a first fork's clone and parent touch is the image's own, and comes with 15 neighbours;
    that of later ones was in the image before, and comes with 3 or not at all. The figure has both
    VMs' share."""
    world.drained(vm)
    fork = vm.fork(1).raise_for_errors()
    time.sleep(IDLE_S)
    memory, parents = fork[0].inspect().memory, vm.inspect().memory
    series = world.figures.series
    series("idle_fetched_MiB", **labels).add(memory.demand_bytes / MIB)
    series("idle_fetched_percent", **labels).add(100 * memory.demand_bytes / (mib * MIB))
    series("idle_private_MiB", **labels).add(memory.private_pages / PAGES_PER_MIB)
    series("idle_faults", who="clone", **labels).add(memory.faults.fetch)
    if labels["fork"] == "first":
        series("idle_faults", who="parent", **labels).add(parents.faults.fetch)
    w.end_all(fork)


def _fresh(world: w.World) -> None:
    """A clone that allocates and fills 1 GiB: nothing of what was there before matters."""
    mib, filled = 2048, 1024
    with world.daemon(pool=2) as (_daemon, client):
        vm = world.run(client, memory_mib=mib)
        touch = w.put(vm, "touch")
        labels = {"memory": f"{mib} MiB"}
        for _ in world.rounds("1 GiB of new pages", share=0.34):
            world.drained(vm)
            fork = vm.fork(1).raise_for_errors()
            fork[0].exec([touch, str(filled)], check=True)
            fetched = fork[0].inspect().memory.demand_bytes
            world.figures.series("fresh_fetched_MiB", **labels).add(fetched / MIB)
            world.figures.series("fresh_fetched_percent", **labels).add(100 * fetched / (filled * MIB))
            w.end_all(fork)
