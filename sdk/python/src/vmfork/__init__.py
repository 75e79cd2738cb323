"""Fork running virtual machines: the client of vmfork's daemon.

::

    import vmfork

    with vmfork.Client() as client, client.run("debian", name="web") as vm:
        vm.exec("echo loaded > /tmp/data", check=True)
        with vm.fork(4) as clones:
            for clone in clones:
                print(clone.vmid, clone.exec("cat /tmp/data").stdout_text)

:class:`AsyncClient` is the same for asyncio. What can go wrong is a tree under
:class:`VmforkError`.
"""

from ._async_client import AsyncClient, AsyncForkResult, AsyncStartResult, AsyncVM
from ._async_snapshots import AsyncSnapshots
from ._async_volumes import AsyncVolumes
from ._client import VM, Client, ForkResult, StartResult
from ._config import Timeout
from ._errors import (
    ApiError,
    BadRequest,
    Conflict,
    ConnectionFailed,
    ExecFailed,
    GuestError,
    HostError,
    InternalError,
    NoCapacity,
    NotFound,
    PageLost,
    ProtocolError,
    QemuError,
    TimeoutExceeded,
    Unauthorized,
    VmforkError,
)
from ._event_models import (
    Event,
    EventClone,
    EventHost,
    EventKind,
    EventSnapshot,
    EventVm,
    VmEnd,
)
from ._models import (
    Accel,
    BytesBetweenHosts,
    BytesBySource,
    CacheInfo,
    Check,
    CheckStatus,
    CloneInfo,
    Disk,
    DiskActivity,
    DiskState,
    DoctorReport,
    ErrorBody,
    ExecResult,
    FaultCounts,
    ForkReply,
    ForkStages,
    HostDisk,
    HostInfo,
    Image,
    ImageProfile,
    LostVm,
    MemoryInfo,
    PoolInfo,
    Root,
    RootDevice,
    StoreFaults,
    TreeNode,
    Ttl,
    TtlReply,
    Version,
    VmDetail,
    VmInfo,
    VmState,
    WorkloadProfile,
)
from ._new_disk import NewDisk
from ._snapshot_models import (
    Compression,
    ImageRole,
    Prefetch,
    ProfileCluster,
    ProfileInfo,
    Progress,
    RemovedSnapshots,
    SnapshotDetail,
    SnapshotImage,
    SnapshotInfo,
    SnapshotState,
    StartReply,
    TransferReply,
    VerifyReply,
)
from ._snapshots import Snapshots
from ._volume_models import OnFork, VolumeInfo
from ._volumes import Volumes
from ._warnings import HostsMissing

__version__ = "0.1.0"

__all__ = [
    "VM",
    "Accel",
    "ApiError",
    "AsyncClient",
    "AsyncForkResult",
    "AsyncSnapshots",
    "AsyncStartResult",
    "AsyncVM",
    "AsyncVolumes",
    "BadRequest",
    "BytesBetweenHosts",
    "BytesBySource",
    "CacheInfo",
    "Check",
    "CheckStatus",
    "Client",
    "CloneInfo",
    "Compression",
    "Conflict",
    "ConnectionFailed",
    "Disk",
    "DiskActivity",
    "DiskState",
    "DoctorReport",
    "ErrorBody",
    "Event",
    "EventClone",
    "EventHost",
    "EventKind",
    "EventSnapshot",
    "EventVm",
    "ExecFailed",
    "ExecResult",
    "FaultCounts",
    "ForkReply",
    "ForkResult",
    "ForkStages",
    "GuestError",
    "HostDisk",
    "HostError",
    "HostInfo",
    "HostsMissing",
    "Image",
    "ImageProfile",
    "ImageRole",
    "InternalError",
    "LostVm",
    "MemoryInfo",
    "NewDisk",
    "NoCapacity",
    "NotFound",
    "OnFork",
    "PageLost",
    "PoolInfo",
    "Prefetch",
    "ProfileCluster",
    "ProfileInfo",
    "Progress",
    "ProtocolError",
    "QemuError",
    "RemovedSnapshots",
    "Root",
    "RootDevice",
    "SnapshotDetail",
    "SnapshotImage",
    "SnapshotInfo",
    "SnapshotState",
    "Snapshots",
    "StartReply",
    "StartResult",
    "StoreFaults",
    "Timeout",
    "TimeoutExceeded",
    "TransferReply",
    "TreeNode",
    "Ttl",
    "TtlReply",
    "Unauthorized",
    "VerifyReply",
    "Version",
    "VmDetail",
    "VmEnd",
    "VmInfo",
    "VmState",
    "VmforkError",
    "VolumeInfo",
    "Volumes",
    "WorkloadProfile",
    "__version__",
]
