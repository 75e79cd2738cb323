//! The thread behind an engine: reads faults, carries out answers, and works through the background in between.
//!
//! ```text
//!   sleep ──► commands ──► faults of all views ──► answer ──► Wake, Zeros, Map…           at once
//!     ▲                                              └──► Scheduler::on_fault             in order of arrival
//!     │                                                          │
//!     └── one step of the background, if it is due ◄── Scheduler::next, until nobody waits
//! ```

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};
use vmfork_policy::{Config, Fetch, Outcome, Reason, Scheduler, ViewId};

use super::answer::{Answer, Held, Sight};
use super::derive::Derivation;
use super::drain::{self, STEP_PAGES, Stage};
use super::pace::Pace;
use super::poller::{Bell, Poller, Ready};
use super::{Command, EngineEvent, EventSink, Progress};
use crate::frozen::{FrozenRange, Release};
use crate::homes::Homes;
use crate::host_image::{Ancestors, HostImage, PageLost};
use crate::view::{View, ZeroInstall};

/// Pages of ancestors are copied with so many times fewer neighbours than pages of the image's own are fetched
/// with: copies cost memory for as long as both images live, and a quarter of the copying costs a quarter of the
/// time.
const COPY_SHARE: u64 = 4;

/// What a worker is made of.
pub(super) struct Start {
    pub(super) image: Arc<HostImage>,
    /// Of the image that the VM began from.
    pub(super) base_table: PageTable,
    pub(super) base_homes: Homes,
    pub(super) ancestors: Ancestors,
    pub(super) unit_pages: u64,
    pub(super) commands: Receiver<Command>,
    pub(super) bell: Bell,
    pub(super) events: EventSink,
    pub(super) progress: Arc<Progress>,
}

enum Phase {
    /// Not frozen yet.
    Waiting {
        base_homes: Homes,
    },
    Deriving {
        derivation: Derivation,
        frozen: Arc<FrozenRange>,
    },
    /// The table is the image's.
    Sealed,
    /// The table will never be known: no view can be served.
    Failed {
        reason: String,
    },
}

pub(super) struct Worker {
    image: Arc<HostImage>,
    /// All that own a page, or are home to a block.
    ancestors: Ancestors,
    phase: Phase,
    /// Its table is the base's until the image is frozen, then right for every block that was asked for.
    scheduler: Scheduler<CachePresence>,
    /// Of other images, at home to blocks of views: what their caches lack is filled in from here.
    others: BTreeMap<ImageId, Scheduler<CachePresence>>,
    unit_pages: u64,
    drain: drain::Progress,
    views: BTreeMap<ViewId, View>,
    commands: Receiver<Command>,
    bell: Bell,
    poller: Poller,
    pace: Pace,
    events: EventSink,
    progress: Arc<Progress>,
    stopping: bool,
    buffer: Vec<u8>,
    faults: Vec<(ViewId, PageIdx)>,
}

/// The presence of an image's cache, for its scheduler.
#[derive(Debug)]
struct CachePresence(Arc<HostImage>);

impl vmfork_policy::Presence for CachePresence {
    fn is_present(&self, page: PageIdx) -> bool {
        self.0.cache().presence().is_present(page)
    }

    fn next_absent(&self, range: PageRange) -> Option<PageRange> {
        vmfork_policy::Presence::next_absent(self.0.cache().presence(), range)
    }
}

impl Worker {
    /// # Errors
    /// No fds or memory left.
    pub(super) fn new(start: Start) -> io::Result<Self> {
        let scheduler = scheduler(&start.image, start.base_table, start.unit_pages)?;
        Ok(Self {
            image: start.image,
            ancestors: start.ancestors,
            phase: Phase::Waiting { base_homes: start.base_homes },
            scheduler,
            others: BTreeMap::new(),
            unit_pages: start.unit_pages,
            drain: drain::Progress::default(),
            views: BTreeMap::new(),
            commands: start.commands,
            poller: Poller::new(&start.bell)?,
            bell: start.bell,
            pace: Pace::new(Instant::now()),
            events: start.events,
            progress: start.progress,
            stopping: false,
            buffer: Vec::new(),
            faults: Vec::new(),
        })
    }

    /// Until told to stop, and everything is done that others rely on.
    ///
    /// # Errors
    /// The kernel does not tell of faults any more.
    pub(super) fn run(mut self) -> io::Result<()> {
        let mut ready = Ready::default();
        while !self.may_end() {
            self.poller.wait(self.timeout(), &mut ready)?;
            if ready.commands {
                self.bell.silence();
                self.take_commands();
            }
            self.read_faults(&ready.views);
            self.serve_faults();
            if self.has_background() && self.pace.wait(Instant::now()).is_zero() {
                let began = Instant::now();
                self.background_step();
                self.pace.stepped(began, Instant::now());
            }
        }
        Ok(())
    }

