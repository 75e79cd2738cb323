//! A program in a guest, over a WebSocket.
//!
//! ```text
//!   client ── start ──► [start within 30 s] ──► Control::exec ──► started ──►
//!          ── binary, stdin_eof, signal, resize ──► inbound ──► session.input
//!          ◄── binary (1 + stdout | 2 + stderr) ◄── outbound ◄── session.output
//!          ◄── exited | error, close
//! ```
//!
//! Both directions push back: while the guest takes no more input the socket is not read, while the
//! client takes no more output the session is not. A client that goes away drops the session, which
//! is a hang-up for the program, also while it is only being started.

use std::collections::VecDeque;
use std::future::pending;
use std::time::Duration;

use axum::Error;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocket};
use axum::response::Response;
use futures_util::{SinkExt, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use vmfork_api::schema::Name;
use vmfork_api::{ErrorBody, ErrorCode, ExecClientMessage, ExecRequest, ExecServerMessage};

use super::error::{ApiError, bad_request};
use super::exec::{KILL_GRACE, SIGKILL, lost};
use super::extract::VmRef;
use super::files::CHUNK_BYTES_MAX;
use super::{App, check, stopped, ws};
use vmfork_control::{ExecInput, ExecOutput, ExecSession};

const START_WAIT: Duration = Duration::from_secs(30);
/// Messages taken from a client before its program runs; more stay in the socket.
const READ_AHEAD_MAX: usize = 8;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// How a session came to its end.
enum End {
    Exited {
        exit_code: i32,
        signal: Option<i32>,
    },
    Error(ErrorBody),
    /// The daemon ends.
    Stopped,
    /// The client has disconnected, and can receive nothing more.
    ClientGone,
}

/// Run a program, as a WebSocket. The client sends `ExecClientMessage`s as text, the first a
/// `start`, and standard input as binary messages. The server sends `ExecServerMessage`s as text,
/// and output as binary messages whose first byte is 1 for stdout, 2 for stderr. After `exited` or
/// `error` it closes.
#[utoipa::path(get, path = "/v1/vms/{vm}/exec/stream", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    responses(
        (status = 101, description = "A WebSocket"),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn exec_stream(
    State(app): State<App>,
    VmRef(vm): VmRef,
    upgrade: ws::Upgrade,
) -> Result<Response, ApiError> {
    let upgrade = ws::accept(upgrade)?;
    Ok(upgrade.on_upgrade(move |socket| serve(app, vm, socket)))
}

async fn serve(app: App, vm: String, socket: WebSocket) {
    let (mut sink, mut stream) = socket.split();
    let mut stop = app.stop.clone();
    let end = tokio::select! {
        end = run(&app, &vm, &mut sink, &mut stream) => end,
        () = stopped(&mut stop) => End::Stopped,
    };
    let (message, code, reason) = match end {
        End::ClientGone => return tracing::debug!(vm, "exec: the client went away"),
        End::Stopped => (None, ws::GOING_AWAY, "the daemon ends"),
        End::Exited { exit_code, signal } => {
            (Some(ExecServerMessage::Exited { exit_code, signal }), ws::DONE, "exited")
        }
        End::Error(error) => (Some(ExecServerMessage::Error { error }), ws::DONE, "error"),
    };
    if let Some(message) = message
        && send(&mut sink, &message).await.is_err()
    {
        return;
    }
    ws::close(sink, stream, code, reason).await;
}

async fn send(sink: &mut ws::Sink, message: &ExecServerMessage) -> Result<(), Error> {
    let text = serde_json::to_string(message).map_err(Error::new)?;
    sink.send(Message::Text(text.into())).await
}

async fn run(app: &App, vm: &str, sink: &mut ws::Sink, stream: &mut ws::Stream) -> End {
    let mut request = match timeout(START_WAIT, wait_for_start(stream)).await {
        Ok(Ok(request)) => request,
        Ok(Err(end)) => return end,
        Err(_) => {
            return End::Error(
                ErrorBody::new(ErrorCode::Timeout, "no `start` message came")
                    .remedy("send it first, as text, right after connecting"),
            );
        }
    };
    let kill_after = request.timeout_ms.take().map(Duration::from_millis);
    let deadline = kill_after.map(|bound| Instant::now() + bound);

    let mut ahead = VecDeque::new();
    let session = tokio::select! {
        session = app.control.exec(vm, request) => session,
        () = read_ahead(stream, &mut ahead) => return End::ClientGone,
        () = until(deadline) => {
            return End::Error(ErrorBody::new(
                ErrorCode::Timeout,
                format!("the program was not started in `{vm}` within `timeout_ms`"),
            ));
        }
    };
    let ExecSession { pid, input, output } = match session {
        Ok(session) => session,
        Err(error) => return End::Error(error),
    };
    if send(sink, &ExecServerMessage::Started { pid }).await.is_err() {
        return End::ClientGone;
    }
    tokio::select! {
        end = inbound(stream, ahead, input.clone()) => end,
        end = outbound(sink, output) => end,
        end = overdue(deadline, &input) => end,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => pending().await,
    }
}

async fn wait_for_start(stream: &mut ws::Stream) -> Result<ExecRequest, End> {
    loop {
        let message = match stream.next().await {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Err(End::ClientGone),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Ok(message)) => message,
        };
        let start = match parse(&message) {
            Ok(Some(ExecClientMessage::Start(start))) => start,
            Ok(_) => {
                return Err(End::Error(
                    bad_request("the first message is no `start`")
                        .remedy("send `{\"type\":\"start\",\"argv\":[…]}` first"),
                ));
            }
            Err(error) => return Err(End::Error(error)),
        };
        check::exec(&start).map_err(End::Error)?;
        if start.stdin_base64.is_some() {
            return Err(End::Error(
                bad_request("`stdin_base64` is for `POST …/exec` only")
                    .remedy("send standard input as binary messages"),
            ));
        }
        return Ok(start);
    }
}

