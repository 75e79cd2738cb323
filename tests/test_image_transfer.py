"""Guest images in a store (`vmfork image push`, `pull`), and VMs of one that is still to come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MIB = 1 << 20


@pytest.fixture(scope="module")
def pushed(daemon: Daemon, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the image."""
    store = tmp_path_factory.mktemp("store")
    told = Cli(daemon)("image", "push", image, str(store)).stderr.decode()
    assert f"Pushed `{image}`" in told
    return store


@pytest.fixture
def other(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A host that has no image at all."""
    return make_daemon().start()


def _described(daemon: Daemon, image: str) -> dict[str, object]:
    described: dict[str, object] = json.loads((daemon.state / "images" / image / "image.json").read_text())
    return described


@pytest.mark.slow
@pytest.mark.limit(300)
def test_vms_boot_from_an_image_of_which_the_host_has_nothing(
    other: Daemon,
    make_daemon: Callable[..., Daemon],
    image: str,
    pushed: Path,
    cli: Cli,
    tmp_path: Path,
) -> None:
    there = Cli(other)
    with other.client() as client:
        assert client.images() == []
        pulled = client.pull_image(image, pushed)
        assert (pulled.name, pulled.vms) == (image, 0)
        assert client.snapshots.list() == [], "an image is no snapshot"
        with pytest.raises(vmfork.NotFound):
            client.snapshots.start(image)
        with pytest.raises(vmfork.NotFound):
            client.snapshots.remove(image)
        root = vmfork.Root.OVERLAY
        data = [vmfork.NewDisk.blank("data", 8 * MIB)]
        with client.run(image, name="over", memory_mib=128, root=root, root_bytes=256 * MIB, disks=data) as vm:
            names = [(disk.name, disk.device, disk.read_only) for disk in vm.inspect().disks]
            assert names == [("image", "/dev/vda", True), ("root", "/dev/vdb", False), ("data", "/dev/vdc", False)]
            vm.exec("echo word > /srv/word && sync", check=True)
            with vm.fork(1) as (clone,):
                assert clone.exec("cat /srv/word", check=True).stdout_text == "word\n"
            assert client.images()[0].vms == 1
            with pytest.raises(vmfork.Conflict):
                client.remove_image(image)
            # Of the image, a snapshot has nothing itself.
            client.snapshots.create(vm, "kept", disk_only=True, wait=True)
            images = {one.device: one for one in client.snapshots.get("kept").images}
            assert (images["image"].base, images["image"].own_pages) == (image, 0)
        with pytest.raises(vmfork.Conflict, match="kept"):
            client.remove_image(image)
        # All of it has come meanwhile, or comes now: then the store is needed no more.
        eventually(lambda: client.images()[0].remote is None, 120, "all of it is here")
        # What a snapshot has of the image goes along with it.
        client.snapshots.export("kept", tmp_path / "kept")
        third = make_daemon().start()
        with third.client() as elsewhere:
            assert [one.name for one in elsewhere.snapshots.import_(tmp_path / "kept")] == ["kept"]
            assert elsewhere.snapshots.verify("kept").ok
            elsewhere.snapshots.remove("kept")
        third.stop()
        (again,) = client.snapshots.start("kept", names=["again"]).raise_for_errors()
        with again:
            assert again.exec("cat /srv/word", check=True).stdout_text == "word\n"
        client.snapshots.remove("kept")
        client.volumes.create("copy", image=image)
        client.volumes.remove("copy")
        with client.run(image, name="mem", memory_mib=256) as vm:
            told = there("image", "pull", image, str(pushed), "--wait").stderr.decode()
            assert "is ready" in told
            # It goes on with the disk that it has.
            vm.exec("echo 3 > /proc/sys/vm/drop_caches; find / -xdev -type f | head -n 3000 | xargs cat > /dev/null", check=True, timeout_s=120)
        kept = _described(other, image)
        assert kept["files"] == _described_files(cli, image) and "root_stored" not in kept
        assert (other.state / "images" / image / "root.img").is_file()
        with client.run(image, name="file", memory_mib=256) as vm:
            assert vm.inspect().disks == (), "its root is a file now"
        client.remove_image(image)
        store = other.state / "snapshots" / "snapshots"
        eventually(lambda: not list(store.iterdir()), 20, "the store has nothing of it")
    other.stop()


def _described_files(cli: Cli, image: str) -> object:
    return _described(cli.daemon, image)["files"]


@pytest.mark.slow
def test_a_root_on_a_disk_streams_and_damage_is_noticed(
    other: Daemon, image: str, pushed: Path, tmp_path: Path
) -> None:
    store = tmp_path / "copy"
    shutil.copytree(pushed, store)
    with other.client() as client:
        client.pull_image(image, store)
        with client.run(image, name="whole", memory_mib=256, root=vmfork.Root.DISK) as vm:
            assert [disk.name for disk in vm.inspect().disks] == ["root"]
            vm.exec("echo word > /srv/word && sync", check=True)
            with vm.fork(1) as (clone,):
                assert clone.exec("cat /srv/word", check=True).stdout_text == "word\n"
        client.remove_image(image)
        assert client.images() == []
        # A store that lacks what the kernel is made of.
        for chunk in (store / "chunks").rglob("*"):
            if chunk.is_file():
                chunk.write_bytes(b"something else")
        with pytest.raises(vmfork.VmforkError):
            client.pull_image(image, store)
        assert client.images() == [], "nothing is left of it"
        client.pull_image(image, pushed)
        client.remove_image(image)
    other.stop()


@pytest.mark.slow
def test_what_is_no_image_and_what_has_its_name_is_told(
    client: vmfork.Client, image: str, pushed: Path, cli: Cli, tmp_path: Path
) -> None:
    assert client.push_image(image, pushed).names == (), "it is there"
    with pytest.raises(vmfork.NotFound):
        client.push_image("absent", pushed)
    with pytest.raises(vmfork.NotFound):
        client.pull_image("absent", pushed)
    with pytest.raises(vmfork.Conflict, match="is a guest image, and no snapshot"):
        client.snapshots.pull(image, pushed)
    with client.run(image, name="vm", memory_mib=128, disks=[vmfork.NewDisk.blank("data", 8 * MIB)]) as vm:
        client.snapshots.create(vm, "of-vm", disk_only=True, wait=True)
    client.snapshots.push("of-vm", pushed)
    client.snapshots.remove("of-vm")
    with pytest.raises(vmfork.Conflict, match="is a snapshot, and no guest image"):
        client.pull_image("of-vm", pushed)
    assert client.snapshots.list() == [], "nothing of it was written"
    # The same image is here: nothing changes.
    assert client.pull_image(image, pushed).remote is None
    assert client.snapshots.list() == []
    refused = cli("image", "pull", image, str(tmp_path / "nowhere"), code=None)
    assert refused.returncode != 0 and b"hint" in refused.stderr
