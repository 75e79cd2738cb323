use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use vmfork_api::schema::DiskId;
use vmfork_api::{ErrorBody, HostDisk, ResizeRequest};

use super::App;
use super::check;
use super::error::ApiError;
use super::extract::{Body, DiskRef};
use super::files::body_of;

const SIZE: HeaderName = HeaderName::from_static("x-vmfork-size");

/// The disks of this host: those of its VMs, and those that VMs of earlier daemons left.
#[utoipa::path(get, path = "/v1/disks", tag = "disks", responses(
    (status = 200, body = Vec<HostDisk>), (status = "default", body = ErrorBody)
))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<Vec<HostDisk>>, ApiError> {
    Ok(Json(app.control.disks().await?))
}

/// One disk of this host.
#[utoipa::path(get, path = "/v1/disks/{id}", tag = "disks",
    params(("id" = DiskId, Path, description = "The disk's ID")),
    responses((status = 200, body = HostDisk), (status = "default", body = ErrorBody))
)]
pub(super) async fn inspect(
    State(app): State<App>,
    DiskRef(id): DiskRef,
) -> Result<Json<HostDisk>, ApiError> {
    Ok(Json(app.control.inspect_disk(&id).await?))
}

/// Remove a disk that no VM has.
#[utoipa::path(delete, path = "/v1/disks/{id}", tag = "disks",
    params(("id" = DiskId, Path, description = "The disk's ID")),
    responses(
        (status = 204, description = "Removed"),
        (status = 409, description = "It is in use", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn remove(
    State(app): State<App>,
    DiskRef(id): DiskRef,
) -> Result<StatusCode, ApiError> {
    app.control.remove_disk(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// All bytes of a disk: a raw image. If a VM has it, it is as after a power cut: `sync` first.
#[utoipa::path(get, path = "/v1/disks/{id}/content", tag = "disks",
    params(("id" = DiskId, Path, description = "The disk's ID")),
    responses(
        (status = 200, description = "The bytes. A connection that ends without the last chunk means that it failed half-way",
            content_type = "application/octet-stream",
            headers(("x-vmfork-size" = u64, description = "How many come, in bytes"))),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn content(
    State(app): State<App>,
    DiskRef(id): DiskRef,
) -> Result<Response, ApiError> {
    let disk = app.control.export_disk(&id).await?;
    let headers = [
        (CONTENT_TYPE, "application/octet-stream".to_owned()),
        (SIZE, disk.size_bytes.to_string()),
    ];
    Ok((headers, body_of(disk.content).await?).into_response())
}

/// Make the disk of a running VM larger, or a volume. The guest is told its new size.
#[utoipa::path(post, path = "/v1/disks/{id}/resize", tag = "disks",
    params(("id" = DiskId, Path, description = "The disk's ID")),
    request_body = ResizeRequest,
    responses(
        (status = 200, body = HostDisk),
        (status = 409, description = "It is larger, no VM has it, or its VM does not run", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn resize(
    State(app): State<App>,
    DiskRef(id): DiskRef,
    Body(request): Body<ResizeRequest>,
) -> Result<Json<HostDisk>, ApiError> {
    check::resize(request)?;
    Ok(Json(app.control.resize_disk(&id, request).await?))
}
