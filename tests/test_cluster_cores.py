"""Virtual CPUs are a host's to give, as memory is: what one has none left for goes to another, or is refused with the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import vmfork

from harness import metrics
from harness.cluster import Cluster, cluster_of
from harness.waits import eventually

PROGRAM = Path(__file__).parent / "guest" / "away.py"
#: Of each host, which has one core.
VCPUS = 3
TAKEN = rf"VMs may have {VCPUS} on this host \(cores: 1, {VCPUS} each\)"


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    flags = ["--vcpus-per-core", str(VCPUS), "--family-vcpus-percent", "100", "--ticket-place", "pack"]
    with cluster_of(2, image, flags, one_core=True) as made:
        yield made


@pytest.fixture(scope="module")
def parent(cluster: Cluster) -> vmfork.VM:
    """A VM on the first host, with the program."""
    vm = cluster.warm(0, name="web", memory_mib=128)
    vm.copy_in(PROGRAM, "/run/away.py")
    return vm


def left(cluster: Cluster) -> dict[str, int]:
    """The virtual CPUs that hosts have left, as the first one knows."""
    return {host["name"]: host["vcpus_admissible"] for host in cluster.clis[0].json("cluster", "ls")["hosts"]}


def hosts_of(vm: vmfork.VM) -> list[str]:
    """Where the clones of its last fork were put."""
    fork = vm.inspect().last_fork
    assert fork is not None
    return sorted(str(clone.host) for clone in fork.clones)


@pytest.mark.limit(240)
def test_a_fork_fills_hosts_up_to_their_virtual_cpus(cluster: Cluster, parent: vmfork.VM, image: str) -> None:
    eventually(lambda: left(cluster) == {"h0": VCPUS - 1, "h1": VCPUS}, 20, "the hosts have told each other what they have left")
    with pytest.raises(vmfork.NoCapacity, match="virtual CPUs"):
        parent.fork(8, all_or_nothing=True)
    fork = parent.fork(8)
    started = [result for result in fork.results if not result.error]
    assert sorted(str(result.host) for result in started) == ["h0"] * (VCPUS - 1) + ["h1"] * VCPUS, fork.results
    for result in fork.results:
        if result not in started:
            assert result.error is not None and result.error.code == "no_capacity", fork.results
            assert "virtual CPUs needed" in str(result.error) and "--vcpus-per-core" in str(result.error.remedy)
    for client in cluster.clients:
        with pytest.raises(vmfork.NoCapacity, match=TAKEN) as refused:
            client.run(image, name="more", memory_mib=128)
        assert "--vcpus-per-core" in str(refused.value.remedy)
        assert (client.host().vcpus_max, client.host().vcpus_admissible) == (VCPUS, 0)
    for daemon in cluster.daemons:
        assert metrics.read(daemon).value("vmfork_vcpus") == VCPUS
    cluster.clear(keep=frozenset({"web"}))
    eventually(lambda: left(cluster) == {"h0": VCPUS - 1, "h1": VCPUS}, 20, "what has ended is left again")


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_packed_ticket_stays_where_it_fits_and_the_rest_goes_on(cluster: Cluster, parent: vmfork.VM) -> None:
    eventually(lambda: left(cluster) == {"h0": VCPUS - 1, "h1": VCPUS}, 20, "nothing else runs")
    done = parent.exec(["python3", "/run/away.py", "answers"], env={"COUNT": "2"}, timeout_s=120)
    assert done.exit_code == 0, done.stdout_text + done.stderr_text
    assert hosts_of(parent) == ["h0", "h0"]
    eventually(lambda: left(cluster)["h0"] == VCPUS - 1, 20, "the ticket's clones are gone")
    parent.fork(2, hosts=["h1"]).raise_for_errors()
    eventually(lambda: left(cluster)["h1"] == 1, 20, "one more fits there")
    done = parent.exec(["python3", "/run/away.py", "answers"], timeout_s=120)
    assert done.exit_code == 0, done.stdout_text + done.stderr_text
    assert len(json.loads(done.stdout_text)) == 3, "3 of 4 were granted"
    assert hosts_of(parent) == ["h0", "h0", "h1"]
    cluster.clear(keep=frozenset({"web"}))
