//! The REST API: requests in, calls of [`Control`] out.
//!
//! ```text
//!   socket ──► listen (who may connect) ──► auth (TCP only) ──► route ──► extract, check ──► Control
//!                                                                ├─ exec, console: WebSocket
//!                                                                └─ images' bytes: NBD
//! ```
//!
//! Promises: every error is an `ErrorBody`, whatever was wrong with the request, a panic included.
//! What a handler awaits is dropped when its client goes away, and with it the operation. No queue
//! grows with what a client sends or fails to read: a slow reader slows the guest's program.
//!
//! Left to others: what the operations mean ([`Control`]); what users may do (there is one kind: who may open the socket, or has
//! the token; whose VMs are whose is for quotas alone).

mod auth;
mod check;
mod cluster;
mod console;
mod debug;
mod disks;
mod document;
mod elsewhere;
mod error;
mod events;
mod exec;
mod exec_stream;
mod extract;
mod files;
mod host;
mod lifetime;
mod listen;
mod logs;
mod nbd;
mod server;
mod snapshots;
mod vms;
mod volumes;
mod ws;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use tokio::sync::{Semaphore, watch};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vmfork_api::{ErrorBody, ErrorCode};

pub use self::error::ApiError;
use self::error::bad_request;
use vmfork_control::{ClusterControl, Control};

pub use self::auth::{Token, TokenError};
pub use self::elsewhere::PASSED_ON;
pub use self::elsewhere::{Answered, Elsewhere};
pub use self::listen::keep_alive;
pub use self::listen::{FileId, ListenError, Listeners, SOCKET_PATH_BYTES_MAX, SocketOwner};
pub use self::server::connection;
pub use self::server::serve;

/// JSON bodies are small; only `POST …/exec` may be larger, for its standard input.
const JSON_BYTES_MAX: usize = 1024 * 1024;

/// What is counted, of requests and of everything else.
pub trait Counters: Send + Sync {
    /// A request was answered.
    fn request(&self, method: &str, route: &str, status: u16);

    /// All of it, for Prometheus.
    fn text(&self) -> String;
}

/// What each request is served with.
#[derive(Clone)]
pub struct App {
    control: Arc<dyn Control>,
    metrics: Arc<dyn Counters>,
    /// Becomes true when the daemon ends: open streams are closed.
    stop: watch::Receiver<bool>,
    debug_faults: bool,
    elsewhere: Option<Arc<dyn Elsewhere>>,
    cluster: Option<Arc<dyn ClusterControl>>,
    /// Places for streams of events.
    event_streams: Arc<Semaphore>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").finish_non_exhaustive()
    }
}

impl App {
    pub fn new(
        control: Arc<dyn Control>,
        metrics: Arc<dyn Counters>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        let event_streams = Arc::new(Semaphore::new(events::STREAMS_MAX));
        Self {
            control,
            metrics,
            stop,
            debug_faults: false,
            elsewhere: None,
            cluster: None,
            event_streams,
        }
    }

    /// Where requests about VMs of other hosts go.
    #[must_use]
    pub fn elsewhere(self, elsewhere: Arc<dyn Elsewhere>) -> Self {
        Self { elsewhere: Some(elsewhere), ..self }
    }

    /// What to do with the cluster that this host is a member of.
    #[must_use]
    pub fn cluster(self, cluster: Arc<dyn ClusterControl>) -> Self {
        Self { cluster: Some(cluster), ..self }
    }

    /// Whether to serve the routes that make faults happen.
    #[must_use]
    pub fn debug_faults(self, debug_faults: bool) -> Self {
        Self { debug_faults, ..self }
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "vmfork",
        description = "Fork running virtual machines. Every error is an `ErrorBody`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(
        vmfork_api::ExecClientMessage,
        vmfork_api::ExecServerMessage,
        vmfork_api::ErrorBody,
        vmfork_api::EventKind,
        vmfork_api::schema::FileMode,
        vmfork_api::schema::GuestFilePath,
        vmfork_api::schema::GuestPath,
        vmfork_api::schema::Name,
        vmfork_api::schema::Switch
    )),
    tags(
        (name = "vms", description = "Virtual machines: run, fork, inspect, end"),
        (name = "disks", description = "Disks: what VMs wrote, also after they ended"),
        (name = "snapshots", description = "Stored snapshots: take, start, keep, move"),
        (name = "volumes", description = "Disks that outlive the virtual machines that have them"),
        (name = "guest", description = "Inside a virtual machine: programs, files, console"),
        (name = "cluster", description = "The hosts that fork onto each other"),
        (name = "host", description = "This host: state, checks, images, events, metrics"),
    )
)]
struct Document;

