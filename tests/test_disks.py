"""Writable disks: what a VM finds there, what a fork makes of them, and what is refused."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import vmfork

from harness import ext4, metrics, places
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually, stays

MIB = 1 << 20

#: Writes pages of a disk past the page cache, each with a number of its own. It keeps in memory
#: what each page must hold. When `/run/stop` appears, it compares.
WRITER = """
import mmap, os, random, sys
disk = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
wanted, number = {}, 0
content = lambda number: number.to_bytes(8, "little") * 512
while not os.path.exists("/run/stop"):
    number += 1
    at = random.randrange(2048)
    page[:] = content(number)
    assert os.pwrite(disk, page, at * 4096) == 4096
    wanted[at] = number
    with open("/run/number", "w") as file:
        file.write(str(number))
wrong = []
for at, number in wanted.items():
    assert os.preadv(disk, [page], at * 4096) == 4096
    if page[:] != content(number):
        wrong.append(at)
with open("/run/outcome.new", "w") as file:
    file.write(f"{len(wanted)} pages, {len(wrong)} wrong")
os.rename("/run/outcome.new", "/run/outcome")
"""


@pytest.fixture(scope="module")
def base(daemon: Daemon, image: str) -> Iterator[vmfork.VM]:
    """A VM with a file system on one disk, and a second disk for raw bytes. Fork it."""
    with daemon.client() as client:
        disks = [vmfork.NewDisk.blank("data", 256 * MIB), vmfork.NewDisk.blank("raw", 64 * MIB)]
        vm = client.run(image, name="base", disks=disks)
        vm.exec("mkdir -p /mnt/data && mount /dev/vdb /mnt/data", check=True)
        yield vm
        vm.remove(force=True)


@pytest.fixture
def vm(client: vmfork.Client, base: vmfork.VM) -> vmfork.VM:
    return client.vm(base.fork(1).raise_for_errors()[0].name)


def test_a_blank_disk_is_an_empty_file_system(vm: vmfork.VM, cli: Cli) -> None:
    data, raw = vm.inspect().disks
    assert (data.name, data.device, data.size_bytes) == ("data", "/dev/vdb", 256 * MIB)
    assert (raw.name, raw.device, raw.size_bytes) == ("raw", "/dev/vdc", 64 * MIB)
    assert vm.exec("blockdev --getsize64 /dev/vdb", check=True).stdout_text.strip() == str(256 * MIB)
    assert vm.exec("ls /mnt/data", check=True).stdout_text.split() == ["lost+found"]
    vm.exec("dd if=/dev/urandom of=/mnt/data/file bs=1M count=8 conv=fsync", check=True)
    written = vm.inspect().disks[0].written_bytes
    assert 8 * MIB <= written < 16 * MIB
    assert "data at /dev/vdb, 256 MiB" in cli.text("inspect", vm.name)


def test_what_a_disk_did_is_told(vm: vmfork.VM, cli: Cli, daemon: Daemon) -> None:
    """By `inspect` for each disk, by the metrics for all. The metrics keep what ended VMs did."""
    before, at_start = metrics.read(daemon), vm.inspect().disks[1].activity
    vm.exec("dd if=/dev/urandom of=/dev/vdc bs=64k count=64 oflag=direct", check=True)
    vm.exec("dd if=/dev/vdc of=/dev/null bs=64k count=32 iflag=direct", check=True)
    vm.exec("dd if=/dev/urandom of=/dev/vdc bs=512 count=3 oflag=direct conv=notrunc", check=True)
    now = vm.inspect().disks[1].activity
    written, read = now.written_bytes - at_start.written_bytes, now.read_bytes - at_start.read_bytes
    assert (written, now.writes - at_start.writes) == (4 * MIB + 1536, 64 + 3)
    assert read >= 2 * MIB and now.reads - at_start.reads >= 32 and now.errors == 0
    assert f"{now.writes} writes (" in cli.text("inspect", vm.name).replace(",", "")
    vm.remove(force=True)
    counted = metrics.Between(before, metrics.read(daemon))
    assert counted.value("vmfork_disk_written_bytes_total") >= written
    assert counted.value("vmfork_disk_partial_writes_total") >= 3
    assert counted.value("vmfork_disk_request_seconds_count", op="write") == counted.value("vmfork_disk_writes_total")
    assert 0 < counted.quantile(0.5, "vmfork_disk_request_seconds", op="read") < 1
    assert counted.value("vmfork_disk_errors_total") == 0


def test_a_clone_has_its_parents_files_and_writes_its_own(vm: vmfork.VM) -> None:
    vm.exec("echo before > /mnt/data/file && sync", check=True)
    with vm.fork(2) as clones:
        vm.exec("echo parent > /mnt/data/file && sync", check=True)
        for clone in clones:
            assert _cold(clone, "cat /mnt/data/file") == "before"
            clone.exec(f"echo {clone.name} > /mnt/data/file && sync", check=True)
        for clone in clones:
            assert _cold(clone, "cat /mnt/data/file") == clone.name
        assert _cold(vm, "cat /mnt/data/file") == "parent"


@pytest.mark.limit(240)
@pytest.mark.parametrize("depth", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_disks_and_memory_are_of_one_instant(vm: vmfork.VM, depth: int) -> None:
    """A program that writes all the time finds on its clone's disk what its clone's memory says."""
    vm.write_file("/run/writer.py", WRITER.encode())
    vm.exec("nohup python3 /run/writer.py /dev/vdc >/run/writer.log 2>&1 &", check=True)
    eventually(lambda: _number(vm) > 20, 30, "it writes")
    family = [vm]
    for _ in range(depth):
        # A clone of a clone, in the middle of its writes.
        parent = family[-1]
        before = _number(parent)
        family += parent.fork(2).raise_for_errors()
        eventually(lambda: _number(parent) > before, 30, "the parent writes on")
    for member in family:
        member.exec("touch /run/stop", check=True)
    for member in family:
        eventually(lambda: member.exec("test -e /run/outcome").exit_code == 0, 60, "it compares")
        pages, wrong = member.exec("cat /run/outcome", check=True).stdout_text.split(", ")
        assert int(pages.split()[0]) > 10, pages
        assert wrong == "0 wrong", f"{member.name}: {wrong}"
    for clone in family[1:]:
        clone.remove(force=True)


@pytest.mark.slow
def test_clones_of_clones_have_all_that_was_written_before(vm: vmfork.VM) -> None:
    line = [vm]
    for depth in range(8):
        line[-1].exec(f"echo {depth} > /mnt/data/depth-{depth} && sync", check=True)
        line += line[-1].fork(1).raise_for_errors()
    found = _cold(line[-1], "cat /mnt/data/depth-*").split()
    assert found == [str(depth) for depth in range(8)]
    assert _cold(line[3], "ls /mnt/data | grep -c depth") == "4"
    for clone in line[1:]:
        clone.remove(force=True)


def test_removed_files_give_their_space_back(vm: vmfork.VM, daemon: Daemon) -> None:
    vm.exec("dd if=/dev/urandom of=/mnt/data/file bs=1M count=64 conv=fsync", check=True)
    full = _held(daemon)
    vm.exec("rm /mnt/data/file && sync && fstrim /mnt/data", check=True)
    eventually(lambda: _held(daemon) < full - 60 * MIB, 10, "the host has it back")


def test_a_file_system_of_a_clone_is_whole(vm: vmfork.VM) -> None:
    """The clone's disk is checked while its memory has all that the disk lacks."""
    vm.exec("cp -r /usr/lib/python3*/email /mnt/data/ && sync", check=True)
    with vm.fork(1) as clones:
        (clone,) = clones
        clone.exec("umount /mnt/data", check=True)
        clone.exec("mount /dev/vdb /mnt/data && diff -r /usr/lib/python3*/email /mnt/data/email", check=True)


