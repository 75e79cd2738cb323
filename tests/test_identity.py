"""Two copies of everything, one identity each: entropy, names, numbers, clocks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import vmfork

from harness.programs import Memcheck

def _distinct(values: list[str]) -> bool:
    return len(set(values)) == len(values)


def _of(vms: list[vmfork.VM], command: str) -> list[str]:
    return [vm.exec(command, check=True).stdout_text.strip() for vm in vms]


def test_clones_differ_in_all_that_is_random(vm: vmfork.VM) -> None:
    vm.exec("head -c 64 /dev/urandom > /dev/null", check=True)
    with vm.fork(4) as clones:
        everybody = [vm, *clones.raise_for_errors()]
        for command in (
            "head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'",
            "cat /proc/sys/kernel/random/uuid",
            "cat /etc/machine-id",
            "hostname",
        ):
            assert _distinct(_of(everybody, command)), command
        for machine_id in _of(everybody, "cat /etc/machine-id"):
            assert len(machine_id) == 32
            int(machine_id, 16)


@pytest.mark.slow
def test_random_numbers_that_a_program_draws_all_the_time_differ(vm: vmfork.VM) -> None:
    """Once a clone is reported, a program in it that went on through the fork draws its own."""
    vm.exec("(while :; do cat /proc/sys/kernel/random/uuid; done > /run/uuids) >/dev/null 2>&1 &", check=True)
    for _ in range(2):
        with vm.fork(2) as clones:
            everybody = [vm, *clones.raise_for_errors()]
            # One line may have been drawn before we counted, and be written after.
            begin = [int(text.split()[0]) + 2 for text in _of(everybody, "wc -l /run/uuids")]
            time.sleep(0.5)
            drawn = [
                set(one.exec(f"tail -n +{first} /run/uuids | head -n 50").stdout_text.split())
                for one, first in zip(everybody, begin, strict=True)
            ]
        for number, one in enumerate(drawn):
            assert one, f"{everybody[number].name} draws nothing any more"
            for other in drawn[:number]:
                assert not one & other, "two VMs drew the same random numbers"


@pytest.mark.slow
def test_vmid_and_identity_are_right(vm: vmfork.VM) -> None:
    assert vm.exec("cat /run/vmfork/vmid").stdout_text.strip() == str(vm.vmid)
    with vm.fork(3) as clones:
        for clone in clones.raise_for_errors():
            assert clone.exec("cat /run/vmfork/vmid").stdout_text.strip() == str(clone.vmid)
            identity = json.loads(clone.read_file("/run/vmfork/identity.json"))
            assert identity["vmid"] == clone.vmid
            assert identity["name"] == clone.name
            assert clone.exec("hostname").stdout_text.strip() == clone.name
            assert clone.exec("cat /etc/hostname").stdout_text.strip() == clone.name
            (grandchild,) = clone.fork(1).raise_for_errors()
            assert grandchild.exec("cat /run/vmfork/vmid").stdout_text.strip() == "1"
            assert clone.exec("cat /run/vmfork/vmid").stdout_text.strip() == str(clone.vmid)
            grandchild.kill()


def _clock_error_s(vm: vmfork.VM) -> float:
    """How far the guest's clock is from ours, at least; the round trip is no error of the clock."""
    best = float("inf")
    for _ in range(5):
        before = time.time()
        guest = int(vm.exec("date +%s%N", check=True).stdout) / 1e9
        after = time.time()
        best = min(best, max(before - guest, guest - after, 0.0))
    return best


@pytest.mark.alone
def test_clocks_are_within_50_ms_of_the_host(booted: vmfork.VM, vm: vmfork.VM) -> None:
    assert _clock_error_s(vm) < 0.05
    with vm.fork(2) as clones:
        for clone in clones.raise_for_errors():
            assert _clock_error_s(clone) < 0.05
            (late,) = clone.fork(1).raise_for_errors()
            assert _clock_error_s(late) < 0.05


def test_the_monotonic_clock_never_goes_back(vm: vmfork.VM) -> None:
    before = float(vm.exec("cut -d' ' -f1 /proc/uptime", check=True).stdout)
    with vm.fork(1) as clones:
        after = float(clones[0].exec("cut -d' ' -f1 /proc/uptime", check=True).stdout)
    assert after >= before


@pytest.mark.slow
def test_identity_is_there_before_user_code_goes_on(
    vm: vmfork.VM, need: Callable[[object, str], None]
) -> None:
    """By the time a fork is answered, every clone that is reported has its own identity."""
    Memcheck.start(vm, mib=32, threads=1, seed=1)  # so that it has something to do meanwhile
    with vm.fork(4) as clones:
        assert _of(list(clones.raise_for_errors()), "hostname") == [clone.name for clone in clones]
