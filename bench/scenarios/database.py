"""Clones on many hosts that each read all of what their parent had in memory, as SnowFlock's BLAST
does (figure 4c): by form, over unicast.

Each round has a VM that never forked. Its first fork gets pages as they are read. In a second one
of the same VM, what clones of the first touched goes along. No host has any page before. All hosts
share this machine's processors, which each page costs time at both ends, so the figures include
their busy time. They also include what the links alone would take: the bytes that the busiest one
carried in one direction, at its rate.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from harness import metrics

from .. import transfers
from .. import world as w
from ..cluster import ALL_FORMS, RATE_BYTES_PER_S, Cluster, cluster, rest

TITLE = "Clones on many hosts that read all of a database in memory"

#: Of the rounds of a run: each takes minutes.
SHARE = 0.1

DATA_MIB = 256
#: That of `bench.traces`, which `crates/sim` replays as `scan`.
READ = "cat /dev/shm/set | wc -c"
READ_S = 600.0
FORKS = ("first", "later")
#: What times are told of.
SEEN, LINKS = "as seen", "by links alone"


def run(world: w.World) -> None:
    hosts = world.pick((16,), (4,))[0]
    for form in ALL_FORMS:
        _by(world, form, hosts)
    _speedups(world, hosts)


def _by(world: w.World, form: str, most: int) -> None:
    with cluster(world, most + 1, pool=1, more_flags=["--page-transfer", form]) as made:
        vm = world.run(made.clients[0], memory_mib=2 * DATA_MIB)
        w.end_all([*vm.fork(most, hosts=made.names(most)), vm])  # pools learn the shape
        for _ in world.rounds(f"{DATA_MIB} MiB, {form}", share=SHARE):
            for hosts in (1, most):
                vm = world.run(made.clients[0], memory_mib=2 * DATA_MIB, name="database")
                vm.exec(f"head -c {DATA_MIB}M /dev/urandom > /dev/shm/set", check=True, timeout_s=120)
                for fork in FORKS:
                    _read(world, made, vm, hosts, {"by": form, "fork": fork, "hosts": hosts})
                vm.remove(force=True)


def _read(world: w.World, made: Cluster, vm: w.vmfork.VM, hosts: int, labels: dict[str, object]) -> None:
    rest(world, made, vm, empty=True)
    before = [metrics.read(daemon) for daemon in made.daemons]
    links, busy, begin = made.link_bytes(), w.busy_ms(), w.now_ms()
    fork = vm.fork(hosts, hosts=made.names(hosts)).raise_for_errors()
    forked = w.now_ms()
    with ThreadPoolExecutor(hosts) as threads:
        read = list(threads.map(lambda clone: clone.exec(READ, check=True, timeout_s=READ_S).stdout_text.strip(), fork))
    took, busy = w.now_ms() - begin, w.busy_ms() - busy
    carried = [now - then for then, now in zip(links, made.link_bytes(), strict=True)]
    found = [metrics.Between(then, metrics.read(daemon)) for then, daemon in zip(before, made.daemons, strict=True)]
    w.end_all(fork)
    if any(count != str(DATA_MIB << 20) for count in read):
        raise RuntimeError(f"clones read {read} bytes")
    series = world.figures.series
    series("database_read_ms", **labels, time=SEEN).add(took)
    series("database_read_ms", **labels, time=LINKS).add(1000 * max(carried) / RATE_BYTES_PER_S)
    series("database_read_ms", **labels, time="processors busy, each").add(busy / w.cores())
    series("database_read_ms", **labels, time="of it the fork").add(forked - begin)
    series("database_parent_sent_MiB", **labels).add(carried[0] / (1 << 20))
    if hosts > 1:
        transfers.add(world, "database", found, **labels)


def _speedups(world: w.World, hosts: int) -> None:
    """Over unicast to as many hosts, by the medians; and over as many times what one host takes,
    which is what near-linear would come to."""
    for fork in FORKS:
        for time in (SEEN, LINKS):

            def took(form: str, on: int, fork: str = fork, time: str = time) -> float:
                return world.figures.series("database_read_ms", by=form, fork=fork, hosts=on, time=time).p50

            for form in ALL_FORMS[1:]:
                labels = {"by": form, "fork": fork, "hosts": hosts, "time": time}
                world.figures.series("database_speedup_over_unicast_times", **labels).add(took("unicast", hosts) / took(form, hosts))
            for form in ALL_FORMS:
                labels = {"by": form, "fork": fork, "hosts": hosts, "time": time}
                world.figures.series("database_speedup_over_one_host_times", **labels).add(hosts * took(form, 1) / took(form, hosts))
