use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use utoipa::IntoParams;
use vmfork_api::schema::{FileMode, GuestFilePath, GuestPath, Name};
use vmfork_api::{ErrorBody, ErrorCode};

use super::App;
use super::check;
use super::error::ApiError;
use super::extract::{Params, VmRef};
use vmfork_control::ByteStream;

/// Most bytes that go to [`vmfork_control::Control`] at once.
pub(super) const CHUNK_BYTES_MAX: usize = 64 * 1024;
/// Chunks between a client and a guest: a megabyte.
const CHUNKS_MAX: usize = 16;
/// How long what is left of a file that can't be stored is read, and thrown away.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadParams {
    /// The path in the guest, from the root.
    #[param(value_type = GuestPath)]
    path: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WriteParams {
    /// The path in the guest, from the root.
    #[param(value_type = GuestFilePath)]
    path: String,
    /// Permission bits in octal; default 0644.
    #[param(value_type = Option<FileMode>)]
    mode: Option<String>,
}

/// The bytes of a file in the guest.
#[utoipa::path(get, path = "/v1/vms/{vm}/files", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id"), ReadParams),
    responses(
        (status = 200, description = "The bytes. A connection that ends without the last chunk means that reading failed half-way",
            content_type = "application/octet-stream",
            headers(
                ("x-vmfork-mode" = String, description = "Permission bits, octal"),
                ("x-vmfork-size" = u64, description = "The size when it was opened, in bytes; files in /proc say 0")
            )),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn read(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Params(params): Params<ReadParams>,
) -> Result<Response, ApiError> {
    check::guest_path(&params.path)?;
    let file = app.control.read_file(&vm, &params.path).await?;
    let body = body_of(file.content).await?;
    let headers = [
        ("x-vmfork-mode", format!("{:04o}", file.mode)),
        ("x-vmfork-size", file.size_bytes.to_string()),
        (CONTENT_TYPE.as_str(), "application/octet-stream".to_owned()),
    ];
    Ok((headers, body).into_response())
}

/// A response's body from what comes piece by piece.
///
/// # Errors
/// It fails before its first piece: while nothing is sent yet, a failure can still be told as one.
pub(super) async fn body_of(mut content: ByteStream) -> Result<Body, ErrorBody> {
    let first = content.recv().await.transpose()?;
    let rest = stream::unfold(content, |mut content| async move {
        let chunk = content.recv().await?;
        if let Err(error) = &chunk {
            tracing::warn!("a transfer to a client broke off: {error}");
        }
        Some((chunk, content))
    });
    Ok(Body::from_stream(stream::iter(first.map(Ok)).chain(rest)))
}

/// Store the body as a file in the guest. If the body does not come whole, the old file stays.
#[utoipa::path(put, path = "/v1/vms/{vm}/files", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id"), WriteParams),
    request_body(content_type = "application/octet-stream", description = "Of any length"),
    responses((status = 204, description = "Stored"), (status = "default", body = ErrorBody))
)]
pub(super) async fn write(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Params(params): Params<WriteParams>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let (content_rx, pump) = content_of(request);
    let stored = store(&app, &vm, &params, content_rx).await;
    if stored.is_err() {
        // A client that is still sending would see a broken connection, and not the answer.
        let _ended = pump.await;
    }
    stored.map(|()| StatusCode::NO_CONTENT)
}

/// What a request brings, piece by piece; to be waited for where its answer is an error. In a task of its own:
/// whatever becomes of the handler, the receiver sees the end of the body as an end only if all of it came, and as an
/// error else.
pub(super) fn content_of(request: Request) -> (ByteStream, JoinHandle<()>) {
    let (content_tx, content_rx) = mpsc::channel(CHUNKS_MAX);
    (content_rx, tokio::spawn(pump(request.into_body(), content_tx)))
}

async fn store(
    app: &App,
    vm: &str,
    params: &WriteParams,
    content: ByteStream,
) -> Result<(), ApiError> {
    check::guest_path(&params.path)?;
    if matches!(params.path.rsplit('/').next(), None | Some("" | "." | "..")) {
        return Err(super::bad_request(format!("`path` is `{}`, a folder", params.path))
            .remedy("name the file that is to be written")
            .into());
    }
    let mode = check::mode(params.mode.as_deref())?;
    Ok(app.control.write_file(vm, &params.path, mode, content).await?)
}

/// Ends with the body, with its connection, or some time after the receiver is gone.
async fn pump(body: Body, content_tx: mpsc::Sender<Result<Bytes, ErrorBody>>) {
    let mut chunks = body.into_data_stream();
    loop {
        let chunk = tokio::select! {
            chunk = chunks.next() => chunk,
            () = content_tx.closed() => return discard(chunks).await,
        };
        let mut bytes = match chunk {
            Some(Ok(bytes)) => bytes,
            None => return,
            Some(Err(error)) => {
                let error = ErrorBody::new(ErrorCode::BadRequest, "the file did not come whole")
                    .cause(error);
                let _ = content_tx.send(Err(error)).await;
                return;
            }
        };
        while !bytes.is_empty() {
            let chunk = bytes.split_to(bytes.len().min(CHUNK_BYTES_MAX));
            if content_tx.send(Ok(chunk)).await.is_err() {
                return discard(chunks).await;
            }
        }
    }
}

async fn discard(mut chunks: BodyDataStream) {
    let rest = async { while let Some(Ok(_)) = chunks.next().await {} };
    let _late = tokio::time::timeout(DISCARD_TIMEOUT, rest).await;
}
