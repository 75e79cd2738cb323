//! The fake daemon's routes.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::middleware::map_response_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use vmfork_api::{
    Accel, CloneResult, ClusterInitRequest, ClusterJoinRequest, ErrorBody, ErrorCode,
    ExecClientMessage, ExecRequest, ExecServerMessage, ForkReply, ForkRequest, ForkStages,
    KillRequest, RunRequest, SCHEMA, Vm, VmState,
};

/// What the daemon was asked.
pub(crate) struct Seen {
    guest: PathBuf,
    pub(crate) requests: Mutex<Vec<String>>,
    /// Requests whose client left before the answer.
    pub(crate) abandoned: AtomicU64,
    /// Whether the daemon is in a cluster.
    pub(crate) is_member: Mutex<bool>,
    /// The hosts of the cluster that do not answer.
    pub(crate) missing: Mutex<Option<&'static str>>,
}

impl Seen {
    pub(crate) fn new(guest: PathBuf) -> Self {
        std::fs::create_dir(&guest).expect("the guest's folder");
        Self {
            guest,
            requests: Mutex::default(),
            abandoned: AtomicU64::new(0),
            is_member: Mutex::default(),
            missing: Mutex::default(),
        }
    }

    pub(super) fn note(&self, request: String) {
        self.requests.lock().expect("no panic").push(request);
    }

    pub(crate) fn has(&self, request: &str) -> bool {
        self.requests.lock().expect("no panic").iter().any(|seen| seen.contains(request))
    }

    /// A guest's path, here.
    fn here(&self, path: &str) -> PathBuf {
        self.guest.join(path.trim_start_matches('/'))
    }
}

pub(super) type Shared = State<Arc<Seen>>;

/// Counts a request whose future was dropped before its end.
pub(super) struct Abandoned(pub(super) Arc<Seen>, pub(super) bool);

impl Drop for Abandoned {
    fn drop(&mut self) {
        if !self.1 {
            self.0.abandoned.fetch_add(1, Ordering::SeqCst);
        }
    }
}

pub(super) struct Failure(pub(super) ErrorBody);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.http_status()).expect("a status");
        (status, Json(self.0)).into_response()
    }
}

pub(super) fn failure(
    code: ErrorCode,
    message: &str,
    cause: &str,
    remedy: Option<&str>,
) -> ErrorBody {
    ErrorBody {
        code,
        message: message.to_owned(),
        cause: Some(cause.to_owned()),
        remedy: remedy.map(str::to_owned),
    }
}

pub(super) fn not_found(what: &str, vm: &str) -> Failure {
    Failure(failure(
        ErrorCode::NotFound,
        &format!("{what} `{vm}`"),
        &format!("no VM named `{vm}` on this host"),
        Some("`vmfork ps` lists the VMs that are here"),
    ))
}

pub(crate) fn vm(name: &str, parent: Option<&str>, vmid: u32) -> Vm {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    Vm {
        id: format!("{vmid:016x}"),
        name: name.to_owned(),
        image: "debian".to_owned(),
        family: "0000000000000000".to_owned(),
        parent: parent.map(str::to_owned),
        parent_id: None,
        host: None,
        snapshot: None,
        labels: vmfork_api::Labels::default(),
        vmid,
        state: VmState::Running,
        reason: None,
        accel: Accel::Tcg,
        cpus: 1,
        memory_mib: 512,
        created_unix_ms: u64::try_from(now.as_millis()).expect("an age") - 150_000,
        ready_ms: Some(3100.0),
        pid: Some(std::process::id()),
        clones: 0,
        private_bytes: 38 << 20,
        shared_bytes: 474 << 20,
        faults: 9812,
    }
}

