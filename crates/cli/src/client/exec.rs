//! A program that runs in a guest, over the exec WebSocket.
//!
//! ```text
//!   ExecInput ──queue──► writer task ──► daemon ──► ExecSession::next ──► ExecEvent
//! ```
//!
//! The queue is short: the task that feeds standard input waits while the program does not read it.
//! The output of the program does not wait for that.

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use vmfork_api::{ExecClientMessage, ExecRequest, ExecServerMessage};

use super::socket::{Receiver, Sender};
use super::{Client, Incoming, QUICK, Socket};
use crate::failure::ApiError;

/// Messages on their way to the daemon: 16 times at most 64 KiB of standard input.
const QUEUE_LEN: usize = 16;

/// How long a signal may take to get past standard input that waits to be read.
const SIGNAL_BOUND: Duration = Duration::from_secs(1);

const STDOUT: u8 = 1;
const STDERR: u8 = 2;

#[derive(Debug)]
pub(crate) enum ExecEvent {
    Stdout(Bytes),
    Stderr(Bytes),
    /// The exit code as a shell tells it: 128 + n where signal n ended the program.
    Exited(u8),
}

enum ToGuest {
    Stdin(Bytes),
    Control(ExecClientMessage),
}

/// The input side. Each task that feeds the program has a clone.
#[derive(Debug, Clone)]
pub(crate) struct ExecInput(mpsc::Sender<ToGuest>);

/// Dropping it hangs the program up (SIGHUP).
#[derive(Debug)]
pub(crate) struct ExecSession {
    rx: Receiver,
    pub(crate) input: ExecInput,
    writer: AbortHandle,
}

impl Drop for ExecSession {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

impl Client<'_> {
    /// Starts a program, and waits until it runs.
    pub(crate) async fn exec(&self, vm: &str, request: ExecRequest) -> anyhow::Result<ExecSession> {
        let Socket { mut tx, mut rx } =
            self.open_socket(&format!("/v1/vms/{vm}/exec/stream")).await?;
        tx.text(serde_json::to_string(&ExecClientMessage::Start(request))?).await?;
        let first = timeout(QUICK, rx.next()).await.map_err(|_| {
            anyhow!("the program in `{vm}` was not started within {} s", QUICK.as_secs())
        })??;
        match control(first)? {
            ExecServerMessage::Started { .. } => {}
            ExecServerMessage::Error { error } => return Err(ApiError(error).into()),
            ExecServerMessage::Exited { .. } => {
                bail!("the daemon reported the end of the program before its start")
            }
        }
        let (input, queue) = mpsc::channel(QUEUE_LEN);
        let writer = tokio::spawn(write(tx, queue)).abort_handle();
        Ok(ExecSession { rx, input: ExecInput(input), writer })
    }
}

impl ExecSession {
    pub(crate) async fn next(&mut self) -> anyhow::Result<ExecEvent> {
        match self.rx.next().await? {
            Some(Incoming::Binary(mut bytes)) if !bytes.is_empty() => match bytes.split_to(1)[0] {
                STDOUT => Ok(ExecEvent::Stdout(bytes)),
                STDERR => Ok(ExecEvent::Stderr(bytes)),
                other => bail!("the daemon sent an unknown output stream ({other})"),
            },
            message => match control(message)? {
                ExecServerMessage::Exited { exit_code, signal } => {
                    Ok(ExecEvent::Exited(exit_status(exit_code, signal)))
                }
                ExecServerMessage::Error { error } => Err(ApiError(error).into()),
                ExecServerMessage::Started { .. } => {
                    bail!("the daemon reported the start of the program twice")
                }
            },
        }
    }
}

/// What a shell would make of it.
pub(crate) fn exit_status(exit_code: i32, signal: Option<i32>) -> u8 {
    let code = signal.map_or(exit_code, |signal| signal.saturating_add(128));
    // Linux gives 0 to 255; anything else must at least not look like success.
    u8::try_from(code).unwrap_or(u8::MAX)
}

fn control(message: Option<Incoming>) -> anyhow::Result<ExecServerMessage> {
    match message {
        Some(Incoming::Text(text)) => {
            serde_json::from_str(&text).context("a message of the daemon is malformed")
        }
        Some(Incoming::Binary(_)) => {
            bail!("the daemon sent output before the start of the program")
        }
        None => bail!("the daemon closed the connection while the program was running"),
    }
}

async fn write(mut tx: Sender, mut queue: mpsc::Receiver<ToGuest>) {
    while let Some(message) = queue.recv().await {
        let sent = match message {
            ToGuest::Stdin(bytes) => tx.binary(bytes).await,
            ToGuest::Control(message) => match serde_json::to_string(&message) {
                Ok(text) => tx.text(text).await,
                Err(_) => break,
            },
        };
        if sent.is_err() {
            // The receiver learns why.
            break;
        }
    }
}

impl ExecInput {
    /// Whether the program can still be fed.
    pub(crate) async fn stdin(&self, bytes: Bytes) -> bool {
        // Zero bytes would be a message without meaning.
        bytes.is_empty() || self.0.send(ToGuest::Stdin(bytes)).await.is_ok()
    }

    pub(crate) async fn stdin_eof(&self) {
        let _ = self.0.send(ToGuest::Control(ExecClientMessage::StdinEof)).await;
    }

    /// Whether it went out in time.
    pub(crate) async fn signal(&self, signal: i32) -> bool {
        let message = ToGuest::Control(ExecClientMessage::Signal { signal });
        matches!(timeout(SIGNAL_BOUND, self.0.send(message)).await, Ok(Ok(())))
    }

    /// A size that can't be told at once is told with the next change.
    pub(crate) fn resize(&self, rows: u16, cols: u16) {
        let _ = self.0.try_send(ToGuest::Control(ExecClientMessage::Resize { rows, cols }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_the_shells() {
        assert_eq!(exit_status(0, None), 0);
        assert_eq!(exit_status(7, None), 7);
        assert_eq!(exit_status(0, Some(9)), 137);
        assert_eq!(exit_status(143, Some(15)), 143);
        assert_eq!(exit_status(-1, None), 255);
        assert_eq!(exit_status(256, None), 255);
    }
}
