//! `vmfork snapshot push` and `pull`: between this host's store and another.

use vmfork_api::{Snapshot, SnapshotState, TransferRequest};

use super::{progress, route, show};
use crate::client::WHOLE;
use crate::commands::stores::{self, placed};
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::start::reach;

pub(super) async fn push(global: &Global, name: &str, location: &str) -> anyhow::Result<Exit> {
    stores::push(global, route(name, "/push"), name, location).await
}

pub(super) async fn pull(
    global: &Global,
    name: &str,
    location: &str,
    wait: bool,
) -> anyhow::Result<Exit> {
    let location = placed(global, location)?;
    let client = reach(global).await?;
    let giving_up = wait.then(|| {
        let text = format!("Cancelled the pull of `{name}`; check it with `vmfork snapshot ls`");
        progress::GivingUp::new(&global.printer, text)
    });
    let request = TransferRequest { location: location.clone(), wait };
    let pulled = tokio::select! {
        pulled = client.post(route(name, "/pull"), &request, WHOLE) => pulled,
        never = progress::show(&client, name, "Pulling") => match never {},
    };
    if let Some(giving_up) = giving_up {
        giving_up.over();
    }
    let snapshot: Snapshot = pulled?;
    if global.printer.json {
        global.printer.with_schema(&snapshot)?;
        return Ok(Exit::Done);
    }
    if snapshot.name != name {
        let here = format::printable(&snapshot.name);
        global.printer.note(&format!("`{name}` is already stored, as `{here}`"));
    }
    let name = &format::printable(&snapshot.name);
    if snapshot.state == SnapshotState::Pulling {
        global.printer.note(&format!(
            "`{name}` can be started; its pages still arrive from {location}; \
             see the progress with `vmfork snapshot ls`"
        ));
    } else {
        global.printer.note(&format!("Pulled `{name}`: {}", show::stored(&snapshot)));
    }
    Ok(Exit::Done)
}