pub(crate) fn router(seen: Arc<Seen>) -> Router {
    Router::new()
        .route(
            "/v1/version",
            get(|| async {
                Json(
                    json!({"schema": SCHEMA, "vmforkd": "0.1.0", "api": "1", "qemu": "QEMU 7.2.22",
                        "kernel": "6.18.0"}),
                )
            }),
        )
        .route(
            "/v1/doctor",
            get(|| async {
                Json(json!({"schema": SCHEMA, "checks": [
                {"name": "userfaultfd", "status": "failed", "detail": "permission denied",
                 "remedy": "run vmforkd as root"},
                {"name": "qemu", "status": "ok", "detail": "QEMU 7.2.22"}]}))
            }),
        )
        .route(
            "/v1/host",
            get(|| async {
                Json(json!({"schema": SCHEMA, "memory_total_bytes": 8_u64 << 30,
                "memory_available_bytes": 4_u64 << 30, "memory_admissible_bytes": 3_u64 << 30,
                "vcpus_max": 128, "vcpus_admissible": 120,
                "cache_bytes": 0, "cpus": 2, "accel_default": "tcg", "accel_reason": "no kvm_intel",
                "vms": 2, "snapshots": 1,
                "pool": {"target": 2, "waiting": 2, "hits": 0, "misses": 0}, "lost": []}))
            }),
        )
        .route(
            "/v1/images",
            get(|| async {
                let image = |name: &str| {
                    json!({"name": name, "size_bytes": 300 << 20, "created_unix_ms": 0,
                    "origin": "debian bookworm", "kernel": "6.1.0", "agent": true, "vms": 2})
                };
                Json(json!([image("debian"), image("both")]))
            }),
        )
        .route(
            "/v1/images/{name}",
            delete(|Path(name): Path<String>| async move {
                if name == "debian" {
                    return Err(Failure(failure(
                        ErrorCode::Conflict,
                        "remove image `debian`",
                        "2 VMs use it",
                        None,
                    )));
                }
                Ok(StatusCode::NO_CONTENT)
            }),
        )
        .route("/v1/vms", get(list).post(start))
        .route("/v1/vms/{vm}", get(inspect).delete(remove))
        .route("/v1/vms/{vm}/kill", post(kill))
        .route("/v1/vms/{vm}/fork", post(fork))
        .route("/v1/tree", get(tree))
        .route("/v1/events", get(super::events::events))
        .route("/v1/cluster", post(init_cluster))
        .route("/v1/cluster/join", post(join_cluster))
        .route("/v1/vms/{vm}/exec", post(exec))
        .route("/v1/vms/{vm}/exec/stream", get(exec_stream))
        .route("/v1/vms/{vm}/files", get(read_file).put(write_file))
        .route("/v1/vms/{vm}/logs", get(logs))
        .route("/v1/vms/{vm}/console", get(console))
        .merge(super::snapshots::router())
        .merge(super::lifetime::router())
        .layer(map_response_with_state(Arc::clone(&seen), name_missing))
        .with_state(seen)
}

async fn name_missing(State(seen): Shared, mut response: Response) -> Response {
    let missing = *seen.missing.lock().expect("no panic");
    if let Some(hosts) = missing {
        let hosts = hosts.parse().expect("a header");
        response.headers_mut().insert("x-vmfork-missing-hosts", hosts);
    }
    response
}

async fn list(State(seen): Shared, Query(query): Query<Value>) -> Json<Vec<Vm>> {
    seen.note(format!("list {query}"));
    let mut vms = vec![vm("web", None, 0), vm("web.1", Some("web"), 1)];
    if query.get("all").is_some() {
        vms.push(Vm { snapshot: Some("warm".to_owned()), ..vm("warm.1", None, 0) });
    }
    Json(vms)
}

async fn tree(State(seen): Shared) -> Json<Value> {
    let is_member = *seen.is_member.lock().expect("no panic");
    let on = |host: &str, vm: Vm| Vm { host: is_member.then(|| host.to_owned()), ..vm };
    Json(json!([{"vm": on("h1", vm("web", None, 0)), "children": [
        {"vm": on("h2", vm("web.1", Some("web"), 1)), "children": []}]}]))
}

/// The cluster whose members are this host and some others.
fn cluster(name: &str, others: &[&str]) -> Json<Value> {
    let hosts = std::iter::once(&name).chain(others).enumerate().map(|(i, name)| {
        json!({"id": format!("{i:016x}"), "name": name, "address": format!("10.0.0.{i}:7072"),
            "state": "active", "liveness": if i == 0 { "here" } else { "alive" }})
    });
    let hosts: Vec<Value> = hosts.collect();
    Json(json!({"schema": SCHEMA, "here": format!("{:016x}", 0), "hosts": hosts}))
}

async fn init_cluster(Json(request): Json<ClusterInitRequest>) -> Json<Value> {
    cluster(request.name.as_deref().unwrap_or("debian"), &[])
}

async fn join_cluster(Json(request): Json<ClusterJoinRequest>) -> Json<Value> {
    cluster(request.name.as_deref().unwrap_or("localhost.localdomain"), &["h1", "h2"])
}

