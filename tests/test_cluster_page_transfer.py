"""How pages get to other hosts if nothing is said: from whoever has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vmfork

from harness.cluster import Cluster, cluster_of
from harness.sent import DATA_MIB, MIB, READ, Sent, parent_of
from harness.waits import eventually


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
    return parent_of(cluster, image)


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
def test_hosts_give_each_other_what_they_have(cluster: Cluster, parent: vmfork.VM) -> None:
    sent = Sent(cluster)
    came = fork_whole(parent, ["h1", "h2", "h3"])
    assert sent.pages_to_all() == 0, "nobody asked for multicast"
    assert sent.bytes() < 2 * came, f"the parent's host sent {sent.bytes() >> 20} MiB of the {came >> 20} MiB that each of three needed"
