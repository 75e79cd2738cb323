//! What the REST layer may ask of the host: the seam between it and everything else.
//!
//! Promises nothing by itself: a host implements [`Control`], and REST turns requests into its
//! calls. Neither knows the other.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use vmfork_api::{
    AttachRequest, ClusterHostRequest, ClusterInfo, ClusterInitRequest, ClusterJoinRequest,
    ClusterToken, ClusterTokenRequest, DetachRequest, Disk, DoctorReport, ErrorBody, ExecRequest,
    ForkReply, ForkRequest, HostDisk, HostInfo, Image, ImageProfile, KillRequest, OnForkRequest,
    ProfileInfo, RemovedSnapshots, ResizeRequest, RunRequest, Snapshot, SnapshotDetail,
    SnapshotRequest, StartReply, StartRequest, TransferReply, TransferRequest, TreeNode, TtlReply,
    TtlRequest, VerifyReply, Version, Vm, VmDetail, Volume, VolumeRequest,
};

mod events;
mod user;

pub use events::{AheadError, Events, Told};
pub use user::User;
pub use vmfork_events::{Cursor, CursorError, Limits};

/// An answer to come.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, ErrorBody>>;

/// The operations of one host. `vm` is a name or an id. Dropping an answer's future gives the
/// operation up and leaves nothing half-done.
pub trait Control: SnapshotControl + DiskControl + VolumeControl {
    /// Whether a VM of this name or id is on this host, running or ended.
    fn has_vm(&self, vm: &str) -> bool;
    fn version(&self) -> Answer<'_, Version>;
    fn doctor(&self) -> Answer<'_, DoctorReport>;
    fn host(&self) -> Answer<'_, HostInfo>;
    fn images(&self) -> Answer<'_, Vec<Image>>;
    fn remove_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
    fn push_image<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply>;
    fn pull_image<'a>(&'a self, name: &'a str, request: TransferRequest) -> Answer<'a, Image>;
    /// Let other hosts of the cluster pull an image from this one.
    fn seed_image<'a>(&'a self, name: &'a str) -> Answer<'a, Image>;
    /// End that.
    fn unseed_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
    /// What is known of how VMs use an image.
    fn image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ImageProfile>;
    /// Forget that.
    fn reset_image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
    /// What an image's root holds, for one client, who speaks NBD on the socket. `writable`: what
    /// it writes lasts until it closes that. `user` as in [`Control::run`].
    fn serve_image<'a>(
        &'a self,
        user: User,
        name: &'a str,
        writable: bool,
    ) -> Answer<'a, UnixStream>;
    /// `all`: the ended ones too.
    fn vms(&self, all: bool) -> Answer<'_, Vec<Vm>>;
    fn tree(&self) -> Answer<'_, Vec<TreeNode>>;
    /// `user`: who asks, and whose family begins.
    fn run(&self, user: User, request: RunRequest) -> Answer<'_, Vm>;
    fn inspect<'a>(&'a self, vm: &'a str) -> Answer<'a, VmDetail>;
    /// Forget an ended VM; `force` ends it first.
    fn remove<'a>(&'a self, vm: &'a str, force: bool) -> Answer<'a, ()>;
    fn kill<'a>(&'a self, vm: &'a str, request: KillRequest) -> Answer<'a, Killed>;
    fn fork<'a>(&'a self, vm: &'a str, request: ForkRequest) -> Answer<'a, ForkReply>;
    /// Stop its vCPUs; one that is paused stays so.
    fn pause<'a>(&'a self, vm: &'a str) -> Answer<'a, Vm>;
    /// Let the vCPUs of a paused VM continue; one that runs goes on.
    fn resume<'a>(&'a self, vm: &'a str) -> Answer<'a, Vm>;
    /// Change when it ends by itself.
    fn set_ttl<'a>(&'a self, vm: &'a str, request: TtlRequest) -> Answer<'a, TtlReply>;
    /// Start a program. The caller applies `stdin_base64` and `timeout_ms` of the request.
    fn exec<'a>(&'a self, vm: &'a str, request: ExecRequest) -> Answer<'a, ExecSession>;
    fn read_file<'a>(&'a self, vm: &'a str, path: &'a str) -> Answer<'a, FileStream>;
    /// `content` yields the bytes; dropping its sender without an `Err` is the end of the file; an
    /// `Err` abandons the transfer and leaves the old file as it was.
    fn write_file<'a>(
        &'a self,
        vm: &'a str,
        path: &'a str,
        mode: u32,
        content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
    ) -> Answer<'a, ()>;
    /// The log so far, and what comes while `follow` and until the VM ends.
    fn logs<'a>(&'a self, vm: &'a str, follow: bool) -> Answer<'a, mpsc::Receiver<Bytes>>;
    /// Make the page engine of the image panic that a VM is a view of. For tests of what happens
    /// then.
    fn panic_engine<'a>(&'a self, vm: &'a str) -> Answer<'a, ()>;
    fn console<'a>(&'a self, vm: &'a str) -> Answer<'a, ConsoleSession>;
    /// What has happened on this host, and what will.
    fn events(&self) -> Arc<Events>;
}

/// The operations on the cluster that this host is a member of, or is to be.
pub trait ClusterControl: Send + Sync + 'static {
    fn cluster(&self) -> Answer<'_, ClusterInfo>;
    fn init_cluster(&self, request: ClusterInitRequest) -> Answer<'_, ClusterInfo>;
    fn join_cluster(&self, request: ClusterJoinRequest) -> Answer<'_, ClusterInfo>;
    fn cluster_token(&self, request: ClusterTokenRequest) -> Answer<'_, ClusterToken>;
    fn leave_cluster(&self, request: ClusterHostRequest) -> Answer<'_, ClusterInfo>;
    /// `drain`: give the host nothing new; else take it back into use.
    fn drain_cluster_host(
        &self,
        request: ClusterHostRequest,
        drain: bool,
    ) -> Answer<'_, ClusterInfo>;
}