async fn start(State(seen): Shared, Json(request): Json<RunRequest>) -> Response {
    seen.note(format!("run {}", serde_json::to_string(&request).expect("JSON")));
    let mut abandoned = Abandoned(Arc::clone(&seen), false);
    if request.image == "slow" {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    abandoned.1 = true;
    if request.image == "gone" {
        let cause = "there is no image `gone`";
        return Failure(failure(ErrorCode::NotFound, "run `gone`", cause, Some("build it")))
            .into_response();
    }
    let vm = vm(request.name.as_deref().unwrap_or("debian-1"), None, 0);
    (StatusCode::CREATED, Json(vm)).into_response()
}

async fn inspect(Path(name): Path<String>) -> Result<Json<Value>, Failure> {
    if name == "nope" {
        return Err(not_found("inspect", &name));
    }
    let mut vm = vm(&name, None, 0);
    vm.snapshot = (name == "warm.1").then(|| "warm".to_owned());
    let mut detail = serde_json::to_value(vm).expect("JSON");
    let extra = json!({"schema": SCHEMA, "qemu_version": "7.2.22", "agent_version": "0.1.0",
        "guest_kernel": "6.1.0", "clone_names": ["web.1"], "accel_reason": "no kvm_intel",
        "memory": {"pages": 131_072, "private_pages": 9728, "zero_pages": 1, "cache_present_pages": 2,
            "fetched_bytes": 3, "demand_bytes": 4, "undrained_pages": 5, "image": "m1",
            "image_views": 2, "faults": {"zero": 6, "fetch": 7, "present": 8, "mapped": 9},
            "source": {"frozen": 10, "image": 11, "peer": 0, "chunk": 0},
            "caches": [{"image": "m1", "resident_bytes": 4096, "pages": 1200, "vms": ["web"]},
                {"image": "m0", "resident_bytes": 8192, "pages": null, "vms": ["web", "web.1"]}]},
        "last_fork": {"schema": SCHEMA, "parent": name, "requested": 3, "granted": 2,
            "began_unix_ms": 1_700_000_000_000_u64, "pause_ms": 3.42, "total_ms": 31.4,
            "stages": ForkStages::default(), "clones": []}});
    let fields = detail.as_object_mut().expect("an object");
    fields.extend(extra.as_object().expect("an object").clone());
    Ok(Json(detail))
}

async fn remove(
    State(seen): Shared,
    Path(name): Path<String>,
    Query(query): Query<Value>,
) -> Result<StatusCode, Failure> {
    seen.note(format!("remove {name} {query}"));
    if name == "nope" { Err(not_found("remove", &name)) } else { Ok(StatusCode::NO_CONTENT) }
}

async fn kill(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<KillRequest>,
) -> Result<Json<Vm>, Failure> {
    seen.note(format!("kill {name} {}", serde_json::to_string(&request).expect("JSON")));
    if name == "nope" { Err(not_found("kill", &name)) } else { Ok(Json(vm(&name, None, 0))) }
}

async fn fork(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<ForkRequest>,
) -> Result<Json<ForkReply>, Failure> {
    seen.note(format!("fork {name} {}", serde_json::to_string(&request).expect("JSON")));
    if name == "nope" {
        return Err(not_found("fork", &name));
    }
    let mut abandoned = Abandoned(Arc::clone(&seen), false);
    if name == "slow" {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    abandoned.1 = true;
    // A `full` host has room for two.
    let fits = if name == "full" { 2 } else { request.count };
    let clones: Vec<CloneResult> = (1..=request.count)
        .map(|vmid| CloneResult {
            id: None,
            vmid,
            name: format!("{name}.{vmid}"),
            state: if vmid > fits { VmState::Failed } else { VmState::Running },
            running_ms: (vmid <= fits).then_some(12.5),
            ready_ms: (vmid <= fits).then(|| 20.0 + f64::from(vmid)),
            pooled: true,
            host: None,
            error: (vmid > fits).then(|| {
                failure(
                    ErrorCode::NoCapacity,
                    "start a clone",
                    "512 MiB wanted, 100 MiB left",
                    Some("end some VMs"),
                )
            }),
        })
        .collect();
    Ok(Json(ForkReply {
        schema: SCHEMA.to_owned(),
        parent: name,
        requested: request.count,
        granted: fits.min(request.count),
        began_unix_ms: 1_700_000_000_000,
        pause_ms: 3.42,
        total_ms: 31.4,
        stages: ForkStages::default(),
        clones,
    }))
}

/// The guest's words about its own paths, translated.
fn program(seen: &Seen, request: &ExecRequest) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(&request.argv[0]);
    for arg in &request.argv[1..] {
        if arg.starts_with("/guest/") {
            command.arg(seen.here(arg));
        } else {
            command.arg(arg);
        }
    }
    command.envs(&request.env).kill_on_drop(true).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn code_of(status: std::process::ExitStatus) -> (i32, Option<i32>) {
    use std::os::unix::process::ExitStatusExt as _;
    (status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)), status.signal())
}

