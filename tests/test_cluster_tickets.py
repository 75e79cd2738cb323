"""Tickets whose clones run on several hosts: `sf_join`, messages, exits and `sf_kill` work wherever a clone runs."""

from __future__ import annotations

import collections
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import vmfork

from harness.cluster import Cluster, cluster_of
from harness.waits import eventually

PROGRAM = Path(__file__).parent / "guest" / "away.py"
COUNT = 4
#: How long the hosts of a ticket wait for one that is silent, and what they take to notice.
LOST_S = 30


@pytest.fixture
def cluster(image: str) -> Iterator[Cluster]:
    """Two hosts that wait a quarter of the time for one that is silent."""
    with cluster_of(2, image, ["--debug-pace", "4"]) as made:
        yield made


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    return parent_on(cluster)


def parent_on(cluster: Cluster) -> vmfork.VM:
    """A VM on the first host, with the program."""
    vm = cluster.warm(0, name="web", memory_mib=256)
    vm.copy_in(PROGRAM, "/run/away.py")
    return vm


def clones(cluster: Cluster) -> dict[str, str | None]:
    """The hosts of all clones of `web`, by name."""
    return {vm.name: vm.inspect().host for vm in cluster.clients[0].vms() if vm.name.startswith("web.")}


@pytest.mark.slow
@pytest.mark.limit(240)
def test_clones_on_all_hosts_answer_and_end_as_if_they_were_here(three_hosts: Cluster) -> None:
    cluster = three_hosts
    parent = parent_on(cluster)
    done = parent.exec(["python3", "/run/away.py", "answers"], timeout_s=120)
    assert done.exit_code == 0, done.stdout_text + done.stderr_text
    ends = json.loads(done.stdout_text)
    assert [ends[str(vmid)] for vmid in range(1, COUNT)] == [None] * (COUNT - 1), ends
    assert ends[str(COUNT)], "it ended without sf_exit"
    fork = parent.inspect().last_fork
    assert fork is not None
    placed = collections.Counter(str(clone.host) for clone in fork.clones)
    assert set(placed) == {"h0", "h1", "h2"} and sorted(placed.values()) == [1, 1, 2], placed
    eventually(lambda: clones(cluster) == {}, 20, "the ticket's clones are gone")
    # And once more, by another ticket.
    assert parent.exec(["python3", "/run/away.py", "kill"], timeout_s=120).stdout_text == "killed\n"
    eventually(lambda: clones(cluster) == {}, 20, "sf_kill has ended them on all hosts")
    cluster.clear()


@pytest.mark.limit(240)
def test_when_a_host_dies_its_clones_have_failed_and_the_others_answers_are_whole(cluster: Cluster, parent: vmfork.VM) -> None:
    parent.exec("python3 /run/away.py lost > /run/said 2>&1 < /dev/null &", check=True)
    eventually(lambda: b"cloned" in parent.read_file("/run/said"), 90, "the ticket is cloned")
    where = clones(cluster)
    assert sorted(str(host) for host in where.values()) == ["h0", "h0", "h1", "h1"], where
    vmids = {vm.name: vm.vmid for vm in cluster.clients[0].vms() if vm.name in where}
    cluster.daemons[1].kill()
    here = [name for name, host in where.items() if host == "h0"]
    for name in here:
        cluster.clients[0].vm(name).write_file("/run/go", "")
    eventually(lambda: len(parent.read_file("/run/said").splitlines()) >= 3, LOST_S, "sf_join has returned")
    _cloned, seen, ends = parent.read_file("/run/said").decode().splitlines()
    answers, errors = json.loads(seen), json.loads(ends)
    for name, vmid in vmids.items():
        if name in here:
            assert answers[str(vmid)] == ["first", "second"] and errors[str(vmid)] is None, (seen, ends)
        else:
            assert "h1" in errors[str(vmid)] and "second" not in answers.get(str(vmid), []), (seen, ends)


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_short_cut_loses_nothing(three_hosts: Cluster) -> None:
    cluster = three_hosts
    parent = parent_on(cluster)
    parent.exec("python3 /run/away.py lost > /run/said 2>&1 < /dev/null &", check=True)
    eventually(lambda: b"cloned" in parent.read_file("/run/said"), 90, "the ticket is cloned")
    where = clones(cluster)
    there = [name for name, host in where.items() if host == "h1"]
    assert there and len(where) == COUNT, where
    for name, host in where.items():
        cluster.clients[int(str(host).removeprefix("h"))].vm(name).exec("(sleep 3; touch /run/go) > /dev/null 2>&1 < /dev/null &", check=True)
    cluster.net.cut(1)
    try:
        # What the clones there ask for now has to wait.
        eventually(lambda: clones_gone(cluster, there), 20, "they are out of reach")
    finally:
        cluster.net.mend(1)
    eventually(lambda: len(parent.read_file("/run/said").splitlines()) >= 3, 60, "sf_join has returned")
    _cloned, seen, ends = parent.read_file("/run/said").decode().splitlines()
    assert all(error is None for error in json.loads(ends).values()), ends
    assert list(json.loads(seen).values()) == [["first", "second"]] * COUNT, seen
    cluster.settle()
    cluster.clear()


def clones_gone(cluster: Cluster, names: list[str]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vmfork.HostsMissing)
        return not set(names) & {vm.name for vm in cluster.clients[0].vms()}
