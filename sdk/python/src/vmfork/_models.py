"""What the daemon says, as frozen dataclasses.

Names and units are those of the REST API: ``_bytes``, ``_ms``, ``_unix_ms``, ``_pages`` (4 KiB).
Fields that a newer daemon adds are ignored; one that is missing without a default is a
``ProtocolError`` (see :mod:`._decode`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Accel",
    "BytesBetweenHosts",
    "BytesBySource",
    "CacheInfo",
    "Check",
    "CheckStatus",
    "CloneInfo",
    "Disk",
    "DoctorReport",
    "ErrorBody",
    "ExecResult",
    "FaultCounts",
    "ForkReply",
    "ForkStages",
    "HostInfo",
    "Image",
    "ImageProfile",
    "LostVm",
    "MemoryInfo",
    "PoolInfo",
    "Root",
    "StoreFaults",
    "TreeNode",
    "Ttl",
    "TtlReply",
    "Version",
    "VmDetail",
    "VmInfo",
    "VmState",
    "WorkloadProfile",
]


class _Word(enum.StrEnum):
    """A closed set of words that may grow: one from the future becomes ``UNKNOWN``."""

    @classmethod
    def _missing_(cls, value: object) -> _Word | None:
        return cls("unknown") if isinstance(value, str) and value != "unknown" else None


class Accel(_Word):
    """How the guest's instructions are executed."""

    KVM = "kvm"
    TCG = "tcg"
    UNKNOWN = "unknown"


class VmState(_Word):
    """Where a VM is in its life; ``EXITED`` and ``FAILED`` are its ends."""

    STARTING = "starting"
    RUNNING = "running"
    FROZEN = "frozen"
    PAUSED = "paused"
    STALLED = "stalled"
    """A disk could not answer the guest. It goes on by itself once the disk does."""
    EXITED = "exited"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def has_ended(self) -> bool:
        """Whether there is no QEMU any more."""
        return self in (VmState.EXITED, VmState.FAILED)


class CheckStatus(_Word):
    """How one check of ``doctor`` went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An error as it crosses the wire."""

    code: str
    message: str
    cause: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VmInfo:
    """One VM, as lists show it."""

    id: str
    name: str
    image: str
    family: str
    """The id of the VM at the root of the family."""
    parent: str | None = None
    """The name of the VM that this one was forked from."""
    parent_id: str | None = None
    """Its id."""
    host: str | None = None
    """The host that it runs on, in a cluster."""
    snapshot: str | None = None
    """The name of the stored snapshot that it, or the root of its family, was started from."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    vmid: int = 0
    """0 in a VM that booted, 1 to m in clones and in VMs started together from a snapshot."""
    state: VmState
    reason: str | None = None
    """Why it failed, or how it ended."""
    accel: Accel
    cpus: int
    memory_mib: int
    created_unix_ms: int
    ready_ms: float | None = None
    """From the request until the agent had answered."""
    pid: int | None = None
    """QEMU's process id, while there is one."""
    clones: int = 0
    private_bytes: int = 0
    shared_bytes: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounts:
    """Faults of a VM that reached user space, by how they were answered."""

    zero: int = 0
    fetch: int = 0
    present: int = 0
    mapped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFaults:
    """Faults, of all VMs that share an image, on pages that are in a store."""

    predicted: int = 0
    """The page was there, or on its way, because it was fetched ahead."""
    remote: int = 0
    """It had to be fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesBySource:
    """Bytes brought into an image's cache, by where they were."""

    frozen: int = 0
    image: int = 0
    peer: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesBetweenHosts:
    """Bytes of pages that went between the host and others, as they are in memory."""

    demand: int = 0
    """Came since a VM waited for them, with neighbours."""
    ahead: int = 0
    """Came before anyone asked."""
    given: int = 0
    """Were given to other hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """What one image's cache holds on the host, and who needs it."""

    image: str
    resident_bytes: int = 0
    pages: int | None = None
    """Pages of the asked VM's image that this image changed last; ``None`` while that is being found out."""
    vms: tuple[str, ...] = ()
    """Names of the live VMs that may read from it: with the last of them it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Where a VM's guest memory is."""

    pages: int
    private_pages: int = 0
    zero_pages: int = 0
    cache_present_pages: int = 0
    fetched_bytes: int = 0
    """Brought into the image's cache since the freeze, by demand or drain."""
    demand_bytes: int = 0
    """The same on demand alone, with neighbours."""
    undrained_pages: int = 0
    missing_pages: int = 0
    """In no cache here yet: in a store, on another host, or not drained."""
    image: str | None = None
    image_views: int = 0
    faults: FaultCounts = FaultCounts()
    store_faults: StoreFaults = StoreFaults()
    """Of the VM's image and those that it descends from."""
    prefetched_bytes: int = 0
    """Bytes of those that came before anyone asked."""
    source: BytesBySource = BytesBySource()
    hosts: BytesBetweenHosts = BytesBetweenHosts()
    """Of the VM's image and those that it descends from."""
    caches: tuple[CacheInfo, ...] = ()
    """Those that the bytes of the VM's image are in: its own, and those of its ancestors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttl:
    """When a VM ends by itself."""

    expires_unix_ms: int
    left_ms: int
    """Time left until then, by the clock of its host that never jumps."""
    inherited_from: str | None = None
    """The id of the ancestor whose bound it inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtlReply:
    """The bound of a VM after a change; ``ttl`` is ``None`` if it does not end by itself."""

    vm: str
    ttl: Ttl | None = None


