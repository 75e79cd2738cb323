"""The fork API from inside the guest: SnowFlock's calls and messages, in C and Python, and the examples."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vmfork

from harness import guests, places, programs
from harness.waits import eventually

SOURCES = Path(__file__).parent / "guest"
EXAMPLES = places.ROOT / "examples"

MODES = ["messages", "kill", "errors", "nested", "abandon"]


@pytest.fixture
def run(vm: vmfork.VM, client: vmfork.Client) -> Iterator[Callable[[str, str], str]]:
    """`run("c", "messages")`: what the program printed before its "ok"."""

    def run(language: str, mode: str) -> str:
        return run_in(vm, language, mode)

    before = {other.name for other in client.vms()}
    yield run
    # A ticket's clones are gone with it.
    eventually(lambda: {other.name for other in client.vms()} <= before, 10, "the ticket's clones are gone")


def run_in(vm: vmfork.VM, language: str, mode: str) -> str:
    argv = prepare(vm, language)
    result = vm.exec([*argv, mode], timeout_s=120)
    text = result.stdout_text + result.stderr_text
    assert result.exit_code == 0, f"{language} {mode}: {text}"
    assert result.stdout_text.endswith("ok\n"), f"{language} {mode}: {text}"
    return result.stdout_text.removesuffix("ok\n")


def prepare(vm: vmfork.VM, language: str) -> list[str]:
    """Put the checker into a VM; how it is called there."""
    if language == "python":
        vm.copy_in(SOURCES / "forkapi.py", "/run/forkapi.py")
        return ["python3", "/run/forkapi.py"]
    vm.copy_in(programs.build_with_fork_api(SOURCES / "forkapi.c"), "/run/forkapi", mode=0o755)
    return ["/run/forkapi"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("language", ["c", pytest.param("python", marks=pytest.mark.slow)])
def test_the_calls_mean_what_is_documented(run: Callable[[str, str], str], language: str, mode: str) -> None:
    assert run(language, mode) == ""


def test_messages_of_one_worker_can_be_taken_alone(run: Callable[[str, str], str]) -> None:
    run("python", "one_worker")


@pytest.mark.parametrize("language", ["c", "python"])
def test_hierarchical_puts_a_worker_on_each_vcpu(client: vmfork.Client, image: str, language: str) -> None:
    with guests.warm(client, image, memory_mib=256, cpus=2) as vm:
        lines = [line.split() for line in run_in(vm, language, "hierarchical").splitlines()]
        assert sorted(int(vmid) for vmid, _pid, _id in lines) == [1, 2, 3, 4]
        by_vm: dict[str, set[str]] = {}
        for _vmid, pid, machine_id in lines:
            by_vm.setdefault(machine_id, set()).add(pid)
        # Two VMs with two processes each; and none of them is the parent's.
        assert sorted(len(pids) for pids in by_vm.values()) == [2, 2]
        assert vm.exec("cat /etc/machine-id").stdout_text.strip() not in by_vm


@pytest.mark.slow
def test_a_clone_killed_from_outside_is_told_to_who_joins(client: vmfork.Client, vm: vmfork.VM) -> None:
    argv = prepare(vm, "python")
    before = {other.name for other in client.vms()}
    vm.exec(f"{' '.join(argv)} outside > /run/outside 2>&1 < /dev/null & echo $! > /run/pid", check=True)
    eventually(lambda: b"waiting" in vm.read_file("/run/outside"), 60, "the ticket is cloned")
    # It is about to call sf_join then. A fork before the call would not interrupt it.
    state = "awk '/^State/ { print $2 }' /proc/$(cat /run/pid)/status"
    eventually(lambda: vm.exec(state, check=True).stdout == b"S\n", 30, "it sleeps in sf_join")
    clones = [other for other in client.vms() if other.name not in before]
    assert sorted(clone.vmid for clone in clones) == [1, 2]
    # The host can look up a fork that it did not ask for.
    fork = vm.inspect().last_fork
    assert fork is not None and 0 < fork.pause_ms < fork.total_ms
    assert sorted(clone.id or "" for clone in fork.clones) == sorted(clone.id or "" for clone in clones)
    for clone in clones:
        clone.kill()
    eventually(lambda: b"ok" in vm.read_file("/run/outside"), 30, "sf_join has returned")
    text = vm.read_file("/run/outside").decode()
    assert "None" not in text, text


def test_forks_from_outside_and_inside_go_together(client: vmfork.Client, vm: vmfork.VM) -> None:
    """A VM whose program waits for its clones is forked from outside: the wait goes on in the parent."""
    argv = prepare(vm, "python")
    before = {other.name for other in client.vms()}
    vm.exec(f"{' '.join(argv)} outside > /run/outside 2>&1 < /dev/null & echo $! > /run/pid", check=True)
    eventually(lambda: b"waiting" in vm.read_file("/run/outside"), 60, "the ticket is cloned")
    # It is about to call sf_join then. A fork before the call would not interrupt it.
    state = "awk '/^State/ { print $2 }' /proc/$(cat /run/pid)/status"
    eventually(lambda: vm.exec(state, check=True).stdout == b"S\n", 30, "it sleeps in sf_join")
    clones = [other for other in client.vms() if other.name not in before]
    copy = vm.fork(1).raise_for_errors()[0]
    # In the copy the call was not its own.
    eventually(lambda: b"Cancelled" in copy.read_file("/run/outside"), 30, "the copy's sf_join is cancelled")
    assert vm.read_file("/run/outside") == b"waiting\n"
    for clone in clones:
        clone.kill()
    eventually(lambda: b"ok" in vm.read_file("/run/outside"), 30, "the parent's sf_join has returned")


def test_the_libraries_are_in_the_default_image(vm: vmfork.VM) -> None:
    result = vm.exec(["python3", "-c", "import vmfork; print(vmfork.sf_vmid())"], check=True)
    assert result.stdout_text == f"{vm.vmid}\n"
    assert vm.exec("ls /usr/include/vmfork.h /usr/lib/*/libvmfork.so* /usr/lib/libvmfork.so* 2>/dev/null | wc -l").stdout.strip() >= b"2"


def _examples(folder: str, suffix: str) -> list[Path]:
    return sorted((EXAMPLES / folder).glob(f"*{suffix}")) if (EXAMPLES / folder).is_dir() else []


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("source", _examples("python", ".py"), ids=lambda path: path.stem)
def test_python_examples_run(source: Path, client: vmfork.Client, vm: vmfork.VM) -> None:
    vm.copy_in(source, f"/run/{source.name}")
    _example(vm, ["python3", f"/run/{source.name}"])


@pytest.mark.limit(300)
@pytest.mark.parametrize("source", _examples("c", ".c"), ids=lambda path: path.stem)
def test_c_examples_run(source: Path, client: vmfork.Client, vm: vmfork.VM) -> None:
    vm.copy_in(programs.build_with_fork_api(source), f"/run/{source.stem}", mode=0o755)
    _example(vm, [f"/run/{source.stem}"])


def _example(vm: vmfork.VM, argv: list[str]) -> None:
    result = vm.exec(argv, cwd="/run", timeout_s=200)
    assert result.exit_code == 0, result.stdout_text + result.stderr_text
    assert result.stdout.strip(), "an example that prints nothing shows nothing"


def test_all_four_patterns_have_an_example_in_both_languages(need: Callable[[object, str], None]) -> None:
    need(EXAMPLES.is_dir() and any(EXAMPLES.rglob("*.*")), str(EXAMPLES))
    assert len(_examples("python", ".py")) >= 4
    assert len(_examples("c", ".c")) >= 4


def test_the_checker_compiles_as_c99_and_without_warnings() -> None:
    """Also the header: it must do for strict C99."""
    header = places.ROOT / "guest" / "c" / "vmfork.h"
    subprocess.run(
        ["cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", str(header)],
        check=True,
        timeout=60,
    )
