use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use vmfork_api::schema::Name;
use vmfork_api::{
    DoctorReport, ErrorBody, HostInfo, Image, ImageProfile, ImagePullRequest, TransferReply,
    TransferRequest, Version,
};

use super::App;
use super::error::ApiError;
use super::extract::{Body, ImageName};

/// Versions of the daemon, QEMU and the kernel.
#[utoipa::path(get, path = "/v1/version", tag = "host", responses(
    (status = 200, body = Version), (status = "default", body = ErrorBody)
))]
pub(super) async fn version(State(app): State<App>) -> Result<Json<Version>, ApiError> {
    Ok(Json(app.control.version().await?))
}

/// What the host has and lacks, as the daemon sees it.
#[utoipa::path(get, path = "/v1/doctor", tag = "host", responses(
    (status = 200, body = DoctorReport), (status = "default", body = ErrorBody)
))]
pub(super) async fn doctor(State(app): State<App>) -> Result<Json<DoctorReport>, ApiError> {
    Ok(Json(app.control.doctor().await?))
}

/// Memory, the pool, and what an earlier daemon lost.
#[utoipa::path(get, path = "/v1/host", tag = "host", responses(
    (status = 200, body = HostInfo), (status = "default", body = ErrorBody)
))]
pub(super) async fn host(State(app): State<App>) -> Result<Json<HostInfo>, ApiError> {
    Ok(Json(app.control.host().await?))
}

/// The guest images in the store.
#[utoipa::path(get, path = "/v1/images", tag = "host", responses(
    (status = 200, body = Vec<Image>), (status = "default", body = ErrorBody)
))]
pub(super) async fn images(State(app): State<App>) -> Result<Json<Vec<Image>>, ApiError> {
    Ok(Json(app.control.images().await?))
}

/// Remove an image from the store.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    responses(
        (status = 204, description = "Removed"),
        (status = 409, description = "A VM uses it", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn remove_image(
    State(app): State<App>,
    ImageName(name): ImageName,
) -> Result<StatusCode, ApiError> {
    app.control.remove_image(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Copy an image to another store.
#[utoipa::path(post, path = "/v1/images/{name}/push", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    request_body = TransferRequest,
    responses((status = 200, body = TransferReply), (status = "default", body = ErrorBody))
)]
pub(super) async fn push_image(
    State(app): State<App>,
    ImageName(name): ImageName,
    Body(request): Body<TransferRequest>,
) -> Result<Json<TransferReply>, ApiError> {
    Ok(Json(app.control.push_image(&name, request).await?))
}

/// Bring an image from another store, or from hosts of the cluster. VMs can boot from it at once;
/// its root comes as it is read, and in the background.
#[utoipa::path(post, path = "/v1/images/{name}/pull", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    request_body = ImagePullRequest,
    responses((status = 200, body = Image), (status = "default", body = ErrorBody))
)]
pub(super) async fn pull_image(
    State(app): State<App>,
    ImageName(name): ImageName,
    Body(request): Body<ImagePullRequest>,
) -> Result<Json<Image>, ApiError> {
    Ok(Json(app.control.pull_image(&name, request.into()).await?))
}

/// Let other hosts of the cluster pull an image from this one: a copy of it is kept in the host's
/// store. They pull it from `cluster://`, and from each other.
#[utoipa::path(post, path = "/v1/images/{name}/seed", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    responses((status = 200, body = Image), (status = "default", body = ErrorBody))
)]
pub(super) async fn seed_image(
    State(app): State<App>,
    ImageName(name): ImageName,
) -> Result<Json<Image>, ApiError> {
    Ok(Json(app.control.seed_image(&name).await?))
}

/// End that. What other hosts have pulled stays with them.
#[utoipa::path(delete, path = "/v1/images/{name}/seed", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    responses(
        (status = 204, description = "No host pulls it from this one"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn unseed_image(
    State(app): State<App>,
    ImageName(name): ImageName,
) -> Result<StatusCode, ApiError> {
    app.control.unseed_image(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What VMs read of an image, and when, by workload: what is fetched first where the image is
/// pulled.
#[utoipa::path(get, path = "/v1/images/{name}/profile", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    responses((status = 200, body = ImageProfile), (status = "default", body = ErrorBody))
)]
pub(super) async fn image_profile(
    State(app): State<App>,
    ImageName(name): ImageName,
) -> Result<Json<ImageProfile>, ApiError> {
    Ok(Json(app.control.image_profile(&name).await?))
}

/// Forget what VMs read of an image.
#[utoipa::path(delete, path = "/v1/images/{name}/profile", tag = "host",
    params(("name" = Name, Path, description = "The image's name")),
    responses((status = 204, description = "Forgotten"), (status = "default", body = ErrorBody))
)]
pub(super) async fn reset_image_profile(
    State(app): State<App>,
    ImageName(name): ImageName,
) -> Result<StatusCode, ApiError> {
    app.control.reset_image_profile(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "host", responses(
    (status = 200, description = "OpenAPI 3.1", content_type = "application/json")
))]
pub(super) async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], super::openapi_json())
}

/// Counters, gauges and histograms for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "host", responses(
    (status = 200, description = "OpenMetrics text", body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8")
))]
pub(super) async fn metrics(State(app): State<App>) -> impl IntoResponse {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, OPEN_METRICS)], app.metrics.text())
}
