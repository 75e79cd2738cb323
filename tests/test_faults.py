"""What breaks, and what the others see: nothing hangs, nothing is wrong, nothing is left behind.

Every daemon here is the test's own; its fixture asserts at the end that nothing is left of it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import vmfork

from harness import leftovers
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]


@dataclass
class World:
    """A daemon with one VM in it that has data worth losing."""

    daemon: Daemon
    client: vmfork.Client
    vm: vmfork.VM

    def load(self, mib: int = 200) -> None:
        """Random bytes in guest memory, with their sum."""
        self.vm.exec(
            f"head -c {mib}M /dev/urandom > /dev/shm/data && sha256sum /dev/shm/data > /run/sum",
            check=True,
            timeout_s=120,
        )


def whole(vm: vmfork.VM) -> bool:
    """Whether a VM's data is what was loaded."""
    return vm.exec(["sha256sum", "-c", "/run/sum"], timeout_s=120).exit_code == 0


@pytest.fixture
def world(make_daemon: MakeDaemon, image: str) -> Iterator[World]:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        yield World(daemon, client, client.run(image, name="parent", memory_mib=512))


# -- QEMU and keepers ----------------------------------------------------------------------------


@pytest.mark.limit(300)
def test_qemu_killed_before_its_drain_loses_nothing_of_its_clones(world: World) -> None:
    world.load()
    qemu = world.daemon.qemu(world.vm)
    clones = world.vm.fork(2).raise_for_errors()
    qemu.kill()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(whole, clones)) == [True, True]
    detail = world.vm.inspect()
    assert detail.state is vmfork.VmState.FAILED
    assert detail.reason
    # And their clones do not miss it either.
    assert whole(clones[0].fork(1).raise_for_errors()[0])


@pytest.mark.limit(300)
def test_qemu_killed_after_its_drain_loses_nothing_of_its_clones(world: World) -> None:
    world.load()
    clones = world.vm.fork(2).raise_for_errors()
    eventually(lambda: clones[0].inspect().memory.undrained_pages == 0, 60, "the drain is done")
    assert world.daemon.keepers(world.vm) == [], "a keeper outlives its drain"
    world.daemon.qemu(world.vm).kill()
    assert all(whole(clone) for clone in clones)


@pytest.mark.limit(300)
def test_a_clones_qemu_killed_is_its_own_affair(world: World) -> None:
    world.load(100)
    one, other = world.vm.fork(2).raise_for_errors()
    world.daemon.qemu(one).kill()
    eventually(lambda: one.inspect().state is vmfork.VmState.FAILED, 10, "the death is noticed")
    with pytest.raises(vmfork.Conflict):
        one.exec("true")
    assert whole(other)
    assert whole(world.vm)


@pytest.mark.limit(300)
def test_a_keeper_killed_loses_nothing_while_its_qemu_lives(world: World) -> None:
    world.load()
    clones = world.vm.fork(2).raise_for_errors()
    for keeper in world.daemon.keepers(world.vm):
        keeper.kill()
    assert all(whole(clone) for clone in clones)
    assert whole(world.vm)


@pytest.mark.limit(300)
def test_pages_that_are_lost_stop_their_clones_and_say_so(world: World) -> None:
    """QEMU and keeper killed before the drain: no clone hangs, and none reads wrong bytes."""
    world.load(300)
    qemu = world.daemon.qemu(world.vm)
    clones = world.vm.fork(3).raise_for_errors()
    keepers = world.daemon.keepers(world.vm)
    for process in [qemu, *keepers]:
        process.kill()

    def outcome(clone: vmfork.VM) -> str:
        try:
            result = clone.exec(["sha256sum", "-c", "/run/sum"], timeout_s=60)
        except vmfork.ApiError as error:
            return f"error {error.code}"
        return "whole" if result.exit_code == 0 else f"WRONG BYTES: {result.stdout_text}"

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(outcome, clones))
    for clone, seen in zip(clones, outcomes, strict=True):
        assert seen == "whole" or seen.startswith("error"), seen
        if seen != "whole":
            detail = clone.inspect()
            assert detail.state is vmfork.VmState.FAILED
            assert detail.reason
            assert "page" in detail.reason


