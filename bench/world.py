"""What scenarios measure in: daemons, VMs, guest programs, rounds, and a word on how far it is."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python" / "src")]

import vmfork  # noqa: E402
from harness import images, leftovers, programs  # noqa: E402
from harness.daemon import FLAG_POOL, Daemon  # noqa: E402
from harness.waits import eventually  # noqa: E402

from .measure import Figures  # noqa: E402

__all__ = ["ROOT", "Daemon", "World", "cpu_ms", "eventually", "images", "leftovers", "programs", "vmfork"]

T = TypeVar("T")

programs_bench = Path(__file__).resolve().parent / "guest"


class World:
    """One run of the benchmark."""

    def __init__(
        self,
        *,
        rounds: int,
        quick: bool,
        programs: Sequence[str] | None = None,
        storm: tuple[int, int, int] | None = None,
    ) -> None:
        self.figures = Figures()
        self.quick = quick
        #: Names of the programs to measure, where they are measured one by one; all if ``None``.
        self.programs = programs
        #: VMs that fork at once, into how many clones, how often.
        self.storm = storm or ((2, 2, 2) if quick else (4, 8, 5))
        self._rounds = rounds
        self.notes: list[str] = []
        self.image = images.build()
        self._live = sys.stderr.isatty()

    def pick(self, full: Sequence[T], quick: Sequence[T]) -> Sequence[T]:
        """Fewer cases in a quick run."""
        return quick if self.quick else full

    def rounds(self, what: str, share: float = 1.0) -> Iterator[int]:
        """The rounds of one figure; ``share`` of them where each takes long, but never under 3."""
        count = max(3, round(self._rounds * share))
        for number in range(count):
            self.say(f"{what}: round {number + 1} of {count}", fleeting=True)
            yield number
        self.say(f"{what}: {count} rounds")

    def say(self, text: str, *, fleeting: bool = False) -> None:
        """Progress, to stderr; fleeting lines only to a terminal."""
        if self._live:
            sys.stderr.write(f"\r\033[K{text}" + ("" if fleeting else "\n"))
        elif not fleeting:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def note(self, text: str) -> None:
        """Something that a reader of the report should know."""
        self.notes.append(text)
        self.say(f"note: {text}")

    @contextlib.contextmanager
    def daemon(
        self,
        *,
        pool: int,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> Iterator[tuple[Daemon, vmfork.Client]]:
        """A daemon of one's own with a pool of that size, gone without trace afterwards."""
        daemon = Daemon([FLAG_POOL, str(pool), *flags], env=env, prefix=prefix)
        try:
            daemon.add_image(image or self.image)
            daemon.start()
            with daemon.client() as client:
                yield daemon, client
        finally:
            daemon.close()

    def run(
        self,
        client: vmfork.Client,
        *,
        memory_mib: int,
        cpus: int = 1,
        image: str | None = None,
        name: str = "parent",
        disks: Sequence[vmfork.NewDisk] = (),
    ) -> vmfork.VM:
        """A VM that has booted and come to rest."""
        vm = client.run(image or self.image, name=name, memory_mib=memory_mib, cpus=cpus, disks=disks)
        vm.exec("mount -o remount,size=90% /dev/shm; sleep 1", check=True)
        return vm

    def pool_is_full(self, client: vmfork.Client, count: int) -> None:
        """Wait until the pool holds `count` QEMUs. The pool's shape is known from the first fork
        on."""
        eventually(lambda: client.host().pool.waiting >= count, 120, f"{count} QEMUs in the pool", every_s=0.05)

    def drained(self, vm: vmfork.VM) -> None:
        """Wait until nothing of a VM's last freeze is left aside."""
        eventually(lambda: vm.inspect().memory.undrained_pages == 0, 120, "the drain is done", every_s=0.05)


@contextlib.contextmanager
def background(vm: vmfork.VM, command: str) -> Iterator[None]:
    """A program that runs in a guest during the block, and its output in /run/background."""
    pid = vm.exec(f"({command}) > /run/background 2>&1 < /dev/null & echo $!", check=True).stdout_text.strip()
    try:
        yield
    finally:
        vm.exec(f"kill {pid} $(pgrep -P {pid}); wait; true")


def put(vm: vmfork.VM, name: str) -> str:
    """Copy a guest program in: one of the tests', or one of `bench/guest`."""
    return programs.put(vm, name)


def answer_all(vms: Sequence[vmfork.VM]) -> None:
    """Each runs a command and answers, all at once."""
    with ThreadPoolExecutor(max(1, len(vms))) as pool:
        for result in pool.map(lambda vm: vm.exec(["true"]), vms):
            if result.exit_code != 0:
                raise RuntimeError(f"`true` ended with {result.exit_code}")


def end_all(vms: Sequence[vmfork.VM]) -> None:
    """Kill and forget them."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda vm: vm.remove(force=True), vms))


def cpu_ms(pid: int) -> float:
    """CPU time of a process, to the nanosecond, with that of its threads that have ended."""
    clock = ~pid << 3 | 2  # CPUCLOCK_SCHED of a process: man 3 clock_getcpuclockid
    return time.clock_gettime(clock) * 1000


def cores() -> int:
    return os.cpu_count() or 1


def guest_cpu_ms(pid: int) -> float:
    """CPU time of a QEMU's vCPU, which under TCG translates the guest's code and executes it.

    QEMU's threads have no names of their own; of those beside the main one it is the busiest.
    """
    threads = (task / "schedstat" for task in (Path("/proc") / str(pid) / "task").iterdir() if task.name != str(pid))
    return max((int(text.split()[0]) for text in map(_read_if_there, threads) if text), default=0) / 1e6


def _read_if_there(path: Path) -> str:
    """A thread may end while it is looked at."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stolen_ms() -> float:
    """Processor time that the hypervisor has given to others while this machine wanted it, in steps
    of 10 ms."""
    return _processors_ms()["steal"]


def busy_ms() -> float:
    """Time in which this machine's processors had something to do, over all of them, in steps of
    10 ms."""
    times = _processors_ms()
    return sum(times[kind] for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def _processors_ms() -> dict[str, float]:
    kinds = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return {kind: float(field) * 1000 / os.sysconf("SC_CLK_TCK") for kind, field in zip(kinds, fields, strict=False)}


def at_rest() -> None:
    """Wait until the processors have had little to do for a while: what ended before is put
    away."""

    def is_idle() -> bool:
        begin, busy = now_ms(), busy_ms()
        time.sleep(0.3)
        return (busy_ms() - busy) / (now_ms() - begin) < 0.2 * cores()

    eventually(is_idle, 60, "the machine is at rest", every_s=0.0)


def now_ms() -> float:
    return time.monotonic() * 1000
