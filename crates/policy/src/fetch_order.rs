//! In which order the chunks of an image come that is fetched whole, and how many at a time.
//!
//! ```text
//!   profile ──► FetchOrder::prefer ─┐
//!                                   ├─► next chunk, if AheadLimit lets one more be in flight
//!   all the others, in their order ─┘
//! ```

use std::time::Duration;

use vmfork_image::{PageIdx, PageRange};

use crate::transfer::swarm::Pick;

/// A chunk that is preferred comes less than this many places later than its list says. With
/// chunks of 256 KiB that is 4 MiB, as for pages of other hosts
/// ([`crate::transfer::URGENT_AMONG`]).
const NEAR: u64 = 16;

/// Gives each chunk of an image once: first those that are preferred, then all others in their
/// order.
///
/// After vmTorrent (CoNEXT 2012, §2.2.4): hosts that want the same chunks bring them in different
/// orders, so that they have something to give each other. No chunk comes much later than its
/// urgency says.
#[derive(Debug)]
pub struct FetchOrder {
    salt: u64,
    /// By number: whether it was not given yet.
    is_left: Vec<bool>,
    /// Lists of chunks, each the most urgent first. The last list goes first.
    preferred: Vec<std::vec::IntoIter<usize>>,
    /// All chunks before this one were given.
    rest: usize,
}

impl FetchOrder {
    /// Of chunks 0 to `chunks`. `salt`: another one on each host.
    pub fn new(chunks: usize, salt: u64) -> Self {
        Self { salt, is_left: vec![true; chunks], preferred: Vec::new(), rest: 0 }
    }

    /// These chunks are wanted before all others that are left, the first of them first. Numbers
    /// that no chunk has are left out.
    pub fn prefer(&mut self, chunks: impl IntoIterator<Item = usize>) {
        let mut placed = Vec::new();
        for (at, chunk) in (0_u64..).zip(chunks) {
            let piece = PageRange::between(PageIdx(chunk as u64), PageIdx(chunk as u64 + 1));
            placed.push((at + Pick::place(piece, self.salt) % NEAR, chunk));
        }
        placed.sort_by_key(|(place, _)| *place);
        let chunks: Vec<_> = placed.into_iter().map(|(_, chunk)| chunk).collect();
        self.preferred.retain(|list| !list.as_slice().is_empty());
        self.preferred.push(chunks.into_iter());
    }

    fn give(&mut self, chunk: usize) -> bool {
        self.is_left.get_mut(chunk).is_some_and(std::mem::take)
    }
}

impl Iterator for FetchOrder {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while let Some(list) = self.preferred.last_mut() {
            match list.next() {
                Some(chunk) if self.give(chunk) => return Some(chunk),
                Some(_) => {}
                None => drop(self.preferred.pop()),
            }
        }
        while self.rest < self.is_left.len() {
            self.rest += 1;
            if self.give(self.rest - 1) {
                return Some(self.rest - 1);
            }
        }
        None
    }
}

/// So long after a read that something waited for, the next one is expected.
const DEMAND_FOR: Duration = Duration::from_secs(1);
/// A fetch that takes this many times as long as the fastest one waits in a line.
const SLOW: u32 = 3;

/// How many chunks are fetched in the background at a time, beside those that something waits for.
///
/// Without such reads, as many as the source takes. With them, only as many as leave no line that
/// the next read would have to wait in. So the number falls while fetches are slow, and rises while
/// they are not. One goes on beside a read that waits. Without it, hosts that all wait for the same
/// chunks have nothing else to give each other (vmTorrent, §4.4.2).
#[derive(Debug)]
pub struct AheadLimit {
    max: usize,
    /// Soon after reads that something waited for: from [`floor`] to `max`.
    limit: usize,
    /// Fetches that were not slow, since the limit has changed.
    good: usize,
    in_flight: usize,
    waiting: usize,
    /// When something last waited.
    waited: Option<Duration>,
    fastest: Option<Duration>,
}

/// The least: fewer do not fill a link, since each takes its time at both ends, too.
fn floor(max: usize) -> usize {
    (max / 4).max(1)
}

impl AheadLimit {
    /// `max`: as many as the source takes, at least 1.
    pub fn new(max: usize) -> Self {
        let max = max.max(1);
        Self {
            max,
            limit: floor(max),
            good: 0,
            in_flight: 0,
            waiting: 0,
            waited: None,
            fastest: None,
        }
    }

    /// One source takes more at a time than another.
    pub fn raise(&mut self, max: usize) {
        self.max = self.max.max(max);
        self.limit = self.limit.max(floor(self.max));
    }

