//! What becomes of faults: answered at once, or fetched in their turn.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use vmfork_image::{ImageId, PageIdx, PageRange};
use vmfork_policy::{Fetch, Outcome, Scheduler, ViewId};

use super::{COPY_SHARE, CachePresence, Fault, Phase, Worker, scheduler, touches};
use crate::answer::{Answer, Held, Sight};
use crate::fill;
use crate::host_image::{HostImage, PageLost};
use crate::view::{BlockState, View};

/// Why a fault can't be answered.
enum Failure {
    /// Its page can't be had.
    Page(String),
    /// What is mapped in its view can't be told: no fault there can be answered.
    View(String),
}

impl Worker {
    pub(super) fn serve_faults(&mut self) {
        if !self.faults.is_empty() {
            self.pace.served();
        }
        while !self.faults.is_empty() {
            let faults = std::mem::take(&mut self.faults);
            for fault in faults {
                match self.serve(fault) {
                    Ok(()) => {}
                    Err(Failure::Page(reason)) => self.refuse(fault.view, fault.page, reason),
                    Err(Failure::View(reason)) => self.report_lost(fault.view, reason),
                }
            }
        }
        self.fetch_demand();
    }

    /// Set out for all that views wait for, as far as there is room: whenever a fault has come,
    /// something has arrived, or has failed together with its neighbours.
    pub(super) fn fetch_demand(&mut self) {
        while let Some((image, fetch)) = self.next_demand() {
            self.carry_out(&image, fetch);
        }
    }

    /// What views wait for, and the image into whose cache it belongs.
    fn next_demand(&mut self) -> Option<(Arc<HostImage>, Fetch)> {
        if let Some(fetch) = self.scheduler.next(0) {
            return Some((Arc::clone(&self.image), fetch));
        }
        self.others.values_mut().find_map(|other| {
            let fetch = other.next(0)?;
            Some((Arc::clone(&other.presence().0), fetch))
        })
    }

    /// Answer a fault at once, or have its page fetched in its turn.
    ///
    /// # Errors
    /// Why it can't be.
    fn serve(&mut self, fault: Fault) -> Result<(), Failure> {
        let Fault { view: id, page, .. } = fault;
        if self.lost.contains(&id) {
            return Ok(());
        }
        self.know(page).map_err(Failure::Page)?;
        let Some(view) = self.views.get(&id) else { return Ok(()) };
        match self.decide(view, fault) {
            Answer::Wake => {
                self.count_present(id, page);
                self.wake(id, page.range());
                if let Some(view) = self.views.get_mut(&id) {
                    view.touch(page.block());
                    view.counters.present.add(1);
                }
            }
            Answer::Zeros(range) => self.install_zeros(id, range),
            Answer::MapZeros(run) => {
                let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
                match view.map_zeros(page, run).map_err(Failure::View)? {
                    Some(run) => {
                        view.counters.mapped.add(1);
                        view.wake(run);
                    }
                    None => self.install_zeros(id, page.range()),
                }
            }
            Answer::MapHome(home, run) => self.map_home(fault, home, run)?,
            Answer::Fetch(image) => self.queue(fault, image).map_err(Failure::Page)?,
            Answer::Private(home, owner) => {
                self.give_copy(id, page, home, owner).map_err(Failure::Page)?;
            }
            Answer::Lost => {
                return Err(Failure::View(format!(
                    "page {page} of image {}: what is mapped there has lost it",
                    self.image.id()
                )));
            }
        }
        Ok(())
    }

    pub(super) fn wake(&self, id: ViewId, range: PageRange) {
        if let Some(view) = self.views.get(&id) {
            view.wake(range);
        }
    }

    /// Map the cache of a block's home, then answer the fault there.
    fn map_home(&mut self, fault: Fault, home: ImageId, run: PageRange) -> Result<(), Failure> {
        let Fault { view: id, page, .. } = fault;
        let image = self.ancestors.get(&home).cloned();
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        let mapped = match &image {
            Some(image) => view.map_home(page, run, image).map_err(Failure::View),
            None => Ok(None),
        };
        let unserved = view.take_unserved();
        self.faults.extend(unserved.into_iter().map(|(page, is_write)| Fault {
            view: id,
            page,
            is_write,
        }));
        let mapped = mapped?;
        let Some(run) = mapped else {
            view.touch(page.block());
            return self.serve(fault); // touched: no more mapping
        };
        view.counters.mapped.add(1);
        view.wake(run.until_page(page));
        view.wake(run.from_page(PageIdx(page.0 + 1)));
        self.serve(fault) // mapped
    }

