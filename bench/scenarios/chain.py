"""A parent that is forked again and again, with scattered writes between: does its pause grow?"""

from __future__ import annotations

from .. import world as w

TITLE = "A parent's 1st to 50th fork"

FORKS = 50
#: How many of the first and of the last forks of a family stand for "1st" and "50th".
ENDS = 5
WRITTEN_MIB = 16
REGION_MIB = 256
#: Older clones that live on; more would only take processor time from each other.
LIVING = 3


def run(world: w.World) -> None:
    figures = world.figures
    forks = 20 if world.quick else FORKS
    # Each family gives ENDS values at both ends: as many families as make up the rounds.
    for _ in world.rounds(f"chain of {forks} forks", share=1 / ENDS):
        with world.daemon(pool=2) as (_daemon, client):
            vm = world.run(client, memory_mib=512)
            dirty = w.put(vm, "dirty")
            vm.exec(f"{dirty} /dev/shm/region {REGION_MIB} 0 seq 1 1", check=True)
            living: list[w.vmfork.VM] = []
            for number in range(forks):
                vm.exec(f"{dirty} /dev/shm/region {REGION_MIB} 0 scatter {WRITTEN_MIB} {number}", check=True)
                fork = vm.fork(1).raise_for_errors()
                figures.series("chain_by_fork_ms", fork=f"{number + 1:02}").add(fork.pause_ms)
                if number < ENDS:
                    figures.series("chain_pause_ms", fork="first").add(fork.pause_ms)
                if number >= forks - ENDS:
                    figures.series("chain_pause_ms", fork="last").add(fork.pause_ms)
                living += fork
                w.end_all(living[:-LIVING])
                living = living[-LIVING:]
                world.drained(vm)
