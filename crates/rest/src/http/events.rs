//! `GET /v1/events`: what happens on this host, as server-sent events.
//!
//! ```text
//!   after ──► read a page ──► chunk: events that pass the filter ──► client
//!               ▲   └─ nothing new: wait ──► chunk: heartbeat ─────────▲
//!               └── cursor, all that a stream keeps
//! ```
//!
//! Promises: a client gets each event that passes its filter once and in order, or a `gap` in its
//! place. A slow client holds no event: the next page is read when it has taken the one before.
//! Each chunk that has no event carries the cursor, too, so that a client resumes behind events
//! that its filter left out.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use utoipa::IntoParams;
use vmfork_api::schema::{Name, Switch};
use vmfork_api::{ErrorBody, ErrorCode, EventFilter, EventKind};
use vmfork_control::{Cursor, Events};

use super::error::{ApiError, bad_request};
use super::extract::{OverTcp, Params, switch};
use super::listen::{Socket, Watched};
use super::{App, check, stopped};

/// Streams at a time, so that readers of events leave connections for other requests.
pub(super) const STREAMS_MAX: usize = 256;
/// A chunk takes no more events from this size on: 64 KiB. So it has at most one event more.
const CHUNK_BYTES: usize = 64 << 10;
/// How often a stream that has nothing to tell shows that it lives.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a client should wait before it connects again, in ms.
const RETRY_MS: u32 = 1_000;
/// By which browsers say which event they have read last.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventParams {
    /// The cursor of the event that was read last, to continue after it; `0`: all that the daemon
    /// still has. Default: what happens from now on or, with `follow=false`, `0`. A
    /// `Last-Event-ID` header has precedence.
    #[param(value_type = Option<String>, pattern = "^(?:0|[0-9a-f]{16}-(?:0|[1-9][0-9]{0,19}))$")]
    after: Option<String>,
    /// Only events of these kinds, separated by commas. A `gap` comes in any case.
    #[param(value_type = Option<String>, example = "vm.started,vm.ended")]
    kind: Option<String>,
    /// Only events about the VM of this name or id. A `gap` comes in any case.
    #[param(value_type = Option<Name>)]
    vm: Option<String>,
    /// `false`: end after the events that have happened so far. Default: continue.
    #[serde(default = "yes", deserialize_with = "switch")]
    #[param(value_type = Option<Switch>)]
    follow: bool,
}

fn yes() -> bool {
    true
}

/// What happens on this host. Each server-sent event has the JSON of an `Event` as its `data` and
/// its cursor as its `id`. Every 15 s a heartbeat carries the cursor alone.
#[utoipa::path(get, path = "/v1/events", tag = "host",
    params(
        EventParams,
        ("Last-Event-ID" = Option<String>, Header, description = "As `after`; browsers send it")
    ),
    responses(
        (status = 200, description = "Server-sent events; the `data` of each is an `Event`",
            body = vmfork_api::Event, content_type = "text/event-stream"),
        (status = 400, description = "The cursor or a filter is malformed", body = ErrorBody),
        (status = 507, description = "Too many streams", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn events(
    State(app): State<App>,
    headers: HeaderMap,
    OverTcp(socket): OverTcp,
    Params(params): Params<EventParams>,
) -> Result<Response, ApiError> {
    let events = app.control.events();
    let filter = filter(&params)?;
    let after = begin(&events, &headers, &params)?;
    let place = Arc::clone(&app.event_streams).try_acquire_owned().map_err(|_| {
        ErrorBody::new(ErrorCode::NoCapacity, "read the events")
            .cause(format!("{STREAMS_MAX} streams of events are open"))
            .remedy("close some; one stream can serve any number of filters")
    })?;
    let until = (!params.follow).then(|| events.newest());
    let watched = socket.map(Socket::watch);
    let stream =
        Stream { events, filter, after, until, has_begun: false, _watched: watched, _place: place };
    let mut stop = app.stop.clone();
    let chunks = stream::unfold(stream, |mut stream| async move {
        let chunk = stream.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(chunk)), stream))
    });
    // A reader must not keep a daemon from ending. One that reads to an end must not take the
    // daemon's for it.
    let stopped = async move {
        match params.follow {
            true => stopped(&mut stop).await,
            false => std::future::pending().await,
        }
    };
    let body = Body::from_stream(chunks.take_until(Box::pin(stopped)));
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    Ok((headers, body).into_response())
}

