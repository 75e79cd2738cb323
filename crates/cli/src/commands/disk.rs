//! `vmfork disk`: what VMs wrote, also after they ended.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use hyper::Method;
use serde::Serialize;
use vmfork_api::{DiskState, HostDisk, ResizeRequest};

use super::inspect::section;
use super::kill;
use super::streams::{IDLE_BOUND, copy, copy_to_file};
use super::volume::USE;
use crate::client::{Client, Query, empty, is_not_found};
use crate::config::{DiskAction, DiskName, Global};
use crate::failure::{Exit, HintExt as _, Misuse};
use crate::format;
use crate::printer::{Field, Tone, stdout_error, stdout_stream};
use crate::start::reach;

/// Only its owner: disks hold guests' secrets.
const MODE: u32 = 0o600;

#[derive(Serialize)]
struct Disks {
    disks: Vec<HostDisk>,
}

#[derive(Serialize)]
struct Exported<'a> {
    disk: &'a str,
    file: &'a Path,
    size_bytes: u64,
}

pub(super) async fn run(global: &Global, action: DiskAction) -> anyhow::Result<Exit> {
    match action {
        DiskAction::Ls => list(global).await,
        DiskAction::Inspect { disk } => inspect(global, &disk).await,
        DiskAction::Export { disk, to } => export(global, &disk, to).await,
        DiskAction::Resize { disk, request } => resize(global, &disk, request).await,
        DiskAction::Rm { disks } => remove(global, disks).await,
        DiskAction::Prune => prune(global).await,
    }
}

async fn all(client: &Client<'_>) -> anyhow::Result<Vec<HostDisk>> {
    client.get(Query::new("/v1/disks")).await
}

/// The disk that a command names.
async fn find(client: &Client<'_>, named: &DiskName) -> anyhow::Result<HostDisk> {
    let (vm, name) = match named {
        DiskName::Id(id) => return client.get(Query::new(format!("/v1/disks/{id}"))).await,
        DiskName::OfVm { vm, name } => (vm, name),
    };
    let mut found = all(client).await?;
    found.retain(|disk| (&disk.vm, &disk.name) == (vm, name));
    // A VM that runs goes before one of the same name that an earlier daemon had.
    if found.first().is_some_and(|disk| disk.state == DiskState::InUse) {
        found.truncate(1);
    }
    let count = found.len();
    match (found.pop(), count) {
        (Some(disk), 1) => Ok(disk),
        (None, _) => Err(anyhow!("there is no disk `{named}`"))
            .hint("`vmfork disk ls` lists them; one that is a volume has the volume's name"),
        (Some(_), count) => Err(anyhow!("{count} disks are called `{named}`"))
            .hint("use the ID that `vmfork disk ls` prints"),
    }
}

fn state(disk: &HostDisk) -> (&'static str, Tone) {
    match disk.state {
        DiskState::InUse => ("in use", Tone::Good),
        DiskState::Left => ("left", Tone::Plain),
        DiskState::Damaged => ("damaged", Tone::Bad),
        DiskState::Volume => ("volume", Tone::Good),
    }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { format::printable(text) }
}

async fn list(global: &Global) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let disks = all(&client).await?;
    if global.printer.json {
        global.printer.with_schema(&Disks { disks })?;
        return Ok(Exit::Done);
    }
    let rows = disks.iter().map(|disk| {
        let (word, tone) = state(disk);
        vec![
            Field::Text(disk.id.clone()),
            Field::Text(or_dash(&disk.vm)),
            Field::Text(or_dash(&disk.name)),
            Field::Toned(word.to_owned(), tone),
            Field::Figure(format::size(disk.size_bytes)),
            Field::Figure(format::size(disk.written_bytes)),
        ]
    });
    global.printer.table(&["ID", "VM", "NAME", "STATE", "SIZE", "WRITTEN"], rows.collect())?;
    Ok(Exit::Done)
}

async fn inspect(global: &Global, named: &DiskName) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let disk = find(&client, named).await?;
    if global.printer.json {
        global.printer.with_schema(&disk)?;
        return Ok(Exit::Done);
    }
    let mut word = state(&disk).0.to_owned();
    if let Some(reason) = &disk.reason {
        word = format!("{word}: {}", format::printable(reason));
    }
    let fields = [
        ("id", disk.id.clone()),
        ("vm", or_dash(&disk.vm)),
        ("name", or_dash(&disk.name)),
        ("state", word),
        ("size", format::size(disk.size_bytes)),
        ("written", format::size(disk.written_bytes)),
    ];
    global.printer.data(&section("", &fields))?;
    Ok(Exit::Done)
}

async fn export(global: &Global, named: &DiskName, to: Option<PathBuf>) -> anyhow::Result<Exit> {
    match &to {
        None if std::io::stdout().is_terminal() => {
            return Err(Misuse("disk export: standard output is a terminal".to_owned()))
                .hint(format!("name a file, or redirect: `vmfork disk export {named} - > FILE`"));
        }
        Some(to) if to.is_dir() => {
            return Err(anyhow!("{} is a folder", to.display())).hint("name the file to write");
        }
        _ => {}
    }
    let client = reach(global).await?;
    let disk = find(&client, named).await?;
    let route = Query::new(format!("/v1/disks/{}/content", disk.id));
    let answer = client.send(Method::GET, &route, empty(), IDLE_BOUND).await?;
    let bar = global.printer.bytes(Some(disk.size_bytes), format!("Exporting `{named}`"));
    let from = format!("disk `{named}`");
    let Some(to) = to else {
        copy(answer, &mut stdout_stream()?, &bar, &from, stdout_error).await?;
        return Ok(Exit::Done);
    };
    let size_bytes = copy_to_file(answer, &to, MODE, &bar, &from).await?;
    bar.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&Exported { disk: &disk.id, file: &to, size_bytes })?;
    } else {
        let size = format::size(size_bytes);
        global.printer.note(&format!("Exported `{named}` to {} ({size})", to.display()));
    }
    Ok(Exit::Done)
}

async fn resize(global: &Global, named: &DiskName, request: ResizeRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let disk = find(&client, named).await?;
    let route = Query::new(format!("/v1/disks/{}/resize", disk.id));
    let disk: HostDisk = client.post(route, &request, USE).await?;
    if global.printer.json {
        global.printer.with_schema(&disk)?;
    } else {
        let (size, after) = (format::size(disk.size_bytes), "`resize2fs` in the guest");
        global.printer.note(&format!("`{named}` has {size} now; {after} grows its file system"));
    }
    Ok(Exit::Done)
}

async fn remove(global: &Global, named: Vec<DiskName>) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let mut answers = Vec::with_capacity(named.len());
    for named in named {
        let removed = match find(&client, &named).await {
            Ok(disk) => client.delete(Query::new(format!("/v1/disks/{}", disk.id))).await,
            Err(error) => Err(error),
        };
        answers.push((named.to_string(), removed.map(|()| None)));
    }
    kill::report(global, "Removed", answers.into_iter())
}

async fn prune(global: &Global) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let mut answers = Vec::new();
    for disk in all(&client).await? {
        if disk.state == DiskState::Left {
            let removed = client.delete(Query::new(format!("/v1/disks/{}", disk.id))).await;
            // The files of a VM that has just ended go by themselves, also meanwhile.
            if !removed.as_ref().is_err_and(is_not_found) {
                answers.push((disk.id, removed.map(|()| None)));
            }
        }
    }
    if answers.is_empty() && !global.printer.json {
        global.printer.note("No disks to remove");
        return Ok(Exit::Done);
    }
    kill::report(global, "Removed", answers.into_iter())
}
