"""What breaks beside a VM, and what the others see: nothing hangs, nothing is wrong, nothing is left behind.

Killed here are QEMUs, keepers, page engines and the agent in the guest. The VMs of a test are clones of
one that the module booted; when a test is over, the daemon must hold no more memory and no more
processes than before it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually
from harness.world import World, complete, has_failed, keeper, memory_files, refused, settled, whole

#: Without a pool every process is some VM's.
DAEMON_FLAGS = ("--debug-faults", "--pool", "0")

MakeDaemon = Callable[..., Daemon]


@pytest.fixture
def world(daemon: Daemon, booted: vmfork.VM, client: vmfork.Client) -> Iterator[World]:
    before = len(memory_files(daemon)), len(daemon.processes())
    clone = booted.fork(1).raise_for_errors()[0]
    world = World(daemon, client, clone)
    yield world
    for vm in client.vms(ended=True):
        if vm.name != booted.name:
            vm.remove(force=True)
    settled(daemon, before[0] + world.forks_of_base, before[1])
    assert booted.exec("echo well").stdout_text == "well\n"


# -- QEMU and keepers ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(300)
def test_qemu_killed_before_its_drain_loses_nothing_of_its_clones(world: World) -> None:
    world.load()
    qemu = world.daemon.qemu(world.vm)
    clones = world.vm.fork(2).raise_for_errors()
    qemu.kill()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(whole, clones)) == [True, True]
    eventually(lambda: has_failed(world.vm), 10, "the death is noticed")
    assert "QEMU died (signal 9)" in (world.vm.inspect().reason or "")
    # And their clones do not miss it either.
    assert whole(clones[0].fork(1).raise_for_errors()[0])


@pytest.mark.slow
@pytest.mark.limit(300)
def test_qemu_killed_after_its_drain_loses_nothing_of_its_clones(world: World) -> None:
    world.load()
    clones = world.vm.fork(2).raise_for_errors()
    eventually(lambda: clones[0].inspect().memory.undrained_pages == 0, 90, "the drain is done")
    qemu, its_keeper = world.daemon.qemu(world.vm), keeper(world.vm)
    qemu.kill()
    its_keeper.kill()
    assert all(whole(clone) for clone in clones)
    assert whole(clones[1].fork(1).raise_for_errors()[0])


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_clones_qemu_killed_is_its_own_affair(world: World) -> None:
    world.load(60)
    one, other = world.vm.fork(2).raise_for_errors()
    world.daemon.qemu(one).kill()
    eventually(lambda: has_failed(one), 10, "the death is noticed")
    text = refused(lambda: one.exec("true"), "conflict")
    assert "QEMU died" in text
    assert "vmfork logs" in text
    refused(lambda: one.fork(1), "conflict")
    assert whole(other)
    assert whole(world.vm)
    # An ended VM gives its name up.
    assert whole(world.vm.fork(1, names=[one.name]).raise_for_errors()[0])


@pytest.mark.limit(200)
def test_a_program_in_a_vm_whose_qemu_is_killed_ends_with_an_error(world: World) -> None:
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(world.vm.exec, "sleep 1000", timeout_s=120)
        time.sleep(1)
        world.daemon.qemu(world.vm).kill()
        with pytest.raises(vmfork.ApiError) as info:
            sleeping.result(30)
    complete(info.value, "guest", "conflict")


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_keeper_killed_loses_nothing_while_its_qemu_lives(world: World) -> None:
    world.load(60)
    clones = world.vm.fork(2).raise_for_errors()
    keeper(world.vm).kill()
    assert all(whole(clone) for clone in clones)
    assert whole(world.vm)
    # Without its keeper it can't be forked again, says so, and goes on.
    text = refused(lambda: world.vm.fork(1), "qemu")
    assert "keeper" in text
    assert whole(world.vm)
    assert world.vm.inspect().state is vmfork.VmState.RUNNING
    # Its clones can.
    assert whole(clones[0].fork(1).raise_for_errors()[0])


@pytest.mark.slow
@pytest.mark.limit(300)
def test_pages_that_are_lost_stop_their_clones_and_say_so(world: World) -> None:
    """QEMU and keeper killed before the drain: no clone hangs, and none reads wrong bytes."""
    world.load(150)
    qemu, its_keeper = world.daemon.qemu(world.vm), keeper(world.vm)
    clones = world.vm.fork(3).raise_for_errors()
    for process in (qemu, its_keeper):
        process.kill()

    def outcome(clone: vmfork.VM) -> str:
        try:
            result = clone.exec(["sha256sum", "-c", "/run/sum"], timeout_s=90)
        except vmfork.ApiError as error:
            complete(error, "guest", "conflict", "page_lost")
            return "error"
        return "whole" if result.exit_code == 0 else f"WRONG BYTES: {result.stdout_text}"

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(outcome, clones))
    for clone, seen in zip(clones, outcomes, strict=True):
        assert seen in ("whole", "error")
        if seen == "error":
            eventually(lambda clone=clone: has_failed(clone), 10, "the clone has failed")
            assert "page" in (clone.inspect().reason or "")


@pytest.mark.slow
@pytest.mark.limit(200)
def test_a_qemu_that_stands_still_is_not_waited_for_for_ever(world: World) -> None:
    qemu = world.daemon.qemu(world.vm)
    qemu.kill(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        refused(lambda: world.vm.fork(1, timeout_s=5), "timeout", "qemu")
        assert time.monotonic() - begin < 60
        try:
            assert world.vm.exec("true", timeout_s=3).timed_out
        except vmfork.ApiError as error:
            complete(error, "timeout", "guest")
        assert world.client.version().vmforkd
        world.vm.kill()
    finally:
        qemu.kill(signal.SIGCONT)
    eventually(lambda: not qemu.is_alive(), 20, "QEMU is gone")


# -- the page engine -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(300)
def test_an_engine_that_panics_takes_its_views_along_and_no_others(world: World) -> None:
    """Its views can't be served any more: they end with the reason. Other families go on."""
    world.load(60)
    clones = world.vm.fork(2).raise_for_errors()
    with world.daemon.client() as client, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.vm(clones[0].name).exec, "sleep 1000", timeout_s=120)
        time.sleep(1)
        world.engine_panics(clones[0])
        with pytest.raises(vmfork.ApiError) as info:
            reading.result(60)
        complete(info.value, "guest", "conflict", "page_lost")
    for view in (world.vm, *clones):
        eventually(lambda view=view: has_failed(view), 15, f"{view.name} has ended")
        reason = view.inspect().reason or ""
        assert "page engine" in reason
        assert "died" in reason
        text = refused(lambda view=view: view.fork(1), "conflict")
        assert "page engine" in text
    assert "panicked" in world.daemon.log_tail(200)
    # The family above it, and new VMs, are served by engines of their own.
    base = world.client.vm("base")
    again = base.fork(2).raise_for_errors()
    world.forks_of_base += 1
    assert all(clone.exec("echo well").stdout_text == "well\n" for clone in again)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_views_of_the_snapshots_below_survive_an_engine_above_them(world: World) -> None:
    """An engine serves the views of one image. Those of the images made from it have their own."""
    world.load(60)
    clone = world.vm.fork(1).raise_for_errors()[0]
    eventually(lambda: clone.inspect().memory.undrained_pages == 0, 90, "the drain is done")
    grandchild = clone.fork(1).raise_for_errors()[0]
    eventually(lambda: grandchild.inspect().memory.undrained_pages == 0, 90, "the drain is done")
    # `clone` and `grandchild` are views of the newer snapshot, `world.vm` of the older one.
    world.engine_panics(world.vm)
    eventually(lambda: has_failed(world.vm), 15, "its view has ended")
    assert whole(grandchild)
    assert whole(clone)


