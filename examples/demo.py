#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The demonstration, as `make demo` runs it: a real job on the clones of a running VM.

    demo.py [--workers N] [--reads N] [--memory MIB] [--output FILE] [--keep]

Boots a VM. In it demo_guest.py loads a genome's index and 10,000 reads and aligns them alone. Then
it forks the VM from inside into workers that each align a share. This program shows what goes on,
watches the memory of the VMs meanwhile, and compares the two answers byte for byte. It needs the
image `demo` and `vmfork` in PATH; mk/demo.sh sees to that. A daemon that was not there before is
stopped in the end.

Exit code: 0 if the answers are the same, 1 if not or if something failed, 130 after Ctrl-C.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

try:
    import vmfork
except ImportError:
    sys.exit("error: the Python SDK is not there\nhint: `make demo` sets everything up and runs this")

IMAGE = "demo"
GUEST_PROGRAM = Path(__file__).with_name("demo_guest.py")
GUEST_FOLDER = "/dev/shm/demo"  # a tmpfs, so that the index is in the guest's memory
MIB = 1 << 20
PAGE_BYTES = 4096
BOOT_SECONDS_MAX = 180
SILENCE_SECONDS_MAX = 180  # of the guest's program
SAMPLE_SECONDS = 0.5
ENVIRONMENT = ("VMFORK_STATE", "VMFORK_SOCKET")  # where `vmfork` finds the daemon
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Failed(Exception):
    """The demonstration can't go on; the text says why."""


class Display:
    """Lines that stay, and on a terminal one below them that tells what is being waited for."""

    def __init__(self):
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.told = time.monotonic()

    def line(self, text=""):
        print(f"\r\x1b[K{text}" if self.live else text, flush=True)
        self.told = time.monotonic()

    def status(self, text):
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", flush=True)
        elif text and time.monotonic() - self.told >= 5:  # in a log: not too often
            self.line(f"  {text}")

    def step(self, what, outcome):
        self.line(f"{what:<46}{outcome}")


