"""Several VMs that fork onto all hosts again and again, all at once, over the same jobs in VMs that are ready-made.

After SnowFlock's figure 6: each VM forks, its clones do a job each and end, and it forks anew. The ready-made ones are as many clones, which
ran already and have the program: what they take is what the cores and the jobs take.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from harness import metrics

from .. import world as w
from ..cluster import Cluster, cluster

TITLE = "Several VMs that fork at once"

#: Of the rounds of a run: each takes two minutes.
SHARE = 0.1

HOSTS = 4
MEMORY_MIB = 256
#: Of `spin`, for finding out how long one takes.
UNITS_TRIED = 200


def run(world: w.World) -> None:
    parents, clones, times = world.storm
    # What the jobs take together in ready-made VMs.
    jobs_s = world.pick((40.0,), (5.0,))[0]
    with cluster(world, HOSTS, pool=max(1, parents * clones // HOSTS)) as made:
        vms = [world.run(made.clients[n % HOSTS], memory_mib=MEMORY_MIB, name=f"parent{n}") for n in range(parents)]
        for vm in vms:
            w.put(vm, "spin")
        units = _units(vms[0], jobs_s / (parents * clones * times))
        labels = {"storm": f"{parents} × {clones} × {times}"}
        for _ in world.rounds(f"{parents} VMs fork {clones} clones {times} times", share=SHARE):
            ready_ms = _ready_made(world, made, vms, clones, times, units)
            storm_ms = _forked(world, made, vms, clones, times, units, labels)
            series = world.figures.series
            series("storm_ready_made_ms", **labels).add(ready_ms)
            series("storm_forked_ms", **labels).add(storm_ms)
            series("storm_overhead_of_40_s", **labels).add(40 * (storm_ms / ready_ms - 1))


def _units(vm: w.vmfork.VM, seconds: float) -> int:
    """How much a job is, so that on all cores it takes that long on average."""
    text = vm.exec(["/run/spin", "once", "cpu", "1", str(UNITS_TRIED)], check=True, timeout_s=300).stdout_text
    took_ms = float(text.split(" in ")[1].split()[0])
    return max(1, round(UNITS_TRIED * seconds * 1000 * w.cores() / took_ms))


def _work(clones: list[w.vmfork.VM], units: int) -> None:
    with ThreadPoolExecutor(len(clones)) as threads:
        job = ["/run/spin", "once", "cpu", "1", str(units)]
        list(threads.map(lambda clone: clone.exec(job, check=True, timeout_s=600), clones))


def _ready_made(world: w.World, made: Cluster, vms: list[w.vmfork.VM], clones: int, times: int, units: int) -> float:
    families = [list(vm.fork(clones).raise_for_errors()) for vm in vms]
    every = [clone for family in families for clone in family]
    _work(every, 1)
    begin = w.now_ms()
    with ThreadPoolExecutor(len(vms)) as threads:
        list(threads.map(lambda family: [_work(family, units) for _ in range(times)], families))
    took = w.now_ms() - begin
    w.end_all(every)
    _calm(world, made, vms)
    return took


def _forked(
    world: w.World, made: Cluster, vms: list[w.vmfork.VM], clones: int, times: int, units: int, labels: dict[str, str]
) -> float:
    before = [metrics.read(daemon) for daemon in made.daemons]

    def again_and_again(vm: w.vmfork.VM) -> None:
        for _ in range(times):
            fork = vm.fork(clones).raise_for_errors()
            world.figures.series("storm_pause_ms", **labels).add(fork.pause_ms)
            world.figures.series("storm_fork_ms", **labels).add(fork.total_ms)
            _work(list(fork), units)
            w.end_all(fork)

    begin = w.now_ms()
    with ThreadPoolExecutor(len(vms)) as threads:
        list(threads.map(again_and_again, vms))
    took = w.now_ms() - begin
    for first, daemon in zip(before, made.daemons, strict=True):
        seen = metrics.Between(first, metrics.read(daemon))
        longest_ms = 1000 * seen.quantile(1.0, "vmfork_fault_wait_seconds")
        if longest_ms > 0:
            world.figures.series("storm_longest_fault_ms", **labels).add(longest_ms)
    _calm(world, made, vms)
    return took


def _calm(world: w.World, made: Cluster, vms: list[w.vmfork.VM]) -> None:
    for vm in vms:
        world.drained(vm)
    for client in made.clients:
        pool = client.host().pool
        # One that has started no clones knows no shape.
        if pool.hits + pool.misses:
            world.pool_is_full(client, made.pool)
