//! Something about each of some pages.

use std::collections::BTreeMap;

use vmfork_image::{PageIdx, PageRange};

/// Disjoint runs of pages, by their first page, with something known of each.
#[derive(Debug)]
pub(super) struct RunMap<T> {
    /// Its end and its value.
    runs: BTreeMap<PageIdx, (PageIdx, T)>,
}

impl<T> Default for RunMap<T> {
    fn default() -> Self {
        Self { runs: BTreeMap::new() }
    }
}

impl<T: Copy> RunMap<T> {
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PageRange, T)> {
        self.runs.iter().map(|(start, (end, value))| (PageRange::between(*start, *end), *value))
    }

    /// The parts of `range` that have a value, in order.
    pub(super) fn within(&self, range: PageRange) -> impl Iterator<Item = (PageRange, T)> {
        let before = self.runs.range(..range.start()).next_back();
        let from = before
            .filter(|(_, (end, _))| *end > range.start())
            .map_or(range.start(), |(start, _)| *start);
        let to = range.end().max(from);
        self.runs.range(from..to).filter_map(move |(start, (end, value))| {
            let inside = PageRange::between(*start, *end).intersect(&range);
            (!inside.is_empty()).then_some((inside, *value))
        })
    }

    /// The parts of `range` that have none, in order.
    pub(super) fn free(&self, range: PageRange) -> Vec<PageRange> {
        let mut free = Vec::new();
        let mut rest = range;
        for (run, _) in self.within(range) {
            free.push(rest.until_page(run.start()));
            rest = rest.from_page(run.end());
        }
        free.push(rest);
        free.retain(|run| !run.is_empty());
        free
    }

    /// `range` must be free.
    pub(super) fn insert(&mut self, range: PageRange, value: T) {
        debug_assert!(self.within(range).next().is_none(), "{range} is taken");
        if !range.is_empty() {
            self.runs.insert(range.start(), (range.end(), value));
        }
    }

    /// Takes out what is in `range`, whole runs or parts, and returns it.
    pub(super) fn remove(&mut self, range: PageRange) -> Vec<(PageRange, T)> {
        let removed: Vec<_> = self.within(range).collect();
        for (inside, value) in &removed {
            let Some((start, (end, _))) = self.runs.range(..=inside.start()).next_back() else {
                continue;
            };
            let (start, end) = (*start, *end);
            self.runs.remove(&start);
            if start < inside.start() {
                self.runs.insert(start, (inside.start(), *value));
            }
            if inside.end() < end {
                self.runs.insert(inside.end(), (end, *value));
            }
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    proptest! {
        #[test]
        fn runs_are_the_pages_put_in_less_those_taken_out(
            steps in prop::collection::vec((any::<bool>(), 0..40u64, 0..12u64, any::<u8>()), 1..60),
            (start, len) in (0..60u64, 0..20u64),
        ) {
            let (mut map, mut model) = (RunMap::default(), BTreeMap::new());
            for (insert, start, len, value) in steps {
                let range = range(start, len);
                if insert {
                    for free in map.free(range) {
                        map.insert(free, value);
                        model.extend(free.pages().map(|page| (page, value)));
                    }
                } else {
                    let removed = map.remove(range);
                    let removed = removed.iter().flat_map(|(run, value)| run.pages().map(|page| (page, *value)));
                    let expected = range.pages().filter_map(|page| Some((page, model.remove(&page)?)));
                    prop_assert!(removed.eq(expected));
                }
                let all = map.iter().flat_map(|(run, value)| run.pages().map(move |page| (page, value)));
                prop_assert!(all.eq(model.iter().map(|(page, value)| (*page, *value))));
            }
            let range = range(start, len);
            let within = map.within(range).flat_map(|(run, value)| run.pages().map(move |page| (page, value)));
            prop_assert!(within.eq(range.pages().filter_map(|page| Some((page, *model.get(&page)?)))));
            let free = map.free(range).into_iter().flat_map(|run| run.pages());
            prop_assert!(free.eq(range.pages().filter(|page| !model.contains_key(page))));
        }
    }
}
