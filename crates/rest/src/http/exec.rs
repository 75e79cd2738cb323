use std::future::pending;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use vmfork_api::schema::Name;
use vmfork_api::{ErrorBody, ErrorCode, ExecReply, ExecRequest, ExecWithoutTerminal, SCHEMA};

use super::error::{ApiError, bad_request};
use super::extract::{Body, VmRef};
use super::files::CHUNK_BYTES_MAX;
use super::{App, check};
use vmfork_control::{ExecInput, ExecOutput, ExecSession};

/// Most bytes of one output stream that are answered; the rest is read and dropped.
const OUTPUT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Room for 16 MiB of standard input in base64, and the rest of the request.
pub(super) const REQUEST_BYTES_MAX: usize = 23 * 1024 * 1024;
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(600);
/// How long a killed program may take to be reported as ended.
pub(super) const KILL_GRACE: Duration = Duration::from_secs(10);
/// How long the signal itself may wait behind standard input that the program doesn't read.
const KILL_SEND: Duration = Duration::from_secs(2);
pub(super) const SIGKILL: i32 = 9;

/// Run a program in the guest, and answer when it has ended. What it leaves running lives on.
#[utoipa::path(post, path = "/v1/vms/{vm}/exec", tag = "guest",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    request_body = ExecWithoutTerminal,
    responses(
        (status = 200, description = "It was run, whatever its exit code", body = ExecReply),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn exec(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Body(mut request): Body<ExecRequest>,
) -> Result<Json<ExecReply>, ApiError> {
    check::exec(&request)?;
    if request.tty.is_some() {
        return Err(bad_request("`tty` is for the exec stream only")
            .remedy("use the WebSocket …/exec/stream, or leave `tty` out")
            .into());
    }
    let stdin = request
        .stdin_base64
        .take()
        .map(|text| BASE64_STANDARD.decode(text))
        .transpose()
        .map_err(|error| bad_request("`stdin_base64` is not base64").cause(error))?
        .unwrap_or_default();
    let started = Instant::now();
    let bound = request.timeout_ms.map_or(TIMEOUT_DEFAULT, Duration::from_millis);
    let deadline = started + bound;
    let program = request.argv[0].clone();
    let session = match timeout_at(deadline, app.control.exec(&vm, request)).await {
        Ok(session) => session?,
        Err(_) => {
            return Err(never_ended(
                &program,
                &vm,
                "it was not started in time: the guest's agent does not answer",
            )
            .into());
        }
    };
    let collected = match collect(session, stdin.into(), deadline).await {
        Ok(collected) => collected,
        Err(Ended::Error(error)) => return Err(error.into()),
        Err(Ended::Silent) => {
            return Err(never_ended(
                &program,
                &vm,
                "it did not end when it was killed: the guest or its agent is stuck",
            )
            .into());
        }
    };
    Ok(Json(ExecReply {
        schema: SCHEMA.to_owned(),
        exit_code: collected.exit_code,
        signal: collected.signal,
        timed_out: collected.timed_out,
        stdout_base64: BASE64_STANDARD.encode(&collected.stdout.bytes),
        stderr_base64: BASE64_STANDARD.encode(&collected.stderr.bytes),
        truncated: collected.stdout.cut || collected.stderr.cut,
        duration_ms: started.elapsed().as_secs_f64() * 1e3,
    }))
}

fn never_ended(program: &str, vm: &str, cause: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::Timeout, format!("run `{program}` in `{vm}`"))
        .cause(cause)
        .remedy("give a longer `timeout_ms`, or see `vmfork logs` whether the guest still lives")
}

/// The answer when a session's output ends without a report of how the program ended.
pub(super) fn lost() -> ErrorBody {
    ErrorBody::new(ErrorCode::Guest, "the connection to the program was lost")
        .cause("the VM or its agent went away")
        .remedy("`vmfork inspect` says in which state the VM is")
}

#[derive(Debug, Default)]
struct Output {
    bytes: Vec<u8>,
    cut: bool,
}

impl Output {
    fn push(&mut self, bytes: &Bytes) {
        let room = OUTPUT_BYTES_MAX - self.bytes.len();
        self.cut |= bytes.len() > room;
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

#[derive(Debug, Default)]
struct Collected {
    exit_code: i32,
    signal: Option<i32>,
    timed_out: bool,
    stdout: Output,
    stderr: Output,
}

enum Ended {
    Error(ErrorBody),
    /// Killed, and yet no end was reported.
    Silent,
}

/// Feed and read at the same time: a program that answers while it reads must not block on either.
async fn collect(
    session: ExecSession,
    stdin: Bytes,
    deadline: Instant,
) -> Result<Collected, Ended> {
    let ExecSession { input, mut output, .. } = session;
    let mut collected = Collected::default();
    let feeding = feed(input.clone(), stdin);
    let killing = async {
        sleep_until(deadline).await;
        let _ = timeout(KILL_SEND, input.send(ExecInput::Signal(SIGKILL))).await;
        pending::<()>().await;
    };
    let giving_up = sleep_until(deadline + KILL_SEND + KILL_GRACE);
    tokio::pin!(feeding, killing, giving_up);
    let mut is_fed = false;
    loop {
        tokio::select! {
            () = &mut feeding, if !is_fed => is_fed = true,
            () = &mut killing => {}
            () = &mut giving_up => return Err(Ended::Silent),
            event = output.recv() => match event {
                Some(ExecOutput::Stdout(bytes)) => collected.stdout.push(&bytes),
                Some(ExecOutput::Stderr(bytes)) => collected.stderr.push(&bytes),
                Some(ExecOutput::Exited { exit_code, signal }) => {
                    collected.exit_code = exit_code;
                    collected.signal = signal;
                    collected.timed_out = signal == Some(SIGKILL) && Instant::now() >= deadline;
                    return Ok(collected);
                }
                Some(ExecOutput::Error(error)) => return Err(Ended::Error(error)),
                None => return Err(Ended::Error(lost())),
            }
        }
    }
}

/// All of `stdin`, then its end. Stops when the program takes no more.
async fn feed(input: mpsc::Sender<ExecInput>, mut stdin: Bytes) {
    while !stdin.is_empty() {
        let chunk = stdin.split_to(stdin.len().min(CHUNK_BYTES_MAX));
        if input.send(ExecInput::Stdin(chunk)).await.is_err() {
            return;
        }
    }
    let _ = input.send(ExecInput::StdinEof).await;
}
