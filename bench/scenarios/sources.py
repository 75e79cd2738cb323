"""Where a stored snapshot comes from: files that are not compressed, files that are, and an S3
server that answers after 1 and 10 ms.

From the server it is pulled each time, and starts while it comes. The job is compared with the same
in a VM that never stops, right before and right after.
"""

from __future__ import annotations

from harness import s3

from .. import kept, workloads
from .. import world as w
from ..kept import IMAGE, MODES, SHARE

TITLE = "Stored snapshots, by source"

PROGRAM = workloads.PYTHON
MEMORY_MIB = 1024


def run(world: w.World) -> None:
    if s3.program() is None:
        world.note("no S3 server (mk/versitygw.sh builds it): not started from one")
        return
    program, labels = PROGRAM, {"program": PROGRAM.name, "memory": f"{MEMORY_MIB} MiB"}
    series = world.figures.series

    def measure(client: w.vmfork.Client, daemon: w.Daemon, source: str, name: str, location: str | None) -> None:
        for mode in ("f", "fdw"):
            for _ in world.rounds(f"{program.name} from {source}: {mode}", share=SHARE):
                pull = (lambda: client.snapshots.pull(name, location)) if location else (lambda: None)
                with kept.started(client, daemon, name, MODES[mode][1], pull) as (vm, _, first_ms):
                    took, ratio = yardstick.measure(vm, answer)
                if location:
                    w.eventually(lambda: client.snapshots.get(name).state == "ready", 120, "all of it is here", every_s=0.1)
                    client.snapshots.remove(name)
                series("source_answer_ms", source=source, mode=mode, **labels).add(first_ms)
                series("source_job_ms", source=source, mode=mode, **labels).add(took)
                series("source_job_ratio", source=source, mode=mode, **labels).add(ratio)

    w.images.build(IMAGE)
    # In a daemon of its own, which outlives the others.
    with s3.server() as server, world.daemon(pool=0, image=IMAGE) as (_, quiet):
        yardstick = kept.Yardstick.warm(world, quiet, program, MEMORY_MIB)
        with world.daemon(pool=2, image=IMAGE, env=server.environment()) as (daemon, client):
            vm, answer = kept.warm(world, client, program, MEMORY_MIB)
            for compression in ("none", "zstd"):
                kept.recorded(client, vm, compression, program.job, compression=compression)
            vm.remove(force=True)
            client.snapshots.push("zstd", server.location)
            measure(client, daemon, "raw files", "none", None)
            measure(client, daemon, "zstd", "zstd", None)
        for delay_ms in (1, 10):
            with (
                s3.relay(server.port, delay_ms / 1000) as port,
                world.daemon(pool=2, image=IMAGE, env=server.environment(port)) as (daemon, client),
            ):
                measure(client, daemon, f"S3 at {delay_ms} ms", "zstd", server.location)
