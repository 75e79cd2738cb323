"""One module per question. Each has `TITLE` and `run(world)`, which adds series to
`world.figures`."""

from types import ModuleType

from .. import world  # noqa: F401  (the tests' harness can be imported from then on)
from . import (
    baseline,
    chain,
    clones,
    copying,
    crowd,
    database,
    disks,
    faults,
    hosts,
    idle,
    pause,
    players,
    refill,
    remote,
    roots,
    snapshots,
    sources,
    stages,
    stored,
    storm,
    streamed,
    swarm,
    work,
)

#: In the order in which they run and are reported.
ALL: dict[str, ModuleType] = {
    "pause": pause,
    "chain": chain,
    "work": work,
    "clones": clones,
    "idle": idle,
    "faults": faults,
    "snapshots": snapshots,
    "disks": disks,
    "roots": roots,
    "stored": stored,
    "sources": sources,
    "crowd": crowd,
    "hosts": hosts,
    "stages": stages,
    "remote": remote,
    "refill": refill,
    "database": database,
    "copying": copying,
    "storm": storm,
    "swarm": swarm,
    "streamed": streamed,
    "players": players,
    "baseline": baseline,
}
