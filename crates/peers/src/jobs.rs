//! Jobs of an engine that holds nodes for clones: a job lasts as long as a host needs it, and its
//! clones no longer than it.
//!
//! ```text
//!   the host that forks                                    hosts of its clones
//!   Allocator::hold ─► Jobs ◄── with every heartbeat: jobs that VMs there are of
//!      released when no ticket, no fork and no VM needs it any more
//!      ended by the site ─────── with every heartbeat: which, and why ──► their VMs end
//! ```
//!
//! Takes over what an earlier life of this daemon left, and what an engine granted without
//! reporting it in time.
//! It is given back if no host names it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use vmfork_cluster::allocate::{Allocator, Ask, BuiltIn, Held, HostView};
use vmfork_cluster::slurm::{self, Slurm};
use vmfork_cluster::{HostId, Liveness};

use super::error::PlanError;
use super::hosts::Hosts;
use super::pace::Pace;
use vmfork_fork::Hold;
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::vm::{End, Job};

/// How long a job is kept that no host names. Hosts name what they need every second.
const UNNEEDED_FOR: Duration = Duration::from_secs(5);
/// The same for what an earlier life left: until all hosts have found this one again.
const ADOPTED_FOR: Duration = Duration::from_secs(30);
/// How often the engine is asked whether a job still holds its nodes, and, while it does not
/// answer, for the jobs that an earlier life left.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long the other hosts are notified that a job has ended: longer than any order to start its
/// clones takes.
const TOLD_FOR: Duration = Duration::from_secs(2 * 3600);
/// How long who leaves the cluster tries to give back what it has, and how long it waits for that.
const LEAVE_FOR: Duration = Duration::from_secs(600);
const LEAVE_WAIT: Duration = Duration::from_secs(5);

/// What hosts tell each other of jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JobNews {
    /// Of which VMs are at the sender.
    needs: Vec<Job>,
    /// Jobs of the sender that have ended, each with why.
    ended: Vec<(String, String)>,
}

#[derive(Debug)]
struct Own {
    needed_by: Weak<Held>,
    hosts: Option<BTreeSet<HostId>>,
    needed_until: Instant,
    is_being_released: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Of the wait for hosts that an earlier life knew.
    pace: Pace,
    /// Of this host.
    own: BTreeMap<String, Own>,
    /// Those of them that VMs of other hosts are of.
    needed: HashMap<HostId, BTreeSet<String>>,
    /// Those that the engine has ended.
    ended: BTreeMap<String, (Instant, String)>,
    /// Of which VMs are here.
    here: BTreeSet<Job>,
    /// Those whose VMs have to go, with why.
    over: BTreeMap<Job, String>,
    /// How many the engine is being asked for.
    asking: u32,
    /// A search for jobs that this host does not know is in progress.
    is_looking: bool,
    /// There may be more than is found now.
    look_again: bool,
    /// This host is in no cluster any more.
    has_left: bool,
}

/// The engine is being asked for a job.
struct Asking<'a>(&'a Jobs);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.state().asking -= 1;
    }
}

/// The jobs that a member knows.
pub(super) struct Jobs {
    /// This host.
    own: HostId,
    /// Says which hosts clones may have.
    allocator: Arc<dyn Allocator>,
    state: Mutex<State>,
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").finish_non_exhaustive()
    }
}

impl Jobs {
    pub(super) fn new(own: HostId, allocator: Arc<dyn Allocator>, pace: Pace) -> Arc<Self> {
        let state = State { pace, ..State::default() };
        Arc::new(Self { own, allocator, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self) -> Asking<'_> {
        self.state().asking += 1;
        Asking(self)
    }

    /// What to tell the others.
    pub(super) fn news(&self) -> JobNews {
        let state = self.state();
        let ended = state.ended.iter().map(|(id, (_, why))| (id.clone(), why.clone()));
        JobNews { needs: state.here.iter().cloned().collect(), ended: ended.collect() }
    }

    /// Another host has told.
    pub(super) fn heard(&self, from: HostId, news: &JobNews) {
        let mut state = self.state();
        let ours =
            news.needs.iter().filter(|job| job.host == self.own.get()).map(|job| job.id.clone());
        let ours: BTreeSet<String> = ours.collect();
        match ours.is_empty() {
            true => state.needed.remove(&from),
            false => state.needed.insert(from, ours),
        };
        for (id, why) in &news.ended {
            let job = Job { host: from.get(), id: id.clone() };
            if state.here.contains(&job) {
                state.over.insert(job, why.clone());
            }
        }
    }
}

impl State {
    fn begin(&mut self, now: Instant, held: &Arc<Held>) {
        let own = Own {
            needed_by: Arc::downgrade(held),
            hosts: Some(held.places.keys().copied().collect()),
            needed_until: now + UNNEEDED_FOR,
            is_being_released: false,
        };
        self.own.insert(held.job.clone(), own);
    }

