//! The thread behind an engine: reads faults, carries out answers, and works through the background in between.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use vmfork_image::{BlockIdx, PageIdx, PageRange, PageTable, Source};

use super::answer::{Answer, Sight};
use super::derive::Derivation;
use super::drain::{Drain, fill};
use super::{Command, EngineEvent, EngineOptions, EventSink, Progress};
use crate::frozen::FrozenRange;
use crate::host_image::{Ancestors, HostImage, PageLost};
use crate::view::{View, ViewId, ZeroInstall};

/// Where commands come from.
pub(super) struct Inbox {
    pub(super) commands: Receiver<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

enum Phase {
    /// Not frozen yet.
    Waiting {
        base: PageTable,
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
    ancestors: Ancestors,
    phase: Phase,
    drain: Drain,
    views: BTreeMap<ViewId, View>,
    unit_pages: u64,
    inbox: Inbox,
    events: EventSink,
    progress: Arc<Progress>,
    stopping: bool,
    /// How long the background rests before its next step: as long as the last one took.
    rest: Duration,
    buffer: Vec<u8>,
    faults: Vec<u64>,
}

impl Worker {
    pub(super) fn new(
        image: Arc<HostImage>,
        base: PageTable,
        ancestors: Ancestors,
        options: &EngineOptions,
        inbox: Inbox,
        events: EventSink,
        progress: Arc<Progress>,
    ) -> Self {
        Self {
            image,
            ancestors,
            phase: Phase::Waiting { base },
            drain: Drain::default(),
            views: BTreeMap::new(),
            unit_pages: options.fill_unit_pages.clamp(1, 512).next_power_of_two(),
            inbox,
            events,
            progress,
            stopping: false,
            rest: Duration::ZERO,
            buffer: Vec::new(),
            faults: Vec::new(),
        }
    }

    /// Until told to stop, and everything is done that others rely on.
    pub(super) fn run(mut self) {
        while !self.may_end() {
            self.wait();
            self.take_commands();
            let served = self.serve_faults();
            if !served {
                self.background_step();
            }
        }
    }

    /// Told to stop, no view left, and nobody needs pages that are not drained yet.
    fn may_end(&self) -> bool {
        let needed_by_others = matches!(self.phase, Phase::Sealed)
            && !self.drain.is_complete()
            && Arc::strong_count(&self.image) > 1;
        self.stopping && !needed_by_others
    }

    fn has_background(&self) -> bool {
        match self.phase {
            Phase::Deriving { .. } => true,
            Phase::Sealed => !self.drain.is_complete(),
            Phase::Waiting { .. } | Phase::Failed { .. } => false,
        }
    }

    /// Sleep until a fault or a command comes, or the background's rest is over.
    fn wait(&self) {
        let timeout = self
            .has_background()
            .then(|| Timespec { tv_sec: 0, tv_nsec: i64::from(self.rest.subsec_nanos()) });
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.views.len() + 1);
        fds.push(PollFd::from_borrowed_fd(self.inbox.wake.as_fd(), PollFlags::IN));
        for view in self.views.values() {
            fds.push(PollFd::from_borrowed_fd(view.uffd.as_fd(), PollFlags::IN));
        }
        if let Err(errno) = rustix::event::poll(&mut fds, timeout.as_ref())
            && errno != rustix::io::Errno::INTR
        {
            tracing::error!(%errno, "page engine: poll");
        }
    }

