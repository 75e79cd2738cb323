//! `vmfork snapshot`: VMs that are kept. Starting them again is `vmfork run`'s.

mod create;
mod files;
mod progress;
mod show;
mod stores;

use serde::Serialize;
use vmfork_api::{
    ErrorBody, LabelFilter, RemovedSnapshots, Snapshot, SnapshotDetail, SnapshotState, VerifyReply,
};

use super::brood::error_line;
use super::ps::labelled;
use crate::client::{Client, Query, WHOLE};
use crate::config::{Global, SnapshotAction};
use crate::failure::{Exit, Report};
use crate::format;
use crate::printer::{Field, Level, Tone};
use crate::start::reach;

#[derive(Serialize)]
struct Snapshots {
    snapshots: Vec<Snapshot>,
}

/// What was done to each of several snapshots.
#[derive(Serialize)]
struct Results {
    results: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    name: String,
    done: bool,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    removed: Option<RemovedSnapshots>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorBody>,
}

pub(super) async fn run(global: &Global, action: SnapshotAction) -> anyhow::Result<Exit> {
    match action {
        SnapshotAction::Create(request) => create::run(global, request).await,
        SnapshotAction::Ls { filters } => list(global, &filters).await,
        SnapshotAction::Inspect { name } => show::inspect(global, &name).await,
        SnapshotAction::Rm { names, cascade } => remove(global, names, cascade).await,
        SnapshotAction::Verify { name } => verify(global, &name).await,
        SnapshotAction::Flatten { name } => flatten(global, &name).await,
        SnapshotAction::Export { name, to } => files::export(global, &name, to).await,
        SnapshotAction::Import { name, from } => files::import(global, name, from).await,
        SnapshotAction::Push { name, location } => stores::push(global, &name, &location).await,
        SnapshotAction::Pull { name, location, wait } => {
            stores::pull(global, &name, &location, wait).await
        }
        SnapshotAction::ShowProfile { name } => show::profile(global, &name).await,
        SnapshotAction::ResetProfile { name } => reset_profile(global, name).await,
    }
}

/// `path` below the snapshot: a route word with its slash, or nothing.
fn route(name: &str, path: &str) -> Query {
    Query::new(format!("/v1/snapshots/{name}{path}"))
}

/// If there is one.
pub(super) async fn find(
    client: &Client<'_>,
    name: &str,
) -> anyhow::Result<Option<SnapshotDetail>> {
    client.find(route(name, "")).await
}

async fn list(global: &Global, filters: &[LabelFilter]) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let snapshots: Vec<Snapshot> =
        client.get(labelled(Query::new("/v1/snapshots"), filters)).await?;
    let printer = &global.printer;
    if printer.json {
        printer.with_schema(&Snapshots { snapshots })?;
    } else if printer.level == Level::Quiet {
        // For `vmfork snapshot rm $(vmfork snapshot ls -q)`.
        let names = snapshots.iter().map(|snapshot| format!("{}\n", snapshot.name));
        printer.data(&names.collect::<String>())?;
    } else {
        printer.table(
            &["NAME", "STATE", "MEMORY", "STORED", "BASE", "VMS", "AGE"],
            snapshots.iter().map(row).collect(),
        )?;
        for snapshot in &snapshots {
            if let Some(reason) = &snapshot.reason {
                printer.note(&format!("`{}`: {}", snapshot.name, format::printable(reason)));
            }
        }
    }
    Ok(Exit::Done)
}

fn row(snapshot: &Snapshot) -> Vec<Field> {
    // A damaged or unfinished snapshot lacks some figures.
    let known =
        |is_known: bool, text: String| Field::Figure(if is_known { text } else { "-".to_owned() });
    let tone = match snapshot.state {
        SnapshotState::Ready => Tone::Good,
        SnapshotState::Failed => Tone::Bad,
        SnapshotState::Writing | SnapshotState::Pulling => Tone::Passing,
    };
    let memory_bytes = snapshot.memory_mib.saturating_mul(1 << 20);
    vec![
        Field::Text(snapshot.name.clone()),
        Field::Toned(show::state(snapshot), tone),
        known(snapshot.memory_mib != 0, format::size(memory_bytes)),
        known(snapshot.id.is_some(), format::size(snapshot.stored_bytes)),
        Field::Text(snapshot.base.clone().unwrap_or_else(|| "-".to_owned())),
        Field::Figure(snapshot.vms.to_string()),
        known(snapshot.created_unix_ms != 0, format::age_since(snapshot.created_unix_ms)),
    ]
}

