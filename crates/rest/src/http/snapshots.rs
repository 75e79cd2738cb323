use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use utoipa::IntoParams;
use vmfork_api::labels::match_all;
use vmfork_api::schema::{Name, Switch};
use vmfork_api::{
    ErrorBody, ProfileInfo, RemovedSnapshots, Snapshot, SnapshotDetail, SnapshotRequest,
    StartReply, StartRequest, TransferReply, TransferRequest, VerifyReply,
};

use super::App;
use super::check;
use super::error::ApiError;
use super::extract::{Body, By, Filtered, Params, SnapshotName, switch};
use super::files::{body_of, content_of};
use super::vms::{LabelParams, NoParams};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RemoveParams {
    /// The snapshots that are deltas of it, too.
    #[serde(default, deserialize_with = "switch")]
    #[param(value_type = Option<Switch>)]
    cascade: bool,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ImportParams {
    /// What to call it; default as it was called.
    #[param(value_type = Option<Name>)]
    name: Option<String>,
}

/// The stored snapshots.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", params(LabelParams), responses(
    (status = 200, body = Vec<Snapshot>), (status = "default", body = ErrorBody)
))]
pub(super) async fn list(
    State(app): State<App>,
    Filtered(filters, NoParams {}): Filtered<NoParams>,
) -> Result<Json<Vec<Snapshot>>, ApiError> {
    let mut all = app.control.snapshots().await?;
    all.retain(|snapshot| match_all(&filters, &snapshot.labels));
    Ok(Json(all))
}

/// Keep a running VM. It pauses as in a fork; the store is written while it runs on.
#[utoipa::path(post, path = "/v1/snapshots", tag = "snapshots", request_body = SnapshotRequest,
    responses(
        (status = 201, description = "Being written or, with `wait`, stored", body = Snapshot),
        (status = 409, description = "The name is taken", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn create(
    State(app): State<App>,
    Body(request): Body<SnapshotRequest>,
) -> Result<(StatusCode, Json<Snapshot>), ApiError> {
    check::snapshot(&request)?;
    Ok((StatusCode::CREATED, Json(app.control.create_snapshot(request).await?)))
}

/// All that is known of one snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{name}", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses((status = 200, body = SnapshotDetail), (status = "default", body = ErrorBody))
)]
pub(super) async fn inspect(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Json<SnapshotDetail>, ApiError> {
    Ok(Json(app.control.inspect_snapshot(&name).await?))
}

/// Remove a snapshot from the store. One that is being written or pulled is given up; VMs that were started from it go on.
#[utoipa::path(delete, path = "/v1/snapshots/{name}", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name"), RemoveParams),
    responses(
        (status = 200, body = RemovedSnapshots),
        (status = 409, description = "Other snapshots depend on it", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn remove(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
    Params(params): Params<RemoveParams>,
) -> Result<Json<RemovedSnapshots>, ApiError> {
    Ok(Json(app.control.remove_snapshot(&name, params.cascade).await?))
}

/// Start VMs from it. What fits is started; the rest is an error of that VM each.
#[utoipa::path(post, path = "/v1/snapshots/{name}/start", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    request_body = StartRequest,
    responses(
        (status = 200, body = StartReply),
        (status = 409, description = "It was taken on another QEMU, machine or processor", body = ErrorBody),
        (status = 507, description = "They do not fit into memory", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn start(
    State(app): State<App>,
    By(user): By,
    SnapshotName(name): SnapshotName,
    Body(request): Body<StartRequest>,
) -> Result<Json<StartReply>, ApiError> {
    check::start(&request)?;
    Ok(Json(app.control.start_snapshot(user, &name, request).await?))
}

/// Read every byte that is here of it, and of what it depends on, and compare with its hash.
#[utoipa::path(post, path = "/v1/snapshots/{name}/verify", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses((status = 200, body = VerifyReply), (status = "default", body = ErrorBody))
)]
pub(super) async fn verify(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Json<VerifyReply>, ApiError> {
    Ok(Json(app.control.verify_snapshot(&name).await?))
}

/// Make a delta whole, so that it depends on no other snapshot.
#[utoipa::path(post, path = "/v1/snapshots/{name}/flatten", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses((status = 200, body = Snapshot), (status = "default", body = ErrorBody))
)]
pub(super) async fn flatten(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(app.control.flatten_snapshot(&name).await?))
}

/// One stream of bytes that `import` takes, with the snapshots that it depends on.
#[utoipa::path(get, path = "/v1/snapshots/{name}/export", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses(
        (status = 200, description = "The bytes. A connection that ends without the last chunk means that it failed half-way",
            content_type = "application/octet-stream"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn export(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Response, ApiError> {
    let body = body_of(app.control.export_snapshot(&name).await?).await?;
    Ok(([(CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

/// Store what `export` gave. If the body does not come whole, nothing is stored.
#[utoipa::path(post, path = "/v1/import", tag = "snapshots", params(ImportParams),
    request_body(content_type = "application/octet-stream", description = "Of any length"),
    responses(
        (status = 201, description = "What was not there already", body = Vec<Snapshot>),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn import(
    State(app): State<App>,
    Params(params): Params<ImportParams>,
    request: Request,
) -> Result<(StatusCode, Json<Vec<Snapshot>>), ApiError> {
    if let Some(name) = &params.name {
        check::name("snapshot", name)?;
    }
    let (content, pump) = content_of(request);
    let stored = app.control.import_snapshot(params.name, content).await;
    if stored.is_err() {
        // A client that is still sending would see a broken connection, and not the answer.
        let _ended = pump.await;
    }
    Ok((StatusCode::CREATED, Json(stored?)))
}

/// Copy it to another store, with the snapshots that it depends on.
#[utoipa::path(post, path = "/v1/snapshots/{name}/push", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    request_body = TransferRequest,
    responses((status = 200, body = TransferReply), (status = "default", body = ErrorBody))
)]
pub(super) async fn push(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
    Body(request): Body<TransferRequest>,
) -> Result<Json<TransferReply>, ApiError> {
    Ok(Json(app.control.push_snapshot(&name, request).await?))
}

/// Bring it from another store. It can be started at once; its pages come as they are needed, and in the background.
#[utoipa::path(post, path = "/v1/snapshots/{name}/pull", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    request_body = TransferRequest,
    responses((status = 200, body = Snapshot), (status = "default", body = ErrorBody))
)]
pub(super) async fn pull(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
    Body(request): Body<TransferRequest>,
) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(app.control.pull_snapshot(&name, request).await?))
}

/// Which pages its VMs touch first.
#[utoipa::path(get, path = "/v1/snapshots/{name}/profile", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses((status = 200, body = ProfileInfo), (status = "default", body = ErrorBody))
)]
pub(super) async fn profile(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Json<ProfileInfo>, ApiError> {
    Ok(Json(app.control.snapshot_profile(&name).await?))
}

/// Forget which pages its VMs touch first.
#[utoipa::path(delete, path = "/v1/snapshots/{name}/profile", tag = "snapshots",
    params(("name" = Name, Path, description = "The snapshot's name")),
    responses((status = 204, description = "Forgotten"), (status = "default", body = ErrorBody))
)]
pub(super) async fn reset_profile(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<StatusCode, ApiError> {
    app.control.reset_snapshot_profile(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