    /// Whether what the engine lists now can be told from what is just being granted.
    fn may_look(&mut self) -> bool {
        self.look_again = false;
        self.asking == 0
    }

    /// Adopts jobs that the engine has and this host does not know. → those that are new.
    /// `None`: look again, because a job that is just being granted may be among them.
    fn adopt(&mut self, now: Instant, jobs: BTreeSet<String>) -> Option<Vec<String>> {
        if self.asking > 0 || self.look_again {
            return None;
        }
        self.is_looking = false;
        let new = |id: &String| !self.own.contains_key(id) && !self.ended.contains_key(id);
        let new: Vec<String> = jobs.into_iter().filter(new).collect();
        for id in &new {
            let needed_until = now + self.pace.of(ADOPTED_FOR);
            let (needed_by, hosts) = (Weak::new(), None);
            let own = Own { needed_by, hosts, needed_until, is_being_released: false };
            self.own.insert(id.clone(), own);
        }
        Some(new)
    }

    /// The engine has ended it.
    fn ended(&mut self, now: Instant, host: HostId, id: &str, why: String) {
        if self.own.remove(id).is_some_and(|own| !own.is_being_released) {
            self.over.insert(Job { host: host.get(), id: id.to_owned() }, why.clone());
            self.ended.insert(id.to_owned(), (now, why));
        }
    }

    /// Look who needs what. → jobs to give back. Of `others`, those that are silent may need what
    /// they do not say; what those have said does not count that are gone.
    fn tend(
        &mut self,
        now: Instant,
        here: BTreeSet<Job>,
        own: HostId,
        others: &BTreeMap<HostId, Liveness>,
    ) -> Vec<String> {
        let is = |host: &HostId| others.get(host).copied().unwrap_or(Liveness::Gone);
        let unsure: BTreeSet<HostId> =
            others.keys().filter(|host| is(host) == Liveness::Suspect).copied().collect();
        self.needed.retain(|host, _| is(host) != Liveness::Gone);
        self.here = here;
        self.ended.retain(|_, (at, _)| now.saturating_duration_since(*at) < TOLD_FOR);
        let Self { own: jobs, here, needed, ended, over, .. } = self;
        // Those that have come since, too.
        for job in here.iter().filter(|job| job.host == own.get()) {
            if let Some((_, why)) = ended.get(&job.id) {
                over.insert(job.clone(), why.clone());
            }
        }
        let mut unneeded = Vec::new();
        for (id, job) in jobs.iter_mut().filter(|(_, job)| !job.is_being_released) {
            let is_there = needed.values().any(|needed| needed.contains(id));
            let is_here = here.contains(&Job { host: own.get(), id: id.clone() });
            let may_be = match &job.hosts {
                Some(hosts) => !hosts.is_disjoint(&unsure),
                None => !unsure.is_empty(),
            };
            if job.needed_by.strong_count() > 0 || is_there || is_here || may_be {
                job.needed_until = job.needed_until.max(now + UNNEEDED_FOR);
            } else if now >= job.needed_until {
                job.is_being_released = true;
                unneeded.push(id.clone());
            }
        }
        unneeded
    }

    /// A job was given back, or could not be: then that is tried again.
    fn released(&mut self, now: Instant, id: &str, is_gone: bool) {
        if is_gone {
            self.own.remove(id);
        } else if let Some(own) = self.own.get_mut(id) {
            (own.is_being_released, own.needed_until) = (false, now + LOOK_EVERY);
        }
    }
}

/// Who says which hosts clones may have, by the daemon's settings.
pub(super) fn allocator(slurm: Option<slurm::Settings>, own: HostId) -> Arc<dyn Allocator> {
    match slurm {
        Some(settings) => Arc::new(Slurm::new(own, settings)),
        None => Arc::new(BuiltIn),
    }
}

impl Jobs {
    /// Have an engine hold nodes for clones, if there is one: as long as they are needed. `views`:
    /// the hosts that may be asked.
    ///
    /// # Errors
    /// It has none, or can't be asked.
    pub(crate) async fn hold(
        self: &Arc<Self>,
        ask: &Ask,
        views: &[HostView],
    ) -> Result<Option<Hold>, PlanError> {
        // In a task of its own, so that a job granted to a client that has disconnected is given
        // back as any other.
        let (jobs, ask, views) = (Arc::clone(self), ask.clone(), views.to_vec());
        let task = tokio::spawn(async move {
            let _asking = jobs.ask();
            let held = jobs.allocator.hold(&ask, &views).await;
            held.map(|held| held.map(|held| jobs.begin(held))).map_err(|error| {
                // It may have been granted all the same, and not been given back.
                jobs.look();
                error.into()
            })
        });
        task.await?
    }

