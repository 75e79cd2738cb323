use axum::extract::State;
use axum::extract::ws::{Message, WebSocket};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use tokio::sync::{mpsc, watch};
use vmfork_api::ErrorBody;
use vmfork_api::schema::Name;

use super::error::ApiError;
use super::extract::VmRef;
use super::files::CHUNK_BYTES_MAX;
use super::{App, stopped, ws};
use vmfork_control::ConsoleSession;

/// The serial console, as a WebSocket: binary messages both ways, bytes as they are. It is closed
/// when the VM ends. Several clients may look at one console; each may type.
#[utoipa::path(get, path = "/v1/vms/{vm}/console", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    responses(
        (status = 101, description = "A WebSocket"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn console(
    State(app): State<App>,
    VmRef(vm): VmRef,
    upgrade: ws::Upgrade,
) -> Result<Response, ApiError> {
    let upgrade = ws::accept(upgrade)?;
    let session = app.control.console(&vm).await?;
    let stop = app.stop.clone();
    Ok(upgrade.on_upgrade(move |socket| serve(socket, session, stop)))
}

async fn serve(socket: WebSocket, session: ConsoleSession, mut stop: watch::Receiver<bool>) {
    let (mut sink, mut stream) = socket.split();
    let ConsoleSession { input, output } = session;
    let end = tokio::select! {
        () = typed(&mut stream, input) => None,
        end = shown(&mut sink, output) => end,
        () = stopped(&mut stop) => Some((ws::GOING_AWAY, "the daemon ends")),
    };
    if let Some((code, reason)) = end {
        ws::close(sink, stream, code, reason).await;
    }
}

/// Until the client is gone.
async fn typed(stream: &mut ws::Stream, input: mpsc::Sender<Bytes>) {
    while let Some(Ok(message)) = stream.next().await {
        let mut bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => text.into(),
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) => continue,
        };
        while !bytes.is_empty() {
            let chunk = bytes.split_to(bytes.len().min(CHUNK_BYTES_MAX));
            // A VM that takes no more has ended; `shown` will say so.
            let _ = input.send(chunk).await;
        }
    }
}

/// Until the VM ends (then the reason to close with) or the client is gone.
async fn shown(
    sink: &mut ws::Sink,
    mut output: mpsc::Receiver<Bytes>,
) -> Option<(u16, &'static str)> {
    let mut pings = ws::pings();
    loop {
        tokio::select! {
            bytes = output.recv() => match bytes {
                Some(bytes) => sink.send(Message::Binary(bytes)).await.ok()?,
                None => return Some((ws::DONE, "the VM has ended")),
            },
            _ = pings.tick() => ws::ping(sink).await.ok()?,
        }
    }
}
