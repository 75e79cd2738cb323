//! `vmfork pause` and `vmfork resume`: every VM named is tried, whatever becomes of the others.

use std::time::Duration;

use vmfork_api::Vm;

use super::{for_each, kill};
use crate::client::Query;
use crate::config::Global;
use crate::failure::Exit;
use crate::start::reach;

/// How long the daemon may take. It waits at most 60 s for a freeze in progress. Then it waits at
/// most 10 s each for the agent, the stop, and the continuation after a failed stop.
const BOUND: Duration = Duration::from_secs(105);

pub(super) async fn pause(global: &Global, vms: Vec<String>) -> anyhow::Result<Exit> {
    run(global, vms, "pause", "Paused").await
}

pub(super) async fn resume(global: &Global, vms: Vec<String>) -> anyhow::Result<Exit> {
    run(global, vms, "resume", "Resumed").await
}

async fn run(global: &Global, vms: Vec<String>, route: &str, verb: &str) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    let answers = for_each(vms, |vm| async move {
        let path = Query::new(format!("/v1/vms/{vm}/{route}"));
        client.act::<Vm>(path, BOUND).await
    })
    .await;
    kill::report(global, verb, answers.into_iter().map(|(name, answer)| (name, answer.map(Some))))
}
