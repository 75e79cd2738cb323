"""Snapshots of the disks alone (`--disk-only`), and VMs that boot from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import vmfork

from harness import ext4
from harness.cli import Cli

MIB = 1 << 20

FILL = """
set -e
mkdir -p /mnt/data && mount /dev/vdc /mnt/data
for n in $(seq 20); do head -c $((n * 50000)) /dev/urandom > /mnt/data/file$n; done
head -c 3M /dev/urandom > /srv/on-root
sha256sum /mnt/data/file* /srv/on-root > /srv/sums
echo only in memory > /run/memory
"""


@pytest.mark.slow
@pytest.mark.limit(300)
def test_vms_of_disks_alone_boot_with_what_the_guest_wrote(
    client: vmfork.Client, image: str, cli: Cli, tmp_path: Path
) -> None:
    disks = [vmfork.NewDisk.blank("data", 64 * MIB), vmfork.NewDisk.empty("late")]
    root = vmfork.Root.OVERLAY
    vm = client.run(
        image, name="maker", memory_mib=128, root=root, root_bytes=256 * MIB, disks=disks, labels={"of": "maker"}
    )
    with vm:
        # All of it is in the guest's page cache alone.
        vm.exec(FILL, check=True, timeout_s=60)
        told = cli("snapshot", "create", "maker", "files", "--disk-only", "--wait").stderr.decode()
        assert "of its disks" in told, told
        detail = client.snapshots.get("files")
        assert detail.disk_only and detail.memory_mib == 128
        assert [one.device for one in detail.images] == ["data", "late", "root"]
        assert client.snapshots.verify("files").ok
        vm.exec("echo later | tee /mnt/data/file1 /srv/on-root > /mnt/data/new; sync", check=True)
        # Only what it wrote since is in the next one.
        newer = client.snapshots.create(vm, "newer", disk_only=True, wait=True)
        assert (newer.base, newer.disk_only) == ("files", True)
        assert newer.own_bytes < detail.own_bytes / 2
        # Of one with memory, the disks are deltas on it and the memory is not.
        client.snapshots.create(vm, "all", wait=True, record_s=0)
        bases = {one.device or "memory": one.base for one in client.snapshots.get("all").images}
        assert bases == {"memory": None, "root": "newer", "data": "newer", "late": "newer"}

    reply = client.snapshots.start("files", 2, names=["one", "two"], labels={"by": "start"})
    one, two = reply.raise_for_errors()
    with one, two:
        machine_ids = set()
        for member in (one, two):
            member.exec("mkdir -p /mnt/data && mount /dev/vdc /mnt/data", check=True)
            member.exec("sha256sum --check --quiet /srv/sums", check=True, timeout_s=60)
            assert member.exec("test -e /run/memory || test -e /mnt/data/new").exit_code == 1, "it has booted"
            machine_ids.add(member.exec("cat /etc/machine-id", check=True).stdout_text)
            info = member.inspect()
            assert (info.parent, info.snapshot, info.memory_mib) == (None, "files", 128)
            assert dict(info.labels) == {"of": "maker", "by": "start"}
        assert len(machine_ids) == 2
        one.exec("echo mine > /srv/on-root && sync", check=True)
        two.exec("sha256sum --check --quiet /srv/sums", check=True, timeout_s=60)
        # It is forked like any other.
        with one.fork(1) as (clone,):
            assert clone.exec("cat /srv/on-root", check=True).stdout_text == "mine\n"
        with pytest.raises(vmfork.Conflict, match="`one/"):
            client.snapshots.remove("files", cascade=True)
        client.snapshots.create(one, "grown", disk_only=True, wait=True)
        assert client.snapshots.get("grown").base == "files"
        exported = tmp_path / "data.img"
        (data,) = [disk for disk in client.disks() if (disk.vm, disk.name) == ("two", "data")]
        two.exec("umount /mnt/data", check=True)
        cli("disk", "export", data.id, str(exported))
        ext4.check(exported)
    for base in ("newer", "files"):
        with pytest.raises(vmfork.Conflict):
            client.snapshots.remove(base)
    # One that does not depend on the others has the same files.
    client.snapshots.flatten("newer")
    client.snapshots.push("newer", tmp_path / "elsewhere")
    for name in ("grown", "all", "newer", "files"):
        client.snapshots.remove(name)
    client.snapshots.pull("newer", tmp_path / "elsewhere")
    (pulled,) = client.snapshots.start("newer", names=["pulled"]).raise_for_errors()
    with pulled:
        pulled.exec("mkdir -p /mnt/data && mount /dev/vdc /mnt/data", check=True)
        assert pulled.exec("cat /mnt/data/new /srv/on-root", check=True).stdout_text == "later\nlater\n"
    client.snapshots.remove("newer")


@pytest.mark.slow
def test_the_disks_of_a_paused_vm_are_as_a_power_cut_leaves_them(
    client: vmfork.Client, image: str, tmp_path: Path, cli: Cli
) -> None:
    with client.run(image, name="paused", memory_mib=128, disks=[vmfork.NewDisk.blank("data", 64 * MIB)]) as vm:
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data && echo safe > /mnt/data/safe && sync", check=True)
        vm.exec("echo lost > /mnt/data/lost", check=True)
        vm.pause()
        client.snapshots.create(vm, "cut", disk_only=True, wait=True)
        assert vm.inspect().state is vmfork.VmState.PAUSED
        vm.resume()
        vm.exec("cat /mnt/data/lost", check=True)
    client.volumes.create("cut", snapshot=("cut", "data"))
    exported = tmp_path / "cut.img"
    cli("disk", "export", client.volumes.get("cut").disk_id, str(exported))
    assert ext4.text_of(exported, "/safe") == "safe\n"
    assert ext4.text_of(exported, "/lost") == "", "it was in memory alone"
    client.volumes.remove("cut")
    client.snapshots.remove("cut")


@pytest.mark.slow
def test_what_can_not_be_stored_or_booted_is_refused(
    client: vmfork.Client, image: str, cli: Cli, vm: vmfork.VM
) -> None:
    with pytest.raises(vmfork.Conflict, match="it has no disks") as refused:
        client.snapshots.create(vm, "none", disk_only=True)
    assert "--root disk" in (refused.value.remedy or "")
    assert "none" not in [one.name for one in client.snapshots.list()]
    with pytest.raises(vmfork.BadRequest, match="a snapshot of the disks alone does not have"):
        client.snapshots.create(vm, "none", disk_only=True, keep_zero_pages=True)
    with client.run(image, name="taken", memory_mib=128, disks=[vmfork.NewDisk.blank("data", MIB * 8)]) as small:
        client.snapshots.create(small, "small", disk_only=True, wait=True)
        with pytest.raises(vmfork.Conflict, match="`taken`"):
            client.snapshots.start("small", 2, names=["free", "taken"], all_or_nothing=True)
        with pytest.raises(vmfork.VmforkError):
            client.snapshots.start("small", 2, names=["a", "b"], all_or_nothing=True, timeout_s=0.5)
        assert not {"free", "a", "b"} & {one.name for one in client.vms()}, "nothing is left"
        (late, other) = client.snapshots.start("small", 2, names=["taken", "late"], timeout_s=0.3).reply.vms
        assert late.error is not None and other.error is not None and other.error.code == "timeout"
    client.snapshots.remove("small")
    refused_by_cli = cli("snapshot", "create", vm.name, "none", "--disk-only", "--record", "5", code=2)
    assert b"--disk-only" in refused_by_cli.stderr
