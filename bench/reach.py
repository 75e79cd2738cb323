"""The figures to reach, and whether this run reached them. No I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .measure import Figures, Series


@dataclass(frozen=True)
class Reach:
    """One line of the table."""

    figure: str
    limit: float
    at_most: bool
    unit: str
    of: Callable[[Figures], float]

    def value(self, figures: Figures) -> float:
        """The figure as measured; NaN if this run did not measure it."""
        try:
            return self.of(figures)
        except (Missing, ZeroDivisionError):
            return math.nan

    def verdict(self, figures: Figures) -> str:
        """`reached`, `missed`, or `not measured`."""
        value = self.value(figures)
        if math.isnan(value):
            return "not measured"
        good = value <= self.limit if self.at_most else value >= self.limit
        return "reached" if good else "missed"

    @property
    def limit_text(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g} {self.unit}".strip()


class Missing(Exception):
    """A series that the figure needs is not there."""


def _get(figures: Figures, name: str, **labels: object) -> Series:
    found = figures.find(name, **labels)
    if found is None or not found.values:
        raise Missing(name)
    return found


def _p50(name: str, **labels: object) -> Callable[[Figures], float]:
    return lambda figures: _get(figures, name, **labels).p50


def _p99(name: str, **labels: object) -> Callable[[Figures], float]:
    return lambda figures: _get(figures, name, **labels).p99


def _ratio(
    one: Callable[[Figures], float], other: Callable[[Figures], float]
) -> Callable[[Figures], float]:
    return lambda figures: one(figures) / other(figures)


def _jobs(figures: Figures, name: str, **labels: object) -> dict[tuple[str, str], float]:
    """The medians of a series, by program and memory."""
    found = {}
    for series in figures.all:
        if series.name == name and series.values and all(series.labels.get(key) == value for key, value in labels.items()):
            found[series.labels["program"], series.labels["memory"]] = series.p50
    if not found:
        raise Missing(name)
    return found


def _slowdown(mode: str, summary: Callable[[list[float]], float]) -> Callable[[Figures], float]:
    def of(figures: Figures) -> float:
        return summary(list(_jobs(figures, "job_ratio", start=mode).values()))

    return of


def _beyond_cores(figures: Figures) -> float:
    """All hosts share this machine's processors. What the other hosts had to do would be done by
    their own, at the same time; what the parent's daemon did would not."""
    last = {clones: _p50("hosts_last_ready_ms", clones=clones)(figures) for clones in ("one", "one each")}
    others = {clones: _p50("hosts_start_busy_ms", clones=clones, by="all others")(figures) for clones in last}
    return (last["one each"] - (others["one each"] - others["one"])) / last["one"]


def _remote_share(figures: Figures) -> float:
    none, fdw = _jobs(figures, "remote_faults", mode="none"), _jobs(figures, "remote_faults", mode="fdw")
    return statistics.median(fdw[key] / none[key] for key in fdw if key in none)


def _refill(memory: str, fork: str) -> Callable[[Figures], float]:
    sent = _p50("refill_sent_MiB", job="fills 1024 MiB", memory=memory, fork=fork)
    return lambda figures: sent(figures) * (1 << 20) / 1e6


def _over_fork(name: str, how: str, form: str) -> Callable[[Figures], float]:
    return _ratio(_p50(name, how=how), _p50(name, how=f"first fork, by {form}"))


def _storm(figures: Figures) -> float:
    """Of the largest one that was measured."""
    found = [series.p50 for series in figures.all if series.name == "storm_overhead_of_40_s" and series.values]
    if not found:
        raise Missing("storm_overhead_of_40_s")
    return max(found)


def _disks_frozen(figures: Figures) -> float:
    """The most that a fork's stage takes beyond its share for each disk, over disks, sizes and what
    was written."""
    frozen = [
        series.p50 - 0.1 * float(series.labels.get("disks", "1"))
        for series in figures.all
        if series.name == "disks_stage_ms" and series.values
        if series.labels["stage"] == "disks" and series.labels.get("disks") != "0"
    ]
    if not frozen:
        raise Missing("disks_stage_ms")
    return max(frozen)


def _disk_reads(vm: str, disk: str) -> Callable[[Figures], float]:
    """The worse of both requests, over the clone of the first freeze in the same rounds."""
    labels = {"disk": disk, "VM": vm, "over": "of the first freeze"}
    ratios = [_p50("disks_read_ratio", request=request, **labels) for request in ("4 KiB read, depth 1", "1 MiB read, depth 4")]
    return lambda figures: max(ratio(figures) for ratio in ratios)


_PAUSE = _p50("pause_ms", memory="512 MiB", load="idle")
_UNDISTURBED = _p50("pause_undisturbed_ms", memory="512 MiB", load="idle")

