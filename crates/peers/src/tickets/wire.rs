//! A [`Line`] between two hosts, by what they post to each other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorCode;
use vmfork_cluster::HostId;

use super::letter::{BODIES_MAX, Item, Letter, LineId, WORDS_MAX};
use super::line::Line;
use crate::client::WORD_WAIT;
use crate::error::{CallError, TicketError};
use crate::hosts::Hosts;
use crate::pace::Pace;
use vmfork_host::error::chain;

/// Where letters are posted. The answer is how many words came so far.
pub(crate) const LETTERS: &str = "/cluster/v1/tickets/letters";
/// The other end has not been heard for so long: is it still there?
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Then it is gone.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// An order to start clones has been answered by then, whatever became of it.
const ORDER_WAIT: Duration = Duration::from_secs(150);
/// After a letter that was lost.
const PAUSE: Duration = Duration::from_millis(250);
/// Why all lines of a host end when it leaves.
const LEFT: &str = "this host left the cluster";
/// The slowest link on which a long message still arrives.
const BYTES_PER_S_MIN: u64 = 4 << 20;

/// What is done with what comes.
pub(super) trait End: Send + Sync {
    /// In the order in which it was said, one at a time.
    fn hear(&self, wire: &Arc<Wire>, item: Item);

    /// Nothing comes any more, and nothing that is said is heard. [`Wire::is_closed`] says so
    /// before.
    fn lost(&self, why: &str);
}

/// One end of a line.
pub(super) struct Wire {
    id: LineId,
    peer: HostId,
    hosts: Weak<Hosts>,
    pace: Pace,
    began: Instant,
    line: Mutex<Line<Item>>,
    /// One letter is heard at a time.
    hearing: Mutex<()>,
    wake: Notify,
    /// The other end knows the line.
    may_speak: CancellationToken,
    /// When all is heard that was said, that is the end.
    is_over: AtomicBool,
    closed: CancellationToken,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire")
            .field("id", &self.id)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Wire {
    /// It says and hears nothing before [`Lines::start`], and says nothing before the other end
    /// knows the line.
    pub(super) fn new(hosts: Weak<Hosts>, peer: HostId, id: LineId) -> Arc<Self> {
        let pace = hosts.upgrade().map(|hosts| hosts.pace).unwrap_or_default();
        Arc::new(Self {
            id,
            peer,
            hosts,
            pace,
            began: Instant::now(),
            line: Mutex::new(Line::new(Duration::ZERO)),
            hearing: Mutex::default(),
            wake: Notify::new(),
            may_speak: CancellationToken::new(),
            is_over: AtomicBool::new(false),
            closed: CancellationToken::new(),
        })
    }

    fn line(&self) -> MutexGuard<'_, Line<Item>> {
        // No step leaves it half-changed.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn say(&self, item: impl Into<Item>) {
        if !self.is_closed() {
            self.line().say(item.into());
            self.wake.notify_one();
        }
    }

    /// The other end knows the line by now: it has spoken.
    pub(super) fn let_speak(&self) {
        self.line().on_receipt(0, self.began.elapsed());
        self.may_speak.cancel();
    }

    /// There is nothing more to say: it is closed when all is heard.
    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    pub(super) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// → how many words have come now.
    pub(super) fn on_letter(self: &Arc<Self>, letter: Letter, end: &dyn End) -> u64 {
        let _in_order = self.hearing.lock().unwrap_or_else(PoisonError::into_inner);
        let new = self.line().on_letter(letter.first, letter.items, self.began.elapsed());
        self.may_speak.cancel();
        for item in new {
            end.hear(self, item);
        }
        self.line().received()
    }

    pub(super) fn letter(&self) -> Letter {
        let (mut words, mut bytes) = (0, 0_u64);
        let (first, items) = self.line().letter(|item| {
            words += 1;
            bytes = bytes.saturating_add(item.bytes());
            words <= WORDS_MAX && bytes <= BODIES_MAX
        });
        Letter { line: self.id, first, items }
    }

    pub(super) fn on_receipt(&self, received: u64) {
        self.line().on_receipt(received, self.began.elapsed());
    }

