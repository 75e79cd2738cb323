//! Pages that another host than their origin gave, or that came by multicast, are compared with the origin's sums.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmfork_image::{BLOCK_PAGES, ImageName, PAGE_BYTES, PageIdx, PageRange};
use vmfork_policy::transfer::bounds::ANSWER;

use super::peer::{Peer, PeerError};
use crate::lock;
use crate::proto::Urgency;
use crate::sums::{self, Sum, Sums, UNKNOWN};

/// What came of comparing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    /// This page is another than the origin has.
    Wrong(PageIdx),
    /// The origin does not know now, or has not answered: it has to be asked for the pages.
    Undecided,
    /// There is no origin any more that could be asked.
    Believed,
}

/// Of one image.
#[derive(Debug)]
pub(crate) struct Verifier {
    image: ImageName,
    /// How long it may take if a VM waits.
    demand_wait: Duration,
    known: Mutex<Sums>,
    /// Of which blocks the origin is being asked for what nobody waits for.
    asked: Mutex<Vec<PageRange>>,
    answered: Condvar,
    /// It has been said that some can't be compared.
    has_warned: AtomicBool,
}

impl Verifier {
    pub(crate) fn new(image: ImageName, demand_wait: Duration) -> Self {
        Self {
            image,
            demand_wait,
            known: Mutex::default(),
            asked: Mutex::default(),
            answered: Condvar::new(),
            has_warned: AtomicBool::new(false),
        }
    }

    /// Have what the origin says of pages that are about to come, so that they need not wait for it then.
    pub(crate) fn prepare(&self, urgency: Urgency, range: PageRange, origin: &Peer) {
        let is_known = !lock(&self.known).get(range).contains(&UNKNOWN);
        if !is_known && !origin.is_avoided() {
            let _asked_again = self.ask(urgency, range, origin);
        }
    }

    /// Whether a page is known to be what the origin has. Asks nobody.
    pub(super) fn is_right(&self, page: PageIdx, bytes: &[u8]) -> bool {
        let known = lock(&self.known).get(page.range());
        known == [sums::of(bytes)]
    }

    /// The origin said where else pages are, and what they should be, as far as it knows.
    pub(super) fn told(&self, range: PageRange, sums: &[Sum]) {
        lock(&self.known).put(range, sums);
    }

    /// Compare what `giver` gave with what the origin says that it should be. Only one that was not there lately is not asked: who
    /// is merely slow must not make others believed.
    pub(crate) fn verify(
        &self,
        urgency: Urgency,
        range: PageRange,
        bytes: &[u8],
        giver: &str,
        origin: Option<&Peer>,
    ) -> Verdict {
        let known = lock(&self.known).get(range);
        let mut unknown = Verdict::Undecided;
        let sums = match origin {
            _ if !known.contains(&UNKNOWN) => known,
            Some(origin) if !origin.is_gone() => match self.ask(urgency, range, origin) {
                Ok(sums) => sums,
                Err(error) => {
                    tracing::debug!(image = %self.image, host = origin.name(), %error, "no sums");
                    if error.is_gone() {
                        unknown = Verdict::Believed;
                    }
                    known
                }
            },
            _ => {
                unknown = Verdict::Believed;
                known
            }
        };
        let pages = bytes.chunks(usize::try_from(PAGE_BYTES).unwrap_or(usize::MAX));
        let mut verdict = Verdict::Right;
        for ((page, bytes), sum) in range.pages().zip(pages).zip(sums) {
            if sum == UNKNOWN {
                verdict = unknown;
            } else if sum != sums::of(bytes) {
                let image = self.image;
                tracing::error!(%image, %page, host = giver, "gave another page than its origin has");
                return Verdict::Wrong(page);
            }
        }
        if verdict == Verdict::Believed && !self.has_warned.swap(true, Ordering::Relaxed) {
            let image = self.image;
            tracing::warn!(%image, host = giver, "pages can't be compared with their origin's: they are believed");
        }
        if verdict == Verdict::Right {
            lock(&self.known).forget(range);
        }
        verdict
    }

    /// What nobody waits for is asked of the whole block, so that the next pieces need no question, and of each block once at a time: pieces of it come
    /// side by side.
    fn ask(
        &self,
        urgency: Urgency,
        range: PageRange,
        origin: &Peer,
    ) -> Result<Vec<Sum>, PeerError> {
        if urgency == Urgency::Demand {
            return self.ask_for(range, urgency, range, (origin, self.demand_wait));
        }
        let block = PageIdx(range.start().0 / BLOCK_PAGES * BLOCK_PAGES);
        let whole = PageRange::new(block, BLOCK_PAGES).ok();
        let wanted = whole.filter(|block| block.covers(&range)).unwrap_or(range);
        let give_up = Instant::now() + ANSWER;
        let is_asked = |asked: &mut Vec<PageRange>| asked.iter().any(|it| it.covers(&wanted));
        let asked = self.answered.wait_timeout_while(lock(&self.asked), ANSWER, is_asked);
        let (mut asked, _) = asked.unwrap_or_else(PoisonError::into_inner);
        let known = lock(&self.known).get(range);
        if !known.contains(&UNKNOWN) {
            return Ok(known);
        }
        asked.push(wanted);
        drop(asked);
        let _asking = Asking { verifier: self, wanted };
        let left = give_up.saturating_duration_since(Instant::now()).max(self.demand_wait);
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

/// The origin is being asked. However that ends, whoever waits for it goes on.
#[derive(Debug)]
struct Asking<'a> {
    verifier: &'a Verifier,
    wanted: PageRange,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut asked = lock(&self.verifier.asked);
        if let Some(at) = asked.iter().position(|it| *it == self.wanted) {
            asked.swap_remove(at);
        }
        drop(asked);
        self.verifier.answered.notify_all();
    }
}
