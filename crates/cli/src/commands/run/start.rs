//! VMs from a stored snapshot: a row for each, as `fork` prints its clones; with `-q` the names
//! alone, for `vm=$(vmfork run -q SNAPSHOT)`.

use vmfork_api::StartReply;

use crate::client::{Client, Query};
use crate::commands::brood;
use crate::config::StartConfig;
use crate::failure::Exit;
use crate::format;
use crate::printer::Level;

pub(super) async fn run(client: &Client<'_>, config: StartConfig) -> anyhow::Result<Exit> {
    let printer = &client.global.printer;
    let name = &config.snapshot;
    let starting = client.post(
        Query::new(format!("/v1/snapshots/{name}/start")),
        &config.request,
        config.bound,
    );
    let message = format!("Starting `{name}`");
    let reply: StartReply = tokio::select! {
        reply = starting => reply?,
        never = brood::show_progress(client, config.request.count, message, |vm| {
            vm.parent.is_none() && vm.snapshot.as_ref() == Some(name)
        }) => match never {},
    };
    if printer.json {
        printer.document(&reply)?;
    } else if printer.level == Level::Quiet {
        for vm in &reply.vms {
            match &vm.error {
                None => printer.line(&vm.name)?,
                Some(error) => {
                    printer.warn(&format!("`{}`: {}", vm.name, brood::error_line(error)))
                }
            }
        }
    } else {
        brood::print(printer, &reply.vms, &summary(&reply))?;
    }
    Ok(brood::exit(reply.requested, reply.granted, &reply.vms))
}

fn summary(reply: &StartReply) -> String {
    format!(
        "Started {} of {} from `{}` in {}, open after {}",
        reply.granted,
        reply.requested,
        reply.snapshot,
        format::millis(reply.total_ms),
        format::millis(reply.open_ms)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_was_granted_and_how_long_opening_took() {
        let reply = StartReply {
            schema: vmfork_api::SCHEMA.to_owned(),
            snapshot: "warm".to_owned(),
            requested: 3,
            granted: 2,
            began_unix_ms: 0,
            open_ms: 4.21,
            total_ms: 31.4,
            vms: Vec::new(),
        };
        assert_eq!(summary(&reply), "Started 2 of 3 from `warm` in 31 ms, open after 4.2 ms");
    }
}