    /// Post what is said until the line is closed. → why the other end can't be reached any more,
    /// if that is why.
    async fn speak(&self) -> Option<String> {
        tokio::select! {
            () = self.closed.cancelled() => return None,
            () = self.may_speak.cancelled() => {}
            () = tokio::time::sleep(ORDER_WAIT) => {}
        }
        let (ask_every, silence_max) = (self.pace.of(ASK_EVERY), self.pace.of(SILENCE_MAX));
        loop {
            tokio::select! {
                () = self.closed.cancelled() => return None,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(ask_every) => {}
            }
            loop {
                let (is_heard, silence) = {
                    let line = self.line();
                    (line.is_heard(), line.silence(self.began.elapsed()))
                };
                if is_heard && self.is_over.load(Ordering::Relaxed) {
                    return None;
                }
                if is_heard && silence < ask_every {
                    break;
                }
                let posted = tokio::select! {
                    posted = self.post() => posted,
                    () = self.closed.cancelled() => return None,
                };
                match posted {
                    Ok(received) => self.on_receipt(received),
                    Err(Unheard::Gone(why)) => return Some(why),
                    Err(Unheard::Lost(why)) => {
                        if self.line().silence(self.began.elapsed()) >= silence_max {
                            return Some(why);
                        }
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        }
    }

    async fn post(&self) -> Result<u64, Unheard> {
        let gone = |why: &str| Unheard::Gone(why.to_owned());
        let hosts = self.hosts.upgrade().ok_or_else(|| gone(LEFT))?;
        let peer = hosts
            .peer_of(self.peer)
            .map_err(|_| gone("it is no member of the cluster any more"))?;
        let body = self.letter().encode().map_err(|error| Unheard::Gone(chain(&error)))?;
        let wait = letter_wait(body.len());
        let answer = peer.post(LETTERS, "application/octet-stream", body, wait).await;
        let answer = answer.map_err(|error| match &error {
            CallError::Refused { source, .. } if source.code == ErrorCode::NotFound => {
                Unheard::Gone(chain(&error))
            }
            _ => Unheard::Lost(chain(&error)),
        })?;
        serde_json::from_slice(&answer).map_err(|error| Unheard::Lost(chain(&error)))
    }
}

/// How long a letter of this many bytes may take.
pub(super) fn letter_wait(bytes: usize) -> Duration {
    WORD_WAIT + Duration::from_secs(bytes as u64 / BYTES_PER_S_MIN)
}

enum Unheard {
    /// For good.
    Gone(String),
    Lost(String),
}

type Ends = HashMap<(HostId, LineId), (Arc<Wire>, Arc<dyn End>)>;

/// The lines of a host.
#[derive(Default)]
pub(crate) struct Lines {
    ends: Arc<Mutex<Ends>>,
    left: CancellationToken,
}

impl Lines {
    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This host leaves the cluster: all lines are lost at once, and new ones too.
    pub(crate) fn leave(&self) {
        self.left.cancel();
    }

    /// Say and hear, until it is closed or the other end is lost.
    pub(super) fn start(&self, wire: &Arc<Wire>, end: Arc<dyn End>) {
        let (wire, left) = (Arc::clone(wire), self.left.clone());
        let lines = Self { ends: Arc::clone(&self.ends), left: left.clone() };
        let key = (wire.peer, wire.id);
        self.ends().insert(key, (Arc::clone(&wire), Arc::clone(&end)));
        tokio::spawn(async move {
            let why = tokio::select! {
                why = wire.speak() => why,
                () = left.cancelled() => Some(LEFT.to_owned()),
            };
            wire.close();
            let removed = lines.ends().remove(&key);
            drop(removed);
            if let Some(why) = why {
                tracing::warn!(host = %wire.peer, why, "the other host of a ticket is lost");
                end.lost(&why);
            }
        });
    }

    /// A letter of another host. → how many words have come of it so far.
    ///
    /// # Errors
    /// It is none, or of a line that is not there (any more).
    pub(crate) fn on_letter(&self, from: HostId, bytes: Bytes) -> Result<u64, TicketError> {
        let letter = Letter::decode(bytes)?;
        let end = self.ends().get(&(from, letter.line)).cloned();
        let (wire, end) = end.ok_or(TicketError::Unknown)?;
        Ok(wire.on_letter(letter, &*end))
    }
}
