//! What happened on a host, for any number of readers.
//!
//! ```text
//!   host ──tell──► log (bounded) ◄──read(after)── readers, each with a cursor of its own
//!                     └── newest ──wakes──► readers that wait
//! ```
//!
//! Promises: telling never waits for a reader, and a reader holds nothing of the log. Left to
//! others: which events there are ([`Happening`]), and who reads them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use vmfork_api::{Event, GapCause, Happening};
use vmfork_events::{Cursor, Limits, Log, Read};

/// Most events that are kept: some hours of a busy host.
const EVENTS_MAX: usize = 16_384;
/// Most bytes of events that are kept: 16 MiB. One has about 1,100, a fork's 200 more per clone.
const BYTES_MAX: usize = 16 << 20;
/// What an event takes in memory besides its texts.
const OVERHEAD_BYTES: usize = 512;
/// Most events of one page.
const PAGE_EVENTS_MAX: usize = 64;

/// The events of one life of a daemon.
#[derive(Debug)]
pub struct Events {
    log: Mutex<Log<Arc<Told>>>,
    /// The sequence number of the newest event.
    newest: watch::Sender<u64>,
}

/// An event that was told.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Where to read on after it.
    pub at: Cursor,
    pub event: Event,
    /// The same, as one line of JSON.
    pub json: String,
}

/// A cursor that this daemon never gave out, though it looks like one of its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cursor {cursor} is after {newest}, the newest event of this daemon")]
pub struct AheadError {
    cursor: Cursor,
    newest: Cursor,
}

impl Told {
    fn new(cursor: Cursor, what: Happening) -> Self {
        let event = Event { cursor: cursor.to_string(), time_unix_ms: now_unix_ms(), what };
        let json = serde_json::to_string(&event)
            .unwrap_or_else(|error| unreachable!("an event is of strings and numbers: {error}"));
        Self { at: cursor, event, json }
    }

    /// What it counts for in the log: its texts are held twice.
    fn bytes(&self) -> usize {
        2 * self.json.len() + OVERHEAD_BYTES
    }
}

impl Events {
    /// None yet. `epoch` differs from that of every other life of the daemon.
    pub fn new(epoch: u64) -> Self {
        Self::with_limits(epoch, Limits { events_max: EVENTS_MAX, bytes_max: BYTES_MAX })
    }

    /// The same with other limits.
    pub fn with_limits(epoch: u64, limits: Limits) -> Self {
        Self { log: Mutex::new(Log::new(epoch, limits)), newest: watch::Sender::new(0) }
    }

    fn log(&self) -> MutexGuard<'_, Log<Arc<Told>>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something has happened. Waits for no reader.
    pub fn tell(&self, what: Happening) {
        // One lock for number, time and place: events stand in the order of their numbers.
        let mut log = self.log();
        let told = Arc::new(Told::new(log.next(), what));
        let bytes = told.bytes();
        let cursor = log.push(told, bytes);
        self.newest.send_replace(cursor.seq);
    }

    /// Where a reader begins that wants what happens from now on.
    pub fn newest(&self) -> Cursor {
        self.log().newest()
    }

    /// Where a reader begins that wants all that is kept.
    pub fn start(&self) -> Cursor {
        self.log().start()
    }

    /// What comes after a cursor, in order, at most 64 events. Where the reader lost some, a gap
    /// stands in their place. Empty: there is nothing new.
    ///
    /// # Errors
    /// This daemon never gave out such a cursor.
    pub fn read(&self, after: Cursor) -> Result<Vec<Arc<Told>>, AheadError> {
        let log = self.log();
        let (resume, cause, lost) = match log.read(after, PAGE_EVENTS_MAX) {
            Read::Events(events) => {
                return Ok(events.into_iter().map(|(_, told)| Arc::clone(told)).collect());
            }
            Read::Gap { lost_from, lost_to, resume } => {
                (resume, GapCause::Overflow, lost_to - lost_from + 1)
            }
            Read::OtherEpoch { lost, resume } => (resume, GapCause::Restarted, lost),
            Read::Ahead { newest } => return Err(AheadError { cursor: after, newest }),
        };
        drop(log);
        Ok(vec![Arc::new(Told::new(resume, Happening::Gap { cause, lost }))])
    }

    /// Until there is something after a cursor of this daemon.
    pub async fn wait(&self, after: Cursor) {
        let mut newest = self.newest.subscribe();
        let waited = newest.wait_for(|seq| *seq > after.seq).await;
        debug_assert!(waited.is_ok(), "the sender is ours");
    }
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmfork_api::{EventKind, EventSnapshot};

    use super::*;

    fn stored(name: &str) -> Happening {
        Happening::SnapshotStored { snapshot: EventSnapshot { name: name.to_owned(), vm: None } }
    }

    fn small(events_max: usize) -> Events {
        Events::with_limits(5, Limits { events_max, bytes_max: BYTES_MAX })
    }

    #[test]
    fn a_reader_that_lost_some_is_told_how_many_and_continues() {
        let events = small(2);
        let from = events.newest();
        for name in ["a", "b", "c", "d"] {
            events.tell(stored(name));
        }
        let page = events.read(from).expect("ours");
        assert_eq!(page.len(), 1);
        let gap = &page[0];
        assert_eq!(gap.event.what, Happening::Gap { cause: GapCause::Overflow, lost: 2 });
        assert_eq!(gap.event.cursor, gap.at.to_string());
        let page = events.read(gap.at).expect("ours");
        let told: Vec<_> = page.iter().map(|told| told.event.what.clone()).collect();
        assert_eq!(told, [stored("c"), stored("d")]);
        assert!(events.read(page[1].at).expect("ours").is_empty());
    }

    #[test]
    fn an_earlier_daemons_cursor_begins_with_what_this_one_still_has() {
        let events = small(2);
        for name in ["a", "b", "c"] {
            events.tell(stored(name));
        }
        let page = events.read(Cursor { epoch: 4, seq: 99 }).expect("of another life");
        let what = page[0].event.what.clone();
        assert_eq!(what, Happening::Gap { cause: GapCause::Restarted, lost: 1 });
        let page = events.read(page[0].at).expect("ours");
        assert_eq!((page.len(), page[1].at), (2, events.newest()));
        let ahead = events.read(Cursor { epoch: 5, seq: 4 }).expect_err("not given out");
        assert!(ahead.to_string().contains("0000000000000005-3"), "{ahead}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn numbers_grow_by_one_whoever_tells_and_waiters_wake() {
        let events = Arc::new(small(10_000));
        let start = events.newest();
        let waiting = {
            let events = Arc::clone(&events);
            tokio::spawn(async move { events.wait(Cursor { seq: 399, ..start }).await })
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| events.tell(stored("a"))));
            }
        });
        tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("woken").expect("ran");
        let (mut after, mut seen) = (start, 0);
        loop {
            let page = events.read(after).expect("ours");
            if page.is_empty() {
                break;
            }
            for told in page {
                (seen, after) = (seen + 1, told.at);
                assert_eq!(after, Cursor { epoch: 5, seq: seen });
                assert_eq!(told.event.what.kind(), EventKind::SnapshotStored);
            }
        }
        assert_eq!((seen, after), (400, events.newest()));
    }
}