async fn exec(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<ExecRequest>,
) -> Result<Json<Value>, Failure> {
    if name == "nope" {
        return Err(not_found("exec in", &name));
    }
    let mut child = program(&seen, &request).spawn().expect("the program starts");
    let input = BASE64.decode(request.stdin_base64.unwrap_or_default()).expect("base64");
    let mut stdin = child.stdin.take().expect("a pipe");
    let feeding = tokio::spawn(async move {
        let _ = stdin.write_all(&input).await;
    });
    let output = child.wait_with_output().await.expect("it ends");
    feeding.await.expect("fed");
    let (exit_code, signal) = code_of(output.status);
    Ok(Json(json!({"schema": SCHEMA, "exit_code": exit_code, "signal": signal, "timed_out": false,
        "stdout_base64": BASE64.encode(output.stdout), "stderr_base64": BASE64.encode(output.stderr),
        "truncated": false, "duration_ms": 1.0})))
}

async fn exec_stream(
    State(seen): Shared,
    Path(name): Path<String>,
    upgrade: WebSocketUpgrade,
) -> Response {
    if name == "nope" {
        return not_found("exec in", &name).into_response();
    }
    upgrade.on_upgrade(move |socket| run_program(socket, seen))
}

async fn tell(socket: &mut WebSocket, message: &ExecServerMessage) -> Option<()> {
    let text = serde_json::to_string(message).expect("JSON");
    socket.send(Message::text(text)).await.ok()
}

async fn run_program(mut socket: WebSocket, seen: Arc<Seen>) {
    let mut abandoned = Abandoned(Arc::clone(&seen), false);
    if serve_program(&mut socket, &seen).await.is_some() {
        abandoned.1 = true;
    }
}

/// `None` if the client left first.
async fn serve_program(socket: &mut WebSocket, seen: &Seen) -> Option<()> {
    let Some(Ok(Message::Text(first))) = socket.recv().await else { return None };
    seen.note(format!("exec {first}"));
    let ExecClientMessage::Start(request) = serde_json::from_str(&first).expect("a message") else {
        panic!("the first message must be start")
    };
    let Ok(mut child) = program(seen, &request).spawn() else {
        let error = failure(
            ErrorCode::BadRequest,
            &format!("run `{}`", request.argv[0]),
            "no such program",
            None,
        );
        return tell(socket, &ExecServerMessage::Error { error }).await;
    };
    let pid = child.id().expect("a pid");
    tell(socket, &ExecServerMessage::Started { pid }).await?;
    let mut pipe = child.stdin.take()?;
    let (tx, mut rx) = tokio::sync::mpsc::channel::<Bytes>(4);
    let mut stdin = Some(tx);
    tokio::spawn(async move {
        while let Some(bytes) = rx.recv().await {
            // A program that reads no more gets no more.
            let _ = pipe.write_all(&bytes).await;
        }
    });
    let (mut stdout, mut stderr) = (child.stdout.take()?, child.stderr.take()?);
    let (mut out, mut err) = (vec![0; 65536], vec![0; 65536]);
    let (mut out_open, mut err_open) = (true, true);
    while out_open || err_open {
        tokio::select! {
            len = stdout.read(&mut out), if out_open => {
                let len = len.unwrap_or(0);
                out_open = len > 0;
                if out_open { output(socket, 1, &out[..len]).await?; }
            }
            len = stderr.read(&mut err), if err_open => {
                let len = len.unwrap_or(0);
                err_open = len > 0;
                if err_open { output(socket, 2, &err[..len]).await?; }
            }
            // While the program does not read, neither does the daemon.
            _ = room(stdin.as_ref()), if is_full(stdin.as_ref()) => {}
            message = socket.recv(), if !is_full(stdin.as_ref()) => match message?.ok()? {
                Message::Binary(bytes) => {
                    if let Some(queue) = &stdin {
                        queue.try_send(bytes).expect("room, and a reader");
                    }
                }
                Message::Text(text) => match serde_json::from_str(&text).expect("a message") {
                    ExecClientMessage::StdinEof => stdin = None,
                    ExecClientMessage::Signal { signal } => {
                        seen.note(format!("signal {signal}"));
                        let signal = rustix::process::Signal::from_named_raw(signal).expect("known");
                        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
                        let _ = rustix::process::kill_process_group(pid, signal);
                    }
                    ExecClientMessage::Resize { rows, cols } => {
                        seen.note(format!("resize {rows} {cols}"));
                    }
                    ExecClientMessage::Start(_) => panic!("started twice"),
                },
                Message::Close(_) => return None,
                _ => {}
            },
        }
    }
    let (exit_code, signal) = code_of(child.wait().await.ok()?);
    tell(socket, &ExecServerMessage::Exited { exit_code, signal }).await
}

