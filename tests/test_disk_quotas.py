"""Quotas of disks: a VM that would pass one stalls, says why, and goes on when there is room."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually, stays

MIB = 1 << 20

MOUNT = "mkdir -p /mnt && mount /dev/vdb /mnt"


def _vm(client: vmfork.Client, image: str, name: str) -> vmfork.VM:
    vm = client.run(image, name=name, disks=[vmfork.NewDisk.blank("data", 256 * MIB)])
    vm.exec(MOUNT, check=True)
    return vm


def _fill(pool: ThreadPoolExecutor, vm: vmfork.VM, mib: int) -> Future[vmfork.ExecResult]:
    """Writes so much, and says what it wrote."""
    fill = f"head -c {mib}M /dev/urandom | tee /mnt/file | sha256sum; sync"
    return pool.submit(vm.exec, fill, check=True, timeout_s=200)


def _stalled(client: vmfork.Client, name: str, why: str) -> None:
    state = lambda: client.vm(name).info.state  # noqa: E731
    eventually(lambda: state() == vmfork.VmState.STALLED, 60, "it stalls")
    eventually(lambda: why in (client.vm(name).info.reason or ""), 10, f"because of {why}")


def _whole(vm: vmfork.VM, filled: Future[vmfork.ExecResult]) -> None:
    """It has gone on, and has all that it wrote."""
    wanted = filled.result(200).stdout_text.split()[0]
    vm.exec("sync && echo 3 > /proc/sys/vm/drop_caches", check=True)
    assert vm.exec("sha256sum < /mnt/file", check=True, timeout_s=60).stdout_text.split()[0] == wanted
    assert "I/O error" not in vm.exec("dmesg", check=True).stdout_text


# `make test` has a user's quota, which stalls VMs in the same way.
@pytest.mark.soak
@pytest.mark.limit(300)
def test_a_hosts_quota_stalls_a_vm_until_another_has_gone(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon("--disk-quota", "128M")
    daemon.add_image(image)
    daemon.start()
    quota = "bytes of the host's disk quota are used"
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        first = _vm(client, image, "first")
        first.exec("head -c 80M /dev/urandom > /mnt/file && sync", check=True, timeout_s=60)
        second = _vm(client, image, "second")
        filled = _fill(pool, second, 64)
        _stalled(client, "second", quota)
        stays(lambda: client.vm("second").info.state == vmfork.VmState.STALLED, 3, "whatever it tries")
        assert "disk `data`: " in (client.vm("second").info.reason or "")
        # A volume finds no room either, and says why.
        with pytest.raises(vmfork.HostError, match="quota"):
            client.volumes.create("db", image=image)
        assert client.volumes.list() == []
        first.exec("rm /mnt/file && sync && fstrim /mnt", check=True)
        eventually(lambda: client.vm("second").info.state == vmfork.VmState.RUNNING, 40, "it goes on")
        _whole(second, filled)
        # What an earlier daemon left counts, too.
        daemon.kill()
        daemon.start()
        late = _vm(client, image, "late")
        filled = _fill(pool, late, 100)
        _stalled(client, "late", quota)
        cli = Cli(daemon)
        cli.text("disk", "rm", "second/data")
        eventually(lambda: client.vm("late").info.state == vmfork.VmState.RUNNING, 40, "it goes on")
        _whole(late, filled)
        late.remove(force=True)
        cli.text("disk", "prune")
        daemon.stop()


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_users_quota_is_of_its_vms_and_their_clones(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon("--quota", "default=disk:104M")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        parent = _vm(client, image, "parent")
        parent.exec("head -c 40M /dev/urandom > /mnt/before && sync", check=True, timeout_s=60)
        # What a parent wrote counts once, however many clones show it.
        clones = parent.fork(3).raise_for_errors()
        clones[0].exec("head -c 30M /dev/urandom > /mnt/own && sync", check=True, timeout_s=60)
        filled = _fill(pool, clones[1], 50)
        _stalled(client, clones[1].name, "bytes of the disk quota of user 0 are used")
        clones[0].remove(force=True)
        eventually(lambda: client.vm(clones[1].name).info.state == vmfork.VmState.RUNNING, 40, "it goes on")
        _whole(clones[1], filled)
        for vm in (parent, clones[1], clones[2]):
            vm.remove(force=True)
        daemon.stop()
