"""Pages that are sent once to all hosts that need them: three hosts, joined by a bridge that floods multicast unless it is told not to."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness.cluster import Cluster, cluster_of
from harness.sent import DATA_MIB, MIB, READ, Counted, Sent, parent_of
from harness.waits import eventually

#: What the parent's host sends beside pages: heartbeats, descriptors, answers.
SLACK_BYTES = 6 * MIB


@pytest.fixture(scope="module")
def made(image: str) -> Iterator[Cluster]:
    with cluster_of(3, image, ["--page-transfer", "multicast"]) as made:
        yield made


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    yield made
    made.clear()


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    return parent_of(cluster)


def read_at_once(clones: vmfork.ForkResult, expected: bytes) -> None:
    with ThreadPoolExecutor(len(clones)) as threads:
        read = list(threads.map(lambda clone: clone.exec(READ, check=True, timeout_s=120).stdout, clones))
    assert read == [expected] * len(clones)


def needed(clones: vmfork.ForkResult) -> int:
    """The most bytes that came to one of the hosts."""
    return max(clone.inspect().memory.source.peer for clone in clones)


@pytest.mark.alone
@pytest.mark.limit(240)
def test_what_two_hosts_bring_is_sent_about_once(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    sent = Sent(cluster)
    fork = parent.fork(2, hosts=["h1", "h2"], hydrate_mib_per_s=1000).raise_for_errors()
    eventually(lambda: not any(clone.inspect().memory.missing_pages for clone in fork), 120, "all have all pages")
    in_all, came = sent.bytes(), needed(fork)
    assert came > DATA_MIB * MIB
    assert sent.pages_to_all() > 0.7 * came / 4096, "most was sent another way"
    assert in_all < 1.2 * came + SLACK_BYTES, f"the parent's host sent {in_all >> 20} MiB of the {came >> 20} MiB that each of two needed"
    read_at_once(fork, expected)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.limit(240)
def test_what_vms_of_two_hosts_read_at_once_is_sent_about_once(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    sent, counted = Sent(cluster), Counted(cluster)
    fork = parent.fork(2, hosts=["h1", "h2"]).raise_for_errors()
    read_at_once(fork, expected)
    assert sent.pages_to_all() > 0.5 * DATA_MIB * MIB / 4096, "most was sent another way"
    in_all, came = sent.bytes(), needed(fork)
    assert in_all < 1.5 * came + SLACK_BYTES, f"the parent's host sent {in_all >> 20} MiB of the {came >> 20} MiB that each of two needed"
    gone(cluster, fork)
    to_all = sent.pages_to_all()
    requested, lockstep = (counted.pages("served", what) for what in ("requested", "lockstep"))
    assert requested - lockstep - counted.pages("served", "refused") >= to_all
    # How many, is chance here: they need not read the same at the same time.
    assert lockstep < requested
    assert counted.pages("asked", "requested") >= requested
    assert counted.events("served", "requests") > 0
    # Both hear all of it, and each is a reader of a part.
    assert counted.pages("asked", "heard") + counted.pages("asked", "no_room") > 1.5 * to_all
    assert counted.events("asked", "datagrams") > 2 * 0.5 * DATA_MIB * MIB / 1500
    assert counted.pages("asked", "read") == counted.came_by_group() > 0
    assert counted.pages("asked", "kept") > 0
    for what in ("lacking", "forged", "undecided"):
        assert counted.pages("served", what) + counted.pages("asked", what) == 0, what


def gone(cluster: Cluster, clones: vmfork.ForkResult) -> None:
    """End them: what counted their images is gone, too."""
    for clone in clones:
        clone.remove(force=True)
    eventually(lambda: not any(client.host().cache_bytes for client in cluster.clients[1:]), 60, "their images are gone")


def flood(cluster: Cluster, number: int, *, on: bool) -> None:
    """Whether the switch hands multicast on to a host."""
    switch = cluster.net.switch
    inside = ["nsenter", f"--net=/run/netns/{switch}", "bridge", "link", "set", "dev", f"p{number}"]
    words = ["mcast_flood", "on" if on else "off"]
    # Without looking into what hosts have joined.
    subprocess.run(["ip", "-n", switch, "link", "set", "br0", "type", "bridge", "mcast_snooping", "0"], timeout=30, check=True)
    subprocess.run([*inside, *words], timeout=30, check=True)


@contextlib.contextmanager
def lossy(cluster: Cluster, number: int) -> Iterator[None]:
    """Meanwhile a host gets multicast in turns, and else loses it."""
    ends = threading.Event()

    def flap() -> None:
        while not ends.is_set():
            flood(cluster, number, on=False)
            ends.wait(0.05)
            flood(cluster, number, on=True)
            ends.wait(0.2)

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(60)
        flood(cluster, number, on=True)


@pytest.mark.slow
@pytest.mark.limit(480)
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_lost_on_its_way_comes_all_the_same(cluster: Cluster, times: int) -> None:
    lost = 0.0
    # A page that the switch drops is sent again to all, or to the one host that waits for it. It
    # depends on when the switch drops it: now and then all come to the one host.
    for turn in range(times + 4):
        if turn < times or not lost:
            lost += _bring_with_loss(cluster, parent_of(cluster))
            cluster.clear()
    assert lost > 0, "nothing lost was sent again to all"


def _bring_with_loss(cluster: Cluster, parent: vmfork.VM) -> float:
    """Pages that the parent's host saw lost, and sent again to all."""
    expected = parent.exec(READ, check=True).stdout
    sent, counted = Sent(cluster), Counted(cluster)
    with lossy(cluster, 2):
        fork = parent.fork(2, hosts=["h1", "h2"], hydrate_mib_per_s=1000).raise_for_errors()
        read_at_once(fork, expected)
        eventually(lambda: not any(clone.inspect().memory.missing_pages for clone in fork), 120, "all have all pages")
    read_at_once(fork, expected)
    came = needed(fork)
    assert sent.pages_to_all() > 0.5 * came / 4096, "most was sent another way"
    assert sent.pages_to_all() + sent.pages_to_one() > 1.01 * came / 4096, "nothing was lost"
    gone(cluster, fork)
    repeated, lost, resent = (counted.pages("served", what) for what in ("repeated", "lost", "resent"))
    assert counted.pages("asked", "repeated") >= repeated >= lost
    assert resent < sent.pages_to_all() and (resent > 0 or not lost)
    return lost


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_host_that_no_multicast_reaches_gets_all_pages_all_the_same(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    flood(cluster, 2, on=False)
    try:
        sent = Sent(cluster)
        fork = parent.fork(2, hosts=["h1", "h2"]).raise_for_errors()
        read_at_once(fork, expected)
        assert sent.pages_to_all() > 0.5 * DATA_MIB * MIB / 4096, "h1 hears it"
        assert sent.pages_to_one() > 0.9 * DATA_MIB * MIB / 4096, "h2 does not, or so it should be"
        (deaf,) = [clone for clone, result in zip(fork, fork.results, strict=True) if result.host == "h2"]
        assert deaf.inspect().memory.source.peer > DATA_MIB * MIB
    finally:
        flood(cluster, 2, on=True)
