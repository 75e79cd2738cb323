//! Programs in a guest.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use vmfork_agent_proto::{Kind, TerminalSize, ToGuest};
use vmfork_api::ExecRequest;

use super::command::{Command, Side};
use super::error::LinkError;
use super::link::{AgentLink, Opened};
use super::outlet::{OUTPUT_ITEMS, Outlet};
use vmfork_control::{ExecInput, ExecOutput, ExecSession};

/// Items of input that a session's channel holds.
const INPUT_ITEMS: usize = 16;

/// What a signal or a change of size counts for, so that a flood of them waits like other input.
const SIGNAL_BYTES: usize = 1024;

impl AgentLink {
    /// Start a program. The caller applies `stdin_base64` and `timeout_ms` of the request.
    /// `timeout` bounds the wait for its start.
    ///
    /// Dropping the future, the session's input or its output hangs the program up. What the
    /// consumer of the output does not take stops the program, and nothing else.
    ///
    /// # Errors
    /// `Guest` (no such program, user or folder), `TooLong`, `TooManyChannels`, `Timeout`,
    /// `Closed`.
    pub async fn exec(
        &self,
        request: ExecRequest,
        timeout: Duration,
    ) -> Result<ExecSession, LinkError> {
        let what = format!("run `{}`", request.argv.first().map_or("", String::as_str));
        let message = ToGuest::Exec {
            argv: request.argv,
            env: request.env.into_iter().collect(),
            cwd: request.cwd,
            user: request.user,
            tty: request.tty.map(|size| TerminalSize {
                rows: size.rows,
                cols: size.cols,
                term: size.term.unwrap_or_else(|| "xterm".to_owned()),
            }),
        };
        let (output_tx, output) = mpsc::channel(OUTPUT_ITEMS);
        let (started, started_rx) = oneshot::channel();
        let side = Side::Exec {
            started: Some(started),
            output: Outlet::new(output_tx.clone(), wrap_output),
        };
        let opened = self.open(what, message, side)?;
        let pid = self.answer("exec", timeout, started_rx).await?;
        let (input, input_rx) = mpsc::channel(INPUT_ITEMS);
        tokio::spawn(pass_input(opened, input_rx, output_tx));
        Ok(ExecSession { pid, input, output })
    }
}

fn wrap_output(kind: Kind, bytes: Bytes) -> ExecOutput {
    match kind {
        Kind::Stderr => ExecOutput::Stderr(bytes),
        _ => ExecOutput::Stdout(bytes),
    }
}

/// Carry a session's input to the program until either end is gone.
async fn pass_input(
    mut opened: Opened,
    mut input: mpsc::Receiver<ExecInput>,
    output: mpsc::Sender<ExecOutput>,
) {
    let (_, never) = oneshot::channel();
    let done = std::mem::replace(&mut opened.done, never);
    tokio::select! {
        _ = done => {}
        () = output.closed() => {}
        () = async {
            while let Some(item) = input.recv().await {
                pass_item(&opened, item).await;
            }
        } => {}
    }
    // Dropping `opened` hangs up a program that has not ended.
}

async fn pass_item(opened: &Opened, item: ExecInput) {
    let message = match item {
        ExecInput::Stdin(bytes) => return opened.push(bytes).await,
        ExecInput::StdinEof => return opened.push_end(),
        ExecInput::Signal(signal) => ToGuest::Signal { signal },
        ExecInput::Resize { rows, cols } => ToGuest::Resize { rows, cols },
    };
    opened.room(SIGNAL_BYTES).await;
    let _ = opened.commands.send(Command::Signal { key: opened.key, message, bytes: SIGNAL_BYTES });
}
