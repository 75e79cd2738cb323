//! What a listener knows and keeps, without sockets: pages that came, which reads wait for which,
//! whether the group is heard.

use std::collections::HashMap;
use std::time::Duration;

use vmfork_image::{PageIdx, PageRange};
use vmfork_policy::transfer::multicast::{Heard, Receiver, Request, Trust};
use vmfork_transfer::proto::{PAGE, Urgency};

use super::config::ListenerConfig;
use super::counters::ListenerCounters;
use super::datagram::{Asking, REQUEST_PAGES_MAX, REQUESTS_MAX};

/// Pages that wait to be taken: of those beyond, what no read waits for is as good as lost.
pub(super) const PENDING_PAGES_MAX: usize = 8192;

/// A page's bytes.
type Page = Box<[u8; PAGE]>;

#[derive(Debug)]
pub(super) struct Reads {
    config: ListenerConfig,
    receiver: Receiver,
    /// Heard, and not taken by the cache yet.
    pending: HashMap<PageIdx, Page>,
    waiting: HashMap<u64, Waiting>,
    next_read: u64,
    /// Those of reads that got not all of theirs.
    left_over: Vec<PageIdx>,
    /// A datagram of the sender came last.
    heard_at: Option<Duration>,
    listeners: u64,
    trust: Trust,
    /// What of the receiver's has been counted.
    counted: Heard,
    /// Pages for which there was no room, and that have not been counted.
    no_room: u64,
}

fn urgency(demand: bool) -> Urgency {
    if demand { Urgency::Demand } else { Urgency::Ahead }
}

/// A read that waits.
#[derive(Debug)]
struct Waiting {
    demand: bool,
    range: PageRange,
    bytes: Vec<u8>,
    missing: u64,
    came: Vec<bool>,
    has_failed: bool,
}

/// What a read has come to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    Waits,
    Done(Vec<u8>),
    Failed,
}

impl Waiting {
    fn new(range: PageRange, demand: bool) -> Self {
        let (pages, bytes) = (usize::try_from(range.len()), usize::try_from(range.byte_len()));
        Self {
            demand,
            range,
            bytes: vec![0; bytes.unwrap_or(0)],
            missing: range.len(),
            came: vec![false; pages.unwrap_or(0)],
            has_failed: false,
        }
    }

    /// Whether any of these pages is one that it waits for.
    fn lacks(&self, range: PageRange) -> bool {
        let pages = self.range.pages().zip(&self.came);
        pages.into_iter().any(|(page, came)| !came && range.contains(page))
    }

    fn give(&mut self, page: PageIdx, bytes: &[u8; PAGE]) {
        if !self.range.contains(page) {
            return;
        }
        let at = usize::try_from(page.0 - self.range.start().0).unwrap_or(usize::MAX);
        if let Some(came) = self.came.get_mut(at).filter(|came| !**came) {
            *came = true;
            self.missing -= 1;
            self.bytes.as_chunks_mut::<PAGE>().0[at] = *bytes;
        }
    }
}

impl Reads {
    pub(super) fn new(config: ListenerConfig) -> Self {
        Self {
            receiver: Receiver::new(config.receiver),
            trust: Trust::new(config.trust),
            config,
            pending: HashMap::new(),
            waiting: HashMap::new(),
            next_read: 0,
            left_over: Vec::new(),
            heard_at: None,
            listeners: 0,
            counted: Heard::default(),
            no_room: 0,
        }
    }

    /// Count what has come and was asked for since this was called last.
    pub(super) fn count(&mut self, counters: &ListenerCounters) {
        let now = self.receiver.counts();
        counters.add(now.since(std::mem::replace(&mut self.counted, now)));
        counters.no_room_pages.add(std::mem::take(&mut self.no_room));
    }

    /// Whether pages are best asked for here: the sender is heard, of late, and tells of enough
    /// hosts that listen.
    pub(super) fn is_heard(&self, now: Duration) -> bool {
        self.is_there(now) && self.listeners >= self.config.listeners_min
    }

    /// Whether the sender is heard of late.
    fn is_there(&self, now: Duration) -> bool {
        let heard = |at| now.saturating_sub(at) < self.config.heard_within;
        self.heard_at.is_some_and(heard)
    }

    /// How long the sender has not been heard.
    pub(super) fn silence(&self, since: Duration, now: Duration) -> Duration {
        now.saturating_sub(self.heard_at.unwrap_or(since).max(since))
    }

    /// A read begins. `None`: it is not for here.
    pub(super) fn begin(&mut self, range: PageRange, demand: bool, now: Duration) -> Option<u64> {
        if !self.is_heard(now) || !self.trust.allows(urgency(demand), now) {
            return None;
        }
        let mut read = Waiting::new(range, demand);
        for page in range.pages() {
            match self.pending.get(&page) {
                Some(bytes) => read.give(page, bytes),
                // It came before, and the cache has it, or had no room.
                None if self.receiver.has(page) => return None,
                None => {}
            }
        }
        self.receiver.want(range, demand, now).ok()?;
        let number = self.next_read;
        self.next_read += 1;
        self.waiting.insert(number, read);
        Some(number)
    }

