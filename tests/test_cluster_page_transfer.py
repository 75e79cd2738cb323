"""How pages get to other hosts if nothing is said: from the hosts that have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness import metrics
from harness.cluster import Cluster, cluster_of
from harness.metrics import Between
from harness.sent import DATA_MIB, MIB, READ, Sent, parent_of
from harness.waits import eventually


@pytest.fixture(scope="module")
def made(image: str) -> Iterator[Cluster]:
    with cluster_of(4, image) as made:
        yield made


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    yield made
    for daemon in made.daemons:
        if daemon.process is None or daemon.process.poll() is not None:
            daemon.start()
    made.settle()
    made.clear()


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    return parent_of(cluster)


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


@pytest.mark.slow
@pytest.mark.limit(240)
def test_hosts_give_each_other_what_they_have(cluster: Cluster, parent: vmfork.VM) -> None:
    sent = Sent(cluster)
    came = fork_whole(parent, ["h1", "h2", "h3"])
    assert sent.pages_to_all() == 0, "no flag asked for multicast"
    assert sent.bytes() < 2 * came, f"the parent's host sent {sent.bytes() >> 20} MiB of the {came >> 20} MiB that each of three needed"


@pytest.mark.slow
@pytest.mark.limit(240)
def test_when_the_parents_host_dies_pages_come_from_who_has_them_and_who_needs_others_is_stopped(cluster: Cluster, parent: vmfork.VM) -> None:
    h1, h2 = cluster.clients[1:3]
    expected = parent.exec(READ, check=True).stdout
    (whole,) = parent.fork(1, names=["whole"], hosts=["h2"], hydrate_mib_per_s=1000).raise_for_errors()
    eventually(lambda: whole.inspect().memory.missing_pages == 0, 60, "all its pages have come")
    # What no other host has.
    parent.exec("head -c 8M /dev/urandom > /dev/shm/late", check=True)
    parent.fork(2, names=["lost", "later"], hosts=["h1"]).raise_for_errors()
    whole.fork(1, names=["lazy"], hosts=["h1"]).raise_for_errors()

    def stopped(name: str) -> str:
        with pytest.raises(vmfork.VmforkError):
            h1.vm(name).exec("sha256sum /dev/shm/late", check=True)
        eventually(lambda: h1.vm(name).inspect().state is vmfork.VmState.FAILED, 60, "it is stopped")
        return h1.vm(name).inspect().reason or ""

    cluster.daemons[0].kill()
    before = metrics.read(cluster.daemons[1])
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(stopped, "lost")
        assert h1.vm("lazy").exec(READ, check=True).stdout == expected
        came = Between(before, metrics.read(cluster.daemons[1]))
        assert came.value("vmfork_transfer_came_pages_total", **{"from": "holder"}) > 0.9 * DATA_MIB * MIB / 4096
        # One that is forked only now needs that host as little.
        (second,) = h2.vm("whole").fork(1, hosts=["h3"]).raise_for_errors()
        assert second.exec(READ, check=True).stdout == expected
        reasons = [losing.result(90)]
    # Started again, it has nothing of what it had. A VM that does nothing may have missed a page before.
    cluster.daemons[0].start()
    cluster.settle()
    reasons.append(stopped("later"))
    for reason in reasons:
        assert re.match(r"a page of image \d+ was lost: page \d+ of image .* from no host: ", reason), reason
        assert re.search(r"h0 \([0-9.:]+\): .*(Connection refused|unknown-image)", reason), reason
    for name in ("lazy", "whole", second.name):
        assert h1.vm(name).exec("echo goes on", check=True).stdout == b"goes on\n"