/// One after the other, in the order given: a delta goes before its base.
async fn remove(global: &Global, names: Vec<String>, cascade: bool) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let printer = &global.printer;
    let mut results: Vec<Outcome> = Vec::new();
    for name in names {
        let gone_with = |result: &Outcome| {
            result.removed.as_ref().is_some_and(|removed| removed.names.contains(&name))
        };
        if results.iter().any(gone_with) {
            let removed = Some(RemovedSnapshots { names: Vec::new(), freed_bytes: 0 });
            results.push(Outcome { name, done: true, removed, error: None });
            continue;
        }
        let query = route(&name, "");
        let query = if cascade { query.with("cascade", "true") } else { query };
        match client.remove::<RemovedSnapshots>(query, WHOLE).await {
            Ok(removed) => {
                printer.note(&removal(&removed));
                results.push(Outcome { name, done: true, removed: Some(removed), error: None });
            }
            Err(error) => {
                if !printer.json {
                    printer.error(&error);
                }
                let error = Some(Report::of(&error).body());
                results.push(Outcome { name, done: false, removed: None, error });
            }
        }
    }
    let failed = results.iter().any(|result| !result.done);
    if printer.json {
        printer.with_schema(&Results { results })?;
    }
    Ok(if failed { Exit::Failed } else { Exit::Done })
}

fn removal(removed: &RemovedSnapshots) -> String {
    format!("Removed {}, {} freed", quoted(&removed.names), format::size(removed.freed_bytes))
}

/// `` `a`, `b` and `c` ``.
pub(super) fn quoted(names: &[String]) -> String {
    let mut text = String::new();
    for (i, name) in names.iter().enumerate() {
        text.push_str(match names.len() - i {
            _ if i == 0 => "",
            1 => " and ",
            _ => ", ",
        });
        text.push_str(&format!("`{}`", format::printable(name)));
    }
    text
}

async fn verify(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let spinner = global.printer.spinner(format!("Verifying `{name}`"));
    let reply: VerifyReply = client.act(route(name, "/verify"), WHOLE).await?;
    spinner.finish_and_clear();
    let printer = &global.printer;
    let exit = if reply.damage.is_empty() { Exit::Done } else { Exit::Failed };
    if printer.json {
        printer.document(&reply)?;
        return Ok(exit);
    }
    let read = format!(
        "{} read, {}",
        format::size(reply.read_bytes),
        format::plural(reply.chunks, "chunk")
    );
    let elsewhere = (reply.chunks_elsewhere != 0).then(|| {
        let chunks = format::plural(reply.chunks_elsewhere, "chunk");
        format!("{chunks} not checked: they have not arrived from the source of the pull")
    });
    if reply.damage.is_empty() {
        let whole = match &elsewhere {
            None => "is intact",
            Some(_) => "is intact as far as it has arrived",
        };
        printer.note(&format!("`{name}` {whole} ({read})"));
        elsewhere.iter().for_each(|text| printer.note(text));
        return Ok(exit);
    }
    let damage: String = reply.damage.iter().map(|one| error_line(one) + "\n").collect();
    printer.data(&damage)?;
    let places = u64::try_from(reply.damage.len()).unwrap_or(u64::MAX);
    printer.note(&format!("`{name}` is damaged in {} ({read})", format::plural(places, "place")));
    elsewhere.iter().for_each(|text| printer.note(text));
    let mut remedies: Vec<&str> = Vec::new();
    for remedy in reply.damage.iter().filter_map(|one| one.remedy.as_deref()) {
        if !remedies.contains(&remedy) {
            printer.note(&format!("hint: {}", format::printable(remedy)));
            remedies.push(remedy);
        }
    }
    Ok(exit)
}

async fn flatten(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let spinner = global.printer.spinner(format!("Flattening `{name}`"));
    let snapshot: Snapshot = client.act(route(name, "/flatten"), WHOLE).await?;
    spinner.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&snapshot)?;
    } else {
        global
            .printer
            .note(&format!("`{name}` depends on no other snapshot: {}", show::stored(&snapshot)));
    }
    Ok(Exit::Done)
}

async fn reset_profile(global: &Global, name: String) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    client.delete(route(&name, "/profile")).await?;
    if global.printer.json {
        let outcome = Outcome { name, done: true, removed: None, error: None };
        global.printer.with_schema(&Results { results: vec![outcome] })?;
    } else {
        global
            .printer
            .note(&format!("Deleted the record of the pages that VMs of `{name}` touch first"));
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_names_read_as_a_sentence() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(quoted(&names(&["a"])), "`a`");
        assert_eq!(quoted(&names(&["a", "b"])), "`a` and `b`");
        assert_eq!(quoted(&names(&["a", "b", "c"])), "`a`, `b` and `c`");
        let removed = RemovedSnapshots { names: names(&["a", "b"]), freed_bytes: 3 << 20 };
        assert_eq!(removal(&removed), "Removed `a` and `b`, 3 MiB freed");
    }
}
