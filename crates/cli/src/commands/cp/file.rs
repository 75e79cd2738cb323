//! One file, streamed.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::Method;
use hyper::body::Frame;
use indicatif::ProgressBar;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::{IDLE_BOUND, guest_file_name, report};
use crate::client::{Answer, Body, Client, Query, empty};
use crate::failure::Exit;
use crate::printer::{stdout_error, stdout_stream};

const CHUNK_BYTES: usize = 256 << 10;

/// For files from standard input, and where the daemon names none.
const MODE_DEFAULT: u32 = 0o644;

/// What a file from a guest may carry over here: no set-user-id bits from a stranger.
const MODE_MASK: u32 = 0o777;

async fn open(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<Answer> {
    let query = Query::new(format!("/v1/vms/{vm}/files")).with("path", path);
    client.send(Method::GET, &query, empty(), IDLE_BOUND).await
}

/// Copies the answer's body, and returns its length.
async fn copy(
    mut answer: Answer,
    to: &mut (impl AsyncWrite + Unpin),
    bar: &ProgressBar,
    from: &str,
    write_error: impl Fn(io::Error) -> anyhow::Error,
) -> anyhow::Result<u64> {
    let mut len = 0;
    let read = || format!("read `{from}`");
    while let Some(chunk) = answer.chunk(Some(IDLE_BOUND)).await.with_context(read)? {
        to.write_all(&chunk).await.map_err(&write_error)?;
        len += u64::try_from(chunk.len()).unwrap_or_default();
        bar.set_position(len);
    }
    to.flush().await.map_err(&write_error)?;
    Ok(len)
}

fn len_of(answer: &Answer) -> Option<u64> {
    answer.header("content-length")?.parse().ok()
}

/// `VM:PATH` to standard output.
pub(super) async fn print(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<Exit> {
    let from = format!("{vm}:{path}");
    let answer = open(client, vm, path).await?;
    let bar = client.global.printer.bytes(len_of(&answer), from.clone());
    copy(answer, &mut stdout_stream()?, &bar, &from, stdout_error).await?;
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
    let write_error =
        |error: io::Error| anyhow::Error::new(error).context(format!("write {}", to.display()));
    let answer = open(client, vm, path).await?;
    let bar = client.global.printer.bytes(len_of(&answer), from.clone());
    let mode = answer
        .header("x-vmfork-mode")
        .and_then(|mode| u32::from_str_radix(mode, 8).ok())
        .unwrap_or(MODE_DEFAULT);
    let existing = tokio::fs::canonicalize(&to).await.ok();
    let len = match &existing {
        // A device or a pipe is written to, not replaced.
        Some(target) if !target.is_file() => {
            let mut file = tokio::fs::OpenOptions::new()
                .write(true)
                .open(target)
                .await
                .map_err(write_error)?;
            copy(answer, &mut file, &bar, &from, write_error).await?
        }
        target => {
            let target = target.as_deref().unwrap_or(&to);
            let folder = match target.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            let unfinished = tempfile::Builder::new()
                .prefix(".vmfork-cp-")
                .tempfile_in(folder)
                .map_err(write_error)?;
            let mut file =
                tokio::fs::File::from_std(unfinished.as_file().try_clone().map_err(write_error)?);
            let len = copy(answer, &mut file, &bar, &from, write_error).await?;
            unfinished
                .as_file()
                .set_permissions(Permissions::from_mode(mode & MODE_MASK))
                .map_err(write_error)?;
            unfinished.persist(target).map_err(|error| write_error(error.error))?;
            len
        }
    };
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
    let mut source: Pin<Box<dyn AsyncRead + Send>> = Box::pin(tokio::io::stdin());
    let mut mode = MODE_DEFAULT;
    let mut total = None;
    if let Some(from) = from {
        let read = || format!("read {}", from.display());
        let file = tokio::fs::File::open(from).await.with_context(read)?;
        let metadata = file.metadata().await.with_context(read)?;
        mode = metadata.permissions().mode() & 0o7777;
        total = metadata.is_file().then_some(metadata.len());
        source = Box::pin(file);
    }
    let name = from.map_or_else(|| "-".to_owned(), |from| from.display().to_string());
    let bar = client.global.printer.bytes(total, name.clone());
    let moved = Arc::new(Notify::new());
    let body = body(source, bar.clone(), Arc::clone(&moved));
    let query = Query::new(format!("/v1/vms/{vm}/files"))
        .with("path", path)
        .with("mode", &format!("{mode:o}"));
    tokio::select! {
        answer = client.send(Method::PUT, &query, body, Duration::MAX) => {
            answer?;
        }
        // Standard input may pause; whoever feeds it decides for how long.
        () = stalled(&moved), if from.is_some() => {
            return Err(anyhow!("nothing has moved for {} s", IDLE_BOUND.as_secs()))
                .with_context(|| format!("copy to `{vm}:{path}`"));
        }
    }
    let len = bar.position();
    bar.finish_and_clear();
    report(client, &name, &format!("{vm}:{path}"), len)
}

/// Ends once nothing has moved for too long.
async fn stalled(moved: &Notify) {
    while timeout(IDLE_BOUND, moved.notified()).await.is_ok() {}
}

fn body(source: Pin<Box<dyn AsyncRead + Send>>, bar: ProgressBar, moved: Arc<Notify>) -> Body {
    let chunks = stream::try_unfold((source, BytesMut::new()), |(mut source, mut buffer)| async {
        buffer.reserve(CHUNK_BYTES);
        let len = source.read_buf(&mut buffer).await?;
        let chunk: Bytes = buffer.split().freeze();
        Ok((len > 0).then_some((chunk, (source, buffer))))
    });
    let frames = chunks.map(move |chunk: io::Result<Bytes>| {
        let chunk = chunk?;
        moved.notify_one();
        bar.inc(u64::try_from(chunk.len()).unwrap_or_default());
        Ok(Frame::data(chunk))
    });
    StreamBody::new(frames).boxed_unsync()
}
