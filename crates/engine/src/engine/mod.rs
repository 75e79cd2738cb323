//! The page engine of one image: a handle, and the thread behind it.

mod derive;
mod drain;
mod fetchers;
mod pace;
mod poller;
mod worker;

use std::num::NonZeroU64;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use vmfork_image::{ImageId, PageRange, PageTable, Source};
use vmfork_policy::ViewId;

use self::fetchers::Demand;
use self::poller::Bell;
use crate::homes::Homes;
use crate::host_image::{Ancestors, HostImage, Reach};
use crate::originals::Originals;
use crate::view::View;

/// How long an engine may take to answer its owner. It answers between two faults.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// What can be set.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Pages brought in by one fault, the page with its neighbours: a power of two, 1 to 512. A
    /// quarter of that where they are copied from an ancestor. See docs/measurements/memory.md for
    /// how the default was measured.
    pub fill_unit_pages: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { fill_unit_pages: 16 }
    }
}

/// What an engine tells its owner, from its own thread.
#[derive(Debug, Clone)]
pub enum EngineEvent {
    /// The page table is complete.
    Sealed { image: ImageId },
    /// All frozen pages are in the cache; the process that they were frozen in is needed no more.
    Drained { image: ImageId },
    /// No source could serve a page that the view waits for, and its reader can't be told of one
    /// page alone. Its VM must be ended.
    ViewLost { image: ImageId, view: ViewId, reason: String },
    /// The engine has ended by a fault of its own. All its views must be ended.
    Died { image: ImageId, reason: String },
}

/// Where an engine's events go. Called on the engine's thread: must not block.
pub type EventSink = Arc<dyn Fn(EngineEvent) + Send + Sync>;

/// An engine can't do what its owner asks.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("image {image}: its page engine has ended")]
    Gone { image: ImageId },
    #[error("image {image}: its page engine has not answered within {} s", REPLY_TIMEOUT.as_secs())]
    Timeout { image: ImageId },
    #[error("image {image} has {pages} pages, the VM {vm_pages}")]
    Size { image: ImageId, pages: u64, vm_pages: u64 },
    #[error("image {image}: what the VM had written is not known yet")]
    NotSealed { image: ImageId },
    #[error("start a page engine")]
    Start(#[source] io::Error),
}

enum Command {
    /// The freeze is done: the pages lie aside there.
    Begin {
        frozen: Arc<dyn Originals>,
    },
    AddView {
        id: ViewId,
        view: View,
    },
    RemoveView {
        id: ViewId,
        /// Gets the view back. Whatever it maps of others' caches stays until that is dropped.
        view: SyncSender<View>,
    },
    /// Fetch what faults predict.
    Predict,
    /// Fetch these, in this order.
    FetchFirst {
        runs: Vec<PageRange>,
    },
    /// Fetch all that views may still need, at this rate.
    Hydrate {
        bytes_per_s: NonZeroU64,
    },
    AllowPrefetch {
        allow: bool,
    },
    /// Pages were put into the cache of an image from outside this engine.
    PagesCame {
        image: Arc<HostImage>,
        range: PageRange,
    },
    /// For tests of what a bug in the engine does to others.
    Panic,
    Stop,
}

/// The handle of an image's engine. Dropping it ends the engine, unless other images still need
/// pages that are not drained: then it goes on until they are.
pub struct Engine {
    reach: Arc<Reach>,
    commands: Mutex<Sender<Command>>,
    bell: Bell,
    progress: Arc<Progress>,
    demand: Arc<Demand>,
}

/// How far an engine has come; for waiters.
#[derive(Debug, Default)]
struct Progress {
    reached: Mutex<Reached>,
    changed: Condvar,
}

#[derive(Debug, Default, Clone, Copy)]
struct Reached {
    sealed: bool,
    drained: bool,
    ended: bool,
}

