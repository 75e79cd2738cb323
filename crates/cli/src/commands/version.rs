//! `vmfork version`: of this program, and of the daemon if it is running. Starts no daemon.

use serde::Serialize;
use vmfork_api::Version;

use crate::client::{Client, ConnectError, Query, find};
use crate::config::Global;
use crate::failure::Exit;

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Serialize)]
struct Versions {
    vmfork: &'static str,
    daemon: Option<Version>,
}

pub(super) async fn run(global: &Global) -> anyhow::Result<Exit> {
    let daemon = match find(&global.endpoint).await {
        Err(ConnectError::Absent(_)) => Ok(None),
        _ => Client::unchecked(global).get::<Version>(Query::new("/v1/version")).await.map(Some),
    };
    let printer = &global.printer;
    if printer.json {
        printer.with_schema(&Versions { vmfork: VERSION, daemon: daemon? })?;
        return Ok(Exit::Done);
    }
    printer.line(&format!("vmfork   {VERSION}"))?;
    match daemon? {
        None => printer.note(&format!("No daemon is running at {}", global.endpoint)),
        Some(daemon) => {
            printer.line(&format!("vmforkd  {} (API {})", daemon.vmforkd, daemon.api))?;
            printer
                .line(&format!("qemu     {}", daemon.qemu.as_deref().unwrap_or("none found")))?;
            printer.line(&format!("kernel   {}", daemon.kernel))?;
        }
    }
    Ok(Exit::Done)
}
