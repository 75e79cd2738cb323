"""What a fault costs whose page is on another host, beyond what the link takes: nothing else is on
the link.

Each fault brings 16 pages that do not compress, the one that is waited for before the others, over
links that nothing holds back. Beside it, in the same round, over the same link: a question of 32
bytes, and as an answer the bytes of a page, with plain TCP. Both rest before each: shortly, or so
long that processors fall asleep, which on a machine that is a guest itself takes longer to be over
than all else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness import leftovers, metrics, places, programs

from .. import world as w
from ..cluster import Cluster, cluster, rest
from ..measure import percentile

TITLE = "The cost of a fault on another host"

#: Of the rounds of a run.
SHARE = 0.2

MEMORY_MIB = 512
RESTS_US = (100, 3000)
ECHO_PORT = 7900
PAGE_BYTES = 4096


def run(world: w.World) -> None:
    region_mib = world.pick((192,), (32,))[0]
    with cluster(world, 2, pool=0, rate=None) as made:
        for rest_us in (rest_us for _ in world.rounds("faults on another host", share=SHARE) for rest_us in RESTS_US):
            # A VM that was never forked: what clones of earlier forks waited for would come before
            # it is touched.
            vm = world.run(made.clients[0], memory_mib=MEMORY_MIB)
            walk = w.put(vm, "pagewalk")
            rest(world, made, vm, empty=True)
            with w.background(vm, f"{walk} {region_mib} {rest_us}"):
                w.eventually(lambda vm=vm: vm.exec("test -e /run/pagewalk.ready").exit_code == 0, 120, "the region is filled")
                fork = vm.fork(1, hosts=made.names(1)).raise_for_errors()
                world.drained(vm)
                _walk(world, made, fork[0], rest_us)
            w.end_all([*fork, vm])
        _floor(world, made)


def _walk(world: w.World, made: Cluster, clone: w.vmfork.VM, rest_us: int) -> None:
    def add(figure: str, value: float, **labels: str) -> None:
        world.figures.series(figure, **labels, rest_us=rest_us).add(value)

    clone.exec(["true"], check=True)
    before = metrics.read(made.daemons[1])
    clone.exec("touch /run/pagewalk.go; while ! test -e /run/pagewalk.out; do sleep 0.2; done", check=True, timeout_s=300)
    seen = metrics.Between(before, metrics.read(made.daemons[1]))
    guest_us = percentile([int(line) / 1000 for line in clone.read_file("/run/pagewalk.out").split()], 50)
    daemon_us = 1e6 * seen.quantile(0.5, "vmfork_fault_wait_seconds", place="peer")
    requests, pages, sent = (
        seen.value(f"vmfork_transfer_{what}_total", side="asked", role="demand") for what in ("requests", "pages", "bytes")
    )
    link_us = _echo(made, PAGE_BYTES, rest_us)
    p99_us = 1e6 * seen.quantile(0.99, "vmfork_fault_wait_seconds", place="peer")
    add("remote_fault_us", daemon_us, seen_by="the daemon")
    add("remote_fault_us", guest_us, seen_by="the guest")
    add("remote_fault_p99_us", p99_us, seen_by="the daemon")
    add("link_round_trip_us", link_us, answer="a page's bytes")
    add("link_round_trip_us", _echo(made, 32, rest_us), answer="32 bytes")
    add("remote_fault_beyond_link_us", daemon_us - link_us, seen_by="the daemon")
    add("remote_fault_beyond_link_us", guest_us - link_us, seen_by="the guest")
    add("remote_fault_sent_KiB", sent / requests / 1024, per="request")
    add("remote_fault_pages", pages / requests, per="request")


def _echo(made: Cluster, answer_bytes: int, rest_us: int) -> float:
    """The median of round trips from the second host to the first and back, µs."""
    program, address = str(programs.build("echo")), made.net.addresses[0]
    with _serving([*made.net.prefix(0), program, "serve", address, str(ECHO_PORT), str(answer_bytes)]):
        argv = [*made.net.prefix(1), program, "ask", address, str(ECHO_PORT), str(answer_bytes), "300", str(rest_us)]
        times: list[float] = []

        def asked() -> bool:
            done = subprocess.run(argv, capture_output=True, timeout=60, text=True)
            times.extend(float(line) for line in done.stdout.split())
            return done.returncode == 0

        # It may not listen yet.
        w.eventually(asked, 10, "echo answers", every_s=0.05)
    return percentile(times, 50)


@contextlib.contextmanager
def _serving(argv: list[str]) -> Iterator[None]:
    process = leftovers.spawn(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


_FLOOR = re.compile(r"^ *(\d+) pages(' bytes, plain TCP)? +p50 +([\d.]+) ", re.MULTILINE)


def _floor(world: w.World, made: Cluster) -> None:
    """Page transfer alone over the same link, without VMs and engines: `cargo run --example
    fault`."""
    program = _example()
    if program is None:
        world.note("no cargo: page transfer without VMs is not measured")
        return
    for rest_us in (rest_us for _ in world.rounds("page transfer alone", share=SHARE) for rest_us in RESTS_US):
        argv = [str(program), "400", str(rest_us), made.net.names[0], made.net.names[1], made.net.addresses[0]]
        text = subprocess.run(argv, capture_output=True, timeout=120, check=True, text=True).stdout
        for pages, plain, p50 in _FLOOR.findall(text):
            by = "plain TCP" if plain else "page transfer"
            world.figures.series("transfer_us", pages=pages, by=by, rest_us=rest_us).add(float(p50))


def _example() -> Path | None:
    """The example, built now; by `VMFORK_FAULT_EXAMPLE` one that is there."""
    given = os.environ.get("VMFORK_FAULT_EXAMPLE")
    if given:
        return Path(given)
    if shutil.which("cargo") is None:
        return None
    argv = ["cargo", "build", "--release", "--quiet", "-p", "vmfork-transfer", "--example", "fault"]
    subprocess.run(argv, cwd=places.ROOT, timeout=1200, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", places.ROOT / "target"))
    return target / "release" / "examples" / "fault"
