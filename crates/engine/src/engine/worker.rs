//! The thread behind an engine: reads faults, carries out answers, and works through the background
//! in between.
//!
//! ```text
//!   sleep ──► commands ──► faults of all views ──► answer ──► Wake, Zeros, Map…           at once
//!     ▲                                              └──► Scheduler::on_fault             in order of arrival
//!     │                                                          │
//!     └── one step of the background, if it is due ◄── Scheduler::next, until no view waits
//! ```

mod prefetch;
mod serve;
mod touches;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use vmfork_image::{ImageId, PageIdx, PageRange, PageTable};
use vmfork_policy::{Config, Scheduler, ViewId};

use self::prefetch::Ahead;
use super::derive::Derivation;
use super::drain::{self, STEP_PAGES, Stage};
use super::fetchers::{Demand, Fetchers, Told};
use super::pace::Pace;
use super::poller::{Bell, Poller, Ready};
use super::{Command, EngineEvent, EventSink, Progress};
use crate::homes::Homes;
use crate::host_image::{Ancestors, HostImage};
use crate::originals::{Originals, Release};
use crate::view::View;

/// Pages of ancestors are copied with this many times fewer neighbours than pages of the image's
/// own are fetched with.
/// Copies cost memory for as long as both images live, and a quarter of the copying costs a quarter
/// of the time.
const COPY_SHARE: u64 = 4;

/// What a worker is made of.
pub(super) struct Start {
    pub(super) image: Arc<HostImage>,
    /// Of the image that the VM began from; of a stored image, its own.
    pub(super) base_table: PageTable,
    pub(super) base_homes: Homes,
    pub(super) ancestors: Ancestors,
    pub(super) unit_pages: u64,
    pub(super) commands: Receiver<Command>,
    pub(super) bell: Bell,
    pub(super) events: EventSink,
    pub(super) progress: Arc<Progress>,
    pub(super) demand: Arc<Demand>,
}

enum Phase {
    /// Not frozen yet.
    Waiting {
        base_homes: Homes,
    },
    Deriving {
        derivation: Derivation,
        frozen: Arc<dyn Originals>,
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
    /// Its table is the base's until the image is frozen, then right for every block that was asked
    /// for.
    scheduler: Scheduler<CachePresence>,
    /// Of other images, at home to blocks of views: what their caches lack is filled in from here.
    others: BTreeMap<ImageId, Scheduler<CachePresence>>,
    unit_pages: u64,
    drain: drain::Progress,
    ahead: Ahead,
    fetchers: Fetchers,
    fetched: Receiver<Told>,
    views: BTreeMap<ViewId, View>,
    commands: Receiver<Command>,
    bell: Bell,
    poller: Poller,
    pace: Pace,
    /// The beginning of the schedulers' time.
    began: Instant,
    events: EventSink,
    progress: Arc<Progress>,
    stopping: bool,
    buffer: Vec<u8>,
    faults: Vec<Fault>,
    /// Since when views wait for pages that have to be fetched.
    waiting: BTreeMap<(ViewId, PageIdx), Instant>,
    /// Views that were reported lost.
    lost: BTreeSet<ViewId>,
}

/// A view's VM touched a page that is missing there.
#[derive(Debug, Clone, Copy)]
struct Fault {
    view: ViewId,
    page: PageIdx,
    is_write: bool,
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
        let phase = match start.image.is_stored() {
            true => Phase::Sealed,
            false => Phase::Waiting { base_homes: start.base_homes },
        };
        let (done, fetched) = channel();
        let name = format!("fetch-{}", start.image.id());
        let fetchers = Fetchers::new(name, start.demand, done, start.bell.clone());
        Ok(Self {
            image: start.image,
            ancestors: start.ancestors,
            phase,
            scheduler,
            others: BTreeMap::new(),
            unit_pages: start.unit_pages,
            drain: drain::Progress::default(),
            ahead: Ahead::new(),
            fetchers,
            fetched,
            views: BTreeMap::new(),
            commands: start.commands,
            poller: Poller::new(&start.bell)?,
            bell: start.bell,
            pace: Pace::new(Instant::now()),
            began: Instant::now(),
            events: start.events,
            progress: start.progress,
            stopping: false,
            buffer: Vec::new(),
            faults: Vec::new(),
            waiting: BTreeMap::new(),
            lost: BTreeSet::new(),
        })
    }

