"""Images shown to other programs: `vmfork image serve IMAGE DIR`, `--nbd SOCKET`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import bootsector
from harness.cli import Cli
from harness.daemon import Daemon
from harness.served import serving
from harness.waits import eventually

MIB = 1 << 20
#: Lengths and places that no block and no page ends at.
ODD = (1, 511, 512, 513, 4095, 4096, 4097, 70_000, MIB + 3)


def _is_mounted(folder: Path) -> bool:
    return str(folder) in {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(*command: str | Path) -> bytes:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=120).stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "shown"
    made.mkdir()
    yield made
    left = _is_mounted(made)
    if left:
        subprocess.run(["umount", "-l", made], check=True, timeout=10)
    assert not left, "the mount is left"


@pytest.fixture
def root(daemon: Daemon, image: str) -> Path:
    return daemon.state / "images" / image / "root.img"


@pytest.mark.limit(180)
def test_programs_read_an_image_as_a_file_and_by_nbd(
    cli: Cli, image: str, root: Path, folder: Path, tmp_path: Path
) -> None:
    shown, at = folder / f"{image}.img", tmp_path / "nbd"
    with serving(cli, image, str(folder), "--nbd", str(at)):
        assert os.listdir(folder) == [shown.name]
        assert shown.stat().st_size == root.stat().st_size and shown.stat().st_mode & 0o777 == 0o444
        assert _sha256(shown) == _sha256(root)
        with pytest.raises(OSError, match="Read-only"):
            shown.open("r+b")
        with pytest.raises(OSError, match="Read-only"):
            (folder / "other").touch()
        # Tools that know file systems.
        told = _run("debugfs", "-R", "cat /usr/lib/os-release", shown)
        assert b"Debian" in told
        inside = tmp_path / "inside"
        inside.mkdir()
        _run("mount", "-o", "loop,ro", shown, inside)
        try:
            assert (inside / "usr/lib/os-release").read_bytes() == told
        finally:
            _run("umount", inside)
        for source in (shown, f"nbd+unix:///?socket={at}", f"nbd+unix:///{image}?socket={at}"):
            copy = tmp_path / "copy.qcow2"
            _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", source, copy)
            assert b"identical" in _run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", copy, root)
        # What is zeros is told as such, by both.
        extents = json.loads(_run("qemu-img", "map", "--output=json", "-f", "raw", f"nbd+unix:///?socket={at}"))
        data = sum(extent["length"] for extent in extents if extent["data"])
        assert 0 < data < root.stat().st_size
        with shown.open("rb") as file:
            end = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            assert 0 < end < root.stat().st_size
            file.seek(end)
            assert file.read(4096) == bytes(4096)
    assert not _is_mounted(folder) and not at.exists()


@pytest.mark.limit(120)
def test_another_vmm_boots_from_the_file_that_is_shown(
    daemon: Daemon, cli: Cli, folder: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bootsector.build("counter").read_bytes().ljust(MIB, b"\0"))
    cli("image", "import", "sector", "--boot-disk", str(disk))
    with serving(cli, "sector", str(folder)):
        serial = tmp_path / "serial"
        command = ["qemu-system-x86_64", "-machine", "pc,accel=tcg", "-m", "32", "-display", "none", "-nodefaults"]
        command += ["-serial", f"file:{serial}", "-snapshot", "-drive", f"file={folder}/sector.img,format=raw,if=ide"]
        qemu = subprocess.Popen(command)
        try:
            eventually(lambda: serial.exists() and serial.stat().st_size > 0, 60, "its guest says something")
        finally:
            qemu.kill()
            qemu.wait(10)
    cli("image", "rm", "sector")


@pytest.mark.slow
@pytest.mark.limit(240)
def test_what_is_written_is_read_and_is_gone_at_the_end(
    cli: Cli, image: str, root: Path, folder: Path, tmp_path: Path
) -> None:
    before = _sha256(root)
    shown, at = folder / f"{image}.img", tmp_path / "nbd"
    numbers = random.Random(20_121)
    size = root.stat().st_size
    part = 24 * MIB
    start = size - part
    with root.open("rb") as file:
        file.seek(start)
        model = bytearray(file.read(part))
    with serving(cli, image, str(folder), "--nbd", str(at), "--writable"):
        with shown.open("r+b", buffering=0) as file:
            descriptor = file.fileno()
            for step in range(300):
                length = min(numbers.choice(ODD), part)
                place = numbers.randrange(part - length + 1)
                match numbers.randrange(4):
                    case 0:
                        assert os.pread(descriptor, length, start + place) == model[place : place + length], step
                    case 1:
                        mode = numbers.choice(("--punch-hole", "--zero-range"))
                        _run("fallocate", mode, "-o", str(start + place), "-l", str(length), shown)
                        model[place : place + length] = bytes(length)
                    case _:
                        data = numbers.randbytes(length)
                        assert os.pwrite(descriptor, data, start + place) == length
                        model[place : place + length] = data
            os.fsync(descriptor)
            assert os.pread(descriptor, part, start) == model
            with pytest.raises(OSError, match="No space"):
                os.pwrite(descriptor, b"beyond", size)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size + 1)
        # What the kernel kept, and what the daemon has.
        copy = tmp_path / "copy"
        _run("qemu-img", "convert", "-f", "raw", "-O", "raw", f"nbd+unix:///?socket={at}", copy)
        with copy.open("rb") as file:
            file.seek(start)
            assert file.read() == model
        _run("qemu-io", "-f", "raw", "-c", "write -P 7 4096 65536", f"nbd+unix:///?socket={at}")
        _run("qemu-io", "-f", "raw", "-c", "read -P 7 4096 65536", f"nbd+unix:///?socket={at}")
    assert _sha256(root) == before
    with serving(cli, image, str(folder)):
        assert _sha256(shown) == before


@pytest.mark.limit(180)
def test_a_pulled_image_is_a_file_before_its_bytes_are_here(
    make_daemon: Callable[..., Daemon], cli: Cli, image: str, root: Path, folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    cli("image", "push", image, str(store))
    other = make_daemon().start()
    there = Cli(other)
    there("image", "pull", image, str(store))
    with serving(there, image, str(folder)):
        assert _sha256(folder / f"{image}.img") == _sha256(root)
    other.stop()


@pytest.mark.limit(120)
def test_readers_wait_for_a_daemon_that_starts_anew_and_writers_are_told(
    make_daemon: Callable[..., Daemon], image: str, folder: Path, tmp_path: Path
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    cli, written = Cli(daemon), tmp_path / "written"
    written.mkdir()
    wanted = _sha256(daemon.state / "images" / image / "root.img")
    with serving(cli, image, str(folder)), serving(cli, image, str(written), "--writable"):
        file = os.open(written / f"{image}.img", os.O_RDWR)
        assert os.write(file, b"x" * 4096) == 4096
        daemon.kill()
        with pytest.raises(OSError, match="Input/output|not connected|abort"):
            os.write(file, b"y" * 4096)
        # The command ends by itself, and its mount with it.
        with contextlib.suppress(OSError):
            os.close(file)
        eventually(lambda: not _is_mounted(written), 10, "the mount is gone")
        reader = subprocess.Popen(["sha256sum", folder / f"{image}.img"], stdout=subprocess.PIPE)
        daemon.start()
        told, _ = reader.communicate(timeout=60)
        assert told.decode().split()[0] == wanted
    # The writer's command has ended its mount.
    assert not _is_mounted(written)
    daemon.stop()


@pytest.mark.limit(120)
def test_an_image_that_was_replaced_meanwhile_is_not_mixed_with_the_new_one(
    make_daemon: Callable[..., Daemon], image: str, folder: Path
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with serving(Cli(daemon), image, str(folder)) as process:
        daemon.kill()
        told = daemon.state / "images" / image / "image.json"
        metadata = json.loads(told.read_text())
        root = metadata["files"]["root.img"]
        root["blake3"] = root["blake3"][::-1]
        # A new file: other folders have the old one, too.
        new = told.with_suffix(".new")
        new.write_text(json.dumps(metadata))
        new.rename(told)
        daemon.start()
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1 and b"has another image by the name" in error, error
        assert not _is_mounted(folder)
    daemon.stop()


def test_a_folder_of_a_command_that_was_killed_can_be_used_again(
    cli: Cli, image: str, folder: Path, tmp_path: Path
) -> None:
    at = tmp_path / "nbd"
    with serving(cli, image, str(folder), "--nbd", str(at)) as process:
        process.kill()
        process.wait(10)
    assert _is_mounted(folder) and at.exists()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(folder)
    with serving(cli, image, str(folder), "--nbd", str(at)):
        assert os.listdir(folder) == [f"{image}.img"]
        # An unmount ends the command.
        with serving(cli, image, str(_made(tmp_path / "two"))) as other:
            _run("umount", tmp_path / "two")
            assert other.wait(10) == 0
    assert not at.exists()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_can_not_be_shown_is_told_and_leaves_nothing(cli: Cli, image: str, folder: Path, tmp_path: Path) -> None:
    def told(*arguments: str, code: int = 1) -> str:
        return cli("image", "serve", *arguments, code=code).stderr.decode()

    full = _made(tmp_path / "full")
    (full / "file").touch()
    assert "not an empty folder" in told(image, str(full)) and "nothing in it" in told(image, str(full))
    assert "mkdir" in told(image, str(tmp_path / "none"))
    assert "no image" in told("nothing", str(folder))
    assert "name a file" in told(image, "--nbd", str(full / "file"))
    assert (full / "file").exists()
    assert "name a file" in told(image, "--nbd", str(tmp_path / "none" / "nbd"))
    assert "required" in told(image, code=2)
    assert "--allow-other" in told(image, "--nbd", str(tmp_path / "nbd"), "--allow-other", code=2)
    # A folder that fails takes the socket with it.
    told(image, str(full), "--nbd", str(tmp_path / "nbd"))
    assert not (tmp_path / "nbd").exists()


def test_other_users_read_it_if_that_is_asked_for(cli: Cli, image: str, folder: Path, tmp_path: Path) -> None:
    shown = folder / f"{image}.img"
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    read = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "head", "-c", "4096", str(shown)]
    with serving(cli, image, str(folder)):
        assert subprocess.run(read, capture_output=True, timeout=20).returncode != 0
    with serving(cli, image, str(folder), "--allow-other"):
        assert len(subprocess.run(read, capture_output=True, timeout=20, check=True).stdout) == 4096