@pytest.mark.limit(200)
def test_a_qemu_that_stands_still_is_not_waited_for_for_ever(world: World) -> None:
    qemu = world.daemon.qemu(world.vm)
    qemu.kill(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(vmfork.ApiError):
            world.vm.fork(1, timeout_s=5)
        assert time.monotonic() - begin < 30
        with pytest.raises(vmfork.ApiError):
            world.vm.exec("true", timeout_s=3)
        assert world.client.version().vmforkd
        world.vm.kill()
    finally:
        qemu.kill(signal.SIGCONT)
    eventually(lambda: not qemu.is_alive(), 20, "QEMU is gone")


# -- the agent -----------------------------------------------------------------------------------


@pytest.mark.limit(200)
def test_an_agent_that_dies_hangs_nobody(world: World) -> None:
    """It comes back, or commands fail with the guest's error; the rest of the host goes on."""
    other = world.vm.fork(1).raise_for_errors()[0]
    try:
        world.vm.exec("kill -9 $(pidof vmfork-agent)", timeout_s=5)
    except vmfork.ApiError as error:
        assert error.code in ("guest", "timeout", "conflict", "qemu"), error
    for _ in range(3):
        begin = time.monotonic()
        try:
            assert world.vm.exec("echo back", timeout_s=5).stdout_text == "back\n"
        except vmfork.ApiError as error:
            assert error.code in ("guest", "timeout", "conflict"), error
        try:
            fork = world.vm.fork(1, timeout_s=10)
            assert all(error.code in ("guest", "timeout") for error in fork.errors)
        except vmfork.ApiError as error:
            assert error.code in ("guest", "timeout", "conflict"), error
        assert time.monotonic() - begin < 60
    assert other.exec("echo well").stdout_text == "well\n"


# -- the daemon ----------------------------------------------------------------------------------


@pytest.mark.limit(300)
def test_a_killed_daemon_leaves_nothing_and_the_next_tells_what_was_lost(world: World) -> None:
    world.load(100)
    clones = world.vm.fork(3).raise_for_errors()
    names = {"parent", *(clone.name for clone in clones)}
    running = world.daemon.processes()
    assert any(process.is_qemu for process in running)
    world.daemon.kill()
    eventually(lambda: not leftovers.orphans(), 15, "what the daemon had started is gone")
    assert not any(process.is_alive() for process in running)
    world.daemon.start()
    host = world.client.host()
    assert {vm.name for vm in host.lost} == names
    assert {vm.parent for vm in host.lost} == {None, "parent"}
    assert world.client.vms() == []
    # Their names are free again.
    with world.client.run(host.lost[0].image, name="parent", memory_mib=128) as vm:
        assert vm.exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(300)
def test_a_daemon_killed_in_the_middle_of_forks(world: World) -> None:
    world.load(100)
    for delay_s in (0.0, 0.004, 0.02, 0.1):
        with ThreadPoolExecutor(1) as pool:
            fork = pool.submit(world.vm.fork, 8)
            time.sleep(delay_s)
            world.daemon.kill()
            with pytest.raises((vmfork.ConnectionFailed, vmfork.ApiError)):
                fork.result(30).raise_for_errors()[0].exec("true")
        eventually(lambda: not leftovers.orphans(), 15, "what the daemon had started is gone")
        world.daemon.start()
        assert "parent" in {vm.name for vm in world.client.host().lost}
        lost = world.client.host().lost[0]
        world.vm = world.client.run(lost.image, name="parent", memory_mib=256)


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
    assert process.wait(15) != 0
    assert str(world.daemon.state) in second.log_tail()
    assert world.vm.exec("echo well").stdout_text == "well\n"


# -- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(cli: Cli, *arguments: str, after_s: float, **options: object) -> subprocess.Popen[bytes]:
    """Run a command, and type Ctrl-C after a while; it has to end at once."""
    process = cli.spawn(
        *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
        raise AssertionError(f"`vmfork {' '.join(arguments)}` goes on after Ctrl-C") from None
    return process


@pytest.mark.limit(200)
def test_ctrl_c_of_exec_ends_the_program_in_the_guest(world: World) -> None:
    cli = Cli(world.daemon)
    process = interrupted(cli, "exec", "parent", "sleep", "654", after_s=1.0)
    assert process.returncode != 0
    gone = "pgrep -f '[s]leep 654' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 10, "the program is gone")


@pytest.mark.limit(300)
def test_ctrl_c_of_fork_leaves_whole_clones_or_none(world: World) -> None:
    world.load(100)
    cli = Cli(world.daemon)
    for after_s in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0):
        interrupted(cli, "fork", "parent", "-n", "8", after_s=after_s)
        time.sleep(0.5)  # what was under way is given up, or done
        for vm in world.client.vms():
            assert vm.info is not None
            assert vm.info.state is vmfork.VmState.RUNNING
            assert whole(vm)
            if vm.name != "parent":
                vm.remove(force=True)
    assert whole(world.vm)


@pytest.mark.limit(200)
@pytest.mark.parametrize("after_s", [0.05, 0.5, 2.0])
def test_ctrl_c_of_run_leaves_no_vm_that_never_was_reported(world: World, image: str, after_s: float) -> None:
    cli = Cli(world.daemon)
    process = interrupted(cli, "run", image, "--name", "young", after_s=after_s)
    if process.returncode != 0:
        eventually(
            lambda: "young" not in {vm.name for vm in world.client.vms()}, 10, "the VM is given up"
        )


@pytest.mark.limit(200)
def test_ctrl_c_of_looking_commands(world: World) -> None:
    cli = Cli(world.daemon)
    for arguments in (("logs", "--follow", "parent"), ("top",)):
        interrupted(cli, *arguments, after_s=0.5)
    assert world.vm.exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(200)
def test_ctrl_c_of_cp_leaves_no_half_file(world: World, tmp_path: Path) -> None:
    cli = Cli(world.daemon)
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(300 << 20)
    world.vm.exec("echo old > /dev/shm/big")
    interrupted(cli, "cp", str(big), "parent:/dev/shm/big", after_s=0.7)
    listing = "cat /dev/shm/big; ls -A /dev/shm"
    eventually(lambda: world.vm.exec(listing).stdout_text == "old\nbig\n", 15, "only the old file is there")
    world.vm.exec("head -c 200M /dev/zero > /dev/shm/out", check=True)
    target = tmp_path / "out"
    interrupted(cli, "cp", "parent:/dev/shm/out", str(target), after_s=0.3)
    assert not target.exists() or target.stat().st_size == 200 << 20
    assert {path.name for path in tmp_path.iterdir()} <= {"big", "out"}


def test_a_client_that_goes_away_takes_its_program_along(world: World) -> None:
    impatient = vmfork.Client(
        socket=world.daemon.socket, timeout=vmfork.Timeout(exec_s=0.5, slack_s=0.5)
    )
    with impatient, ThreadPoolExecutor(1) as pool:
        future = pool.submit(impatient.vm("parent").exec, "sleep 321", timeout_s=1)
        try:
            assert future.result(30).timed_out
        except vmfork.TimeoutExceeded:
            pass
    gone = "pgrep -f '[s]leep 321' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 15, "the program is gone")


# -- what the host lacks -------------------------------------------------------------------------


def _masked(*paths: str) -> list[str]:
    """A prefix that runs a program with these files replaced by /dev/null, for it alone."""
    mounts = " && ".join(f"mount --bind /dev/null {path}" for path in paths)
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


@pytest.mark.limit(120)
def test_no_userfaultfd(make_daemon: MakeDaemon, image: str) -> None:
    without = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    masked = _masked("/dev/userfaultfd") if Path("/dev/userfaultfd").exists() else []
    daemon = make_daemon(prefix=[*masked, *without])
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        (check,) = [check for check in client.doctor().checks if check.name == "userfaultfd"]
        assert check.status is vmfork.CheckStatus.FAILED
        assert check.remedy
        with pytest.raises(vmfork.HostError, match="userfaultfd"):
            client.run(image).fork(1).raise_for_errors()


@pytest.mark.limit(120)
def test_no_qemu(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon("--qemu", "/no/such/qemu-system-x86_64")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        (check,) = [check for check in client.doctor().checks if check.name == "qemu"]
        assert check.status is vmfork.CheckStatus.FAILED
        assert check.remedy
        with pytest.raises(vmfork.ApiError, match="(?i)qemu") as info:
            client.run(image)
        assert info.value.code in ("host", "qemu")
        assert client.vms() == []


def _with_broken(make_daemon: MakeDaemon, image: str, name: str, replace: Callable[[Path], None]) -> Daemon:
    """A daemon whose copy of the image has one file replaced."""
    daemon = make_daemon()
    daemon.add_image(image)
    path = daemon.state / "images" / image / name
    assert path.exists(), f"no {name} in the image's folder: {list(path.parent.iterdir())}"
    path.unlink()  # the file may be a hard link to the shared one
    replace(path)
    path.chmod(0o644)
    return daemon.start()


@pytest.mark.limit(120)
def test_a_kernel_that_is_none(make_daemon: MakeDaemon, image: str) -> None:
    daemon = _with_broken(make_daemon, image, "kernel", lambda path: path.write_bytes(b"not a kernel" * 999) and None)
    with daemon.client() as client:
        begin = time.monotonic()
        with pytest.raises(vmfork.ApiError) as info:
            client.run(image, name="broken", boot_timeout_s=20)
        assert info.value.code in ("qemu", "guest", "timeout")
        assert info.value.cause
        assert time.monotonic() - begin < 40
        assert client.vms() == []


@pytest.mark.limit(120)
def test_a_guest_that_panics_at_boot(make_daemon: MakeDaemon, image: str) -> None:
    daemon = _with_broken(make_daemon, image, "initrd", lambda path: path.write_bytes(b"rubbish" * 999) and None)
    with daemon.client() as client:
        with pytest.raises(vmfork.ApiError, match="(?i)panic|boot|agent|answer") as info:
            client.run(image, name="broken", boot_timeout_s=30)
        assert info.value.code in ("guest", "timeout", "qemu")
        assert client.vms() == []


@pytest.mark.limit(120)
def test_a_guest_that_never_answers(make_daemon: MakeDaemon, image: str) -> None:
    from harness import initrd, programs

    def replace(path: Path) -> None:
        initrd.write(path, {"init": (0o755, programs.build("never").read_bytes())})

    daemon = _with_broken(make_daemon, image, "initrd", replace)
    with daemon.client() as client:
        begin = time.monotonic()
        with pytest.raises(vmfork.ApiError, match="agent|answer") as info:
            client.run(image, name="silent", boot_timeout_s=8)
        assert 7 < time.monotonic() - begin < 25
        assert info.value.code in ("guest", "timeout")
        assert client.vms() == []


@pytest.mark.limit(120)
def test_a_full_disk_is_a_clear_error(make_daemon: MakeDaemon, image: str) -> None:
    from harness import images

    daemon = make_daemon()
    daemon.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tiny", daemon.state], check=True)
    try:
        (daemon.state / "images").mkdir()
        subprocess.run(["mount", "--bind", images.store(), daemon.state / "images"], check=True)
        with (daemon.state / "filler").open("wb") as file:
            try:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            except OSError:
                pass
        process = daemon.spawn()
        ended = _ended_or_answers(daemon)
        if ended:
            assert process.returncode == 1
            assert "space" in daemon.log_tail().lower()
        else:
            with daemon.client() as client:
                try:
                    with client.run(image, name="full") as vm:
                        vm.fork(1).raise_for_errors()
                except vmfork.ApiError as error:
                    assert error.code == "host"
                    assert "space" in str(error).lower()
                    assert error.remedy
            daemon.stop()
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
        eventually(lambda: not leftovers.orphans(), 10, "what the daemon had started is gone")
        for mount in (daemon.state / "images", daemon.state):
            if mount.is_mount():
                subprocess.run(["umount", mount], check=True, timeout=20)


def _ended_or_answers(daemon: Daemon) -> bool:
    """Whether it has ended by itself, rather than answering."""
    process = daemon.process
    assert process is not None

    def settled() -> str:
        if process.poll() is not None:
            return "ended"
        with daemon.client() as client:
            try:
                client.version()
            except vmfork.ConnectionFailed:
                return ""
        return "answers"

    return eventually(settled, 20, "the daemon answers or ends") == "ended"


@pytest.mark.limit(60)
def test_no_daemon_is_told_so(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with daemon.client() as client, pytest.raises(vmfork.ConnectionFailed, match="vmfork daemon start"):
        client.vms()
    done = Cli(daemon)("ps", "--no-start", code=1)
    assert str(daemon.socket) in done.stderr.decode()
