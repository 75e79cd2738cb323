"""The host's side of disks: what a fork takes there, beside what there is without vmfork.

- *copies*: a fork of a VM that wrote 1 GB to its disk, beside what `cp` and `qemu-img` make of an
  image of 1 GB. They copy the disk alone, of a VM that does not run.
- *files*: open files and files of the state folder, for each clone and disk.
- *space*: what clones take that write 10 MB each, over the bytes that they wrote.
- *base*: bytes that are read of a disk's base before the guest's writes to it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import world as w

MEMORY_MIB = 256
MIB = 1 << 20
IMAGE_MIB = 1000
COPY_S = 300.0
#: The copies are left out where less is free.
ROOM_BYTES = 8 << 30

CLONES = 16
WRITES_MB = 10
FILES_CLONES = 4
BASE_MIB = 64

#: What people do without vmfork. `{image}`: a raw file of 1 GB; `{qcow2}`: the same as qcow2;
#: `{new}`: what is made.
OTHERS = {
    "cp": ["cp", "--reflink=never", "{image}", "{new}"],
    "cp --reflink=always": ["cp", "--reflink=always", "{image}", "{new}"],
    "qemu-img create -b": ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "{image}", "-F", "raw", "{new}"],
    "qemu-img snapshot -c": ["qemu-img", "snapshot", "-c", "{name}", "{qcow2}"],
}


def run(world: w.World) -> None:
    _copies(world)
    _files(world)
    _space(world)
    _base(world)


def _copies(world: w.World) -> None:
    with _folder() as folder, world.daemon(pool=1) as (daemon, client):
        if shutil.disk_usage(folder).free < ROOM_BYTES:
            world.note(f"no copies were measured: {folder} has less than {ROOM_BYTES >> 30} GiB")
            return
        vm = world.run(client, memory_mib=MEMORY_MIB, disks=[w.vmfork.NewDisk.blank("data", 2 << 30)])
        diskio = w.put(vm, "diskio")
        vm.exec(f"{diskio} /dev/vdb {IMAGE_MIB} write seq 4 {IMAGE_MIB} 1", check=True)
        w.end_all(vm.fork(1))
        others = _others(world, folder)
        for number in world.rounds("a fork and copies of 1 GB", share=0.3):
            world.pool_is_full(client, 1)
            _took(world, "fork", daemon.state / "disks", lambda: vm.fork(1).raise_for_errors(), w.end_all)
            for how, make in others.items():
                _took(world, how, folder, functools.partial(make, number), Path.unlink)


def _took(world: w.World, how: str, folder: Path, make: Callable[[], object], end: Callable[..., object]) -> None:
    before, begin = held_bytes(folder), w.now_ms()
    made = make()
    world.figures.series("disks_copy_ms", how=how).add(w.now_ms() - begin)
    world.figures.series("disks_copy_MiB", how=how).add((held_bytes(folder) - before) / MIB)
    if made is not None:
        end(made)


def _others(world: w.World, folder: Path) -> dict[str, Callable[[int], Path | None]]:
    """Each way that works here: the number of a round → the file that was made."""
    image, qcow2 = folder / "image.raw", folder / "image.qcow2"
    with image.open("wb") as file:
        for _ in range(IMAGE_MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", image, qcow2], check=True, timeout=COPY_S)
    # As warm as the image.
    subprocess.run(["cat", image, qcow2], stdout=subprocess.DEVNULL, check=True, timeout=COPY_S)

    def way(argv: Sequence[str]) -> Callable[[int], Path | None]:
        def make(number: int) -> Path | None:
            new = folder / f"new-{number}"
            values = {"image": image, "qcow2": qcow2, "new": new, "name": f"s{number}"}
            command = [word.format(**values) for word in argv]
            subprocess.run(command, check=True, capture_output=True, timeout=COPY_S)
            return new if new.exists() else None

        return make

    ways = {how: way(argv) for how, argv in OTHERS.items()}
    reflink = "cp --reflink=always"
    try:
        made = ways[reflink](-1)
        assert made is not None
        made.unlink()
    except subprocess.CalledProcessError:
        (folder / "new--1").unlink(missing_ok=True)
        del ways[reflink]
        world.note("the file system of /tmp has no reflinks")
    return ways


def _files(world: w.World) -> None:
    for disks in (0, 1, 2):
        with world.daemon(pool=0) as (daemon, client):
            new = [w.vmfork.NewDisk.blank(f"d{number}", 1 << 30) for number in range(disks)]
            vm = world.run(client, memory_mib=MEMORY_MIB, disks=new)
            w.end_all(vm.fork(1))
            world.drained(vm)
            assert daemon.process is not None
            fds, files = _fds(daemon.process.pid), _count(daemon.state)
            clones = vm.fork(FILES_CLONES).raise_for_errors()
            world.drained(vm)
            per_clone = {
                "vmforkd's fds": (_fds(daemon.process.pid) - fds) / FILES_CLONES,
                "files in the state folder": (_count(daemon.state) - files) / FILES_CLONES,
                "QEMU's fds": sum(_fds(daemon.qemu(clone).pid) for clone in clones) / FILES_CLONES,
            }
            for what, count in per_clone.items():
                world.figures.series("disks_per_clone_count", what=what, disks=disks).add(count)
            w.end_all(clones)
    world.say(f"files of {FILES_CLONES} clones")


def _space(world: w.World) -> None:
    with world.daemon(pool=4) as (daemon, client):
        vm = world.run(client, memory_mib=MEMORY_MIB, disks=[w.vmfork.NewDisk.blank("data", 1 << 30)])
        diskio = w.put(vm, "diskio")
        vm.exec(f"{diskio} /dev/vdb 200 write seq 4 200 1", check=True)
        before = held_bytes(daemon.state / "disks")
        clones = vm.fork(CLONES).raise_for_errors()
        for number, clone in enumerate(clones):
            clone.exec(f"{diskio} /dev/vdb 200 write seq 4 {WRITES_MB} {number}", check=True)
        held = held_bytes(daemon.state / "disks") - before
        written = CLONES * WRITES_MB * MIB
        world.figures.series("disks_space_MiB", clones=CLONES, writes=f"{WRITES_MB} MiB each").add(held / MIB)
        world.figures.series("disks_space_ratio", clones=CLONES).add(held / written)
        w.end_all(clones)
    world.say(f"space of {CLONES} clones")


def _base(world: w.World) -> None:
    """Pages of a disk's base file that come into the host's page cache, of which it was cleared."""
    for request, arguments in {"whole pages": "bs=64k", "half pages": "bs=2k"}.items():
        with _folder() as folder, world.daemon(pool=0) as (_daemon, client):
            base = folder / "base.raw"
            base.write_bytes(os.urandom(BASE_MIB * MIB))
            vm = world.run(client, memory_mib=MEMORY_MIB, disks=[w.vmfork.NewDisk.file("base", str(base))])
            _forget(base)
            before = _cached_bytes(base)
            vm.exec(f"dd if=/dev/urandom of=/dev/vdb {arguments} count=512 oflag=direct", check=True)
            read = _cached_bytes(base) - before
            world.figures.series("disks_base_read_KiB", before_writes_of=request).add(read / 1024)
            vm.remove(force=True)
    world.say("reads of a base")


def _forget(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_bytes(file: Path) -> int:
    argv = ["fincore", "--json", "--bytes", "--output", "RES", str(file)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout
    return int(json.loads(said)["fincore"][0]["res"])


def held_bytes(folder: Path) -> int:
    """What the host's file system holds for a folder's files."""
    held = 0
    for file in folder.rglob("*"):
        try:
            held += file.stat().st_blocks * 512
        except FileNotFoundError:
            pass
    return held


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _count(folder: Path) -> int:
    return sum(1 for entry in folder.rglob("*") if not entry.is_dir())


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="vf-disks-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
