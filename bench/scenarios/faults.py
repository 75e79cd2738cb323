"""What the first touch of a page costs in a clone: fetched with its neighbours, and once a sibling
has it.

Measured inside the guest (`guest/pagewalk.c`), by its own processor's counter: translated code,
address translation and all. The drain races with the walk, so that some of the first clone's
touches find their page. The daemon's counters tell how many were fetched, and those are the slowest
ones.
"""

from __future__ import annotations

from .. import world as w

TITLE = "The cost of a fault"

REGION_MIB = 512
MEMORY_MIB = 1024


def run(world: w.World) -> None:
    with world.daemon(pool=2) as (_daemon, client):
        vm = world.run(client, memory_mib=MEMORY_MIB)
        walk = w.put(vm, "pagewalk")
        for _ in world.rounds("faults", share=0.34):
            # Started again each time: its pages are then this VM's own, and go aside at the freeze.
            vm.exec("rm -f /run/pagewalk.*")
            with w.background(vm, f"{walk} {REGION_MIB}"):
                w.eventually(lambda: vm.exec("test -e /run/pagewalk.ready").exit_code == 0, 120, "the region is filled")
                world.drained(vm)
                fork = vm.fork(2).raise_for_errors()
            first, second = fork
            slow = _times(first)
            memory = first.inspect().memory
            fetched = min(memory.faults.fetch, len(slow))
            second.exec("touch /run/pagewalk.go", check=True)
            quick = _times(second)
            w.end_all(fork)
            # One value a round: the median of its touches.
            if fetched >= 30:
                world.figures.series("fault_us", page="fetched").add(_median(sorted(slow)[-fetched:]))
            else:
                world.note(f"only {fetched} of {len(slow)} touches were fetched: the drain was ahead")
            world.figures.series("fault_us", page="touched by a sibling").add(_median(quick))
            if fetched:
                world.figures.series("fetch_KiB", per="fault").add(memory.demand_bytes / 1024 / max(1, memory.faults.fetch))


def _times(vm: w.vmfork.VM) -> list[float]:
    """The walk's times, us."""
    w.eventually(lambda: vm.exec("test -e /run/pagewalk.out").exit_code == 0, 120, "the walk is done")
    return [int(line) / 1000 for line in vm.read_file("/run/pagewalk.out").split()]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