TABLE = [
    Reach("parent's pause, 512 MiB, p50", 4, True, "ms", _PAUSE),
    Reach("parent's pause, 512 MiB, p99", 12, True, "ms", _p99("pause_ms", memory="512 MiB", load="idle")),
    Reach(
        "the same, where the hypervisor took no time",
        12, True, "ms", _p99("pause_undisturbed_ms", memory="512 MiB", load="idle"),
    ),
    Reach(
        "pause at 4 GiB with 2 GiB dirty, over 512 MiB, of such rounds",
        1.3, True, "", _ratio(_p50("pause_undisturbed_ms", memory="4096 MiB", load="2 GiB dirty"), _UNDISTURBED),
    ),
    Reach(
        "pause at a parent's 50th fork, over its 1st",
        1.5, True, "", _ratio(_p50("chain_pause_ms", fork="last"), _p50("chain_pause_ms", fork="first")),
    ),
    Reach("parent's work after a fork over before, CPU-bound", 0.95, False, "", _p50("work_ratio", who="parent", work="cpu")),
    Reach("parent's work after a fork over before, memory-bound", 0.85, False, "", _p50("work_ratio", who="parent", work="mem")),
    Reach("one pooled clone: its agent has answered", 40, True, "ms", _p50("clone_ready_ms", memory="512 MiB", pool="yes")),
    Reach("one pooled clone: has run a command and answered", 120, True, "ms", _p50("clone_command_ms", memory="512 MiB", pool="yes")),
    Reach("vmforkd's and QEMU's CPU time per pooled clone to running, without the guest's own", 8, True, "ms", _p50("clone_cpu_ms", qemu_start="without")),
    Reach("the same with starting its QEMU", 30, True, "ms", _p50("clone_cpu_ms", qemu_start="with")),
    Reach("32 clones have all run a command and answered", 2000, True, "ms", _p50("all_answered_ms", clones=32)),
    Reach("guest memory fetched by an idle clone of 512 MiB, first fork", 4, True, "%", _p50("idle_fetched_percent", memory="512 MiB", fork="first")),
    Reach("the same, later forks", 4, True, "%", _p50("idle_fetched_percent", memory="512 MiB", fork="later")),
    Reach("private guest memory of an idle clone after 10 s", 4, True, "MiB", _p50("idle_private_MiB", memory="512 MiB", fork="first")),
    Reach("guest memory fetched by a clone that fills 1 GiB of new pages", 4, True, "%", _p50("fresh_fetched_percent", memory="2048 MiB")),
    Reach("100 live snapshots, chain: host memory over bytes written", 2, True, "", _p50("snapshots_ratio", shape="chain")),
    Reach("100 live snapshots, tree: host memory over bytes written", 2, True, "", _p50("snapshots_ratio", shape="tree")),
    Reach(
        "stop-save-restore over fork, to first answer, 1 GiB",
        20, False, "",
        _ratio(
            _p50("restore_answer_ms", memory="1024 MiB", qemu_start="without"),
            _p50("clone_ready_ms", memory="1024 MiB", pool="yes"),
        ),
    ),
    Reach(
        "start from a stored snapshot to running, 4 GiB, over QEMU's restore",
        0.03, True, "", _ratio(_p50("start_running_ms", mode="fdw", program="scan", memory="4096 MiB"), _p50("restore_ms", memory="4096 MiB")),
    ),
    Reach("a job after an fdw start over never stopped, median of programs", 1.02, True, "", _slowdown("fdw", statistics.median)),
    Reach("the same, worst program", 1.05, True, "", _slowdown("fdw", max)),
    Reach("faults that leave the host, fdw over none, median of programs", 0.1, True, "", _remote_share),
    Reach("stored size of a 4 GiB guest with 1 GiB used", 15, True, "%", _p50("stored_percent", compression="zstd", program="files", memory="4096 MiB")),
    Reach("50 VMs of one snapshot: the last ones' answer over the first ones'", 1.5, True, "", _ratio(_p50("many_answer_ms", vm="last"), _p50("many_answer_ms", vm="first"))),
    Reach("a fork's stage for its disks, less 0.1 ms for each: most of all disks, sizes and amounts written", 0.3, True, "ms", _disks_frozen),
    Reach("two disks of 100 GB add to the whole pause", 0.5, True, "ms", _p50("disks_added_to_undisturbed_pause_ms", disks=2, size="100 GB")),
    Reach("a disk of 1 TB adds to the whole pause", 0.4, True, "ms", _p50("disks_added_to_undisturbed_pause_ms", disks=1, size="1 TB")),
    Reach("first fork of a VM with an image of 8 GB, over one without a disk", 1.1, True, "", _ratio(_p50("disks_first_fork_ms", image="8 GB"), _p50("disks_first_fork_ms", image="none"))),
    Reach("a disk adds to a pooled clone, until it runs", 1, True, "ms", _p50("disks_added_to_clone_ms", disks=1, size="1 GB")),
    Reach("the same, two disks", 1, True, "ms", _p50("disks_added_to_clone_ms", disks=2, size="1 GB")),
    Reach("reads of what a disk held before, after 50 freezes over one", 1.05, True, "", _disk_reads("after 50 freezes", "unchanged")),
    Reach("the same in a clone 20 deep, over the first clone", 1.05, True, "", _disk_reads("20 deep", "unchanged")),
    Reach("the same, 64 of the 16,384 pages written before each freeze: after 50 freezes", 1.05, True, "", _disk_reads("after 50 freezes", "rewritten")),
    Reach("the same, 20 deep", 1.05, True, "", _disk_reads("20 deep", "rewritten")),
    Reach("bytes read of a disk's base before whole pages are written", 0, True, "KiB", _p50("disks_base_read_KiB", before_writes_of="whole pages")),
    Reach("16 clones that write 10 MiB each: host's disk space over bytes written", 1.1, True, "", _p50("disks_space_ratio", clones=16)),
    Reach("32 clones on 4 hosts have all run a command and answered", 2500, True, "ms", _p50("hosts_answered_ms", hosts=4)),
    Reach("the same, over 32 on one host", 1.3, True, "", _ratio(_p50("hosts_answered_ms", hosts=4), _p50("hosts_answered_ms", hosts=1))),
    Reach(
        "last clone's start, one each on 16 hosts, over as many on one host",
        1.2, True, "", _ratio(_p50("hosts_last_ready_ms", clones="one each"), _p50("hosts_last_ready_ms", clones="as many on one host")),
    ),
    Reach("the same over one clone on one, less what hosts with cores of their own would not wait for", 1.2, True, "", _beyond_cores),
    Reach(
        "bytes the parent's host sends, 8 hosts that read the same 256 MiB, over one",
        1.5, True, "", _ratio(_p50("hosts_parent_sent_MiB", hosts=8, memory="as they read it", by="swarm"), _p50("hosts_parent_sent_MiB", hosts=1, memory="as they read it", by="swarm")),
    ),
    Reach(
        "the same, 8 hosts that get it in the background",
        1.5, True, "", _ratio(_p50("hosts_parent_sent_MiB", hosts=8, memory="in the background", by="swarm"), _p50("hosts_parent_sent_MiB", hosts=1, memory="in the background", by="swarm")),
    ),
    Reach(
        "the same by multicast, 8 hosts that read the same 256 MiB, over one by swarm",
        1.2, True, "", _ratio(_p50("hosts_parent_sent_MiB", hosts=8, memory="as they read it", by="multicast"), _p50("hosts_parent_sent_MiB", hosts=1, memory="as they read it", by="swarm")),
    ),
    Reach(
        "the same by multicast, 8 hosts that get it in the background",
        1.2, True, "", _ratio(_p50("hosts_parent_sent_MiB", hosts=8, memory="in the background", by="multicast"), _p50("hosts_parent_sent_MiB", hosts=1, memory="in the background", by="swarm")),
    ),
    Reach("fault on another host, beyond the link's own round trip", 150, True, "us", _p50("remote_fault_beyond_link_us", seen_by="the daemon", rest_us=100)),
    Reach(
        "the same, 3 ms after the last one, with processors asleep", 150, True, "us", _p50("remote_fault_beyond_link_us", seen_by="the daemon", rest_us=3000)
    ),
    Reach("sent for a clone on another host that fills 1 GiB of new pages, first fork", 40, True, "MB", _refill("never used", "first")),
    Reach("the same, later forks", 40, True, "MB", _refill("never used", "later")),
    Reach("the same, of memory that was used and given back", 40, True, "MB", _refill("used and given back", "later")),
    Reach("suspend, copy to each, resume, over a fork by swarm, to the last answer", 10, False, "", _over_fork("copying_answered_ms", "to each", "swarm")),
    Reach("suspend, copy once, resume, over a fork by multicast", 10, False, "", _over_fork("copying_answered_ms", "once", "multicast")),
    Reach("bytes sent, copied to each, over a fork by swarm", 20, False, "", _over_fork("copying_sent_MiB", "to each", "swarm")),
    Reach("bytes sent, copied to each, over a fork by multicast", 20, False, "", _over_fork("copying_sent_MiB", "to each", "multicast")),
    Reach("bytes sent, copied once, over a fork by multicast", 20, False, "", _over_fork("copying_sent_MiB", "once", "multicast")),
    Reach(
        "boot and work, image streamed at 1 Gbit/s with its profile, over a file",
        1.05, True, "", _ratio(_p50("streamed_ms", image="streamed, with its profile", links="1gbit"), _p50("streamed_ms", image="a file", links="1gbit")),
    ),
    Reach(
        "the same at 100 Mbit/s",
        1.5, True, "", _ratio(_p50("streamed_ms", image="streamed, with its profile", links="100mbit"), _p50("streamed_ms", image="a file", links="100mbit")),
    ),
    Reach("VMs that fork at once, over ready-made VMs, in 40 s", 5, True, "s", _storm),
    Reach(
        "page already touched by a sibling, over a local fault",
        0.02, True, "", _ratio(_p50("fault_us", page="touched by a sibling"), _p50("fault_us", page="fetched")),
    ),
]