    fn begin(self: &Arc<Self>, held: Held) -> Hold {
        let held = Arc::new(held);
        let has_left = {
            let mut state = self.state();
            state.begin(Instant::now(), &held);
            state.has_left
        };
        match has_left {
            true => drop(self.release_for_good(held.job.clone())),
            false => self.watch(held.job.clone()),
        }
        tracing::info!(job = held.job, hosts = held.places.len(), "a job holds nodes");
        Hold { job: Job { host: self.own.get(), id: held.job.clone() }, held }
    }

    /// Takes over the engine's jobs for this host that are not known here, also those of an earlier
    /// life of this daemon.
    pub(super) fn look(self: &Arc<Self>) {
        {
            let mut state = self.state();
            state.look_again = true;
            if std::mem::replace(&mut state.is_looking, true) {
                return;
            }
        }
        let jobs = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                let Some(jobs) = jobs.upgrade() else { return };
                if jobs.look_once().await {
                    return;
                }
                drop(jobs);
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
    }

    /// → whether that was enough.
    async fn look_once(self: &Arc<Self>) -> bool {
        if !self.state().may_look() {
            return false;
        }
        let listed = match self.allocator.jobs().await {
            Ok(listed) => listed,
            Err(error) => {
                tracing::warn!("jobs that are left: {}", chain(&error));
                return false;
            }
        };
        let Some(adopted) = self.state().adopt(Instant::now(), listed) else { return false };
        for job in adopted {
            tracing::info!(job, "a job that nobody here knows is taken over");
            self.watch(job);
        }
        true
    }

    /// Notice when the engine ends a job.
    fn watch(self: &Arc<Self>, job: String) {
        let jobs = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let Some(jobs) = jobs.upgrade() else { return };
                if !jobs.state().own.contains_key(&job) {
                    return;
                }
                match jobs.allocator.ended(&job).await {
                    Ok(None) => {}
                    Ok(Some(why)) => {
                        jobs.state().ended(Instant::now(), jobs.own, &job, why);
                        return;
                    }
                    // Who does not answer ends nothing.
                    Err(error) => tracing::debug!(job, "{}", chain(&error)),
                }
            }
        });
    }

    /// Ends VMs whose job is over, and gives back jobs that no host needs.
    pub(super) fn tend(self: &Arc<Self>, core: &Arc<Core>, hosts: &Hosts) {
        let live = core.registry.live();
        let here = live.iter().filter_map(|vm| vm.identity.job.clone()).collect();
        let (now, own) = (hosts.now(), self.own);
        let others = hosts.roster.read(|book| {
            let others = book.members().map(|entry| entry.id).filter(|id| *id != own);
            others.map(|id| (id, book.liveness(id, now))).collect()
        });
        let (unneeded, over) = {
            let mut state = self.state();
            let unneeded = state.tend(Instant::now(), here, own, &others);
            (unneeded, std::mem::take(&mut state.over))
        };
        for vm in live {
            let why = vm.identity.job.as_ref().and_then(|job| over.get(job));
            if let Some(why) = why {
                core.end(&vm, End::killed(why.clone()));
            }
        }
        for job in unneeded {
            let jobs = Arc::clone(self);
            tokio::spawn(async move {
                let released = jobs.allocator.release(&job).await;
                jobs.state().released(Instant::now(), &job, released.is_ok());
                match released {
                    Ok(()) => tracing::info!(job, "given back: nobody needs it"),
                    Err(error) => tracing::warn!(job, "give it back: {}", chain(&error)),
                }
            });
        }
    }

    /// This host is in no cluster any more: it holds nothing. What can't be given back at once is
    /// tried again for a while.
    pub(super) async fn release_all(&self) {
        let jobs: Vec<String> = {
            let mut state = self.state();
            state.has_left = true;
            state.own.keys().cloned().collect()
        };
        let released = jobs.into_iter().map(|job| self.release_for_good(job));
        let _the_rest_goes_on = tokio::time::timeout(LEAVE_WAIT, join_all(released)).await;
    }

    fn release_for_good(&self, job: String) -> JoinHandle<()> {
        let (allocator, until) = (Arc::clone(&self.allocator), Instant::now() + LEAVE_FOR);
        tokio::spawn(async move {
            while let Err(error) = allocator.release(&job).await {
                tracing::warn!(job, "give it back: {}", chain(&error));
                if Instant::now() >= until {
                    return;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        })
    }
}

#[cfg(test)]
mod tests;
