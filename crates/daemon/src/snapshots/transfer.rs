//! Snapshots that come and go: export and import as one stream, push and pull between stores.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use vmfork_api::{ErrorBody, ErrorCode, SCHEMA, Snapshot, TransferReply, TransferRequest};
use vmfork_store::{Blobs, Folder, Store, StoreError};
use vmfork_store_s3::{Location, OpenError, S3, Settings};

use super::keep::with_work;
use super::work::CancelOnDrop;
use super::{SnapshotError, Snapshots, UnderWay};
use crate::control::ByteStream;
use crate::hub::{Core, chain};

/// Bytes between the store and a client: 4 MiB.
const PIECES_MAX: usize = 16;
const PIECE_BYTES: usize = 256 << 10;

/// One stream with all of a snapshot and of what it depends on. Ends with the receiver.
pub(super) fn export(core: &Arc<Core>, name: &str) -> Result<ByteStream, ErrorBody> {
    let message = format!("export snapshot `{name}`");
    // What can be said before the first byte is said as an error.
    core.snapshots.check_written(name, &message)?;
    core.snapshots.listed(core, name)?;
    let (out_tx, out) = mpsc::channel(PIECES_MAX);
    let (core, name) = (Arc::clone(core), name.to_owned());
    tokio::task::spawn_blocking(move || {
        let mut sink = Sink { to: out_tx.clone(), buffer: Vec::with_capacity(PIECE_BYTES) };
        let work = core.snapshots.work();
        let outcome = core.snapshots.store.export(&name, &mut sink, &work);
        let outcome = outcome
            .map_err(SnapshotError::from)
            .and_then(|_| sink.flush().map_err(|error| SnapshotError::Stream { source: error }));
        if let Err(error) = outcome {
            let _client_has_gone = out_tx.blocking_send(Err(error.to_body(message)));
        }
    });
    Ok(out)
}

struct Sink {
    to: mpsc::Sender<Result<Bytes, ErrorBody>>,
    buffer: Vec<u8>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.buffer, Vec::with_capacity(PIECE_BYTES));
        if piece.is_empty() {
            return Ok(());
        }
        let sent = self.to.blocking_send(Ok(piece.into()));
        sent.map_err(|_client_has_gone| io::ErrorKind::BrokenPipe.into())
    }
}

/// Store what a stream brings. If it does not come whole, nothing is stored.
pub(super) async fn import(
    core: &Arc<Core>,
    name: Option<String>,
    content: ByteStream,
) -> Result<Vec<Snapshot>, ErrorBody> {
    let message = "import a snapshot".to_owned();
    let stored = with_work(core, "", message, move |core, _, work| {
        let mut source = Pieces { from: content, piece: Bytes::new() };
        Ok(core.snapshots.store.import(&mut source, name.as_deref(), work)?)
    })
    .await?;
    stored.iter().map(|descriptor| core.snapshots.listed(core, &descriptor.name)).collect()
}

struct Pieces {
    from: ByteStream,
    piece: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.from.blocking_recv() {
                Some(Ok(piece)) => self.piece = piece,
                Some(Err(error)) => return Err(io::Error::other(error)),
                None => return Ok(0),
            }
        }
        let len = buffer.len().min(self.piece.len());
        buffer[..len].copy_from_slice(&self.piece.split_to(len));
        Ok(len)
    }
}

/// What is wanted of another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// It must be there.
    Reading,
    /// It is made if need be.
    Writing,
}

/// The store at a location.
pub(super) fn store_at(
    location: &str,
    wanted: For,
    runtime: &Handle,
) -> Result<Store, SnapshotError> {
    if location.starts_with("s3://") {
        let location = location.parse::<Location>().map_err(OpenError::from)?;
        let s3 = S3::open(&location, &Settings::from_env()?, runtime.clone())?;
        return Ok(match wanted {
            For::Reading => Store::existing(Arc::new(s3))?,
            For::Writing => Store::new(Arc::new(s3))?,
        });
    }
    Ok(Store::folder(folder_at(location, wanted)?)?)
}