    /// Told to stop, and nobody needs pages that are not drained yet.
    fn may_end(&self) -> bool {
        // The scheduler's presence is the second reference.
        let needed_by_others = self.drain.is_running() && Arc::strong_count(&self.image) > 2;
        self.stopping && !needed_by_others
    }

    fn has_background(&self) -> bool {
        match self.phase {
            Phase::Deriving { .. } => true,
            Phase::Sealed => self.drain.is_running(),
            Phase::Waiting { .. } | Phase::Failed { .. } => false,
        }
    }

    /// How long to sleep, if nothing comes.
    fn timeout(&self) -> Option<Duration> {
        self.has_background().then(|| self.pace.wait(Instant::now()))
    }

    fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Begin { frozen }) => self.begin(frozen),
                Ok(Command::AddView { id, view }) => self.add_view(id, view),
                Ok(Command::RemoveView { id, view: back }) => {
                    if let Some(view) = self.remove_view(id) {
                        let _waited_for = back.send(view);
                    }
                }
                Ok(Command::Panic) => panic!("injected"),
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn begin(&mut self, frozen: FrozenRange) {
        let Phase::Waiting { base_homes } = &self.phase else { return };
        let (base, homes) = (self.scheduler.table().clone(), base_homes.clone());
        let derivation = Derivation::new(self.image.id(), base, homes);
        let frozen = Arc::new(frozen);
        self.image.set_frozen(Arc::clone(&frozen));
        self.phase = Phase::Deriving { derivation, frozen };
    }

    fn remove_view(&mut self, id: ViewId) -> Option<View> {
        let view = self.views.remove(&id)?;
        self.poller.remove(&view.uffd);
        self.scheduler.remove_view(id);
        self.others.retain(|home, scheduler| {
            scheduler.remove_view(id);
            self.views.values().any(|view| view.home(*home).is_some())
        });
        Some(view)
    }

    fn add_view(&mut self, id: ViewId, view: View) {
        if let Phase::Failed { reason } = &self.phase {
            self.report_lost(id, reason.clone());
        }
        if let Err(error) = self.poller.add(id, &view.uffd) {
            self.report_lost(id, format!("its faults can't be waited for: {error}"));
        }
        // Faults that another engine read, and left, are raised anew.
        view.wake(PageRange::first(self.image.pages()));
        self.views.insert(id, view);
    }

    fn read_faults(&mut self, ready: &[ViewId]) {
        self.faults.clear();
        for id in ready {
            let Some(view) = self.views.get(id) else { continue };
            let faults = &mut self.faults;
            let outcome = view.uffd.read_faults(|address| {
                faults.extend(view.page_at(address).map(|page| (*id, page)));
            });
            if let Err(error) = outcome {
                self.poller.remove(&view.uffd);
                self.report_lost(*id, format!("its faults can't be read: {error}"));
            }
        }
    }

    fn serve_faults(&mut self) {
        if self.faults.is_empty() {
            return;
        }
        let faults = std::mem::take(&mut self.faults);
        for (id, page) in &faults {
            if let Err(reason) = self.serve(*id, *page) {
                self.report_lost(*id, reason);
            }
        }
        self.faults = faults;
        while let Some((image, fetch)) = self.next_demand() {
            self.carry_out(&image, fetch);
        }
        self.pace.served();
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

    fn report_lost(&self, view: ViewId, reason: String) {
        (self.events)(EngineEvent::ViewLost { image: self.image.id(), view, reason });
    }

    /// Answer a fault at once, or have its page fetched in its turn.
    ///
    /// # Errors
    /// Why the view is lost.
    fn serve(&mut self, id: ViewId, page: PageIdx) -> Result<(), String> {
        self.know(page)?;
        let Some(view) = self.views.get(&id) else { return Ok(()) };
        match self.decide(view, page) {
            Answer::Wake => {
                self.wake(id, page.range());
                if let Some(view) = self.views.get_mut(&id) {
                    view.touch(page.block());
                    view.counters.present.add(1);
                }
            }
            Answer::Zeros(range) => self.install_zeros(id, range),
            Answer::MapZeros(run) => {
                let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
                match view.map_zeros(page, run).map_err(|error| error.to_string())? {
                    Some(run) => {
                        view.counters.mapped.add(1);
                        view.wake(run);
                    }
                    None => self.install_zeros(id, page.range()),
                }
            }
            Answer::MapHome(home, run) => self.map_home(id, page, home, run)?,
            Answer::Fetch(image) => self.queue(id, page, image)?,
            Answer::Lost => {
                return Err(format!(
                    "page {page} of image {}: what is mapped there has lost it",
                    self.image.id()
                ));
            }
        }
        Ok(())
    }

    fn wake(&self, id: ViewId, range: PageRange) {
        if let Some(view) = self.views.get(&id) {
            view.wake(range);
        }
    }

    /// Map the cache of a block's home, then answer the fault there.
    fn map_home(
        &mut self,
        id: ViewId,
        page: PageIdx,
        home: ImageId,
        run: PageRange,
    ) -> Result<(), String> {
        let image = self.ancestors.get(&home).cloned();
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        let mapped = match &image {
            Some(image) => view.map_home(page, run, image).map_err(|error| error.to_string())?,
            None => None,
        };
        let Some(run) = mapped else {
            view.touch(page.block());
            return self.serve(id, page); // touched: no more mapping
        };
        view.counters.mapped.add(1);
        view.wake(run.until_page(page));
        view.wake(run.from_page(PageIdx(page.0 + 1)));
        self.serve(id, page) // mapped
    }

    /// The fault waits for its turn, until the page is in the cache of `image`.
    fn queue(&mut self, id: ViewId, page: PageIdx, image: ImageId) -> Result<(), String> {
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        view.touch(page.block());
        let outcome = match self.scheduler_of(image) {
            Some(scheduler) => scheduler.on_fault(id, page),
            None => return Err(format!("page {page}: image {image} is not on this host")),
        };
        match outcome {
            Outcome::Waits => {
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

    fn scheduler_of(&mut self, image: ImageId) -> Option<&mut Scheduler<CachePresence>> {
        if image == self.image.id() {
            return Some(&mut self.scheduler);
        }
        match self.others.entry(image) {
            Entry::Occupied(there) => Some(there.into_mut()),
            Entry::Vacant(place) => {
                let image = self.ancestors.get(&image)?;
                let made = scheduler(image, image.table()?.clone(), self.unit_pages).ok()?;
                Some(place.insert(made))
            }
        }
    }

    /// Make sure that the table is right for a page's block.
    fn know(&mut self, page: PageIdx) -> Result<(), String> {
        let outcome = match &mut self.phase {
            Phase::Sealed => return Ok(()),
            Phase::Deriving { derivation, frozen } => {
                derivation.ensure(page.block(), frozen).map(|changed| {
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

    fn decide(&self, view: &View, page: PageIdx) -> Answer {
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
        .decide(page)
    }

    fn install_zeros(&mut self, id: ViewId, range: PageRange) {
        let Some(view) = self.views.get_mut(&id) else { return };
        match view.install_zeros(range) {
            ZeroInstall::Done => view.counters.zero.add(1),
            ZeroInstall::Gone => {
                // Either the VM has ended, which its owner notices by itself, or its address space changes
                // without end.
                tracing::debug!(%id, %range, "zero pages refused");
                view.wake(range);
            }
        }
    }

    /// Bring pages into the cache of an image, and tell who waits for them.
    fn carry_out(&mut self, image: &Arc<HostImage>, fetch: Fetch) {
        let range = fetch.range;
        let is_demand = fetch.reason == Reason::Demand;
        let outcome = self.bring(image, range, fetch.source);
        let Some(scheduler) = self.scheduler_of(image.id()) else { return };
        match outcome {
            Ok(()) => {
                let mut waited = scheduler.on_filled(range);
                waited.sort_unstable();
                waited.dedup_by_key(|(view, _)| *view);
                for (id, _) in waited {
                    self.wake(id, range);
                }
                if is_demand {
                    image.counters.demand_bytes.add(range.byte_len());
                } else {
                    image.counters.drained_bytes.add(range.byte_len());
                    self.drain.on_filled(range);
                }
            }
            Err(lost) => {
                for (id, _) in scheduler.on_failed(range) {
                    self.report_lost(id, lost.to_string());
                }
                if !is_demand {
                    self.drain.on_failed();
                }
            }
        }
    }

    fn bring(
        &mut self,
        image: &Arc<HostImage>,
        range: PageRange,
        source: Source,
    ) -> Result<(), PageLost> {
        let lost = |reason: &str| PageLost {
            page: range.start(),
            image: image.id(),
            reason: reason.to_owned(),
        };
        let owner = match source {
            Source::Zero => return Err(lost("it is zero, and never fetched")),
            Source::Image(id) if id == image.id() => image,
            Source::Image(id) => match self.ancestors.get(&id) {
                Some(owner) => owner,
                None => return Err(lost(&format!("its owner {id} is not on this host"))),
            },
        };
        drain::fill(image, owner, range, &mut self.buffer)
    }

    /// One bounded piece of what nobody waits for.
    fn background_step(&mut self) {
        match &mut self.phase {
            Phase::Deriving { derivation, frozen } => {
                let outcome = derivation.step(frozen);
                self.scheduler.set_table(derivation.table().clone());
                let complete = derivation.is_complete();
                match outcome {
                    Ok(()) if complete => self.seal(),
                    Ok(()) => {}
                    Err(error) => {
                        self.fail(format!("what the VM had written can't be told: {error}"));
                    }
                }
            }
            Phase::Sealed => self.drain_step(),
            Phase::Waiting { .. } | Phase::Failed { .. } => {}
        }
    }

    fn drain_step(&mut self) {
        let frozen = self.image.frozen();
        if self.drain.stage == Stage::Copying {
            if let Some(fetch) = self.scheduler.next(STEP_PAGES) {
                self.carry_out(&Arc::clone(&self.image), fetch);
                // When a whole process has gone, page by page tells no more than the first one did.
                if self.drain.has_failed() && frozen.as_ref().is_none_or(|it| !it.is_held()) {
                    self.scheduler.remove_background(drain::NAME);
                    self.drain.on_copied(&self.image, self.scheduler.table());
                }
            } else {
                self.drain.on_copied(&self.image, self.scheduler.table());
            }
            if self.drain.stage == Stage::Incomplete {
                tracing::error!(image = %self.image.id(), "some frozen pages are lost");
            }
        }
        let limit = self.drain.release_limit(self.image.pages());
        let released = frozen.map_or(Release::Nothing, |frozen| frozen.release_some(limit));
        if self.drain.stage == Stage::Releasing && released == Release::Nothing {
            self.drain.stage = Stage::Complete;
            if let Some(frozen) = self.image.take_frozen() {
                end(frozen);
            }
            self.progress.update(|reached| reached.drained = true);
            (self.events)(EngineEvent::Drained { image: self.image.id() });
        }
    }

    fn seal(&mut self) {
        let Phase::Deriving { derivation, .. } = std::mem::replace(&mut self.phase, Phase::Sealed)
        else {
            return;
        };
        let spent = u64::try_from(derivation.spent.as_micros()).unwrap_or(u64::MAX);
        self.image.counters.derive_us.add(spent);
        let (table, homes) = derivation.into_parts();
        self.image.counters.frozen_pages.add(table.owners().get(self.image.id()));
        self.ancestors = self.image.seal(table, homes, std::mem::take(&mut self.ancestors));
        let policy = vmfork_policy::Drain::new(self.image.id(), STEP_PAGES);
        if let Err(error) = self.scheduler.add_background(Box::new(policy)) {
            return self.fail(format!("it can't be drained: {error}"));
        }
        self.drain.stage = Stage::Copying;
        self.progress.update(|reached| reached.sealed = true);
        (self.events)(EngineEvent::Sealed { image: self.image.id() });
    }

    /// The table will never be known: all views will sooner or later ask for a page.
    fn fail(&mut self, reason: String) {
        tracing::error!(image = %self.image.id(), reason, "image lost");
        for id in self.views.keys() {
            self.report_lost(*id, reason.clone());
        }
        self.phase = Phase::Failed { reason };
    }
}

/// # Errors
/// The unit makes no sense.
fn scheduler(
    image: &Arc<HostImage>,
    table: PageTable,
    unit_pages: u64,
) -> io::Result<Scheduler<CachePresence>> {
    let config = Config {
        unit_pages,
        copy_unit_pages: (unit_pages / COPY_SHARE).max(1),
        image: Some(image.id()),
        ..Config::default()
    };
    Scheduler::new(table, CachePresence(Arc::clone(image)), config)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// Let go of a moved range. If that was the last that held the keeper of a VM that has ended, the keeper ends
/// now, and takes its time (it frees all of that VM's memory), for which no fault should wait.
fn end(frozen: Arc<FrozenRange>) {
    let ending = std::thread::Builder::new().name("keeper-end".to_owned());
    if let Err(error) = ending.spawn(move || drop(frozen)) {
        tracing::debug!(%error, "no thread to end a keeper");
    }
}