/// Bytes that come piece by piece. Without an `Err` the sender's end is the end of the bytes; after
/// an `Err` they are not whole.
pub type ByteStream = mpsc::Receiver<Result<Bytes, ErrorBody>>;

/// The operations on the disks of a host, as [`Control`]. `id` is a disk's.
pub trait DiskControl: Send + Sync + 'static {
    /// Those of VMs, and those that VMs of earlier daemons left.
    fn disks(&self) -> Answer<'_, Vec<HostDisk>>;
    fn inspect_disk<'a>(&'a self, id: &'a str) -> Answer<'a, HostDisk>;
    /// What a disk holds now: one that is in use, as after a power cut.
    fn export_disk<'a>(&'a self, id: &'a str) -> Answer<'a, DiskStream>;
    /// Remove one that is not in use.
    fn remove_disk<'a>(&'a self, id: &'a str) -> Answer<'a, ()>;
    /// Make one larger that a running VM has, or a volume.
    fn resize_disk<'a>(&'a self, id: &'a str, request: ResizeRequest) -> Answer<'a, HostDisk>;
}

/// All bytes of a disk.
#[derive(Debug)]
pub struct DiskStream {
    pub size_bytes: u64,
    pub content: ByteStream,
}

/// The operations on stored snapshots, as [`Control`]. `name` is a snapshot's. What is created or
/// pulled without waiting goes on after the answer; removing it gives it up.
pub trait SnapshotControl: Send + Sync + 'static {
    fn snapshots(&self) -> Answer<'_, Vec<Snapshot>>;
    fn create_snapshot(&self, request: SnapshotRequest) -> Answer<'_, Snapshot>;
    fn inspect_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, SnapshotDetail>;
    /// `cascade`: its deltas, and theirs, too.
    fn remove_snapshot<'a>(&'a self, name: &'a str, cascade: bool) -> Answer<'a, RemovedSnapshots>;
    /// `user` as in [`Control::run`].
    fn start_snapshot<'a>(
        &'a self,
        user: User,
        name: &'a str,
        request: StartRequest,
    ) -> Answer<'a, StartReply>;
    fn verify_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, VerifyReply>;
    fn flatten_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, Snapshot>;
    fn export_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, ByteStream>;
    /// `name`: what to call the snapshot that the stream is about, if not as before.
    fn import_snapshot(
        &self,
        name: Option<String>,
        content: ByteStream,
    ) -> Answer<'_, Vec<Snapshot>>;
    fn push_snapshot<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply>;
    fn pull_snapshot<'a>(&'a self, name: &'a str, request: TransferRequest)
    -> Answer<'a, Snapshot>;
    fn snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ProfileInfo>;
    fn reset_snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
}

/// The operations on volumes, as [`Control`]. `name` is a volume's.
pub trait VolumeControl: Send + Sync + 'static {
    fn volumes(&self) -> Answer<'_, Vec<Volume>>;
    fn create_volume(&self, request: VolumeRequest) -> Answer<'_, Volume>;
    fn inspect_volume<'a>(&'a self, name: &'a str) -> Answer<'a, Volume>;
    /// With all that it holds. No VM may have it.
    fn remove_volume<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
    /// What forks do with it. No VM may have it.
    fn set_on_fork<'a>(&'a self, name: &'a str, request: OnForkRequest) -> Answer<'a, Volume>;
    /// A running VM gets it, in the place of an empty disk. → that disk.
    fn attach_volume<'a>(&'a self, name: &'a str, request: AttachRequest) -> Answer<'a, Disk>;
    /// A running VM gives it back. What was written is on the medium then.
    fn detach_volume<'a>(&'a self, name: &'a str, request: DetachRequest) -> Answer<'a, Volume>;
    /// Make it larger, whether a running VM has it or none.
    fn resize_volume<'a>(&'a self, name: &'a str, request: ResizeRequest) -> Answer<'a, Volume>;
}

/// A VM that was ended.
#[derive(Debug)]
pub struct Killed {
    pub vm: Vm,
    /// The hosts that do not answer: what is there of its family goes on.
    pub missing: Vec<String>,
}

/// A program that runs in a guest. Dropping `input` hangs it up (SIGHUP).
#[derive(Debug)]
pub struct ExecSession {
    pub pid: u32,
    pub input: mpsc::Sender<ExecInput>,
    /// Ends after `Exited` or `Error`.
    pub output: mpsc::Receiver<ExecOutput>,
}

#[derive(Debug)]
pub enum ExecInput {
    Stdin(Bytes),
    StdinEof,
    Signal(i32),
    Resize { rows: u16, cols: u16 },
}

#[derive(Debug)]
pub enum ExecOutput {
    Stdout(Bytes),
    Stderr(Bytes),
    Exited { exit_code: i32, signal: Option<i32> },
    Error(ErrorBody),
}

/// A file on its way out of a guest.
#[derive(Debug)]
pub struct FileStream {
    pub mode: u32,
    pub size_bytes: u64,
    /// Ends at the end of the file, or after an `Err`.
    pub content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
}

/// The serial console. Several may look at one; all see the output, each may type.
#[derive(Debug)]
pub struct ConsoleSession {
    pub input: mpsc::Sender<Bytes>,
    pub output: mpsc::Receiver<Bytes>,
}
