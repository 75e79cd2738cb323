use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use vmfork_api::{ErrorBody, ErrorCode};

/// A failed request. The status follows from the code, but for the few that HTTP has words of its
/// own for (405, 413), which are a `bad_request` to programs.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    pub(super) fn with_status(status: StatusCode, body: ErrorBody) -> Self {
        Self { status, body }
    }
}

impl From<ErrorBody> for ApiError {
    fn from(body: ErrorBody) -> Self {
        let status = StatusCode::from_u16(body.code.http_status())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { status, body }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() {
            tracing::warn!(code = ?self.body.code, "request failed: {}", self.body);
        } else {
            tracing::debug!(code = ?self.body.code, "request refused: {}", self.body);
        }
        (self.status, Json(self.body)).into_response()
    }
}

/// A request that can't be carried out as it is put.
pub(super) fn bad_request(message: impl Into<String>) -> ErrorBody {
    ErrorBody::new(ErrorCode::BadRequest, message)
}
