"""The same ends by other means, on this machine, in this run.

- *cold boot*: the same image, from nothing to a command's answer.
- *stop-save-restore*: plain QEMU; stopped, its state with all memory saved to a file in memory, and
  loaded into another QEMU, until the guest's agent answers there. With the time that the other QEMU
  takes to start, and without (as if there were a pool for it).
- *copying all memory*: what a fork by copying would cost at the very least: the bytes alone.
"""

from __future__ import annotations

import ctypes
import mmap

from .. import world as w
from ..rawqemu import RawVm, restore, save

TITLE = "Baselines"


def run(world: w.World) -> None:
    _cold_boot(world)
    for mib in world.pick((512, 1024), (512,)):
        _stop_save_restore(world, mib)
    for mib in world.pick((512, 1024, 2048, 4096), (512, 1024)):
        _copy(world, mib)


def _cold_boot(world: w.World) -> None:
    with world.daemon(pool=0) as (_daemon, client):
        for _ in world.rounds("cold boot"):
            begin = w.now_ms()
            vm = client.run(world.image, memory_mib=512)
            vm.exec(["true"], check=True)
            world.figures.series("boot_command_ms", memory="512 MiB").add(w.now_ms() - begin)
            if vm.info is not None and vm.info.ready_ms is not None:
                world.figures.series("boot_ready_ms", memory="512 MiB").add(vm.info.ready_ms)
            vm.remove(force=True)


def _stop_save_restore(world: w.World, mib: int) -> None:
    labels = {"memory": f"{mib} MiB"}
    with RawVm.boot(world.image, memory_mib=mib) as source:
        # As loaded as the parent in `clones`.
        source.exec(f"yes vmfork | head -c {mib // 4}M > /dev/shm/loaded")
        for _ in world.rounds(f"stop-save-restore, {mib} MiB", share=0.5):
            begin = w.now_ms()
            state = save(source)
            saved = w.now_ms() - begin
            try:
                start_ms, load_ms = restore(state, source)
            finally:
                state.close()
            world.figures.series("save_pause_ms", **labels).add(saved)
            world.figures.series("restore_answer_ms", **labels, qemu_start="without").add(saved + load_ms)
            world.figures.series("restore_answer_ms", **labels, qemu_start="with").add(saved + start_ms + load_ms)


def _copy(world: w.World, mib: int) -> None:
    size = mib << 20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    with mmap.mmap(-1, size, flags=flags) as source:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(source)), 0x5A, size)
        for _ in world.rounds(f"copy {mib} MiB"):
            with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as target:
                begin = w.now_ms()
                _memmove(target, source, size)
                world.figures.series("copy_ms", memory=f"{mib} MiB").add(w.now_ms() - begin)


def _memmove(target: mmap.mmap, source: mmap.mmap, size: int) -> None:
    to = (ctypes.c_char * size).from_buffer(target)
    come = (ctypes.c_char * size).from_buffer(source)
    ctypes.memmove(to, come, size)
    del to, come