    /// Begin a background fetch, if one more may be in flight. → whether it may.
    pub fn begin(&mut self, now: Duration) -> bool {
        let is_quiet = self.waited.is_none_or(|at| now.saturating_sub(at) > DEMAND_FOR);
        let most = match self.waiting {
            0 if is_quiet => self.max,
            0 => self.limit,
            _ => 1,
        };
        let may = self.in_flight < most;
        self.in_flight += usize::from(may);
        may
    }

    /// A background fetch has ended. `took`: how long a chunk needed that came.
    pub fn end(&mut self, took: Option<Duration>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(took) = took else { return };
        // Of a source that has become slower, it is found out in a while.
        let fastest = self.fastest.map_or(took, |fastest| took.min(fastest + fastest / 32));
        self.fastest = Some(fastest);
        self.good = if took > fastest * SLOW { 0 } else { self.good + 1 };
        match self.good {
            0 => self.limit = (self.limit - 1).max(floor(self.max)),
            good if good >= self.limit => {
                (self.limit, self.good) = ((self.limit + 1).min(self.max), 0);
            }
            _ => {}
        }
    }

    /// Something waits for a chunk.
    pub fn wait(&mut self, now: Duration) {
        self.waiting += 1;
        self.waited = Some(now);
    }

    /// It does not any more.
    pub fn waited(&mut self, now: Duration) {
        self.waiting = self.waiting.saturating_sub(1);
        self.waited = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn what_is_preferred_comes_first_and_nearly_in_its_order() {
        let mut order = FetchOrder::new(1000, 7);
        let list: Vec<usize> = (0..100).map(|at| 999 - at * 3).collect();
        order.prefer(list.iter().copied());
        let given: Vec<_> = order.by_ref().take(100).collect();
        for (at, chunk) in given.iter().enumerate() {
            let wanted = list.iter().position(|it| it == chunk).expect("of the list");
            assert!(wanted.abs_diff(at) < 16, "{chunk} is number {at}, not {wanted}");
        }
        assert!(order.take(3).eq([0, 1, 2]));
        let mut other = FetchOrder::new(1000, 8);
        other.prefer(list);
        assert!(other.take(100).ne(given), "each host has an order of its own");
    }

    #[test]
    fn what_is_preferred_later_goes_before_what_was_preferred_first() {
        let mut order = FetchOrder::new(10, 0);
        order.prefer([5]);
        order.prefer([7]);
        order.prefer([]);
        assert!(order.eq([7, 5, 0, 1, 2, 3, 4, 6, 8, 9]));
    }

    proptest! {
        #[test]
        fn each_chunk_is_given_once(
            chunks in 0usize..50, salt: u64,
            steps in prop::collection::vec(prop::option::of(prop::collection::vec(0usize..60, 0..9)), 0..80),
        ) {
            let mut order = FetchOrder::new(chunks, salt);
            let mut given = Vec::new();
            for step in steps {
                match step {
                    Some(list) => order.prefer(list),
                    None => given.extend(order.next()),
                }
            }
            given.extend(order);
            given.sort_unstable();
            prop_assert!(given.into_iter().eq(0..chunks));
        }
    }

    #[test]
    fn without_readers_as_many_are_in_flight_as_the_source_takes() {
        let mut limit = AheadLimit::new(4);
        assert_eq!((0..9).filter(|_| limit.begin(s(1))).count(), 4);
        limit.end(None);
        assert!(limit.begin(s(1)) && !limit.begin(s(1)));
        limit.raise(5);
        assert!(limit.begin(s(1)) && !limit.begin(s(1)));
    }

    #[test]
    fn while_something_waits_one_goes_on() {
        let mut limit = AheadLimit::new(4);
        limit.wait(s(1));
        assert!(limit.begin(s(1)) && !limit.begin(s(2)));
        limit.waited(s(2));
        limit.end(None);
        // The next read is expected.
        assert!(limit.begin(s(3)) && !limit.begin(s(3)));
        assert!(limit.begin(s(8)), "none has come");
    }

    #[test]
    fn beside_readers_the_number_follows_how_long_fetches_take() {
        let mut limit = AheadLimit::new(8);
        let most = |limit: &mut AheadLimit, fetches: usize, took: Duration, at: u64| {
            for _ in 0..fetches {
                limit.begin(s(at));
                limit.end(Some(took));
            }
            limit.wait(s(at));
            limit.waited(s(at));
            let begun = (0..20).filter(|_| limit.begin(s(at))).count();
            (0..begun).for_each(|_| limit.end(None));
            begun
        };
        assert_eq!(most(&mut limit, 200, ms(10), 1), 8);
        assert_eq!(most(&mut limit, 10, ms(100), 2), 2);
        // The source has become slower: that is no line.
        assert_eq!(most(&mut limit, 200, ms(100), 3), 8);
    }
}
