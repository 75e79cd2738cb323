"""How soon clones work: one, pooled and unpooled, with its processor time; then 1, 4, 16, 32."""

from __future__ import annotations

from .. import world as w

TITLE = "From the fork to answers"


def run(world: w.World) -> None:
    for mib in world.pick((512, 1024), (512,)):
        _one(world, mib, pool=4)
    _one(world, 512, pool=0)
    _cpu(world)
    _many(world)


def _one(world: w.World, mib: int, *, pool: int) -> None:
    labels = {"memory": f"{mib} MiB", "pool": "yes" if pool else "no"}
    with world.daemon(pool=pool) as (_daemon, client):
        vm = world.run(client, memory_mib=mib)
        # A loaded parent, as the baseline's is.
        vm.exec(f"yes vmfork | head -c {mib // 4}M > /dev/shm/loaded", check=True)
        w.end_all(vm.fork(1))  # the pool learns the shape
        for _ in world.rounds(f"one clone, {mib} MiB, pool {pool}"):
            world.drained(vm)
            world.pool_is_full(client, pool)
            begin = w.now_ms()
            fork = vm.fork(1).raise_for_errors()
            fork[0].exec(["true"], check=True)
            world.figures.series("clone_command_ms", **labels).add(w.now_ms() - begin)
            (result,) = fork.results
            if result.ready_ms is not None:
                world.figures.series("clone_ready_ms", **labels).add(result.ready_ms)
            if pool and not result.pooled:
                world.note(f"a clone of {mib} MiB did not come from the pool of {pool}")
            w.end_all(fork)


def _cpu(world: w.World) -> None:
    """Processor time of the daemon during a fork and of the clone's QEMU, per clone.

    Read when the fork is answered: a clone's agent has by then taken its identity. What the guest
    executed for that, and for its first command, is told apart. The pool's refill, in QEMUs that
    are no clones yet, does not count.
    """
    count = 4
    with world.daemon(pool=count) as (daemon, client):
        vm = world.run(client, memory_mib=512)
        w.end_all(vm.fork(1))
        for _ in world.rounds("processor time"):
            world.drained(vm)
            world.pool_is_full(client, count)
            assert daemon.process is not None
            waiting = {process.pid: w.cpu_ms(process.pid) for process in daemon.processes()}
            own = w.cpu_ms(daemon.process.pid)
            fork = vm.fork(count).raise_for_errors()
            own = w.cpu_ms(daemon.process.pid) - own
            pids = [vm.pid for vm in (clone.inspect() for clone in fork) if vm.pid is not None]
            guest = sum(w.guest_cpu_ms(pid) for pid in pids)
            total = sum(w.cpu_ms(pid) for pid in pids) - guest
            before = sum(waiting.get(pid, 0.0) for pid in pids)
            world.figures.series("clone_cpu_ms", qemu_start="with").add((own + total) / count)
            world.figures.series("clone_cpu_ms", qemu_start="without").add((own + total - before) / count)
            world.figures.series("clone_guest_cpu_ms", until="its agent has answered").add(guest / count)
            w.answer_all(fork)
            command = sum(w.guest_cpu_ms(pid) for pid in pids) - guest
            world.figures.series("clone_guest_cpu_ms", until="its first command, from there").add(command / count)
            w.end_all(fork)


def _many(world: w.World) -> None:
    counts = world.pick((1, 4, 16, 32), (1, 4, 16))
    with world.daemon(pool=max(counts)) as (_daemon, client):
        vm = world.run(client, memory_mib=512)
        w.end_all(vm.fork(1))
        for count in counts:
            for _ in world.rounds(f"{count} clones"):
                world.drained(vm)
                world.pool_is_full(client, max(counts))
                begin = w.now_ms()
                fork = vm.fork(count).raise_for_errors()
                w.answer_all(fork)
                world.figures.series("all_answered_ms", clones=count).add(w.now_ms() - begin)
                world.figures.series("fork_total_ms", clones=count).add(fork.total_ms)
                w.end_all(fork)
