//! One file, streamed.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hyper::Method;

use super::{guest_file_name, report};
use crate::client::{Answer, Client, Query, empty};
use crate::commands::streams::{IDLE_BOUND, Upload, copy, copy_to_file};
use crate::failure::Exit;
use crate::printer::{stdout_error, stdout_stream};

/// For files from standard input, and where the daemon names none.
const MODE_DEFAULT: u32 = 0o644;

/// What a file from a guest may carry over here: no set-user-id bits from a stranger.
const MODE_MASK: u32 = 0o777;

async fn open(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<Answer> {
    let query = Query::new(format!("/v1/vms/{vm}/files")).with("path", path);
    client.send(Method::GET, &query, empty(), IDLE_BOUND).await
}

fn len_of(answer: &Answer) -> Option<u64> {
    answer.header("content-length")?.parse().ok()
}

/// `VM:PATH` to standard output.
pub(super) async fn print(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<Exit> {
    let from = format!("{vm}:{path}");
    let answer = open(client, vm, path).await?;
    let bar = client.global.printer.bytes(len_of(&answer), from.clone());
    copy(answer, &mut stdout_stream()?, &bar, &format!("`{from}`"), stdout_error).await?;
    Ok(Exit::Done)
}

/// `VM:PATH` to a file here. An existing file is replaced as a whole, or stays as it was.
pub(super) async fn fetch(
    client: &Client<'_>,
    vm: &str,
    path: &str,
    mut to: PathBuf,
) -> anyhow::Result<Exit> {
    if to.is_dir() {
        to.push(guest_file_name(path)?);
    }
    let from = format!("{vm}:{path}");
    let answer = open(client, vm, path).await?;
    let bar = client.global.printer.bytes(len_of(&answer), from.clone());
    let mode = answer
        .header("x-vmfork-mode")
        .and_then(|mode| u32::from_str_radix(mode, 8).ok())
        .unwrap_or(MODE_DEFAULT);
    let len = copy_to_file(answer, &to, mode & MODE_MASK, &bar, &format!("`{from}`")).await?;
    bar.finish_and_clear();
    report(client, &from, &to.display().to_string(), len)
}

/// A file here, or standard input, to `VM:PATH`.
pub(super) async fn store(
    client: &Client<'_>,
    from: Option<&Path>,
    vm: &str,
    path: &str,
) -> anyhow::Result<Exit> {
    let mut mode = MODE_DEFAULT;
    let name = from.map_or_else(|| "-".to_owned(), |from| from.display().to_string());
    let (upload, bar) = match from {
        None => {
            let bar = client.global.printer.bytes(None, name.clone());
            (Upload::of_stdin(bar.clone()), bar)
        }
        Some(from) => {
            let read = || format!("read {}", from.display());
            let file = tokio::fs::File::open(from).await.with_context(read)?;
            let metadata = file.metadata().await.with_context(read)?;
            mode = metadata.permissions().mode() & 0o7777;
            let total = metadata.is_file().then_some(metadata.len());
            let bar = client.global.printer.bytes(total, name.clone());
            (Upload::of_file(file, bar.clone()), bar)
        }
    };
    let (body, stalled) = upload.watched(IDLE_BOUND);
    let query = Query::new(format!("/v1/vms/{vm}/files"))
        .with("path", path)
        .with("mode", &format!("{mode:o}"));
    tokio::select! {
        answer = client.send(Method::PUT, &query, body, Duration::MAX) => {
            answer?;
        }
        error = stalled => return Err(error).with_context(|| format!("copy to `{vm}:{path}`")),
    }
    let len = bar.position();
    bar.finish_and_clear();
    report(client, &name, &format!("{vm}:{path}"), len)
}
