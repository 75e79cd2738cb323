//! Pages that another host than their origin gave, or that came by multicast, are compared with the
//! origin's sums.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange};
use vmfork_policy::transfer::bounds::DEMAND_WAIT;
use vmfork_policy::transfer::read::{self, SumRequests};

use super::peer::{Peer, PeerError};
use crate::lock;
use crate::proto::Urgency;
use crate::sums::{self, Sum, Sums, UNKNOWN};

/// What came of comparing: [`read::Verdict`], and of a wrong page which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    Right,
    /// This page is other than the origin has.
    Wrong(PageIdx),
    /// The origin does not know now, or has not replied.
    Undecided,
    /// The origin has gone.
    Believed,
}

impl Comparison {
    pub(super) fn verdict(self) -> read::Verdict {
        match self {
            Self::Right => read::Verdict::Right,
            Self::Wrong(_) => read::Verdict::Wrong,
            Self::Undecided => read::Verdict::Undecided,
            Self::Believed => read::Verdict::Believed,
        }
    }
}

/// Of one image.
#[derive(Debug)]
pub struct Verifier {
    image: ImageName,
    known: Mutex<Sums>,
    /// Of prefetches.
    requests: Mutex<SumRequests>,
    replied: Condvar,
    /// It has been logged that some cannot be compared.
    has_warned: AtomicBool,
}

impl Verifier {
    pub fn new(image: ImageName) -> Self {
        Self {
            image,
            known: Mutex::default(),
            requests: Mutex::default(),
            replied: Condvar::new(),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Ask for the sums of pages that are expected soon, so that they need not wait for them then.
    pub fn prepare(&self, urgency: Urgency, range: PageRange, origin: &Peer, within: Duration) {
        let is_known = !lock(&self.known).get(range).contains(&UNKNOWN);
        if !is_known && !origin.is_avoided() {
            let _asked_again = self.ask(urgency, range, origin, within);
        }
    }

    /// Whether a page is known to be what the origin has. Asks no host.
    pub(super) fn is_right(&self, page: PageIdx, bytes: &[u8]) -> bool {
        let known = lock(&self.known).get(page.range());
        known == [sums::of(bytes)]
    }

    /// The origin said where else pages are, and what they should be, as far as it knows.
    pub(super) fn told(&self, range: PageRange, sums: &[Sum]) {
        lock(&self.known).put(range, sums);
    }

    /// Compare what `giver` gave with what the origin reports that it should be, within about this
    /// time. An origin that is absent is not asked; one that is merely slow must not make others
    /// believed.
    pub fn verify(
        &self,
        urgency: Urgency,
        range: PageRange,
        bytes: &[u8],
        giver: &str,
        (origin, within): (Option<&Peer>, Duration),
    ) -> Comparison {
        let known = lock(&self.known).get(range);
        let mut unknown = Comparison::Undecided;
        let sums = match origin {
            _ if !known.contains(&UNKNOWN) => known,
            Some(origin) if !origin.is_gone() => match self.ask(urgency, range, origin, within) {
                Ok(sums) => sums,
                Err(error) => {
                    tracing::debug!(image = %self.image, host = origin.name(), %error, "no sums");
                    if error.is_gone() {
                        unknown = Comparison::Believed;
                    }
                    known
                }
            },
            _ => {
                unknown = Comparison::Believed;
                known
            }
        };
        let pages = bytes.chunks(usize::try_from(PAGE_BYTES).unwrap_or(usize::MAX));
        let mut verdict = Comparison::Right;
        for ((page, bytes), sum) in range.pages().zip(pages).zip(sums) {
            if sum == UNKNOWN {
                verdict = unknown;
            } else if sum != sums::of(bytes) {
                let image = self.image;
                tracing::error!(%image, %page, host = giver, "gave another page than its origin has");
                return Comparison::Wrong(page);
            }
        }
        if verdict == Comparison::Believed && !self.has_warned.swap(true, Ordering::Relaxed) {
            let image = self.image;
            tracing::warn!(%image, host = giver, "pages can't be compared with their origin's: they are believed");
        }
        if verdict == Comparison::Right {
            lock(&self.known).forget(range);
        }
        verdict
    }

    /// Ask for the sums that [`SumRequests`] says, unless they come with the reply to another
    /// request.
    fn ask(
        &self,
        urgency: Urgency,
        range: PageRange,
        origin: &Peer,
        within: Duration,
    ) -> Result<Vec<Sum>, PeerError> {
        let wanted = SumRequests::wanted(range, urgency);
        if urgency == Urgency::Demand {
            return self.ask_for(wanted, urgency, range, (origin, within));
        }
        let give_up = Instant::now() + within;
        let is_under_way = |requests: &mut SumRequests| requests.is_under_way(wanted);
        let requests = self.replied.wait_timeout_while(lock(&self.requests), within, is_under_way);
        let (mut requests, _) = requests.unwrap_or_else(PoisonError::into_inner);
        let known = lock(&self.known).get(range);
        if !known.contains(&UNKNOWN) {
            return Ok(known);
        }
        requests.began(wanted);
        drop(requests);
        let _asking = Asking { verifier: self, wanted };
        let left = give_up.saturating_duration_since(Instant::now()).max(DEMAND_WAIT);
        self.ask_for(wanted, urgency, range, (origin, left))
    }

    fn ask_for(
        &self,
        wanted: PageRange,
        urgency: Urgency,
        range: PageRange,
        (origin, wait): (&Peer, Duration),
    ) -> Result<Vec<Sum>, PeerError> {
        let sums = origin.sums(self.image, wanted, urgency, wait)?;
        let mut known = lock(&self.known);
        known.put(wanted, &sums);
        Ok(known.get(range))
    }
}

/// The origin is being asked. However that ends, reads that wait for it go on.
#[derive(Debug)]
struct Asking<'a> {
    verifier: &'a Verifier,
    wanted: PageRange,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        lock(&self.verifier.requests).ended(self.wanted);
        self.verifier.replied.notify_all();
    }
}
