"""What the daemon says of volumes, as frozen dataclasses; see :mod:`._models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._models import _Word

__all__ = ["OnFork", "VolumeInfo"]


class OnFork(_Word):
    """What a fork does with a volume that the parent has."""

    FORK = "fork"
    """The parent keeps it; each clone gets a disk of its own with the same content."""
    READ_ONLY = "read_only"
    """No VM can write to it. Several may have it; clones share it with their parent."""
    REFUSE = "refuse"
    """A VM that has it is not forked."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeInfo:
    """A disk that outlives the VMs that have it."""

    name: str
    disk_id: str
    size_bytes: int
    data_bytes: int = 0
    """What it holds that is not zeros."""
    on_fork: OnFork
    vms: tuple[str, ...] = ()
    """The VMs that have it: one at most, unless it is read-only."""
    created_unix_ms: int
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    reason: str | None = None
    """Why no VM can have it."""
