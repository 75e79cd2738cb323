"""What a host sends for a clone that fills 1 GiB of new memory on another host: the old contents
are not needed.

With a parent that has never used that memory, and with one that has used and given it back. Also
of a parent's first fork, since what clones waited for goes along with later ones. Counted at the
device of the parent's host, beside a clone that does nothing. What the parent's host served, and
for which purpose, is the daemon's count.
"""

from __future__ import annotations

from harness import freepages, metrics

from .. import world as w
from ..cluster import Cluster, cluster, rest

TITLE = "Memory that a clone on another host fills with new pages"

#: Of the rounds of a run.
SHARE = 0.2

MIB = 1 << 20


def run(world: w.World) -> None:
    memory_mib, filled_mib = world.pick(((1536, 1024),), ((512, 256),))[0]
    with cluster(world, 2, pool=1) as made:
        vm = world.run(made.clients[0], memory_mib=memory_mib)
        touch = w.put(vm, "touch")
        w.end_all(vm.fork(1, hosts=made.names(1)))  # pools learn the shape
        jobs = (("nothing", ["true"]), (f"fills {filled_mib} MiB", [touch, str(filled_mib)]))
        for _ in world.rounds(f"{filled_mib} MiB of new pages, first fork", share=SHARE):
            for job, command in jobs:
                fresh = world.run(made.clients[0], memory_mib=memory_mib, name="fresh")
                w.put(fresh, "touch")
                _measure(world, made, fresh, command, {"job": job, "memory": "never used", "fork": "first"})
                fresh.remove(force=True)
        for before in ("never used", "used and given back"):
            if before != "never used":
                vm.exec([touch, str(filled_mib)], check=True, timeout_s=300)
                freepages.wait_until_reported(vm)
            for _ in world.rounds(f"{filled_mib} MiB of new pages, {before}", share=SHARE):
                for job, command in jobs:
                    _measure(world, made, vm, command, {"job": job, "memory": before, "fork": "later"})


def _measure(world: w.World, made: Cluster, vm: w.vmfork.VM, command: list[str], labels: dict[str, str]) -> None:
    rest(world, made, vm, empty=True)
    sent, before, begin = made.sent_bytes(), metrics.read(made.daemons[0]), w.now_ms()
    fork = vm.fork(1, hosts=made.names(1)).raise_for_errors()
    fork[0].exec(command, check=True, timeout_s=300)
    took = w.now_ms() - begin
    sent = made.sent_bytes() - sent
    served = metrics.Between(before, metrics.read(made.daemons[0]))
    series = world.figures.series
    series("refill_ms", **labels).add(took)
    series("refill_sent_MiB", **labels).add(sent / MIB)
    rest_bytes = float(sent)
    for role in ("demand", "ahead"):
        pages = served.value("vmfork_transfer_bytes_total", side="served", role=role)
        series("refill_part_MiB", **labels, part=role).add(pages / MIB)
        rest_bytes -= pages
    # What is told at the start (device state, page table, working set), heartbeats, headers of
    # packets.
    series("refill_part_MiB", **labels, part="other than pages").add(rest_bytes / MIB)
    w.end_all(fork)
