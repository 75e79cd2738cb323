"""A VM that has something to lose, for tests of faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import vmfork

from . import processes
from .daemon import Daemon
from .waits import eventually


@dataclass
class World:
    """A daemon with one VM in it that has data worth losing."""

    daemon: Daemon
    client: vmfork.Client
    vm: vmfork.VM
    #: How often the module's own VM was forked. Each of its snapshots stays as long as it lives.
    forks_of_base: int = 1

    def load(self, mib: int = 100) -> None:
        """Random bytes in guest memory, with their sum."""
        self.vm.exec(
            f"mkdir -p /dev/shm && head -c {mib}M /dev/urandom > /dev/shm/data && sha256sum /dev/shm/data > /run/sum",
            check=True,
            timeout_s=150,
        )

    def engine_panics(self, vm: vmfork.VM) -> None:
        """What `--debug-faults` is for."""
        import httpx

        transport = httpx.HTTPTransport(uds=str(self.daemon.socket))
        with httpx.Client(transport=transport, base_url="http://vmforkd") as client:
            client.post(f"/v1/debug/vms/{vm.name}/engine-panic", timeout=30).raise_for_status()


def whole(vm: vmfork.VM) -> bool:
    """Whether a VM's data is what was loaded."""
    return vm.exec(["sha256sum", "-c", "/run/sum"], timeout_s=150).exit_code == 0


def has_failed(vm: vmfork.VM) -> bool:
    return vm.inspect().state is vmfork.VmState.FAILED


def keeper(vm: vmfork.VM) -> processes.Process:
    """The process that keeps a VM's frozen pages alive."""
    pid = vm.inspect().keeper_pid
    assert pid is not None, f"{vm} has no keeper"
    process = processes.read(pid)
    assert process is not None, f"no process {pid}, the keeper of {vm}"
    return process


def memory_files(daemon: Daemon) -> set[str]:
    """Files in memory that a daemon holds for its VMs: snapshots, device states."""
    assert daemon.process is not None
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    found: set[str] = set()
    for fd in os.listdir(folder):
        try:
            target = os.readlink(folder / fd)
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:"):
            found.add(target)
    return found


def complete(error: vmfork.ApiError, *codes: str) -> str:
    """Asserts that an error says what failed, why, and what to do; returns its text."""
    text = f"{error.code}: {error.message}: {error.cause}; remedy: {error.remedy}"
    assert error.code in codes, text
    assert error.message, text
    assert error.cause, text
    assert error.remedy, text
    assert "internal" not in text, text
    return text


def refused(what: Callable[[], object], *codes: str) -> str:
    """Asserts that a call fails with a complete error of one of these codes; returns its text."""
    try:
        outcome = what()
    except vmfork.ApiError as error:
        return complete(error, *codes)
    raise AssertionError(f"it was done: {outcome!r:.300}")


def settled(daemon: Daemon, memory_files_max: int, processes_max: int) -> None:
    """Waits until a daemon holds no more than so much."""

    def is_so() -> bool:
        return len(memory_files(daemon)) <= memory_files_max and len(daemon.processes()) <= processes_max

    try:
        eventually(is_so, 20)
    except AssertionError:
        listed = [str(process) for process in daemon.processes()]
        raise AssertionError(
            f"more than {memory_files_max} files in memory: {memory_files(daemon)},"
            f" or more than {processes_max} processes: {listed}"
        ) from None
