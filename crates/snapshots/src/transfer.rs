//! Snapshots that come and go: export and import as one stream, push and pull between stores.

use std::io::{self, Read, Write};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use vmfork_api::{ErrorBody, SCHEMA, Snapshot, TransferReply, TransferRequest};
use vmfork_host::error::chain;
use vmfork_store::{SnapshotId, Store, StoreError, Work};

use crate::error::{SnapshotError, is_away};
use crate::keep::with_work;
use crate::kind::{Kind, is_guest_image};
use crate::library::Library;
use crate::location::For;
use crate::placing::{Placed, Pulling};
use crate::under_way::{Doing, UnderWay};
use crate::work::{CancelOnDrop, blocking};
use vmfork_control::ByteStream;

/// Bytes between the store and a client: 4 MiB.
const PIECES_MAX: usize = 16;
const PIECE_BYTES: usize = 256 << 10;
/// How long a client may neither send nor take a piece: longer than any pause of a network that
/// comes back.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How often is looked whether to go on waiting for it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a store may be away from which a pull brings the rest.
const PATIENCE: Duration = Duration::from_secs(3600);
/// The same if a client waits for all of it.
const PATIENCE_WAITED_FOR: Duration = Duration::from_secs(60);
/// Between two attempts: first, and at most.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// One stream with all of a snapshot and of what it depends on. Ends with the receiver.
pub fn export(library: &Arc<Library>, name: &str) -> Result<ByteStream, ErrorBody> {
    let message = format!("export snapshot `{name}`");
    // What can be said before the first byte is said as an error.
    library.snapshots.check_written(name).map_err(|error| error.to_body(&message))?;
    library.snapshots.listed(&library.core, name)?;
    let (out_tx, out) = mpsc::channel(PIECES_MAX + 1);
    // Room for it is there whatever the client takes.
    let last = out_tx.clone().try_reserve_owned();
    let (library, name) = (Arc::clone(library), name.to_owned());
    tokio::task::spawn_blocking(move || {
        let work = library.snapshots.work();
        let peer = Peer { runtime: library.snapshots.runtime.clone(), work: Arc::clone(&work) };
        let mut sink = Sink { to: out_tx, peer, buffer: Vec::with_capacity(PIECE_BYTES) };
        let outcome = library.snapshots.store.export(&name, &mut sink, &work);
        let outcome = outcome
            .map_err(SnapshotError::from)
            .and_then(|_| sink.flush().map_err(|source| SnapshotError::Stream { source }));
        if let (Err(error), Ok(last)) = (outcome, last) {
            last.send(Err(error.to_body(message)));
        }
    });
    Ok(out)
}

/// A client at the other end of a stream, which may do nothing forever.
struct Peer {
    runtime: Handle,
    work: Arc<Work>,
}

