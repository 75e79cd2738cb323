"""The root as persistent memory, from a block device, and in the guest's memory.

What clones take that run the same program for the first time, and how long it takes them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .. import memory
from .. import world as w

TITLE = "The root: persistent memory, block device, memory"

MIB = 1 << 20
PAGES_PER_MIB = 256
MEMORY_MIB = 512
#: Nothing of it has run in the parent.
PROGRAM = ["python3", "-c", "import asyncio, decimal, email, json, sqlite3, ssl, unittest"]
#: Looks at programs and libraries, which takes memory for names and inodes.
LIST = "find /usr -xdev -type f -print0 | xargs -0 stat > /dev/null"
#: Reads them, most for the first time; → how many bytes.
READ = "find /usr -xdev -type f -print0 | xargs -0 cat | head -c 100000000 | wc -c"
#: Copied to a tmpfs, they are guest memory that a fork shares.
COPY = """
mkdir -p /dev/shm/root && cp -a /usr /lib /lib64 /bin /dev/shm/root/ && mkdir -p /dev/shm/root/dev /dev/shm/root/tmp
"""
IN_COPY = ["chroot", "/dev/shm/root", *PROGRAM]


def run(world: w.World) -> None:
    count = world.pick((32,), (8,))[0]
    with world.daemon(pool=4) as (_daemon, client):
        _boots(world, client)
    for root in ("pmem", "block", "tmpfs"):
        with world.daemon(pool=4) as (_daemon, client):
            _clones(world, client, root, count)


def _start(world: w.World, client: w.vmfork.Client, root: str) -> w.vmfork.VM:
    device = w.vmfork.RootDevice.PMEM if root == "pmem" else w.vmfork.RootDevice.BLOCK
    # What the guest reads by its own page cache fits into it.
    mib = MEMORY_MIB * 2 if root == "tmpfs" else MEMORY_MIB
    vm = client.run(world.image, name="parent", memory_mib=mib, root_device=device)
    assert vm.inspect().root_device == device
    vm.exec("mount -o remount,size=90% /dev/shm; sleep 1", check=True)
    return vm


def _boots(world: w.World, client: w.vmfork.Client) -> None:
    """By turns, since machines are noisy."""
    _start(world, client, "pmem").remove(force=True)
    for _ in world.rounds("boots"):
        for root in ("pmem", "block"):
            begin = w.now_ms()
            vm = _start(world, client, root)
            world.figures.series("boot_and_rest_ms", root=root).add(w.now_ms() - begin)
            free = vm.exec("awk '/^Mem(Total|Available)/ {print $2}' /proc/meminfo", check=True).stdout_text.split()
            world.figures.series("guest_total_MiB", root=root).add(int(free[0]) / 1024)
            world.figures.series("guest_available_MiB", root=root).add(int(free[1]) / 1024)
            (clone,) = vm.fork(1).raise_for_errors()
            world.figures.series("first_fork_clone_ready_ms", root=root).add(clone.inspect().ready_ms or 0.0)
            clone.remove(force=True)
            vm.remove(force=True)


def _clones(world: w.World, client: w.vmfork.Client, root: str, count: int) -> None:
    labels = {"root": root, "clones": count}
    vm = _start(world, client, root)
    if root == "tmpfs":
        vm.exec(COPY, check=True, timeout_s=120)
    program = IN_COPY if root == "tmpfs" else PROGRAM
    w.end_all(vm.fork(1))  # the pool learns the shape
    for _ in world.rounds(f"{count} clones, root {root}", share=0.2):
        world.drained(vm)
        fork = vm.fork(count).raise_for_errors()
        w.answer_all(fork)
        world.figures.series("root_fork_pause_ms", **labels).add(fork.pause_ms)
        world.drained(vm)
        before, available = _private_mib(fork), memory.available_bytes()
        with ThreadPoolExecutor(count) as pool:
            for took_ms in pool.map(lambda clone: _timed(clone, program), list(fork)):
                world.figures.series("first_run_ms", **labels).add(took_ms)
        world.figures.series("private_per_clone_MiB", **labels).add((_private_mib(fork) - before) / count)
        taken = (available - memory.available_bytes()) / MIB
        world.figures.series("host_per_clone_MiB", **labels).add(taken / count)
        with ThreadPoolExecutor(count) as pool:
            for took_ms in pool.map(lambda clone: _timed(clone, program), list(fork)):
                world.figures.series("second_run_ms", **labels).add(took_ms)
        w.end_all(fork)
    if root != "tmpfs":
        _reads(world, vm, labels)
    vm.remove(force=True)


def _reads(world: w.World, vm: w.vmfork.VM, labels: dict[str, object]) -> None:
    """A clone that reads 100 MB of programs."""
    for _ in world.rounds(f"100 MB of programs, root {labels['root']}", share=0.2):
        world.drained(vm)
        fork = vm.fork(1).raise_for_errors()
        w.answer_all(fork)
        fork[0].exec(LIST, check=True, timeout_s=120)
        before, begin = _private_mib(fork), w.now_ms()
        read = int(fork[0].exec(READ, check=True, timeout_s=120).stdout_text)
        world.figures.series("read_programs_ms", **labels).add(w.now_ms() - begin)
        world.figures.series("read_programs_MB", **labels).add(read / 1e6)
        world.figures.series("read_programs_private_MiB", **labels).add(_private_mib(fork) - before)
        w.end_all(fork)


def _timed(clone: w.vmfork.VM, program: list[str]) -> float:
    begin = w.now_ms()
    clone.exec(program, check=True, timeout_s=120)
    return w.now_ms() - begin


def _private_mib(fork: w.vmfork.ForkResult) -> float:
    return sum(clone.inspect().memory.private_pages for clone in fork) / PAGES_PER_MIB
