//! The fake daemon's stored snapshots: `warm`, its delta `hot`, and some that go wrong.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::StreamExt as _;
use serde_json::Value;
use vmfork_api::{
    Accel, CloneResult, Compression, ErrorBody, ErrorCode, ProfileCluster, ProfileInfo, Progress,
    RemovedSnapshots, SCHEMA, Snapshot, SnapshotDetail, SnapshotRequest, SnapshotState, StartReply,
    StartRequest, TransferReply, TransferRequest, VerifyReply, VmState,
};

use super::routes::{Abandoned, Failure, Seen, Shared, failure, vm};

/// Size of an export in bytes. Its bytes follow a pattern.
const EXPORT_BYTES: usize = 3_000_000;

pub(super) fn router() -> Router<Arc<Seen>> {
    Router::new()
        .route("/v1/snapshots", get(list).post(create))
        .route("/v1/import", post(import))
        .route("/v1/snapshots/{name}", get(inspect).delete(remove))
        .route("/v1/snapshots/{name}/start", post(start))
        .route("/v1/snapshots/{name}/verify", post(verify))
        .route("/v1/snapshots/{name}/flatten", post(flatten))
        .route("/v1/snapshots/{name}/export", get(export))
        .route("/v1/snapshots/{name}/push", post(push))
        .route("/v1/snapshots/{name}/pull", post(pull))
        .route("/v1/snapshots/{name}/profile", get(profile).delete(reset_profile))
}

pub(crate) fn exported() -> Vec<u8> {
    (0..EXPORT_BYTES).map(|i| u8::try_from(i % 251).expect("below 251")).collect()
}

fn not_found(what: &str, name: &str) -> Failure {
    let cause = format!("no snapshot named `{name}`");
    Failure(failure(
        ErrorCode::NotFound,
        &format!("{what} snapshot `{name}`"),
        &cause,
        Some("`vmfork snapshot ls` lists them"),
    ))
}

fn snapshot(name: &str) -> Snapshot {
    let age = vm(name, None, 0).created_unix_ms;
    let mut snapshot = Snapshot {
        name: name.to_owned(),
        id: Some("0".repeat(32)),
        state: SnapshotState::Ready,
        reason: None,
        created_unix_ms: age,
        image: "debian".to_owned(),
        memory_mib: 512,
        disk_only: false,
        disk_bytes: 0,
        cpus: 1,
        accel: Accel::Tcg,
        base: (name == "hot").then(|| "warm".to_owned()),
        own_bytes: 210 << 20,
        stored_bytes: 64 << 20,
        shared_bytes: 0,
        progress: Progress::default(),
        vms: 2,
        remote: None,
        labels: vmfork_api::Labels::default(),
    };
    if name == "long" {
        snapshot.id = None;
        snapshot.state = SnapshotState::Writing;
        snapshot.progress = Progress { done_bytes: 42 << 20, total_bytes: 100 << 20 };
    } else if name == "torn" {
        snapshot.id = None;
        snapshot.state = SnapshotState::Failed;
        snapshot.reason = Some("its page table is cut off at byte 17\u{1b}[2J".to_owned());
        (snapshot.memory_mib, snapshot.created_unix_ms, snapshot.vms) = (0, 0, 0);
    }
    snapshot
}

async fn list() -> Json<Vec<Snapshot>> {
    Json(["hot", "long", "torn", "warm"].map(snapshot).to_vec())
}

