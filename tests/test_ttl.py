"""Bounds in time: `--ttl` of `run` and `fork`, `vmfork ttl`, and what clones inherit."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.metrics import read
from harness.processes import Process
from harness.waits import eventually, stays

REASON = "its time to live is over"
#: How late an end may be noticed on a busy machine.
LATE_S = 15.0


def _ended(vm: vmfork.VM) -> bool:
    detail = vm.inspect()
    assert not detail.state.has_ended or detail.reason == REASON, detail.reason
    return detail.state is vmfork.VmState.EXITED


def test_a_vm_from_a_store_ends_by_its_bound(client: vmfork.Client, cli: Cli, daemon: Daemon, image: str) -> None:
    shape = guests.Shape(image, 512, 1)
    guests.link_into(daemon.state / "snapshots", guests.stored(shape))
    before = read(daemon).value("vmfork_vms_ended_total", reason="expired")
    cli("run", shape.name, "--name", "short", "--ttl", "1h")
    vm = client.vm("short")
    qemu = daemon.qemu(vm)
    asked_ms = time.time() * 1000
    ttl = vm.inspect().ttl
    answered_ms = time.time() * 1000
    assert ttl is not None and 0 < ttl.left_ms <= 3600_000 and ttl.inherited_from is None
    assert asked_ms - 10 <= ttl.expires_unix_ms - ttl.left_ms <= answered_ms + 10
    assert re.search(r"^ends +in \d+m\d+s \(", cli.text("inspect", "short"), re.MULTILINE)
    # A snapshot carries no bound.
    (other,) = client.snapshots.start(shape.name).raise_for_errors()
    assert other.inspect().ttl is None
    # All else is done: however slow the machine is, the VM has lived until here.
    began = time.monotonic()
    vm.set_ttl(2)
    eventually(lambda: _ended(vm), 2 + LATE_S, "it ends")
    assert time.monotonic() - began >= 1.9, "not before its time"
    eventually(lambda: not qemu.is_alive(), 5, "QEMU is gone")
    assert not _ended(other)
    assert read(daemon).value("vmfork_vms_ended_total", reason="expired") == before + 1
    shown = cli.text("inspect", "short")
    assert REASON in shown and not re.search(r"^ends ", shown, re.MULTILINE)
    with pytest.raises(vmfork.Conflict):
        vm.set_ttl(10)


def test_clones_inherit_the_instant_and_a_bound_of_their_own_wins(vm: vmfork.VM, client: vmfork.Client) -> None:
    vm.set_ttl(3600)
    inheriting, long = vm.fork(1).raise_for_errors()[0], vm.fork(1, ttl_s=7200).raise_for_errors()[0]
    of_parent, inherited, own = (one.inspect().ttl for one in (vm, inheriting, long))
    assert of_parent and inherited and own
    assert inherited.inherited_from == vm.id
    assert abs(inherited.expires_unix_ms - of_parent.expires_unix_ms) < 1000
    assert own.inherited_from is None and own.left_ms > 3600_000
    # A later change of the parent's moves what inherits it, also below a clone.
    below = inheriting.fork(1).raise_for_errors()[0]
    vm.set_ttl(2)
    for one in (vm, inheriting, below):
        eventually(lambda one=one: _ended(one), 2 + LATE_S, "it ends")
    assert not _ended(long)


@pytest.mark.slow
def test_clones_end_by_the_bound_of_an_ancestor_that_has_ended(vm: vmfork.VM) -> None:
    vm.set_ttl(3600)
    clone, free = (vm.fork(1).raise_for_errors()[0] for _ in range(2))
    assert free.set_ttl(None) is None
    bound = vm.set_ttl(20)
    vm.remove(force=True)
    ttl = clone.inspect().ttl
    assert bound and ttl and abs(ttl.expires_unix_ms - bound.expires_unix_ms) < 1000
    eventually(lambda: _ended(clone), 20 + LATE_S, "it ends without its parent")
    assert not _ended(free), "its bound was removed"


def test_a_paused_vm_ends_too(vm: vmfork.VM, daemon: Daemon) -> None:
    qemu = daemon.qemu(vm)
    vm.pause()
    vm.set_ttl(1)
    eventually(lambda: _ended(vm), 1 + LATE_S, "it ends")
    eventually(lambda: not qemu.is_alive(), 5, "QEMU is gone")


def test_a_bound_is_moved_and_removed_by_the_command_line(vm: vmfork.VM, cli: Cli) -> None:
    reply = cli.json("ttl", vm.name, "1h")
    assert 3500_000 < reply["ttl"]["left_ms"] <= 3600_000
    assert b"ends in 59m" in cli("ttl", vm.name, "1h").stderr
    assert cli.json("ttl", vm.name, "none")["ttl"] is None
    assert re.search(r"^ends +never$", cli.text("inspect", vm.name), re.MULTILINE)
    for bad in ("0s", "366d", "soon", "-1s"):
        assert cli("ttl", vm.name, "--", bad, code=2).stderr
        assert cli("fork", vm.name, f"--ttl={bad}", code=2).stderr
        assert cli("run", "x", f"--ttl={bad}", code=2).stderr
    with pytest.raises(vmfork.BadRequest):
        vm.set_ttl(0.5)
    assert b"no-such-vm" in cli("ttl", "no-such-vm", "1h", code=1).stderr


# -- on other hosts ------------------------------------------------------------------------------


@pytest.fixture
def cluster(three_hosts: Cluster) -> Iterator[Cluster]:
    kept = frozenset({"borrower"})
    yield three_hosts
    three_hosts.clear(keep=kept)


@pytest.mark.slow
@pytest.mark.limit(240)
def test_clones_on_other_hosts_inherit_and_hear_of_changes(cluster: Cluster) -> None:
    web = cluster.warm(0, name="web", memory_mib=128)
    web.set_ttl(3600)
    (clone,) = web.fork(1, hosts=["h1"]).raise_for_errors()
    (own,) = web.fork(1, hosts=["h1"], ttl_s=7200).raise_for_errors()
    there = cluster.clients[1].vm(clone.name)
    ttl = there.inspect().ttl
    assert ttl is not None and ttl.inherited_from == web.inspect().id
    assert 3400_000 < ttl.left_ms <= 3600_000
    # The clone of the clone, on a third host, hears of it, too.
    (below,) = there.fork(1, hosts=["h2"]).raise_for_errors()
    # The change is asked of another host than the VM's.
    cluster.clis[1]("ttl", "web", "3s")
    for one in (web, there, cluster.clients[2].vm(below.name)):
        eventually(lambda one=one: _ended(one), 3 + LATE_S, "it ends")
    assert not _ended(cluster.clients[1].vm(own.name))


@pytest.mark.limit(240)
def test_clones_on_other_hosts_get_the_bound_that_stands_at_the_freeze(cluster: Cluster) -> None:
    web = cluster.warm(0, name="web", memory_mib=128)
    web.set_ttl(6)
    qemu = cluster.daemons[0].qemu(web)
    # The fork waits for the freeze until the bound is over that stood when it was requested.
    qemu.kill(signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        try:
            forking = pool.submit(web.fork, 1, hosts=["h1"])
            stays(lambda: not forking.done(), 1, "the fork waits")
            assert web.set_ttl(None) is None
            stays(lambda: not forking.done(), began + 7 - time.monotonic(), "the fork waits")
        finally:
            qemu.kill(signal.SIGCONT)
        (clone,) = forking.result().raise_for_errors()
    there = cluster.clients[1].vm(clone.name)
    stays(lambda: not _ended(there), 3, "it has no bound")
    assert there.inspect().ttl is None


def _fork_into_stopped_qemus(
    cluster: Cluster, web: vmfork.VM, pool: ThreadPoolExecutor
) -> tuple[Future[vmfork.ForkResult], list[Process]]:
    """A fork onto the second host that waits for its QEMU, and what is stopped for it.

    Nothing is stopped if a QEMU that had just been started took the clone.
    """
    h1 = cluster.clients[1]
    (first,) = web.fork(1, hosts=["h1"]).raise_for_errors()
    h1.vm(first.name).remove(force=True)
    eventually(lambda: h1.host().pool.waiting >= 1, 60, "a QEMU waits")
    qemus = [process for process in cluster.daemons[1].processes() if process.is_qemu]
    for qemu in qemus:
        qemu.kill(signal.SIGSTOP)
    forking = pool.submit(web.fork, 1, hosts=["h1"])
    done, _ = wait([forking], timeout=2)
    if done:
        for qemu in qemus:
            qemu.kill(signal.SIGCONT)
        (clone,) = forking.result().raise_for_errors()
        h1.vm(clone.name).remove(force=True)
        return forking, []
    return forking, qemus


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_bound_set_during_a_fork_reaches_clones_that_begin_after_their_parents_end(cluster: Cluster) -> None:
    web = cluster.warm(0, name="web", memory_mib=128)
    h1 = cluster.clients[1]
    # Past the freeze, the clone waits for its QEMU: no VM of the family is on its host.
    with ThreadPoolExecutor(1) as pool:
        for _ in range(40):
            forking, qemus = _fork_into_stopped_qemus(cluster, web, pool)
            if qemus:
                break
        else:
            pytest.fail("each fork found a QEMU that had started meanwhile")
        try:
            web.set_ttl(10)
            web.remove(force=True)
            stays(lambda: not forking.done(), 1, "the fork waits")
        finally:
            for qemu in qemus:
                qemu.kill(signal.SIGCONT)
        (clone,) = forking.result().raise_for_errors()
    there = h1.vm(clone.name)
    eventually(lambda: _ended(there), 10 + LATE_S, "it ends")


@pytest.mark.limit(240)
def test_a_vm_of_another_host_is_paused_and_resumed(cluster: Cluster) -> None:
    web = cluster.warm(0, name="web", memory_mib=128)
    from_there = cluster.clients[1].vm("web")
    assert from_there.pause().state is vmfork.VmState.PAUSED
    assert web.inspect().state is vmfork.VmState.PAUSED
    # Its clones run, wherever they are.
    (clone,) = web.fork(1, hosts=["h1"]).raise_for_errors()
    assert clone.exec("true").ok
    assert web.inspect().state is vmfork.VmState.PAUSED
    cluster.clis[2]("resume", "web")
    assert web.exec("true").ok
