//! `vmforkd`: settings in, a daemon until a signal. See the library for what it does.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use vmfork_control::Control;
use vmfork_daemon::config::Flags;
use vmfork_daemon::lifecycle::{self, Host, Parts};
use vmfork_daemon::operations::Hub;

/// Exit codes: 0 ended on request, 1 failed, 2 misuse.
fn main() -> ExitCode {
    let config = match Flags::parse().check() {
        Ok(config) => config,
        Err(error) => return fail(&error.into(), 2),
    };
    log_to_stderr(&config.log_filter);
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into(), 1),
    };
    match runtime.block_on(lifecycle::run(config, start)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error, 1),
    }
}

/// The journal has its own clock, and wants no colours.
fn log_to_stderr(filter: &str) {
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(io::stderr)
        .with_ansi(colours);
    if std::env::var_os("JOURNAL_STREAM").is_some() {
        log.without_time().init();
    } else {
        log.init();
    }
}

fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("vmforkd: {error:#}");
    ExitCode::from(code)
}

async fn start(parts: Parts) -> anyhow::Result<Host> {
    let hub = Hub::start(parts).await;
    let control: Arc<dyn Control> = Arc::clone(&hub) as Arc<dyn Control>;
    let cluster = Some(hub.cluster());
    Ok(Host { control, cluster, shutdown: Box::pin(async move { hub.stop().await }) })
}
