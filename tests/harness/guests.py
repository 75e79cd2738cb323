"""Guests that have booted before: each machine shape is booted once, stored, and started from the
store afterwards.

The stores are in `.cache/test-snapshots/HASH/SHAPE`, where `HASH` stands for all that made them:
programs, image, QEMU and processor. A store is there whole or not at all. One process boots a shape
while the others wait for it.

A VM that was started here differs from one that booted. Its family is the snapshot's, its `vmid` is
1, and its first pages come from the store. A test whose subject is one of these calls `client.run`,
which boots.

The files in a daemon's store are the same files as in the cache. A test that counts or damages what
its store holds starts guests with `whole`: they have copies, until their daemon starts again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import vmfork

from . import images, places
from .daemon import Client, Daemon
from .waits import eventually

#: The empty disks of VMs that tests attach volumes to. A name of their own is a shape of its own.
DISKS = ("data", "more")

#: Hashes that are kept. More than one, for runs with other programs (`VMFORK_OUT`) in between.
KEPT = 3


@dataclass(frozen=True)
class Shape:
    """A machine as `vmfork run` takes it."""

    image: str
    memory_mib: int
    cpus: int
    #: Names of empty disks. Volumes can be attached in their place.
    disks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its snapshot's name."""
        return "-".join(["ready", self.image, f"{self.memory_mib}m", f"{self.cpus}c", *self.disks])


def folder() -> Path:
    return places.CACHE / "test-snapshots"


#: Faster than any disk: the guest's memory is read at once.
_HYDRATE_MIB_PER_S = 4096


def warm(
    client: vmfork.Client,
    image: str,
    *,
    name: str | None = None,
    memory_mib: int = 512,
    cpus: int = 1,
    disks: tuple[str, ...] = (),
    whole: bool = False,
) -> vmfork.VM:
    """A VM of this shape that has booted, on the client's daemon. `disks` are the names of its
    empty disks.

    With `whole`, all of its memory is read before this returns, and its snapshot is removed. In the
    daemon's store its chunks stay as long as the VM lives. They are no files of the cache.
    """
    assert isinstance(client, Client), "only the clients of `Daemon` know a state folder"
    shape = Shape(image, memory_mib, cpus, disks)
    store = client.state / "snapshots"
    link_into(store, stored(shape), links=not whole)
    names = [name] if name else None
    rate = _HYDRATE_MIB_PER_S if whole else 0
    (vm,) = client.snapshots.start(shape.name, names=names, hydrate_mib_per_s=rate).raise_for_errors()
    if whole:
        pages = client.snapshots.get(shape.name).own_pages
        eventually(lambda: vm.inspect().memory.cache_present_pages >= pages, 60, "all of it is read")
        client.snapshots.remove(shape.name)
    return vm


def stored(shape: Shape) -> Path:
    """The store with the shape's snapshot; it is booted if there is none yet."""
    kept = folder() / key(shape.image)
    target = kept / shape.name
    if not target.is_dir():
        kept.mkdir(parents=True, exist_ok=True)
        with (folder() / f"{shape.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _boot(shape, target)
    os.utime(kept)
    _prune(kept)
    return target


def _boot(shape: Shape, target: Path) -> None:
    # From a process that died.
    for part in target.parent.glob(f"{shape.name}.part-*"):
        shutil.rmtree(part)
    part = target.with_name(f"{shape.name}.part-{os.getpid()}")
    daemon = Daemon(("--pool", "0"))
    try:
        daemon.add_image(shape.image)
        daemon.start()
        with daemon.client() as client:
            disks = [vmfork.NewDisk.empty(name) for name in shape.disks]
            client.run(shape.image, name="ready", memory_mib=shape.memory_mib, cpus=shape.cpus, disks=disks)
            client.snapshots.create("ready", shape.name, wait=True, record_s=0)
        assert daemon.stop() == 0
        shutil.copytree(daemon.state / "snapshots", part)
    finally:
        daemon.close()
    part.rename(target)


def _prune(used: Path) -> None:
    """Remove all but the hashes that were used last."""
    found = [path for path in folder().iterdir() if path.is_dir()]
    for old in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        if old != used:
            shutil.rmtree(old, ignore_errors=True)


@functools.cache
def key(image: str) -> str:
    """A hash of all that a stored guest depends on besides its shape."""
    sum_ = hashlib.sha256()
    library = places.OUT / "lib" / "vmfork"
    description = images.store() / image / "image.json"
    for path in (places.VMFORKD, library / "libvmfork_tap.so", library / "vmfork-agent", description):
        sum_.update(hashlib.sha256(path.read_bytes()).digest())
    qemu = shutil.which("qemu-system-x86_64") or "none"
    version = subprocess.run([qemu, "--version"], capture_output=True, timeout=30, check=True).stdout
    cpu = re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:2]
    has_kvm = os.access("/dev/kvm", os.R_OK | os.W_OK)
    for text in (qemu, version.decode(), *cpu, str(has_kvm), platform.release()):
        sum_.update(text.encode() + b"\0")
    return sum_.hexdigest()[:16]


def link_into(store: Path, source: Path, *, links: bool = True) -> None:
    """A daemon's store gets what another one has, by hard links where it can and may. Without
    `links`, what has been linked before becomes a copy."""
    # A daemon that runs may free chunks at any time that no descriptor names: look until all are
    # there.
    while _link_missing(store, source, links):
        pass


def _link_missing(store: Path, source: Path, links: bool) -> int:
    linked = 0
    for path in _in_order(source):
        target = store / path.relative_to(source)
        if _is_in_place(target, links):
            continue
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _place(path, target, links)
        except FileExistsError:
            continue  # another thread's
        linked += 1
    return linked


def _is_in_place(target: Path, links: bool) -> bool:
    try:
        names = target.stat().st_nlink
    except FileNotFoundError:
        return False
    return links or names == 1


def _place(path: Path, target: Path, links: bool) -> None:
    if links:
        try:
            os.link(path, target)
            return
        except FileExistsError:
            raise
        except OSError:
            pass  # another file system
    # Whole or not at all, for the daemon that reads here; not another thread's.
    part = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_native_id()}")
    shutil.copy2(path, part)
    part.replace(target)


def _in_order(source: Path) -> Iterator[Path]:
    """The files of a store, descriptors last: with its descriptor a snapshot is there."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    yield from (path for path in files if path.name != "descriptor.json")
    yield from (path for path in files if path.name == "descriptor.json")
