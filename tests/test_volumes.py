"""Volumes: disks that outlive their VMs and the daemon, and what a fork does with them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vmfork

from harness import guests, metrics
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MIB = 1 << 20

#: Appends records to a file, each with a number of its own, and waits until each is durable. What
#: `/run/number` says is on the disk.
APPENDER = """
import os
file = os.open("/mnt/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
number = 0
while True:
    number += 1
    record = f"{number:015}\\n".encode()
    assert os.write(file, record) == len(record)
    os.fsync(file)
    with open("/run/number.new", "w") as told:
        told.write(str(number))
    os.rename("/run/number.new", "/run/number")
"""

MOUNT = "mkdir -p /mnt && mount /dev/vdb /mnt"


@pytest.fixture
def volume(client: vmfork.Client) -> Iterator[str]:
    """A volume with an empty file system."""
    name = client.volumes.create("db", size_bytes=256 * MIB).name
    yield name
    for vm in client.volumes.get(name).vms:
        client.vm(vm).remove(force=True)
    client.volumes.remove(name)


@pytest.mark.slow
def test_a_volume_goes_from_one_vm_to_the_next(
    client: vmfork.Client, image: str, volume: str, cli: Cli
) -> None:
    with _run(client, image, "first", volume) as vm:
        (disk,) = vm.inspect().disks
        assert (disk.name, disk.volume, disk.read_only) == ("data", volume, False)
        assert client.volumes.get(volume).vms == ("first",)
        vm.exec(f"{MOUNT} && head -c 8M /dev/urandom > /mnt/file && sync", check=True)
        wanted = vm.exec("sha256sum < /mnt/file", check=True).stdout_text
        assert "volume db" in cli.text("inspect", "first")
        # Not flushed by the guest, and written all the same.
        vm.exec("dd if=/dev/zero of=/mnt/direct bs=4096 count=1 oflag=direct", check=True)
        refused = cli("run", image, "--name", "other", "--disk", "data=volume:db", code=None)
        assert refused.returncode != 0
        text = refused.stderr.decode()
        assert "VM `first` has the volume `db`" in text and "end that VM first" in text
        with pytest.raises(vmfork.Conflict, match="`first` has the volume"):
            client.volumes.remove(volume)
        with pytest.raises(vmfork.Conflict, match="`first` has the volume"):
            client.volumes.set_on_fork(volume, vmfork.OnFork.REFUSE)
    # At once: who has ended gives it back before its end is answered.
    assert client.volumes.get(volume).vms == ()
    with _vm(client, image, "second", volume) as vm:
        vm.exec(MOUNT, check=True)
        assert vm.exec("sha256sum < /mnt/file", check=True).stdout_text == wanted
    assert 8 * MIB <= client.volumes.get(volume).data_bytes < 32 * MIB


@pytest.mark.parametrize("how", [pytest.param("poweroff", marks=pytest.mark.slow), "qemu"])
def test_a_volume_is_given_back_however_its_vm_ends(
    client: vmfork.Client, image: str, volume: str, how: str
) -> None:
    vm = _vm(client, image, "brief", volume)
    vm.exec(f"{MOUNT} && echo {how} > /mnt/word && sync", check=True)
    if how == "qemu":
        pid = vm.inspect().pid
        assert pid is not None
        subprocess.run(["kill", "-9", str(pid)], check=True, timeout=10)
    else:
        vm.kill(grace_s=30)
    eventually(lambda: client.volumes.get(volume).vms == (), 30, "it is given back")
    with _vm(client, image, "next", volume) as heir:
        heir.exec(MOUNT, check=True)
        assert heir.exec("cat /mnt/word", check=True).stdout_text.strip() == how
    vm.remove(force=True)


def test_clones_have_disks_of_their_own_and_the_parent_keeps_the_volume(
    client: vmfork.Client, image: str, volume: str
) -> None:
    with _vm(client, image, "parent", volume) as vm:
        vm.exec(f"{MOUNT} && echo before > /mnt/word && sync", check=True)
        clones = vm.fork(2).raise_for_errors()
        assert client.volumes.get(volume).vms == ("parent",)
        vm.exec("echo parent > /mnt/word && sync", check=True)
        for clone in clones:
            disk = clone.inspect().disks[0]
            assert (disk.name, disk.volume) == ("data", None)
            assert _cold(clone, "cat /mnt/word") == "before"
            clone.exec("echo clone > /mnt/word && sync", check=True)
        # A clone of a clone has nothing to do with the volume.
        (deep,) = clones[0].fork(1).raise_for_errors()
        assert _cold(deep, "cat /mnt/word") == "clone"
    with _vm(client, image, "heir", volume) as heir:
        heir.exec(MOUNT, check=True)
        assert heir.exec("cat /mnt/word", check=True).stdout_text.strip() == "parent"
        assert _cold(clones[1], "cat /mnt/word") == "clone", "though the volume goes on elsewhere"
    for clone in (*clones, deep):
        clone.remove(force=True)


def test_a_volume_can_keep_its_vm_from_being_forked(
    client: vmfork.Client, image: str, volume: str
) -> None:
    client.volumes.set_on_fork(volume, vmfork.OnFork.REFUSE)
    with _vm(client, image, "single", volume) as vm:
        with pytest.raises(vmfork.Conflict, match="`data` is the volume `db`") as refused:
            vm.fork(1)
        assert "--on-fork fork" in (refused.value.remedy or "")
        vm.exec(f"{MOUNT} && echo on > /mnt/word && sync", check=True)


@pytest.mark.slow
def test_a_read_only_volume_is_shared_by_many_vms_and_their_clones(
    client: vmfork.Client, image: str, volume: str
) -> None:
    with _vm(client, image, "maker", volume) as vm:
        vm.exec(f"{MOUNT} && echo data > /mnt/word && umount /mnt", check=True)
    client.volumes.set_on_fork(volume, vmfork.OnFork.READ_ONLY)
    with _run(client, image, "one", volume) as one, _run(client, image, "two", volume) as two:
        for vm in (one, two):
            vm.exec("mkdir -p /mnt && mount -o ro /dev/vdb /mnt", check=True)
            assert vm.exec("blockdev --getro /dev/vdb", check=True).stdout_text.strip() == "1"
            assert vm.inspect().disks[0].read_only
            with pytest.raises(vmfork.Conflict, match="keeps its kind"):
                client.volumes.detach(volume, vm, force=True)
        (clone,) = one.fork(1).raise_for_errors()
        assert clone.inspect().disks[0].volume == volume
        assert sorted(client.volumes.get(volume).vms) == sorted(["one", "two", clone.name])
        one.remove(force=True)
        for vm in (two, clone):
            assert _cold(vm, "cat /mnt/word") == "data"
            assert vm.exec("dd if=/dev/zero of=/dev/vdb bs=4096 count=1 oflag=direct").exit_code != 0
        with pytest.raises(vmfork.Conflict):
            client.volumes.remove(volume)
        clone.remove(force=True)
    assert client.volumes.get(volume).vms == ()


@pytest.mark.slow
@pytest.mark.limit(300)
def test_what_was_durable_is_there_after_the_daemon_was_killed(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        client.volumes.create("db", size_bytes=128 * MIB, labels={"team": "a"})
        known = client.volumes.get("db")
        acknowledged = 0
        for round_ in range(3):
            vm = _vm(client, image, f"writer-{round_}", "db")
            vm.exec(MOUNT, check=True)
            found = vm.exec("cat /mnt/log 2>/dev/null").stdout_text.split()
            assert [int(number) for number in found[:acknowledged]] == [*range(1, acknowledged + 1)]
            vm.exec("rm -f /mnt/log && sync", check=True)
            if round_ == 2:
                vm.exec("umount /mnt", check=True)
                break
            vm.write_file("/run/appender.py", APPENDER.encode())
            vm.exec("nohup python3 /run/appender.py >/run/appender.log 2>&1 &", check=True)
            eventually(lambda: _number(vm) > 20, 60, "it writes")
            if round_ == 1:
                # Its newest layers are those of a fork, and a clone lies on them.
                (clone,) = vm.fork(1).raise_for_errors()
                clone.exec("rm /mnt/log && sync", check=True)
                before = _number(vm)
                eventually(lambda: _number(vm) > before, 60, "it writes on")
            acknowledged = _number(vm)
            daemon.kill()
            daemon.start()
            listed = client.volumes.list()
            assert [one.name for one in listed] == ["db"]
            assert (listed[0].disk_id, listed[0].labels) == (known.disk_id, {"team": "a"})
            assert listed[0].vms == () and listed[0].reason is None
        checked = vm.exec("e2fsck -fn /dev/vdb")
        assert checked.exit_code == 0, checked.stdout_text
        vm.remove(force=True)
        # In good order, it survives as well.
        daemon.stop()
        daemon.start()
        assert client.volumes.get("db").disk_id == known.disk_id
        # The clone's disk lies on the volume's layers, and outlives its daemon, too.
        (left,) = [disk for disk in client.disks() if disk.state is vmfork.DiskState.LEFT]
        assert (left.vm, left.name) == (clone.name, "data")
        with pytest.raises(vmfork.Conflict, match="volume"):
            client.remove_disk(known.disk_id)
        client.remove_disk(left.id)
        client.volumes.remove("db")
        eventually(lambda: _held(daemon) < MIB, 10, "its space is free")
        assert client.volumes.list() == []
        daemon.stop()


@pytest.mark.slow
def test_a_running_vm_gets_a_volume_and_gives_it_back(
    client: vmfork.Client, image: str, volume: str, cli: Cli
) -> None:
    with guests.warm(client, image, name="holder", disks=guests.DISKS) as vm:
        assert [disk.empty for disk in vm.inspect().disks] == [True, True]
        assert _size(vm, "vdb") == 512
        client.volumes.create("other", size_bytes=64 * MIB)
        assert cli.text("volume", "attach", "holder", volume).strip() == "/dev/vdb"
        disk = client.volumes.attach("other", vm, disk="more")
        assert (disk.device, disk.volume, disk.size_bytes) == ("/dev/vdc", "other", 64 * MIB)
        eventually(lambda: (_size(vm, "vdb"), _size(vm, "vdc")) == (256 * MIB, 64 * MIB), 10, "it sees both")
        vm.exec(f"{MOUNT} && echo first > /mnt/word && sync", check=True)
        refused = cli("volume", "detach", "holder", volume, code=None)
        assert refused.returncode != 0 and b"`umount /dev/vdb`" in refused.stderr
        # A fork in between: the clone's disks are its own.
        (clone,) = vm.fork(1).raise_for_errors()
        assert [disk.volume for disk in clone.inspect().disks] == [None, None]
        vm.exec("echo second > /mnt/word && umount /mnt", check=True)
        client.volumes.detach(volume, vm)
        assert client.volumes.get(volume).vms == ()
        eventually(lambda: _size(vm, "vdb") == 512, 10, "it sees that it is gone")
        assert [disk.empty for disk in vm.inspect().disks] == [True, False]
        assert _cold(clone, "cat /mnt/word") == "first"
        clone.remove(force=True)
        # Another VM has it meanwhile, and this one again, many times.
        with _vm(client, image, "between", volume) as between:
            between.exec(f"{MOUNT} && cat /mnt/word && echo third > /mnt/word", check=True)
            with pytest.raises(vmfork.Conflict, match="`between` has the volume"):
                client.volumes.attach(volume, vm)
            between.exec("umount /mnt", check=True)
            client.volumes.detach(volume, between)
            assert client.volumes.get(volume).vms == ()
        files = _open_files(vm)
        for round_ in range(5):
            client.volumes.attach(volume, vm)
            eventually(lambda: _size(vm, "vdb") == 256 * MIB, 10, "it is back")
            vm.exec(f"{MOUNT} && echo {round_} >> /mnt/word && umount /mnt", check=True)
            client.volumes.detach(volume, vm)
            eventually(lambda: _size(vm, "vdb") == 512, 10, "it is gone")
        assert _open_files(vm) <= files, "QEMU has closed what it does not use"
        client.volumes.attach(volume, vm)
        eventually(lambda: _size(vm, "vdb") == 256 * MIB, 10, "it is back")
        vm.exec(MOUNT, check=True)
        assert vm.exec("cat /mnt/word", check=True).stdout_text.split() == ["third", *"01234"]
        assert "error" not in vm.exec("dmesg", check=True).stdout_text.lower().split("vdb")[-1]
    client.volumes.remove("other")


def test_clones_can_attach_to_empty_disks_and_others_can_not(
    client: vmfork.Client, image: str, volume: str
) -> None:
    with guests.warm(client, image, name="stem", disks=guests.DISKS) as vm:
        (clone,) = vm.fork(1).raise_for_errors()
        for round_ in range(2):
            client.volumes.attach(volume, clone)
            eventually(lambda: _size(clone, "vdb") == 256 * MIB, 10, "it sees it")
            clone.exec(f"{MOUNT} && echo {round_} >> /mnt/word && umount /mnt", check=True)
            client.volumes.detach(volume, clone)
        client.volumes.attach(volume, clone)
        clone.exec(f"{MOUNT} && echo x >> /mnt/word", check=True)
        (deep,) = clone.fork(1).raise_for_errors()
        assert _cold(deep, "cat /mnt/word").split() == ["0", "1", "x"]
        with pytest.raises(vmfork.Conflict, match="does not have it"):
            client.volumes.detach(volume, vm)
        clone.remove(force=True)
        vm.pause()
        with pytest.raises(vmfork.Conflict, match="it is paused, not running"):
            client.volumes.attach(volume, vm)
        vm.resume()
        client.volumes.set_on_fork(volume, vmfork.OnFork.READ_ONLY)
        with pytest.raises(vmfork.Conflict, match="keeps its kind"):
            client.volumes.attach(volume, vm)
        client.volumes.set_on_fork(volume, vmfork.OnFork.REFUSE)
        with pytest.raises(vmfork.Conflict, match="no empty disk"):
            client.volumes.attach(volume, deep, disk="data")
        client.volumes.attach(volume, vm)
        with pytest.raises(vmfork.Conflict, match="which no fork may have"):
            vm.fork(1)
        client.volumes.detach(volume, vm)
        vm.fork(1).raise_for_errors()[0].remove(force=True)
        deep.remove(force=True)
    assert client.volumes.get(volume).vms == ()


def test_a_volume_holds_a_copy_of_an_image_or_of_a_file(
    client: vmfork.Client, image: str, tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "data.raw"
    file.write_bytes(b"x" * MIB + bytes(3 * MIB))
    cli.text("volume", "create", "of-a-file", "--from", f"file:{file}", "--on-fork", "read-only")
    made = client.volumes.get("of-a-file")
    assert (made.size_bytes, made.data_bytes) == (4 * MIB, MIB)
    file.unlink()
    client.volumes.create("of-an-image", image=image)
    disks = [
        vmfork.NewDisk.volume("file", "of-a-file"),
        vmfork.NewDisk.volume("image", "of-an-image"),
    ]
    with client.run(image, name="copies", disks=disks) as vm:
        assert vm.exec("head -c 1M /dev/vdb | tr -d x | wc -c").stdout_text.strip() == "0"
        # It is a root file system, and its own.
        vm.exec("mkdir -p /mnt && mount /dev/vdc /mnt && touch /mnt/etc/mine", check=True)
        vm.exec("diff /etc/debian_version /mnt/etc/debian_version", check=True)
    text = cli.text("volume", "ls")
    assert "of-a-file" in text and "read-only" in text
    assert "4 MiB, 1 MiB of it used" in cli.text("volume", "inspect", "of-a-file")
    cli.text("volume", "rm", "of-a-file", "of-an-image")
    assert client.volumes.list() == []


def test_a_volume_that_finds_no_room_leaves_nothing(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = make_daemon()
    daemon.start().stop()
    folder = daemon.state / "disks"
    # Disks leave 1 GiB to the host.
    mount = ["mount", "-t", "tmpfs", "-o", "size=1080m", "vmfork-test", folder]
    subprocess.run(mount, timeout=30, check=True)
    try:
        daemon.start()
        file = tmp_path / "data.raw"
        file.write_bytes(os.urandom(96 * MIB))
        with daemon.client() as client:
            with pytest.raises(vmfork.HostError, match="is to keep") as refused:
                client.volumes.create("large", file=str(file))
            assert "full" in (refused.value.remedy or "")
            assert client.volumes.list() == []
            eventually(lambda: _held(daemon) < MIB, 10, "what was copied is gone")
            os.truncate(file, 8 * MIB)
            # How much is free is looked at every 100 ms.
            time.sleep(0.5)
            assert client.volumes.create("large", file=str(file)).data_bytes == 8 * MIB
            assert metrics.read(daemon).value("vmfork_volumes") == 1
        daemon.stop()
    finally:
        subprocess.run(["umount", "--lazy", folder], timeout=30, check=True)


def test_what_can_not_be_is_refused_with_what_to_do(
    client: vmfork.Client, image: str, volume: str, cli: Cli, tmp_path: Path
) -> None:
    def refused(*words: str) -> str:
        done = cli(*words, code=None)
        assert done.returncode != 0, words
        return done.stderr.decode()

    text = refused("volume", "create", volume, "--size", "1G")
    assert "there is a volume named `db` already" in text and "choose another name" in text
    assert "1 MiB to 2 TiB" in refused("volume", "create", "small", "--size", "1K")
    assert "name" in refused("volume", "create", "../up", "--size", "1G")
    assert "absent" in refused("volume", "create", "none", "--from", f"file:{tmp_path}/absent")
    assert "no image" in refused("volume", "create", "none", "--from", "image:absent")
    for words in (("rm", "absent"), ("inspect", "absent"), ("set", "absent", "--on-fork", "fork")):
        assert "no volume named `absent`" in refused("volume", *words)
    run = ("run", image, "--name", "never", "--disk")
    assert "no volume named `absent`" in refused(*run, "data=volume:absent")
    assert "is the volume `db` already" in refused(*run, "a=volume:db", "--disk", "b=volume:db")
    assert [one.name for one in client.volumes.list()] == [volume]
    assert client.volumes.get(volume).vms == ()


def _run(client: vmfork.Client, image: str, name: str, volume: str) -> vmfork.VM:
    """A VM that boots with the volume."""
    return client.run(image, name=name, disks=[vmfork.NewDisk.volume("data", volume)])


def _vm(client: vmfork.Client, image: str, name: str, volume: str) -> vmfork.VM:
    """A VM that has booted and gets the volume."""
    vm = guests.warm(client, image, name=name, disks=guests.DISKS)
    client.volumes.attach(volume, vm, disk="data")
    size = client.volumes.get(volume).size_bytes
    eventually(lambda: _size(vm, "vdb") == size, 10, "it sees it")
    return vm


def _cold(vm: vmfork.VM, command: str) -> str:
    """What a command prints that reads from the disk, and not from the guest's page cache."""
    return vm.exec(f"sync; echo 3 > /proc/sys/vm/drop_caches; {command}", check=True).stdout_text.strip()


def _size(vm: vmfork.VM, device: str) -> int:
    return int(vm.exec(f"blockdev --getsize64 /dev/{device}", check=True).stdout_text)


def _open_files(vm: vmfork.VM) -> int:
    """How many QEMU has."""
    return len(os.listdir(f"/proc/{vm.inspect().pid}/fd"))


def _number(vm: vmfork.VM) -> int:
    return int(vm.exec("cat /run/number 2>/dev/null").stdout_text or 0)


def _held(daemon: Daemon) -> int:
    """Bytes that the host's disk holds for disks of VMs."""
    return sum(file.stat().st_blocks * 512 for file in (daemon.state / "disks").rglob("*"))
