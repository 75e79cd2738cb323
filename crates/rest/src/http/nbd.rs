//! Disks' bytes over a connection that speaks NBD from the answer on.

use std::os::unix::net::UnixStream;

use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::sync::watch;
use utoipa::IntoParams;
use vmfork_api::schema::Name;
use vmfork_api::{ErrorBody, ErrorCode};

use super::error::{ApiError, bad_request};
use super::extract::{By, ImageName, Params};
use super::{App, stopped};

/// What the connection speaks.
const NBD: &str = "nbd";
/// Copied at a time.
const COPY_BYTES: usize = 256 << 10;

/// How an image is served.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub(super) struct Serving {
    /// The client may write. What it wrote lasts as long as the connection.
    #[serde(default)]
    writable: bool,
}

/// What an image's root holds, by NBD. The request asks for an upgrade to `nbd`. After the answer
/// the connection is that of a client of an NBD server, whose one export has the image's name.
#[utoipa::path(get, path = "/v1/images/{name}/nbd", tag = "host",
    params(("name" = Name, Path, description = "The image's name"), Serving),
    responses(
        (status = 101, description = "NBD: fixed newstyle, structured replies, base:allocation"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn image(
    State(app): State<App>,
    By(user): By,
    ImageName(name): ImageName,
    Params(Serving { writable }): Params<Serving>,
    request: Request,
) -> Result<Response, ApiError> {
    check_upgrade(request.headers())?;
    let upgraded = hyper::upgrade::on(request);
    let socket = app.control.serve_image(user, &name, writable).await?;
    let failed = |error: std::io::Error| {
        ErrorBody::new(ErrorCode::Host, format!("serve image `{name}`")).cause(error)
    };
    socket.set_nonblocking(true).map_err(failed)?;
    let stop = app.stop.clone();
    tokio::spawn(async move {
        match upgraded.await {
            Ok(theirs) => join(TokioIo::new(theirs), socket, stop).await,
            Err(error) => tracing::debug!(%error, "a client of a disk went"),
        }
    });
    let told = [(CONNECTION, "upgrade"), (UPGRADE, NBD)];
    let told = told.map(|(name, value)| (name, HeaderValue::from_static(value)));
    Ok((StatusCode::SWITCHING_PROTOCOLS, told).into_response())
}

fn check_upgrade(headers: &HeaderMap) -> Result<(), ApiError> {
    let has = |name, word: &str| {
        let value = headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        value.is_some_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case(word)))
    };
    if has(CONNECTION, "upgrade") && has(UPGRADE, NBD) {
        return Ok(());
    }
    Err(bad_request("this route speaks NBD")
        .cause("the request does not ask for an upgrade to `nbd`")
        .remedy("use `vmfork image serve`, or send `Connection: upgrade` and `Upgrade: nbd`")
        .into())
}

/// Until one of them ends, or the daemon.
async fn join(
    mut theirs: TokioIo<hyper::upgrade::Upgraded>,
    ours: UnixStream,
    mut stop: watch::Receiver<bool>,
) {
    let mut ours = match tokio::net::UnixStream::from_std(ours) {
        Ok(ours) => ours,
        Err(error) => return tracing::warn!(%error, "the socket of a disk's client"),
    };
    tokio::select! {
        // How it ends tells nothing: a client just goes.
        _ = copy_bidirectional_with_sizes(&mut theirs, &mut ours, COPY_BYTES, COPY_BYTES) => {}
        () = stopped(&mut stop) => {}
    }
}