@pytest.mark.slow
def test_a_file_of_the_host_is_the_base_of_a_disk_and_stays_as_it_is(
    client: vmfork.Client, image: str, tmp_path: Path
) -> None:
    base = tmp_path / "base.raw"
    base.write_bytes(os.urandom(4 * MIB))
    before = base.read_bytes()
    with client.run(image, name="of-a-file", disks=[vmfork.NewDisk.file("base", str(base))]) as vm:
        assert vm.exec("head -c 4096 /dev/vdb | od -An -tx1 -v | tr -d ' \\n'").stdout_text == before[:4096].hex()
        vm.exec("dd if=/dev/zero of=/dev/vdb bs=4096 count=4 conv=fsync,notrunc", check=True)
        assert _cold(vm, "head -c 8 /dev/vdb | od -An -tx1") == " ".join(["00"] * 8)
    assert base.read_bytes() == before


@pytest.mark.slow
def test_a_base_that_changes_under_a_vm_stalls_it_until_it_is_restored(
    client: vmfork.Client, image: str, tmp_path: Path
) -> None:
    base = tmp_path / "base.raw"
    content = os.urandom(8 * MIB)
    base.write_bytes(content)
    os.utime(base, ns=(10**18, 10**18))
    with client.run(image, name="unlucky", disks=[vmfork.NewDisk.file("base", str(base))]) as vm:
        (clone,) = vm.fork(1).raise_for_errors()
        with base.open("r+b") as file:
            file.write(b"not what it was")
        read = "dd if=/dev/vdb of=/run/late bs=1M skip=3 count=1 iflag=direct > /dev/null 2>&1 &"
        for one in (vm, clone):
            one.exec(read, check=True)
        for one in (vm, clone):
            eventually(lambda one=one: one.inspect().state is vmfork.VmState.STALLED, 30, "it stalls")
            assert f"`{base}` has changed" in (one.inspect().reason or "")
        with base.open("r+b") as file:
            file.write(content[: len(b"not what it was")])
        os.utime(base, ns=(10**18, 10**18))
        for one in (vm, clone):
            eventually(lambda one=one: one.inspect().state is vmfork.VmState.RUNNING, 60, "it goes on")
            eventually(lambda one=one: one.exec("stat -c %s /run/late").stdout_text.strip() == str(MIB), 60, "it has read")
            assert one.read_file("/run/late") == content[3 * MIB : 4 * MIB]
        clone.remove(force=True)


