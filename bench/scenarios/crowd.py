"""Fifty VMs of one stored snapshot on one host, one after the other, all of which go on."""

from __future__ import annotations

from .. import world as w

TITLE = "Many VMs of one snapshot"


def run(world: w.World) -> None:
    count = 10 if world.quick else 50
    with world.daemon(pool=4) as (daemon, client):
        vm = world.run(client, memory_mib=512)
        vm.exec("head -c 100M /dev/urandom > /dev/shm/set", check=True)
        client.snapshots.create(vm, "many", wait=True, record_s=0)
        vm.remove(force=True)
        vms: list[w.vmfork.VM] = []
        for number in range(count):
            world.say(f"{number + 1} of {count} VMs of one snapshot", fleeting=True)
            w.eventually(lambda: client.host().pool.waiting >= 1, 60, "a QEMU waits", every_s=0.05)
            begin = w.now_ms()
            vms += client.snapshots.start("many").raise_for_errors()
            vms[-1].exec(["true"], check=True)
            took = w.now_ms() - begin
            place = "first" if number < count // 10 else "last" if number >= count - count // 10 else "between"
            world.figures.series("many_answer_ms", vm=place).add(took)
        w.end_all(vms)