    /// What has become of it; if it has come to something, it is forgotten.
    pub(super) fn look(&mut self, read: u64) -> Read {
        match self.waiting.get(&read) {
            Some(it) if it.missing > 0 && !it.has_failed => Read::Waits,
            _ => match self.waiting.remove(&read) {
                Some(it) if it.missing == 0 => {
                    self.trust.heard(urgency(it.demand));
                    self.taken(it.range);
                    Read::Done(it.bytes)
                }
                it => {
                    self.leave(it);
                    Read::Failed
                }
            },
        }
    }

    /// It has waited for long enough, or has failed.
    pub(super) fn give_up(&mut self, read: u64, demand: bool, now: Duration) {
        let it = self.waiting.remove(&read);
        self.leave(it);
        self.trust.in_vain(urgency(demand), now);
    }

    /// What of it came is for the cache.
    fn leave(&mut self, read: Option<Waiting>) {
        let pages = read.into_iter().flat_map(|read| read.range.pages());
        self.left_over.extend(pages.filter(|page| self.pending.contains_key(page)));
    }

    /// Pages have come another way. They are not requested here any more, so reads that wait for
    /// them fail. → whether there are any.
    pub(super) fn filled(&mut self, range: PageRange) -> bool {
        self.receiver.filled(range);
        self.fail(|read| read.lacks(range))
    }

    /// → whether a read has failed that had not.
    fn fail(&mut self, fails: impl Fn(&Waiting) -> bool) -> bool {
        let failing = self.waiting.values_mut().filter(|read| read.missing > 0);
        let failing = failing.filter(|read| !read.has_failed && fails(read));
        failing.map(|read| read.has_failed = true).count() > 0
    }

    /// The sender was heard.
    pub(super) fn heard(&mut self, now: Duration) {
        self.heard_at = Some(now);
    }

    pub(super) fn listeners(&mut self, count: u64) {
        self.listeners = count;
    }

    /// Whether a page has come before, so that its parts need not be put together. Counts as heard
    /// once for all its parts.
    pub(super) fn has(&mut self, page: PageIdx, is_first_part: bool, now: Duration) -> bool {
        let has = self.receiver.has(page);
        if has && is_first_part {
            self.receiver.heard(page.range(), now);
        }
        has
    }

    /// A page was heard. → whether a read waits for it.
    pub(super) fn page(&mut self, page: PageIdx, bytes: Page, now: Duration) -> bool {
        let is_wanted = || self.waiting.values().any(|read| read.range.contains(page));
        if self.pending.len() >= PENDING_PAGES_MAX && !is_wanted() {
            self.no_room += 1;
            return false;
        }
        if self.receiver.heard(page.range(), now).is_empty() {
            return false;
        }
        let mut is_waited_for = false;
        for read in self.waiting.values_mut().filter(|read| read.range.contains(page)) {
            read.give(page, &bytes);
            is_waited_for |= read.missing == 0;
        }
        self.pending.insert(page, bytes);
        is_waited_for
    }

    /// What is to be asked now, and what did not come after many attempts. → datagrams' worth of
    /// it, and whether a read has failed.
    pub(super) fn asking(&mut self, now: Duration) -> (Vec<Asking>, bool) {
        let mut requests: Vec<Request> = Vec::new();
        while let Some(request) = self.receiver.next_request(now) {
            let mut rest = request.pages;
            while !rest.is_empty() {
                let pages = rest.truncate(REQUEST_PAGES_MAX);
                rest = rest.from_page(pages.end());
                requests.push(Request { pages, ..request });
            }
        }
        // A sender that has gone answers none.
        let mut has_failed = !self.is_there(now) && self.fail(|_| true);
        while let Some(gave_up) = self.receiver.gave_up() {
            has_failed |= self.fail(|read| read.lacks(gave_up.pages));
        }
        let received = self.receiver.feedback(now);
        let mut all: Vec<Asking> = requests
            .chunks(REQUESTS_MAX)
            .map(|requests| Asking { received: None, requests: requests.to_vec() })
            .collect();
        if received.is_some() {
            match all.first_mut() {
                Some(first) => first.received = received,
                None => all.push(Asking { received, requests: Vec::new() }),
            }
        }
        (all, has_failed)
    }

    /// Pages for the cache that no read waits for, as runs with their bytes; they are here until
    /// [`Reads::taken`].
    pub(super) fn batch(&mut self, now: Duration) -> Vec<(PageRange, Vec<u8>)> {
        let mut runs: Vec<(PageRange, Vec<u8>)> = Vec::new();
        let mut pages = std::mem::take(&mut self.left_over);
        for run in self.receiver.batch(now).into_iter().flatten() {
            pages.extend(run.pages());
        }
        pages.sort_unstable();
        pages.dedup();
        for page in pages {
            if self.waiting.values().any(|read| read.range.contains(page)) {
                continue;
            }
            let Some(bytes) = self.pending.get(&page) else { continue };
            match runs.last_mut() {
                Some((run, all)) if run.end() == page => {
                    *run = PageRange::between(run.start(), PageIdx(page.0 + 1));
                    all.extend_from_slice(&bytes[..]);
                }
                _ => runs.push((page.range(), bytes.to_vec())),
            }
        }
        runs
    }

    /// The cache has taken these, or does not want them.
    pub(super) fn taken(&mut self, range: PageRange) {
        range.pages().for_each(|page| drop(self.pending.remove(&page)));
    }

    /// Pages that wait for the cache.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// When there is something to ask or to hand on.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        self.receiver.wake_at()
    }
}
