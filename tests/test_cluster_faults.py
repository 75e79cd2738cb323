"""Hosts of a cluster that die, come back, drain and leave. All tests have the same two of them,
which are members again at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import vmfork

from harness import metrics
from harness.cluster import Cluster, cluster_of
from harness.waits import eventually, settles

READ = "sha256sum /dev/shm/data"

DATA_BYTES = 20 << 20


@pytest.fixture(scope="module")
def made(image: str) -> Iterator[Cluster]:
    with cluster_of(2, image) as made:
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
    """A VM on the first host, with something to remember."""
    return _with_data(cluster.warm(0, name="web", memory_mib=256))


@pytest.fixture
def counted(cluster: Cluster) -> vmfork.VM:
    """The same, but it boots: a store's pages come another way, and here bytes are counted."""
    return _with_data(cluster.clients[0].run(cluster.image, name="web", memory_mib=256))


def _with_data(vm: vmfork.VM) -> vmfork.VM:
    vm.exec(f"head -c {DATA_BYTES} /dev/urandom > /dev/shm/data; echo kept > /run/secret; sha256sum /dev/shm/data > /run/sum", check=True)
    return vm


@pytest.mark.limit(180)
def test_hosts_join_with_a_token_once_drain_and_leave(cluster: Cluster, parent: vmfork.VM) -> None:
    first, second = cluster.clis
    token = first.json("cluster", "token")["token"]
    assert "already" in second("cluster", "join", token, "--address", cluster.address(1), code=1).stderr.decode()
    second("cluster", "drain")
    eventually(lambda: cluster.states(first)["h1"] == "draining", 20, "it is known")
    with parent.fork(2).raise_for_errors() as stay:
        assert {result.host for result in stay.results} == {"h0"}
    first("cluster", "activate", "h1")
    left = second("cluster", "leave")
    assert b"This host has left the cluster" in left.stdout + left.stderr
    assert second.json("cluster", "ls")["hosts"] == []
    eventually(lambda: len(first.json("cluster", "ls")["hosts"]) == 1, 20, "it has left")
    cluster.warm(1, name="alone", memory_mib=128)
    assert "in no cluster" in second("fork", "alone", "--place", "spread", code=1).stderr.decode()
    assert "h1" in first("fork", "web", "--host", "h1", code=1).stderr.decode()
    second("cluster", "join", token, "--address", cluster.address(1), "--name", "h1")
    cluster.settle()
    second("cluster", "leave")
    refused = second("cluster", "join", token, "--address", cluster.address(1), "--name", "h1", code=1)
    assert "token" in refused.stderr.decode()
    cluster.admit(1)
    cluster.settle()


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_host_whose_daemon_is_started_again_is_a_member_again(cluster: Cluster, parent: vmfork.VM) -> None:
    parent.fork(2, names=["lost", "stays"], place="spread").raise_for_errors()
    (lost,) = cluster.vms()["h1"]
    (stays,) = set(cluster.vms()["h0"]) - {"web"}
    cluster.daemons[1].kill()
    # The others go on meanwhile.
    assert cluster.clients[0].vm(stays).exec("sha256sum -c /run/sum", check=True).exit_code == 0
    cluster.daemons[1].start()
    cluster.settle()
    assert [vm.name for vm in cluster.clients[0].vms() if vm.name == lost] == [], "it ended with its host's daemon"
    with parent.fork(2, hosts=["h1"]).raise_for_errors() as there:
        for clone in there:
            assert clone.exec("sha256sum -c /run/sum", check=True).exit_code == 0
            assert cluster.clients[1].vm(clone.name).exec("cat /run/secret", check=True).stdout == b"kept\n"


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_clone_that_has_all_pages_outlives_the_parents_host(cluster: Cluster, parent: vmfork.VM) -> None:
    expected = parent.exec(READ, check=True).stdout
    parent.fork(1, names=["independent"], hosts=["h1"], hydrate_mib_per_s=1000).raise_for_errors()
    # What did not change between the forks is there for both.
    parent.exec("head -c 20M /dev/urandom > /dev/shm/later", check=True)
    (lazy,) = parent.fork(1, names=["lazy"], hosts=["h1"]).raise_for_errors()
    there = cluster.clients[1]
    eventually(lambda: there.vm("independent").inspect().memory.missing_pages == 0, 60, "all its pages have come")
    cluster.daemons[0].kill()
    assert there.vm("independent").exec(READ, check=True).stdout == expected
    # The other one asks for a page, and is told where that was looked for.
    with pytest.raises(vmfork.VmforkError):
        there.vm(lazy.name).exec("sha256sum /dev/shm/later", check=True)
    eventually(lambda: there.vm(lazy.name).inspect().state is vmfork.VmState.FAILED, 60, "it is stopped")
    reason = there.vm(lazy.name).inspect().reason or ""
    assert "page" in reason and "h0" in reason, reason


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_clone_whose_disk_has_come_outlives_the_parents_host(cluster: Cluster) -> None:
    disks = [vmfork.NewDisk.blank("data", 128 << 20)]
    vm = cluster.clients[0].run(cluster.image, name="db", memory_mib=128, disks=disks)
    fill = "mkdir -p /mnt/data && mount /dev/vdb /mnt/data && head -c 16M /dev/urandom > /mnt/data/file && sync"
    vm.exec(f"{fill} && sha256sum /mnt/data/file > /run/sum && echo 3 > /proc/sys/vm/drop_caches", check=True)
    vm.fork(1, names=["whole"], hosts=["h1"], hydrate_mib_per_s=1000).raise_for_errors()
    there, daemon = cluster.clients[1], cluster.daemons[1]

    def came() -> float:
        return metrics.read(daemon).value("vmfork_transfer_disk_pages_total")

    # What the file system has of its own comes, too.
    eventually(lambda: there.vm("whole").inspect().memory.missing_pages == 0 and came() * 4096 > 16 << 20, 60, "it has come")
    seen = [0.0]

    def rests() -> bool:
        seen.append(came())
        return seen[-1] == seen[-2]

    settles(rests, 1, 60, "nothing more comes")
    cluster.daemons[0].kill()
    check = "sha256sum -c /run/sum && echo 3 > /proc/sys/vm/drop_caches && sha256sum -c /run/sum"
    assert there.vm("whole").exec(check, check=True, timeout_s=60).exit_code == 0
    (deep,) = there.vm("whole").fork(1, place="here").raise_for_errors()
    assert deep.exec(check, check=True, timeout_s=60).exit_code == 0


