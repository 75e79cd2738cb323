"""One module per question. Each has `TITLE` and `run(world)`, which adds series to `world.figures`."""

from types import ModuleType

from . import baseline, chain, clones, crowd, faults, hosts, idle, pause, snapshots, sources, stored, work

#: In the order in which they run and are reported.
ALL: dict[str, ModuleType] = {
    "pause": pause,
    "chain": chain,
    "work": work,
    "clones": clones,
    "idle": idle,
    "faults": faults,
    "snapshots": snapshots,
    "stored": stored,
    "sources": sources,
    "crowd": crowd,
    "hosts": hosts,
    "baseline": baseline,
}
