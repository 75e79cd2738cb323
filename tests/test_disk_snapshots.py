"""Stored snapshots of VMs with disks: what VMs of them find there, what they need, and damage.

The store is looked into from outside where a test is about damage, as `docs/format.md` has it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness import ext4
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually, stays

MIB = 1 << 20

#: Files on a file system, part of them in the page cache alone, and one in memory. `/run/sums` has
#: the sums of all.
FILL = """
set -e
for n in $(seq 40); do head -c $((n * 50000)) /dev/urandom > /mnt/data/file$n; done
sync
for n in $(seq 1 3 40); do head -c $((n * 20000)) /dev/urandom > /mnt/data/file$n; done
rm /mnt/data/file2
head -c 3M /dev/urandom > /run/memory
sha256sum /mnt/data/file* /run/memory > /run/sums
"""
#: Changes all of it, as long as the VM lives.
SPOIL = """
(while :; do
    for n in $(seq 40); do head -c 70000 /dev/urandom > /mnt/data/file$n; done
    cp /mnt/data/file9 /run/memory; sync
done) >/dev/null 2>&1 &
"""


@pytest.fixture
def own(make_daemon: Callable[..., Daemon], image: str) -> Daemon:
    """A daemon of the test's own, to be killed and started again."""
    daemon = make_daemon()
    daemon.add_image(image)
    return daemon.start()


@pytest.mark.slow
@pytest.mark.limit(420)
def test_vms_of_a_snapshot_have_the_disks_of_its_instant(own: Daemon, image: str, tmp_path: Path) -> None:
    cli = Cli(own)
    base = tmp_path / "base.img"
    base.write_bytes(b"a file of the host" + bytes(2 * MIB - 18))
    with own.client() as client:
        client.volumes.create("kept", size_bytes=64 * MIB)
        disks = [
            vmfork.NewDisk.blank("data", 256 * MIB),
            vmfork.NewDisk.file("base", str(base)),
            vmfork.NewDisk.volume("kept", "kept"),
            vmfork.NewDisk.empty("late"),
        ]
        vm = client.run(image, name="db", memory_mib=256, disks=disks)
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data", check=True)
        vm.exec(FILL, check=True, timeout_s=60)
        # What is on the volume is in the snapshot, and the volume stays its VM's.
        vm.exec("head -c 1M /dev/urandom > /dev/vdd; echo mine | dd of=/dev/vdc bs=512 conv=notrunc", check=True)
        volume = vm.exec("sync; head -c 1M /dev/vdd | sha256sum", check=True).stdout_text
        snapshot = client.snapshots.create("db", "warm", wait=True, record_s=0)
        images = {one.device or "memory": one for one in client.snapshots.get("warm").images}
        assert set(images) == {"memory", "data", "base", "kept", "late"}
        assert images["data"].bytes == 256 * MIB
        assert images["data"].own_pages < 120 * MIB // 4096 and images["late"].own_pages == 0
        assert snapshot.own_bytes == sum(one.own_pages for one in images.values()) * 4096
        assert client.snapshots.verify("warm").ok
        vm.exec(SPOIL, check=True)
        for member in _started(client, "warm", 2):
            _check(member)
            assert member.exec("head -c 4 /dev/vdc", check=True).stdout_text == "mine"
            assert member.exec("head -c 1M /dev/vdd | sha256sum", check=True).stdout_text == volume
            sizes = [disk.size_bytes for disk in member.inspect().disks]
            assert sizes == [256 * MIB, 2 * MIB, 64 * MIB, 0]
            assert [disk.volume for disk in member.inspect().disks] == [None] * 4
            # Each writes its own.
            member.exec(f"echo {member.name} > /mnt/data/file7; sync", check=True)
        clone = client.vm("warm.1").fork(1).raise_for_errors()[0]
        assert _cold(clone, "cat /mnt/data/file7") == "warm.1"
        assert _cold(client.vm("warm.2"), "cat /mnt/data/file7") == "warm.2"
        # A clone's volume is an ordinary disk, and its empty disk takes another one.
        assert client.volumes.get("kept").vms == ("db",)
        client.volumes.create("other", size_bytes=16 * MIB)
        client.volumes.attach("other", clone)
        assert clone.exec("blockdev --getsize64 /dev/vde", check=True).stdout_text.strip() == str(16 * MIB)
        # A snapshot of a clone is a delta, on disk as in memory.
        client.volumes.detach("other", clone)
        second = client.snapshots.create(clone.name, "second", wait=True, record_s=0)
        assert second.base == "warm"
        images = {one.device: one for one in client.snapshots.get("second").images}
        assert images["data"].base == "warm" and 0 < images["data"].own_pages < 20 * MIB // 4096
        with pytest.raises(vmfork.Conflict, match="second"):
            client.snapshots.remove("warm")
        with pytest.raises(vmfork.Conflict, match="needed by the disk"):
            client.snapshots.remove("warm", cascade=True)
    own.kill()
    own.start()
    with own.client() as client:
        left = {(disk["vm"], disk["name"]) for disk in cli.json("disk", "ls")["disks"] if disk["state"] == "left"}
        assert {("warm.1", "data"), ("warm.2", "data"), (clone.name, "data"), ("db", "data")} <= left
        # What an earlier daemon left lies on the snapshot.
        file = tmp_path / "disk.img"
        cli("disk", "export", "warm.2/data", str(file))
        assert ext4.text_of(file, "/file7").strip() == "warm.2"
        with pytest.raises(vmfork.Conflict, match="needed by the disk"):
            client.snapshots.remove("warm", cascade=True)
        for name in ("warm", "second"):
            # Disks that were left have the names that its VMs would get.
            [member] = client.snapshots.start(name, names=[f"again-{name}"]).raise_for_errors()
            if name == "warm":
                _check(member)
            else:
                assert _cold(member, "cat /mnt/data/file7") == "warm.1"
            member.exec("umount /mnt/data", check=True)
            cli("disk", "export", f"{member.name}/data", str(file))
            subprocess.run(["e2fsck", "-fn", file], capture_output=True, timeout=60, check=True)
            member.remove(force=True)
        cli("disk", "prune")
        # Made whole, it needs the other one no more.
        client.snapshots.flatten("second")
        client.snapshots.remove("warm")
        [member] = _started(client, "second", 1)
        assert _cold(member, "cat /mnt/data/file7") == "warm.1"
        assert _cold(member, "sha256sum --check --quiet /run/sums 2>/dev/null | grep -v file7; true") == ""


