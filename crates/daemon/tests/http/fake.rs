//! A host that is made up. What a call does follows from the name it is given.

use std::collections::HashMap;
use std::future::pending;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::sync::mpsc;
use vmfork_api::{
    Accel, CheckStatus, ErrorBody, ErrorCode, ExecRequest, ForkReply, ForkRequest, HostInfo, Image,
    ImageProfile, KillRequest, Labels, RunRequest, SCHEMA, TransferReply, TransferRequest,
    TreeNode, Ttl, TtlReply, TtlRequest, Version, Vm, VmDetail, VmState, WorkloadProfile,
};
use vmfork_control::{
    Answer, ConsoleSession, Control, Events, ExecInput, ExecOutput, ExecSession, FileStream,
    Killed, Limits,
};
use vmfork_host::quotas::User;

/// Bytes of `/big`: more than any buffer on the way.
pub(crate) const BIG_BYTES: usize = 24 * 1024 * 1024;

#[derive(Debug)]
pub(crate) struct Fake {
    /// What was asked, one line each.
    pub(crate) calls: Mutex<Vec<String>>,
    pub(crate) files: Mutex<HashMap<String, (u32, Vec<u8>)>>,
    /// Calls that never answer, while they are awaited.
    pub(crate) waiting: AtomicUsize,
    /// How the content of transfers to `hang` ended.
    pub(crate) ends: Arc<Mutex<Vec<&'static str>>>,
    pub(crate) programs: Arc<Programs>,
    pub(crate) events: Arc<Events>,
}

/// The epoch of a made-up host's events.
pub(crate) const EPOCH: u64 = 0xabc;
/// Most events that it keeps.
pub(crate) const EVENTS_MAX: usize = 100;

impl Default for Fake {
    fn default() -> Self {
        let limits = Limits { events_max: EVENTS_MAX, bytes_max: usize::MAX };
        Self {
            calls: Mutex::default(),
            files: Mutex::default(),
            waiting: AtomicUsize::default(),
            ends: Arc::default(),
            programs: Arc::default(),
            events: Arc::new(Events::with_limits(EPOCH, limits)),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Programs {
    /// Programs whose input was dropped.
    pub(crate) hangups: AtomicUsize,
    pub(crate) produced_bytes: AtomicU64,
    pub(crate) taken_bytes: AtomicU64,
    pub(crate) largest_stdin: AtomicUsize,
    pub(crate) inputs: Mutex<Vec<String>>,
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Fake {
    pub(crate) fn note(&self, call: String) {
        self.calls.lock().expect("lock").push(call);
    }

    pub(crate) fn last_call(&self) -> String {
        self.calls.lock().expect("lock").last().cloned().unwrap_or_default()
    }

    async fn never<T>(&self) -> T {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let _waiting = Waiting(&self.waiting);
        pending().await
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

fn missing(vm: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::NotFound, format!("no VM named `{vm}` on this host"))
        .remedy("`vmfork ps` lists the VMs that are here")
}

fn exists(vm: &str) -> Result<(), ErrorBody> {
    if vm == "nope" { Err(missing(vm)) } else { Ok(()) }
}

pub(crate) fn vm(name: &str) -> Vm {
    Vm {
        id: "00000000000000aa".into(),
        name: name.into(),
        image: "debian".into(),
        family: "00000000000000aa".into(),
        parent: None,
        parent_id: None,
        host: None,
        snapshot: None,
        labels: Labels::parse([&*format!("is={name}")]).expect("a label"),
        vmid: 0,
        state: VmState::Running,
        reason: None,
        accel: Accel::Tcg,
        cpus: 1,
        memory_mib: 512,
        created_unix_ms: 1,
        ready_ms: Some(2.5),
        pid: Some(1),
        clones: 0,
        private_bytes: 0,
        shared_bytes: 0,
        faults: 0,
    }
}

impl Control for Fake {
    fn has_vm(&self, _: &str) -> bool {
        true
    }

    fn version(&self) -> Answer<'_, Version> {
        async {
            Ok(Version {
                schema: SCHEMA.into(),
                vmforkd: "0".into(),
                api: "1".into(),
                qemu: None,
                kernel: "6".into(),
            })
        }
        .boxed()
    }

    fn doctor(&self) -> Answer<'_, vmfork_api::DoctorReport> {
        let check = vmfork_api::Check {
            name: "kvm".into(),
            status: CheckStatus::Ok,
            detail: "fine".into(),
            remedy: None,
        };
        async { Ok(vmfork_api::DoctorReport { schema: SCHEMA.into(), checks: vec![check] }) }
            .boxed()
    }

    fn host(&self) -> Answer<'_, HostInfo> {
        async {
            Ok(HostInfo {
                schema: SCHEMA.into(),
                memory_total_bytes: 3,
                memory_available_bytes: 2,
                memory_admissible_bytes: 1,
                vcpus_max: 128,
                vcpus_admissible: 127,
                cache_bytes: 0,
                cpus: 2,
                accel_default: Accel::Tcg,
                accel_reason: "made up".into(),
                vms: 0,
                snapshots: 0,
                pool: vmfork_api::PoolInfo::default(),
                lost: vec![],
            })
        }
        .boxed()
    }

    fn images(&self) -> Answer<'_, Vec<Image>> {
        async { Ok(vec![]) }.boxed()
    }

    fn remove_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        self.note(format!("remove image {name}"));
        async move {
            match name {
                "used" => Err(ErrorBody::new(ErrorCode::Conflict, "image `used` is in use")),
                _ => Ok(()),
            }
        }
        .boxed()
    }

