//! The fake daemon's events: a connection that breaks, and one that has lost something.

use std::io;

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use vmfork_api::ErrorCode;

use super::routes::{Failure, Shared, failure};

const EPOCH: &str = "0000000000000abc";

fn started(seq: u32, name: &str) -> String {
    format!(
        "id: {EPOCH}-{seq}\ndata: {{\"cursor\":\"{EPOCH}-{seq}\",\"time_unix_ms\":1764055799123,\
         \"kind\":\"vm.started\",\"vm\":{{\"id\":\"aa\",\"name\":\"{name}\",\"family\":\"aa\"}}}}\n\n"
    )
}

pub(super) async fn events(State(seen): Shared, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    seen.note(format!("events {query}"));
    let gap = format!(
        "id: {EPOCH}-7\ndata: {{\"cursor\":\"{EPOCH}-7\",\"time_unix_ms\":1764055799124,\
         \"kind\":\"gap\",\"cause\":\"overflow\",\"lost\":5}}\n\n"
    );
    let resumes_at = |seq: &str| query.contains(&format!("after={EPOCH}-{seq}"));
    if query.contains("after=bad") {
        let refused = failure(
            ErrorCode::BadRequest,
            "read the events",
            "`bad` is not a cursor",
            Some("take the `cursor` of an event"),
        );
        return Failure(refused).into_response();
    }
    let chunks = if resumes_at("2") {
        vec![Ok(gap), Ok(started(8, "c"))]
    } else {
        // The heartbeat's cursor is behind an event that a filter left out.
        let heartbeat = format!(": heartbeat\nid: {EPOCH}-2\n\n");
        let torn = started(3, "never whole")[..40].to_owned();
        let lost = Err(io::Error::from(io::ErrorKind::ConnectionReset));
        vec![Ok("retry: 1000\n\n".to_owned()), Ok(started(1, "a") + &heartbeat), Ok(torn), lost]
    };
    // One after the other: what stands before an error is to arrive.
    let chunks = stream::unfold(chunks.into_iter(), |mut chunks| async move {
        let chunk = chunks.next()?;
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        Some((chunk.map(Bytes::from), chunks))
    });
    Body::from_stream(chunks).into_response()
}
