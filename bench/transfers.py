"""Requests for pages against pages that were sent, by form: what is asked for in lockstep, asked
again, lost.

As the daemons count them between two moments; that of the VM's host is the first. Pages that come
in an answer were asked for: over connections (TCP) nothing is lost, and what fails there is asked
of another host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.metrics import Between

from . import world as w

PAGE_BYTES = 4096


def add(world: w.World, name: str, found: Sequence[Between], **labels: object) -> None:
    """Series of this name, of requests and pages, with these labels; `by` is the form."""
    parents, others = found[:1], found[1:]

    def total(of: Iterable[Between], figure: str, **has: str) -> float:
        return sum(one.value(f"vmfork_{figure}_total", **has) for one in of)

    def answered(of: Iterable[Between], side: str, figure: str = "pages") -> float:
        return sum(total(of, f"transfer_{figure}", side=side, role=role) for role in ("demand", "ahead"))

    def group(side: str, what: str, figure: str = "pages") -> float:
        return total(found, f"multicast_{figure}", side=side, what=what)

    is_multicast = labels["by"] == "multicast"
    to_all = total(parents, "transfer_pages", side="served", role="all")
    heard = group("asked", "heard")
    kept = total(others, "cache_filled_bytes", source="peer") / PAGE_BYTES
    pages = {
        "asked for": answered(others, "asked") + group("asked", "requested"),
        "sent by the parent's host": answered(parents, "served") + to_all,
        "sent by others": answered(others, "served"),
        "came": answered(others, "asked") + heard,
        "came and were there already": answered(others, "asked") + heard - kept,
    }
    requests = {
        "answered": answered(others, "asked", "requests"),
        "sent on to another host": total(others, "transfer_events", event="redirected"),
        "answered by another host than was asked": total(others, "transfer_events", event="resourced"),
        "failed": total(others, "transfer_events", event="failed"),
    }
    if is_multicast:
        pages |= {
            "sent once to all": to_all,
            "dropped, asked for in lockstep": group("served", "lockstep"),
            "dropped, too many waited": group("served", "refused"),
            # To hosts that had missed it; and to those whose clones of earlier forks had it, and
            # are gone.
            "sent not for the first time": group("served", "resent"),
            "asked for again by receivers": group("asked", "repeated"),
            "of these lost, sent again": group("served", "lost"),
            "lost for want of room": group("asked", "no_room"),
            "given up": group("asked", "given_up"),
        }
        requests |= {
            "of the group": group("served", "requests", "events"),
            "of the group, in vain": group("asked", "in_vain", "events"),
        }
        world.figures.series(f"{name}_slowed_down_times", **labels).add(group("served", "rate_cuts", "events"))
    for unit, counts in (("pages", pages), ("requests", requests)):
        for what, count in counts.items():
            world.figures.series(f"{name}_{unit}", what=what, **labels).add(count)