    fn push_image<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply> {
        self.note(format!("push image {name} to {}", request.location));
        async move {
            Ok(TransferReply {
                schema: SCHEMA.to_owned(),
                names: vec![name.to_owned()],
                sent_bytes: 4096,
                total_ms: 1.0,
            })
        }
        .boxed()
    }

    fn pull_image<'a>(&'a self, name: &'a str, request: TransferRequest) -> Answer<'a, Image> {
        self.note(format!("pull image {name} from {} {}", request.location, request.wait));
        async move { Ok(image(name, Some(request.location))) }.boxed()
    }

    fn seed_image<'a>(&'a self, name: &'a str) -> Answer<'a, Image> {
        self.note(format!("seed image {name}"));
        async move { Ok(image(name, None)) }.boxed()
    }

    fn unseed_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        self.note(format!("unseed image {name}"));
        async { Ok(()) }.boxed()
    }

    fn image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ImageProfile> {
        self.note(format!("image profile {name}"));
        let web = WorkloadProfile {
            workload: "web".into(),
            runs: 3,
            read_bytes: 65_536,
            read_bytes_any: 131_072,
            half_ms: 12.5,
        };
        async { Ok(ImageProfile { workloads: vec![web] }) }.boxed()
    }

    fn reset_image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        self.note(format!("reset image profile {name}"));
        async { Ok(()) }.boxed()
    }

    /// Says back what it is told.
    fn serve_image<'a>(
        &'a self,
        user: User,
        name: &'a str,
        writable: bool,
    ) -> Answer<'a, UnixStream> {
        self.note(format!("serve image {name} {writable} to {user}"));
        async {
            let (ours, theirs) = UnixStream::pair().expect("a pair");
            std::thread::spawn(move || std::io::copy(&mut &ours, &mut &ours));
            Ok(theirs)
        }
        .boxed()
    }

    fn vms(&self, all: bool) -> Answer<'_, Vec<Vm>> {
        self.note(format!("vms {all}"));
        async { Ok(vec![vm("web")]) }.boxed()
    }

    fn tree(&self) -> Answer<'_, Vec<TreeNode>> {
        async {
            Ok(vec![TreeNode {
                vm: vm("web"),
                children: vec![TreeNode { vm: vm("web.1"), children: vec![] }],
            }])
        }
        .boxed()
    }

    fn run(&self, _user: User, request: RunRequest) -> Answer<'_, Vm> {
        async move {
            if request.memory_mib == Some(262_144) {
                return Err(ErrorBody::new(ErrorCode::NoCapacity, "too much"));
            }
            Ok(vm(request.name.as_deref().unwrap_or("debian-1")))
        }
        .boxed()
    }

    fn inspect<'a>(&'a self, name: &'a str) -> Answer<'a, VmDetail> {
        async move {
            exists(name)?;
            assert_ne!(name, "panic", "a bug, made up");
            Ok(VmDetail {
                schema: SCHEMA.into(),
                vm: vm(name),
                memory: vmfork_api::MemoryInfo::default(),
                keeper_pid: None,
                last_fork: None,
                ttl: None,
                qemu_version: "7.2".into(),
                agent_version: None,
                guest_kernel: None,
                clone_names: vec![],
                accel_reason: "made up".into(),
                root_device: None,
                root_device_reason: String::new(),
                user: "0".into(),
                job: None,
                disks: vec![],
            })
        }
        .boxed()
    }

    fn remove<'a>(&'a self, vm: &'a str, force: bool) -> Answer<'a, ()> {
        self.note(format!("remove {vm} {force}"));
        async move { exists(vm) }.boxed()
    }

    fn kill<'a>(&'a self, name: &'a str, request: KillRequest) -> Answer<'a, Killed> {
        self.note(format!("kill {name} {} {}", request.grace_ms, request.family));
        async move {
            exists(name)?;
            let missing = if name == "split" { vec!["h2".into(), "h3".into()] } else { Vec::new() };
            Ok(Killed { vm: vm(name), missing })
        }
        .boxed()
    }

    fn pause<'a>(&'a self, name: &'a str) -> Answer<'a, Vm> {
        self.note(format!("pause {name}"));
        async move {
            exists(name)?;
            Ok(Vm { state: VmState::Paused, ..vm(name) })
        }
        .boxed()
    }

    fn resume<'a>(&'a self, name: &'a str) -> Answer<'a, Vm> {
        self.note(format!("resume {name}"));
        async move { exists(name).map(|()| vm(name)) }.boxed()
    }

    fn set_ttl<'a>(&'a self, name: &'a str, request: TtlRequest) -> Answer<'a, TtlReply> {
        self.note(format!("ttl {name} {:?}", request.ttl_ms));
        async move {
            exists(name)?;
            let ttl = request.ttl_ms.map(|left_ms| Ttl {
                expires_unix_ms: left_ms + 1,
                left_ms,
                inherited_from: None,
            });
            Ok(TtlReply { schema: SCHEMA.into(), vm: name.into(), ttl })
        }
        .boxed()
    }

    fn panic_engine<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        self.note(format!("panic engine {name}"));
        async move { exists(name) }.boxed()
    }

    fn fork<'a>(&'a self, name: &'a str, request: ForkRequest) -> Answer<'a, ForkReply> {
        async move {
            exists(name)?;
            if name == "hang" {
                return self.never().await;
            }
            Ok(ForkReply {
                schema: SCHEMA.into(),
                parent: name.into(),
                requested: request.count,
                granted: request.count,
                began_unix_ms: 0,
                pause_ms: 3.4,
                total_ms: 30.0,
                stages: vmfork_api::ForkStages::default(),
                clones: vec![],
            })
        }
        .boxed()
    }

    fn exec<'a>(&'a self, vm: &'a str, request: ExecRequest) -> Answer<'a, ExecSession> {
        self.note(format!("exec {vm} {}", request.argv.join(" ")));
        async move {
            exists(vm)?;
            if vm == "hang" {
                return self.never().await;
            }
            let (input, input_rx) = mpsc::channel(4);
            let (output_tx, output) = mpsc::channel(4);
            let programs = self.programs.clone();
            tokio::spawn(async move {
                program(&request.argv[0], &programs, input_rx, output_tx).await;
            });
            Ok(ExecSession { pid: 7, input, output })
        }
        .boxed()
    }

    fn read_file<'a>(&'a self, vm: &'a str, path: &'a str) -> Answer<'a, FileStream> {
        async move {
            exists(vm)?;
            let (content_tx, content) = mpsc::channel(4);
            let stored = self.files.lock().expect("lock").get(path).cloned();
            let (mode, bytes) = match (path, stored) {
                (_, Some(stored)) => stored,
                ("/big" | "/half", None) => (0o644, vec![7; BIG_BYTES]),
                ("/broken", None) => (0o644, vec![]),
                _ => return Err(ErrorBody::new(ErrorCode::NotFound, format!("no file `{path}`"))),
            };
            let size_bytes = bytes.len() as u64;
            let breaks = matches!(path, "/half" | "/broken");
            tokio::spawn(async move {
                let half = if breaks { bytes.len() / 2 } else { bytes.len() };
                for chunk in bytes[..half].chunks(64 * 1024) {
                    if content_tx.send(Ok(Bytes::copy_from_slice(chunk))).await.is_err() {
                        return;
                    }
                }
                if breaks {
                    let error = ErrorBody::new(ErrorCode::Guest, "the disk is bad");
                    let _ = content_tx.send(Err(error)).await;
                }
            });
            Ok(FileStream { mode, size_bytes, content })
        }
        .boxed()
    }

    fn write_file<'a>(
        &'a self,
        vm: &'a str,
        path: &'a str,
        mode: u32,
        mut content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
    ) -> Answer<'a, ()> {
        async move {
            exists(vm)?;
            if vm == "hang" {
                // Like an agent's side that lives on when the request's future is dropped.
                let ends = self.ends.clone();
                let task = tokio::spawn(async move {
                    let end = loop {
                        match content.recv().await {
                            Some(Ok(_)) => {}
                            Some(Err(_)) => break "abandoned",
                            None => break "whole",
                        }
                    };
                    ends.lock().expect("lock").push(end);
                });
                return task.await.map_err(|e| ErrorBody::new(ErrorCode::Internal, e.to_string()));
            }
            let mut bytes = Vec::new();
            while let Some(chunk) = content.recv().await {
                bytes.extend_from_slice(&chunk?);
            }
            self.files.lock().expect("lock").insert(path.to_owned(), (mode, bytes));
            Ok(())
        }
        .boxed()
    }

    fn logs<'a>(&'a self, vm: &'a str, follow: bool) -> Answer<'a, mpsc::Receiver<Bytes>> {
        async move {
            exists(vm)?;
            let (lines_tx, lines) = mpsc::channel(4);
            tokio::spawn(async move {
                let _ = lines_tx.send(Bytes::from_static(b"booted\n")).await;
                if follow {
                    lines_tx.closed().await;
                }
            });
            Ok(lines)
        }
        .boxed()
    }

    fn console<'a>(&'a self, vm: &'a str) -> Answer<'a, ConsoleSession> {
        async move {
            exists(vm)?;
            let (input, mut typed) = mpsc::channel::<Bytes>(4);
            let (shown, output) = mpsc::channel(4);
            tokio::spawn(async move {
                let _ = shown.send(Bytes::from_static(b"login: ")).await;
                while let Some(bytes) = typed.recv().await {
                    if bytes == "poweroff" || shown.send(bytes).await.is_err() {
                        return;
                    }
                }
            });
            Ok(ConsoleSession { input, output })
        }
        .boxed()
    }

    fn events(&self) -> Arc<Events> {
        Arc::clone(&self.events)
    }
}