    /// The fault waits for its turn, until the page is in the cache of `image`.
    fn queue(&mut self, fault: Fault, image: ImageId) -> Result<(), String> {
        let Fault { view: id, page, is_write } = fault;
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        view.touch(page.block());
        self.ahead.may_have_more = true; // a policy may learn from it
        let outcome = match self.on_fault(id, page, image) {
            Some(outcome) => outcome,
            None => return Err(format!("page {page}: image {image} is not on this host")),
        };
        match outcome {
            Outcome::Waits => {
                self.fetchers.hurry(image, page);
                self.waiting.entry((id, page)).or_insert_with(Instant::now);
                touches::waits((id, page), is_write, self.began.elapsed());
                if let Some(view) = self.views.get(&id) {
                    view.counters.fetch.add(1);
                }
            }
            Outcome::Present => self.wake(id, page.range()),
            Outcome::Zero => self.install_zeros(id, page.range()),
            Outcome::Refused(refusal) => {
                return Err(format!("page {page} of image {image}: {refusal}"));
            }
        }
        Ok(())
    }

    /// Tell the scheduler of an image of a fault, and count what it found. `None`: there is no such
    /// image.
    fn on_fault(&mut self, id: ViewId, page: PageIdx, image: ImageId) -> Option<Outcome> {
        let scheduler = self.scheduler_of(image)?;
        let before = scheduler.tally().faults();
        let outcome = scheduler.on_fault(id, page);
        let after = scheduler.tally().faults();
        let counters = &scheduler.presence().0.counters;
        counters.predicted_faults.add(after.predicted - before.predicted);
        counters.remote_faults.add(after.remote - before.remote);
        Some(outcome)
    }

    /// A fault on a page that has come meanwhile: a stored image's policies learn from it, too.
    fn count_present(&mut self, id: ViewId, page: PageIdx) {
        let Some(view) = self.views.get(&id) else { return };
        let holder = match view.block(page.block()) {
            BlockState::Mapped(home) => home,
            _ => self.image.id(),
        };
        let of_stored = holder == self.image.id() && self.image.is_stored()
            || self.ancestors.get(&holder).is_some_and(|image| image.is_stored());
        if of_stored {
            let _present = self.on_fault(id, page, holder);
        }
    }

    pub(super) fn scheduler_of(&mut self, image: ImageId) -> Option<&mut Scheduler<CachePresence>> {
        if image == self.image.id() {
            return Some(&mut self.scheduler);
        }
        if !self.others.contains_key(&image) {
            let other = self.ancestors.get(&image)?;
            let mut made = scheduler(other, other.table()?.clone(), self.unit_pages).ok()?;
            self.predict_in(&mut made);
            made.set_now(self.began.elapsed());
            self.others.insert(image, made);
        }
        self.others.get_mut(&image)
    }

    /// Make sure that the table is right for a page's block.
    fn know(&mut self, page: PageIdx) -> Result<(), String> {
        let outcome = match &mut self.phase {
            Phase::Sealed => return Ok(()),
            Phase::Deriving { derivation, frozen } => {
                derivation.ensure(page.block(), &**frozen).map(|changed| {
                    if changed {
                        self.scheduler.set_table(derivation.table().clone());
                    }
                })
            }
            Phase::Waiting { .. } => Err(io::Error::other("the image is not frozen yet")),
            Phase::Failed { reason } => Err(io::Error::other(reason.clone())),
        };
        outcome.map_err(|error| {
            let image = self.image.id();
            format!("page {page} of image {image}: whose it is can't be told: {error}")
        })
    }

    fn decide(&self, view: &View, fault: Fault) -> Answer {
        Sight {
            image: Held {
                id: self.image.id(),
                table: self.scheduler.table(),
                presence: self.image.cache().presence(),
            },
            other: &|id| {
                let image = self.ancestors.get(&id)?;
                Some(Held { id, table: image.table()?, presence: image.cache().presence() })
            },
            home: &|block| match &self.phase {
                Phase::Deriving { derivation, .. } => derivation.home(block),
                _ => self.image.homes().and_then(|homes| homes.get(block)),
            },
            is_known: &|block| match &self.phase {
                Phase::Deriving { derivation, .. } => derivation.is_known(block),
                _ => true,
            },
            state: &|block| view.block(block),
            may_map: view.may_map(),
        }
        .decide(fault.page, fault.is_write)
    }

