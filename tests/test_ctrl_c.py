"""Ctrl-C at any moment of any command: it ends at once, and leaves nothing half-done."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import vmfork

from harness import places, processes
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually, stays
from harness.world import World, whole

#: A command has to end within this, however busy the host is.
END_S = 30.0


@pytest.fixture
def world(daemon: Daemon, client: vmfork.Client, vm: vmfork.VM) -> Iterator[World]:
    yield World(daemon, client, vm)


def end(process: subprocess.Popen[bytes], what: str, number: int = signal.SIGINT) -> int:
    """Type Ctrl-C; returns the exit code."""
    process.send_signal(number)
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
        raise AssertionError(f"`vmfork {what}` goes on after signal {number}") from None


def interrupted(cli: Cli, *arguments: str, after_s: float) -> int:
    """Run a command, and type Ctrl-C after a while."""
    null = subprocess.DEVNULL
    process = cli.spawn(*arguments, stdin=null, stdout=null, stderr=null)
    time.sleep(after_s)
    return end(process, " ".join(arguments))


@pytest.mark.limit(200)
def test_of_exec_ends_the_program_in_the_guest(world: World) -> None:
    cli = Cli(world.daemon)
    process = cli.spawn(
        "exec", world.vm.name, "sh", "-c", "echo up; exec sleep 654",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    # As a shell has it of a program that a signal ended.
    assert end(process, "exec") == 128 + signal.SIGINT
    process.stdout.close()
    gone = "pgrep -f '[s]leep 654' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 20, "the program is gone")


@pytest.mark.limit(200)
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_of_exec_at_its_beginning(world: World, after_s: float) -> None:
    cli = Cli(world.daemon)
    assert interrupted(cli, "exec", world.vm.name, "sleep", "655", after_s=after_s) != 0
    gone = "pgrep -f '[s]leep 655' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 20, "the program is gone")


@pytest.mark.limit(200)
def test_a_program_that_ignores_it_is_left_alone_until_its_client_goes(world: World) -> None:
    """Ctrl-C is the program's to take; a client that is killed takes its program along."""
    cli = Cli(world.daemon)
    process = cli.spawn(
        "exec", world.vm.name, "python3", "-uc",
        "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: print('no'))\nprint('up')\n"
        "while True: time.sleep(1)  # 656",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"no\n"
    assert process.poll() is None
    process.kill()
    process.wait(10)
    process.stdout.close()
    gone = "pgrep -f '[#] 656' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 20, "the program is gone")


@pytest.mark.slow
@pytest.mark.limit(400)
def test_of_fork_leaves_whole_clones_or_none(world: World) -> None:
    world.load(30)
    cli = Cli(world.daemon)
    mine = {world.vm.name, "base"}
    for after_s in (0.0, 0.02, 0.05, 0.15, 0.5):
        code = interrupted(cli, "fork", world.vm.name, "-n", "6", after_s=after_s)

        # All of a fork that was done, or none of one that was given up; it may be done unnoticed.
        counts = (6,) if code == 0 else (0, 6)

        def at_rest(counts: tuple[int, ...] = counts) -> bool:
            seen = [vm for vm in world.client.vms() if vm.name not in mine]
            running = [vm for vm in seen if vm.info and vm.info.state is vmfork.VmState.RUNNING]
            return len(running) == len(seen) and len(seen) in counts

        eventually(at_rest, 30, f"all clones or none, after {after_s} s")
        stays(at_rest, 1, f"all clones or none, after {after_s} s")
        clones = [vm for vm in world.client.vms() if vm.name not in mine]
        if clones:
            assert whole(clones[-1])
        for clone in clones:
            clone.remove(force=True)
    assert whole(world.vm)
    assert world.vm.fork(1).raise_for_errors()[0].exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(200)
@pytest.mark.parametrize("after_s", [0.0, 0.1, 1.5])
def test_of_run_leaves_no_vm_that_was_never_reported(world: World, image: str, after_s: float) -> None:
    cli = Cli(world.daemon)
    assert interrupted(cli, "run", image, "--name", "young", "--memory", "128M", after_s=after_s) != 0
    eventually(lambda: "young" not in {vm.name for vm in world.client.vms()}, 20, "the VM is given up")
    time.sleep(0.3)
    assert "young" not in {vm.name for vm in world.client.vms()}


@pytest.mark.limit(200)
@pytest.mark.parametrize("arguments", [("logs", "--follow", "VM"), ("top", "--interval", "100ms")])
def test_of_looking_commands(world: World, arguments: tuple[str, ...]) -> None:
    cli = Cli(world.daemon)
    words = [world.vm.name if word == "VM" else word for word in arguments]
    for after_s in (0.0, 0.05, 0.5):
        interrupted(cli, *words, after_s=after_s)
    assert world.vm.exec("echo well").stdout_text == "well\n"


@pytest.mark.limit(200)
def test_of_console(world: World) -> None:
    """On a terminal the guest gets the key; the command ends by its own key or by a signal, and the
    terminal is as it was."""
    cli = Cli(world.daemon)
    for leave in (b"\x1d", signal.SIGTERM, signal.SIGINT):
        mine, theirs = pty.openpty()
        before = _settings(theirs)
        process = cli.spawn("console", world.vm.name, stdin=theirs, stdout=theirs, stderr=theirs)
        eventually(lambda theirs=theirs, before=before: _settings(theirs) != before, 20, "it has the terminal")
        os.write(mine, b"\x03")  # Ctrl-C: the guest's
        time.sleep(0.3)
        assert process.poll() is None, "Ctrl-C of the guest's terminal ended the command"
        if isinstance(leave, bytes):
            os.write(mine, leave)
            assert process.wait(END_S) == 0
        else:
            end(process, "console", leave)
        assert _settings(theirs) == before, "the terminal was left raw"
        os.close(mine)
        os.close(theirs)


def _settings(terminal: int) -> str:
    return subprocess.run(["stty", "-g"], stdin=terminal, capture_output=True, text=True, timeout=10).stdout


@pytest.mark.limit(200)
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5])
def test_of_cp_leaves_no_half_file(world: World, tmp_path: Path, after_s: float) -> None:
    cli = Cli(world.daemon)
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(300 << 20)
    world.vm.exec("mkdir /dev/shm/in; echo old > /dev/shm/in/big")
    code = interrupted(cli, "cp", str(big), f"{world.vm.name}:/dev/shm/in/big", after_s=after_s)
    if code != 0:
        listing = "cat /dev/shm/in/big; ls -A /dev/shm/in"
        eventually(lambda: world.vm.exec(listing).stdout_text == "old\nbig\n", 20, "only the old file is there")
    world.vm.exec("rm -rf /dev/shm/in; head -c 200M /dev/zero > /dev/shm/out", check=True)
    target = tmp_path / "to" / "out"
    target.parent.mkdir()
    interrupted(cli, "cp", f"{world.vm.name}:/dev/shm/out", str(target), after_s=after_s)
    assert not target.exists() or target.stat().st_size == 200 << 20
    assert {path.name for path in target.parent.iterdir()} <= {"out"}


