//! `vmfork fork`: a row for each clone, granted or not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use tokio::time::sleep;
use vmfork_api::{CloneResult, ErrorBody, ForkReply, Vm, VmState};

use crate::client::{Client, Query};
use crate::config::{ForkConfig, Global};
use crate::failure::Exit;
use crate::format;
use crate::printer::Field;

/// A fork that is done by then shows no bar, and the daemon is not asked how far it is.
const PROGRESS_AFTER: Duration = Duration::from_millis(400);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn run(global: &Global, config: ForkConfig) -> anyhow::Result<Exit> {
    let client = Client::new(global).await?;
    let forking = client.post(
        Query::new(format!("/v1/vms/{}/fork", config.vm)),
        &config.request,
        config.bound,
    );
    let reply: ForkReply = tokio::select! {
        reply = forking => reply?,
        never = show_progress(&client, &config) => match never {},
    };
    if global.printer.json {
        global.printer.document(&reply)?;
    } else {
        print(global, &config.vm, &reply)?;
    }
    let all = reply.granted >= reply.requested && reply.clones.iter().all(|c| c.error.is_none());
    Ok(if all { Exit::Done } else { Exit::Failed })
}

fn print(global: &Global, vm: &str, reply: &ForkReply) -> anyhow::Result<()> {
    let printer = &global.printer;
    let mut remedies: Vec<&str> = Vec::new();
    if reply.clones.iter().all(|clone| clone.error.is_none()) {
        printer.table(&["VM", "VMID", "STATE", "READY"], reply.clones.iter().map(row).collect())?;
    } else {
        let rows = reply.clones.iter().map(|clone| {
            let mut row = row(clone);
            row.push(Field::Text(clone.error.as_ref().map(error_line).unwrap_or_default()));
            row
        });
        printer.table(&["VM", "VMID", "STATE", "READY", "ERROR"], rows.collect())?;
        for remedy in reply.clones.iter().filter_map(|clone| clone.error.as_ref()?.remedy.as_ref())
        {
            if !remedies.contains(&remedy.as_str()) {
                remedies.push(remedy);
            }
        }
    }
    printer.note(&summary(vm, reply));
    for remedy in remedies {
        printer.note(&format!("hint: {remedy}"));
    }
    Ok(())
}

fn error_line(error: &ErrorBody) -> String {
    format::printable(&match &error.cause {
        Some(cause) => format!("{}: {cause}", error.message),
        None => error.message.clone(),
    })
}

fn summary(vm: &str, reply: &ForkReply) -> String {
    format!(
        "Forked {} of {} in {}, `{vm}` paused {}",
        reply.granted,
        reply.requested,
        format::millis(reply.total_ms),
        format::millis(reply.pause_ms)
    )
}

fn row(clone: &CloneResult) -> Vec<Field> {
    vec![
        Field::Text(clone.name.clone()),
        Field::Figure(clone.vmid.to_string()),
        Field::State(clone.state),
        Field::Figure(clone.ready_ms.map_or_else(|| "-".to_owned(), format::millis)),
    ]
}

/// Counts the clones that run, for as long as it is polled.
async fn show_progress(client: &Client<'_>, config: &ForkConfig) -> std::convert::Infallible {
    let printer = &client.global.printer;
    if !printer.shows_progress() {
        return std::future::pending().await;
    }
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started_unix_ms = u64::try_from(started.as_millis()).unwrap_or(u64::MAX);
    sleep(PROGRESS_AFTER).await;
    let count = u64::from(config.request.count);
    let bar: ProgressBar = printer.steps(count, format!("Forking `{}`", config.vm));
    loop {
        if let Ok(vms) = client.get::<Vec<Vm>>(Query::new("/v1/vms")).await {
            let ready = vms.iter().filter(|vm| {
                vm.created_unix_ms >= started_unix_ms
                    && vm.state == VmState::Running
                    && vm.parent.as_ref() == Some(&config.vm)
            });
            bar.set_position(u64::try_from(ready.count()).unwrap_or(count).min(count));
        }
        sleep(PROGRESS_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_was_granted_and_the_pause() {
        let reply = ForkReply {
            schema: vmfork_api::SCHEMA.to_owned(),
            parent: "web".to_owned(),
            requested: 3,
            granted: 3,
            began_unix_ms: 0,
            pause_ms: 3.42,
            total_ms: 31.4,
            stages: vmfork_api::ForkStages::default(),
            clones: Vec::new(),
        };
        assert_eq!(summary("web", &reply), "Forked 3 of 3 in 31 ms, `web` paused 3.4 ms");
    }
}