    fn take_commands(&mut self) {
        let mut count = [0; 8];
        let _drained = rustix::io::read(&*self.inbox.wake, &mut count);
        loop {
            match self.inbox.commands.try_recv() {
                Ok(Command::Begin { frozen }) => self.begin(frozen),
                Ok(Command::AddView { id, view }) => {
                    if let Phase::Failed { reason } = &self.phase {
                        self.report_lost(id, reason.clone());
                    }
                    self.views.insert(id, view);
                }
                Ok(Command::RemoveView { id, done }) => {
                    self.views.remove(&id);
                    let _waited_for = done.send(());
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
        let Phase::Waiting { base } = &self.phase else { return };
        let derivation = Derivation::new(self.image.id(), base.clone());
        let frozen = Arc::new(frozen);
        self.image.set_frozen(Some(Arc::clone(&frozen)));
        self.phase = Phase::Deriving { derivation, frozen };
    }

    /// → whether there were any.
    fn serve_faults(&mut self) -> bool {
        let ids: Vec<ViewId> = self.views.keys().copied().collect();
        let mut served = false;
        for id in ids {
            let mut faults = std::mem::take(&mut self.faults);
            faults.clear();
            if let Some(view) = self.views.get(&id)
                && let Err(error) = view.uffd.read_faults(&mut faults)
            {
                tracing::error!(?id, %error, "page engine: read faults");
            }
            for address in &faults {
                served = true;
                if let Some(page) = self.views.get(&id).and_then(|view| view.page_at(*address))
                    && let Err(lost) = self.serve(id, page)
                {
                    self.report_lost(id, lost.to_string());
                }
            }
            self.faults = faults;
        }
        served
    }

    fn report_lost(&self, view: ViewId, reason: String) {
        (self.events)(EngineEvent::ViewLost { image: self.image.id(), view, reason });
    }

    fn serve(&mut self, id: ViewId, page: PageIdx) -> Result<(), PageLost> {
        self.know(page.block())?;
        let Some(view) = self.views.get(&id) else { return Ok(()) };
        match self.decide(view, page) {
            Answer::Wake => {
                let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
                view.touch(page.block());
                view.counters.present.add(1);
                view.wake(page.range());
                Ok(())
            }
            Answer::Zeros(range) => self.install_zeros(id, page, range),
            Answer::MapZeros(range) => {
                if self.map_run(id, page, range, None) {
                    return Ok(());
                }
                self.install_zeros(id, page, page.range())
            }
            Answer::MapCache(ancestor, range) => {
                let ancestor = self.ancestors.get(&ancestor).cloned();
                if ancestor.is_some() && self.map_run(id, page, range, ancestor.as_ref()) {
                    return Ok(());
                }
                self.fetch(id, page)
            }
            Answer::Fetch => self.fetch(id, page),
        }
    }

    /// Make sure that the table is right for a block.
    fn know(&mut self, block: BlockIdx) -> Result<(), PageLost> {
        let outcome = match &mut self.phase {
            Phase::Sealed => return Ok(()),
            Phase::Deriving { derivation, frozen } => derivation.ensure(block, frozen),
            Phase::Waiting { .. } => Err(std::io::Error::other("the image is not frozen yet")),
            Phase::Failed { reason } => Err(std::io::Error::other(reason.clone())),
        };
        outcome.map_err(|error| PageLost {
            page: block.first_page().unwrap_or(PageIdx(0)),
            image: self.image.id(),
            reason: format!("what the VM had written can't be told: {error}"),
        })
    }

    fn table(&self) -> Option<&PageTable> {
        match &self.phase {
            Phase::Deriving { derivation, .. } => Some(derivation.table()),
            Phase::Sealed => self.image.table(),
            Phase::Waiting { .. } | Phase::Failed { .. } => None,
        }
    }

    fn decide(&self, view: &View, page: PageIdx) -> Answer {
        let Some(table) = self.table() else { return Answer::Fetch };
        Sight {
            table,
            presence: self.image.cache().presence(),
            ancestors: &self.ancestors,
            is_known: &|block| match &self.phase {
                Phase::Deriving { derivation, .. } => derivation.is_known(block),
                _ => true,
            },
            state: &|block| view.block(block),
            may_map: view.may_map(),
        }
        .decide(page)
    }

    fn install_zeros(
        &mut self,
        id: ViewId,
        page: PageIdx,
        range: PageRange,
    ) -> Result<(), PageLost> {
        let Some(view) = self.views.get_mut(&id) else { return Ok(()) };
        match view.install_zeros(range) {
            ZeroInstall::Done => {
                view.counters.zero.add(1);
                Ok(())
            }
            ZeroInstall::Gone => {
                // Either the VM has ended, which its owner notices by itself, or its address space changes
                // without end.
                tracing::debug!(?id, %page, "zero page refused");
                view.wake(range);
                Ok(())
            }
        }
    }

    /// Map a run of blocks, or at least the one that `page` is in. → whether that was done.
    fn map_run(
        &mut self,
        id: ViewId,
        page: PageIdx,
        range: PageRange,
        ancestor: Option<&Arc<HostImage>>,
    ) -> bool {
        let Some(view) = self.views.get_mut(&id) else { return true };
        let alone = page.block().pages();
        let mapped = view.map_run(range, ancestor)
            || alone.is_some_and(|alone| alone != range && view.map_run(alone, ancestor));
        if mapped {
            view.counters.mapped.add(1);
        } else {
            view.touch(page.block());
        }
        mapped
    }

    /// Bring a page into the cache, with those of its neighbours that are absent and of the same owner.
    fn fetch(&mut self, id: ViewId, page: PageIdx) -> Result<(), PageLost> {
        let lost =
            |reason: &str| PageLost { page, image: self.image.id(), reason: reason.to_owned() };
        let table = self.table().ok_or_else(|| lost("no page table"))?;
        let first = page.0 / self.unit_pages * self.unit_pages;
        let end = (first + self.unit_pages).min(table.pages());
        let (run, source) = table.run_at(page, PageRange::between(PageIdx(first), PageIdx(end)));
        let Source::Image(owner) = source else {
            return self.install_zeros(id, page, page.range());
        };
        let owner = if owner == self.image.id() {
            Arc::clone(&self.image)
        } else {
            Arc::clone(
                self.ancestors.get(&owner).ok_or_else(|| lost("its owner is not on this host"))?,
            )
        };
        let range = self.absent_around(page, run);
        if !range.is_empty() {
            fill(&self.image, &owner, range, &mut self.buffer)?;
            self.image.counters.demand_bytes.add(range.byte_len());
        }
        if let Some(view) = self.views.get_mut(&id) {
            view.touch(page.block());
            view.counters.fetch.add(1);
            view.wake(if range.is_empty() { page.range() } else { range });
        }
        Ok(())
    }

    /// The absent pages around `page` within `run`.
    fn absent_around(&self, page: PageIdx, run: PageRange) -> PageRange {
        let presence = self.image.cache().presence();
        let (after, present) = presence.run(run.from_page(page));
        if present {
            return PageRange::between(page, page);
        }
        let mut first = page.0;
        while first > run.start().0 && !presence.is_present(PageIdx(first - 1)) {
            first -= 1;
        }
        PageRange::between(PageIdx(first), after.end())
    }

    /// One bounded piece of what nobody waits for.
    fn background_step(&mut self) {
        if !self.has_background() {
            return;
        }
        let began = Instant::now();
        match &mut self.phase {
            Phase::Deriving { derivation, frozen } => {
                let outcome = derivation.step(frozen);
                let complete = derivation.is_complete();
                match outcome {
                    Ok(()) if complete => self.seal(),
                    Ok(()) => {}
                    Err(error) => {
                        self.fail(format!("what the VM had written can't be told: {error}"))
                    }
                }
            }
            Phase::Sealed => match self.drain.step(&self.image, &mut self.buffer) {
                Ok(()) if self.drain.is_complete() => {
                    self.progress.update(|reached| reached.drained = true);
                    (self.events)(EngineEvent::Drained { image: self.image.id() });
                }
                Ok(()) => {}
                Err(lost) => self.fail(lost.to_string()),
            },
            Phase::Waiting { .. } | Phase::Failed { .. } => {}
        }
        self.rest = began.elapsed().min(Duration::from_millis(5));
    }

    fn seal(&mut self) {
        let failed = Phase::Failed { reason: String::new() };
        let Phase::Deriving { derivation, .. } = std::mem::replace(&mut self.phase, failed) else {
            return;
        };
        let spent = u64::try_from(derivation.spent.as_micros()).unwrap_or(u64::MAX);
        self.image.counters.derive_us.add(spent);
        let table = derivation.into_table();
        self.image.counters.frozen_pages.add(table.owners().get(self.image.id()));
        self.image.seal(table, std::mem::take(&mut self.ancestors));
        self.ancestors =
            self.image.sealed().map(|sealed| sealed.ancestors.clone()).unwrap_or_default();
        self.phase = Phase::Sealed;
        self.progress.update(|reached| reached.sealed = true);
        (self.events)(EngineEvent::Sealed { image: self.image.id() });
    }

    /// Pages of this image can't be had any more: all views will sooner or later touch one.
    fn fail(&mut self, reason: String) {
        tracing::error!(image = %self.image.id(), reason, "image lost");
        for id in self.views.keys() {
            self.report_lost(*id, reason.clone());
        }
        self.phase = Phase::Failed { reason };
    }
}
