"""Several VMs fork at once onto all hosts, again and again. No VM waits long for a page, and no
host's memory is promised twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import metrics
from harness.cluster import Cluster, cluster_of
from harness.metrics import Between
from harness.waits import eventually
from harness.world import complete

MIB = 1 << 20
HOSTS = 3
PARENTS = 4
CLONES = 8
MEMORY_MIB = 768
#: What VMs may have on each host: not nearly all that are asked for fit, since each is promised all of its memory.
MAY_MIB = 6144
#: QEMUs that wait, and what a daemon keeps beside guests' memory.
BESIDE_MIB = 256
#: Longest wait of a fault while all hosts start clones and prefetch, on two cores.
WAIT_MAX_S = 2.0
#: A parent whose fork found no place forks again after this time: meanwhile others' clones end.
REST_S = 5.0
#: At most so often: the last forks have the hosts for themselves, so clones run on other hosts too.
TRIES_MAX = 8

READ = "sha256sum /dev/shm/data"


@pytest.fixture(scope="module")
def made(image: str, need: Callable[[object, str], None]) -> Iterator[Cluster]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available_mib,) = (int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable"))
    need(available_mib > 2 * MAY_MIB, f"{2 * MAY_MIB} MiB of memory")
    flags = ["--clone-growth-percent", "100", "--memory-reserve-mib", str(available_mib - MAY_MIB)]
    with cluster_of(HOSTS, image, flags) as made:
        yield made


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.clear()


@contextlib.contextmanager
def most_in_use(cluster: Cluster) -> Iterator[list[int]]:
    """The most bytes that each host's VMs and caches took at a time, as far as is seen by looking often."""
    most, done = [0] * HOSTS, threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for number, client in enumerate(cluster.clients):
                pids = [vm.info.pid for vm in client.vms() if vm.info and vm.info.host == f"h{number}" and vm.info.pid]
                bytes_now = cluster.daemons[number].memfd_bytes() + sum(map(anonymous_bytes, pids))
                most[number] = max(most[number], bytes_now)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield most
        finally:
            done.set()
            looking.result(60)


def anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


def storm(parent: vmfork.VM, times: int) -> tuple[int, int]:
    """Fork it; each clone reads what its parent knows. → how many ran, how many found no place."""
    expected = parent.exec(READ, check=True).stdout
    ran = refused = 0
    for _ in range(times):
        fork, tries = try_to_fork(parent)
        refused += CLONES * tries
        for error in fork.errors:
            complete(error, "no_capacity")
            refused += 1
        for clone in fork:
            assert clone.exec(READ, check=True).stdout == expected, clone
            clone.exec("head -c 16M /dev/urandom > /dev/shm/own", check=True)
            ran += 1
            clone.remove(force=True)
    return ran, refused


def try_to_fork(parent: vmfork.VM) -> tuple[vmfork.ForkResult, int]:
    """→ the fork that found places, and how many found none before."""
    for refused in range(TRIES_MAX):
        try:
            return parent.fork(CLONES, hydrate_mib_per_s=1000), refused
        except vmfork.ApiError as error:
            complete(error, "no_capacity")
            time.sleep(REST_S)
    raise AssertionError(f"{parent.name}: {TRIES_MAX} forks found no place")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.limit(240)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_storm_of_forks_is_weathered(cluster: Cluster, times: int) -> None:
    made = cluster
    parents = []
    for number in range(PARENTS):
        vm = made.warm(number % HOSTS, name=f"web{number}", memory_mib=MEMORY_MIB)
        vm.exec("head -c 16M /dev/urandom > /dev/shm/data", check=True)
        parents.append(vm)
    before = [metrics.read(daemon) for daemon in made.daemons]
    with most_in_use(made) as most, ThreadPoolExecutor(PARENTS) as pool:
        outcomes = list(pool.map(lambda parent: storm(parent, times), parents))
    ran, refused = (sum(counts) for counts in zip(*outcomes, strict=True))
    assert (ran + refused) % CLONES == 0, outcomes
    assert ran + refused >= PARENTS * CLONES * times, outcomes
    assert refused > 0, "more was promised than there is"
    assert ran >= CLONES, outcomes
    assert all(bytes_most <= (MAY_MIB + BESIDE_MIB) * MIB for bytes_most in most), most

    def counted() -> list[Between]:
        return [Between(first, metrics.read(daemon)) for first, daemon in zip(before, made.daemons, strict=True)]

    for host in counted():
        for place in ("here", "peer"):
            longest = host.quantile(1.0, "vmfork_fault_wait_seconds", place=place)
            assert not longest > WAIT_MAX_S, f"a fault waited {longest} s for a page ({place})"
    assert sum(host.value("vmfork_fault_wait_seconds_count", place="peer") for host in counted()) > 0

    def total(name: str, side: str, role: str) -> float:
        return sum(host.value(name, side=side, role=role) for host in counted())

    for role in ("demand", "ahead"):
        for name in ("requests", "pages", "bytes"):
            asked, served = (total(f"vmfork_transfer_{name}_total", side, role) for side in ("asked", "served"))
            assert asked > 0
            # An answer that no host took is one whose clone has ended.
            assert asked <= served
    assert sum(vm.inspect().memory.hosts.given for vm in parents) > 16 * MIB
    # In this order: pages still come.
    kept = sum(host.value("vmfork_cache_filled_bytes_total", source="peer") for host in counted())
    came = 4096 * sum(total("vmfork_transfer_pages_total", "asked", role) for role in ("demand", "ahead"))
    assert 0.95 * came <= kept <= came, "pages come once to a host"
