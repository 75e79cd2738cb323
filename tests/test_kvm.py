"""The smallest guest of all, forked while it counts: under KVM where the device opens, and under TCG.

It is 512 bytes (`guest/counter.S`) and has no agent: the image is a disk that boots by itself. It
keeps one number in 256 pages and says `X` when two of them differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness import bootsector, processes
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

#: What the counter has grown by from one line to the next.
STEP = 32


def _numbers(vm: vmfork.VM) -> list[int]:
    """The whole lines of a VM's log. The first line of a clone may have begun in its parent."""
    text = vm.logs()
    assert "X" not in text, f"{vm.name}: a page is of another instant: {text[-200:]!r}"
    lines = text.split("\n")[:-1]
    whole = [line for line in lines if len(line) == 8]
    assert len(whole) >= len(lines) - 1
    return [int(line, 16) for line in whole]


def _grown(vm: vmfork.VM, lines: int) -> list[int]:
    """Its numbers once there are `lines` more of them."""
    begin = len(_numbers(vm))
    return eventually(
        lambda: numbers if len(numbers := _numbers(vm)) >= begin + lines else None, 60, f"{vm.name} counts on"
    )


def _have_kvm() -> bool:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize("accel", ["kvm", "tcg"])
def test_a_counting_guest_is_forked(
    make_daemon: Callable[..., Daemon], need: Callable[[object, str], None], accel: str
) -> None:
    need(accel != "kvm" or _have_kvm(), "/dev/kvm that opens")
    daemon = make_daemon("--pool", "2").start()
    Cli(daemon)("image", "import", "counter", "--boot-disk", str(bootsector.build("counter")))
    with daemon.client() as client:
        (listed,) = client.images()
        assert not listed.agent
        parent = client.run("counter", name="parent", memory_mib=64, accel=accel)
        detail = parent.inspect()
        assert (detail.accel.value, detail.state) == (accel, vmfork.VmState.RUNNING)
        eventually(lambda: len(_numbers(parent)) >= 3, 60, "it counts")
        _unprivileged(daemon.qemu(parent))

        before = _numbers(parent)[-1]
        clones = parent.fork(3).raise_for_errors()
        after = _grown(parent, 2)
        starts = set()
        for clone in clones:
            numbers = _grown(clone, 5)
            assert numbers == list(range(numbers[0], numbers[-1] + 1, STEP)), "it counts without a gap"
            assert before < numbers[0] <= after[-1] + STEP
            starts.add(numbers[0])
            _unprivileged(daemon.qemu(clone))
        # One instant for all, up to the line that was being printed then.
        assert max(starts) - min(starts) <= STEP

        # A clone of a clone goes on too, when the others are gone.
        last = _numbers(clones[0])[-1]
        grandchild = clones[0].fork(1).raise_for_errors()[0]
        for vm in (parent, *clones):
            vm.kill()
        numbers = _grown(grandchild, 5)
        assert numbers[0] > last
        assert numbers == list(range(numbers[0], numbers[-1] + 1, STEP))

        # Without an agent no program can run, and the error says so.
        with pytest.raises(vmfork.Conflict, match="no agent") as info:
            grandchild.exec("true")
        assert "vmfork console" in (info.value.remedy or "")


def _unprivileged(qemu: processes.Process) -> None:
    """It runs as a user of its own, without capabilities, in a sandbox."""
    lines = Path(f"/proc/{qemu.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    assert all(int(uid) > 1000 for uid in status["Uid"].split())
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"


def test_a_disk_that_does_not_boot_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon().start()
    done = Cli(daemon)("image", "import", "none", "--boot-disk", "/bin/true", code=1)
    text = done.stderr.decode()
    assert "has no boot sector" in text
    assert "55 aa" in text
    assert Cli(daemon)("image", "import", "none", code=2)
    assert Cli(daemon).json("image", "ls")["images"] == []
