//! Which views wait for which pages.

use std::collections::BTreeMap;

use vmfork_image::{PageIdx, PageRange};

use super::ViewId;

/// The pages that views wait for, and the order in which they are to be fetched.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pages: BTreeMap<PageIdx, Wait>,
    /// Pages not in flight, by arrival. Each is in `pages`.
    queue: BTreeMap<u64, PageIdx>,
    next_arrival: u64,
    /// Pairs of a view and a page.
    count: usize,
}

#[derive(Debug)]
struct Wait {
    /// In order of arrival, each once.
    views: Vec<ViewId>,
    arrival: u64,
    /// A fetch with neighbours has failed.
    alone: bool,
}

/// The page to fetch next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct First {
    pub(super) page: PageIdx,
    /// Without neighbours.
    pub(super) alone: bool,
}

impl Waits {
    /// How many pairs of a view and a page.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Whether `view` waits for `page`.
    pub(super) fn has(&self, view: ViewId, page: PageIdx) -> bool {
        self.pages.get(&page).is_some_and(|wait| wait.views.contains(&view))
    }

    /// Whether any view waits for `page`.
    pub(super) fn any(&self, page: PageIdx) -> bool {
        self.pages.contains_key(&page)
    }

    /// Adds a wait that does not exist yet. `queued`: the page is not in flight, fetch it.
    pub(super) fn add(&mut self, view: ViewId, page: PageIdx, queued: bool) {
        self.count += 1;
        if let Some(wait) = self.pages.get_mut(&page) {
            wait.views.push(view);
            return;
        }
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        self.pages.insert(page, Wait { views: vec![view], arrival, alone: false });
        if queued {
            self.queue.insert(arrival, page);
        }
    }

    /// The page that was queued first.
    pub(super) fn first(&self) -> Option<First> {
        let (_, page) = self.queue.first_key_value()?;
        let alone = self.pages.get(page).is_some_and(|wait| wait.alone);
        Some(First { page: *page, alone })
    }

    /// The pages in `range` are in flight.
    pub(super) fn set_out(&mut self, range: PageRange) {
        for (_, wait) in self.pages.range(range.start()..range.end()) {
            self.queue.remove(&wait.arrival);
        }
    }

    /// The pages in `range` are to be tried again, each alone; they keep their place.
    pub(super) fn retry_alone(&mut self, range: PageRange) {
        for (page, wait) in self.pages.range_mut(range.start()..range.end()) {
            wait.alone = true;
            self.queue.insert(wait.arrival, *page);
        }
    }

    /// Ends the waits for pages in `range`, which are returned.
    pub(super) fn take(&mut self, range: PageRange) -> Vec<(ViewId, PageIdx)> {
        let mut taken = Vec::new();
        while let Some(page) =
            self.pages.range(range.start()..range.end()).next().map(|(page, _)| *page)
        {
            let Some(wait) = self.pages.remove(&page) else { break };
            self.queue.remove(&wait.arrival);
            taken.extend(wait.views.into_iter().map(|view| (view, page)));
        }
        self.count -= taken.len();
        taken
    }

    /// Ends all waits of a view.
    pub(super) fn remove_view(&mut self, view: ViewId) {
        let (queue, count) = (&mut self.queue, &mut self.count);
        self.pages.retain(|_, wait| {
            let before = wait.views.len();
            wait.views.retain(|other| *other != view);
            *count -= before - wait.views.len();
            if wait.views.is_empty() {
                queue.remove(&wait.arrival);
            }
            !wait.views.is_empty()
        });
    }
}