class Root(_Word):
    """What takes the writes to a VM's root file system."""

    OVERLAY = "overlay"
    """A disk named ``root``, over the image's root, which is read-only and shared."""
    TMPFS = "tmpfs"
    """The same with the guest's memory: quick, and bounded by it."""
    DISK = "disk"
    """The root itself: a disk named ``root``, which begins with the image's."""
    UNKNOWN = "unknown"


class RootDevice(_Word):
    """How a guest reads the root file system of its image."""

    PMEM = "pmem"
    """Persistent memory, by DAX: without a page cache in the guest. The VMs of a host share one
    copy."""
    BLOCK = "block"
    """A block device, through the guest's page cache."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskActivity:
    """What a VM has asked of a disk since it has it."""

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    flushes: int = 0
    """Of a volume. QEMU carries out those of other disks: there is nothing to wait for."""
    trims: int = 0
    """Trims and writes of zeros."""
    errors: int = 0
    """Requests that failed, each time that they were tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk of a VM."""

    name: str
    size_bytes: int
    written_bytes: int
    """What was written since the VM's start or its last fork."""
    device: str
    """The guest's device: ``/dev/vdb`` is the first one beside the root."""
    volume: str | None = None
    """The volume that it is."""
    read_only: bool = False
    empty: bool = False
    """A volume can be attached to it."""
    activity: DiskActivity = DiskActivity()
    """What the VM has asked of it. All 0 once the VM has ended."""
    stalled_ms: int | None = None
    """How long it has kept the VM from running."""


