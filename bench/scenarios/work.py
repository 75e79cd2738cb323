"""What a fork costs the guest: a fixed computation before it, after it, and in the clone."""

from __future__ import annotations

import time

from .. import world as w

TITLE = "The guest's work around a fork"

WINDOW_MS = 2000.0
MEM_MIB = 128


def run(world: w.World) -> None:
    for work in ("cpu", "mem"):
        with world.daemon(pool=2) as (_daemon, client):
            vm = world.run(client, memory_mib=512)
            spin = w.put(vm, "spin")
            ratios = {who: world.figures.series("work_ratio", who=who, work=work) for who in ("parent", "clone")}
            with w.background(vm, f"{spin} rate {work} {MEM_MIB} 100000"):
                for _ in world.rounds(f"work, {work}"):
                    world.drained(vm)
                    time.sleep(WINDOW_MS / 1000 + 0.3)
                    begin = time.time() * 1000
                    fork = vm.fork(1).raise_for_errors()
                    after = time.time() * 1000
                    time.sleep(WINDOW_MS / 1000 + 0.3)
                    parents, clones = _samples(vm), _samples(fork[0])
                    w.end_all(fork)
                    before = _rate(parents, begin - WINDOW_MS, begin)
                    ratios["parent"].add(_rate(parents, begin, begin + WINDOW_MS) / before)
                    # The clone's clock is stepped at its start: its first whole slot counts from
                    # there.
                    ratios["clone"].add(_rate(clones, after + 100, after + WINDOW_MS) / before)


def _samples(vm: w.vmfork.VM) -> list[tuple[float, float]]:
    """(when, units per 100 ms) of the last while."""
    text = vm.exec("tail -n 100 /run/background", check=True).stdout_text
    return [(float(at), float(units)) for at, units in (line.split() for line in text.splitlines() if " " in line)]


def _rate(samples: list[tuple[float, float]], begin_ms: float, end_ms: float) -> float:
    """Mean of the slots that ended in the window."""
    units = [units for at, units in samples if begin_ms < at <= end_ms]
    if not units:
        raise RuntimeError(f"no sample of the guest's work between {begin_ms:.0f} and {end_ms:.0f}")
    return sum(units) / len(units)
