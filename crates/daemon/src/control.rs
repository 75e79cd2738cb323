//! What the REST layer may ask of the host: the seam between `http` and everything else.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use vmfork_api::{
    DoctorReport, ErrorBody, ExecRequest, ForkReply, ForkRequest, HostInfo, Image, KillRequest,
    RunRequest, TreeNode, Version, Vm, VmDetail,
};

/// An answer to come.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, ErrorBody>>;

/// The operations of one host. `vm` is a name or an id. Dropping an answer's future gives the operation
/// up and leaves nothing half-done.
pub trait Control: Send + Sync + 'static {
    fn version(&self) -> Answer<'_, Version>;
    fn doctor(&self) -> Answer<'_, DoctorReport>;
    fn host(&self) -> Answer<'_, HostInfo>;
    fn images(&self) -> Answer<'_, Vec<Image>>;
    fn remove_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()>;
    /// `all`: the ended ones too.
    fn vms(&self, all: bool) -> Answer<'_, Vec<Vm>>;
    fn tree(&self) -> Answer<'_, Vec<TreeNode>>;
    fn run(&self, request: RunRequest) -> Answer<'_, Vm>;
    fn inspect<'a>(&'a self, vm: &'a str) -> Answer<'a, VmDetail>;
    /// Forget an ended VM; `force` ends it first.
    fn remove<'a>(&'a self, vm: &'a str, force: bool) -> Answer<'a, ()>;
    fn kill<'a>(&'a self, vm: &'a str, request: KillRequest) -> Answer<'a, Vm>;
    fn fork<'a>(&'a self, vm: &'a str, request: ForkRequest) -> Answer<'a, ForkReply>;
    /// Start a program. `stdin_base64` and `timeout_ms` of the request are the caller's affair.
    fn exec<'a>(&'a self, vm: &'a str, request: ExecRequest) -> Answer<'a, ExecSession>;
    fn read_file<'a>(&'a self, vm: &'a str, path: &'a str) -> Answer<'a, FileStream>;
    /// `content` yields the bytes; dropping its sender without an `Err` is the end of the file; an `Err`
    /// abandons the transfer and leaves the old file as it was.
    fn write_file<'a>(
        &'a self,
        vm: &'a str,
        path: &'a str,
        mode: u32,
        content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
    ) -> Answer<'a, ()>;
    /// The log so far, and what comes while `follow` and until the VM ends.
    fn logs<'a>(&'a self, vm: &'a str, follow: bool) -> Answer<'a, mpsc::Receiver<Bytes>>;
    /// Make the page engine of the image panic that a VM is a view of. For tests of what happens then.
    fn panic_engine<'a>(&'a self, vm: &'a str) -> Answer<'a, ()>;
    fn console<'a>(&'a self, vm: &'a str) -> Answer<'a, ConsoleSession>;
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
