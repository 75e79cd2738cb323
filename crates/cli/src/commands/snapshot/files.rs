//! `vmfork snapshot export` and `import`: a snapshot, with what it depends on, as one stream of
//! bytes.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use hyper::Method;
use serde::Serialize;
use vmfork_api::Snapshot;

use super::{Snapshots, quoted, route};
use crate::client::{Query, WHOLE, empty};
use crate::commands::streams::{IDLE_BOUND, Upload, copy, copy_to_file};
use crate::config::Global;
use crate::failure::{Exit, HintExt as _, Misuse};
use crate::format;
use crate::printer::{stdout_error, stdout_stream};
use crate::start::reach;

/// Only its owner: a guest's memory holds its secrets.
const MODE: u32 = 0o600;

/// After the last byte the daemon has all of it to bring to the disk.
const STORE_BOUND: Duration = Duration::from_secs(600);

#[derive(Serialize)]
struct Exported<'a> {
    snapshot: &'a str,
    file: &'a Path,
    size_bytes: u64,
}

pub(super) async fn export(
    global: &Global,
    name: &str,
    to: Option<PathBuf>,
) -> anyhow::Result<Exit> {
    match &to {
        None if std::io::stdout().is_terminal() => {
            return Err(Misuse("snapshot export: standard output is a terminal".to_owned())).hint(
                format!("name a file, or redirect: `vmfork snapshot export {name} - > FILE`"),
            );
        }
        Some(to) if to.is_dir() => {
            return Err(anyhow!("{} is a folder", to.display())).hint("name the file to write");
        }
        _ => {}
    }
    let client = reach(global).await?;
    let answer = client.send(Method::GET, &route(name, "/export"), empty(), IDLE_BOUND).await?;
    let bar = global.printer.bytes(None, format!("Exporting `{name}`"));
    let from = format!("snapshot `{name}`");
    let Some(to) = to else {
        copy(answer, &mut stdout_stream()?, &bar, &from, stdout_error).await?;
        return Ok(Exit::Done);
    };
    let size_bytes = copy_to_file(answer, &to, MODE, &bar, &from).await?;
    bar.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&Exported { snapshot: name, file: &to, size_bytes })?;
    } else {
        let size = format::size(size_bytes);
        global.printer.note(&format!("Exported `{name}` to {} ({size})", to.display()));
    }
    Ok(Exit::Done)
}

pub(super) async fn import(
    global: &Global,
    name: Option<String>,
    from: Option<PathBuf>,
) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let source = from.as_ref().map_or_else(|| "-".to_owned(), |from| from.display().to_string());
    let message = format!("Importing {source}");
    let (upload, bar) = match &from {
        None if std::io::stdin().is_terminal() => {
            return Err(Misuse("snapshot import: standard input is a terminal".to_owned()))
                .hint("name a file, or redirect: `vmfork snapshot import - < FILE`");
        }
        None => {
            let bar = global.printer.bytes(None, message);
            (Upload::of_stdin(bar.clone()), bar)
        }
        Some(from) => {
            let read = || format!("read {}", from.display());
            let file = tokio::fs::File::open(from).await.with_context(read)?;
            let metadata = file.metadata().await.with_context(read)?;
            if metadata.is_dir() {
                return Err(anyhow!("{} is a folder", from.display()))
                    .hint("name the file that `vmfork snapshot export` wrote");
            }
            let bar = global.printer.bytes(metadata.is_file().then_some(metadata.len()), message);
            (Upload::of_file(file, bar.clone()), bar)
        }
    };
    let mut query = Query::new("/v1/import");
    if let Some(name) = &name {
        query = query.with("name", name);
    }
    let (body, stalled) = upload.watched(STORE_BOUND);
    let stored: Vec<Snapshot> = tokio::select! {
        stored = client.upload(query, body, WHOLE) => stored?,
        error = stalled => return Err(error).with_context(|| format!("import {source}")),
    };
    bar.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&Snapshots { snapshots: stored })?;
        return Ok(Exit::Done);
    }
    let names: Vec<String> = stored.iter().map(|snapshot| snapshot.name.clone()).collect();
    let stored_bytes: u64 = stored.iter().map(|snapshot| snapshot.stored_bytes).sum();
    global.printer.note(&match names.as_slice() {
        [] => format!("{source} is already in the store"),
        names => format!("Imported {} ({})", quoted(names), format::size(stored_bytes)),
    });
    Ok(Exit::Done)
}