async fn create(
    State(seen): Shared,
    Json(request): Json<SnapshotRequest>,
) -> Result<Response, Failure> {
    seen.note(format!("snapshot {}", serde_json::to_string(&request).expect("JSON")));
    let mut abandoned = Abandoned(Arc::clone(&seen), false);
    if request.name == "long" && request.wait {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    abandoned.1 = true;
    if request.name == "taken" {
        return Err(Failure(failure(
            ErrorCode::Conflict,
            "take snapshot `taken`",
            "there is a snapshot named `taken` already",
            Some("choose another name"),
        )));
    }
    Ok((StatusCode::CREATED, Json(snapshot(&request.name))).into_response())
}

async fn inspect(Path(name): Path<String>) -> Result<Json<SnapshotDetail>, Failure> {
    match name.as_str() {
        "warm" | "hot" | "long" | "both" | "full" => {}
        "torn" => {
            let cause = "its page table is cut off at byte 17";
            let error =
                failure(ErrorCode::Host, "inspect snapshot `torn`", cause, Some("remove it"));
            return Err(Failure(error));
        }
        _ => return Err(not_found("find", &name)),
    }
    Ok(Json(SnapshotDetail {
        schema: SCHEMA.to_owned(),
        snapshot: snapshot(&name),
        qemu_version: "7.2.22".to_owned(),
        machine: "pc-q35-7.2".to_owned(),
        cpu: "max".to_owned(),
        guest_kernel: Some("6.1.0".to_owned()),
        pause_ms: 3.42,
        compression: Compression::Zstd,
        chunk_pages: 64,
        own_pages: 53_760,
        zero_pages: 77_312,
        images: Vec::new(),
        dependants: vec!["hot".to_owned()],
        vm_names: vec!["warm.1".to_owned()],
        profile: learnt(),
    }))
}

fn learnt() -> ProfileInfo {
    ProfileInfo {
        runs: 3,
        working_set_pages: 512,
        working_set_bytes: 1 << 20,
        recording: true,
        clusters: vec![ProfileCluster {
            first_page: 16,
            pages: 512,
            frequency: 0.75,
            first_access_ms: 1.26,
        }],
    }
}

async fn remove(
    State(seen): Shared,
    Path(name): Path<String>,
    Query(query): Query<Value>,
) -> Result<Json<RemovedSnapshots>, Failure> {
    seen.note(format!("remove snapshot {name} {query}"));
    match (name.as_str(), query.get("cascade").is_some()) {
        ("nope", _) => Err(not_found("remove", &name)),
        ("warm", false) => Err(Failure(failure(
            ErrorCode::Conflict,
            "remove snapshot `warm`",
            "`hot` depends on it",
            Some("--cascade removes `hot` too, `vmfork snapshot flatten hot` makes it whole"),
        ))),
        ("warm", true) => {
            let names = vec!["warm".to_owned(), "hot".to_owned()];
            Ok(Json(RemovedSnapshots { names, freed_bytes: 128 << 20 }))
        }
        _ => Ok(Json(RemovedSnapshots { names: vec![name], freed_bytes: 64 << 20 })),
    }
}

async fn start(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<StartRequest>,
) -> Json<StartReply> {
    seen.note(format!("start {name} {}", serde_json::to_string(&request).expect("JSON")));
    // `full` fits twice.
    let fits = if name == "full" { 2 } else { request.count };
    let names = request
        .names
        .clone()
        .unwrap_or_else(|| (1..=request.count).map(|n| format!("{name}.{n}")).collect());
    let vms = (1..).zip(names).map(|(vmid, vm_name)| CloneResult {
        id: None,
        vmid,
        name: vm_name,
        state: if vmid > fits { VmState::Failed } else { VmState::Running },
        running_ms: (vmid <= fits).then_some(12.5),
        ready_ms: (vmid <= fits).then(|| 20.0 + f64::from(vmid)),
        pooled: true,
        host: None,
        error: (vmid > fits).then(|| {
            let cause = "512 MiB wanted, 100 MiB left";
            failure(ErrorCode::NoCapacity, "start a VM", cause, Some("end some VMs"))
        }),
    });
    Json(StartReply {
        schema: SCHEMA.to_owned(),
        snapshot: name.clone(),
        requested: request.count,
        granted: fits.min(request.count),
        began_unix_ms: 1_700_000_000_000,
        open_ms: 4.21,
        total_ms: 31.4,
        vms: vms.collect(),
    })
}

async fn verify(Path(name): Path<String>) -> Json<VerifyReply> {
    let damaged = |place: &str| ErrorBody {
        code: ErrorCode::Host,
        message: format!("snapshot `{name}` is damaged"),
        cause: Some(format!("{place}\u{1b}: its hash is another")),
        remedy: Some("pull it again".to_owned()),
    };
    let damage = match name.as_str() {
        "torn" => vec![damaged("chunk 7"), damaged("chunk 9")],
        _ => Vec::new(),
    };
    let schema = SCHEMA.to_owned();
    let chunks_elsewhere = if name == "pulled" { 12 } else { 0 };
    let (chunks, read_bytes) = (840, 64 << 20);
    Json(VerifyReply { schema, snapshot: name, chunks, chunks_elsewhere, read_bytes, damage })
}

async fn flatten(Path(name): Path<String>) -> Json<Snapshot> {
    Json(Snapshot { base: None, ..snapshot(&name) })
}

async fn export(Path(name): Path<String>) -> Result<Response, Failure> {
    if name == "nope" {
        return Err(not_found("export", &name));
    }
    let bytes = exported();
    let mut chunks: Vec<Result<Bytes, std::io::Error>> =
        bytes.chunks(65536).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    if name == "torn" {
        chunks.truncate(9);
        chunks.push(Err(std::io::Error::other("chunk 7 is damaged")));
    }
    Ok(Body::from_stream(futures_util::stream::iter(chunks)).into_response())
}

async fn import(
    State(seen): Shared,
    Query(query): Query<Value>,
    headers: axum::http::HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Vec<Snapshot>>), Failure> {
    let kind = headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or("-");
    let mut chunks = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let Ok(chunk) = chunk else {
            seen.note("import broken off".to_owned());
            return Err(not_found("import", "-"));
        };
        bytes.extend_from_slice(&chunk);
        if bytes.starts_with(b"no snapshot") {
            // Answers with the rest still on its way.
            let cause = "it begins with other bytes than an export";
            let error = failure(ErrorCode::BadRequest, "import a snapshot", cause, None);
            return Err(Failure(error));
        }
    }
    seen.note(format!("import {} {kind} {query}", bytes.len()));
    if bytes != exported() {
        return Ok((StatusCode::CREATED, Json(Vec::new())));
    }
    let name = query.get("name").and_then(Value::as_str).unwrap_or("hot").to_owned();
    Ok((StatusCode::CREATED, Json(vec![snapshot("warm"), snapshot(&name)])))
}

