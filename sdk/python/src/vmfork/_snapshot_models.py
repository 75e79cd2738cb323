"""What the daemon says of stored snapshots, as frozen dataclasses; see :mod:`._models`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._models import Accel, CloneInfo, ErrorBody, _Word

__all__ = [
    "Compression",
    "ImageRole",
    "Prefetch",
    "ProfileCluster",
    "ProfileInfo",
    "Progress",
    "RemovedSnapshots",
    "SnapshotDetail",
    "SnapshotImage",
    "SnapshotInfo",
    "SnapshotState",
    "StartReply",
    "TransferReply",
    "VerifyReply",
]


class Compression(_Word):
    """How the pages of a snapshot are stored."""

    NONE = "none"
    ZSTD = "zstd"
    UNKNOWN = "unknown"


class ImageRole(_Word):
    """What an image of a snapshot holds."""

    MEMORY = "memory"
    """The guest's memory."""
    DISK = "disk"
    """The content of a disk."""
    UNKNOWN = "unknown"


class Prefetch(_Word):
    """Which pages come before a guest asks for them."""

    NONE = "none"
    DEMAND = "demand"
    """What the faults so far predict."""
    WORKING_SET = "working_set"
    """What earlier VMs of the snapshot touched first."""
    ALL = "all"
    """Both."""
    UNKNOWN = "unknown"


class SnapshotState(_Word):
    """What a snapshot is at."""

    WRITING = "writing"
    """Its pages are being written."""
    READY = "ready"
    PULLING = "pulling"
    """It can be started; its pages are still coming from where it was pulled from."""
    FAILED = "failed"
    """It could not be written, or what is stored is damaged; ``reason`` says why."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far something is that takes a while."""

    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """One stored snapshot, as lists show it."""

    name: str
    id: str | None = None
    """Never used again; ``None`` while it is being written."""
    state: SnapshotState
    reason: str | None = None
    """Why it failed, or why its pull does not go on."""
    created_unix_ms: int
    image: str = ""
    """The guest image that its VM booted from."""
    memory_mib: int = 0
    disk_only: bool = False
    """It has no memory: its VMs boot."""
    cpus: int = 0
    accel: Accel
    base: str | None = None
    """The snapshot that it differs from, if it is a delta."""
    own_bytes: int = 0
    """Memory and disks whose bytes are stored with it; the rest is its base's, or zero."""
    disk_bytes: int = 0
    """Size of its disks together."""
    stored_bytes: int = 0
    """What that takes in the store, compressed, without what others have stored already."""
    shared_bytes: int = 0
    """What it has in common with others in the store, compressed."""
    progress: Progress = Progress()
    """How far writing or pulling it is."""
    vms: int = 0
    """Live VMs that depend on it."""
    remote: str | None = None
    """Where it was pulled from, while it depends on that."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """VMs that are started from it inherit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCluster:
    """Pages that are touched together."""

    first_page: int
    pages: int
    frequency: float
    """In how many of the runs, 0 to 1, recent ones counting more."""
    first_access_ms: float
    """When it is touched first, on average, after the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileInfo:
    """What is known of the pages that VMs of a snapshot touch first."""

    runs: int = 0
    """How many runs it was learnt from."""
    working_set_pages: int = 0
    """Pages that are loaded before anyone asks."""
    working_set_bytes: int = 0
    """What they take in the store, compressed."""
    recording: bool = False
    """Whether a run is being recorded now."""
    clusters: tuple[ProfileCluster, ...] = ()
    """The most urgent runs of pages, the first touched first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotImage:
    """One image of a stored snapshot, with its own page table, base and working set."""

    role: ImageRole
    device: str | None = None
    """Of a disk, the name of the device."""
    bytes: int
    """Its size."""
    page_bytes: int = 4096
    own_pages: int = 0
    """Pages whose bytes are stored with it."""
    zero_pages: int = 0
    """Pages of zeros; of a delta, those that became zero since the base."""
    stored_bytes: int = 0
    """What was written to the store for it, compressed."""
    shared_bytes: int = 0
    """What it has in common with others in the store, compressed."""
    base: str | None = None
    """The snapshot whose image it is a delta on."""
    root: str = ""
    """Hash of its page table, which names each chunk by hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDetail(SnapshotInfo):
    """One stored snapshot with everything that the daemon knows about it."""

    qemu_version: str = ""
    """What it was taken on, with ``machine`` and ``cpu``; a host that differs refuses it."""
    machine: str = ""
    cpu: str = ""
    guest_kernel: str | None = None
    pause_ms: float = 0.0
    """How long the VM's vCPUs stood still for it."""
    compression: Compression = Compression.ZSTD
    chunk_pages: int = 0
    own_pages: int = 0
    """Of all its images."""
    zero_pages: int = 0
    """Of all its images."""
    images: tuple[SnapshotImage, ...] = ()
    """What it consists of, the memory first; empty while it is being written."""
    dependants: tuple[str, ...] = ()
    """Snapshots that are deltas of this one."""
    vm_names: tuple[str, ...] = ()
    """Names of the live VMs that depend on it."""
    profile: ProfileInfo = ProfileInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReply:
    """The daemon's answer to the start of a snapshot."""

    snapshot: str
    requested: int
    granted: int
    open_ms: float
    """From the request until descriptor, page table and device state were read."""
    total_ms: float
    """From the request until the last VM was ready."""
    began_unix_ms: int = 0
    vms: tuple[CloneInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedSnapshots:
    """What has gone from the store."""

    names: tuple[str, ...]
    """The snapshot, and those that depended on it."""
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReply:
    """What reading all of a snapshot, and of what it depends on, has shown."""

    snapshot: str
    chunks: int = 0
    chunks_elsewhere: int = 0
    """Those that are still where the snapshot is pulled from, and were not read."""
    read_bytes: int = 0
    damage: tuple[ErrorBody, ...] = ()
    """What is damaged, and where."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged of what is here; see ``chunks_elsewhere``."""
        return not self.damage


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReply:
    """What was copied to another store."""

    names: tuple[str, ...] = ()
    """The snapshots that were copied, without those that were there already."""
    sent_bytes: int = 0
    total_ms: float = 0.0