# Other tests mount namespaces and file systems meanwhile.
@pytest.mark.alone
@pytest.mark.limit(300)
@pytest.mark.parametrize("after_s", [0.1, 0.4, 1.0, 6.0])
def test_of_image_build(daemon: Daemon, after_s: float) -> None:
    """No process, mount or half image stays behind, and the next build finds a usable store."""
    cli = Cli(daemon)
    images = daemon.state / "images"
    names = {path.name for path in images.iterdir()}
    mounts = Path("/proc/self/mountinfo").read_text()
    temporary = set(Path("/tmp").glob("mmdebstrap*"))
    process = cli.spawn(
        "image", "build", "half", "--package", "hello",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    time.sleep(after_s)
    below = processes.below(process.pid)
    if process.poll() is not None:
        pytest.fail(f"the build ended by itself with {process.returncode}")
    assert end(process, "image build") not in (0, 2)
    eventually(lambda: not any(other.is_alive() for other in below), 30, "its helpers are gone")
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert set(Path("/tmp").glob("mmdebstrap*")) == temporary
    left = {path.name for path in images.iterdir()} - names
    assert "half" not in left
    assert not [name for name in left if not name.startswith(".")], left
    assert "half" not in cli.text("image", "ls")


def test_a_client_that_goes_away_takes_its_program_along(world: World) -> None:
    short = vmfork.Timeout(exec_s=0.5, slack_s=0.5)
    with vmfork.Client(socket=world.daemon.socket, timeout=short) as impatient:
        try:
            assert impatient.vm(world.vm.name).exec("sleep 321", timeout_s=1).timed_out
        except vmfork.TimeoutExceeded:
            pass
    gone = "pgrep -f '[s]leep 321' >/dev/null; test $? = 1"
    eventually(lambda: world.vm.exec(gone).exit_code == 0, 20, "the program is gone")


def test_the_commands_are_there() -> None:
    """What is interrupted here is what users have."""
    listed = subprocess.run([places.VMFORK, "--help"], capture_output=True, text=True, check=True, timeout=20).stdout
    for command in ("run", "fork", "exec", "cp", "logs", "console", "image", "top"):
        assert f"\n  {command} " in listed
