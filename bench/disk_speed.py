"""How quick a guest's disk is, by how often it was frozen and by how deep its clone is.

It is compared with the guest's memory and with a raw file of a plain QEMU. `bench/guest/diskio.c`
measures in the guests: it reads and writes past their page caches. VMs that are compared take turns
in each round.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from . import world as w
from .rawqemu import RawVm

MEMORY_MIB = 512
DISK_BYTES = 1 << 30
#: What is read and written; it fits into the guest's memory.
SPAN_MIB = 64
DEEP = 20
FREEZES = 50
#: Pages of a span that are written between two freezes, so that each layer holds some of it.
BETWEEN = 64
RANDOM = 2000

#: Arguments of `diskio` after the span, by what they measure.
REQUESTS = {
    "4 KiB read, depth 1": f"read random 1 {RANDOM}",
    "4 KiB read, depth 16": f"read random 16 {RANDOM}",
    "4 KiB write, depth 1": f"write random 1 {RANDOM}",
    "4 KiB write, depth 16": f"write random 16 {RANDOM}",
    "1 MiB read, depth 4": f"read seq 4 {SPAN_MIB}",
    "1 MiB write, depth 4": f"write seq 4 {SPAN_MIB}",
}
READS = {name: arguments for name, arguments in REQUESTS.items() if " read," in name and "16" not in name}

#: What happens to each disk between freezes.
REWRITTEN = "/dev/vdc"
HISTORIES = {"/dev/vdb": "unchanged", REWRITTEN: "rewritten"}

#: What the others are compared with.
FIRST, RAW = "of the first freeze", "raw file, plain QEMU"

#: Runs a command in a guest, and returns what it prints.
Run = Callable[[str], str]


def run(world: w.World) -> None:
    _by_history(world)
    _beside_others(world)


def _by_history(world: w.World) -> None:
    """The same 64 MiB, in three VMs: a clone of the first freeze, the parent after its 50th, and a
    clone of clones. On one disk nothing is written after the first freeze, on the other a bit
    before each."""
    with world.daemon(pool=2) as (_daemon, client):
        disks = [w.vmfork.NewDisk.blank(name, DISK_BYTES) for name in HISTORIES.values()]
        parent = world.run(client, memory_mib=MEMORY_MIB // 2, disks=disks)
        diskio = w.put(parent, "diskio")
        for device in HISTORIES:
            parent.exec(_command(diskio, device, f"write seq 4 {SPAN_MIB}"), check=True)
        (first,) = parent.fork(1).raise_for_errors()
        deepest = first
        for number in range(1, DEEP):
            clone = _changed_and_forked(deepest, diskio, number)
            if deepest is not first:
                deepest.remove(force=True)
            deepest = clone
            world.say(f"clone of clones: {number + 1} of {DEEP}", fleeting=True)
        for number in range(1, FREEZES):
            _changed_and_forked(parent, diskio, number).remove(force=True)
            world.say(f"freeze {number + 1} of {FREEZES}", fleeting=True)
        vms = {FIRST: first, f"after {FREEZES} freezes": parent, f"{DEEP} deep": deepest}
        for device, history in HISTORIES.items():
            places = {name: _at(partial(_exec, vm), diskio, device) for name, vm in vms.items()}
            _take_turns(world, "disks_read", places, READS, "VM", base=FIRST, disk=history)


def _changed_and_forked(vm: w.vmfork.VM, diskio: str, number: int) -> w.vmfork.VM:
    vm.exec(_command(diskio, REWRITTEN, f"write random 4 {BETWEEN}", number), check=True)
    (clone,) = vm.fork(1).raise_for_errors()
    return clone


def _beside_others(world: w.World) -> None:
    """A disk, the memory of the same guest, and a raw file of a plain QEMU."""
    with (
        world.daemon(pool=0) as (_daemon, client),
        _raw_files() as raw,
        RawVm.boot(world.image, memory_mib=MEMORY_MIB, disks=raw) as plain,
    ):
        vm = world.run(client, memory_mib=MEMORY_MIB, disks=[w.vmfork.NewDisk.blank("data", DISK_BYTES)])
        diskio = w.put(vm, "diskio")
        plain.exec("mkdir -p /run/bench && cat /dev/vdc > /run/bench/diskio && chmod +x /run/bench/diskio")
        places = {
            "disk": _at(partial(_exec, vm), diskio, "/dev/vdb"),
            "tmpfs": _at(partial(_exec, vm), diskio, "/dev/shm/span"),
            RAW: _at(plain.exec, "/run/bench/diskio", "/dev/vdb"),
        }
        for measure in places.values():
            measure(REQUESTS["1 MiB write, depth 4"], 0)
        _take_turns(world, "disks_guest", places, REQUESTS, "place", base=RAW)


def _take_turns(
    world: w.World,
    figure: str,
    places: dict[str, Callable[[str, int], float]],
    requests: dict[str, str],
    label: str,
    *,
    base: str,
    **labels: object,
) -> None:
    """Each place after the other, request by request; and over `base` in the same round."""
    for measure in places.values():
        # TCG translates the guest's code when it runs first.
        for arguments in requests.values():
            measure(arguments, 1)
    what = ", ".join([figure.replace("_", " "), *map(str, labels.values())])
    for number in world.rounds(f"{what}, {len(places)} {label}s"):
        for request, arguments in requests.items():
            took = {name: measure(arguments, number + 2) for name, measure in places.items()}
            for name, us in took.items():
                all_labels: dict[str, object] = {"request": request, **labels, label: name}
                world.figures.series(f"{figure}_us", **all_labels).add(us)
                if name != base:
                    world.figures.series(f"{figure}_ratio", **all_labels, over=base).add(us / took[base])


def _at(run: Run, diskio: str, path: str) -> Callable[[str, int], float]:
    """Measures requests to one place: `diskio`'s arguments and a seed → µs per request."""

    def measure(arguments: str, seed: int) -> float:
        said = run(_command(diskio, path, arguments, seed))
        found = re.search(r"([\d.]+) us each", said)
        if not found:
            raise RuntimeError(f"diskio on {path} printed {said!r}")
        return float(found[1])

    return measure


def _command(diskio: str, path: str, arguments: str, seed: int = 0) -> str:
    return f"{diskio} {path} {SPAN_MIB} {arguments} {seed}"


def _exec(vm: w.vmfork.VM, command: str) -> str:
    return vm.exec(command, check=True).stdout_text


@contextmanager
def _raw_files() -> Iterator[list[Path]]:
    """An empty disk, and one that holds nothing but `diskio`."""
    folder = Path(tempfile.mkdtemp(prefix="vf-raw-disk-", dir="/tmp"))
    try:
        raw = folder / "disk.raw"
        with raw.open("wb") as file:
            file.truncate(DISK_BYTES)
        yield [raw, Path(shutil.copy(w.programs.build("diskio"), folder / "program.raw"))]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
