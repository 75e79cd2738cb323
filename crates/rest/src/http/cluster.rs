use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use vmfork_api::{
    ClusterHostRequest, ClusterInfo, ClusterInitRequest, ClusterJoinRequest, ClusterToken,
    ClusterTokenRequest, ErrorBody, ErrorCode,
};

use super::App;
use super::error::ApiError;
use super::extract::{Body, OptionalBody};
use vmfork_control::ClusterControl;

fn control(app: &App) -> Result<&Arc<dyn ClusterControl>, ApiError> {
    let none = || ErrorBody::new(ErrorCode::Host, "this daemon can be in no cluster");
    Ok(app.cluster.as_ref().ok_or_else(none)?)
}

/// The hosts of the cluster.
#[utoipa::path(get, path = "/v1/cluster", tag = "cluster", responses(
    (status = 200, body = ClusterInfo), (status = "default", body = ErrorBody)
))]
pub(super) async fn show(State(app): State<App>) -> Result<Json<ClusterInfo>, ApiError> {
    Ok(Json(control(&app)?.cluster().await?))
}

/// Make a cluster of this host alone.
#[utoipa::path(post, path = "/v1/cluster", tag = "cluster", request_body = ClusterInitRequest,
    responses(
        (status = 201, body = ClusterInfo),
        (status = 409, description = "It is in one already", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn init(
    State(app): State<App>,
    Body(request): Body<ClusterInitRequest>,
) -> Result<(StatusCode, Json<ClusterInfo>), ApiError> {
    Ok((StatusCode::CREATED, Json(control(&app)?.init_cluster(request).await?)))
}

/// Join the cluster whose host made the token.
#[utoipa::path(post, path = "/v1/cluster/join", tag = "cluster",
    request_body = ClusterJoinRequest,
    responses((status = 200, body = ClusterInfo), (status = "default", body = ErrorBody))
)]
pub(super) async fn join(
    State(app): State<App>,
    Body(request): Body<ClusterJoinRequest>,
) -> Result<Json<ClusterInfo>, ApiError> {
    Ok(Json(control(&app)?.join_cluster(request).await?))
}

/// Make a token, by which one host can join.
#[utoipa::path(post, path = "/v1/cluster/token", tag = "cluster",
    request_body = Option<ClusterTokenRequest>,
    responses((status = 200, body = ClusterToken), (status = "default", body = ErrorBody))
)]
pub(super) async fn token(
    State(app): State<App>,
    OptionalBody(request): OptionalBody<ClusterTokenRequest>,
) -> Result<Json<ClusterToken>, ApiError> {
    Ok(Json(control(&app)?.cluster_token(request).await?))
}

/// Take a host out of the cluster. What other hosts' VMs still need of its pages is lost with it.
#[utoipa::path(post, path = "/v1/cluster/leave", tag = "cluster",
    request_body = Option<ClusterHostRequest>,
    responses((status = 200, body = ClusterInfo), (status = "default", body = ErrorBody))
)]
pub(super) async fn leave(
    State(app): State<App>,
    OptionalBody(request): OptionalBody<ClusterHostRequest>,
) -> Result<Json<ClusterInfo>, ApiError> {
    Ok(Json(control(&app)?.leave_cluster(request).await?))
}

/// Give a host no more clones.
#[utoipa::path(post, path = "/v1/cluster/drain", tag = "cluster",
    request_body = Option<ClusterHostRequest>,
    responses((status = 200, body = ClusterInfo), (status = "default", body = ErrorBody))
)]
pub(super) async fn drain(
    State(app): State<App>,
    OptionalBody(request): OptionalBody<ClusterHostRequest>,
) -> Result<Json<ClusterInfo>, ApiError> {
    Ok(Json(control(&app)?.drain_cluster_host(request, true).await?))
}

/// Take a host back into use that was drained.
#[utoipa::path(post, path = "/v1/cluster/activate", tag = "cluster",
    request_body = Option<ClusterHostRequest>,
    responses((status = 200, body = ClusterInfo), (status = "default", body = ErrorBody))
)]
pub(super) async fn activate(
    State(app): State<App>,
    OptionalBody(request): OptionalBody<ClusterHostRequest>,
) -> Result<Json<ClusterInfo>, ApiError> {
    Ok(Json(control(&app)?.drain_cluster_host(request, false).await?))
}