def test_faults_are_not_made_for_everybody(make_daemon: MakeDaemon, image: str) -> None:
    import httpx

    daemon = make_daemon().start()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://d") as client:
        assert client.post("/v1/debug/vms/web/engine-panic").status_code == 404


# -- the agent -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(300)
def test_an_agent_that_dies_hangs_no_client(world: World, image: str) -> None:
    """An agent beside another init, as under systemd, is killed in its guest."""
    cli = Cli(world.daemon)
    folder = world.daemon.state / "images" / image
    parts = [f"--{flag}={folder / name}" for flag, name in
             (("kernel", "kernel"), ("initrd", "initrd"), ("root", "root.img"))]
    # `cat` waits at the console for ever, which is all that an init has to do here.
    words = "console=ttyS0 quiet panic=-1 random.trust_cpu=on vmfork.init=/bin/cat"
    cli("image", "import", "beside", *parts, "--cmdline", words, "--agent")
    vm = world.client.run("beside", name="beside", memory_mib=256)
    other = vm.fork(1).raise_for_errors()[0]
    with world.daemon.client() as client, ThreadPoolExecutor(1) as pool:
        # The program can't tell how it ended: the agent that would tell is the victim.
        killing = pool.submit(
            client.vm("beside").exec,
            # One search for all processes: a loop of searches may take longer than the timeout.
            "kill -9 $(grep -lsz '^@vmfork-agent' /proc/[0-9]*/cmdline | cut -d/ -f3)",
            timeout_s=40,
        )
        try:
            assert killing.result(120).timed_out
        except vmfork.ApiError as error:
            complete(error, "guest", "timeout")
        except vmfork.ConnectionFailed:
            pytest.fail("the daemon let go of a request")
    begin = time.monotonic()
    text = refused(lambda: vm.fork(1, timeout_s=20), "guest", "timeout")
    assert "agent" in text
    assert "vmfork logs" in text or "vmfork ps" in text
    try:
        assert vm.exec("echo back", timeout_s=5).timed_out
    except vmfork.ApiError as error:
        assert "agent" in complete(error, "guest", "timeout")
    assert time.monotonic() - begin < 120
    # Its guest runs on, and so does its clone, whose agent is another.
    assert vm.inspect().state is vmfork.VmState.RUNNING
    assert other.exec("echo well").stdout_text == "well\n"
    vm.kill()
    assert vm.inspect().state is vmfork.VmState.EXITED


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_clone_that_cannot_confirm_is_killed_and_reported(world: World) -> None:
    """Where its machine id should go, there is a folder: a clone can't become somebody else."""
    world.vm.exec("rm -f /etc/machine-id && mkdir /etc/machine-id", check=True)
    before = {process.pid for process in world.daemon.processes()}
    fork = world.vm.fork(2)
    assert len(fork.errors) == 2
    for error in fork.errors:
        text = complete(error, "guest")
        assert "/etc/machine-id" in text
    eventually(
        lambda: {process.pid for process in world.daemon.processes()} <= before, 15, "their QEMUs are gone"
    )
    assert {vm.name for vm in world.client.vms()} == {"base", world.vm.name}
    # They are listed as failed, with the reason.
    for result in fork.results:
        assert "machine-id" in (world.client.vm(result.name).inspect().reason or "")
    done = Cli(world.daemon)("fork", world.vm.name, code=1)
    assert b"machine-id" in done.stdout + done.stderr
    # The parent only lent its memory.
    world.vm.exec("rmdir /etc/machine-id", check=True)
    assert world.vm.fork(1).raise_for_errors()[0].exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(200)
def test_a_guest_kernel_that_panics_is_told(world: World) -> None:
    clone = world.vm.fork(1).raise_for_errors()[0]
    try:
        clone.exec("echo c > /proc/sysrq-trigger", timeout_s=30)
    except vmfork.ApiError as error:
        complete(error, "guest", "conflict", "timeout")
    eventually(lambda: clone.inspect().state.has_ended, 30, "its VM has ended")
    assert clone.inspect().reason
    assert world.vm.exec("echo well").stdout_text == "well\n"
