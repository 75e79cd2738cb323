"""Disks that begin with a raw object of an object store: `--disk NAME=s3://BUCKET/KEY`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vmfork

from harness import bootsector, objects
from harness.cli import Cli
from harness.daemon import Daemon
from harness.served import serving
from harness.waits import eventually

MIB = 1 << 20
SIZE = 48 * MIB
#: In MiB: where the object is not zeros.
AT = (0, 7, 30, 47)
SUM = "sha256sum < /dev/vdb | cut -d ' ' -f 1"


def _content(seed: int) -> bytes:
    content = bytearray(SIZE)
    for at in AT:
        content[at * MIB : (at + 1) * MIB] = random.Random(seed + at).randbytes(MIB)
    return bytes(content)


@pytest.fixture
def store() -> Iterator[objects.Objects]:
    with objects.server() as made:
        yield made


@pytest.fixture
def host(make_daemon: Callable[..., Daemon], image: str, store: objects.Objects) -> Iterator[Daemon]:
    daemon = make_daemon(env=store.environment())
    daemon.add_image(image)
    daemon.start()
    yield daemon
    store.answers = True
    daemon.stop()


def _read(vm: vmfork.VM, at: int) -> bytes:
    """A MiB of the disk, past the guest's page cache."""
    vm.exec(f"dd if=/dev/vdb of=/run/read bs=1M skip={at} count=1 iflag=direct", check=True)
    return vm.read_file("/run/read")


def _kept(daemon: Daemon) -> int:
    """Bytes of objects that are on the host."""
    return sum(512 * path.stat().st_blocks for path in (daemon.state / "objects").glob("*/data"))


@pytest.mark.limit(240)
def test_a_vm_boots_before_its_disk_has_come_and_clones_share_what_comes(
    host: Daemon, store: objects.Objects, image: str
) -> None:
    content = _content(1)
    location = store.put("bases/data.raw", content)
    with host.client() as client:
        disks = [vmfork.NewDisk.s3("data", location)]
        vm = client.run(image, name="one", memory_mib=128, disks=disks)
        assert store.sent_bytes < SIZE / 4, "it boots before"
        assert _read(vm, 7) == content[7 * MIB : 8 * MIB]
        assert store.sent_bytes < SIZE / 2
        vm.exec("head -c 4096 /dev/zero | tr '\\0' x | dd of=/dev/vdb bs=4096 seek=500 oflag=direct", check=True)
        clone = vm.fork(1).raise_for_errors()[0]
        assert _read(clone, 7) == content[7 * MIB : 8 * MIB]
        assert _read(clone, 1)[244 * 4096 : 245 * 4096] == b"x" * 4096, "the parent has written it"
        assert _read(clone, 30) == content[30 * MIB : 31 * MIB]
        assert _read(vm, 30) == content[30 * MIB : 31 * MIB]
        vm.exec(SUM, check=True, timeout_s=120)
        assert store.again_bytes == 0, "what one has read, all have"
        for one in (clone, vm):
            one.remove(force=True)
        # A later VM finds what was fetched, until another object takes its place.
        with client.run(image, memory_mib=128, disks=disks) as vm:
            assert _read(vm, 47) == content[47 * MIB :]
        assert store.again_bytes == 0
        other = store.put("bases/other.raw", bytes(2 * MIB))
        with client.run(image, memory_mib=128, disks=[vmfork.NewDisk.s3("data", other)]):
            eventually(lambda: _kept(host) < 3 * MIB, 20, "what no disk needs is removed")


