//! Bytes between the daemon and a file here, as a stream: what `cp` and `snapshot export` and
//! `import` share.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use indicatif::ProgressBar;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncSeekExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::client::{Answer, Body};

const CHUNK_BYTES: usize = 256 << 10;

/// Zeros are left out of a file in steps of this.
const HOLE_BYTES: usize = 64 << 10;

/// Idle timeout of a transfer.
pub(super) const IDLE_BOUND: Duration = Duration::from_secs(120);

/// Copies the answer's body, and returns its length. `from`: what it is, for errors.
pub(super) async fn copy(
    mut answer: Answer,
    to: &mut impl Sink,
    bar: &ProgressBar,
    from: &str,
    write_error: impl Fn(io::Error) -> anyhow::Error,
) -> anyhow::Result<u64> {
    let mut len = 0;
    let read = || format!("read {from}");
    while let Some(chunk) = answer.chunk(Some(IDLE_BOUND)).await.with_context(read)? {
        to.put(&chunk).await.map_err(&write_error)?;
        len += u64::try_from(chunk.len()).unwrap_or_default();
        bar.set_position(len);
    }
    to.end().await.map_err(&write_error)?;
    Ok(len)
}

/// What takes the bytes of a stream.
pub(super) trait Sink {
    async fn put(&mut self, bytes: &[u8]) -> io::Result<()>;
    async fn end(&mut self) -> io::Result<()>;
}

impl<W: AsyncWrite + Unpin> Sink for W {
    async fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes).await
    }

    async fn end(&mut self) -> io::Result<()> {
        self.flush().await
    }
}

/// A new file, in which zeros become holes. Its length is to be set at the end.
struct Sparse<'a> {
    file: &'a mut tokio::fs::File,
    len: u64,
}

impl Sink for Sparse<'_> {
    async fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(HOLE_BYTES) {
            if piece.iter().all(|byte| *byte == 0) {
                self.len += u64::try_from(piece.len()).unwrap_or_default();
                self.file.seek(io::SeekFrom::Start(self.len)).await?;
            } else {
                self.file.write_all(piece).await?;
                self.len += u64::try_from(piece.len()).unwrap_or_default();
            }
        }
        Ok(())
    }

    async fn end(&mut self) -> io::Result<()> {
        self.file.flush().await
    }
}

/// The answer's body to a file here, and its length. An existing file is replaced as a whole, or
/// stays as it was; a device or a pipe is written to.
pub(super) async fn copy_to_file(
    answer: Answer,
    to: &Path,
    mode: u32,
    bar: &ProgressBar,
    from: &str,
) -> anyhow::Result<u64> {
    let write_error =
        |error: io::Error| anyhow::Error::new(error).context(format!("write {}", to.display()));
    let existing = tokio::fs::canonicalize(to).await.ok();
    let target = match &existing {
        Some(target) if !target.is_file() => {
            let mut file = tokio::fs::OpenOptions::new()
                .write(true)
                .open(target)
                .await
                .map_err(write_error)?;
            return copy(answer, &mut file, bar, from, write_error).await;
        }
        target => target.as_deref().unwrap_or(to),
    };
    let folder = match target.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let unfinished =
        tempfile::Builder::new().prefix(".vmfork-").tempfile_in(folder).map_err(write_error)?;
    let mut file =
        tokio::fs::File::from_std(unfinished.as_file().try_clone().map_err(write_error)?);
    let mut sparse = Sparse { file: &mut file, len: 0 };
    let len = copy(answer, &mut sparse, bar, from, write_error).await?;
    file.set_len(len).await.map_err(write_error)?;
    unfinished.as_file().set_permissions(Permissions::from_mode(mode)).map_err(write_error)?;
    // A file that has the name has the bytes, even after a power cut.
    file.sync_all().await.map_err(write_error)?;
    unfinished.persist(target).map_err(|error| write_error(error.error))?;
    Ok(len)
}

/// A file here, or standard input, on its way to the daemon.
pub(super) struct Upload {
    body: Body,
    moved: Arc<Notify>,
    /// Standard input may pause: its writer sets the pace.
    may_pause: bool,
}

impl Upload {
    pub(super) fn of_stdin(bar: ProgressBar) -> Self {
        Self::new(Box::pin(tokio::io::stdin()), bar, true)
    }

    pub(super) fn of_file(file: tokio::fs::File, bar: ProgressBar) -> Self {
        Self::new(Box::pin(file), bar, false)
    }

    fn new(source: Pin<Box<dyn AsyncRead + Send>>, bar: ProgressBar, may_pause: bool) -> Self {
        let moved = Arc::new(Notify::new());
        Self { body: body(source, bar, Arc::clone(&moved)), moved, may_pause }
    }

    /// Splits off what ends, as an error, once nothing has moved for `bound`.
    pub(super) fn watched(
        self,
        bound: Duration,
    ) -> (Body, impl Future<Output = anyhow::Error> + Send) {
        let Self { body, moved, may_pause } = self;
        let stalled = async move {
            if may_pause {
                return std::future::pending().await;
            }
            while timeout(bound, moved.notified()).await.is_ok() {}
            anyhow!("no data was transferred for {} s", bound.as_secs())
        };
        (body, stalled)
    }
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