impl Progress {
    fn update(&self, change: impl FnOnce(&mut Reached)) {
        change(&mut self.reached.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn get(&self) -> Reached {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, timeout: Duration, until: impl Fn(Reached) -> bool) -> Reached {
        let reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        let (reached, _) = self
            .changed
            .wait_timeout_while(reached, timeout, |now| !until(*now) && !now.ended)
            .unwrap_or_else(PoisonError::into_inner);
        *reached
    }
}

impl Engine {
    /// Start the engine of a new image, to be frozen from a VM that began from `base` (or booted).
    /// It waits for [`Engine::begin`].
    ///
    /// # Errors
    /// `base` is not sealed yet ([`Engine::wait_sealed`]), has another size or an engine no more,
    /// or the host lacks memory, fds or threads.
    pub fn prepare(
        id: ImageId,
        pages: u64,
        base: Option<&Arc<HostImage>>,
        options: &EngineOptions,
        events: EventSink,
    ) -> Result<Self, EngineError> {
        let (base_table, base_homes, ancestors) = match base {
            None => {
                let table = PageTable::uniform(pages, Source::Zero);
                (table, Homes::none(pages), Ancestors::new())
            }
            Some(base) => {
                let (table, homes) = (base.table().zip(base.homes()))
                    .ok_or(EngineError::NotSealed { image: base.id() })?;
                if base.pages() != pages {
                    return Err(EngineError::Size {
                        image: base.id(),
                        pages: base.pages(),
                        vm_pages: pages,
                    });
                }
                let mut ancestors = base.ancestors();
                ancestors.insert(base.id(), Arc::clone(base));
                (table.clone(), homes.clone(), ancestors)
            }
        };
        let image = Arc::new(HostImage::new(id, pages).map_err(EngineError::Start)?);
        let engine = Self::start(image, (base_table, base_homes, ancestors), options, events)?;
        // Its ancestors, too, were kept until here.
        if let Some(base) = base.filter(|base| !base.has_engine()) {
            return Err(EngineError::Gone { image: base.id() });
        }
        Ok(engine)
    }

    /// Start an engine for a stored image ([`HostImage::stored`]). There may be one of it at a
    /// time.
    ///
    /// # Errors
    /// The image was frozen here, or has an engine; or the host lacks memory, fds or threads.
    pub fn serve(
        image: Arc<HostImage>,
        options: &EngineOptions,
        events: EventSink,
    ) -> Result<Self, EngineError> {
        let sealed = image.table().zip(image.homes()).filter(|_| image.is_stored());
        let (table, homes) = sealed.ok_or(EngineError::NotSealed { image: image.id() })?;
        let known = (table.clone(), homes.clone(), image.ancestors());
        let engine = Self::start(image, known, options, events)?;
        engine.progress.update(|reached| (reached.sealed, reached.drained) = (true, true));
        Ok(engine)
    }

    fn start(
        image: Arc<HostImage>,
        (base_table, base_homes, ancestors): (PageTable, Homes, Ancestors),
        options: &EngineOptions,
        events: EventSink,
    ) -> Result<Self, EngineError> {
        let id = image.id();
        let reach = Arc::new(Reach {
            image: Arc::clone(&image),
            base_table: base_table.clone(),
            base_homes: base_homes.clone(),
        });
        for needed in ancestors.values().chain([&image]) {
            needed.add_reach(&reach);
        }
        let bell = Bell::new().map_err(EngineError::Start)?;
        let (commands, inbox) = channel();
        let (progress, demand) = (Arc::new(Progress::default()), Arc::new(Demand::default()));
        let start = worker::Start {
            image: Arc::clone(&image),
            base_table,
            base_homes,
            ancestors,
            unit_pages: options.fill_unit_pages.clamp(1, 512).next_power_of_two(),
            commands: inbox,
            bell: bell.clone(),
            events: Arc::clone(&events),
            progress: Arc::clone(&progress),
            demand: Arc::clone(&demand),
        };
        let worker = worker::Worker::new(start).map_err(EngineError::Start)?;
        let (ended, weak) = (Arc::clone(&progress), Arc::downgrade(&image));
        std::thread::Builder::new()
            .name(format!("engine-{id}"))
            .spawn(move || {
                let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| worker.run()));
                ended.update(|reached| reached.ended = true);
                let reason = match outcome {
                    Ok(Ok(())) => {
                        if let Some(image) = weak.upgrade() {
                            image.retire();
                        }
                        return;
                    }
                    Ok(Err(error)) => format!("wait for faults: {error}"),
                    Err(panic) => panic_text(&*panic),
                };
                tracing::error!(image = %id, reason, "page engine died");
                events(EngineEvent::Died { image: id, reason });
            })
            .map_err(EngineError::Start)?;
        Ok(Self { reach, commands: Mutex::new(commands), bell, progress, demand })
    }

    /// From now on fetch ahead what faults predict: the rest of each segment of which enough was
    /// demanded ([`vmfork_policy::Segments`]). Of stored images only.
    pub fn predict(&self) {
        let _ended = self.send(Command::Predict);
    }

    /// Fetch in the background all that views may still need from a store, at most this many bytes
    /// per second.
    /// Pages that cannot be read now stay missing ([`HostImage::missing_pages`]).
    pub fn hydrate(&self, bytes_per_s: NonZeroU64) {
        let _ended = self.send(Command::Hydrate { bytes_per_s });
    }

    /// Fetch pages in this order before any other prefetch: a working set.
    /// Pages that are zero, present, or not the image's are left out.
    pub fn fetch_first(&self, runs: Vec<PageRange>) {
        let _ended = self.send(Command::FetchFirst { runs });
    }

    /// Whether anything is fetched before anyone asks: not while the host has no memory for it.
    pub fn allow_prefetch(&self, allow: bool) {
        let _ended = self.send(Command::AllowPrefetch { allow });
    }

    /// Put pages, with their bytes by the image's table, where its views look for them; those that
    /// are zero, or there, are left out. May be called from any thread, also before there is a
    /// view. → how many pages came.
    ///
    /// # Errors
    /// The host is out of memory.
    pub fn insert(&self, range: PageRange, bytes: &[u8]) -> io::Result<u64> {
        self.put(range, range, bytes, |image, run, _| {
            image.counters.prefetched_bytes.add(run.byte_len());
        })
    }

