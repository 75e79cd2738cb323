"""Records what real VMs touch, for `crates/sim`: `python3 -m bench.traces`.

A VM forks onto another host (two daemons in network namespaces on this machine), and the clone does
a job. The daemon there tells, at the log level `trace`, of each page that the clone waits for;
while it does, pages come one by one and none ahead, so that all first touches are seen. How long
pages take to come is left out: what is written is the time in which the clone waited for none. What
is left of a fault's cost, some 50 us until the guest goes on, is in it.

Of VMs that boot from an image it is what they read of the image's root, which the daemon serves
from its store. All of it is there, and the kernel has the files in memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from . import world as w
from .cluster import Cluster, cluster, rest
from .workloads import IMAGE_WORK

FILTER = "info,vmfork_engine::touches=trace"
FILTER_READS = "info,vmfork_snapshots::reads=trace"

MEMORY_MIB = 1024

#: Pages that follow on each other within so long are one line.
RUN_US = 4000
RUN_PAGES = 64

_PYTHON = """
import collections, json, re
words = re.findall("[a-z]+", open(json.__file__).read() * 20)
table = {word + str(n): n for n, word in enumerate(words)}
print(len(table), len(collections.Counter(words)), len(json.dumps(table)))
"""


@dataclass(frozen=True)
class Job:
    name: str
    what: str
    #: In the parent, before it forks; shell.
    before: str
    #: In the clone.
    job: str


JOBS = [
    Job("idle", "answers `true`", "true", "true"),
    Job("python", "starts Python, whose files its parent had in memory, and counts words", "python3 /run/job.py", "python3 /run/job.py"),
    Job(
        "scan",
        "reads 256 MiB once that its parent had in memory, as SnowFlock's BLAST (figure 4c) does",
        "head -c 256M /dev/urandom > /dev/shm/set; cat /dev/shm/set | wc -c",
        "cat /dev/shm/set | wc -c",
    ),
]


#: What VMs do after they have booted, by the names of their traces.
BOOTS = [
    Job("boot", "boots from an image and answers `true`", "", "true"),
    Job("boot-python", "boots from an image, reads Python's library and starts it", "", IMAGE_WORK),
]

IMAGE_MEMORY_MIB = 256
_READ = re.compile(r"TRACE .*reads: reads range=(?P<page>\d+)\+(?P<pages>\d+) at_us=(?P<us>\d+)$")


@dataclass
class Touch:
    us: int
    page: int
    pages: int
    is_write: bool


_EVENT = re.compile(r"(?P<at>\S+Z) TRACE .*touches: (?P<what>waits|came) view=(?P<view>\d+) page=(?P<page>\d+) (?:is_write=(?P<write>\w+) )?at_us=(?P<us>\d+)$")


def touches(log: Iterable[str], ended: datetime) -> list[Touch]:
    """What a log tells of: each page once, in time that stands still while anything is waited for.
    The last one is touched again at the end."""
    found: list[Touch] = []
    seen: set[int] = set()
    waits: set[tuple[str, str]] = set()
    clock = last = 0
    told = ended
    for event in filter(None, map(_EVENT.search, log)):
        at, wait = int(event["us"]), (event["view"], event["page"])
        if not waits:
            clock += at - last if found else 0
        last, told = at, datetime.fromisoformat(event["at"].replace("Z", "+00:00"))
        if event["what"] == "came":
            waits.discard(wait)
            continue
        waits.add(wait)
        page = int(event["page"])
        if page not in seen:
            seen.add(page)
            found.append(Touch(clock, page, 1, event["write"] == "true"))
    if found:
        clock += max(0, round((ended - told).total_seconds() * 1e6))
        found.append(Touch(clock, found[-1].page, 1, False))
    return found


def runs(all_touches: Iterable[Touch]) -> list[Touch]:
    """Neighbours in time and place in one."""
    made: list[Touch] = []
    for touch in all_touches:
        before = made[-1] if made else None
        if (
            before is not None
            and touch.page == before.page + before.pages
            and touch.is_write == before.is_write
            and touch.us - before.us <= RUN_US
            and before.pages < RUN_PAGES
        ):
            before.pages += 1
        else:
            made.append(Touch(touch.us, touch.page, touch.pages, touch.is_write))
    return made


def reads(log: Iterable[str], end_us: int) -> list[Touch]:
    """What a log tells that a VM read of its image: each page once. The last one is touched again
    at the end."""
    found: list[Touch] = []
    seen: set[int] = set()
    for event in filter(None, map(_READ.search, log)):
        first = int(event["page"])
        for page in range(first, first + int(event["pages"])):
            if page not in seen:
                seen.add(page)
                found.append(Touch(int(event["us"]), page, 1, False))
    if found:
        found.append(Touch(max(end_us, found[-1].us), found[-1].page, 1, False))
    return found


def text(job: Job, all_touches: list[Touch]) -> str:
    who = "A clone on another host" if job not in BOOTS else "A VM"
    memory_mib = MEMORY_MIB if job not in BOOTS else IMAGE_MEMORY_MIB
    lines = [
        f"# {who} that {job.what}; its VM has {memory_mib} MiB.",
        "# Recorded by `python3 -m bench.traces` (TCG): the time in us in which it waited for no page, page+pages, read or write.",
    ]
    for touch in runs(all_touches):
        pages = f"+{touch.pages}" if touch.pages > 1 else ""
        lines.append(f"{touch.us} {touch.page}{pages} {'w' if touch.is_write else 'r'}")
    return "\n".join(lines) + "\n"


def record(world: w.World, made: Cluster, job: Job) -> str:
    """A VM that never forked: what clones of earlier forks waited for would come before it is
    touched."""
    vm = world.run(made.clients[0], memory_mib=MEMORY_MIB)
    try:
        vm.write_file("/run/job.py", _PYTHON.encode())
        vm.exec(f"{{ {job.before}; }} && sync && sleep 2", check=True, timeout_s=600)
        rest(world, made, vm, empty=True)
        log = made.daemons[1].log
        begin = log.stat().st_size
        fork = vm.fork(1, hosts=made.names(1)).raise_for_errors()
        fork[0].exec(job.job, check=True, timeout_s=600)
        ended, end = datetime.now(timezone.utc), log.stat().st_size
        w.end_all(fork)
        told = log.read_bytes()[begin:end].decode(errors="replace").splitlines()
        return text(job, touches(told, ended))
    finally:
        vm.remove(force=True)


def record_boots(world: w.World, jobs: list[Job]) -> Iterator[tuple[Job, str]]:
    """VMs of an image whose root is in the store, all of it."""
    with world.daemon(pool=0, flags=["--log-level", FILTER_READS]) as (daemon, client):
        folder = str(daemon.folder / "images")
        client.push_image(world.image, folder)
        client.remove_image(world.image)
        client.pull_image(world.image, folder)
        w.eventually(lambda: client.images()[0].remote is None, 120, "all of it is in the store")
        for job in jobs:
            # Twice: the second one finds the store's files in memory.
            for _ in range(2):
                begin, began = daemon.log.stat().st_size, w.now_ms()
                with client.run(world.image, memory_mib=IMAGE_MEMORY_MIB) as vm:
                    vm.exec(job.job, check=True, timeout_s=600)
                    end_us, end = round((w.now_ms() - began) * 1000), daemon.log.stat().st_size
            told = daemon.log.read_bytes()[begin:end].decode(errors="replace").splitlines()
            yield job, text(job, reads(told, end_us))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bench.traces", description="Record what clones touch.")
    parser.add_argument("--only", action="append", choices=[job.name for job in JOBS + BOOTS], metavar="JOB")
    parser.add_argument("--out", type=Path, default=w.ROOT / "crates" / "sim" / "traces", metavar="DIR")
    options = parser.parse_args()
    from harness import processes

    processes.become_subreaper()
    world = w.World(rounds=1, quick=True)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = {job.name for job in JOBS + BOOTS if not options.only or job.name in options.only}

    def keep(job: Job, content: str, began: float) -> None:
        file = options.out / f"{job.name}.trace"
        file.write_text(content)
        world.say(f"{job.name}: {file.stat().st_size >> 10} KiB in {time.monotonic() - began:.0f} s")

    if clones := [job for job in JOBS if job.name in wanted]:
        with cluster(world, 2, pool=0, more_flags=["--log-level", FILTER]) as made:
            for job in clones:
                began = time.monotonic()
                keep(job, record(world, made, job), began)
    if boots := [job for job in BOOTS if job.name in wanted]:
        began = time.monotonic()
        for job, content in record_boots(world, boots):
            keep(job, content, began)
            began = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