    /// Until told to stop, and everything is done that others rely on.
    ///
    /// # Errors
    /// The kernel does not tell of faults any more.
    pub(super) fn run(mut self) -> io::Result<()> {
        let mut ready = Ready::default();
        while !self.may_end() {
            self.poller.wait(self.wait(), &mut ready)?;
            self.tell_time();
            if ready.commands {
                self.bell.silence();
                self.take_commands();
                self.take_fetched();
            }
            for id in &ready.broken {
                self.report_lost(*id, "what tells of its faults was tampered with".to_owned());
            }
            self.faults.clear();
            self.read_faults(&ready.views);
            self.serve_faults();
            if self.timeout().is_some_and(|wait| wait.is_zero()) {
                let began = Instant::now();
                self.background_step();
                self.pace.stepped(began, Instant::now());
                // What failed together is tried alone, for its waiters.
                self.fetch_demand();
            }
        }
        Ok(())
    }

    /// Whether the worker may end: it was asked to stop, and no view needs pages that are not
    /// drained yet.
    fn may_end(&self) -> bool {
        // The scheduler's presence is the second reference.
        let needed_by_others = self.drain.is_running() && Arc::strong_count(&self.image) > 2;
        self.stopping && !needed_by_others
    }

    /// How long until the background is due; `None`: there is none.
    fn timeout(&self) -> Option<Duration> {
        let wait = match self.phase {
            Phase::Deriving { .. } => Duration::ZERO,
            Phase::Sealed if self.drain.is_due() => Duration::ZERO,
            Phase::Sealed if self.drain.is_running() => return None,
            Phase::Sealed => self.prefetch_wait()?,
            Phase::Waiting { .. } | Phase::Failed { .. } => return None,
        };
        Some(wait.max(self.pace.wait(Instant::now())))
    }

    /// How long until something is to be done although nothing has happened.
    fn wait(&self) -> Option<Duration> {
        let late = self.schedulers().filter_map(Scheduler::late_at).min();
        let late = late.map(|at| at.saturating_sub(self.began.elapsed()));
        self.timeout().into_iter().chain(late).min()
    }

    fn schedulers(&self) -> impl Iterator<Item = &Scheduler<CachePresence>> {
        std::iter::once(&self.scheduler).chain(self.others.values())
    }

