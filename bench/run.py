"""Measures vmfork, and what it is to be compared with, on this machine in one run.

Writes `results.json` (every single value), `results.txt` (tables) and `report.html` (plots) into a
folder, and prints the tables. A scenario that fails is reported and does not stop the others; the
exit code is then 1. Figures that were to be reached are marked; missing one is no failure.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path

from . import html, report
from .report import Run

ROUNDS = 30
ROUNDS_QUICK = 5


def arguments(argv: list[str] | None) -> argparse.Namespace:
    from . import scenarios, workloads

    parser = argparse.ArgumentParser(prog="python3 -m bench", description="Measure vmfork on this machine.")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds of each figure (default {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"{ROUNDS_QUICK} rounds, fewer sizes; for a look, not for a note")
    parser.add_argument(
        "--only", action="append", choices=sorted(scenarios.ALL), metavar="SCENARIO",
        help=f"measure this one; repeatable ({', '.join(scenarios.ALL)})",
    )
    parser.add_argument(
        "--program", action="append", choices=[program.name for program in workloads.ALL], metavar="NAME",
        help="where programs are measured one by one, this one; repeatable",
    )
    parser.add_argument(
        "--storm", type=_storm, metavar="VMSxCLONESxTIMES",
        help="how many VMs fork at once, into how many clones, how often (default 4x8x5)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go (default out/bench)")
    options = parser.parse_args(argv)
    if options.rounds is None:
        options.rounds = ROUNDS_QUICK if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _storm(text: str) -> tuple[int, int, int]:
    words = text.split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"`{text}` is not like 4x8x5, at least 1 of each")
    parents, clones, times = map(int, words)
    return parents, clones, times


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    # Later than the parsing of flags: building images takes a while.
    from harness import places, processes

    from . import scenarios
    from .world import ROOT, World, stolen_ms

    processes.become_subreaper()
    folder = options.out or ROOT / "out" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    stolen_before = stolen_ms()
    world = World(rounds=options.rounds, quick=options.quick, programs=options.program, storm=options.storm)
    run = Run(describe(places.VMFORKD), world.figures, world.notes)
    run.host["rounds"] = f"{options.rounds}{', quick' if options.quick else ''}"
    names = options.only or list(scenarios.ALL)
    try:
        for name in names:
            scenario = scenarios.ALL[name]
            world.say(f"== {scenario.TITLE}")
            before = len(world.figures.all)
            try:
                scenario.run(world)
            except Exception as error:
                run.failures[name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            finally:
                run.sections[scenario.TITLE] = world.figures.all[before:]
            # After each, so that a run that is broken off has left what it had.
            write(run, folder)
    except KeyboardInterrupt:
        run.failures["the run"] = "broken off by Ctrl-C"
    took_s = time.monotonic() - begin
    run.host["took"] = f"{took_s:.0f} s"
    stolen = (stolen_ms() - stolen_before) / (took_s * 1000 * (os.cpu_count() or 1))
    run.host["stolen"] = f"{stolen:.1%} of the processors' time, by the hypervisor"
    write(run, folder)
    sys.stdout.write(report.text(run))
    world.say(f"written to {folder}")
    return 1 if run.failures else 0


def write(run: Run, folder: Path) -> None:
    for name, content in (
        ("results.json", report.document(run)),
        ("results.txt", report.text(run)),
        ("report.html", html.page(run)),
    ):
        part = folder / f".{name}"
        part.write_text(content)
        part.replace(folder / name)


def describe(vmforkd: Path) -> dict[str, object]:
    """The machine, as far as figures depend on it."""
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpus": f"{os.cpu_count()} × {cpu[0] if cpu else 'unknown'}",
        "memory": f"{memory_kib / (1 << 20):.1f} GiB",
        "kernel": platform.release(),
        "qemu": _first_line("qemu-system-x86_64", "--version"),
        "vmforkd": _first_line(str(vmforkd), "--version"),
    }


def _first_line(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return (done.stdout.splitlines() or ["unknown"])[0]
