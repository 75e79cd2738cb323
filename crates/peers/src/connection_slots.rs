//! Slots for connections to the port for other hosts: those of strangers, until a handshake shows
//! who they are, and those of members.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use vmfork_cluster::HostId;

/// Connections that are not yet known to be a member's.
///
/// The number of places is limited.
/// If none is free, the connection that has held one longest makes room, after a while.
/// Members shake hands within a few ms, so that they get in while others stand still.
#[derive(Debug)]
pub(super) struct Strangers {
    most: usize,
    /// How long a stranger keeps a place that another wants.
    patience: Duration,
    open: Mutex<Open>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// By when they came.
    places: BTreeMap<u64, (Instant, CancellationToken)>,
}

/// One of those places, until it is dropped.
#[derive(Debug)]
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
    put_out: CancellationToken,
}

impl Strangers {
    pub(super) fn new(most: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { most, patience, open: Mutex::default(), freed: Notify::new() })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place, for which one waits no longer than others' patience.
    pub(super) async fn enter(self: &Arc<Self>) -> Stranger {
        loop {
            let room_at = match self.try_enter(Instant::now()) {
                Ok(entered) => return entered,
                Err(room_at) => room_at,
            };
            tokio::select! {
                () = self.freed.notified() => {}
                () = sleep_until(room_at) => {}
            }
        }
    }

    /// A place; or the time when one will be free.
    fn try_enter(self: &Arc<Self>, now: Instant) -> Result<Stranger, Instant> {
        let mut open = self.open();
        if open.places.len() >= self.most
            && let Some(first) = open.places.first_entry()
        {
            let room_at = first.get().0 + self.patience;
            if now < room_at {
                return Err(room_at);
            }
            first.remove().1.cancel();
        }
        let (number, put_out) = (open.next, CancellationToken::new());
        open.next += 1;
        open.places.insert(number, (now, put_out.clone()));
        drop(open);
        Ok(Stranger { strangers: Arc::clone(self), number, put_out })
    }
}

impl Stranger {
    /// When this one has to make room for another.
    pub(super) async fn put_out(&self) {
        self.put_out.cancelled().await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.open().places.remove(&self.number);
        self.strangers.freed.notify_one();
    }
}

/// The connections of members, which end when those are none any more, or this host is none.
#[derive(Debug, Default)]
pub(super) struct Callers {
    all: CancellationToken,
    of: Mutex<HashMap<HostId, Of>>,
}

#[derive(Debug)]
struct Of {
    end: CancellationToken,
    /// It was none when that was looked at last.
    has_left: bool,
}

impl Callers {
    fn of(&self) -> MutexGuard<'_, HashMap<HostId, Of>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By which the connections of a member are ended.
    pub(super) fn end_of(&self, host: HostId) -> CancellationToken {
        let new = || Of { end: self.all.child_token(), has_left: false };
        self.of().entry(host).or_insert_with(new).end.clone()
    }

    /// End the connections of those that are no members, at the second look: who says that it
    /// leaves still gets its answer.
    pub(super) fn keep(&self, is_member: impl Fn(HostId) -> bool) {
        self.of().retain(|host, of| {
            let had_left = std::mem::replace(&mut of.has_left, !is_member(*host));
            let is_over = had_left && of.has_left;
            if is_over {
                of.end.cancel();
            }
            !is_over
        });
    }

    /// End all of them.
    pub(super) fn end(&self) {
        self.all.cancel();
    }
}

/// A member's connection, also after it has changed to another protocol. It has its place until it
/// is dropped, and breaks off when the member's connections are ended.
pub(super) struct OfMember<S> {
    stream: S,
    /// Each of both halves may have a task of its own.
    reads_end: Pin<Box<WaitForCancellationFutureOwned>>,
    writes_end: Pin<Box<WaitForCancellationFutureOwned>>,
    _place: OwnedSemaphorePermit,
}

impl<S> OfMember<S> {
    pub(super) fn new(stream: S, end: &CancellationToken, place: OwnedSemaphorePermit) -> Self {
        let ends = || Box::pin(end.clone().cancelled_owned());
        Self { stream, reads_end: ends(), writes_end: ends(), _place: place }
    }
}

fn check(
    end: &mut Pin<Box<WaitForCancellationFutureOwned>>,
    cx: &mut Context<'_>,
) -> io::Result<()> {
    match end.as_mut().poll(cx) {
        Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
        Poll::Pending => Ok(()),
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for OfMember<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        check(&mut self.reads_end, cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for OfMember<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        check(&mut self.writes_end, cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        check(&mut self.writes_end, cx)?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        check(&mut self.writes_end, cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        check(&mut self.writes_end, cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn who_stands_still_makes_room_after_a_while() {
        let strangers = Strangers::new(2, Duration::from_millis(100));
        let began = Instant::now();
        let (first, second) = (strangers.enter().await, strangers.enter().await);
        let third = timeout(Duration::from_secs(5), strangers.enter()).await.expect("room");
        assert!(began.elapsed() >= Duration::from_millis(100));
        assert!(first.put_out().now_or_never().is_some(), "the first had to go");
        assert!(second.put_out().now_or_never().is_none(), "it may stay");
        // Dropped late, it must not free another's place.
        drop(first);
        assert!(strangers.try_enter(began).is_err(), "both places are taken");
        drop(third);
        let _fourth = strangers.enter().now_or_never().expect("a place is free");
    }

    #[tokio::test]
    async fn connections_of_who_left_break_off_and_others_go_on() {
        let host = |id| HostId::new(id).expect("not 0");
        let callers = Callers::default();
        let places = Arc::new(Semaphore::new(2));
        let mut open = [1, 2].map(|id| {
            let (near, far) = tokio::io::duplex(64);
            let place = Arc::clone(&places).try_acquire_owned().expect("room");
            (OfMember::new(near, &callers.end_of(host(id)), place), far)
        });
        let stays = |id: HostId| id.get() == 1;
        callers.keep(stays);
        open[1].0.write_all(b"its answer").await.expect("at the first look it goes on");
        let [(mut near, mut far), (mut left, _far)] = open;
        let waits = tokio::spawn(async move { left.read_u8().await.map_err(|e| e.kind()) });
        tokio::task::yield_now().await;
        callers.keep(stays);
        let ended = timeout(Duration::from_secs(5), waits).await.expect("in time");
        assert_eq!(ended.expect("no panic"), Err(io::ErrorKind::ConnectionAborted));
        far.write_all(b"x").await.expect("open");
        assert_eq!(near.read_u8().await.expect("a member's"), b'x');
        assert_eq!(places.available_permits(), 1, "a place is taken as long as its connection");
        callers.end();
        assert!(near.write_all(b"x").await.is_err(), "no member's goes on");
        assert!(callers.end_of(host(3)).is_cancelled(), "nor a late one's");
    }
}
