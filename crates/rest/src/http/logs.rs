use std::convert::Infallible;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use utoipa::IntoParams;
use vmfork_api::ErrorBody;
use vmfork_api::schema::{Name, Switch};

use super::error::ApiError;
use super::extract::{Params, VmRef, switch};
use super::{App, stopped};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LogParams {
    /// Go on until the VM ends.
    #[serde(default, deserialize_with = "switch")]
    #[param(value_type = Option<Switch>)]
    follow: bool,
}

/// Console output, and the output of programs that no client is attached to.
#[utoipa::path(get, path = "/v1/vms/{vm}/logs", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id"), LogParams),
    responses(
        (status = 200, description = "Text, in chunks as it comes", body = String, content_type = "text/plain"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn logs(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Params(params): Params<LogParams>,
) -> Result<Response, ApiError> {
    let lines = app.control.logs(&vm, params.follow).await?;
    let mut stop = app.stop.clone();
    let chunks = stream::unfold(lines, |mut lines| async move {
        let chunk = lines.recv().await?;
        Some((Ok::<_, Infallible>(chunk), lines))
    });
    // A follower must not keep a daemon from ending.
    let stopped = async move { stopped(&mut stop).await };
    let body = Body::from_stream(chunks.take_until(Box::pin(stopped)));
    Ok(([(CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response())
}
