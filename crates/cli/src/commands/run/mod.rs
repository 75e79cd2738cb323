//! `vmfork run`: from an image or from a stored snapshot, whichever NAME is.

mod boot;
mod start;

use vmfork_api::{Accel, Image};

use super::snapshot;
use crate::client::{Client, Query, is_not_found};
use crate::config::{Global, RunConfig};
use crate::failure::{Exit, HintExt as _, Misuse};
use crate::start::reach;

pub(super) async fn run(global: &Global, config: RunConfig) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    match config {
        RunConfig::Image(config) => boot::run(client, config).await,
        RunConfig::Snapshot(config) => start::run(client, config).await,
        RunConfig::ByName { name, image, snapshot } => {
            if is_snapshot(client, &name).await? {
                return start::run(client, snapshot?).await;
            }
            let image = image?;
            // Else it may be what a disk begins with.
            let is_the_name = image.request.disks.is_empty();
            match boot::run(client, image).await {
                Err(error) if is_the_name && is_not_found(&error) => Err(error)
                    .hint("list the names with `vmfork image ls` and `vmfork snapshot ls`"),
                ended => ended,
            }
        }
    }
}

/// Whether a name is a snapshot's and not an image's.
///
/// # Errors
/// It is [`Misuse`] if both have it.
async fn is_snapshot(client: &Client<'_>, name: &str) -> anyhow::Result<bool> {
    match snapshot::find(client, name).await {
        Ok(None) => return Ok(false),
        Ok(Some(_)) => {}
        Err(error) => {
            return Err(error.context(format!("find out whether `{name}` is a snapshot")));
        }
    }
    let images: Vec<Image> = client.get(Query::new("/v1/images")).await?;
    if images.iter().any(|image| image.name == name) {
        return Err(Misuse(format!("run: `{name}` is the name of an image and of a snapshot")))
            .hint("choose one with --image or --snapshot");
    }
    Ok(true)
}

pub(super) fn accel_word(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    }
}
