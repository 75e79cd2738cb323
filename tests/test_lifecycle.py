"""A VM's life from outside: run, exec, cp, logs, console, ps, inspect, kill, rm."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import select
import time
from pathlib import Path

import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

# -- run, kill, rm -------------------------------------------------------------------------------


def test_run_to_rm_by_the_command_line(cli: Cli, image: str, client: vmfork.Client) -> None:
    cli("run", image, "--name", "life", "--memory", "256M", "--cpus", "2")
    (row,) = [vm for vm in _list(cli.json("ps")) if vm["name"] == "life"]
    assert (row["state"], row["memory_mib"], row["cpus"]) == ("running", 256, 2)
    assert cli.text("exec", "life", "nproc").strip() == "2"
    total_kib = int(cli.text("exec", "life", "sh", "-c", "grep MemTotal /proc/meminfo").split()[1])
    assert 180 * 1024 < total_kib < 256 * 1024
    assert "life" in cli.text("ps")
    cli("kill", "life")
    assert "life" not in cli.text("ps")
    assert "life" in cli.text("ps", "--all")
    cli("rm", "life")
    assert "life" not in cli.text("ps", "--all")
    with pytest.raises(vmfork.NotFound):
        client.vm("life")


@pytest.mark.slow
def test_a_default_name_is_made_and_names_are_taken_once(client: vmfork.Client, image: str) -> None:
    with client.run(image, memory_mib=128) as vm:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", vm.name)
        with pytest.raises(vmfork.Conflict):
            client.run(image, name=vm.name, memory_mib=128)


@pytest.mark.parametrize("name", ["..", "a/b", "-x", "a b", "é", "a" * 64, ""])
def test_names_that_cannot_be_are_refused(client: vmfork.Client, image: str, name: str) -> None:
    with pytest.raises(vmfork.BadRequest):
        client.run(image, name=name)


@pytest.mark.parametrize("field", [{"memory_mib": 63}, {"memory_mib": 65}, {"cpus": 0}, {"cpus": 65}])
def test_shapes_that_cannot_be_are_refused(
    client: vmfork.Client, image: str, field: dict[str, int]
) -> None:
    with pytest.raises(vmfork.BadRequest):
        client.run(image, **field)  # type: ignore[arg-type]


def test_an_image_that_is_not_there(client: vmfork.Client, cli: Cli) -> None:
    with pytest.raises(vmfork.NotFound):
        client.run("no-such-image")
    done = cli("run", "no-such-image", code=1)
    assert b"no-such-image" in done.stderr
    assert b"hint:" in done.stderr


def test_kill_ends_qemu_and_is_final(client: vmfork.Client, daemon: Daemon, vm: vmfork.VM) -> None:
    qemu = daemon.qemu(vm)
    info = vm.kill()
    assert info.state is vmfork.VmState.EXITED
    eventually(lambda: not qemu.is_alive(), 5, "QEMU is gone")
    with pytest.raises(vmfork.Conflict):
        vm.exec("true")
    with pytest.raises(vmfork.Conflict):
        vm.fork(1)


def test_rm_wants_force_for_a_vm_that_runs(vm: vmfork.VM, client: vmfork.Client) -> None:
    with pytest.raises(vmfork.Conflict):
        vm.remove()
    vm.remove(force=True)
    with pytest.raises(vmfork.NotFound):
        client.vm(vm.name)


def test_a_guest_that_powers_off_has_exited(vm: vmfork.VM) -> None:
    try:
        vm.exec("(sleep 0.3; kill -USR1 1) >/dev/null 2>&1 &")  # what poweroff(8) does
    except vmfork.ApiError:
        pass  # it may be gone before it answered
    eventually(lambda: vm.inspect().state.has_ended, 30, "the VM has ended")
    assert vm.inspect().state is vmfork.VmState.EXITED


def test_kill_with_grace_powers_the_guest_off(vm: vmfork.VM) -> None:
    begin = time.monotonic()
    info = vm.kill(grace_s=30)
    assert info.state is vmfork.VmState.EXITED
    assert time.monotonic() - begin < 29


# -- exec ----------------------------------------------------------------------------------------


def test_exec_carries_exit_codes_signals_and_both_streams(vm: vmfork.VM) -> None:
    assert vm.exec(["true"]).exit_code == 0
    assert vm.exec("exit 7").exit_code == 7
    both = vm.exec("echo out; echo err >&2")
    assert (both.stdout, both.stderr) == (b"out\n", b"err\n")
    ended = vm.exec("kill -TERM $$")
    assert (ended.exit_code, ended.signal) == (128 + 15, 15)


def test_exec_of_what_is_not_there(vm: vmfork.VM, cli: Cli) -> None:
    # As a shell says it (127), or as an error that names the program.
    try:
        result = vm.exec(["no-such-program"])
    except vmfork.ApiError as error:
        assert "no-such-program" in str(error)
    else:
        assert result.exit_code == 127
    assert cli("exec", vm.name, "no-such-program", code=None).returncode != 0


def test_exec_has_stdin_environment_folder_and_user(vm: vmfork.VM) -> None:
    assert vm.exec(["cat"], stdin=b"\0\xff bytes").stdout == b"\0\xff bytes"
    assert vm.exec("echo $A-$B", env={"A": "1", "B": "two words"}).stdout_text == "1-two words\n"
    assert vm.exec("pwd", cwd="/usr/bin").stdout_text == "/usr/bin\n"
    assert vm.exec("id -un").stdout_text == "root\n"
    assert vm.exec("id -un", user="nobody").stdout_text == "nobody\n"
    with pytest.raises(vmfork.ApiError, match="no-such-user"):
        vm.exec("true", user="no-such-user")


def test_exec_is_killed_at_its_time_limit(vm: vmfork.VM) -> None:
    # The guest may be starved of CPU: the program has to start within that.
    result = vm.exec("sleep 987", timeout_s=8)
    assert result.timed_out
    eventually(lambda: vm.exec("pgrep -f '[s]leep 987'").exit_code == 1, 10, "the program is gone")


def test_exec_streams_megabytes_both_ways(vm: vmfork.VM) -> None:
    data = os.urandom(5 << 20)
    result = vm.exec(["sha256sum"], stdin=data)
    assert result.stdout_text.split()[0] == hashlib.sha256(data).hexdigest()
    assert len(vm.exec("head -c 5000000 /dev/zero").stdout) == 5_000_000


def test_output_beyond_its_bound_is_cut_and_told(vm: vmfork.VM) -> None:
    result = vm.exec("head -c 20000000 /dev/zero")
    assert result.truncated
    assert len(result.stdout) == 16 << 20


@pytest.mark.slow
def test_many_execs_at_once(client: vmfork.Client, vm: vmfork.VM) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda i: vm.exec(f"sleep 0.1; echo {i}").stdout_text, range(48)))
    assert texts == [f"{i}\n" for i in range(48)]


def test_the_exit_code_of_exec_is_the_commands(cli: Cli, vm: vmfork.VM) -> None:
    assert cli("exec", vm.name, "sh", "-c", "exit 42", code=42).stdout == b""
    assert cli("exec", "-i", vm.name, "wc", "-c", stdin=b"12345").stdout.strip() == b"5"
    done = cli("exec", vm.name, "sh", "-c", "echo o; echo e >&2")
    assert (done.stdout, done.stderr) == (b"o\n", b"e\n")


def test_exec_on_a_terminal(cli: Cli, vm: vmfork.VM) -> None:
    ours, theirs = pty.openpty()
    try:
        process = cli.spawn("exec", "-t", vm.name, "sh", "-c", "tty && stty size", stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = b""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 4096)
                except OSError:
                    break  # EIO: the other side has closed
            elif process.poll() is not None:
                break
        assert process.wait(10) == 0, seen
        assert b"/dev/pts/" in seen
    finally:
        os.close(ours)


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, 1_000_003])
def test_files_survive_the_way_there_and_back(vm: vmfork.VM, size: int) -> None:
    data = os.urandom(size)
    vm.write_file("/tmp/f", data, mode=0o750)
    assert vm.read_file("/tmp/f") == data
    assert vm.exec("stat -c '%a %s' /tmp/f").stdout_text == f"750 {size}\n"


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_file_of_200_mib_goes_both_ways(
    client: vmfork.Client, image: str, tmp_path: Path
) -> None:
    source, back = tmp_path / "big", tmp_path / "back"
    block = os.urandom(1 << 20)
    with source.open("wb") as file:
        for i in range(200):
            file.write(i.to_bytes(8, "little") + block[8:])
    with guests.warm(client, image, memory_mib=1024) as vm:
        vm.copy_in(source, "/dev/shm/big")
        assert vm.copy_out("/dev/shm/big", back) == 200 << 20
    with source.open("rb") as one, back.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()


def test_copy_errors_name_the_file(vm: vmfork.VM, tmp_path: Path) -> None:
    with pytest.raises(vmfork.ApiError, match="/no/such/file"):
        vm.read_file("/no/such/file")
    with pytest.raises(vmfork.ApiError, match="/no/such"):
        vm.write_file("/no/such/folder/f", b"x")
    with pytest.raises(vmfork.ApiError):
        vm.write_file("/tmp", b"x")
    with pytest.raises(vmfork.ApiError):
        vm.read_file("/tmp")


def test_a_full_guest_disk_is_an_error_and_the_old_file_stays(vm: vmfork.VM, tmp_path: Path) -> None:
    vm.exec("mkdir /run/tiny && mount -t tmpfs -o size=1m tiny /run/tiny && echo old > /run/tiny/f", check=True)
    big = tmp_path / "big"
    big.write_bytes(b"x" * (3 << 20))
    with pytest.raises(vmfork.ApiError, match="(?i)space"):
        vm.copy_in(big, "/run/tiny/f")
    assert vm.read_file("/run/tiny/f") == b"old\n"
    assert vm.exec("ls -A /run/tiny").stdout_text == "f\n"


def test_cp_by_the_command_line(cli: Cli, vm: vmfork.VM, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("A")
    (folder / "sub" / "b").write_text("B")
    cli("cp", str(folder / "a"), f"{vm.name}:/tmp/a")
    assert vm.read_file("/tmp/a") == b"A"
    cli("cp", f"{vm.name}:/tmp/a", str(tmp_path / "a2"))
    assert (tmp_path / "a2").read_text() == "A"
    cli("cp", str(folder), f"{vm.name}:/tmp/tree")
    assert vm.read_file("/tmp/tree/sub/b") == b"B"
    assert cli("cp", f"{vm.name}:/tmp/a", "-").stdout == b"A"
    cli("cp", "-", f"{vm.name}:/tmp/c", stdin=b"C")
    assert vm.read_file("/tmp/c") == b"C"


# -- looking -------------------------------------------------------------------------------------


def test_logs_have_what_goes_to_the_console(cli: Cli, vm: vmfork.VM) -> None:
    vm.exec("echo from the guest > /dev/console")
    eventually(lambda: "from the guest" in vm.logs(), 10, "the console's line in the log")
    assert "from the guest" in cli.text("logs", vm.name)


def test_logs_follow_until_the_end(cli: Cli, vm: vmfork.VM) -> None:
    import subprocess

    process = cli.spawn("logs", "--follow", vm.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        vm.exec("echo one more line > /dev/console")
        eventually(lambda: "one more line" in vm.logs(), 10)
        vm.kill()
        out, _err = process.communicate(timeout=20)
        assert b"one more line" in out
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_the_console_takes_input_and_gives_output(cli: Cli, vm: vmfork.VM) -> None:
    ours, theirs = pty.openpty()
    process = cli.spawn("console", vm.name, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        vm.exec("(sleep 1; echo seen-on-the-console > /dev/console) >/dev/null 2>&1 &")
        seen = b""

        def shows() -> bool:
            nonlocal seen
            if select.select([ours], [], [], 0.05)[0]:
                seen += os.read(ours, 4096)
            return b"seen-on-the-console" in seen

        eventually(shows, 20, "the console shows what the guest printed")
        os.write(ours, b"\x1d")  # Ctrl-] leaves
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


def test_inspect_adds_up(vm: vmfork.VM, booted: vmfork.VM, cli: Cli) -> None:
    detail = vm.inspect()
    memory = detail.memory
    assert memory.pages == booted.inspect().memory_mib * 256
    assert detail.parent == booted.name
    assert detail.family == booted.inspect().family
    assert detail.vmid >= 1
    assert memory.image is not None
    assert memory.image_views >= 1
    assert memory.private_pages + memory.zero_pages <= memory.pages
    assert memory.demand_bytes <= memory.fetched_bytes <= memory.pages * 4096
    document = cli.json("inspect", vm.name)
    assert document["schema"] == "vmfork/1"
    assert document["id"] == detail.id
    assert {"faults", "source", "private_pages", "zero_pages"} <= set(document["memory"])
    assert vm.name in cli.text("inspect", vm.name)


def test_inspect_says_who_needs_which_memory(vm: vmfork.VM, booted: vmfork.VM, cli: Cli) -> None:
    written = 8 << 20
    vm.exec(f"head -c {written} /dev/urandom > /dev/shm/own", check=True)
    child = vm.fork(1).raise_for_errors()[0]
    memory = eventually(
        lambda: m if (m := child.inspect().memory).caches[0].pages is not None else None,
        20,
        "the page table is derived",
    )
    own, *older = memory.caches
    assert own.image == memory.image
    assert set(own.vms) == {vm.name, child.name}
    # What no VM has written since `vm` was forked is in a cache that all three need.
    assert any({booted.name, vm.name, child.name} <= set(cache.vms) for cache in older)
    assert own.pages is not None
    assert own.pages >= written // 4096, "what `vm` has written for itself"
    assert sum(cache.pages or 0 for cache in memory.caches) <= memory.pages
    eventually(lambda: child.inspect().memory.caches[0].resident_bytes >= written, 20, "the drain is done")
    assert own.image in cli.text("inspect", child.name).split("caches\n")[1]
    child.kill()
    assert vm.inspect().memory.caches[0].vms == (vm.name,)


def test_ps_and_tree_and_top(cli: Cli, vm: vmfork.VM, booted: vmfork.VM) -> None:
    header = cli.text("ps").splitlines()[0].split()
    assert header[:3] == ["VM", "PARENT", "STATE"]
    lines = cli.text("tree").splitlines()
    parent = next(i for i, line in enumerate(lines) if booted.name in line.split())
    assert any(vm.name in line for line in lines[parent + 1 :])
    assert vm.name in cli.text("top", "--once")


def test_version_and_doctor(cli: Cli, client: vmfork.Client) -> None:
    assert cli.json("version")["schema"] == "vmfork/1"
    report = client.doctor()
    assert {"userfaultfd", "qemu"} <= {check.name for check in report.checks}
    for check in report.checks:
        assert check.detail
        assert (check.status is vmfork.CheckStatus.OK) or (check.remedy and "\n" not in check.remedy)
    cli("doctor", code=0 if report.ok else 1)


def test_misuse_is_2_and_failure_1(cli: Cli) -> None:
    cli("fork", code=2)
    cli("nonsense", code=2)
    done = cli("fork", "nope", "-n", "1", code=1)
    text = done.stderr.decode()
    assert text.startswith("error: fork `nope`")
    assert "no VM named `nope` on this host" in text
    assert "hint: `vmfork ps`" in text


def test_a_closed_pipe_is_no_failure(cli: Cli, booted: vmfork.VM) -> None:
    import subprocess

    process = cli.spawn("logs", booted.name, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def _list(document: object) -> list[dict[str, object]]:
    """The rows of `--json` lists, whatever object holds them."""
    if isinstance(document, dict):
        (document,) = [value for value in document.values() if isinstance(value, list)]
    assert isinstance(document, list)
    return document