@pytest.mark.limit(240)
@pytest.mark.parametrize("heeds_match", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_object_that_is_replaced_stalls_its_vm_and_is_never_mixed(
    host: Daemon, store: objects.Objects, image: str, heeds_match: bool
) -> None:
    store.heeds_match = heeds_match
    old, new = _content(1), _content(2)
    location = store.put("data.raw", old)
    with host.client() as client:
        vm = client.run(image, name="one", memory_mib=128, disks=[vmfork.NewDisk.s3("data", location)])
        assert _read(vm, 0) == old[:MIB]
        store.put("data.raw", new)
        vm.exec("dd if=/dev/vdb of=/run/late bs=1M skip=30 count=1 iflag=direct >/dev/null 2>&1 &", check=True)
        eventually(lambda: "restore" in _stalled(vm), 30, "it is said")
        assert location in _stalled(vm)
        assert vm.inspect().state is vmfork.VmState.STALLED
        # A new VM has the new one.
        with client.run(image, memory_mib=128, disks=[vmfork.NewDisk.s3("data", location)]) as other:
            assert _read(other, 30) == new[30 * MIB : 31 * MIB]
        store.put("data.raw", old)
        eventually(lambda: vm.inspect().state is vmfork.VmState.RUNNING, 60, "it goes on")
        eventually(lambda: vm.exec("stat -c %s /run/late").stdout_text.strip() == str(MIB), 60, "it has read")
        assert vm.read_file("/run/late") == old[30 * MIB : 31 * MIB]
        vm.remove(force=True)


def _stalled(vm: vmfork.VM) -> str:
    return vm.inspect().reason or ""


@pytest.mark.limit(240)
def test_what_a_killed_daemons_vm_wrote_on_an_object_is_given_back(
    host: Daemon, store: objects.Objects, image: str
) -> None:
    content = _content(1)
    location = store.put("data.raw", content)
    with host.client() as client:
        vm = client.run(image, name="one", memory_mib=128, disks=[vmfork.NewDisk.s3("data", location)])
        vm.exec("head -c 4096 /dev/zero | tr '\\0' x | dd of=/dev/vdb bs=4096 seek=1 oflag=direct", check=True)
        assert _read(vm, 7) == content[7 * MIB : 8 * MIB]
        before = f"{_kept(host) >> 18} units were kept, {shutil.disk_usage(host.state).free >> 20} MiB free"
        host.kill()
        # What is here needs no server.
        store.answers = False
        host.start()
        store.answers = True
        (left,) = client.disks()
        exported = host.folder / "disk.raw"
        assert client.export_disk(left.id, exported) == SIZE
        wanted = bytearray(content)
        wanted[4096:8192] = b"x" * 4096
        assert exported.read_bytes() == bytes(wanted)
        # What had come was there, but for what was on its way.
        assert store.again_bytes <= MIB, f"{before}; asked again for {store.again()}"
        client.remove_disk(left.id)
        eventually(lambda: _kept(host) == 0, 20, "nothing of it is left")


@pytest.mark.slow
@pytest.mark.limit(300)
def test_an_images_root_is_an_object_that_its_vms_read_as_they_need_it(
    host: Daemon, store: objects.Objects, image: str, tmp_path: Path
) -> None:
    files = host.state / "images" / image
    root = (files / "root.img").read_bytes()
    cmdline = json.loads((files / "image.json").read_text())["cmdline"]
    location = store.put("bases/root.raw", root)
    cli = Cli(host)
    words = ("--kernel", str(files / "kernel"), "--initrd", str(files / "initrd"), "--cmdline", cmdline, "--agent")
    cli("image", "import", "far", *words, "--root", location)
    with host.client() as client:
        with client.run("far", name="one", memory_mib=256) as vm:
            assert store.sent_bytes < len(root) / 2, "it boots before"
            (disk,) = vm.inspect().disks
            assert (disk.name, disk.read_only) == ("image", True)
            vm.exec("touch /srv/mine", check=True)
            with vm.fork(1) as (clone,):
                clone.exec("test -e /srv/mine && python3 -c 'import email'", check=True)
            # Another VM of it, whose root is written.
            with client.run("far", name="two", memory_mib=256, root=vmfork.Root.DISK) as two:
                two.exec("echo mine > /etc/mine && sync", check=True)
                assert [disk.name for disk in two.inspect().disks] == ["root"]
            assert vm.exec("test -e /etc/mine").exit_code == 1
        folder = tmp_path / "served"
        folder.mkdir()
        with serving(cli, "far", str(folder)):
            assert (folder / "far.img").read_bytes() == root
        assert store.again_bytes == 0, "each part came once for all of these"
        for source in (location, "image:far"):
            cli("volume", "create", "copy", "--from", source)
            assert client.volumes.get("copy").size_bytes == len(root)
            client.volumes.remove("copy")
        refused = cli("image", "push", "far", str(tmp_path / "store"), code=None).stderr.decode()
        assert f"is the object `{location}`" in refused and f"--root {location}" in refused
        store.answers = False
        refused = cli("run", "far", code=None).stderr.decode()
        assert "credentials" in refused


def test_an_object_that_was_replaced_meanwhile_is_not_shown_with_the_new_one(
    host: Daemon, store: objects.Objects, tmp_path: Path
) -> None:
    disk = bootsector.build("counter").read_bytes().ljust(4 * MIB, b"\0")
    location = store.put("boots.raw", disk)
    Cli(host)("image", "import", "tiny", "--boot-disk", location)
    (tmp_path / "same").mkdir()
    with serving(Cli(host), "tiny", str(tmp_path / "same")):
        host.kill()
        host.start()
        shown = tmp_path / "same" / "tiny.img"
        assert shown.read_bytes() == disk, "the same object is shown on"
    (tmp_path / "other").mkdir()
    with serving(Cli(host), "tiny", str(tmp_path / "other")) as process:
        host.kill()
        store.put("boots.raw", disk[:-1] + b"x")
        host.start()
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1 and b"has another image by the name" in error, error


@pytest.mark.slow
def test_a_disk_that_boots_is_an_object(host: Daemon, store: objects.Objects) -> None:
    location = store.put("boots.raw", bootsector.build("counter").read_bytes().ljust(4 * MIB, b"\0"))
    cli = Cli(host)
    cli("image", "import", "tiny", "--boot-disk", location)
    with host.client() as client:
        vm = client.run("tiny", name="tiny", memory_mib=64)
        (clone,) = vm.fork(1).raise_for_errors()
        for one in (vm, clone):
            eventually(lambda one=one: len(one.logs().splitlines()) >= 3, 60, "it counts")
            one.remove(force=True)
    assert "is raw" in cli("image", "import", "other", "--boot-disk", location, "--format", "qcow2", code=None).stderr.decode()


def test_what_is_no_object_is_refused(host: Daemon, store: objects.Objects, image: str) -> None:
    cli = Cli(host)

    def refused(source: str) -> str:
        done = cli("run", image, "--name", "never", "--disk", f"data={source}", code=None)
        assert done.returncode != 0
        return done.stderr.decode()

    assert "write s3://BUCKET/KEY" in refused("s3://disks")
    absent = refused("s3://disks/absent")
    assert "no `absent`" in absent and "check the bucket and the key" in absent
    assert "0 bytes" in refused(store.put("empty", b""))
    assert "1 MiB to 2 TiB" in refused(store.put("small", bytes(100_000)))
    location = store.put("data.raw", bytes(2 * MIB))
    store.gives = False
    assert "credentials" in refused(location), "it is told before a guest reads"
    store.answers = False
    assert "credentials" in refused(location)
    assert not [line for line in cli.text("ps", "--all").splitlines() if "never" in line]