/// A program in the guest that isn't there.
async fn program(
    name: &str,
    seen: &Programs,
    mut input: mpsc::Receiver<ExecInput>,
    output: mpsc::Sender<ExecOutput>,
) {
    let mut exited = ExecOutput::Exited { exit_code: 0, signal: None };
    match name {
        "false" => exited = ExecOutput::Exited { exit_code: 1, signal: None },
        "both" => {
            let _ = output.send(ExecOutput::Stdout(Bytes::from_static(b"out"))).await;
            let _ = output.send(ExecOutput::Stderr(Bytes::from_static(b"err"))).await;
        }
        "broken" => {
            exited = ExecOutput::Error(ErrorBody::new(ErrorCode::Guest, "no such program"));
        }
        "vanish" => return,
        // Ignores everything, SIGKILL too.
        "undead" => output.closed().await,
        // Prints 64 MiB as fast as it is read.
        "flood" => {
            let block = Bytes::from(vec![b'y'; 64 * 1024]);
            for _ in 0..1024 {
                if output.send(ExecOutput::Stdout(block.clone())).await.is_err() {
                    seen.hangups.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                seen.produced_bytes.fetch_add(64 * 1024, Ordering::SeqCst);
            }
        }
        // Reads nothing for a while, then everything.
        "slow-reader" => {
            tokio::time::sleep(Duration::from_millis(300)).await;
            while let Some(message) = input.recv().await {
                match message {
                    ExecInput::Stdin(bytes) => {
                        seen.taken_bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
                        seen.largest_stdin.fetch_max(bytes.len(), Ordering::SeqCst);
                    }
                    ExecInput::StdinEof => break,
                    _ => {}
                }
            }
        }
        // `cat`, and `sleep` which does the same with nothing on its input.
        _ => loop {
            match input.recv().await {
                Some(ExecInput::Stdin(bytes)) => {
                    let _ = output.send(ExecOutput::Stdout(bytes)).await;
                }
                Some(ExecInput::StdinEof) if name == "cat" => break,
                Some(ExecInput::Signal(signal)) => {
                    seen.inputs.lock().expect("lock").push(format!("signal {signal}"));
                    exited = ExecOutput::Exited { exit_code: 128 + signal, signal: Some(signal) };
                    break;
                }
                Some(other) => seen.inputs.lock().expect("lock").push(format!("{other:?}")),
                None => {
                    seen.hangups.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
        },
    }
    let _ = output.send(exited).await;
}

fn image(name: &str, remote: Option<String>) -> Image {
    Image {
        name: name.to_owned(),
        size_bytes: 4096,
        created_unix_ms: 1,
        origin: "imported".to_owned(),
        kernel: String::new(),
        agent: true,
        vms: 0,
        seeded: remote.is_none(),
        remote,
    }
}
