"""Several VMs that fork onto all hosts again and again, all at once, over the same jobs in VMs that
are ready-made.

After SnowFlock's figure 6: each VM forks, its clones do a job each and end, and it forks anew. The
ready-made ones are as many clones, which ran already and have the program: what they take is what
the cores and the jobs take. Beside it what forks must not do to each other: how long the longest
fault waited, how much memory was in use, and how many clones failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from harness import metrics

from .. import memory
from .. import world as w
from ..cluster import Cluster, cluster

TITLE = "Several VMs that fork at once"

#: Of the rounds of a run: each takes two minutes.
SHARE = 0.1

HOSTS = 4
MEMORY_MIB = 256
#: Of `spin`, for finding out how long one takes.
UNITS_TRIED = 200
#: How long a fork may take while others' clones keep all cores busy, and a job: far more than
#: either does.
FORK_S, WORK_S = 600.0, 1200.0
#: Of clones that failed, at most this many different reasons are reported.
REASONS_MAX = 3

MIB = 1 << 20


@dataclass
class Forks:
    """What became of one VM's forks."""

    pauses_ms: list[float] = field(default_factory=list)
    forks_ms: list[float] = field(default_factory=list)
    #: Why clones failed, one by one.
    failed: list[str] = field(default_factory=list)


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
            storm_ms, failed = _forked(world, made, vms, clones, times, units, labels)
            series = world.figures.series
            series("storm_ready_made_ms", **labels).add(ready_ms)
            series("storm_forked_ms", **labels).add(storm_ms)
            # With fewer jobs done it is not the same.
            if not failed:
                series("storm_overhead_of_40_s", **labels).add(40 * (storm_ms / ready_ms - 1))


def _units(vm: w.vmfork.VM, seconds: float) -> int:
    """How much a job is, so that on all cores it takes that long on average."""
    text = vm.exec(["/run/spin", "once", "cpu", "1", str(UNITS_TRIED)], check=True, timeout_s=300).stdout_text
    took_ms = float(text.split(" in ")[1].split()[0])
    return max(1, round(UNITS_TRIED * seconds * 1000 * w.cores() / took_ms))


def _work(clones: Sequence[w.vmfork.VM], units: int) -> list[str]:
    """Each does a job. → why those failed that did."""
    job = ["/run/spin", "once", "cpu", "1", str(units)]

    def one(clone: w.vmfork.VM) -> str | None:
        try:
            clone.exec(job, check=True, timeout_s=WORK_S)
        except w.vmfork.VmforkError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max(1, len(clones))) as threads:
        return [why for why in threads.map(one, clones) if why is not None]


def _ready_made(world: w.World, made: Cluster, vms: list[w.vmfork.VM], clones: int, times: int, units: int) -> float:
    families = [list(vm.fork(clones, timeout_s=FORK_S).raise_for_errors()) for vm in vms]
    every = [clone for family in families for clone in family]
    failed = _work(every, 1)
    begin = w.now_ms()
    with ThreadPoolExecutor(len(vms)) as threads:
        done = threads.map(lambda family: [why for _ in range(times) for why in _work(family, units)], families)
        failed += [why for family in done for why in family]
    took = w.now_ms() - begin
    if failed:
        raise RuntimeError(f"{len(failed)} jobs in ready-made VMs failed: {failed[0]}")
    w.end_all(every)
    _calm(world, made, vms)
    return took


def _again_and_again(client: w.vmfork.Client, vm: w.vmfork.VM, clones: int, times: int, units: int) -> Forks:
    made = Forks()
    for _ in range(times):
        try:
            fork = vm.fork(clones, timeout_s=FORK_S)
        except (w.vmfork.ApiError, w.vmfork.ConnectionFailed) as error:
            made.failed += [str(error)] * clones
            # Some may have come to be all the same.
            w.end_all([child for child in client.vms() if child.info is not None and child.info.parent == vm.name])
            continue
        made.pauses_ms.append(fork.pause_ms)
        made.forks_ms.append(fork.total_ms)
        made.failed += map(str, fork.errors)
        made.failed += _work(fork, units)
        w.end_all(fork)
    return made


def _forked(
    world: w.World, made: Cluster, vms: list[w.vmfork.VM], clones: int, times: int, units: int, labels: dict[str, str]
) -> tuple[float, int]:
    """→ how long it took, and how many clones failed."""
    before = [metrics.read(daemon) for daemon in made.daemons]
    with memory.watched(made.daemons) as peak:
        begin = w.now_ms()
        with ThreadPoolExecutor(len(vms)) as threads:
            forks = list(threads.map(lambda vm: _again_and_again(made.clients[0], vm, clones, times, units), vms))
        took = w.now_ms() - begin

    def add(name: str, *values: float) -> None:
        for value in values:
            world.figures.series(name, **labels).add(value)

    for one in forks:
        add("storm_pause_ms", *one.pauses_ms)
        add("storm_fork_ms", *one.forks_ms)
    for first, daemon in zip(before, made.daemons, strict=True):
        seen = metrics.Between(first, metrics.read(daemon))
        longest_ms = 1000 * seen.quantile(1.0, "vmfork_fault_wait_seconds")
        if longest_ms > 0:
            add("storm_longest_fault_ms", longest_ms)
    failed = [why for one in forks for why in one.failed]
    add("storm_failed_clones", len(failed))
    if failed:
        reasons = "; ".join(sorted(set(failed))[:REASONS_MAX])
        world.note(f"storm: {len(failed)} of {len(vms) * clones * times} clones failed: {reasons}")
    add("storm_daemon_own_most_MiB", peak.own / MIB)
    add("storm_daemon_caches_most_MiB", peak.caches / MIB)
    add("storm_machine_taken_most_MiB", (peak.available_before - peak.available_least) / MIB)
    add("storm_machine_available_least_MiB", peak.available_least / MIB)
    _calm(world, made, vms)
    return took, len(failed)


def _calm(world: w.World, made: Cluster, vms: list[w.vmfork.VM]) -> None:
    for vm in vms:
        world.drained(vm)
    for client in made.clients:
        pool = client.host().pool
        # One that has started no clones knows no shape.
        if pool.hits + pool.misses:
            world.pool_is_full(client, made.pool)
