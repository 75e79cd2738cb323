//! `vmfork exec`: a program in a guest, as if it ran here.
//!
//! Its output, input, exit code and signals pass through. The first Ctrl-C is the program's; a
//! second one leaves it (the daemon hangs it up). On a terminal (`-t`) keys go to the program one
//! by one, Ctrl-C among them.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{Bytes, BytesMut};
use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::SignalKind;
use tokio::task::JoinHandle;
use vmfork_api::{ExecReply, TerminalSize};

use super::outflow::Outflow;
use crate::client::{Client, ExecEvent, ExecInput, Query, exit_status};
use crate::config::{ExecConfig, Global};
use crate::failure::Exit;
use crate::printer::{stderr_stream, stdout_error, stdout_stream};
use crate::signals::Signals;
use crate::start::reach;
use crate::terminal::{self, RawMode};

const STDIN_CHUNK_BYTES: usize = 64 << 10;

/// What the daemon gives a `POST …/exec` that names no bound.
const POST_TIMEOUT_DEFAULT: Duration = Duration::from_secs(600);

/// Standard input that `--json` sends along, which is held in memory as a whole.
const POST_STDIN_BYTES_MAX: u64 = 16 << 20;

pub(super) async fn run(global: &Global, config: ExecConfig) -> anyhow::Result<Exit> {
    if global.printer.json { whole(global, config).await } else { streamed(global, config).await }
}

async fn streamed(global: &Global, mut config: ExecConfig) -> anyhow::Result<Exit> {
    let mut signals = Signals::forwarded()?;
    let mut resized = tokio::signal::unix::signal(SignalKind::window_change())?;
    if config.tty {
        let (rows, cols) = terminal::size().unwrap_or((24, 80));
        config.request.tty = Some(TerminalSize { rows, cols, term: std::env::var("TERM").ok() });
    }
    let starting = async { reach(global).await?.exec(&config.vm, config.request).await };
    let mut session = tokio::select! {
        session = starting => session?,
        signal = signals.next() => return Ok(interrupted(signal)),
    };
    // From here on every way out puts the terminal back.
    let _raw = if config.tty { RawMode::enter().context("set the terminal up")? } else { None };
    let _stdin = Pump::start(session.input.clone(), config.stdin);
    let (mut stdout, mut stderr) = (Outflow::new(stdout_stream()?), Outflow::new(stderr_stream()?));
    let mut interrupts = 0_u32;
    loop {
        tokio::select! {
            event = session.next(), if !stdout.is_under_way() && !stderr.is_under_way() => match event? {
                ExecEvent::Stdout(bytes) => stdout.push(bytes),
                ExecEvent::Stderr(bytes) => stderr.push(bytes),
                ExecEvent::Exited(code) => return Ok(Exit::Program(code)),
            },
            // In parallel with signals, which work even while no reader takes the output.
            written = stdout.drain(), if stdout.is_under_way() => written.map_err(stdout_error)?,
            // A failed write to stderr does not end the program.
            _ = stderr.drain(), if stderr.is_under_way() => {}
            signal = signals.next() => {
                let ends = signal == SignalKind::interrupt() || signal == SignalKind::terminate();
                interrupts += u32::from(ends);
                let leave = interrupts > 1 || signal == SignalKind::hangup();
                if leave || !session.input.signal(signal.as_raw_value()).await {
                    return Ok(interrupted(signal));
                }
            }
            _ = resized.recv() => {
                if let Some((rows, cols)) = terminal::size().filter(|_| config.tty) {
                    session.input.resize(rows, cols);
                }
            }
        }
    }
}

fn interrupted(signal: SignalKind) -> Exit {
    Exit::Program(exit_status(0, Some(signal.as_raw_value())))
}

/// Reads standard input for the program, until it is dropped.
struct Pump(JoinHandle<()>);

impl Pump {
    fn start(input: ExecInput, attached: bool) -> Self {
        Self(tokio::spawn(async move {
            if attached {
                feed(&input).await;
            }
            input.stdin_eof().await;
        }))
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn feed(input: &ExecInput) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(STDIN_CHUNK_BYTES);
        match stdin.read_buf(&mut buffer).await {
            // An input that can't be read any further has ended, as far as the program is
            // concerned.
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if !input.stdin(Bytes::from(buffer.split())).await {
                    return;
                }
            }
        }
    }
}

/// `--json`: one document with the whole output.
async fn whole(global: &Global, mut config: ExecConfig) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    if config.stdin {
        let mut bytes = Vec::new();
        let mut stdin = tokio::io::stdin().take(POST_STDIN_BYTES_MAX + 1);
        stdin.read_to_end(&mut bytes).await.context("read standard input")?;
        if u64::try_from(bytes.len()).is_ok_and(|len| len > POST_STDIN_BYTES_MAX) {
            bail!(
                "standard input exceeds {} MiB, the limit with --json; leave --json out",
                POST_STDIN_BYTES_MAX >> 20
            );
        }
        config.request.stdin_base64 = Some(BASE64.encode(bytes));
    }
    let bound = config.request.timeout_ms.map_or(POST_TIMEOUT_DEFAULT, Duration::from_millis);
    let query = Query::new(format!("/v1/vms/{}/exec", config.vm));
    let reply: ExecReply = client.post(query, &config.request, bound).await?;
    global.printer.document(&reply)?;
    Ok(Exit::Program(exit_status(reply.exit_code, reply.signal)))
}

/// Runs a program to its end for its exit code and what it said on stderr.
pub(super) async fn ask(
    client: &Client<'_>,
    vm: &str,
    argv: &[&str],
    bound: Duration,
) -> anyhow::Result<(u8, String)> {
    let request = vmfork_api::ExecRequest {
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        timeout_ms: Some(u64::try_from(bound.as_millis()).unwrap_or(u64::MAX)),
        ..Default::default()
    };
    let query = Query::new(format!("/v1/vms/{vm}/exec"));
    let reply: ExecReply = client.post(query, &request, bound).await?;
    let stderr = BASE64
        .decode(&reply.stderr_base64)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        .context("the output in the reply of the daemon is not base64")?;
    let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
    Ok((exit_status(reply.exit_code, reply.signal), stderr))
}