def fork_at_rest(cluster: Cluster, parent: vmfork.VM, name: str) -> vmfork.MemoryInfo:
    """A clone on the second host, which has run a command and asks for nothing more. Its memory
    then."""
    parent.fork(1, names=[name], hosts=["h1"]).raise_for_errors()
    clone = cluster.clients[1].vm(name)
    clone.exec("true", check=True)
    pages_missing: list[int | None] = []

    def at_rest() -> bool:
        pages_missing.append(clone.inspect().memory.missing_pages)
        return len(pages_missing) > 1 and pages_missing[-1] == pages_missing[-2]

    eventually(at_rest, 30, f"{name} asks for nothing more", every_s=0.5)
    return clone.inspect().memory


def end_and_forget(cluster: Cluster, name: str) -> None:
    there = cluster.clients[1]
    there.vm(name).remove(force=True)
    eventually(lambda: there.host().cache_bytes == 0, 60, "nothing of it is left there")


@pytest.mark.limit(240)
def test_a_fork_brings_what_clones_of_earlier_ones_waited_for(cluster: Cluster, counted: vmfork.VM) -> None:
    there = cluster.clients[1]

    def memory(name: str) -> vmfork.MemoryInfo:
        return there.vm(name).inspect().memory

    start_first = fork_at_rest(cluster, counted, "first").demand_bytes
    there.vm("first").exec("sha256sum -c /run/sum", check=True)
    first = memory("first").demand_bytes
    end_and_forget(cluster, "first")

    start_second = fork_at_rest(cluster, counted, "second").demand_bytes
    assert start_second < start_first / 4, "what the first one's start waited for has come along"
    # Pages that only came as neighbours of others don't come again.
    assert memory("second").prefetched_bytes > DATA_BYTES, f"and what it read too: {memory('second')}"
    there.vm("second").exec("sha256sum -c /run/sum", check=True)
    assert memory("second").demand_bytes < first / 4, f"{first} bytes before: {memory('second')}"


@pytest.mark.limit(240)
def test_a_fork_brings_only_what_clones_of_earlier_ones_touched(cluster: Cluster, counted: vmfork.VM) -> None:
    def came(memory: vmfork.MemoryInfo) -> int:
        return memory.demand_bytes + memory.prefetched_bytes

    # Each page that is waited for brings its neighbours, and others are guessed.
    first = fork_at_rest(cluster, counted, "first")
    end_and_forget(cluster, "first")
    second = fork_at_rest(cluster, counted, "second")
    end_and_forget(cluster, "second")
    third = fork_at_rest(cluster, counted, "third")
    assert came(third) < came(first) / 2, (first, second, third)
    assert third.demand_bytes < first.demand_bytes / 4, ("and yet it waits for little", first, third)
