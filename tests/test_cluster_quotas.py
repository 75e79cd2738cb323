"""A user's quota holds on all hosts together, for runs, forks and tickets, whichever host is asked
and when."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import places
from harness.cluster import Cluster, cluster_of
from harness.waits import eventually, stays

PROGRAM = Path(__file__).parent / "guest" / "away.py"
QUOTA = 6
NOBODY = 65534


@pytest.fixture
def cluster(image: str) -> Iterator[Cluster]:
    # A host that is silent is gone after 5 s.
    flags = ["--debug-pace", "3", "--quota", f"root=vms:{QUOTA}", "--quota", f"{NOBODY}=memory:4G", "--socket-group", str(NOBODY)]
    with cluster_of(2, image, flags) as made:
        yield made


def live(cluster: Cluster) -> int:
    return sum(len(names) for names in cluster.vms().values())


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_user_has_no_more_than_the_quota_on_all_hosts(cluster: Cluster, image: str) -> None:
    parent = cluster.warm(0, name="web", memory_mib=128)
    parent.copy_in(PROGRAM, "/run/away.py")
    fork = parent.fork(8)
    failed = [result for result in fork.results if result.error]
    assert (live(cluster), len(failed)) == (QUOTA, 8 - (QUOTA - 1)), fork.results
    assert {result.host for result in fork.results if not result.error} == {"h0", "h1"}
    assert {clone.inspect().user for clone in fork} == {"0"}
    assert all("user 0 has 1 of 6 VMs on all hosts" in str(result.error) for result in failed), failed
    for client in cluster.clients:
        with pytest.raises(vmfork.NoCapacity, match="user 0 has 6 of 6 VMs") as refused:
            client.run(image, name="more", memory_mib=128)
        assert "--quota" in str(refused.value.remedy)
    with pytest.raises(vmfork.NoCapacity):
        parent.fork(1)

    # Whose process asks counts, and what another has does not.
    command = [str(places.VMFORK), "--socket", str(cluster.daemons[1].socket), "run", image, "--name", "nobody", "--memory", "128"]
    subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], timeout=120, check=True)
    assert (cluster.clients[1].vm("nobody").inspect().user, parent.inspect().user) == (str(NOBODY), "0")
    cluster.clients[1].vm("nobody").remove(force=True)

    # What has ended on one host can be had on another at once.
    cluster.clear(keep=frozenset({"web"}))
    other = cluster.warm(1, name="other", memory_mib=128)
    # Both at once: what one gets the other does not.
    with ThreadPoolExecutor() as pool:
        forks = list(pool.map(lambda vm: outcome(vm), (parent, other)))
    assert live(cluster) == QUOTA, forks
    cluster.clear(keep=frozenset({"web", "other"}))
    # A ticket gets less than it asks for.
    spare = parent.fork(2).raise_for_errors()
    done = parent.exec(["python3", "/run/away.py", "answers"], timeout_s=120)
    assert done.exit_code == 0, done.stdout_text + done.stderr_text
    assert len(json.loads(done.stdout_text)) == 2, "2 of 4 were granted"
    for clone in spare:
        clone.remove(force=True)
    eventually(lambda: live(cluster) == 2, 20, "the ticket's clones are gone")
    stays(lambda: live(cluster) == 2, 2, "all hosts have told that")

    # Whichever host counted: when one is gone the other does, and what was there still counts.
    cluster.daemons[1].kill()
    fork = eventually(lambda: fork_if_counted(parent), 60, "the other host counts", every_s=1)
    assert sum(not result.error for result in fork.results) == QUOTA - 2, fork.results


def fork_if_counted(vm: vmfork.VM) -> vmfork.ForkResult | None:
    try:
        return vm.fork(8, place="here")
    except vmfork.HostError as error:
        assert "can't be told now" in str(error)
        return None


def outcome(vm: vmfork.VM) -> object:
    try:
        return [str(result.error) for result in vm.fork(8).results]
    except vmfork.NoCapacity as error:
        return error