@pytest.mark.slow
def test_a_damaged_disk_stalls_its_vm_until_it_is_mended(own: Daemon, image: str, tmp_path: Path) -> None:
    # What the guest has not read is in no page of its memory.
    base = tmp_path / "base.img"
    base.write_bytes((b"a mark that is on the disk" * 40000).ljust(2 * MIB, b"\0"))
    with own.client() as client:
        vm = client.run(image, name="raw", memory_mib=256, disks=[vmfork.NewDisk.file("data", str(base))])
        client.snapshots.create("raw", "hurt", wait=True, record_s=0, compression="none")
        vm.remove(force=True)
        chunks = [
            chunk
            for chunk in (own.state / "snapshots" / "chunks").glob("*/*")
            if chunk.read_bytes().count(b"a mark that is on the disk") > 5000
        ]
        assert chunks
        hurt = chunks[0]
        whole = hurt.read_bytes()
        hurt.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        report = client.snapshots.verify("hurt")
        assert not report.ok and hurt.name in str(report.damage), report
        [member] = _started(client, "hurt", 1)
        read = "dd if=/dev/vdb of=/run/read bs=64k iflag=direct; touch /run/done"
        member.exec(f"({read}) >/run/log 2>&1 &", check=True)
        eventually(lambda: client.vm("hurt.1").info.state == vmfork.VmState.STALLED, 60, "it stalls")
        reason = client.vm("hurt.1").info.reason or ""
        for says in ("disk `data`", "page ", "snapshot `hurt`", hurt.name):
            assert says in reason, reason
        stays(lambda: client.vm("hurt.1").info.state == vmfork.VmState.STALLED, 3, "it tries, and stays stalled")
        hurt.write_bytes(whole)
        eventually(lambda: client.vm("hurt.1").info.state == vmfork.VmState.RUNNING, 40, "it goes on")
        eventually(lambda: member.exec("test -e /run/done").exit_code == 0, 30, "it has read all")
        assert int(member.exec("grep -ao 'a mark that is on the disk' /run/read | wc -l", check=True).stdout_text) == 40000


@pytest.mark.slow
def test_disks_are_pushed_and_pulled(own: Daemon, image: str, tmp_path: Path) -> None:
    with own.client() as client:
        vm = client.run(image, name="far", memory_mib=256, disks=[vmfork.NewDisk.blank("data", 128 * MIB)])
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data", check=True)
        vm.exec(FILL, check=True, timeout_s=60)
        client.snapshots.create("far", "far", wait=True, record_s=0)
        vm.remove(force=True)
        client.snapshots.push("far", tmp_path / "elsewhere")
        client.snapshots.export("far", tmp_path / "export")
        client.snapshots.remove("far")
        chunks = own.state / "snapshots" / "chunks"
        eventually(lambda: not list(chunks.glob("*/*")), 10, "nothing of it is here")
        # Pages come as they are read.
        client.snapshots.pull("far", tmp_path / "elsewhere")
        [member] = _started(client, "far", 1)
        _check(member)
        member.remove(force=True)
        client.snapshots.pull("far", tmp_path / "elsewhere", wait=True)
        client.snapshots.remove("far")
        shutil.rmtree(tmp_path / "elsewhere")
        [imported] = client.snapshots.import_(tmp_path / "export")
        assert imported.name == "far"
        [member] = _started(client, "far", 1)
        _check(member)