/// What the store at a location is kept in, for reading. A network is not asked for anything yet.
pub(super) fn blobs_at(location: &str, runtime: &Handle) -> Result<Arc<dyn Blobs>, SnapshotError> {
    if location.starts_with("s3://") {
        let location = location.parse::<Location>().map_err(OpenError::from)?;
        return Ok(Arc::new(S3::new(&location, &Settings::from_env()?, runtime.clone())?));
    }
    let folder = Folder::new(folder_at(location, For::Reading)?).map_err(StoreError::from)?;
    Ok(Arc::new(folder))
}

fn folder_at(location: &str, wanted: For) -> Result<&Path, SnapshotError> {
    if let Some((scheme, _)) = location.split_once("://") {
        return Err(SnapshotError::Location {
            location: location.to_owned(),
            why: format!("stores of `{scheme}` are not known"),
        });
    }
    let path = Path::new(location);
    if !path.is_absolute() {
        return Err(SnapshotError::Location {
            location: location.to_owned(),
            why: "a folder is named by its path from the root".to_owned(),
        });
    }
    if wanted == For::Reading && !path.is_dir() {
        return Err(SnapshotError::Location {
            location: location.to_owned(),
            why: "there is no such folder".to_owned(),
        });
    }
    Ok(path)
}

/// Copy a snapshot, and what it depends on, to another store.
pub(super) async fn push(
    core: &Arc<Core>,
    name: &str,
    request: TransferRequest,
) -> Result<TransferReply, ErrorBody> {
    let began = Instant::now();
    let message = format!("push snapshot `{name}` to {}", request.location);
    let copied = with_work(core, name, message, move |core, name, work| {
        let other = store_at(&request.location, For::Writing, &core.snapshots.runtime)?;
        Ok(core.snapshots.store.copy_to(name, &other, work)?)
    })
    .await?;
    Ok(TransferReply {
        schema: SCHEMA.to_owned(),
        names: copied.names,
        sent_bytes: copied.bytes,
        total_ms: crate::fork::ms(began.elapsed()),
    })
}

/// Bring a snapshot from another store: it can be started when this returns.
pub(super) async fn pull(
    core: &Arc<Core>,
    name: &str,
    request: TransferRequest,
) -> Result<Snapshot, ErrorBody> {
    let message = format!("pull snapshot `{name}` from {}", request.location);
    let failed = message.clone();
    let (location, wait) = (request.location, request.wait);
    let from = location.clone();
    let remote = with_work(core, name, message.clone(), move |core, name, work| {
        let remote = store_at(&from, For::Reading, &core.snapshots.runtime)?;
        core.snapshots.store.adopt_from(name, &remote, &from, work)?;
        Ok(remote)
    })
    .await?;
    let under_way = Arc::new(UnderWay::new(name, core.snapshots.work()));
    core.snapshots.under_way().insert(name.to_owned(), Arc::clone(&under_way));
    let fetching = {
        let (core, under_way, name) = (Arc::clone(core), Arc::clone(&under_way), name.to_owned());
        tokio::task::spawn_blocking(move || {
            let outcome = core.snapshots.store.fetch_chunks(&name, &remote, &under_way.work);
            let outcome = outcome.map_err(SnapshotError::from);
            core.snapshots.pulled(&under_way, outcome.as_ref().err());
            outcome.map_err(|error| error.to_body(message))
        })
    };
    if wait {
        // What is left still comes as it is needed.
        let _give_up = CancelOnDrop(Arc::clone(&under_way.work));
        fetching.await.unwrap_or_else(|error| {
            Err(ErrorBody::new(ErrorCode::Internal, failed).cause(error))
        })?;
    }
    core.snapshots.listed(core, name)
}

impl Snapshots {
    /// All of its pages are here, or what is left comes as it is needed.
    fn pulled(&self, under_way: &Arc<UnderWay>, error: Option<&SnapshotError>) {
        under_way.over.cancel();
        if let Some(error) = error {
            let error = chain(error);
            tracing::warn!(snapshot = under_way.name, error, "pages are left where they were");
        }
        self.under_way().remove(&under_way.name);
    }
}
