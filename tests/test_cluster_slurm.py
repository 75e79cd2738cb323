"""Slurm says which hosts clones may have: a ticket or a fork is a job, which lasts as long as its clones, and they no longer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import vmfork

from harness.cluster import Cluster
from harness.hosts import hosts
from harness.slurm import Slurm, slurm_on
from harness.waits import eventually, stays

PROGRAM = Path(__file__).parent / "guest" / "away.py"
#: Of each node, as Slurm counts.
CPUS = 2
#: A job is kept a while after its last clone, and hosts tell each other every second.
RELEASED_S = 20
#: Divides the 30 s for which a daemon keeps what an earlier one left (`ADOPTED_FOR` in
#: `peers/src/jobs.rs`).
PACE = 4
ADOPTED_S = 60


@pytest.fixture(scope="module")
def made(image: str) -> Iterator[tuple[Cluster, Slurm]]:
    with hosts(2) as net, slurm_on(net, CPUS) as slurm, contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(slurm.conf))
        cluster = Cluster(net, image, stack, ["--allocator", "slurm", "--debug-pace", str(PACE)])
        cluster.join()
        yield cluster, slurm


@pytest.fixture
def slurm(made: tuple[Cluster, Slurm]) -> Slurm:
    return made[1]


@pytest.fixture
def cluster(made: tuple[Cluster, Slurm]) -> Iterator[Cluster]:
    cluster, slurm = made
    yield cluster
    cluster.clear()
    eventually(lambda: slurm.jobs() == {}, RELEASED_S, "no job is left")


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    vm = cluster.warm(0, name="web", memory_mib=128)
    vm.copy_in(PROGRAM, "/run/away.py")
    return vm


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_guests_ticket_is_a_job_and_ends_with_it(cluster: Cluster, slurm: Slurm, parent: vmfork.VM) -> None:
    parent.exec("python3 /run/away.py lost > /run/said 2>&1 < /dev/null &", check=True)
    eventually(lambda: b"cloned" in parent.read_file("/run/said"), 90, "the ticket is cloned")
    assert list(slurm.jobs().values()) == ["h[0-1]"]
    clones = {vm.name: vm.inspect().host for vm in cluster.clients[0].vms() if vm.name != "web"}
    assert sorted(str(host) for host in clones.values()) == ["h0", "h0", "h1", "h1"]
    stays(slurm.jobs, 8, "the job lasts as long as its clones")
    for name in clones:
        cluster.clients[0].vm(name).write_file("/run/go", "")
    eventually(lambda: len(parent.read_file("/run/said").splitlines()) >= 3, 60, "sf_join has returned")
    *_, ends = parent.read_file("/run/said").decode().splitlines()
    assert set(json.loads(ends).values()) == {None}, ends
    eventually(lambda: slurm.jobs() == {}, RELEASED_S, "the job has ended with the ticket")


@pytest.mark.limit(240)
def test_a_fork_gets_what_slurm_gives_and_ends_with_its_job(cluster: Cluster, slurm: Slurm, parent: vmfork.VM) -> None:
    fork = parent.fork(6)
    clones = [result.name for result in fork.results if not result.error]
    failed = [str(result.error) for result in fork.results if result.error]
    assert (len(clones), len(failed)) == (2 * CPUS, 2), fork.results
    assert all("Slurm gave room for 4" in error for error in failed), failed
    with pytest.raises(vmfork.NoCapacity, match="no node of a host that takes clones has as much free"):
        parent.fork(1)
    (job,) = slurm.jobs()
    assert {cluster.clients[0].vm(name).inspect().job for name in clones} == {job}
    slurm.run("scancel", job)
    eventually(lambda: cluster.vms() == {"h0": ["web"], "h1": []}, 30, "its clones have ended")
    reasons = {vm.name: vm.inspect().reason for vm in cluster.clients[0].vms(ended=True) if vm.name in clones}
    assert len(reasons) == 2 * CPUS, reasons
    assert all(str(reason).startswith(f"Slurm ended job {job}: CANCELLED") for reason in reasons.values()), reasons

    # Named hosts alone, by a job there alone.
    parent.fork(1, hosts=["h1"], names=["there"]).raise_for_errors()
    assert list(slurm.jobs().values()) == ["h1"]
    # Clones that stay need no job.
    parent.fork(1, place="here").raise_for_errors()
    assert len(slurm.jobs()) == 1


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_job_that_a_daemon_left_lasts_while_its_clones_do(cluster: Cluster, slurm: Slurm, parent: vmfork.VM) -> None:
    parent.fork(1, hosts=["h1"], names=["orphan"], hydrate_mib_per_s=500).raise_for_errors()
    orphan = cluster.clients[1].vm("orphan")
    eventually(lambda: orphan.inspect().memory.missing_pages == 0, 60, "it has all its pages")
    (job,) = slurm.jobs()
    # One that was asked for, and waits still, when the daemon dies.
    name = slurm.run("squeue", "--noheader", "--format=%j").strip()
    waits = slurm.run("sbatch", "--parsable", "--hold", f"--job-name={name}-1", "--output=/dev/null", "--wrap=sleep 600").strip()
    cluster.daemons[0].kill()
    cluster.daemons[0].start()
    cluster.settle()
    assert slurm.waiting() == {waits}
    stays(lambda: job in slurm.jobs(), 30 / PACE + 8, "its clone needs it")
    eventually(lambda: slurm.waiting() == set(), ADOPTED_S, "no ticket needs what waits")
    orphan.remove(force=True)
    eventually(lambda: slurm.jobs() == {}, ADOPTED_S, "no clone needs it")
