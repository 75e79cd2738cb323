"""Roots that are writable disks: `vmfork run --root disk`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon

MIB = 1 << 20

#: What is mounted as the root: where from, which kind, how.
ROOT = "awk '$2 == \"/\" {print $1, $3, $4}' /proc/mounts | tail -n 1"


def _root_bytes(daemon: Daemon, image: str) -> int:
    described = json.loads((daemon.state / "images" / image / "image.json").read_text())
    return int(described["files"]["root.img"]["size_bytes"])


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_root_on_a_disk_is_written_itself_and_is_forked(
    client: vmfork.Client, daemon: Daemon, image: str, cli: Cli
) -> None:
    image_bytes = _root_bytes(daemon, image)
    size_bytes = (image_bytes + 512 * MIB) // 4096 * 4096
    root = ("--root", "disk", "--root-size", str(size_bytes))
    cli.text("run", image, "--name", "whole", "--memory", "128M", *root, "--disk", "data=blank:64M")
    vm = client.vm("whole")
    with vm:
        whole, data = vm.inspect().disks
        assert (whole.name, whole.device, whole.size_bytes) == ("root", "/dev/vda", size_bytes)
        assert (data.name, data.device) == ("data", "/dev/vdb")
        device, kind, options = vm.exec(ROOT, check=True).stdout_text.split()
        assert (device, kind) == ("/dev/vda", "ext4") and "rw" in options.split(",")
        assert "overlay" not in vm.exec("cat /proc/mounts", check=True).stdout_text
        vm.exec("resize2fs /dev/vda", check=True, timeout_s=120)
        # More than memory fits.
        vm.exec("head -c 160M /dev/urandom > /srv/large && sync", check=True, timeout_s=200)
        wanted = vm.exec("sha256sum < /srv/large", check=True, timeout_s=60).stdout_text.strip()
        assert vm.inspect().disks[0].written_bytes >= 160 * MIB
        with vm.fork(2) as clones:
            vm.exec("rm /srv/large && echo mine > /srv/small && sync", check=True)
            for clone in clones:
                assert [disk.name for disk in clone.inspect().disks] == ["root", "data"]
                assert _cold(clone, "sha256sum < /srv/large") == wanted
                assert clone.exec("test -e /srv/small").exit_code == 1
                clone.exec(f"echo {clone.name} > /srv/small && sync", check=True)
            # A clone of a clone, and each has its own.
            (deep,) = clones[0].fork(1).raise_for_errors()
            assert _cold(deep, "cat /srv/small") == clones[0].name
            assert _cold(clones[1], "cat /srv/small") == clones[1].name
            deep.remove(force=True)
        assert _cold(vm, "cat /srv/small") == "mine"
        # It grows further while it is the root.
        (listed,) = [disk for disk in client.disks() if (disk.vm, disk.name) == ("whole", "root")]
        client.resize_disk(listed.id, size_bytes + 64 * MIB)
        vm.exec("resize2fs /dev/vda", check=True, timeout_s=120)
        assert vm.inspect().disks[0].size_bytes == size_bytes + 64 * MIB
    # The image is as it was.
    with client.run(image, name="next", root=vmfork.Root.DISK) as vm:
        assert vm.inspect().disks[0].size_bytes == image_bytes
        assert vm.exec("ls /srv", check=True).stdout_text == ""


@pytest.mark.slow
def test_an_imported_image_has_its_root_on_a_disk(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    made_of = daemon.state / "images" / image
    parts: dict[str, Path] = {"kernel": made_of / "kernel", "initrd": made_of / "initrd", "root": made_of / "root.img"}
    options = [word for part, path in parts.items() for word in (f"--{part}", str(path))]
    cmdline = json.loads((made_of / "image.json").read_text())["cmdline"]
    cli = Cli(daemon)
    cli("image", "import", "brought", *options, "--cmdline", cmdline, "--agent")
    with daemon.client() as client:
        with pytest.raises(vmfork.BadRequest) as refused:
            client.run("brought", root=vmfork.Root.OVERLAY)
        assert "--root disk" in (refused.value.remedy or "")
        size_bytes = _root_bytes(daemon, image)
        with pytest.raises(vmfork.BadRequest, match="smaller than the image's"):
            client.run("brought", root=vmfork.Root.DISK, root_bytes=64 * MIB)
        assert client.vms() == []
        with client.run("brought", name="own", root=vmfork.Root.DISK) as vm:
            (root,) = vm.inspect().disks
            assert (root.device, root.size_bytes) == ("/dev/vda", size_bytes)
            assert vm.exec(ROOT, check=True).stdout_text.split()[0] == "/dev/vda"
            vm.exec("echo word > /srv/word && sync", check=True)
            with vm.fork(1) as (clone,):
                assert _cold(clone, "cat /srv/word") == "word"
            client.snapshots.create(vm, "stored", disk_only=True, wait=True)
        # It boots from its own root, with the kernel of the image.
        (again,) = client.snapshots.start("stored", names=["again"]).raise_for_errors()
        with again:
            assert again.exec(ROOT, check=True).stdout_text.split()[0] == "/dev/vda"
            assert _cold(again, "cat /srv/word") == "word"
    daemon.stop()


def _cold(vm: vmfork.VM, command: str) -> str:
    """What a command prints whose files are read from the disk."""
    vm.exec("sync && echo 3 > /proc/sys/vm/drop_caches", check=True)
    return vm.exec(command, check=True, timeout_s=120).stdout_text.strip()
