"""Disks of clones on other hosts: what they hold, where their pages come from, and how often."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import metrics
from harness.cli import Cli
from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.metrics import Between
from harness.waits import eventually, stays

MIB = 1 << 20

DATA = "/mnt/data"
#: Files on a disk, and their sums in memory.
FILL = f"""
mkdir -p {DATA} && mount /dev/vdb {DATA}
for i in 1 2 3 4; do head -c 8M /dev/urandom > {DATA}/file$i; done
sync; sha256sum {DATA}/file? > /run/sums
"""
CHECK = "sha256sum --check --quiet /run/sums"
COLD = "echo 3 > /proc/sys/vm/drop_caches"


@pytest.fixture
def cluster(three_hosts: Cluster) -> Iterator[Cluster]:
    yield three_hosts
    three_hosts.clear()


@pytest.fixture
def parent(cluster: Cluster) -> vmfork.VM:
    """A VM on the first host with 32 MiB of files on a disk, none of them in its page cache."""
    disks = [vmfork.NewDisk.blank("data", 256 * MIB)]
    vm = cluster.clients[0].run(cluster.image, name="db", memory_mib=192, disks=disks)
    vm.exec(f"set -e; {FILL} {COLD}", check=True, timeout_s=120)
    return vm


def _cold(vm: vmfork.VM, command: str) -> str:
    return vm.exec(f"set -e; sync; {COLD}; {command}", check=True, timeout_s=120).stdout_text


@pytest.mark.slow
@pytest.mark.limit(400)
def test_disks_go_with_clones_onto_other_hosts(cluster: Cluster, parent: vmfork.VM) -> None:
    clones = parent.fork(4, hosts=["h1", "h2"]).raise_for_errors()
    # What the parent writes after the fork is its own.
    parent.exec(f"rm {DATA}/file1; head -c 8M /dev/zero > {DATA}/file2; sync", check=True)
    for clone in clones:
        assert [(disk.name, disk.device, disk.size_bytes) for disk in clone.inspect().disks] == [("data", "/dev/vdb", 256 * MIB)]
        _cold(clone, CHECK)
        clone.exec(f"echo {clone.name} > {DATA}/mine && sync", check=True)
    for clone in clones:
        assert _cold(clone, f"cat {DATA}/mine").strip() == clone.name
    # A clone of such a clone, on its host, on the third, and back where the disk began.
    there = next(clone for clone in clones if clone.inspect().host == "h1")
    for host in ("h1", "h2", "h0"):
        (deep,) = there.fork(1, hosts=[host]).raise_for_errors()
        assert deep.inspect().host == host
        assert _cold(deep, f"{CHECK} && cat {DATA}/mine").strip() == there.name
        # The file system is as it was in that instant: mounted, whole.
        deep.exec(f"umount {DATA} && e2fsck -fn /dev/vdb", check=True, timeout_s=60)
        deep.remove(force=True)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_page_of_a_disk_crosses_to_a_host_once_and_only_if_it_is_read(cluster: Cluster, parent: vmfork.VM) -> None:
    first = parent.fork(2, hosts=["h1"]).raise_for_errors()
    there = cluster.daemons[1]
    before = metrics.read(there)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda clone: _cold(clone, CHECK), first))
    # 32 MiB of files, and what surrounds them; two clones read them.
    assert 32 * MIB <= _came(there, before) < 34 * MIB
    # A second fork: what came of the disk is there already.
    parent.exec(f"head -c 1M /dev/urandom > {DATA}/more; sync", check=True)
    (second,) = parent.fork(1, hosts=["h1"]).raise_for_errors()
    before = metrics.read(there)
    _cold(second, f"{CHECK}; sha256sum {DATA}/more")
    assert MIB <= _came(there, before) < 2 * MIB
    # Whole pages that are written are not fetched first.
    before = metrics.read(there)
    second.exec(f"head -c 64M /dev/zero | tr '\\0' x > {DATA}/new; sync", check=True, timeout_s=120)
    assert _came(there, before) < MIB


def _came(there: Daemon, before: metrics.Metrics) -> int:
    """Bytes of disks that have come to a host from others since."""
    return int(4096 * Between(before, metrics.read(there)).value("vmfork_transfer_disk_pages_total"))


@pytest.mark.slow
@pytest.mark.limit(300)
def test_siblings_share_what_came_and_each_has_its_own(cluster: Cluster, parent: vmfork.VM) -> None:
    """Both overwrite pages of one layer, and go to a host where an earlier clone has ended."""
    (early,) = parent.fork(1, hosts=["h1"]).raise_for_errors()
    _cold(early, CHECK)
    (sibling,) = parent.fork(1, hosts=["h0"]).raise_for_errors()
    early.remove(force=True)
    for vm in (parent, sibling):
        file = f"{DATA}/file{1 if vm is parent else 2}"
        write = f"for at in 1 33 70 901; do head -c 4096 /dev/urandom | dd of={file} bs=4096 seek=$at conv=notrunc; done"
        vm.exec(f"{write}; sync; sha256sum {DATA}/file? > /run/sums", check=True)
    for vm in (parent, sibling):
        (there,) = vm.fork(1, hosts=["h1"]).raise_for_errors()
        _cold(there, CHECK)


@pytest.mark.slow
def test_a_root_on_a_disk_is_forked_onto_another_host(cluster: Cluster) -> None:
    cli = Cli(cluster.daemons[0])
    cli("run", cluster.image, "--name", "build", "--memory", "192M", "--root", "overlay")
    vm = cluster.clients[0].vm("build")
    vm.exec("head -c 4M /dev/urandom > /srv/made; sync; sha256sum /srv/made > /run/sums", check=True)
    (clone,) = vm.fork(1, hosts=["h2"]).raise_for_errors()
    _cold(clone, CHECK)
    clone.exec("echo there > /srv/mine && sync", check=True)
    assert vm.exec("test -e /srv/mine").exit_code == 1


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_clone_is_stalled_while_no_host_has_its_disks_page(cluster: Cluster, tmp_path: Path) -> None:
    base = tmp_path / "base.img"
    base.write_bytes((b"a mark that is on the disk" * 40000).ljust(2 * MIB, b"\0"))
    disks = [vmfork.NewDisk.file("data", str(base))]
    vm = cluster.clients[0].run(cluster.image, name="raw", memory_mib=128, disks=disks)
    (clone,) = vm.fork(1, names=["far"], hosts=["h1"]).raise_for_errors()
    # As if another program had written to it: what it gives may be other bytes.
    before = base.stat()
    os.utime(base, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    there = cluster.clients[1]
    read = "dd if=/dev/vdb of=/run/read bs=64k iflag=direct; touch /run/done"
    clone.exec(f"({read}) >/run/log 2>&1 &", check=True)
    eventually(lambda: there.vm("far").info.state == vmfork.VmState.STALLED, 60, "it stalls")
    reason = there.vm("far").info.reason or ""
    assert "disk `data`" in reason and "has changed" in reason, reason
    stays(lambda: there.vm("far").info.state == vmfork.VmState.STALLED, 3, "it tries, and stays stalled")
    os.utime(base, ns=(before.st_atime_ns, before.st_mtime_ns))
    eventually(lambda: there.vm("far").info.state == vmfork.VmState.RUNNING, 60, "it goes on")
    eventually(lambda: clone.exec("test -e /run/done").exit_code == 0, 30, "it has read all")
    assert int(clone.exec("grep -ao 'a mark that is on the disk' /run/read | wc -l", check=True).stdout_text) == 40000


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_volume_and_a_snapshot_of_a_clone_on_another_host(cluster: Cluster) -> None:
    first, second = cluster.clients[:2]
    first.volumes.create("kept", size_bytes=64 * MIB)
    disks = [vmfork.NewDisk.volume("kept", "kept"), vmfork.NewDisk.empty("late")]
    vm = first.run(cluster.image, name="keeper", memory_mib=128, disks=disks)
    vm.exec("head -c 2M /dev/urandom > /dev/vdb; sync; head -c 1M /dev/vdb | sha256sum > /run/sum", check=True)
    rest = "dd if=/dev/vdb bs=1M skip=1 count=1 | sha256sum"
    wanted = vm.exec(rest, check=True).stdout_text
    vm.exec("echo 3 > /proc/sys/vm/drop_caches", check=True)
    (clone,) = vm.fork(1, names=["other"], hosts=["h1"]).raise_for_errors()
    there = second.vm("other")
    same = "head -c 1M /dev/vdb | sha256sum | cmp - /run/sum"
    _cold(there, same)
    assert [disk.volume for disk in there.inspect().disks] == [None, None]
    # It is a disk of its own: the volume stays as it is.
    there.exec("head -c 1M /dev/zero > /dev/vdb; sync", check=True)
    _cold(vm, same)
    # Stored where the clone is, it needs the other host no more.
    second.snapshots.create("other", "there", wait=True, record_s=0)
    there.remove(force=True)
    vm.remove(force=True)
    (again,) = second.snapshots.start("there", names=["again"]).raise_for_errors()
    assert _cold(again, "head -c 1M /dev/vdb | tr -d '\\0' | wc -c").strip() == "0"
    assert _cold(again, rest) == wanted
    again.remove(force=True)
    second.snapshots.remove("there")
    first.volumes.remove("kept")
