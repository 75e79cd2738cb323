//! The `vmfork` command.
//!
//! ```text
//!   words ──args──► RawArgs ──config──► Global, Command ──commands──► requests to vmforkd
//!                                                            └──────► Printer ──► stdout, stderr
//! ```
//!
//! Promises: data on stdout, all else on stderr; exit status 0 done, 1 failed, 2 misuse, the
//! program's own for `exec`; a reader who closes our stdout ends us with 0; Ctrl-C ends us with 130
//! within a quarter of a second at any moment, with the terminal as it was.

#![deny(unsafe_code)]

mod args;
mod client;
mod commands;
mod config;
mod failure;
mod format;
mod printer;
mod signals;
mod start;
mod terminal;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Parser as _;

use crate::args::{RawArgs, RawGlobal};
use crate::config::{Command, Environment, Global};
use crate::failure::Exit;
use crate::signals::Signals;

const FAILED: u8 = 1;
const MISUSE: u8 = 2;

/// How long an interrupted command may take to put things back.
const UNWIND_BOUND: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    // Not a command for people: how `start` makes the daemon leave our session.
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == start::DETACHED) {
        let error = start::become_detached(&words.collect::<Vec<_>>());
        Global::printer(&RawGlobal::default(), &Environment::default()).error(&error);
        return ExitCode::from(FAILED);
    }
    let raw = match RawArgs::try_parse() {
        Ok(raw) => raw,
        Err(error) => {
            // Help and version come here too. A failed write of them is ignored.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { MISUSE } else { 0 });
        }
    };
    let environment = Environment::read();
    let printer = Global::printer(&raw.global, &environment);
    let config = Global::new(&raw.global, &environment)
        .and_then(|global| Ok((global, Command::new(raw.command, &raw.global)?)));
    let ended =
        config.map_err(anyhow::Error::from).and_then(|(global, command)| run(global, command));
    terminal::restore();
    match ended {
        Ok(Exit::Done) => ExitCode::SUCCESS,
        Ok(Exit::Failed) => ExitCode::from(FAILED),
        Ok(Exit::Program(code)) => ExitCode::from(code),
        Err(error) if failure::is_stdout_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            printer.error(&error);
            ExitCode::from(if failure::is_misuse(&error) { MISUSE } else { FAILED })
        }
    }
}

fn run(global: Global, command: Command) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let unwind_bound = command.unwind_bound();
    let ended = runtime.block_on(supervise(global, command));
    // Threads that wait in the kernel (for standard input, say) are not waited for.
    runtime.shutdown_timeout(unwind_bound);
    ended
}

/// Runs the command on another thread than the one that listens to signals, so that Ctrl-C is heard
/// even while a write to a stuck pipe blocks.
async fn supervise(global: Global, command: Command) -> anyhow::Result<Exit> {
    // `exec` hands signals on to the program.
    let own_signals = matches!(command, Command::Exec(_)) && !global.printer.json;
    let mut signals = if own_signals { None } else { Some(Signals::ending()?) };
    let mut task = tokio::spawn(commands::dispatch(global, command));
    let signal = async {
        match &mut signals {
            Some(signals) => signals.next().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = &mut task => {
            ended.unwrap_or_else(|panic| Err(anyhow!(panic).context("a bug of vmfork")))
        }
        signal = signal => {
            // Dropping the request closes its connection, and the daemon undoes its partial work.
            task.abort();
            let _ = tokio::time::timeout(UNWIND_BOUND, task).await;
            Ok(Exit::Program(client::exit_status(0, Some(signal.as_raw_value()))))
        }
    }
}
