"""A hundred live snapshots of one family: what the host holds for them, over what was written.

A snapshot lives as long as a clone of it; so a hundred clones live. What their guests hold is the
caches of all images and every VM's private pages. What the family held before the first fork is
taken off.
"""

from __future__ import annotations

from .. import world as w

TITLE = "A hundred live snapshots"

WRITTEN_MIB = 16
REGION_MIB = 256
MIB = 1 << 20
MEMORY_MIB = 512


def run(world: w.World) -> None:
    count = 12 if world.quick else 100
    for shape in ("chain", "tree"):
        # One family a shape: the figure is a sum over a hundred forks already.
        world.say(f"{count} snapshots, {shape}")
        with world.daemon(pool=4) as (_daemon, client):
            vm = world.run(client, memory_mib=MEMORY_MIB)
            dirty = w.put(vm, "dirty")
            vm.exec(f"{dirty} /dev/shm/region {REGION_MIB} 0 seq 1 1", check=True)
            w.end_all(vm.fork(1))
            world.drained(vm)
            before = _held(client)
            members = [vm]
            for number in range(count):
                world.say(f"{shape}: snapshot {number + 1} of {count}", fleeting=True)
                # A chain: the newest is forked. A tree: the oldest that has fewer than three
                # children.
                parent = members[-1] if shape == "chain" else members[number // 3]
                parent.exec(f"{dirty} /dev/shm/region {REGION_MIB} 0 scatter {WRITTEN_MIB} {number}", check=True)
                members += parent.fork(1).raise_for_errors()
            for member in members:
                world.drained(member)
            held = _held(client) - before
            written = count * WRITTEN_MIB * MIB
            world.figures.series("snapshots_held_MiB", shape=shape).add(held / MIB)
            world.figures.series("snapshots_written_MiB", shape=shape).add(written / MIB)
            world.figures.series("snapshots_ratio", shape=shape).add(held / written)


def _held(client: w.vmfork.Client) -> int:
    """Bytes of guest memory that the host holds for all VMs."""
    private = sum(vm.info.private_bytes for vm in client.vms() if vm.info is not None)
    return client.host().cache_bytes + private
