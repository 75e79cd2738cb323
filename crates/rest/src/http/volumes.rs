use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmfork_api::labels::match_all;
use vmfork_api::schema::Name;
use vmfork_api::{
    AttachRequest, DetachRequest, Disk, ErrorBody, OnForkRequest, ResizeRequest, Volume,
    VolumeRequest,
};

use super::App;
use super::check;
use super::error::ApiError;
use super::extract::{Body, Filtered, VolumeName};
use super::vms::{LabelParams, NoParams};

/// The volumes of this host.
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes", params(LabelParams), responses(
    (status = 200, body = Vec<Volume>), (status = "default", body = ErrorBody)
))]
pub(super) async fn list(
    State(app): State<App>,
    Filtered(filters, NoParams {}): Filtered<NoParams>,
) -> Result<Json<Vec<Volume>>, ApiError> {
    let mut all = app.control.volumes().await?;
    all.retain(|volume| match_all(&filters, &volume.labels));
    Ok(Json(all))
}

/// Make a volume. Its content is copied, and on the host's medium when this answers.
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = VolumeRequest,
    responses(
        (status = 201, body = Volume),
        (status = 409, description = "The name is taken", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn create(
    State(app): State<App>,
    Body(request): Body<VolumeRequest>,
) -> Result<(StatusCode, Json<Volume>), ApiError> {
    check::volume(&request)?;
    Ok((StatusCode::CREATED, Json(app.control.create_volume(request).await?)))
}

/// One volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    responses((status = 200, body = Volume), (status = "default", body = ErrorBody))
)]
pub(super) async fn inspect(
    State(app): State<App>,
    VolumeName(name): VolumeName,
) -> Result<Json<Volume>, ApiError> {
    Ok(Json(app.control.inspect_volume(&name).await?))
}

/// Remove a volume, and all that it holds.
#[utoipa::path(delete, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    responses(
        (status = 204, description = "Removed"),
        (status = 409, description = "A VM has it", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn remove(
    State(app): State<App>,
    VolumeName(name): VolumeName,
) -> Result<StatusCode, ApiError> {
    app.control.remove_volume(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Say what a fork does with a volume. No VM may have it meanwhile.
#[utoipa::path(put, path = "/v1/volumes/{name}/on-fork", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    request_body = OnForkRequest,
    responses(
        (status = 200, body = Volume),
        (status = 409, description = "A VM has it", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn set_on_fork(
    State(app): State<App>,
    VolumeName(name): VolumeName,
    Body(request): Body<OnForkRequest>,
) -> Result<Json<Volume>, ApiError> {
    Ok(Json(app.control.set_on_fork(&name, request).await?))
}

/// Give a running VM a volume, in the place of an empty disk. The guest sees its size at once.
#[utoipa::path(post, path = "/v1/volumes/{name}/attach", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    request_body = AttachRequest,
    responses(
        (status = 200, body = Disk),
        (status = 409, description = "A VM has it, or this one has no empty disk", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn attach(
    State(app): State<App>,
    VolumeName(name): VolumeName,
    Body(request): Body<AttachRequest>,
) -> Result<Json<Disk>, ApiError> {
    check::attach(&request)?;
    Ok(Json(app.control.attach_volume(&name, request).await?))
}

/// Have a running VM give a volume back. What was written is on the medium when this answers.
#[utoipa::path(post, path = "/v1/volumes/{name}/detach", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    request_body = DetachRequest,
    responses(
        (status = 200, body = Volume),
        (status = 409, description = "The guest uses it, or the VM does not have it", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn detach(
    State(app): State<App>,
    VolumeName(name): VolumeName,
    Body(request): Body<DetachRequest>,
) -> Result<Json<Volume>, ApiError> {
    check::name("VM", &request.vm)?;
    Ok(Json(app.control.detach_volume(&name, request).await?))
}

/// Make a volume larger, whether a running VM has it or none. A VM's guest is told its new size.
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", tag = "volumes",
    params(("name" = Name, Path, description = "The volume's name")),
    request_body = ResizeRequest,
    responses(
        (status = 200, body = Volume),
        (status = 409, description = "It is larger, several VMs have it, or its VM does not run", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn resize(
    State(app): State<App>,
    VolumeName(name): VolumeName,
    Body(request): Body<ResizeRequest>,
) -> Result<Json<Volume>, ApiError> {
    check::resize(request)?;
    Ok(Json(app.control.resize_volume(&name, request).await?))
}
