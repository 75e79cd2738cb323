"""Forks onto other hosts: how soon clones answer, whether more hosts cost more, what a start costs
by form, and what the parent's host sends.

Hosts are network namespaces with links of 1 Gbit/s on this machine. All of them share its cores, so
starts are compared with as many on one host.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .. import world as w
from ..cluster import ALL_FORMS, FORMS, cluster, rest

TITLE = "Forks onto other hosts"

#: Of the rounds of a run.
SHARE = 0.2

CLONES = 32
DATA_MIB = 256
EACH = "one each"


def run(world: w.World) -> None:
    _answers(world)
    _starts(world)
    _bytes(world)


def _answers(world: w.World) -> None:
    """As many clones on four hosts as on one, which have all run a command."""
    count = CLONES // 4
    with cluster(world, 4, pool=count) as made:
        vm = world.run(made.clients[0], memory_mib=512)
        w.end_all(vm.fork(4))  # pools learn the shape
        for _ in world.rounds(f"{CLONES} clones", share=SHARE):
            for hosts in (4, 1):
                rest(world, made, vm)
                begin = w.now_ms()
                fork = vm.fork(CLONES, place="spread" if hosts == 4 else "here").raise_for_errors()
                w.answer_all(fork)
                world.figures.series("hosts_answered_ms", hosts=hosts).add(w.now_ms() - begin)
                world.figures.series("hosts_pause_ms", hosts=hosts).add(fork.pause_ms)
                w.end_all(fork)


def _starts(world: w.World) -> None:
    """One clone each on other hosts, by form; by the first over as many on one, and over a single
    one."""
    for form in ALL_FORMS:
        _starts_by(world, form)


def _starts_by(world: w.World, form: str) -> None:
    count = world.pick((16,), (4,))[0]
    with cluster(world, count + 1, pool=1, more_flags=["--page-transfer", form]) as made:
        vm = world.run(made.clients[0], memory_mib=512)
        each = (EACH, count, made.names(count))
        others = [("one", 1, made.names(1)), ("as many on one host", count, made.names(1))]
        cases = [*others, each] if form == FORMS[0] else [each]
        for _, clones, hosts in cases:
            w.end_all(vm.fork(clones, hosts=hosts))
        for _ in world.rounds(f"{count} hosts, {form}", share=SHARE):
            for what, clones, hosts in cases:
                rest(world, made, vm)
                parent, sent = made.daemons[0].process.pid, made.sent_bytes()
                busy, parents = w.busy_ms(), w.cpu_ms(parent)
                fork = vm.fork(clones, hosts=hosts).raise_for_errors()
                parents = w.cpu_ms(parent) - parents
                busy = w.busy_ms() - busy
                sent = made.sent_bytes() - sent
                last = max(result.ready_ms or 0.0 for result in fork.results)
                w.end_all(fork)
                series = world.figures.series
                if form == FORMS[0]:
                    series("hosts_last_ready_ms", clones=what).add(last)
                    # Of each processor.
                    series("hosts_start_busy_ms", clones=what, by="the parent's daemon").add(parents / w.cores())
                    series("hosts_start_busy_ms", clones=what, by="all others").add((busy - parents) / w.cores())
                if what == EACH:
                    series("hosts_each_last_ready_ms", by=form).add(last)
                    # Of all processors.
                    series("hosts_each_cpu_ms", by=form, of="the whole machine").add(busy)
                    series("hosts_each_cpu_ms", by=form, of="the parent's daemon").add(parents)
                    series("hosts_each_parent_sent_MiB", by=form).add(sent / (1 << 20))


def _bytes(world: w.World) -> None:
    """Hosts that all need the same memory at once, which comes from each other or once to all."""
    for form in FORMS:
        _bytes_by(world, form)


def _bytes_by(world: w.World, form: str) -> None:
    count = world.pick((8,), (4,))[0]
    with cluster(world, count + 1, pool=1, more_flags=["--page-transfer", form]) as made:
        vm = world.run(made.clients[0], memory_mib=2 * DATA_MIB)
        vm.exec(f"head -c {DATA_MIB}M /dev/urandom > /dev/shm/data", check=True)
        for how in ("as they read it", "in the background"):
            for _ in world.rounds(f"{DATA_MIB} MiB {how}, {form}", share=SHARE / 2 / len(FORMS)):
                for hosts in (1, count):
                    # What was lent before is known on no host any more.
                    vm.exec(f"head -c {DATA_MIB}M /dev/urandom > /dev/shm/data", check=True, timeout_s=120)
                    world.drained(vm)
                    before, begin = made.sent_bytes(), w.now_ms()
                    rate = 1000 if how == "in the background" else None
                    fork = vm.fork(hosts, hosts=made.names(hosts), hydrate_mib_per_s=rate).raise_for_errors()
                    if rate is None:
                        with ThreadPoolExecutor(hosts) as threads:
                            list(threads.map(lambda clone: clone.exec("cat /dev/shm/data > /dev/null", check=True, timeout_s=300), fork))
                    else:
                        w.eventually(lambda fork=fork: all(_is_whole(clone) for clone in fork), 300, "all has come", every_s=0.1)
                    labels = {"hosts": hosts, "memory": how, "by": form}
                    world.figures.series("hosts_all_here_ms", **labels).add(w.now_ms() - begin)
                    world.figures.series("hosts_parent_sent_MiB", **labels).add((made.sent_bytes() - before) / (1 << 20))
                    w.end_all(fork)


def _is_whole(vm: w.vmfork.VM) -> bool:
    return vm.inspect().memory.missing_pages == 0