async fn push(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<TransferRequest>,
) -> Json<TransferReply> {
    seen.note(format!("push {name} {}", serde_json::to_string(&request).expect("JSON")));
    Json(TransferReply {
        schema: SCHEMA.to_owned(),
        names: vec!["warm".to_owned(), name],
        sent_bytes: 64 << 20,
        total_ms: 1250.0,
    })
}

async fn pull(
    State(seen): Shared,
    Path(name): Path<String>,
    Json(request): Json<TransferRequest>,
) -> Json<Snapshot> {
    seen.note(format!("pull {name} {}", serde_json::to_string(&request).expect("JSON")));
    let mut abandoned = Abandoned(Arc::clone(&seen), false);
    if name == "long" {
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    abandoned.1 = true;
    let mut pulled = snapshot(&name);
    if !request.wait {
        pulled.state = SnapshotState::Pulling;
        pulled.remote = Some(request.location);
    }
    Json(pulled)
}

async fn profile(Path(name): Path<String>) -> Result<Json<ProfileInfo>, Failure> {
    if name == "nope" { Err(not_found("find", &name)) } else { Ok(Json(learnt())) }
}

async fn reset_profile(
    State(seen): Shared,
    Path(name): Path<String>,
) -> Result<StatusCode, Failure> {
    seen.note(format!("reset {name}"));
    if name == "nope" { Err(not_found("find", &name)) } else { Ok(StatusCode::NO_CONTENT) }
}
