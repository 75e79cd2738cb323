"""The pool of waiting QEMUs: its entries are per machine shape, and images share them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]

#: The start of the disk, which has the inode of each image's own file.
_START_BYTES = 4 << 20
#: It as it is now, and not what the guest's memory has of it.
_ROOT = f"echo 3 > /proc/sys/vm/drop_caches; head -c {_START_BYTES} /dev/vda | sha256sum; cat /etc/which-image"


def _with_another_root(daemon: Daemon, image: str, name: str, folder: Path) -> str:
    """Import an image like `image`, with one file more on its root disk.

    → the SHA-256 of the disk's start.
    """
    made_of = daemon.state / "images" / image
    root, word = folder / "root.img", folder / "which"
    shutil.copy(made_of / "root.img", root)
    word.write_text(f"{name}\n")
    subprocess.run(["debugfs", "-w", "-R", f"write {word} /etc/which-image", root], check=True, capture_output=True)
    described = json.loads((made_of / "image.json").read_text())
    parts = {"kernel": made_of / "kernel", "initrd": made_of / "initrd", "root": root}
    options = [word for part, path in parts.items() for word in (f"--{part}", str(path))]
    Cli(daemon)("image", "import", name, *options, "--cmdline", described["cmdline"], "--agent")
    with root.open("rb") as file:
        return hashlib.sha256(file.read(_START_BYTES)).hexdigest()


def _waiting(daemon: Daemon) -> set[int]:
    return {process.pid for process in daemon.processes() if process.is_qemu and "-incoming" in process.command}


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_qemu_that_waited_for_one_image_serves_another(
    make_daemon: MakeDaemon, image: str, tmp_path: Path, need: Callable[[object, str], None]
) -> None:
    """Live forks and a started snapshot read the root of the image that they came from."""
    need(shutil.which("debugfs"), "debugfs (package e2fsprogs)")
    daemon = make_daemon("--pool", "1")
    daemon.add_image(image)
    daemon.start()
    own, digest = (_with_another_root(daemon, image, name, tmp_path) for name in ("one", "other"))
    assert own != digest
    with daemon.client() as client:
        first = client.run("one", name="first", memory_mib=256)
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits")
        warmed = _waiting(daemon)
        assert warmed, "a QEMU, and its keeper"
        second = client.run("other", name="second", memory_mib=256)
        assert _waiting(daemon) == warmed, "the second image has the same shape"
        before = client.host().pool

        fork = second.fork(1).raise_for_errors()
        assert [result.pooled for result in fork.results] == [True]
        assert daemon.qemu(fork[0]).pid in warmed
        assert fork[0].exec(_ROOT, check=True).stdout_text == f"{digest}  -\nother\n"
        pool = client.host().pool
        assert (pool.hits, pool.misses) == (before.hits + 1, before.misses)

        # Its clones get the same disk, and so does what is stored of one.
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits again")
        grandchild = fork[0].fork(1).raise_for_errors()
        assert grandchild.results[0].pooled
        assert grandchild[0].exec(_ROOT, check=True).stdout_text == f"{digest}  -\nother\n"
        client.snapshots.create("second", "kept", wait=True)
        second.remove(force=True)
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits again")
        started = client.snapshots.start("kept", 1).raise_for_errors()
        assert started.results[0].pooled
        assert started[0].exec(_ROOT, check=True).stdout_text == f"{digest}  -\nother\n"

        # The first image's clones still have its own.
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits again")
        (clone,) = first.fork(1).raise_for_errors()
        assert clone.exec(_ROOT, check=True).stdout_text == f"{own}  -\none\n"


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_qemu_that_waits_is_for_the_disks_that_clones_have_now(
    make_daemon: MakeDaemon, image: str
) -> None:
    """It is connected to them before there is a clone, so their sizes are part of its shape."""
    mib = 1 << 20
    daemon = make_daemon("--pool", "1")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        disks = [vmfork.NewDisk.blank("data", 64 * mib), vmfork.NewDisk.empty("later")]
        vm = client.run(image, name="parent", memory_mib=256, disks=disks)
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits")
        warmed = _waiting(daemon)

        def forked() -> tuple[vmfork.VM, bool]:
            fork = vm.fork(1).raise_for_errors()
            return fork[0], fork.results[0].pooled

        vm.exec("echo first | dd of=/dev/vdb conv=notrunc,fsync", check=True)
        clone, pooled = forked()
        assert pooled and daemon.qemu(clone).pid in warmed
        assert clone.exec("head -c 5 /dev/vdb", check=True).stdout_text == "first"
        clone.exec("echo other | dd of=/dev/vdb conv=notrunc,fsync", check=True)
        assert vm.exec("echo 3 >/proc/sys/vm/drop_caches; head -c 5 /dev/vdb", check=True).stdout_text == "first"

        # Those of the old size are of no use to it.
        eventually(lambda: client.host().pool.waiting == 1, 60, "a QEMU waits again")
        (data,) = [disk for disk in client.disks() if disk.vm == "parent" and disk.name == "data"]
        client.resize_disk(data.id, 128 * mib)
        for wanted in (False, True):
            clone, pooled = forked()
            assert pooled is wanted
            assert clone.exec("blockdev --getsize64 /dev/vdb", check=True).stdout_text.strip() == str(128 * mib)
            eventually(lambda: client.host().pool.waiting == 2, 60, "QEMUs of both shapes wait")
