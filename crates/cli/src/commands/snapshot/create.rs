//! `vmfork snapshot create`: prints the pause of the VM and, once stored, the size of the snapshot.

use std::time::{Duration, Instant};

use vmfork_api::{Snapshot, SnapshotDetail, SnapshotRequest, SnapshotState};

use super::{find, progress, show};
use crate::client::{Query, WHOLE};
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::start::reach;

/// What the daemon gives the VM's freeze, and finding what the VM had written.
const FREEZE_BOUND: Duration = Duration::from_secs(120);

pub(super) async fn run(global: &Global, request: SnapshotRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let printer = &global.printer;
    let (vm, name) = (&request.vm, &request.name);
    let started = Instant::now();
    let giving_up = request.wait.then(|| {
        let text = format!("Cancelled snapshot `{name}`; `{vm}` keeps running");
        progress::GivingUp::new(printer, text)
    });
    let bound = if request.wait { WHOLE } else { FREEZE_BOUND };
    let taken = tokio::select! {
        taken = client.post(Query::new("/v1/snapshots"), &request, bound) => taken,
        never = progress::show(&client, name, "Writing"), if request.wait => match never {},
    };
    if let Some(giving_up) = giving_up {
        giving_up.over();
    }
    let taken: Snapshot = taken?;
    // Only the detail has the pause. A snapshot that was removed meanwhile is no failure here.
    let detail = find(&client, name).await.unwrap_or_default();
    if printer.json {
        match &detail {
            Some(detail) => printer.document(detail)?,
            None => printer.with_schema(&taken)?,
        }
    } else {
        let elapsed_ms = started.elapsed().as_secs_f64() * 1000.0;
        for line in lines(vm, &taken, detail.as_ref(), elapsed_ms) {
            printer.note(&line);
        }
    }
    let state = detail.map_or(taken.state, |detail| detail.snapshot.state);
    Ok(if state == SnapshotState::Failed { Exit::Failed } else { Exit::Done })
}

/// The lines for a person.
fn lines(
    vm: &str,
    taken: &Snapshot,
    detail: Option<&SnapshotDetail>,
    elapsed_ms: f64,
) -> Vec<String> {
    let snapshot = detail.map_or(taken, |detail| &detail.snapshot);
    let name = &snapshot.name;
    let mut first = format!("Took snapshot `{name}` of `{vm}`");
    if snapshot.state == SnapshotState::Ready {
        first.push_str(&format!(" in {}", format::millis(elapsed_ms)));
    }
    if let Some(detail) = detail {
        first.push_str(&format!(", paused {}", format::millis(detail.pause_ms)));
    }
    let second = match snapshot.state {
        SnapshotState::Writing | SnapshotState::Pulling => {
            "It is being written: `vmfork snapshot ls` shows how far it is".to_owned()
        }
        SnapshotState::Ready => format!("Stored {}", show::stored(snapshot)),
        SnapshotState::Failed => format!(
            "It could not be stored: {}",
            format::printable(snapshot.reason.as_deref().unwrap_or("the daemon does not say why"))
        ),
    };
    vec![first, second]
}

#[cfg(test)]
mod tests {
    use super::super::show::tests::detail;
    use super::*;

    #[test]
    fn what_is_not_stored_yet_is_not_said_to_be() {
        let mut detail = detail("warm");
        detail.snapshot.state = SnapshotState::Writing;
        let taken = detail.snapshot.clone();
        assert_eq!(
            lines("web", &taken, Some(&detail), 31.0),
            [
                "Took snapshot `warm` of `web`, paused 3.4 ms",
                "It is being written: `vmfork snapshot ls` shows how far it is"
            ]
        );
        assert_eq!(lines("web", &taken, None, 31.0)[0], "Took snapshot `warm` of `web`");
        detail.snapshot.state = SnapshotState::Ready;
        assert_eq!(
            lines("web", &taken, Some(&detail), 3210.0),
            [
                "Took snapshot `warm` of `web` in 3.21 s, paused 3.4 ms",
                "Stored 210 MiB of 512 MiB as 64 MiB, 12.5 % of its memory"
            ]
        );
        detail.snapshot.state = SnapshotState::Failed;
        detail.snapshot.reason = Some("no space left".to_owned());
        let told = lines("web", &taken, Some(&detail), 31.0);
        assert_eq!(told[1], "It could not be stored: no space left");
    }
}
