"""Disks and volumes that grow while their VM runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MIB = 1 << 20

MOUNT = "mkdir -p /mnt && mount /dev/vdb /mnt"

#: Writes and checks a file over and over, until `/run/stop` appears.
BUSY = """
import hashlib, os
rounds, path = 0, "/mnt/busy"
while not os.path.exists("/run/stop"):
    data = os.urandom(1 << 20)
    with open(path, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert hashlib.sha256(file.read()).digest() == hashlib.sha256(data).digest()
    rounds += 1
    with open("/run/rounds", "w") as file:
        file.write(str(rounds))
with open("/run/ended", "w") as file:
    file.write("well")
"""


@pytest.fixture(scope="module")
def base(daemon: Daemon, image: str) -> Iterator[vmfork.VM]:
    """A VM with a file system on a disk. Fork it."""
    with daemon.client() as client:
        with client.run(image, name="base", disks=[vmfork.NewDisk.blank("data", 64 * MIB)]) as vm:
            vm.exec(MOUNT, check=True)
            yield vm


@pytest.fixture
def vm(client: vmfork.Client, base: vmfork.VM) -> vmfork.VM:
    return client.vm(base.fork(names=["grower"]).raise_for_errors()[0].name)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_disk_grows_under_a_file_system_in_use(
    client: vmfork.Client, vm: vmfork.VM, cli: Cli
) -> None:
    before = vm.fork(1).raise_for_errors()[0]
    vm.exec("head -c 24M /dev/urandom > /mnt/file && sync", check=True)
    wanted = vm.exec("sha256sum < /mnt/file", check=True).stdout_text
    vm.write_file("/run/busy.py", BUSY.encode())
    vm.exec("nohup python3 /run/busy.py >/run/busy.log 2>&1 &", check=True)
    eventually(lambda: _word(vm, "/run/rounds") not in ("", "0"), 60, "it writes")

    cli.text("disk", "resize", "grower/data", "256M")
    eventually(lambda: _size(vm) == 256 * MIB, 10, "the guest is told")
    assert vm.inspect().disks[0].size_bytes == 256 * MIB
    (listed,) = [disk for disk in client.disks() if disk.vm == "grower"]
    assert listed.size_bytes == 256 * MIB
    vm.exec("resize2fs /dev/vdb", check=True, timeout_s=120)
    # More than it had room for.
    vm.exec("head -c 48M /dev/urandom > /mnt/large && sync", check=True, timeout_s=120)
    large = vm.exec("sha256sum < /mnt/large", check=True, timeout_s=60).stdout_text

    # Again, and a fork at the same time: one waits for the other.
    with ThreadPoolExecutor(2) as pool:
        resized = pool.submit(client.resize_disk, listed.id, 320 * MIB)
        forked = pool.submit(vm.fork, 2)
        assert resized.result(120).size_bytes == 320 * MIB
        between = forked.result(120).raise_for_errors()
    for clone in between:
        size = clone.inspect().disks[0].size_bytes
        assert size in (256 * MIB, 320 * MIB)
        eventually(lambda: _size(clone) == size, 10, "it sees what it has")
    after = vm.fork(1).raise_for_errors()[0]
    assert (_size(after), after.inspect().disks[0].size_bytes) == (320 * MIB, 320 * MIB)
    assert (_size(before), before.inspect().disks[0].size_bytes) == (64 * MIB, 64 * MIB)

    for member in (vm, after, *between):
        member.exec("touch /run/stop", check=True)
        eventually(lambda: _word(member, "/run/ended") == "well", 60, "it read what it wrote")
        assert _cold(member, "sha256sum < /mnt/file") == wanted.strip()
        assert _cold(member, "sha256sum < /mnt/large") == large.strip()
        member.exec("umount /mnt", check=True)
        checked = member.exec("e2fsck -fn /dev/vdb", timeout_s=60)
        assert checked.exit_code == 0, checked.stdout_text
        assert "I/O error" not in member.exec("dmesg", check=True).stdout_text
    # A clone's disk is its own, and grows by itself.
    cli.text("disk", "resize", f"{after.name}/data", "400M")
    eventually(lambda: _size(after) == 400 * MIB, 10, "the guest is told")
    assert _size(vm) == 320 * MIB
    for clone in (before, after, *between):
        clone.remove(force=True)


def test_a_disk_does_not_shrink_and_needs_a_vm_that_runs(
    client: vmfork.Client, vm: vmfork.VM, cli: Cli
) -> None:
    # The files of an earlier VM of that name may be there for a moment longer.
    (disk,) = [disk for disk in client.disks() if disk.vm == "grower" and disk.state == vmfork.DiskState.IN_USE]
    refused = cli("disk", "resize", "grower/data", "32M", code=None)
    text = refused.stderr.decode()
    assert refused.returncode != 0
    assert "only grows" in text and "copy the files to a smaller disk" in text
    vm.pause()
    with pytest.raises(vmfork.Conflict, match="it is paused, not running"):
        client.resize_disk(disk.id, 128 * MIB)
    vm.resume()
    assert client.resize_disk(disk.id, 64 * MIB).size_bytes == 64 * MIB, "it has that"
    assert _size(vm) == 64 * MIB
    with pytest.raises(vmfork.NotFound):
        client.resize_disk("1f", 128 * MIB)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_volume_grows_with_and_without_a_vm(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        cli = Cli(daemon)
        client.volumes.create("db", size_bytes=32 * MIB)
        cli.text("volume", "resize", "db", "48M")
        vm = guests.warm(client, image, name="one", disks=guests.DISKS)
        client.volumes.attach("db", vm, disk="data")
        eventually(lambda: _size(vm) == 48 * MIB, 10, "it sees it")
        vm.exec(f"{MOUNT} && resize2fs /dev/vdb && echo word > /mnt/word && sync", check=True)
        cli.text("volume", "resize", "db", "80M")
        assert client.volumes.get("db").size_bytes == 80 * MIB
        eventually(lambda: _size(vm) == 80 * MIB, 10, "the guest is told")
        vm.exec("resize2fs /dev/vdb && head -c 52M /dev/urandom > /mnt/large && sync", check=True, timeout_s=120)
        wanted = vm.exec("sha256sum < /mnt/large", check=True, timeout_s=60).stdout_text.strip()
        refused = cli("volume", "resize", "db", "1M", code=None)
        assert refused.returncode != 0 and b"only grows" in refused.stderr
        # What was answered is on the medium, and the next daemon finds it.
        daemon.kill()
        daemon.start()
        assert client.volumes.get("db").size_bytes == 80 * MIB
        client.volumes.resize("db", 100 * MIB)
        with guests.warm(client, image, name="two", disks=guests.DISKS) as vm:
            client.volumes.attach("db", vm, disk="data")
            eventually(lambda: _size(vm) == 100 * MIB, 10, "it sees it")
            vm.exec(MOUNT, check=True)
            assert _cold(vm, "sha256sum < /mnt/large") == wanted
            assert _word(vm, "/mnt/word") == "word"
            client.volumes.resize("db", 128 * MIB)
            eventually(lambda: _size(vm) == 128 * MIB, 10, "the guest is told")
            vm.exec("resize2fs /dev/vdb && umount /mnt", check=True)
            checked = vm.exec("e2fsck -fn /dev/vdb", timeout_s=60)
            assert checked.exit_code == 0, checked.stdout_text
            client.volumes.detach("db", vm)
            client.volumes.set_on_fork("db", vmfork.OnFork.READ_ONLY)
        with client.run(image, name="three", disks=[vmfork.NewDisk.volume("data", "db")]):
            with pytest.raises(vmfork.Conflict, match="several VMs may read it"):
                client.volumes.resize("db", 512 * MIB)
        assert client.volumes.resize("db", 512 * MIB).size_bytes == 512 * MIB
        client.volumes.remove("db")
        daemon.stop()


def _size(vm: vmfork.VM) -> int:
    """Of its first disk, in bytes."""
    return int(vm.exec("cat /sys/block/vdb/size", check=True).stdout_text) * 512


def _word(vm: vmfork.VM, path: str) -> str:
    return vm.exec(f"cat {path} 2>/dev/null").stdout_text.strip()


def _cold(vm: vmfork.VM, command: str) -> str:
    """What a command prints whose files are read from the disk."""
    vm.exec("sync && echo 3 > /proc/sys/vm/drop_caches", check=True)
    return vm.exec(command, check=True, timeout_s=120).stdout_text.strip()