    /// Give a view its own copy of an ancestor's page that its VM is about to write to, and, if it
    /// writes to one page after the other, of those behind it: none of them is brought into a
    /// cache.
    ///
    /// # Errors
    /// Why the page can't be had.
    fn give_copy(
        &mut self,
        id: ViewId,
        page: PageIdx,
        home: ImageId,
        owner: ImageId,
    ) -> Result<(), String> {
        let find = |id: ImageId| {
            let image =
                if id == self.image.id() { &self.image } else { self.ancestors.get(&id)? };
            Some(Arc::clone(image))
        };
        let missing = |id: ImageId| format!("page {page}: image {id} is not on this host");
        let home = find(home).ok_or_else(|| missing(home))?;
        let owner = find(owner).ok_or_else(|| missing(owner))?;
        if owner.is_far(page.range()) {
            // This thread does not wait for a store.
            return self.queue(Fault { view: id, page, is_write: true }, home.id());
        }
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        let ahead = if view.writes_on(page) { (self.unit_pages / COPY_SHARE).max(1) } else { 1 };
        let within =
            page.block().pages().map(|block| block.intersect(&self.scheduler.table().range()));
        let within = within.unwrap_or(page.range()).from_page(page);
        let within = within.until_page(PageIdx(page.0 + ahead));
        // All of one owner, and none that the home's cache has: those the view shares.
        let (run, _) = self.scheduler.table().run_at(page, within);
        let present = home.cache().presence();
        let end = run.pages().find(|page| present.is_present(*page)).unwrap_or(run.end());
        let mut run = run.until_page(end);
        if run.is_empty() {
            view.wake(page.range());
            return Ok(());
        }
        self.buffer.resize(usize::try_from(run.byte_len()).unwrap_or(0), 0);
        if owner.is_far(run) || owner.read_owned(run, &mut self.buffer).is_err() {
            // Of several, a bad neighbour must not stop the view.
            run = page.range();
            self.buffer.truncate(usize::try_from(run.byte_len()).unwrap_or(0));
            owner.read_owned(run, &mut self.buffer).map_err(|lost| lost.to_string())?;
        }
        view.counters.fetch.add(1);
        home.counters.demand_bytes.add(run.byte_len());
        home.counters.from_image_bytes.add(run.byte_len());
        view.install_private(run, &self.buffer);
        Ok(())
    }

    fn install_zeros(&mut self, id: ViewId, range: PageRange) {
        let Some(view) = self.views.get_mut(&id) else { return };
        view.install_zeros(range);
        view.counters.zero.add(1);
    }

    /// Bring pages into the cache of an image, and notify their waiters; at once, or when they have
    /// arrived.
    pub(super) fn carry_out(&mut self, image: &Arc<HostImage>, fetch: Fetch) {
        if self.send_for(image, fetch) {
            return;
        }
        let outcome = self.bring(image, fetch);
        self.settle(image, fetch, None, outcome);
    }

    /// The image that owns the pages of a fetch into the cache of `image`; `None`: it is not on
    /// this host.
    pub(super) fn owner_of(&self, image: &Arc<HostImage>, fetch: Fetch) -> Option<Arc<HostImage>> {
        let id = fetch.source.image()?;
        let owner = if id == image.id() {
            image
        } else if id == self.image.id() {
            &self.image
        } else {
            self.ancestors.get(&id)?
        };
        Some(Arc::clone(owner))
    }

    fn bring(&mut self, image: &Arc<HostImage>, fetch: Fetch) -> Result<(), PageLost> {
        let owner = self.owner_of(image, fetch).ok_or_else(|| PageLost {
            page: fetch.range.start(),
            image: image.id(),
            reason: format!("its owner ({}) is not on this host", fetch.source),
        })?;
        // No early notice: a view that could use it waits for this thread.
        fill::fill(image, &owner, fetch, &mut self.buffer, &mut |_| ())
    }
}