@pytest.mark.slow
def test_a_disk_of_a_snapshot_is_another_vms_first_content(
    client: vmfork.Client, image: str, cli: Cli
) -> None:
    """Of a VM that boots, and of a volume, which needs the snapshot no more."""
    with client.run(image, name="maker", memory_mib=256, disks=[vmfork.NewDisk.blank("data", 64 * MIB)]) as vm:
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data", check=True)
        vm.exec("head -c 5M /dev/urandom > /mnt/data/file; sync", check=True)
        wanted = vm.exec("sha256sum < /mnt/data/file", check=True).stdout_text.strip()
        client.snapshots.create("maker", "made", wait=True, record_s=0)
    client.volumes.create("copy", snapshot=("made", "data"))
    disks = [
        vmfork.NewDisk.snapshot("data", "made"),
        vmfork.NewDisk.snapshot("twin", "made", "data"),
        vmfork.NewDisk.volume("copy", "copy"),
    ]
    with client.run(image, name="taker", memory_mib=256, disks=disks) as vm:
        for device, name in (("vdb", "data"), ("vdc", "twin"), ("vdd", "copy")):
            vm.exec(f"mkdir -p /mnt/{name} && mount /dev/{device} /mnt/{name}", check=True)
            assert vm.exec(f"sha256sum < /mnt/{name}/file", check=True).stdout_text.strip() == wanted
        vm.exec("echo mine > /mnt/data/file; sync", check=True)
        with vm.fork(1) as (clone,):
            assert _cold(clone, "cat /mnt/data/file") == "mine"
            assert _cold(clone, "sha256sum < /mnt/twin/file") == wanted
        assert client.snapshots.get("made").vm_names == ("taker",)
        with pytest.raises(vmfork.Conflict, match="`taker/data`"):
            client.snapshots.remove("made")
    refused = cli("run", image, "--name", "never", "--disk", "x=snapshot:made", code=None)
    assert refused.returncode != 0
    assert "the snapshot `made` has no disk `x`" in refused.stderr.decode()
    refused = cli("volume", "create", "never", "--from", "snapshot:absent/data", code=None)
    assert refused.returncode != 0 and b"absent" in refused.stderr
    client.snapshots.remove("made")
    assert client.volumes.get("copy").data_bytes >= 5 * MIB
    client.volumes.remove("copy")


@pytest.mark.slow
def test_a_volume_says_whether_it_is_stored(client: vmfork.Client, image: str) -> None:
    """A read-only volume's content is in the snapshot. One that refuses forks is in none."""
    client.volumes.create("shared", size_bytes=16 * MIB, on_fork=vmfork.OnFork.READ_ONLY)
    client.volumes.resize("shared", 24 * MIB)
    client.volumes.create("never", size_bytes=16 * MIB, on_fork=vmfork.OnFork.REFUSE)
    try:
        disks = [vmfork.NewDisk.volume("shared", "shared")]
        with client.run(image, name="reader", memory_mib=256, disks=disks) as vm:
            wanted = vm.exec("sha256sum /dev/vdb", check=True).stdout_text
            assert vm.exec("blockdev --getsize64 /dev/vdb", check=True).stdout_text == f"{24 * MIB}\n"
            client.snapshots.create("reader", "reader", wait=True, record_s=0)
        client.volumes.remove("shared")
        [member] = _started(client, "reader", 1)
        assert member.exec("sha256sum /dev/vdb", check=True).stdout_text == wanted
        (disk,) = member.inspect().disks
        assert disk.read_only and disk.volume is None
        assert member.exec("echo x > /dev/vdb").exit_code != 0
        with member.fork(1) as (clone,):
            assert clone.exec("sha256sum /dev/vdb", check=True).stdout_text == wanted
        member.remove(force=True)
        client.snapshots.remove("reader")
        with client.run(image, name="holder", memory_mib=256, disks=[vmfork.NewDisk.volume("never", "never")]):
            with pytest.raises(vmfork.Conflict, match="`never`, which no fork may have"):
                client.snapshots.create("holder", "holder", wait=True)
    finally:
        client.volumes.remove("never")


def _started(client: vmfork.Client, name: str, count: int) -> list[vmfork.VM]:
    return client.snapshots.start(name, count).raise_for_errors()


def _check(vm: vmfork.VM) -> None:
    """All files have the sums of the snapshot's instant, also when they are read from the disk."""
    assert _cold(vm, "sha256sum --check --quiet /run/sums && echo right") == "right"
    assert vm.exec("ls /mnt/data/file2").exit_code != 0


def _cold(vm: vmfork.VM, command: str) -> str:
    """What a command prints that reads from the disk, and not from the guest's page cache."""
    return vm.exec(f"sync; echo 3 > /proc/sys/vm/drop_caches; {command}", check=True, timeout_s=90).stdout_text.strip()
