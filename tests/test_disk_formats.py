"""qcow2 files as what disks, volumes and guest images begin with."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness.cli import Cli
from harness.daemon import Daemon

MIB = 1 << 20


def _run(*words: str | Path) -> None:
    subprocess.run(words, capture_output=True, timeout=60, check=True)


@pytest.fixture
def qcow2(tmp_path: Path) -> Path:
    """A compressed one with a file system that has the file `word`."""
    tree, raw = tmp_path / "tree", tmp_path / "raw.img"
    tree.mkdir()
    (tree / "word").write_text("from a qcow2 file\n")
    _run("mke2fs", "-q", "-t", "ext4", "-d", tree, raw, "32M")
    made = tmp_path / "disk.qcow2"
    _run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, made)
    assert made.stat().st_size < 8 * MIB
    return made


@pytest.mark.slow
def test_disks_and_volumes_begin_with_what_a_qcow2_file_holds(
    client: vmfork.Client, daemon: Daemon, image: str, cli: Cli, qcow2: Path
) -> None:
    cli("volume", "create", "brought", "--from", f"qcow2:{qcow2}")
    assert client.volumes.get("brought").size_bytes == 32 * MIB
    disks = [vmfork.NewDisk.qcow2("data", str(qcow2)), vmfork.NewDisk.volume("kept", "brought")]
    with client.run(image, name="reader", memory_mib=256, disks=disks) as vm:
        # The file is not needed any more.
        qcow2.unlink()
        for device in ("vdb", "vdc"):
            vm.exec(f"mkdir -p /mnt/{device} && mount /dev/{device} /mnt/{device}", check=True)
            assert vm.exec(f"cat /mnt/{device}/word", check=True).stdout_text == "from a qcow2 file\n"
        vm.exec("echo mine > /mnt/vdb/word && sync", check=True)
        with vm.fork(1) as (clone,):
            clone.exec("echo 3 > /proc/sys/vm/drop_caches", check=True)
            assert clone.exec("cat /mnt/vdb/word", check=True).stdout_text == "mine\n"
    client.volumes.remove("brought")
    assert not list((daemon.state / "disks" / "qcow2").iterdir())


def test_a_qcow2_file_that_leads_elsewhere_is_refused(
    client: vmfork.Client, daemon: Daemon, image: str, cli: Cli, qcow2: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"not for guests".ljust(2 * MIB, b"."))
    backed = tmp_path / "backed.qcow2"
    _run("qemu-img", "create", "-f", "qcow2", "-b", secret, "-F", "raw", backed)
    for source in (("run", image, "--disk", f"x=qcow2:{backed}"), ("volume", "create", "x", "--from", f"qcow2:{backed}")):
        refused = cli(*source, code=None)
        assert refused.returncode != 0
        assert "lies on a backing file" in refused.stderr.decode()
    # Its format is never guessed: a guest writes what it likes to a raw disk.
    with pytest.raises(vmfork.BadRequest, match="is named as a qcow2 file") as wrong:
        client.run(image, disks=[vmfork.NewDisk.file("x", str(qcow2))])
    assert "qcow2:PATH" in (wrong.value.remedy or "")
    with pytest.raises(vmfork.BadRequest, match="is not a qcow2 file"):
        client.run(image, disks=[vmfork.NewDisk.qcow2("x", str(secret))])
    # What a guest wrote is no reason to refuse its raw disk.
    raw = tmp_path / "raw-with-a-header"
    raw.write_bytes(qcow2.read_bytes()[:65536].ljust(2 * MIB, b"."))
    client.volumes.create("raw", file=str(raw))
    client.volumes.remove("raw")
    with pytest.raises(vmfork.NotFound):
        client.run(image, disks=[vmfork.NewDisk.qcow2("x", str(tmp_path / "absent"))])
    assert client.vms() == [] and client.volumes.list() == []
    assert not list((daemon.state / "disks" / "qcow2").iterdir())


@pytest.mark.slow
def test_a_guest_image_is_imported_from_a_qcow2_file(
    make_daemon: Callable[..., Daemon], image: str, tmp_path: Path
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    made_of, root = daemon.state / "images" / image, tmp_path / "root.qcow2"
    _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", made_of / "root.img", root)
    described = json.loads((made_of / "image.json").read_text())
    files = ("--kernel", str(made_of / "kernel"), "--initrd", str(made_of / "initrd"), "--root", str(root))
    cli = Cli(daemon)
    refused = cli("image", "import", "brought", *files, code=None)
    assert refused.returncode != 0 and "--format qcow2" in refused.stderr.decode()
    cli("image", "import", "brought", *files, "--format", "qcow2", "--cmdline", described["cmdline"], "--agent")
    imported = json.loads((daemon.state / "images" / "brought" / "image.json").read_text())
    assert imported["files"]["root.img"] == described["files"]["root.img"], "the same bytes"
    with daemon.client() as client, client.run("brought") as vm:
        assert vm.exec("echo it boots", check=True).stdout_text == "it boots\n"
    daemon.stop()
