//! Letters while they are read: what is in them counts against no room before it is known.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Body as _;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::letter::BYTES_MAX;
use super::wire::letter_wait;
use crate::error::TicketError;

/// Of all letters that are read at a time: two of the longest.
const ALL_BYTES_MAX: usize = 2 * BYTES_MAX;
/// Shorter letters wait for no other.
const SHORT_BYTES: usize = 16 << 10;
/// In which the places are counted.
const UNIT_BYTES: usize = 4096;

/// Of one host.
#[derive(Debug)]
pub(crate) struct Inbox {
    units: Semaphore,
    all: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Self::new(ALL_BYTES_MAX)
    }
}

/// A letter that has come; what it takes of the inbox is given back with it.
#[derive(Debug)]
pub(crate) struct Read<'a> {
    pub bytes: Bytes,
    _place: Option<SemaphorePermit<'a>>,
}

impl Inbox {
    fn new(bytes_max: usize) -> Self {
        let all = bytes_max / UNIT_BYTES;
        Self { units: Semaphore::new(all), all }
    }

    /// Read a letter when it is its turn.
    ///
    /// # Errors
    /// It is too long, breaks off, or comes too slowly.
    pub(crate) async fn read(&self, body: Body) -> Result<Read<'_>, TicketError> {
        let said = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = said.unwrap_or(usize::MAX).min(BYTES_MAX);
        let place = match bytes {
            0..SHORT_BYTES => None,
            _ => {
                let units = bytes.div_ceil(UNIT_BYTES).min(self.all);
                let place = self.units.acquire_many(u32::try_from(units).unwrap_or(u32::MAX)).await;
                Some(place?)
            }
        };
        let after: Duration = letter_wait(bytes);
        let read = timeout(after, Limited::new(body, bytes).collect()).await;
        let read = read.map_err(|_elapsed| TicketError::Late { after })?;
        let read = read.map_err(|error| TicketError::Broken { what: error.to_string() })?;
        Ok(Read { bytes: read.to_bytes(), _place: place })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, stream};

    use super::*;

    #[tokio::test]
    async fn no_more_is_read_at_a_time_than_there_may_be() {
        let inbox = Inbox::new(100 << 10);
        let of = |bytes: usize| Body::from(vec![7; bytes]);
        let first = inbox.read(of(60 << 10)).await.expect("room");
        assert_eq!(first.bytes.len(), 60 << 10);
        let mut second = Box::pin(inbox.read(of(60 << 10)));
        assert!((&mut second).now_or_never().is_none(), "the first is still here");
        inbox.read(of(100)).await.expect("a short one goes past");
        drop(first);
        drop(second.now_or_never().expect("its turn").expect("whole"));
        // One that may be of any length takes what there is, and one that is longer than all can
        // come.
        let endless = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let mut endless = Box::pin(inbox.read(endless));
        assert!((&mut endless).now_or_never().is_none());
        let mut long = Box::pin(inbox.read(of(200 << 10)));
        assert!((&mut long).now_or_never().is_none());
        drop(endless);
        long.now_or_never().expect("its turn").expect("whole");
        let reset: Result<Bytes, _> = Err(std::io::Error::other("reset"));
        let broken = Body::from_stream(stream::iter([reset]));
        inbox.read(broken).await.expect_err("it broke off");
    }
}
