//! One module per command. Each takes what [`crate::config`] has checked, and prints through the
//! [`crate::printer::Printer`].

mod brood;
mod cluster;
mod completion;
mod console;
mod cp;
mod daemon;
mod disk;
mod doctor;
mod events;
mod exec;
mod fork;
mod image;
mod inspect;
mod kill;
mod logs;
mod outflow;
mod pause;
mod ps;
mod rm;
mod run;
mod serve;
mod snapshot;
mod stores;
mod streams;
mod top;
mod tree;
mod ttl;
mod version;
mod volume;

use std::future::Future;

use futures_util::{StreamExt as _, stream};

use crate::config::{Command, Global};
use crate::failure::Exit;

/// How many requests one command has under way at a time.
const CONCURRENT_REQUESTS_MAX: usize = 16;

pub(crate) async fn dispatch(global: Global, command: Command) -> anyhow::Result<Exit> {
    let global = &global;
    match command {
        Command::Run(config) => run::run(global, config).await,
        Command::Exec(config) => exec::run(global, config).await,
        Command::Cp(config) => cp::run(global, config).await,
        Command::Fork(config) => fork::run(global, config).await,
        Command::Ps { all, filters } => ps::run(global, all, &filters).await,
        Command::Tree { filters } => tree::run(global, &filters).await,
        Command::Inspect { vm } => inspect::run(global, &vm).await,
        Command::Logs { vm, follow } => logs::run(global, &vm, follow).await,
        Command::Events(config) => events::run(global, config).await,
        Command::Console { vm } => console::run(global, &vm).await,
        Command::Pause { vms } => pause::pause(global, vms).await,
        Command::Resume { vms } => pause::resume(global, vms).await,
        Command::Ttl { vm, request } => ttl::run(global, &vm, &request).await,
        Command::Kill(config) => kill::run(global, config).await,
        Command::Rm(config) => rm::run(global, config).await,
        Command::Top(config) => top::run(global, config).await,
        Command::Doctor => doctor::run(global).await,
        Command::Version => version::run(global).await,
        Command::Image(action) => image::run(global, action).await,
        Command::Disk(action) => disk::run(global, action).await,
        Command::Snapshot(action) => snapshot::run(global, action).await,
        Command::Volume(action) => volume::run(global, action).await,
        Command::Cluster(action) => cluster::run(global, action).await,
        Command::Daemon(action) => daemon::run(global, action).await,
        Command::Completion(shell) => completion::run(global, shell),
    }
}

/// Asks for each of `names`, some at a time, and keeps their order.
async fn for_each<T, F, Fut>(names: Vec<String>, ask: F) -> Vec<(String, anyhow::Result<T>)>
where
    F: Fn(String) -> Fut,
    Fut: Future<Output = anyhow::Result<T>>,
{
    stream::iter(names)
        .map(|name| {
            let answer = ask(name.clone());
            async move { (name, answer.await) }
        })
        .buffered(CONCURRENT_REQUESTS_MAX)
        .collect()
        .await
}
