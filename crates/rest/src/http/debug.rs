//! Faults on request, where `--debug-faults` allows them: not part of the API, nor of its document.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;

use super::App;
use super::error::ApiError;
use super::extract::VmRef;

pub(super) fn routes() -> Router<App> {
    Router::new().route("/v1/debug/vms/{vm}/engine-panic", post(panic_engine))
}

async fn panic_engine(State(app): State<App>, VmRef(vm): VmRef) -> Result<StatusCode, ApiError> {
    app.control.panic_engine(&vm).await?;
    Ok(StatusCode::NO_CONTENT)
}