/// `None` if it is no text.
fn parse(message: &Message) -> Result<Option<ExecClientMessage>, ErrorBody> {
    let Message::Text(text) = message else { return Ok(None) };
    serde_json::from_str(text.as_str()).map(Some).map_err(|error| {
        bad_request("a message is not what this stream takes")
            .cause(error)
            .remedy("see ExecClientMessage in /v1/openapi.json")
    })
}

/// Ends only if the client is gone.
async fn read_ahead(stream: &mut ws::Stream, ahead: &mut VecDeque<Message>) {
    while ahead.len() < READ_AHEAD_MAX {
        match stream.next().await {
            None | Some(Err(_) | Ok(Message::Close(_))) => return,
            Some(Ok(message)) => ahead.push_back(message),
        }
    }
    pending().await
}

async fn inbound(
    stream: &mut ws::Stream,
    mut ahead: VecDeque<Message>,
    input: mpsc::Sender<ExecInput>,
) -> End {
    loop {
        let message = match ahead.pop_front() {
            Some(message) => message,
            None => match stream.next().await {
                None | Some(Err(_) | Ok(Message::Close(_))) => return End::ClientGone,
                Some(Ok(message)) => message,
            },
        };
        // A program that takes no more input may still have something to say: sending can fail, but
        // the end comes from `outbound`.
        match message {
            Message::Binary(bytes) => stdin(&input, bytes).await,
            Message::Text(_) => match parse(&message) {
                Ok(Some(message)) => match command(message) {
                    Ok(command) => {
                        let _ = input.send(command).await;
                    }
                    Err(error) => return End::Error(error),
                },
                Ok(None) => {}
                Err(error) => return End::Error(error),
            },
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) => {}
        }
    }
}

async fn stdin(input: &mpsc::Sender<ExecInput>, mut bytes: Bytes) {
    while !bytes.is_empty() {
        let chunk = bytes.split_to(bytes.len().min(CHUNK_BYTES_MAX));
        if input.send(ExecInput::Stdin(chunk)).await.is_err() {
            return;
        }
    }
}

fn command(message: ExecClientMessage) -> Result<ExecInput, ErrorBody> {
    match message {
        ExecClientMessage::Start(_) => {
            Err(bad_request("a second `start` on one stream")
                .remedy("open a stream for each program"))
        }
        ExecClientMessage::StdinEof => Ok(ExecInput::StdinEof),
        ExecClientMessage::Signal { signal } if (1..=64).contains(&signal) => {
            Ok(ExecInput::Signal(signal))
        }
        ExecClientMessage::Signal { signal } => {
            Err(bad_request(format!("there is no signal {signal}"))
                .remedy("signals are 1 to 64, as Linux numbers them"))
        }
        ExecClientMessage::Resize { rows, cols } => Ok(ExecInput::Resize { rows, cols }),
    }
}

async fn outbound(sink: &mut ws::Sink, mut output: mpsc::Receiver<ExecOutput>) -> End {
    let mut pings = ws::pings();
    loop {
        let sent = tokio::select! {
            event = output.recv() => match event {
                Some(ExecOutput::Stdout(bytes)) => sink.send(tagged(STDOUT, &bytes)).await,
                Some(ExecOutput::Stderr(bytes)) => sink.send(tagged(STDERR, &bytes)).await,
                Some(ExecOutput::Exited { exit_code, signal }) => {
                    return End::Exited { exit_code, signal };
                }
                Some(ExecOutput::Error(error)) => return End::Error(error),
                None => return End::Error(lost()),
            },
            _ = pings.tick() => ws::ping(sink).await,
        };
        if sent.is_err() {
            return End::ClientGone;
        }
    }
}

fn tagged(stream: u8, bytes: &[u8]) -> Message {
    let mut message = Vec::with_capacity(1 + bytes.len());
    message.push(stream);
    message.extend_from_slice(bytes);
    Message::Binary(message.into())
}

/// Kill the program at its deadline; it then ends like any other. Ends itself only if the program
/// does not.
async fn overdue(deadline: Option<Instant>, input: &mpsc::Sender<ExecInput>) -> End {
    until(deadline).await;
    let _ = timeout(KILL_GRACE, input.send(ExecInput::Signal(SIGKILL))).await;
    sleep(KILL_GRACE).await;
    End::Error(
        ErrorBody::new(ErrorCode::Timeout, "the program outlived its `timeout_ms`")
            .cause("it did not end when it was killed")
            .remedy("see `vmfork logs` whether the guest still lives"),
    )
}
