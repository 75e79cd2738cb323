"""`vmfork pause` and `resume`: what stands still, what a paused VM can do, and how it continues."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.processes import cpu_ms
from harness.waits import eventually, stays

#: Counts in the guest, twenty times a second. The file's size is the count, and never half written.
COUNTER = "nohup sh -c 'while :; do echo >> /run/count; sleep 0.05; done' >/dev/null 2>&1 &"

#: A guest's access to the clock's memory (CMOS), which is device state and free from byte 64 on.
#: There is no /dev/port, so two functions of machine code do `outb` and `inb`.
CMOS = """
import ctypes, mmap
assert ctypes.CDLL(None, use_errno=True).ioperm(0x70, 2, 1) == 0
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("89fa 89f0 ee c3 9090 89fa 31c0 ec c3"))
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
out = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int)(start)
into = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(start + 8)
put = lambda at, byte: (out(0x70, at), out(0x71, byte))
get = lambda at: (out(0x70, at), into(0x71))[1]
"""


@pytest.fixture
def counting(vm: vmfork.VM) -> vmfork.VM:
    """A VM that counts, with something in its memory."""
    vm.exec("head -c 8M /dev/urandom > /dev/shm/data", check=True)
    vm.exec(COUNTER, check=True)
    eventually(lambda: _count(vm) > 2, 20, "it counts")
    return vm


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_resume_that_qemu_carries_out_late_leaves_no_state_of_before(
    counting: vmfork.VM, daemon: Daemon
) -> None:
    """A fork after it has the memory and the vCPUs of one instant."""
    counting.pause()
    counting.fork(1).raise_for_errors()[0].remove(force=True)
    qemu = daemon.qemu(counting)
    qemu.kill(signal.SIGSTOP)
    try:
        with pytest.raises(vmfork.QemuError, match="within"):
            counting.resume()
    finally:
        qemu.kill(signal.SIGCONT)
    # It runs now, though it counts as paused.
    began = cpu_ms(qemu.pid)
    eventually(lambda: cpu_ms(qemu.pid) > began + 200, 30, "QEMU has carried it out")
    (clone,) = counting.fork(1).raise_for_errors()
    before = _count(clone)
    eventually(lambda: _count(clone) > before, 30, "the clone goes on counting")
    assert _sum(clone)
    counting.resume()
    before = _count(counting)
    eventually(lambda: _count(counting) > before, 30, "so does the parent")


@pytest.fixture
def snapshot(client: vmfork.Client) -> Iterator[str]:
    yield "of-paused"
    try:
        client.snapshots.remove("of-paused")
    except vmfork.NotFound:
        pass


def _count(vm: vmfork.VM) -> int:
    return int(vm.exec("stat -c %s /run/count 2>/dev/null || true", check=True).stdout or b"0")


def _sum(vm: vmfork.VM) -> bytes:
    return vm.exec("sha256sum /dev/shm/data", check=True).stdout


def _state(vm: vmfork.VM) -> vmfork.VmState:
    return vm.inspect().state


def test_the_guest_stands_still_and_continues_where_it_was(counting: vmfork.VM, daemon: Daemon) -> None:
    digest = _sum(counting)
    qemu = daemon.qemu(counting)
    assert counting.pause().state is vmfork.VmState.PAUSED
    assert counting.pause().state is vmfork.VmState.PAUSED, "a second pause changes nothing"
    before, began = cpu_ms(qemu.pid), time.monotonic()
    stays(lambda: _state(counting) is vmfork.VmState.PAUSED, 3, "it stays paused")
    paused_ms = 1000 * (time.monotonic() - began)
    assert cpu_ms(qemu.pid) - before < paused_ms / 10, "its QEMU rests"
    assert counting.resume().state is vmfork.VmState.RUNNING
    assert counting.resume().state is vmfork.VmState.RUNNING, "a second resume changes nothing"
    count = _count(counting)
    eventually(lambda: _count(counting) > count, 20, "it counts on")
    assert _sum(counting) == digest


def test_what_a_paused_guest_cannot_answer_is_refused_with_the_remedy(counting: vmfork.VM, cli: Cli) -> None:
    cli("pause", counting.name)
    assert next(row["state"] for row in _rows(cli) if row["name"] == counting.name) == "paused"
    done = cli("exec", counting.name, "true", code=None)
    assert done.returncode != 0
    assert b"is paused" in done.stderr
    assert f"vmfork resume {counting.name}".encode() in done.stderr
    # It is not asked: that would end in a timeout, which is no conflict.
    with pytest.raises(vmfork.Conflict):
        counting.exec("true")
    with pytest.raises(vmfork.Conflict):
        counting.read_file("/etc/hostname")
    with pytest.raises(vmfork.Conflict):
        counting.write_file("/run/x", b"x")
    cli("resume", counting.name)
    assert counting.exec("echo on", check=True).stdout == b"on\n"


def _rows(cli: Cli) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = cli.json("ps")["vms"]
    return listed


@pytest.mark.slow
def test_clones_of_a_paused_vm_run_from_that_instant_and_it_stays_paused(counting: vmfork.VM) -> None:
    digest = _sum(counting)
    counting.pause()
    # Twice: all of them continue the same instant.
    clones = [*counting.fork(2).raise_for_errors(), *counting.fork(1).raise_for_errors()]
    assert _state(counting) is vmfork.VmState.PAUSED
    for clone in clones:
        assert _sum(clone) == digest
        assert clone.exec("hostname", check=True).stdout.decode().strip() == clone.name
        first = _count(clone)
        eventually(lambda clone=clone, first=first: _count(clone) > first, 20, "a clone counts")
    at_pause = min(_count(clone) for clone in clones)
    counting.resume()
    assert _count(counting) < at_pause, "its counter stood still while the clones' went on"
    assert _sum(counting) == digest
    # And it can be forked as any other.
    assert _sum(counting.fork(1).raise_for_errors()[0]) == digest


def test_a_vm_that_booted_is_forked_while_paused(client: vmfork.Client, image: str) -> None:
    vm = client.run(image, name="booted-here", memory_mib=128)
    vm.exec("head -c 1M /dev/urandom > /dev/shm/data", check=True)
    digest = _sum(vm)
    vm.pause()
    # Its first device state goes another way than the next ones.
    for _ in range(2):
        assert _sum(vm.fork(1).raise_for_errors()[0]) == digest
        assert _state(vm) is vmfork.VmState.PAUSED
    vm.resume()
    assert _sum(vm) == digest


@pytest.mark.slow
def test_a_paused_vm_is_forked_again_where_each_device_state_is_a_migration(
    client: vmfork.Client, image: str
) -> None:
    vm = client.run(image, name="by-migration", memory_mib=128)
    # Its first device, named a second time in its state, turns the quick way off.
    first_device = b"\x04\0\0\0\0\x05timer"
    program = f"{CMOS}\nfor at, byte in enumerate({first_device!r}, start=64): put(at, byte)\n"
    program += f"print(bytes(get(at) for at in range(64, 64 + {len(first_device)})))"
    assert vm.exec(["python3", "-c", program], check=True).stdout.strip() == repr(first_device).encode()
    vm.exec("head -c 1M /dev/urandom > /dev/shm/data", check=True)
    digest = _sum(vm)
    vm.pause()
    # QEMU can't do a second migration before a `cont`.
    for _ in range(3):
        assert _sum(vm.fork(1).raise_for_errors()[0]) == digest
    vm.resume()
    assert _sum(vm.fork(1).raise_for_errors()[0]) == digest


def test_a_paused_vm_is_stored_and_started_again(
    counting: vmfork.VM, client: vmfork.Client, snapshot: str
) -> None:
    digest = _sum(counting)
    counting.pause()
    client.snapshots.create(counting.name, snapshot, wait=True, record_s=0)
    assert _state(counting) is vmfork.VmState.PAUSED
    (started,) = client.snapshots.start(snapshot).raise_for_errors()
    assert _sum(started) == digest
    counting.resume()
    assert _sum(counting) == digest


@pytest.mark.slow
def test_what_a_stored_vm_touches_is_recorded_after_its_pause(
    vm: vmfork.VM, client: vmfork.Client, snapshot: str
) -> None:
    vm.exec("head -c 8M /dev/urandom > /dev/shm/data", check=True)
    vm.pause()
    client.snapshots.create(vm.name, snapshot, wait=True, record_s=5)
    # Longer than what is recorded.
    stays(lambda: client.snapshots.profile(snapshot).runs == 0, 7, "it touches nothing")
    vm.resume()
    _sum(vm)
    pages = (8 << 20) // 4096
    eventually(
        lambda: client.snapshots.profile(snapshot).working_set_pages > pages * 0.9, 60, "its data is recorded"
    )


@pytest.mark.parametrize("grace", [(), ("--grace", "60s")])
def test_a_paused_vm_is_killed_at_once(
    vm: vmfork.VM, cli: Cli, daemon: Daemon, grace: tuple[str, ...]
) -> None:
    qemu = daemon.qemu(vm)
    vm.pause()
    began = time.monotonic()
    cli("kill", vm.name, *grace)
    eventually(lambda: not qemu.is_alive(), 10, "QEMU is gone")
    assert time.monotonic() - began < 20, "a guest that stands still is not waited for"
    with pytest.raises(vmfork.Conflict):
        vm.resume()
    with pytest.raises(vmfork.Conflict):
        vm.pause()


def test_pauses_and_forks_at_once_end_as_they_were_asked_for(counting: vmfork.VM) -> None:
    with ThreadPoolExecutor(3) as pool:
        forks = [pool.submit(counting.fork, 1) for _ in range(3)]
        counting.pause()
        results = [fork.result(120).raise_for_errors() for fork in forks]
    assert len(results) == 3
    assert _state(counting) is vmfork.VmState.PAUSED, "no fork has let it run"
    counting.resume()
    assert _state(counting) is vmfork.VmState.RUNNING
    counting.exec("true", check=True)


def test_several_are_paused_and_an_unknown_one_is_reported(vm: vmfork.VM, client: vmfork.Client, cli: Cli) -> None:
    clone = vm.fork(1).raise_for_errors()[0]
    done = cli("pause", vm.name, "no-such-vm", clone.name, code=1)
    assert b"no-such-vm" in done.stderr
    for one in (vm, clone):
        assert _state(one) is vmfork.VmState.PAUSED
    cli("resume", vm.name, clone.name)
    for one in (vm, clone):
        assert one.exec("true").ok
