//! Fetches in flight.

use std::collections::BTreeMap;
use std::time::Duration;

use vmfork_image::{PageIdx, PageRange};

use super::Reason;

/// The pages that have been asked for and neither filled nor failed yet: disjoint runs, by their
/// first page.
#[derive(Debug, Default)]
pub(super) struct Flights {
    runs: BTreeMap<PageIdx, Flight>,
    background: usize,
}

#[derive(Debug, Clone, Copy)]
struct Flight {
    end: PageIdx,
    reason: Reason,
    set_out: Duration,
}

impl Flight {
    /// It began as a background read.
    fn is_background(&self) -> bool {
        self.reason != Reason::Demand
    }
}

impl Flights {
    /// How many runs. A fetch that is reported in pieces may count more than once meanwhile.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// How many of them began as background reads.
    pub(super) fn background(&self) -> usize {
        self.background
    }

    /// The run that holds `page`, and why it is in flight.
    pub(super) fn at(&self, page: PageIdx) -> Option<(PageRange, Reason)> {
        let (start, flight) = self.runs.range(..=page).next_back()?;
        (page < flight.end).then(|| (PageRange::between(*start, flight.end), flight.reason))
    }

    /// When the run that holds `page` set out.
    pub(super) fn set_out(&self, page: PageIdx) -> Option<Duration> {
        let (_, flight) = self.runs.range(..=page).next_back()?;
        (page < flight.end).then_some(flight.set_out)
    }

    /// What of `range` is in flight as a demand read.
    pub(super) fn demand_in(&self, range: PageRange) -> Vec<PageRange> {
        let first = self.at(range.start()).map_or(range.start(), |(flight, _)| flight.start());
        let runs = self.runs.range(first..range.end().max(first));
        let demand = runs.filter(|(_, flight)| !flight.is_background());
        let inside =
            demand.map(|(start, flight)| PageRange::between(*start, flight.end).intersect(&range));
        inside.filter(|run| !run.is_empty()).collect()
    }

    /// The part of `range` around `page` that is free of flights; `page` itself must be.
    pub(super) fn clip(&self, page: PageIdx, range: PageRange) -> PageRange {
        let before = self.runs.range(..page).next_back().map_or(PageIdx(0), |(_, f)| f.end);
        let after = self.runs.range(page..).next().map_or(range.end(), |(start, _)| *start);
        PageRange::between(range.start().max(before), range.end().min(after))
    }

    /// `range` must be free of flights.
    pub(super) fn insert(&mut self, range: PageRange, reason: Reason, now: Duration) {
        debug_assert_eq!(self.clip(range.start(), range), range);
        self.put(range.start(), Flight { end: range.end(), reason, set_out: now });
    }

    /// Takes out what is in `range`, whole flights or parts, and returns it.
    pub(super) fn remove(&mut self, range: PageRange) -> Vec<(PageRange, Reason)> {
        let mut removed = Vec::new();
        if range.is_empty() {
            return removed;
        }
        let mut from = self.at(range.start()).map_or(range.start(), |(flight, _)| flight.start());
        while let Some((start, flight)) =
            self.runs.range(from..range.end()).next().map(|(start, flight)| (*start, *flight))
        {
            self.runs.remove(&start);
            self.background -= usize::from(flight.is_background());
            let run = PageRange::between(start, flight.end);
            let inside = run.intersect(&range);
            removed.push((inside, flight.reason));
            if inside.end() < run.end() {
                self.put(inside.end(), flight);
            }
            if run.start() < inside.start() {
                self.put(run.start(), Flight { end: inside.start(), ..flight });
            }
            from = inside.end(); // behind what is left before `range`
        }
        removed
    }

    fn put(&mut self, start: PageIdx, flight: Flight) {
        self.background += usize::from(flight.is_background());
        self.runs.insert(start, flight);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn flights_are_the_pages_put_in_less_those_taken_out(
            steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0..40u64, 0..12u64), 1..60),
        ) {
            let mut flights = Flights::default();
            let mut model = [None; 64];
            for (insert, background, start, len) in steps {
                let range = PageRange::new(PageIdx(start), len).expect("small");
                let cells = usize::try_from(start).expect("small")
                    ..usize::try_from(start + len).expect("small");
                let reason =
                    if background { Reason::Background("drain") } else { Reason::Demand };
                if !insert {
                    let removed = flights.remove(range);
                    let removed = removed.iter().flat_map(|(run, reason)| run.pages().map(|page| (page, *reason)));
                    let flying = range.pages().zip(&model[cells.clone()]);
                    let flying = flying.filter_map(|(page, cell)| Some((page, (*cell)?)));
                    prop_assert!(removed.eq(flying));
                    model[cells].fill(None);
                } else if len > 0 && model[cells.clone()].iter().all(Option::is_none) {
                    flights.insert(range, reason, Duration::ZERO);
                    model[cells].fill(Some(reason));
                }
                for (page, cell) in (0..).map(PageIdx).zip(&model) {
                    prop_assert_eq!(flights.at(page).map(|(_, reason)| reason), *cell);
                    if cell.is_none() {
                        let clip = flights.clip(page, PageRange::first(64));
                        prop_assert!(clip.contains(page));
                        prop_assert!(clip.pages().all(|page| flights.at(page).is_none()));
                    }
                }
                let background = flights.runs.values().filter(|flight| flight.is_background()).count();
                prop_assert_eq!(flights.background(), background);
            }
        }
    }
}
