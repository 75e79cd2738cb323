//! `vmfork fork`: a row for each clone, granted or not.

use vmfork_api::ForkReply;

use super::brood;
use crate::client::Query;
use crate::config::{ForkConfig, Global};
use crate::failure::Exit;
use crate::format;
use crate::start::reach;

pub(super) async fn run(global: &Global, config: ForkConfig) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let forking = client.post(
        Query::new(format!("/v1/vms/{}/fork", config.vm)),
        &config.request,
        config.bound,
    );
    let message = format!("Forking `{}`", config.vm);
    let reply: ForkReply = tokio::select! {
        reply = forking => reply?,
        never = brood::show_progress(&client, config.request.count, message, |vm| {
            vm.parent.as_ref() == Some(&config.vm)
        }) => match never {},
    };
    if global.printer.json {
        global.printer.document(&reply)?;
    } else {
        brood::print(&global.printer, &reply.clones, &summary(&config.vm, &reply))?;
    }
    Ok(brood::exit(reply.requested, reply.granted, &reply.clones))
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