@pytest.mark.slow
def test_a_root_on_a_disk_is_forked_and_is_no_memory(client: vmfork.Client, image: str) -> None:
    """More than memory fits is written to the root, and each clone goes on with its own."""
    with client.run(
        image, name="deep", memory_mib=128, root=vmfork.Root.OVERLAY, root_bytes=1 << 30
    ) as vm:
        (root,) = vm.inspect().disks
        assert (root.name, root.device) == ("root", "/dev/vdb")
        vm.exec("dd if=/dev/urandom of=/srv/large bs=1M count=160 conv=fsync", check=True, timeout_s=120)
        wanted = vm.exec("sha256sum /srv/large", check=True, timeout_s=120).stdout_text
        with vm.fork(2) as clones:
            vm.exec("rm /srv/large && echo mine > /srv/small", check=True)
            for clone in clones:
                assert _cold(clone, "sha256sum /srv/large") == wanted.strip()
                assert clone.exec("test -e /srv/small").exit_code == 1


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_full_host_stalls_a_vm_that_goes_on_with_all_its_bytes(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start().stop()
    folder = daemon.state / "disks"
    # Disks leave 1 GiB to the host.
    _mount("tmpfs", folder, "size=1080m")
    try:
        daemon.start()
        with daemon.client() as client:
            vm = client.run(image, name="full", disks=[vmfork.NewDisk.blank("data", 256 * MIB)])
            vm.exec("mkdir /mnt/data && mount /dev/vdb /mnt/data", check=True)
            with ThreadPoolExecutor(1) as pool:
                fill = "head -c 96M /dev/urandom | tee /mnt/data/file | sha256sum; sync"
                filled = pool.submit(vm.exec, fill, check=True, timeout_s=200)
                eventually(lambda: client.vm("full").info.state == vmfork.VmState.STALLED, 60, "it stalls")
                stays(lambda: client.vm("full").info.state == vmfork.VmState.STALLED, 4, "stalled, tries or not")
                assert "disk `data` has no space" in (client.vm("full").info.reason or "")
                (data,) = client.vm("full").inspect().disks
                assert data.activity.errors > 0 and (data.stalled_ms or 0) >= 4000
                assert metrics.read(daemon).value("vmfork_disk_stalled_vms", reason="no_space") == 1
                check = _check(daemon, "disk_space")
                assert check.status is vmfork.CheckStatus.FAILED and "stall" in check.detail
                for refused in (lambda: vm.exec("true"), lambda: vm.fork(1), vm.pause):
                    with pytest.raises(vmfork.Conflict, match="stalled"):
                        refused()
                _mount("tmpfs", folder, "remount,size=1400m")
                eventually(lambda: client.vm("full").info.state == vmfork.VmState.RUNNING, 40, "it goes on")
                wanted = filled.result(200).stdout_text.split()[0]
                assert metrics.read(daemon).value("vmfork_disk_stalled_vms") == 0
                assert client.vm("full").inspect().disks[0].stalled_ms is None
            with vm.fork(1) as (clone,):
                for member in (vm, clone):
                    assert _cold(member, "sha256sum < /mnt/data/file").split()[0] == wanted
            assert "error" not in vm.exec("dmesg", check=True).stdout_text.lower().split("ext4-fs")[-1]
            vm.remove(force=True)
        daemon.stop()
    finally:
        subprocess.run(["umount", "--lazy", folder], timeout=30, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["killed", pytest.param("told to end", marks=pytest.mark.soak)])
def test_what_was_written_is_there_after_the_daemon(
    make_daemon: Callable[..., Daemon], image: str, tmp_path: Path, ending: str
) -> None:
    """VMs end with their daemon. The next one gives their disks back, and removes them if told."""
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        vm = client.run(image, name="db", disks=[vmfork.NewDisk.blank("data", 64 * MIB)])
        vm.exec("mkdir /mnt/data && mount /dev/vdb /mnt/data", check=True)
        vm.exec("seq 200000 > /mnt/data/rows && sync /mnt/data/rows", check=True)
        clone = vm.fork(1).raise_for_errors()[0]
        clone.exec("echo more >> /mnt/data/rows && sync /mnt/data/rows", check=True)
        for one in (vm, clone):
            one.exec("while :; do cp /mnt/data/rows /mnt/data/copy; sync /mnt/data/copy; done &", timeout_s=60)
        time.sleep(0.5)
    cli, file = Cli(daemon), tmp_path / "disk.img"
    # While its VM runs, a disk is as after a power cut.
    cli("disk", "export", "db/data", str(file))
    assert ext4.text_of(file, "/rows").endswith("200000\n")
    busy = cli("disk", "rm", "db/data", code=1).stderr.decode()
    assert "a VM has it" in busy
    assert daemon.stop() == 0 if ending == "told to end" else daemon.kill() is None
    daemon.start()
    listed = cli.json("disk", "ls")["disks"]
    assert [(disk["vm"], disk["name"], disk["state"]) for disk in listed] == [
        ("db", "data", "left"),
        (clone.name, "data", "left"),
    ]
    assert "2 left by VMs of earlier daemons" in _check(daemon, "left_disks").detail
    for name, end in (("db", "200000\n"), (clone.name, "more\n")):
        cli("disk", "export", f"{name}/data", str(file))
        assert ext4.text_of(file, "/rows").endswith(end)
        assert file.stat().st_size == 64 * MIB > 512 * file.stat().st_blocks, "holes stay holes"
    # The clone's disk lies on its parent's.
    cli("disk", "rm", "db/data")
    cli("disk", "export", f"{clone.name}/data", str(file))
    assert ext4.text_of(file, "/rows").endswith("more\n")
    assert "VM/NAME" in cli("disk", "inspect", "../x", code=2).stderr.decode()
    assert "there is no disk `db/data`" in cli("disk", "inspect", "db/data", code=1).stderr.decode()
    cli("disk", "prune")
    assert cli.json("disk", "ls")["disks"] == []
    assert _check(daemon, "left_disks").status is vmfork.CheckStatus.OK
    assert _held(daemon) < MIB
    assert not list((daemon.state / "sockets").iterdir())


def _check(daemon: Daemon, name: str) -> vmfork.Check:
    """What `doctor` reports of one thing."""
    with daemon.client() as client:
        (check,) = [check for check in client.doctor().checks if check.name == name]
    return check


@pytest.mark.slow
def test_the_database_example_forks_a_transaction(daemon: Daemon, cli: Cli, image: str) -> None:
    example = [sys.executable, places.ROOT / "examples" / "database.py", "2000", "--image", image]
    env = {**cli.env, "PYTHONPATH": str(places.ROOT / "sdk" / "python" / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(example, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("database ok, file system clean") == 4, done.stdout
    # One of the clones removes half of them, and no other VM loses any.
    assert done.stdout.count("1,000 rows") == 1 and done.stdout.count("2,000 rows") == 3, done.stdout


def test_what_is_no_disk_is_refused(cli: Cli, tmp_path: Path, image: str) -> None:
    def refused(disk: str) -> str:
        done = cli("run", image, "--name", "never", "--disk", disk, code=None)
        assert done.returncode != 0
        return done.stderr.decode()

    assert "has the form NAME=blank:SIZE" in refused("data")
    assert "use a size of 1 MiB to 2 TiB" in refused("data=blank:1")
    assert "no image" in refused("data=image:absent")
    assert "absent" in refused(f"data=file:{tmp_path}/absent")
    (tmp_path / "odd").write_bytes(b"x" * 513)
    assert "has 513 bytes" in refused(f"data=file:{tmp_path}/odd")
    assert "no regular file" in refused(f"data=file:{tmp_path}")
    assert not [line for line in cli.text("ps", "--all").splitlines() if "never" in line]


@pytest.mark.slow
def test_disks_end_with_their_last_vm(daemon: Daemon, client: vmfork.Client, image: str) -> None:
    held = _held(daemon)
    vm = client.run(image, name="brief", disks=[vmfork.NewDisk.blank("data", 64 * MIB)])
    vm.exec("dd if=/dev/urandom of=/dev/vdb bs=1M count=32 conv=fsync", check=True)
    clone = vm.fork(1).raise_for_errors()[0]
    # Each QEMU has a user of its own. Those of QEMUs that wait stay.
    users = {os.stat(f"/proc/{daemon.qemu(one).pid}").st_uid for one in (vm, clone)}
    sockets = [path for path in (daemon.state / "sockets").glob("*/*") if path.stat().st_uid in users]
    assert len(sockets) == 2
    vm.remove(force=True)
    assert _held(daemon) >= held + 32 * MIB
    assert clone.exec("head -c 32M /dev/vdb | wc -c", check=True).stdout_text.strip() == str(32 * MIB)
    clone.remove(force=True)
    eventually(lambda: _held(daemon) < held + MIB, 10, "layers are removed")
    eventually(lambda: not [path for path in sockets if path.parent.exists()], 10, "sockets too")


def _mount(kind: str, folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", kind, "-o", options, "vmfork-test", folder], timeout=30, check=True)


def _cold(vm: vmfork.VM, command: str) -> str:
    """What a command prints that reads from the disk, and not from the guest's page cache."""
    return vm.exec(f"sync; echo 3 > /proc/sys/vm/drop_caches; {command}", check=True).stdout_text.strip()


def _number(vm: vmfork.VM) -> int:
    for _ in range(50):
        text = vm.exec("cat /run/number 2>/dev/null").stdout_text
        if text:
            return int(text)
        time.sleep(0.02)
    log = vm.exec("cat /run/writer.log").stdout_text
    raise AssertionError(f"it writes nothing: {log}")


def _held(daemon: Daemon) -> int:
    """Bytes that the host's disk holds for disks of VMs."""
    held = 0
    # Files and folders go meanwhile.
    for folder, _, names in os.walk(daemon.state / "disks"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                held += (Path(folder) / name).lstat().st_blocks * 512
    return held
