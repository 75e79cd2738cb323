//! A VM's life between its start and its end: it is paused, resumed, and bounded in time.

use axum::Json;
use axum::extract::State;
use vmfork_api::schema::Name;
use vmfork_api::{ErrorBody, TtlReply, TtlRequest, Vm};

use super::App;
use super::check;
use super::elsewhere;
use super::error::ApiError;
use super::extract::{Body, VmRef};

/// Stop a VM's vCPUs until it is resumed. A paused VM stays paused.
#[utoipa::path(post, path = "/v1/vms/{vm}/pause", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    responses(
        (status = 200, body = Vm),
        (status = 409, description = "It is still starting, or has ended", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn pause(State(app): State<App>, VmRef(vm): VmRef) -> Result<Json<Vm>, ApiError> {
    let mut vm = app.control.pause(&vm).await?;
    elsewhere::name_host(&app, [&mut vm]);
    Ok(Json(vm))
}

/// Let a paused VM's vCPUs continue. A VM that is not paused runs on.
#[utoipa::path(post, path = "/v1/vms/{vm}/resume", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    responses(
        (status = 200, body = Vm),
        (status = 409, description = "It has ended", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn resume(State(app): State<App>, VmRef(vm): VmRef) -> Result<Json<Vm>, ApiError> {
    let mut vm = app.control.resume(&vm).await?;
    elsewhere::name_host(&app, [&mut vm]);
    Ok(Json(vm))
}

/// Change when a VM ends by itself, and with it the clones that inherit its bound.
#[utoipa::path(put, path = "/v1/vms/{vm}/ttl", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    request_body = TtlRequest,
    responses(
        (status = 200, body = TtlReply),
        (status = 409, description = "It has ended", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn set_ttl(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Body(request): Body<TtlRequest>,
) -> Result<Json<TtlReply>, ApiError> {
    check::ttl(request.ttl_ms)?;
    Ok(Json(app.control.set_ttl(&vm, request).await?))
}
