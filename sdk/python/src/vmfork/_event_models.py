"""What happens on a host, as frozen dataclasses; see :mod:`._models`."""

from __future__ import annotations

from dataclasses import dataclass

from ._models import VmState, _Word

__all__ = [
    "Event",
    "EventClone",
    "EventHost",
    "EventKind",
    "EventSnapshot",
    "EventVm",
    "VmEnd",
]


class EventKind(_Word):
    """What happened. ``GAP``: events were lost."""

    VM_STARTED = "vm.started"
    VM_FORKED = "vm.forked"
    VM_READY = "vm.ready"
    VM_PAUSED = "vm.paused"
    VM_RESUMED = "vm.resumed"
    VM_ENDED = "vm.ended"
    SNAPSHOT_STORED = "snapshot.stored"
    SNAPSHOT_REMOVED = "snapshot.removed"
    HOST_JOINED = "host.joined"
    HOST_SILENT = "host.silent"
    HOST_RETURNED = "host.returned"
    HOST_GONE = "host.gone"
    GAP = "gap"
    UNKNOWN = "unknown"


class VmEnd(_Word):
    """How a VM ended."""

    EXITED = "exited"
    KILLED = "killed"
    EXPIRED = "expired"
    QEMU_DIED = "qemu_died"
    PAGE_LOST = "page_lost"
    GUEST = "guest"
    OUT_OF_MEMORY = "out_of_memory"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventVm:
    """A VM in an event."""

    id: str
    name: str
    family: str
    """The id of the VM at the root of the family."""
    parent: str | None = None
    """The id of the VM that this one was forked from."""
    snapshot: str | None = None
    """The name of the stored snapshot that it, or the root of its family, was started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventClone:
    """A clone in a fork's event."""

    id: str
    name: str
    host: str | None = None
    """The host that it was started on, in a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSnapshot:
    """A stored snapshot in an event."""

    name: str
    vm: EventVm | None = None
    """``snapshot.stored``: the VM that it was taken of, unless it was imported or pulled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHost:
    """A host in an event."""

    id: str
    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on a host. Which fields it has follows from its kind."""

    cursor: str
    """The place after it: ``client.events(after=event.cursor)`` continues there."""
    time_unix_ms: int
    kind: EventKind
    vm: EventVm | None = None
    """``vm.*``: the VM, of a fork the parent."""
    snapshot: EventSnapshot | None = None
    """``snapshot.*``"""
    host: EventHost | None = None
    """``host.*``"""
    requested: int | None = None
    """``vm.forked``: how many clones were asked for."""
    granted: int | None = None
    """``vm.forked``: how many were ready."""
    pause_ms: float | None = None
    """``vm.forked``: how long the parent stood still."""
    clones: tuple[EventClone, ...] = ()
    """``vm.forked``: those that were ready."""
    ready_ms: float | None = None
    """``vm.ready``: since its start."""
    state: VmState | None = None
    """``vm.ended``: ``EXITED`` or ``FAILED``."""
    reason: str | None = None
    """``vm.ended``: why, in words."""
    end: VmEnd | None = None
    """``vm.ended``: why, as a word."""
    cause: str | None = None
    """``host.gone``: ``silent`` or ``left``. ``gap``: ``overflow`` or ``restarted``."""
    lost: int | None = None
    """``gap``: how many events of this daemon were lost."""
