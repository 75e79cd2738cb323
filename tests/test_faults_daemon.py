"""The daemon dies, or is told to end: what it had started goes with it, and the next one tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness import guests, leftovers
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually
from harness.world import World

MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def world(make_daemon: MakeDaemon, image: str) -> Iterator[World]:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        yield World(daemon, client, guests.warm(client, image, name="parent", memory_mib=256))


def nothing_runs() -> bool:
    return not leftovers.orphans()


@pytest.mark.limit(300)
def test_a_killed_daemon_leaves_nothing_and_the_next_tells_what_was_lost(world: World) -> None:
    world.load(60)
    clones = world.vm.fork(3).raise_for_errors()
    names = {"parent", *(clone.name for clone in clones)}
    running = world.daemon.processes()
    assert any(process.is_qemu for process in running)
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(clones[0].exec, "sleep 1000", timeout_s=200)
        time.sleep(1)
        world.daemon.kill()
        with pytest.raises(vmfork.VmforkError):
            sleeping.result(30)
    # Not even without a next daemon.
    eventually(nothing_runs, 15, "what the daemon had started is gone")
    assert not any(process.is_alive() for process in running)
    with ThreadPoolExecutor(1) as pool:
        # A client waits meanwhile.
        asking = pool.submit(world.client.vms)
        time.sleep(1)
        assert not asking.done()
        world.daemon.start()
        assert asking.result(30) == []
    host = world.client.host()
    assert {vm.name for vm in host.lost} == names
    assert {vm.parent for vm in host.lost} == {None, "parent"}
    assert world.client.vms(ended=True) == []
    assert all(name in world.daemon.log_tail(200) for name in names)
    # The command line tells too, until told that it is known.
    cli = Cli(world.daemon)
    told = cli("ps", "-a").stderr.decode()
    assert all(f"lost when the previous daemon ended: {name} " in told for name in names), told
    assert clones[0].name in cli.text("daemon", "status")
    cli("rm", clones[0].name)
    assert {vm.name for vm in world.client.host().lost} == names - {clones[0].name}
    assert list((world.daemon.state / "vms").iterdir()) == []
    # Their names are free again.
    with guests.warm(world.client, host.lost[0].image, name="parent", memory_mib=256) as vm:
        assert vm.exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(400)
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.15, pytest.param(0.13, marks=pytest.mark.soak)])
def test_a_daemon_killed_in_the_middle_of_a_fork(world: World, after_s: float) -> None:
    with ThreadPoolExecutor(1) as pool:
        fork = pool.submit(world.vm.fork, 6)
        time.sleep(after_s)
        world.daemon.kill()
        with pytest.raises(vmfork.VmforkError):
            fork.result(30).raise_for_errors()[0].exec("true")
    eventually(nothing_runs, 15, "what the daemon had started is gone")
    world.daemon.start()
    assert "parent" in {vm.name for vm in world.client.host().lost}
    assert world.client.vms(ended=True) == []


@pytest.mark.limit(200)
def test_a_daemon_killed_while_a_vm_boots(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        booting = pool.submit(client.run, image, name="young", memory_mib=128)
        eventually(lambda: any(process.is_qemu for process in daemon.processes()), 30, "a QEMU runs")
        daemon.kill()
        with pytest.raises(vmfork.VmforkError):
            booting.result(30)
    eventually(nothing_runs, 15, "what the daemon had started is gone")
    daemon.start()
    with daemon.client() as client:
        assert [vm.name for vm in client.host().lost] == ["young"]


@pytest.mark.limit(300)
def test_a_daemon_told_to_end_ends_its_vms_and_loses_none(world: World) -> None:
    world.vm.fork(2).raise_for_errors()
    assert world.daemon.stop() == 0
    assert world.daemon.left_behind(5) == []
    world.daemon.start()
    assert world.client.host().lost == ()


@pytest.mark.limit(120)
def test_a_second_daemon_on_the_same_state_is_refused(world: World, make_daemon: MakeDaemon) -> None:
    second = make_daemon()
    second.state = world.daemon.state
    process = second.spawn()
    assert process.wait(15) == 1
    assert f"already runs on {world.daemon.state}" in second.log_tail()
    assert world.vm.exec("echo well").stdout_text == "well\n"


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_waiting_qemu_that_is_killed_is_not_handed_out(make_daemon: MakeDaemon, image: str) -> None:
    """The pool notices, or the clone takes another: a fork never fails by it.

    The VM boots: one from a store runs in a QEMU that has waited, and could not be told from those
    that wait.
    """
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        vm = client.run(image, name="parent", memory_mib=256)
        eventually(lambda: client.host().pool.waiting >= 2, 60, "QEMUs wait")
        own = daemon.qemu(vm).pid
        for process in daemon.processes():
            if process.is_qemu and process.pid != own and "-incoming" in process.command:
                process.kill()
        clones = vm.fork(3).raise_for_errors()
        assert all(clone.exec("echo well").stdout_text == "well\n" for clone in clones)


@pytest.mark.limit(60)
def test_no_daemon_is_told_so(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with daemon.client() as client, pytest.raises(vmfork.ConnectionFailed, match="vmfork daemon start"):
        client.vms()
    done = Cli(daemon)("ps", "--no-start", code=1)
    assert str(daemon.socket) in done.stderr.decode()
