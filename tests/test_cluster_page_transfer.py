"""How pages get to other hosts if nothing is said: by multicast from three hosts on that need them, else to each alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vmfork

from harness.cluster import Cluster, cluster_of
from harness.sent import Sent
from harness.waits import eventually

MIB = 1 << 20
DATA_MIB = 60
READ = "sha256sum /dev/shm/data"


@pytest.fixture(scope="module")
def made(image: str) -> Iterator[Cluster]:
    with cluster_of(4, image) as made:
        yield made


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.clear()


@pytest.fixture
def parent(cluster: Cluster, image: str) -> vmfork.VM:
    vm = cluster.clients[0].run(image, name="web", memory_mib=256)
    vm.exec(f"head -c {DATA_MIB}M /dev/urandom > /dev/shm/data", check=True)
    return vm


def fork_whole(parent: vmfork.VM, hosts: list[str]) -> int:
    """A clone on each host, which brings all pages. The most bytes that came to one of the hosts."""
    expected = parent.exec(READ, check=True).stdout
    fork = parent.fork(len(hosts), hosts=hosts, hydrate_mib_per_s=1000).raise_for_errors()
    eventually(lambda: not any(clone.inspect().memory.missing_pages for clone in fork), 120, "all have all pages")
    assert [clone.exec(READ, check=True, timeout_s=120).stdout for clone in fork] == [expected] * len(fork)
    came: int = max(clone.inspect().memory.source.peer for clone in fork)
    assert came > DATA_MIB * MIB
    return came


@pytest.mark.limit(240)
def test_to_one_host_pages_are_sent_alone(cluster: Cluster, parent: vmfork.VM) -> None:
    sent = Sent(cluster)
    came = fork_whole(parent, ["h1"])
    assert sent.pages_to_all() == 0
    assert sent.pages_to_one() > 0.9 * came / 4096


@pytest.mark.limit(240)
def test_two_hosts_give_each_other_what_they_have_and_hear_no_group(cluster: Cluster, parent: vmfork.VM) -> None:
    sent = Sent(cluster)
    fork_whole(parent, ["h1", "h2"])
    assert sent.pages_to_all() == 0


@pytest.mark.limit(240)
def test_to_three_hosts_most_pages_are_sent_at_once(cluster: Cluster, parent: vmfork.VM) -> None:
    sent = Sent(cluster)
    came = fork_whole(parent, ["h1", "h2", "h3"])
    assert sent.pages_to_all() > 0.5 * came / 4096, "most was sent another way"
    assert sent.bytes() < 1.6 * came, f"the parent's host sent {sent.bytes() >> 20} MiB of the {came >> 20} MiB that each of three needed"
