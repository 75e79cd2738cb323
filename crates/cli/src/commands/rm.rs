//! `vmfork rm`.

use super::{for_each, kill};
use crate::client::Query;
use crate::config::{Global, RmConfig};
use crate::failure::Exit;
use crate::start::reach;

pub(super) async fn run(global: &Global, config: RmConfig) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    let force = config.force;
    let answers = for_each(config.vms, |vm| async move {
        let query = Query::new(format!("/v1/vms/{vm}"));
        client.delete(if force { query.with("force", "true") } else { query }).await
    })
    .await;
    kill::report(
        global,
        "Removed",
        answers.into_iter().map(|(name, answer)| (name, answer.map(|()| None))),
    )
}