    fn tell_time(&mut self) {
        let now = self.began.elapsed();
        for scheduler in std::iter::once(&mut self.scheduler).chain(self.others.values_mut()) {
            scheduler.set_now(now);
        }
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
                Ok(Command::Predict) => self.predict(),
                Ok(Command::FetchFirst { runs }) => self.fetch_first(&runs),
                Ok(Command::Hydrate { bytes_per_s }) => self.hydrate(bytes_per_s),
                Ok(Command::AllowPrefetch { allow }) => self.ahead.is_allowed = allow,
                Ok(Command::PagesCame { image, range }) => self.pages_came(&image, range),
                Ok(Command::Panic) => panic!("injected"),
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
                Err(TryRecvError::Empty) => return,
            }
        }
    }

    fn begin(&mut self, frozen: Arc<dyn Originals>) {
        let Phase::Waiting { base_homes } = &self.phase else { return };
        let (base, homes) = (self.scheduler.table().clone(), base_homes.clone());
        let derivation = Derivation::new(self.image.id(), base, homes);
        self.image.set_frozen(Arc::clone(&frozen));
        self.phase = Phase::Deriving { derivation, frozen };
    }

    fn remove_view(&mut self, id: ViewId) -> Option<View> {
        // A fault that is still in flight (one of KVM's asynchronous ones, say) must not continue
        // where no engine answers.
        // Nor may it continue where it would find a hole. So the faults raised by now are answered
        // here.
        self.read_faults(&[id]);
        self.serve_faults();
        if let Some(view) = self.views.get(&id) {
            view.wake(PageRange::first(self.image.pages()));
        }
        self.lost.remove(&id);
        let view = self.views.remove(&id)?;
        self.poller.remove(view.faults_fd());
        self.scheduler.remove_view(id);
        self.waiting.retain(|(waits, _), _| *waits != id);
        self.others.retain(|home, scheduler| {
            scheduler.remove_view(id);
            self.views.values().any(|view| view.home(*home).is_some())
        });
        Some(view)
    }

    fn add_view(&mut self, id: ViewId, view: View) {
        let added = self.poller.add(id, view.faults_fd());
        // Faults that another engine read, and left, are raised again.
        view.wake(PageRange::first(self.image.pages()));
        self.views.insert(id, view);
        if let Phase::Failed { reason } = &self.phase {
            self.report_lost(id, reason.clone());
        }
        if let Err(error) = added {
            self.report_lost(id, format!("its faults can't be waited for: {error}"));
        }
    }

    fn read_faults(&mut self, ready: &[ViewId]) {
        for id in ready {
            let Some(view) = self.views.get(id) else { continue };
            let faults = &mut self.faults;
            if self.lost.contains(id) {
                continue;
            }
            let outcome = view.read_faults(|page, is_write| {
                faults.push(Fault { view: *id, page, is_write });
            });
            if let Err(error) = outcome {
                self.report_lost(*id, format!("its faults can't be read: {error}"));
            }
        }
    }

    /// A page can't be had. A reader that can be told of that goes on; else its view is lost.
    fn refuse(&mut self, view: ViewId, page: PageIdx, reason: String) {
        let told = self.views.get(&view).is_some_and(|it| it.refuse(page, &reason));
        if told {
            self.waiting.remove(&(view, page));
        } else {
            self.report_lost(view, reason);
        }
    }

    /// A view whose VM must not go on: its faults are answered no more. It stays until it is
    /// removed.
    fn report_lost(&mut self, view: ViewId, reason: String) {
        let Some(lost) = self.views.get(&view).filter(|_| self.lost.insert(view)) else { return };
        self.poller.remove(lost.faults_fd());
        lost.lost(&reason);
        self.scheduler.remove_view(view);
        self.waiting.retain(|(waits, _), _| *waits != view);
        for other in self.others.values_mut() {
            other.remove_view(view);
        }
        (self.events)(EngineEvent::ViewLost { image: self.image.id(), view, reason });
    }

    /// One bounded piece of background work.
    fn background_step(&mut self) {
        match &mut self.phase {
            Phase::Deriving { derivation, frozen } => {
                let outcome = derivation.step(&**frozen);
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
            Phase::Sealed if self.drain.is_running() => self.drain_step(),
            Phase::Sealed => self.prefetch_step(),
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
            } else if self.scheduler.background_done() {
                self.drain.on_copied(&self.image, self.scheduler.table());
            } else {
                // As much is in flight as is allowed.
                self.drain.is_held_up = true;
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
        for id in self.views.keys().copied().collect::<Vec<_>>() {
            self.report_lost(id, reason.clone());
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
    let mut config = Config {
        unit_pages,
        copy_unit_pages: (unit_pages / COPY_SHARE).max(1),
        image: Some(image.id()),
        ..Config::default()
    };
    if let Some(source) = image.source() {
        // What is read, and decompressed, as a whole is best used as a whole; of an ancestor's
        // pages, too, which then come from its store.
        config.unit_pages = source.unit_pages().clamp(1, 512);
        config.copy_unit_pages = config.unit_pages;
        config.background_fetches_max =
            source.reads_ahead().clamp(1, config.fetches_max.saturating_sub(1));
        if touches::are_recorded() {
            (config.unit_pages, config.copy_unit_pages) = (1, 1);
        }
    }
    Scheduler::new(table, CachePresence(Arc::clone(image)), config)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// Let go of originals. That may end what held them (the keeper of a VM that has ended), which
/// takes its time (it frees all of that VM's memory), for which no fault should wait.
fn end(frozen: Arc<dyn Originals>) {
    let ending = std::thread::Builder::new().name("originals-end".to_owned());
    if let Err(error) = ending.spawn(move || drop(frozen)) {
        tracing::debug!(%error, "no thread to end what held originals");
    }
}