class DiskState(_Word):
    """What a disk of a host is good for."""

    IN_USE = "in_use"
    LEFT = "left"
    """Its VM ended with an earlier daemon: it can be exported and removed."""
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDisk:
    """A disk on a host: of a VM, or left by one."""

    id: str
    name: str
    vm: str
    state: DiskState
    size_bytes: int
    written_bytes: int
    """What was written to it and still takes space. It may lie on what was written to others."""
    reason: str | None = None
    """Why it is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmDetail(VmInfo):
    """One VM with everything that the daemon knows about it."""

    memory: MemoryInfo
    qemu_version: str
    agent_version: str | None = None
    guest_kernel: str | None = None
    clone_names: tuple[str, ...] = ()
    accel_reason: str = ""
    root_device: RootDevice | None = None
    """How the guest reads the root of its image; ``None`` without such a root."""
    root_device_reason: str = ""
    user: str = ""
    """Whose quota it counts against: a user's number, or ``token``."""
    job: str | None = None
    """The job of the site's scheduler that holds its place."""
    last_fork: ForkReply | None = None
    """The last fork of this VM that came to its end, also one that its guest asked for."""
    ttl: Ttl | None = None
    """When it ends by itself; ``None``: never."""
    disks: tuple[Disk, ...] = ()
    """Its disks beside the root, in the order of the guest's devices."""
    keeper_pid: int | None = None
    """The process that keeps frozen pages beside QEMU, while there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A VM and what was forked from it."""

    vm: VmInfo
    children: tuple[TreeNode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkStages:
    """Where the time of a fork went, each in ms; stop to cont make up the pause."""

    prepare_ms: float = 0.0
    quiesce_ms: float = 0.0
    stop_ms: float = 0.0
    disks_ms: float = 0.0
    freeze_ms: float = 0.0
    state_ms: float = 0.0
    cont_ms: float = 0.0
    derive_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneInfo:
    """What became of one clone of a fork, or of one VM of a start."""

    vmid: int
    name: str
    id: str | None = None
    state: VmState
    running_ms: float | None = None
    """From the request until this clone's vCPUs ran."""
    ready_ms: float | None = None
    """From the request until this clone's agent had confirmed its identity."""
    pooled: bool = False
    host: str | None = None
    """The host that it was started on, in a cluster."""
    error: ErrorBody | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReply:
    """The daemon's answer to a fork."""

    parent: str
    requested: int
    granted: int
    pause_ms: float
    total_ms: float
    """From the request until the last clone was ready."""
    began_unix_ms: int = 0
    """When the request came."""
    stages: ForkStages = ForkStages()
    clones: tuple[CloneInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Who answers."""

    vmforkd: str
    api: str
    qemu: str | None = None
    kernel: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the host."""

    name: str
    status: CheckStatus
    detail: str = ""
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All checks of the host."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed (warnings count as ok)."""
        return all(check.status is not CheckStatus.FAILED for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """QEMUs that were started in advance."""

    target: int = 0
    waiting: int = 0
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostVm:
    """A VM that was there when an earlier daemon ended without stopping it."""

    name: str
    id: str
    image: str
    parent: str | None = None
    created_unix_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Memory, pool and losses of the host."""

    memory_total_bytes: int
    memory_available_bytes: int
    memory_admissible_bytes: int
    vcpus_max: int = 0
    vcpus_admissible: int = 0
    cache_bytes: int = 0
    cpus: int
    accel_default: Accel
    accel_reason: str = ""
    vms: int = 0
    snapshots: int = 0
    pool: PoolInfo = PoolInfo()
    lost: tuple[LostVm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A guest image in the store."""

    name: str
    size_bytes: int
    created_unix_ms: int
    origin: str = ""
    kernel: str = ""
    agent: bool = True
    vms: int = 0
    remote: str | None = None
    """Where it was pulled from, while its root depends on that."""
    seeded: bool = False
    """Whether other hosts of the cluster can pull it from this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """What VMs of one workload read of an image."""

    workload: str
    runs: int
    """How many runs it was learnt from."""
    read_bytes: int = 0
    """What at least half of the runs read."""
    read_bytes_any: int = 0
    """What any run read that is not forgotten."""
    half_ms: float = 0.0
    """When half of ``read_bytes`` was read on average, in ms after the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProfile:
    """What is known of how VMs use a guest image."""

    workloads: tuple[WorkloadProfile, ...] = ()
    """A VM's label ``workload`` says which is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a program in a guest ended, and what it printed."""

    exit_code: int
    """128 + n where signal n ended it."""
    signal: int | None = None
    timed_out: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Whether a stream was longer than 16 MiB and cut."""
    duration_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended with 0, in time."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout_text(self) -> str:
        """``stdout`` as UTF-8; bytes that are not become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """``stderr`` as UTF-8; bytes that are not become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")