fn routes() -> OpenApiRouter<App> {
    let exec = OpenApiRouter::new()
        .routes(routes!(exec::exec))
        .layer(DefaultBodyLimit::max(exec::REQUEST_BYTES_MAX));
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(host::version))
        .routes(routes!(host::doctor))
        .routes(routes!(host::host))
        .routes(routes!(host::images))
        .routes(routes!(host::push_image))
        .routes(routes!(host::pull_image))
        .routes(routes!(host::seed_image, host::unseed_image))
        .routes(routes!(host::image_profile, host::reset_image_profile))
        .routes(routes!(host::remove_image))
        .routes(routes!(nbd::image))
        .routes(routes!(vms::list, vms::run))
        .routes(routes!(vms::inspect, vms::remove))
        .routes(routes!(vms::kill))
        .routes(routes!(vms::fork))
        .routes(routes!(lifetime::pause))
        .routes(routes!(lifetime::resume))
        .routes(routes!(lifetime::set_ttl))
        .routes(routes!(vms::tree))
        .routes(routes!(exec_stream::exec_stream))
        .routes(routes!(files::read, files::write))
        .routes(routes!(logs::logs))
        .routes(routes!(console::console))
        .routes(routes!(disks::list))
        .routes(routes!(disks::inspect, disks::remove))
        .routes(routes!(disks::content))
        .routes(routes!(disks::resize))
        .routes(routes!(snapshots::list, snapshots::create))
        .routes(routes!(snapshots::inspect, snapshots::remove))
        .routes(routes!(snapshots::start))
        .routes(routes!(snapshots::verify))
        .routes(routes!(snapshots::flatten))
        .routes(routes!(snapshots::export))
        .routes(routes!(snapshots::import))
        .routes(routes!(snapshots::push))
        .routes(routes!(snapshots::pull))
        .routes(routes!(snapshots::profile, snapshots::reset_profile))
        .routes(routes!(volumes::list, volumes::create))
        .routes(routes!(volumes::inspect, volumes::remove))
        .routes(routes!(volumes::set_on_fork))
        .routes(routes!(volumes::attach))
        .routes(routes!(volumes::detach))
        .routes(routes!(volumes::resize))
        .routes(routes!(cluster::show, cluster::init))
        .routes(routes!(cluster::join))
        .routes(routes!(cluster::token))
        .routes(routes!(cluster::leave))
        .routes(routes!(cluster::drain))
        .routes(routes!(cluster::activate))
        .routes(routes!(events::events))
        .routes(routes!(host::openapi))
        .routes(routes!(host::metrics))
        .layer(DefaultBodyLimit::max(JSON_BYTES_MAX))
        .merge(exec)
}

/// The OpenAPI document, as `docs/openapi.json` has it.
pub fn openapi_json() -> String {
    let (_, document) = routes().split_for_parts();
    let mut json = document.to_pretty_json().unwrap_or_else(|error| {
        unreachable!("the document is made of structs and string keys: {error}")
    });
    json.push('\n');
    json
}

/// All routes. Any client that can send a request may do anything.
pub fn router(app: App) -> Router {
    let (mut router, _) = routes().split_for_parts();
    if app.debug_faults {
        router = router.merge(debug::routes());
    }
    router
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), elsewhere::pass_on))
        .layer(from_fn(catch_panic))
        .layer(from_fn_with_state(app.clone(), count))
        .with_state(app)
}

/// The same for clients that send `Authorization: Bearer TOKEN`.
pub fn router_with_token(app: App, token: Token) -> Router {
    router(app).layer(from_fn_with_state(Arc::new(token), auth::require))
}

/// Waits until the daemon is to end, or the sender of that notice was dropped.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn no_such_route(method: Method, uri: Uri) -> ApiError {
    ErrorBody::new(ErrorCode::NotFound, format!("no route `{method} {}`", uri.path()))
        .remedy("the routes are in /v1/openapi.json; perhaps client and daemon differ in version")
        .into()
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::with_status(
        StatusCode::METHOD_NOT_ALLOWED,
        bad_request(format!("`{}` does not take {method}", uri.path()))
            .remedy("the methods of each route are in /v1/openapi.json"),
    )
}

/// A handler that panics is a bug of one request, not the end of the daemon.
async fn catch_panic(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            tracing::error!(path, "a request's handler panicked");
            ApiError::from(
                ErrorBody::new(ErrorCode::Internal, format!("the handler of `{path}` panicked"))
                    .remedy("this is a bug of vmfork: please report it with the daemon's log"),
            )
            .into_response()
        }
    }
}

async fn count(State(app): State<App>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "none".to_owned(), |matched| matched.as_str().to_owned());
    // HTTP lets anybody make up methods: only those that a route may have become labels.
    let known = [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE];
    let label = if known.contains(&method) { method.as_str() } else { "other" };
    let response = next.run(request).await;
    app.metrics.request(label, &route, response.status().as_u16());
    response
}