impl Peer {
    /// Wait for it, on a thread that may wait.
    fn wait<T>(&self, step: impl Future<Output = T>) -> io::Result<T> {
        self.runtime.block_on(async {
            let mut step = pin!(step);
            for _ in 0..IDLE_MAX.as_secs() {
                if let Ok(done) = tokio::time::timeout(LOOK_EVERY, &mut step).await {
                    return Ok(done);
                }
                if self.work.cancelled.load(Ordering::Relaxed) {
                    return Err(io::Error::other("given up"));
                }
            }
            let text = format!("the client has neither sent nor taken a byte for {IDLE_MAX:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        })
    }
}

struct Sink {
    to: mpsc::Sender<Result<Bytes, ErrorBody>>,
    peer: Peer,
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
        let sent = self.peer.wait(self.to.send(Ok(piece.into())))?;
        sent.map_err(|_client_has_gone| io::ErrorKind::BrokenPipe.into())
    }
}

/// Store what a stream brings. If it does not come whole, nothing is stored.
pub async fn import(
    library: &Arc<Library>,
    name: Option<String>,
    content: ByteStream,
) -> Result<Vec<Snapshot>, ErrorBody> {
    let failed = |error: SnapshotError| error.to_body("import a snapshot");
    let place = |name: &str| library.snapshots.place(name, Doing::Import);
    // Without a name, it is in the stream: the store ensures that no other snapshot takes that.
    let placed = name.as_deref().map(place).transpose().map_err(failed)?;
    let work = match &placed {
        Some(placed) => Arc::clone(&placed.under_way.work),
        None => library.snapshots.work(),
    };
    let _on_drop = CancelOnDrop(Arc::clone(&work));
    library.tell().stored_by(&work);
    let stored = {
        let library = Arc::clone(library);
        let peer = Peer { runtime: library.snapshots.runtime.clone(), work: Arc::clone(&work) };
        blocking(move || {
            let mut source = Pieces { from: content, peer, piece: Bytes::new() };
            let outcome = library.snapshots.store.import(&mut source, name.as_deref(), &work);
            let outcome = outcome.map_err(SnapshotError::from);
            // A snapshot may lie on a guest image, which comes with it.
            let outcome = outcome.and_then(|stored| match stored.first() {
                Some(first) if stored.iter().all(is_guest_image) => {
                    Kind::Vm.check(first).map(|()| stored)
                }
                _ => Ok(stored),
            });
            if outcome.is_err() {
                library.snapshots.collector.soon();
            }
            if let Some(placed) = placed {
                placed.ends(outcome.as_ref().err());
            }
            outcome
        })
        .await
        .map_err(failed)?
    };
    stored
        .iter()
        .filter(|descriptor| !is_guest_image(descriptor))
        .map(|descriptor| library.snapshots.listed(&library.core, &descriptor.name))
        .collect()
}

struct Pieces {
    from: ByteStream,
    peer: Peer,
    piece: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.peer.wait(self.from.recv())? {
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

/// Copy a snapshot, and what it depends on, to another store.
pub async fn push(
    library: &Arc<Library>,
    name: &str,
    request: TransferRequest,
) -> Result<TransferReply, ErrorBody> {
    let began = Instant::now();
    let message = format!("push snapshot `{name}` to {}", request.location);
    let failed = |error: SnapshotError| error.to_body(&message);
    library.snapshots.check_written(name).map_err(failed)?;
    let name = name.to_owned();
    let copied = with_work(library, move |library, work| {
        let other = library.snapshots.places.store_at(&request.location, For::Writing)?;
        Ok(library.snapshots.store.copy_to(&name, &other, work)?)
    })
    .await
    .map_err(failed)?;
    Ok(TransferReply {
        schema: SCHEMA.to_owned(),
        names: copied.names,
        sent_bytes: copied.bytes,
        total_ms: vmfork_fork::ms(began.elapsed()),
    })
}

/// Bring a snapshot from another store: it can be started when this returns.
pub async fn pull(
    library: &Arc<Library>,
    name: &str,
    request: TransferRequest,
) -> Result<Snapshot, ErrorBody> {
    let message = format!("pull snapshot `{name}` from {}", request.location);
    let here = bring(library, (Kind::Vm, name), request, message).await?;
    library.snapshots.listed(&library.core, &here)
}

/// Bring a snapshot, or a guest image, from another store. → what it is called here. Its pages are
/// to come, unless the request waits for them.
pub(super) async fn bring(
    library: &Arc<Library>,
    (kind, name): (Kind, &str),
    request: TransferRequest,
    message: String,
) -> Result<String, ErrorBody> {
    let failed = |error: SnapshotError| error.to_body(&message);
    let placed = library.snapshots.place(name, Doing::Pull).map_err(failed)?;
    let adopted = {
        let _on_drop = CancelOnDrop(Arc::clone(&placed.under_way.work));
        let (library, name) = (Arc::clone(library), name.to_owned());
        let adopting = blocking(move || adopt(&library, placed, (kind, &name), &request.location));
        adopting.await.map_err(failed)?
    };
    let under_way = match adopted.pulling {
        None => None,
        Some(Err(other)) => Some(other),
        Some(Ok((pulling, remote))) => {
            let under_way = Arc::clone(&pulling.under_way);
            let patience = if request.wait { PATIENCE_WAITED_FOR } else { PATIENCE };
            fetch_all(library, &adopted.name, (pulling, remote), patience, message.clone());
            Some(under_way)
        }
    };
    match under_way {
        // A client that waits for all of it and disconnects does not want it now. Pages still
        // arrive on demand.
        Some(under_way) if request.wait => {
            let _waiter = under_way.wait();
            under_way.over.cancelled().await;
            under_way.error().map_or(Ok(adopted.name), Err)
        }
        Some(under_way) => {
            under_way.want();
            Ok(adopted.name)
        }
        None => Ok(adopted.name),
    }
}

/// Fetch the chunks that are left of a snapshot, or of a guest image, that was pulled before. Those
/// come first that its profiles name. → the pull; `None`: all is here, or another attempt would
/// fail as well. Blocking: asks the store that it is pulled from.
///
/// # Errors
/// That store can't be asked, or nothing of that name is here.
pub(super) fn resume(
    library: &Arc<Library>,
    (name, id): (&str, SnapshotId),
) -> Result<Option<Arc<UnderWay>>, SnapshotError> {
    let snapshots = &library.snapshots;
    let Some(location) = snapshots.store.origin(name)? else { return Ok(None) };
    let there = snapshots.pulls().get(&id).cloned();
    match there {
        Some(pull) if pull.goes_on() => return Ok(Some(pull)),
        Some(pull) if pull.is_final() => return Ok(None),
        _ => {}
    }
    let family = snapshots.store.open_family(name)?;
    let missing = family.iter().rev().filter(|stored| stored.origin().is_some());
    let ids = missing.map(|stored| stored.descriptor().id).collect();
    let remote = snapshots.places.store_at(&location, For::Reading)?;
    let pulling = match snapshots.pull_begins(name, ids) {
        Ok(pulling) => pulling,
        Err(other) => return Ok(Some(other)),
    };
    let message = format!("fetch the rest of `{name}` from {location}");
    let pull = Arc::clone(&pulling.under_way);
    pull.want();
    let pulling = snapshots.plan(name, pulling, &message)?;
    fetch_all(library, name, (pulling, remote), PATIENCE, message);
    Ok(Some(pull))
}

/// Have all chunks that are missing come in the background.
fn fetch_all(
    library: &Arc<Library>,
    name: &str,
    (pulling, remote): (Pulling, Store),
    patience: Duration,
    message: String,
) {
    let (library, name) = (Arc::clone(library), name.to_owned());
    drop(blocking(move || {
        let store = &library.snapshots.store;
        let outcome = fetch(store, &name, &remote, &pulling.under_way, patience);
        let outcome = outcome.map_err(SnapshotError::from);
        pulling.ends(outcome.as_ref().err(), message);
        Ok(())
    }));
}

/// Fetch all chunks that are missing. A store that can't be reached is tried again, until nothing
/// has come for as long as `patience`.
fn fetch(
    store: &Store,
    name: &str,
    remote: &Store,
    under_way: &UnderWay,
    patience: Duration,
) -> Result<(), StoreError> {
    let work = &under_way.work;
    let missing = under_way.missing().ok_or(StoreError::Cancelled)?;
    let (mut most, mut came, mut pause) = (0, Instant::now(), PAUSE_MIN);
    loop {
        let error = match store.fetch_chunks(&missing, remote, work) {
            Err(error) if is_away(&error) => error,
            ended => return ended,
        };
        // What is here already is counted again by each attempt.
        let done = work.done_bytes.load(Ordering::Relaxed);
        if done > most {
            (most, came, pause) = (done, Instant::now(), PAUSE_MIN);
        }
        if came.elapsed() + pause > patience {
            return Err(error);
        }
        let reason = chain(&error);
        tracing::warn!(snapshot = name, reason, "the rest is fetched again in {pause:?}");
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if work.cancelled.load(Ordering::Relaxed) {
                return Err(StoreError::Cancelled);
            }
            std::thread::park_timeout(LOOK_EVERY.min(until - Instant::now()));
        }
        pause = (pause * 2).min(PAUSE_MAX);
        under_way.begin_anew();
    }
}

/// A snapshot of another store that can be started here.
struct Adopted {
    /// What it is called here.
    name: String,
    /// Its pages are to come, or come already; `None`: they are here.
    pulling: Option<Result<(Pulling, Store), Arc<UnderWay>>>,
}

fn adopt(
    library: &Library,
    placed: Placed,
    (kind, name): (Kind, &str),
    location: &str,
) -> Result<Adopted, SnapshotError> {
    let snapshots = &library.snapshots;
    let begin = || {
        let remote = snapshots.places.store_at(location, For::Reading)?;
        // Nothing of another kind is written.
        kind.check(&remote.descriptor(name)?)?;
        let work = &placed.under_way.work;
        let adopted = snapshots.store.adopt_from(name, &remote, location, work);
        let adopted = adopted.map_err(|error| library.taken(error))?;
        let here = adopted.descriptor().name.clone();
        let family = snapshots.store.open_family(&here)?;
        let missing = family.iter().rev().filter(|stored| stored.origin().is_some());
        let ids: Vec<_> = missing.map(|stored| stored.descriptor().id).collect();
        Ok::<_, SnapshotError>((remote, here, ids))
    };
    // Of the bases, too, also if the rest fails.
    library.tell().stored_by(&placed.under_way.work);
    let (remote, here, ids) = begin()?;
    // That it is here under another name is fine, as long as this one means no other.
    if here != name && snapshots.store.descriptor(name).is_ok() {
        return Err(SnapshotError::HereAs { here, name: name.to_owned() });
    }
    let pulling = (!ids.is_empty()).then(|| snapshots.pull_begins(&here, ids));
    let pulling = match pulling {
        None => None,
        Some(Err(other)) => Some(Err(other)),
        Some(Ok(pulling)) => {
            let message = format!("pull `{here}` from {location}");
            Some(Ok((snapshots.plan(&here, pulling, &message)?, remote)))
        }
    };
    placed.ends(None);
    Ok(Adopted { name: here, pulling })
}