    /// The same with pages of image `owner`, which another host sent though no VM here had asked
    /// for them.
    /// Pages that belong to another image by the engine's table are left out.
    ///
    /// # Errors
    /// As [`Engine::insert`].
    pub fn insert_from_peer(
        &self,
        owner: ImageId,
        range: PageRange,
        bytes: &[u8],
    ) -> io::Result<u64> {
        let Some(table) = self.image().table() else { return Ok(0) };
        let owned = self.image().with_ancestors().into_iter().find(|image| image.id() == owner);
        let Some(owned) = owned else { return Ok(0) };
        let runs = table.runs(range.intersect(&table.range()));
        let mut came = 0;
        for (run, _) in runs.filter(|(_, source)| *source == Source::Image(owner)) {
            came += self.put(run, range, bytes, |image, run, part| {
                let len = run.byte_len();
                image.counters.prefetched_bytes.add(len);
                image.counters.from_peer_bytes.add(len);
                image.counters.from_peer_ahead_bytes.add(len);
                // All that descends from it finds it there, also when the other host is asked no
                // more.
                if image.id() != owner {
                    owned.keep(run, part);
                }
            })?;
        }
        Ok(came)
    }

    /// Of `range`, which has these bytes, the pages of `part`. `each` is told of what came, and
    /// into whose cache.
    fn put(
        &self,
        part: PageRange,
        range: PageRange,
        bytes: &[u8],
        each: impl Fn(&HostImage, PageRange, &[u8]),
    ) -> io::Result<u64> {
        let mut came = 0;
        for (image, run) in self.image().places(part) {
            let from = usize::try_from(run.byte_offset() - range.byte_offset());
            let len = usize::try_from(run.byte_len());
            let part = from.ok().zip(len.ok()).and_then(|(from, len)| bytes.get(from..from + len));
            let part = part.ok_or(io::ErrorKind::InvalidInput)?;
            image.cache().write(run, part)?;
            image.cache().presence().set(run);
            each(&image, run, part);
            came += run.len();
            let _ended = self.send(Command::PagesCame { image, range: run });
        }
        Ok(came)
    }

    /// Wait until nothing is being fetched that a view waits for, for who would get in the way of
    /// that. → whether nothing is.
    pub fn wait_for_demand(&self, timeout: Duration) -> bool {
        self.demand.wait(timeout)
    }

    pub fn image(&self) -> &Arc<HostImage> {
        &self.reach.image
    }

    /// Wait until the page table is complete. → whether it is.
    pub fn wait_sealed(&self, timeout: Duration) -> bool {
        self.progress.wait(timeout, |reached| reached.sealed).sealed
    }

    /// Wait until all frozen pages are in the cache. → whether they are.
    pub fn wait_drained(&self, timeout: Duration) -> bool {
        self.progress.wait(timeout, |reached| reached.drained).drained
    }

    pub fn is_drained(&self) -> bool {
        self.progress.get().drained
    }

    /// Whether the thread has ended, which it does by itself only if it failed.
    pub fn has_ended(&self) -> bool {
        self.progress.get().ended
    }

    /// Make the engine's thread panic, to test what others see then.
    pub fn inject_panic(&self) {
        let _sent = self.send(Command::Panic);
    }

    /// The freeze is done: the image's own pages, and what else its VM changed, are in `frozen`.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn begin(&self, frozen: Arc<dyn Originals>) -> Result<(), EngineError> {
        self.send(Command::Begin { frozen })
    }

    /// Answer a view's faults from now on. `id` is new: [`next_view_id`].
    ///
    /// # Errors
    /// The engine has ended.
    pub fn add_view(&self, id: ViewId, view: View) -> Result<(), EngineError> {
        self.send(Command::AddView { id, view })
    }

    /// The engine does not serve the view's faults any more, from the return of this on.
    /// → the view, for as long as what it maps must stay.
    ///
    /// # Errors
    /// The engine has ended, or does not answer.
    pub fn remove_view(&self, id: ViewId) -> Result<View, EngineError> {
        let (view, wait): (_, Receiver<View>) = sync_channel(1);
        self.send(Command::RemoveView { id, view })?;
        let image = self.image().id();
        wait.recv_timeout(REPLY_TIMEOUT).map_err(|error| match error {
            RecvTimeoutError::Timeout => EngineError::Timeout { image },
            RecvTimeoutError::Disconnected => EngineError::Gone { image },
        })
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send(command)
            .map_err(|_| EngineError::Gone { image: self.image().id() })?;
        self.bell.ring();
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _sent = self.send(Command::Stop);
        if self.has_ended() {
            self.image().retire();
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("image", &self.image().id())
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Numbers for views, unique in this process.
pub fn next_view_id() -> ViewId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    ViewId(NEXT.fetch_add(1, Ordering::Relaxed))
}