fn filter(params: &EventParams) -> Result<EventFilter, ErrorBody> {
    let words = params.kind.iter().flat_map(|kinds| kinds.split(','));
    let kinds = words.map(|word| {
        EventKind::of_word(word).ok_or_else(|| {
            let known: Vec<&str> = EventKind::ALL.into_iter().map(EventKind::word).collect();
            bad_request("read the events")
                .cause(format!("`{}` is no kind of event", word.escape_debug()))
                .remedy(format!("the kinds are {}", known.join(", ")))
        })
    });
    let kinds = kinds.collect::<Result<_, _>>()?;
    if let Some(vm) = &params.vm {
        check::name("VM", vm)?;
    }
    Ok(EventFilter { kinds, vm: params.vm.clone() })
}

/// Where the reader begins.
fn begin(events: &Events, headers: &HeaderMap, params: &EventParams) -> Result<Cursor, ErrorBody> {
    let refused = |cause: String| {
        bad_request("read the events")
            .cause(cause)
            .remedy("take the `cursor` of an event, or `after=0` for all that the daemon still has")
    };
    let header = headers.get(LAST_EVENT_ID).map(|id| id.to_str().unwrap_or("not text"));
    let after = match header.filter(|id| !id.is_empty()).or(params.after.as_deref()) {
        None if params.follow => return Ok(events.newest()),
        None | Some("0") => return Ok(events.start()),
        Some(after) => after,
    };
    let cursor = after.parse().map_err(|error| refused(format!("{error}")))?;
    // What this daemon never gave out is no place to wait at.
    events.read(cursor).map_err(|error| refused(error.to_string()))?;
    Ok(cursor)
}

/// What is kept for a client.
struct Stream {
    events: Arc<Events>,
    filter: EventFilter,
    after: Cursor,
    /// Where it ends, if it does not follow.
    until: Option<Cursor>,
    has_begun: bool,
    /// A client that vanished gives its place back.
    _watched: Option<Watched>,
    _place: OwnedSemaphorePermit,
}

impl Stream {
    /// The next chunk; `None`: that was all.
    async fn next(&mut self) -> Option<String> {
        if !self.has_begun {
            self.has_begun = true;
            // The cursor, so that a client that reconnects before its first event loses none.
            let mut chunk = format!("retry: {RETRY_MS}\n");
            if self.until.is_none() {
                let _to_memory = writeln!(chunk, "id: {}", self.after);
            }
            chunk.push('\n');
            return Some(chunk);
        }
        // Since the last chunk: events that the filter leaves out do not put it off.
        let heartbeat = Instant::now() + HEARTBEAT;
        loop {
            let is_done =
                |until: Cursor| until.epoch == self.after.epoch && self.after.seq >= until.seq;
            if self.until.is_some_and(is_done) {
                return None;
            }
            // A cursor that was given out stays valid: this daemon's never get ahead of it.
            let page = self.events.read(self.after).ok()?;
            let is_new = !page.is_empty();
            let mut chunk = String::new();
            for told in page {
                self.after = told.at;
                if self.filter.passes(&told.event.what) {
                    let _to_memory = write!(chunk, "id: {}\ndata: {}\n\n", told.at, told.json);
                }
                if chunk.len() >= CHUNK_BYTES {
                    break;
                }
            }
            if !chunk.is_empty() {
                return Some(chunk);
            }
            if is_new && Instant::now() < heartbeat {
                continue;
            }
            let waited = tokio::time::timeout_at(heartbeat, self.events.wait(self.after)).await;
            if waited.is_err() || Instant::now() >= heartbeat {
                return Some(format!(": heartbeat\nid: {}\n\n", self.after));
            }
        }
    }
}