type Queue = tokio::sync::mpsc::Sender<Bytes>;

fn is_full(queue: Option<&Queue>) -> bool {
    queue.is_some_and(|queue| queue.capacity() == 0)
}

async fn room(queue: Option<&Queue>) {
    if let Some(queue) = queue {
        let _ = queue.reserve().await;
    }
}

async fn output(socket: &mut WebSocket, kind: u8, bytes: &[u8]) -> Option<()> {
    let mut message = vec![kind];
    message.extend_from_slice(bytes);
    socket.send(Message::binary(message)).await.ok()
}

#[derive(Deserialize)]
struct FileQuery {
    path: String,
    mode: Option<String>,
}

fn no_file(vm: &str, path: &str) -> Failure {
    let message = format!("open `{path}` in `{vm}`");
    Failure(failure(ErrorCode::NotFound, &message, "no such file or directory", None))
}

async fn read_file(
    State(seen): Shared,
    Path(name): Path<String>,
    Query(query): Query<FileQuery>,
) -> Result<Response, Failure> {
    use std::os::unix::fs::PermissionsExt as _;
    let missing = |_| no_file(&name, &query.path);
    let mut file = tokio::fs::File::open(seen.here(&query.path)).await.map_err(missing)?;
    let metadata = file.metadata().await.map_err(missing)?;
    let torn = query.path.ends_with("torn");
    let (tx, rx) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(4);
    tokio::spawn(async move {
        let mut buffer = vec![0; 65536];
        while let Ok(len @ 1..) = file.read(&mut buffer).await {
            if tx.send(Ok(Bytes::copy_from_slice(&buffer[..len]))).await.is_err() {
                return;
            }
        }
        if torn {
            let _ = tx.send(Err(std::io::Error::other("the guest has gone"))).await;
        }
    });
    let chunks = futures_util::stream::unfold(rx, |mut rx| async { Some((rx.recv().await?, rx)) });
    let mode = format!("{:o}", metadata.permissions().mode() & 0o7777);
    Ok(([("x-vmfork-mode", mode)], Body::from_stream(chunks)).into_response())
}

async fn write_file(
    State(seen): Shared,
    Path(name): Path<String>,
    Query(query): Query<FileQuery>,
    body: Body,
) -> Result<StatusCode, Failure> {
    seen.note(format!("put {} {}", query.path, query.mode.as_deref().unwrap_or("-")));
    let missing = |_| no_file(&name, &query.path);
    // Answers early, with the body still on its way, if it can't be written.
    let mut file = tokio::fs::File::create(seen.here(&query.path)).await.map_err(missing)?;
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let Ok(chunk) = chunk else {
            seen.note("put broken off".to_owned());
            return Err(no_file(&name, &query.path));
        };
        file.write_all(&chunk).await.map_err(missing)?;
    }
    file.flush().await.map_err(missing)?;
    Ok(StatusCode::NO_CONTENT)
}

async fn logs(Query(query): Query<Value>) -> Response {
    let follow = query.get("follow").is_some();
    let lines = futures_util::stream::unfold(0_u32, move |i| async move {
        if i >= 3 && !follow {
            return None;
        }
        if i >= 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Some((Ok::<_, std::io::Error>(Bytes::from(format!("line {i}\n"))), i + 1))
    });
    Body::from_stream(lines).into_response()
}

async fn console(Path(name): Path<String>, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(move |mut socket| async move {
        if name == "flood" {
            while socket.send(Message::binary(vec![b'y'; 1 << 10])).await.is_ok() {}
            return;
        }
        let _ = socket.send(Message::binary(&b"login: "[..])).await;
        while let Some(Ok(Message::Binary(typed))) = socket.recv().await {
            let _ = socket.send(Message::binary(typed.clone())).await;
            if typed.ends_with(b"bye\n") {
                return;
            }
        }
    })
}
