//! What two hosts tell each other in order and once: decisions without I/O or clock.
//!
//! Each end says things, which are numbered. A letter carries some of those that the other end has
//! not confirmed, with the number of the first; its answer is how many the receiver has had by
//! then. Letters and answers may be lost, come twice, or overtake each other.

use std::collections::VecDeque;
use std::time::Duration;

/// One end.
#[derive(Debug)]
pub(super) struct Line<T> {
    /// Said, and not confirmed.
    unheard: VecDeque<T>,
    /// The number of the first of those.
    first: u64,
    /// The number of what the other end says next.
    expected: u64,
    /// When the other end was heard last.
    heard: Duration,
}

impl<T: Clone> Line<T> {
    pub(super) fn new(now: Duration) -> Self {
        Self { unheard: VecDeque::new(), first: 0, expected: 0, heard: now }
    }

    pub(super) fn say(&mut self, item: T) {
        self.unheard.push_back(item);
    }

    /// Whether all that was said is confirmed.
    pub(super) fn is_heard(&self) -> bool {
        self.unheard.is_empty()
    }

    /// What to send now: the oldest, at least one if there is any, as long as `fits` says so of the
    /// next.
    pub(super) fn letter(&self, mut fits: impl FnMut(&T) -> bool) -> (u64, Vec<T>) {
        let mut items = Vec::new();
        for item in &self.unheard {
            if !fits(item) && !items.is_empty() {
                break;
            }
            items.push(item.clone());
        }
        (self.first, items)
    }

    /// The other end has received this many.
    pub(super) fn on_receipt(&mut self, received: u64, now: Duration) {
        self.heard = self.heard.max(now);
        let confirmed = received.saturating_sub(self.first).min(self.unheard.len() as u64);
        self.unheard.drain(..usize::try_from(confirmed).unwrap_or(usize::MAX));
        self.first += confirmed;
    }

    /// A letter. → what of it is new.
    pub(super) fn on_letter(&mut self, first: u64, items: Vec<T>, now: Duration) -> Vec<T> {
        self.heard = self.heard.max(now);
        let Some(known) = self.expected.checked_sub(first) else { return Vec::new() };
        let new: Vec<T> =
            items.into_iter().skip(usize::try_from(known).unwrap_or(usize::MAX)).collect();
        self.expected += new.len() as u64;
        new
    }

    /// How many came from the other end.
    pub(super) fn received(&self) -> u64 {
        self.expected
    }

    /// How long the other end has been silent.
    pub(super) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn what_is_said_is_kept_until_it_is_confirmed() {
        let mut line = Line::new(NOW);
        for item in 0..5 {
            line.say(item);
        }
        let mut left = 2;
        let few = line.letter(|_| {
            left -= 1;
            left >= 0
        });
        assert_eq!(few, (0, vec![0, 1]));
        assert_eq!(line.letter(|_| false), (0, vec![0]), "one at least");
        line.on_receipt(2, NOW);
        line.on_receipt(1, NOW);
        assert_eq!(line.letter(|_| true), (2, vec![2, 3, 4]));
        line.on_receipt(u64::MAX, NOW);
        assert!(line.is_heard());
        line.say(9);
        assert_eq!(line.letter(|_| true), (5, vec![9]));
    }

    #[test]
    fn silence_ends_with_whatever_is_heard() {
        let s = Duration::from_secs;
        let mut line = Line::<u8>::new(s(1));
        assert_eq!(line.silence(s(5)), s(4));
        line.on_letter(7, vec![1], s(5));
        assert_eq!(line.silence(s(6)), s(1));
        line.on_receipt(0, s(6));
        assert_eq!((line.silence(s(6)), line.received()), (NOW, 0));
    }

    /// Whose end does what; letters and receipts lie in heaps out of which any comes at any time,
    /// or again.
    #[derive(Debug, Clone)]
    enum Step {
        Say(bool),
        Write { by: bool, most: usize },
        Deliver { to: bool, which: prop::sample::Index, is_kept: bool },
        Confirm { to: bool, which: prop::sample::Index, is_kept: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            any::<bool>().prop_map(Step::Say),
            (any::<bool>(), 0..4_usize).prop_map(|(by, most)| Step::Write { by, most }),
            any::<(bool, prop::sample::Index, bool)>()
                .prop_map(|(to, which, is_kept)| Step::Deliver { to, which, is_kept }),
            any::<(bool, prop::sample::Index, bool)>()
                .prop_map(|(to, which, is_kept)| Step::Confirm { to, which, is_kept }),
        ]
    }

    fn take<T: Clone>(heap: &mut Vec<T>, which: prop::sample::Index, is_kept: bool) -> Option<T> {
        let at = (!heap.is_empty()).then(|| which.index(heap.len()))?;
        Some(if is_kept { heap[at].clone() } else { heap.swap_remove(at) })
    }

    proptest! {
        #[test]
        fn all_is_heard_once_and_in_order(steps in prop::collection::vec(step(), 0..200)) {
            let mut ends = [Line::new(NOW), Line::new(NOW)];
            let mut said = [0_u32; 2];
            let mut heard = [Vec::new(), Vec::new()];
            let mut letters: [Vec<(u64, Vec<u32>)>; 2] = Default::default();
            let mut receipts: [Vec<u64>; 2] = Default::default();
            for step in steps {
                match step {
                    Step::Say(by) => {
                        let by = usize::from(by);
                        ends[by].say(said[by]);
                        said[by] += 1;
                    }
                    Step::Write { by, mut most } => {
                        let by = usize::from(by);
                        let letter = ends[by].letter(|_| { most = most.saturating_sub(1); most > 0 });
                        letters[1 - by].push(letter);
                    }
                    Step::Deliver { to, which, is_kept } => {
                        let to = usize::from(to);
                        if let Some((first, items)) = take(&mut letters[to], which, is_kept) {
                            heard[to].extend(ends[to].on_letter(first, items, NOW));
                            receipts[1 - to].push(ends[to].received());
                        }
                    }
                    Step::Confirm { to, which, is_kept } => {
                        let to = usize::from(to);
                        if let Some(received) = take(&mut receipts[to], which, is_kept) {
                            ends[to].on_receipt(received, NOW);
                        }
                    }
                }
                for heard in &heard {
                    prop_assert!((0..).zip(heard).all(|(number, item)| number == *item));
                }
            }
            // Once nothing is lost any more, all comes.
            for by in 0..2 {
                let (first, items) = ends[by].letter(|_| true);
                heard[1 - by].extend(ends[1 - by].on_letter(first, items, NOW));
                let received = ends[1 - by].received();
                ends[by].on_receipt(received, NOW);
                prop_assert!(ends[by].is_heard());
                prop_assert!(heard[1 - by].iter().copied().eq(0..said[by]));
            }
        }
    }
}