class GuestProgram:
    """demo_guest.py in the VM, and what it tells. Its output comes live through `vmfork exec`."""

    def __init__(self, vm, workers, reads):
        command = ["vmfork", "exec", vm.name, "--", "python3", "-u", "/run/demo_guest.py"]
        self.process = subprocess.Popen(
            [*command, str(workers), str(reads), GUEST_FOLDER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
        )
        self.events = queue.Queue()
        self.complaints = []
        self.threads = [threading.Thread(target=self._read), threading.Thread(target=self._listen)]
        for thread in self.threads:
            thread.start()

    def _read(self):
        for line in self.process.stdout:
            self.events.put((time.time(), line))
        self.events.put((time.time(), None))

    def _listen(self):
        self.complaints = self.process.stderr.read().strip().splitlines()

    def __iter__(self):
        """(when, event) as they come, and (now, None) at least every tenth of a second between
        them."""
        last = time.monotonic()
        while True:
            try:
                when, line = self.events.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() - last > SILENCE_SECONDS_MAX:
                    raise Failed(f"the guest has said nothing for {SILENCE_SECONDS_MAX} s") from None
                yield time.time(), None
                continue
            if line is None:
                return
            last = time.monotonic()
            yield when, json.loads(line)

    def check(self):
        """It has ended: as it should?"""
        for thread in self.threads:
            thread.join()
        if code := self.process.wait():
            raise Failed(f"the guest's program ended with {code}: {' / '.join(self.complaints[-3:])}")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()  # the daemon hangs the guest's program up
            self.process.wait()


class Memory:
    """Samples of where the family's memory is, while it runs."""

    def __init__(self, client, parent):
        self.client, self.parent = client, parent
        self.private_bytes = {}  # what was seen last, by name: it grows as long as a VM runs
        self.faults = {}
        self.image = None  # the parent's view of the shared cache, with the most views
        self.due = time.monotonic()

    def sample(self):
        if time.monotonic() < self.due:
            return
        for vm in self.client.vms():
            info = vm.info
            if info.family == self.parent.info.family:
                self.private_bytes[vm.name] = info.private_bytes
                self.faults[vm.name] = info.faults
        image = self.parent.inspect().memory
        if image.image is not None and (
            self.image is None or image.image_views >= self.image.image_views
        ):
            self.image = image
        self.due = time.monotonic() + SAMPLE_SECONDS


def seconds(value):
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def mib(value):
    return f"{value / MIB:,.1f} MiB"


def free_name(client):
    taken = {vm.name for vm in client.vms(ended=True)}
    names = ["demo", *(f"demo-{n}" for n in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def start(client, memory_mib):
    """A VM of the image, which has yet to boot."""
    # No interrupt between its start and our knowing of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        name = free_name(client)
        return client.run(IMAGE, name=name, memory_mib=memory_mib, boot_timeout_s=0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def boot(display, vm):
    """Wait until its agent answers."""
    began = time.monotonic()
    while (info := vm.inspect()).state is vmfork.VmState.STARTING:
        waited = time.monotonic() - began
        if waited > BOOT_SECONDS_MAX:
            raise Failed(f"the guest has not come up within {BOOT_SECONDS_MAX} s")
        display.status(f"booting: {waited:.0f} s")
        time.sleep(0.1)
    if info.state.has_ended:
        tail = " / ".join(vm.logs().strip().splitlines()[-3:])
        raise Failed(f"the VM ended while it booted: {info.reason}; its last words: {tail}")
    took = seconds(time.monotonic() - began)
    display.step(f"booted a VM: {info.memory_mib} MiB, {info.cpus} vCPU", took)
    display.line(f"  {info.accel_reason}")


def end(client, vm):
    """The VM with all of its family, and what is kept of them."""
    vm.kill(family=True)
    for other in client.vms(ended=True):
        if other.info.family == vm.info.family:
            other.remove(force=True)


class Job:
    """The guest's job as it goes on: what was told, and when."""

    def __init__(self, display, memory, workers):
        self.display, self.memory, self.workers = display, memory, workers
        self.at = {}  # event → when it was last told
        self.answers = {}  # vmid → (when, event)
        self.aligned = 0

    def on_event(self, when, event):
        kind = event.pop("event")
        self.at[kind] = when
        getattr(self, f"on_{kind}", lambda **_facts: None)(**event)
        if kind == "answer":
            self.answers[event["vmid"]] = (when, event)

    def on_loaded(self, index_bytes, reads, read_bytes):
        self.display.step(
            "loaded the data set into its memory", seconds(self.at["loaded"] - self.at["loading"])
        )
        self.display.line(
            f"  the genome of phage lambda, indexed: {mib(index_bytes)};"
            f" {reads:,} reads: {mib(read_bytes)}"
        )
        self.reads = reads

    def on_aligned(self, done, of):
        self.aligned = done

    def on_alone(self, records):
        self.alone_s = self.at["alone"] - self.at["loaded"]
        self.display.step(f"aligned {records:,} reads on this one VM", seconds(self.alone_s))

    def on_ticket(self, wanted, granted):
        if granted < wanted:
            self.display.line(f"  the host has room for {granted} of {wanted} clones")
        self.workers = granted

    def on_forked(self):
        took = self.at["forked"] - self.at["forking"]
        self.display.step(f"it forked itself into {self.workers} workers", seconds(took))

    def on_merged(self, records):
        self.merged_s = self.at["merged"] - self.at["forking"]
        self.display.step(f"{self.workers} workers aligned {records:,} reads", seconds(self.merged_s))

    def between(self, now):
        """Nothing was told for a moment."""
        if "forking" in self.at and "merged" not in self.at:
            self.memory.sample()
        if "merged" in self.at:
            self.display.status("writing the answers")
        elif "forked" in self.at:
            waited = now - self.at["forking"]
            done = f"{len(self.answers)}/{self.workers}"
            self.display.status(f"workers done: {done} ({waited:.0f} s)")
        elif "forking" in self.at:
            self.display.status("forking")
        elif "loaded" in self.at:
            waited = now - self.at["loaded"]
            self.display.status(f"aligned on one VM: {self.aligned:,}/{self.reads:,} ({waited:.0f} s)")
        else:
            self.display.status("loading the data set")


def show_tree(display, parent, fork, job, memory):
    """Who was forked from whom, when each ran and answered, and what memory became its own."""

    def row(name, ran="", answered="", reads="", vm=None):
        private, faults = memory.private_bytes.get(vm), memory.faults.get(vm)
        display.line(
            f"{name:<14}{ran:>14}{answered:>16}{reads:>8}"
            f"{'-' if private is None else mib(private):>14}{'-' if faults is None else faults:>14}"
        )

    display.line()
    display.line(
        f"{'fork tree':<14}{'ran after':>14}{'answered after':>16}{'reads':>8}"
        f"{'own memory':>14}{'page faults':>14}"
    )
    row(parent.name, vm=parent.name)
    for clone in fork.clones:
        branch = "└─" if clone is fork.clones[-1] else "├─"
        when, answer = job.answers.get(clone.vmid, (None, {}))
        row(
            f"{branch} {clone.name}",
            "-" if clone.ready_ms is None else seconds(clone.ready_ms / 1000),
            "-" if when is None else seconds(when - fork.began_unix_ms / 1000),
            f"{answer.get('reads', 0):,}",
            clone.name,
        )
        if clone.error:
            display.line(f"   {clone.error.message}: {clone.error.cause}")


def show_fork(display, parent, fork):
    stages = fork.stages
    pooled = sum(clone.pooled for clone in fork.clones)
    display.line()
    display.line(
        f"pause     {parent.name} stood still for {fork.pause_ms:.1f} ms (stop {stages.stop_ms:.1f},"
        f" freeze {stages.freeze_ms:.1f}, device state {stages.state_ms:.1f}, go on {stages.cont_ms:.1f})"
    )
    display.line(
        f"clones    {fork.granted} of {fork.requested} ran after {seconds(fork.total_ms / 1000)};"
        f" {pooled} in QEMUs that waited in the pool"
    )


def show_memory(display, parent, fork, memory):
    clones = [clone.name for clone in fork.clones if clone.error is None]
    if memory.image is None or not clones:
        display.line("memory    the workers were done before it could be looked at")
        return
    image, size = memory.image, parent.info.memory_mib * MIB
    cache = image.cache_present_pages * PAGE_BYTES
    private = sum(memory.private_bytes.get(name, 0) for name in clones)
    display.line(
        f"memory    fetched into the family's cache: {mib(image.fetched_bytes)}, of it"
        f" {mib(image.demand_bytes)} since a VM touched it, the rest in the background"
    )
    display.line(
        f"          shared: these {mib(cache)} by the parent and {len(clones)} clones;"
        f" written anew by the clones: {mib(private)} in all"
    )
    display.line(
        f"          the clones have {mib(len(clones) * size)} of guest memory"
    )


def show_times(display, parent, fork, job):
    ratio = job.alone_s / job.merged_s
    cores = len(os.sched_getaffinity(0))
    display.line(
        f"time      one VM {seconds(job.alone_s)}, {fork.granted} workers {seconds(job.merged_s)},"
        f" fork, messages and merging included: {ratio:.2f} times as fast"
    )
    if cores < fork.granted:
        display.line(
            f"          this host has {cores} cores for {fork.granted} workers, so no more than"
            f" {cores} times is to be had here"
        )
    if parent.info.accel is vmfork.Accel.TCG:
        display.line(
            "          TCG translates the guest's code, and every clone has to translate its own anew"
        )


def compare(display, vm, output):
    """Whether the two answers are the same bytes; the merged one is left in `output`."""
    display.status("fetching the answers")
    with tempfile.TemporaryDirectory() as folder:
        alone, merged = Path(folder, "alone.sam"), Path(folder, "merged.sam")
        for file in (alone, merged):
            vm.copy_out(f"{GUEST_FOLDER}/{file.name}", file)
        one, other = alone.read_bytes(), merged.read_bytes()
        shutil.copyfile(merged, output)
    records = [line.split(b"\t") for line in other.splitlines() if not line.startswith(b"@")]
    aligned = sum(not int(record[1]) & 4 for record in records)
    if one != other:
        first = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
        raise Failed(f"the answers differ from byte {first} on ({len(one)} and {len(other)} bytes)")
    display.line(
        f"answer    the same as without forking, byte for byte: {len(records):,} records,"
        f" {aligned:,} aligned, {mib(len(other))}"
    )
    display.line(f"          {output}")


def demonstrate(client, display, vm, options):
    vm.copy_in(GUEST_PROGRAM, "/run/demo_guest.py", mode=0o755)
    memory = Memory(client, vm)
    job = Job(display, memory, options.workers)
    program = GuestProgram(vm, options.workers, options.reads)
    try:
        for when, event in program:
            if event is None:
                job.between(when)
            else:
                job.on_event(when, event)
        program.check()
    finally:
        program.end()
    fork = vm.inspect().last_fork
    if fork is None or "merged" not in job.at:
        raise Failed("the guest's program has not forked")
    show_tree(display, vm, fork, job, memory)
    show_fork(display, vm, fork)
    show_memory(display, vm, fork, memory)
    show_times(display, vm, fork, job)
    compare(display, vm, options.output)


@contextmanager
def interrupts():
    """SIGTERM and SIGHUP interrupt us as Ctrl-C does; afterwards, while we clean up, none of
    them."""

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def daemon(*words, stderr=None):
    """`vmfork daemon`, of which Ctrl-C hears nothing."""
    command = ["vmfork", "daemon", *words]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
    return ended.returncode


def number(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def arguments():
    parser = argparse.ArgumentParser(description="Do a real job on the clones of a running VM.")
    parser.add_argument("--workers", type=number, default=8, help="clones to fork [8]")
    parser.add_argument("--reads", type=number, default=10_000, help="reads to align, of 10,000 [all]")
    parser.add_argument("--memory", type=number, default=512, metavar="MIB", help="guest memory [512]")
    parser.add_argument("--output", type=Path, default=Path("demo.sam"), help="where the merged answer goes")
    parser.add_argument("--keep", action="store_true", help="leave the VM running")
    return parser.parse_args()


def run(options, display):
    if shutil.which("vmfork") is None:
        raise Failed("`vmfork` is not in PATH: `make demo` sets everything up and runs this")
    ours, vm = daemon("status", stderr=subprocess.DEVNULL) != 0, None
    try:
        with interrupts():
            if ours and daemon("start"):
                raise Failed("the daemon could not be started")
            client = vmfork.Client()
            vm = start(client, options.memory)
            boot(display, vm)
            demonstrate(client, display, vm, options)
    finally:
        display.status("")
        keep = options.keep and vm is not None
        try:
            if vm is not None and not keep:
                end(client, vm)
        finally:
            if ours and not keep:
                daemon("stop", "--force", stderr=subprocess.DEVNULL)
    if keep:
        display.line(f"kept      the VM {vm.name} and the daemon; `make clean` ends them")
        where = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
        if where:
            display.line(f"          export {' '.join(where)}")


def main():
    options = arguments()
    display = Display()
    try:
        run(options, display)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (Failed, vmfork.VmforkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
