"""What VMs read of a guest image is recorded, and comes first where the image is pulled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import vmfork

from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.hosts import hosts
from harness.waits import eventually

#: In Mbit/s: an image takes several times as long as what a boot reads of it.
LINK = 16
#: In Mbit/s: a VM boots before the rest is here.
SLOW_LINK = 4
#: Of some 800 chunks: kernel, initrd and what a VM reads are among the first, if that is known.
FIRST_CHUNKS = 250
#: Reads a part of the root that a boot does not.
WORK = "cat /usr/lib/python3*/*.py /usr/lib/python3*/*/*.py | sha256sum"
#: A recording that its VM's end cuts short counts from 5 s on.
WORTH_S = 5.5


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    """Three hosts. The first has the image and seeds it."""
    with hosts(3) as net, contextlib.ExitStack() as stack:
        made = Cluster(net, image, stack)
        for cli in made.clis[1:]:
            cli("image", "rm", image)
        made.join()
        made.clients[0].seed_image(image)
        yield made


@pytest.fixture(autouse=True)
def nothing_stays(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.settle()
    cluster.clear()
    for client in cluster.clients[1:]:
        for one in client.images():
            client.remove_image(one.name)
    cluster.clients[0].reset_image_profile(cluster.image)


def _chunks(daemon: Daemon) -> int:
    found = os.walk(daemon.state / "snapshots" / "chunks")
    return sum(len(names) for _, _, names in found)


def _is_whole(client: vmfork.Client) -> bool:
    return all(one.remote is None for one in client.images())


def _work(client: vmfork.Client, image: str, **labels: str) -> None:
    with client.run(image, memory_mib=256, labels=labels) as vm:
        vm.exec(WORK, check=True, timeout_s=90)
        vm.exec(f"sleep {WORTH_S}", check=True)


def _runs(client: vmfork.Client, image: str) -> dict[str, int]:
    return {one.workload: one.runs for one in client.image_profile(image).workloads}


@pytest.mark.slow
@pytest.mark.limit(300)
def test_what_vms_read_on_one_host_comes_first_on_the_next(cluster: Cluster, image: str) -> None:
    first, second = cluster.clients[1:]
    first.pull_image(image)
    _work(first, image, workload="work")
    eventually(lambda: _runs(first, image) == {"work": 1}, 20, "it is learnt")
    (learnt,) = first.image_profile(image).workloads
    size = next(one.size_bytes for one in first.images())
    assert 0 < learnt.read_bytes < size / 4 and learnt.half_ms > 100
    for number in (0, 1):
        cluster.net.limit(number, LINK)
    # It comes from the host that learnt it, though another one has the image, too.
    second.pull_image(image)
    assert second.image_profile(image).workloads == (learnt,)
    eventually(lambda: _chunks(cluster.daemons[2]) > FIRST_CHUNKS, 120, "a part of it is here")
    assert not _is_whole(second)
    for number in (0, 1):
        cluster.net.limit(number, SLOW_LINK)
    # Boots differ, so a boot may read what none has read. The work reads the same each time.
    with second.run(image, memory_mib=256, labels={"workload": "work"}) as vm:
        assert not _is_whole(second)
        for number in (0, 1):
            cluster.net.cut(number)
        try:
            # Nothing else comes, and the VM has all that it needs.
            vm.exec(WORK, check=True, timeout_s=60)
        finally:
            for number in (0, 1):
                cluster.net.mend(number)
                cluster.net.unlimit(number)
        vm.exec(f"sleep {WORTH_S}", check=True)
    eventually(lambda: _runs(second, image) == {"work": 2}, 20, "it is refined")
    cluster.settle()
    # Each workload has its own; a VM without the label has another.
    with second.run(image, name="idle", memory_mib=256) as vm:
        vm.exec(f"sleep {WORTH_S}", check=True)
    eventually(lambda: _runs(second, image) == {"work": 2, "default": 1}, 20, "it is learnt")
    shown = cluster.clis[2].text("image", "profile", "show", image)
    assert shown.splitlines()[0].split()[:2] == ["WORKLOAD", "RUNS"] and "work" in shown
    cluster.clis[2]("image", "profile", "reset", image)
    assert _runs(second, image) == {}
    with pytest.raises(vmfork.NotFound):
        second.image_profile("absent")


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_run_has_the_rest_come_that_a_daemon_left(cluster: Cluster, image: str) -> None:
    client = cluster.clients[1]
    cluster.net.limit(0, LINK)
    client.pull_image(image)
    cluster.daemons[1].kill()
    cluster.net.unlimit(0)
    cluster.daemons[1].start()
    eventually(lambda: cluster.alive(cluster.clis[0]) == 3, 60, "it is back")
    assert not _is_whole(client), "no client asked for it"
    with client.run(image, memory_mib=256):
        eventually(lambda: _is_whole(client), 90, "the rest comes")


@pytest.mark.slow
@pytest.mark.limit(200)
def test_profiles_go_with_an_image_that_is_pushed(cluster: Cluster, image: str, tmp_path: Path) -> None:
    first, second = cluster.clients[1:]
    first.pull_image(image, wait=True)
    second.pull_image(image)
    with second.run(image, memory_mib=128) as vm:
        vm.exec("true", check=True)
    eventually(lambda: _runs(second, image) == {"default": 1}, 20, "a first run counts however short")
    eventually(lambda: _is_whole(second), 90, "all of it is here")
    second.push_image(image, str(tmp_path / "store"))
    second.remove_image(image)
    second.pull_image(image, str(tmp_path / "store"))
    assert _runs(second, image) == {"default": 1}
    # What is learnt later goes there, too, though the image is there.
    with second.run(image, memory_mib=128) as vm:
        vm.exec(f"sleep {WORTH_S}", check=True)
    eventually(lambda: _runs(second, image) == {"default": 2}, 20, "it is learnt")
    eventually(lambda: _is_whole(second), 90, "all of it is here")
    second.push_image(image, str(tmp_path / "store"))
    first.pull_image(image, str(tmp_path / "store"))
    assert _runs(first, image) == {"default": 2}
    # A root that becomes a file keeps it.
    second.pull_image(image, str(tmp_path / "store"), wait=True)
    assert _runs(second, image) == {"default": 2}
