"""Where the time of a fork onto other hosts goes, stage by stage, until clones have run a command;
and what crosses the links for it, by form.

The mean of each stage over the clones and hosts of a fork, as the daemons count them: the parent's,
and those of the clones' hosts. And requests against pages that were sent, repeats and loss.
"""

from __future__ import annotations

from harness import metrics
from harness.metrics import Between

from .. import transfers
from .. import world as w
from ..cluster import FORMS, Cluster, cluster, rest

TITLE = "Where the time of a fork onto other hosts goes"

#: Of the rounds of a run.
SHARE = 0.2

PARENTS = ("prepare", "quiesce", "stop", "freeze", "state", "cont", "derive", "describe", "away")
THERE = ("arrive", "clone_attach", "clone_bind", "clone_load", "clone_identity")


def run(world: w.World) -> None:
    for form in FORMS:
        _by(world, form)


def _by(world: w.World, form: str) -> None:
    hosts, most = world.pick(((4, 32),), ((2, 2),))[0]
    with cluster(world, hosts + 1, pool=most // hosts, more_flags=["--page-transfer", form]) as made:
        vm = world.run(made.clients[0], memory_mib=512)
        w.end_all(vm.fork(most, hosts=made.names(hosts)))  # pools learn the shape
        for clones, on in ((1, 1), (most, hosts)):
            for _ in world.rounds(f"{clones} clones on {on} other hosts, by {form}", share=SHARE):
                rest(world, made, vm, empty=True)
                _measure(world, made, vm, clones, on, form)


def _measure(world: w.World, made: Cluster, vm: w.vmfork.VM, clones: int, on: int, form: str) -> None:
    labels = {"by": form, "clones": clones, "hosts": on}
    before = [metrics.read(daemon) for daemon in made.daemons]
    begin = w.now_ms()
    fork = vm.fork(clones, hosts=made.names(on)).raise_for_errors()
    forked = w.now_ms()
    ready = [Between(first, metrics.read(daemon)) for first, daemon in zip(before, made.daemons, strict=True)]
    begin_command = w.now_ms()
    w.answer_all(fork)
    answered = w.now_ms()
    done = [Between(first, metrics.read(daemon)) for first, daemon in zip(before, made.daemons, strict=True)]
    w.end_all(fork)
    for host, stages, found in (("the parent's", PARENTS, ready[:1]), ("the clones'", THERE, ready[1:])):
        for stage in stages:
            count = sum(one.value("vmfork_fork_stage_seconds_count", stage=stage) for one in found)
            seconds = sum(one.value("vmfork_fork_stage_seconds_sum", stage=stage) for one in found)
            if count > 0:
                world.figures.series("stages_ms", host=host, stage=stage, **labels).add(1000 * seconds / count)
    series = world.figures.series
    series("stages_ms", host="all", stage="fork, as the caller sees it", **labels).add(forked - begin)
    series("stages_ms", host="all", stage="first command of each", **labels).add(answered - begin_command)
    for until, found in (("ready", ready), ("the first command", done)):
        _links(world, found[1:], {**labels, "until": until})
    transfers.add(world, "stages", done, **labels, until="the first command")


def _links(world: w.World, found: list[Between], labels: dict[str, object]) -> None:
    """What clones' hosts asked for over connections, and how long VMs there waited."""
    series = world.figures.series

    def asked(what: str, role: str) -> float:
        return sum(one.value(f"vmfork_transfer_{what}_total", side="asked", role=role) for one in found)

    for role in ("demand", "ahead"):
        series("stages_requests", role=role, **labels).add(asked("requests", role))
        series("stages_pages", role=role, **labels).add(asked("pages", role))
        series("stages_sent_MiB", role=role, **labels).add(asked("bytes", role) / (1 << 20))
    wait_s = sum(one.value("vmfork_fault_wait_seconds_sum", place="peer") for one in found)
    series("stages_faults", **labels).add(sum(one.value("vmfork_fault_wait_seconds_count", place="peer") for one in found))
    series("stages_waited_for_pages_ms", **labels).add(1000 * wait_s)
