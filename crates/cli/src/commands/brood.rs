//! VMs that are started together, from a VM or from a stored snapshot: a row for each, granted or
//! not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use tokio::time::sleep;
use vmfork_api::{CloneResult, ErrorBody, Vm, VmState};

use super::ps::add_column;
use crate::client::{Client, Query};
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, Printer};

/// Work that ends within this time shows no progress bar and polls no progress.
const PROGRESS_AFTER: Duration = Duration::from_millis(400);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Prints the table, `summary`, and the remedies of the failures.
pub(super) fn print(
    printer: &Printer,
    results: &[CloneResult],
    summary: &str,
) -> anyhow::Result<()> {
    let mut remedies: Vec<&str> = Vec::new();
    let mut header = vec!["VM", "VMID", "STATE", "READY"];
    let mut rows: Vec<Vec<Field>> = results.iter().map(row).collect();
    let hosts: Vec<Option<&str>> = results.iter().map(|result| result.host.as_deref()).collect();
    add_column("HOST", &mut header, &mut rows, &hosts);
    if results.iter().any(|result| result.error.is_some()) {
        header.push("ERROR");
        for (row, result) in rows.iter_mut().zip(results) {
            row.push(Field::Text(result.error.as_ref().map(error_line).unwrap_or_default()));
        }
        for remedy in results.iter().filter_map(|result| result.error.as_ref()?.remedy.as_ref()) {
            if !remedies.contains(&remedy.as_str()) {
                remedies.push(remedy);
            }
        }
    }
    printer.table(&header, rows)?;
    printer.note(summary);
    for remedy in remedies {
        printer.note(&format!("hint: {remedy}"));
    }
    Ok(())
}

/// Failed unless all of them are there.
pub(super) fn exit(requested: u32, granted: u32, results: &[CloneResult]) -> Exit {
    let all = granted >= requested && results.iter().all(|result| result.error.is_none());
    if all { Exit::Done } else { Exit::Failed }
}

/// An error in one line, without its remedy.
pub(super) fn error_line(error: &ErrorBody) -> String {
    format::printable(&error.to_string())
}

fn row(result: &CloneResult) -> Vec<Field> {
    vec![
        Field::Text(result.name.clone()),
        Field::Figure(result.vmid.to_string()),
        Field::State(result.state),
        Field::Figure(result.ready_ms.map_or_else(|| "-".to_owned(), format::millis)),
    ]
}

/// Shows how many VMs for which `is_ours` holds are running, while it is polled.
pub(super) async fn show_progress(
    client: &Client<'_>,
    count: u32,
    message: String,
    is_ours: impl Fn(&Vm) -> bool,
) -> std::convert::Infallible {
    let printer = &client.global.printer;
    if !printer.shows_progress() {
        return std::future::pending().await;
    }
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started_unix_ms = u64::try_from(started.as_millis()).unwrap_or(u64::MAX);
    sleep(PROGRESS_AFTER).await;
    let count = u64::from(count);
    let bar: ProgressBar = printer.steps(count, message);
    loop {
        if let Ok(vms) = client.get::<Vec<Vm>>(Query::new("/v1/vms")).await {
            let ready = vms.iter().filter(|vm| {
                vm.created_unix_ms >= started_unix_ms && vm.state == VmState::Running && is_ours(vm)
            });
            bar.set_position(u64::try_from(ready.count()).unwrap_or(count).min(count));
        }
        sleep(PROGRESS_INTERVAL).await;
    }
}
