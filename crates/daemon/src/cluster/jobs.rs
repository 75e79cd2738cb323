//! Jobs of an engine that holds nodes for clones: a job lasts as long as somebody needs it, and its clones no longer than it.
//!
//! ```text
//!   the host that forks                                    hosts of its clones
//!   Allocator::hold ─► Jobs ◄── with every heartbeat: jobs that VMs there are of
//!      released when no ticket, no fork and no VM needs it any more
//!      ended by the site ─────── with every heartbeat: which, and why ──► their VMs end
//! ```
//!
//! What an earlier life of this daemon left is taken over, and is given back if nobody names it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_cluster::allocate::{AllocateError, Allocator, Ask, BuiltIn, Held, HostView};
use vmfork_cluster::slurm::Slurm;
use vmfork_cluster::{HostId, Liveness};

use super::Cluster;
use super::member::Member;
use crate::hub::{Core, chain};
use crate::vm::End;

/// How long a job is kept that nobody seems to need: hosts name what they need every second.
const UNNEEDED_FOR: Duration = Duration::from_secs(5);
/// The same for what an earlier life left: until all hosts have found this one again.
const ADOPTED_FOR: Duration = Duration::from_secs(30);
/// How often the engine is asked whether a job still holds its nodes, and, while it does not answer, for the jobs that an
/// earlier life left.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long the others are told that a job has ended: longer than any order to start its clones takes.
const TOLD_FOR: Duration = Duration::from_secs(2 * 3600);

/// A job, and the host whose daemon got it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Job {
    pub host: u64,
    /// The engine's name for it.
    pub id: String,
}

/// Somebody needs a job, as long as this lives.
#[derive(Debug, Clone)]
pub(crate) struct Hold {
    pub(crate) job: Job,
    /// How many clones each host may have.
    pub(crate) held: Arc<Held>,
}

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
}

/// The jobs that a member knows.
#[derive(Default)]
pub(super) struct Jobs(Mutex<State>);

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").finish_non_exhaustive()
    }
}

impl Jobs {
    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to tell the others.
    pub(super) fn news(&self) -> JobNews {
        let state = self.state();
        let ended = state.ended.iter().map(|(id, (_, why))| (id.clone(), why.clone()));
        JobNews { needs: state.here.iter().cloned().collect(), ended: ended.collect() }
    }

    /// Another host has told.
    pub(super) fn heard(&self, own: HostId, from: HostId, news: &JobNews) {
        let mut state = self.state();
        let ours = news.needs.iter().filter(|job| job.host == own.get()).map(|job| job.id.clone());
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

    /// What an earlier life left, unless it is this one's. → those that are new.
    fn adopt(&mut self, now: Instant, jobs: BTreeSet<String>) -> Vec<String> {
        let new = |id: &String| !self.own.contains_key(id) && !self.ended.contains_key(id);
        let new: Vec<String> = jobs.into_iter().filter(new).collect();
        for id in &new {
            let needed_until = now + ADOPTED_FOR;
            let (needed_by, hosts) = (Weak::new(), None);
            let own = Own { needed_by, hosts, needed_until, is_being_released: false };
            self.own.insert(id.clone(), own);
        }
        new
    }

    /// The engine has ended it.
    fn ended(&mut self, now: Instant, host: HostId, id: &str, why: String) {
        if self.own.remove(id).is_some_and(|own| !own.is_being_released) {
            self.over.insert(Job { host: host.get(), id: id.to_owned() }, why.clone());
            self.ended.insert(id.to_owned(), (now, why));
        }
    }

    /// Look who needs what. → jobs to give back. `unsure`: hosts that are silent, and may need what they do not say.
    fn tend(
        &mut self,
        now: Instant,
        here: BTreeSet<Job>,
        own: HostId,
        unsure: &BTreeSet<HostId>,
    ) -> Vec<String> {
        self.here = here;
        self.ended.retain(|_, (at, _)| now.saturating_duration_since(*at) < TOLD_FOR);
        let Self { own: jobs, here, needed, ended, over } = self;
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
                Some(hosts) => !hosts.is_disjoint(unsure),
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
pub(super) fn allocator(cluster: &Cluster, own: HostId) -> Arc<dyn Allocator> {
    match cluster.core().and_then(|core| core.config.slurm.clone()) {
        Some(settings) => Arc::new(Slurm::new(own, settings)),
        None => Arc::new(BuiltIn),
    }
}

impl Member {
    /// Have an engine hold nodes for clones, if there is one: as long as somebody needs them. `views`: the hosts that may be asked.
    ///
    /// # Errors
    /// It has none, or can't be asked; `message` says what for.
    pub(crate) async fn hold(
        self: &Arc<Self>,
        ask: &Ask,
        views: &[HostView],
        message: &str,
    ) -> Result<Option<Hold>, ErrorBody> {
        match self.allocator.hold(ask, views).await {
            Ok(held) => Ok(held.map(|held| self.begin_job(held))),
            Err(error) => {
                let code = match error {
                    AllocateError::NoRoom { .. } => ErrorCode::NoCapacity,
                    _ => ErrorCode::Host,
                };
                Err(ErrorBody::new(code, message).cause(chain(&error)).remedy(error.remedy()))
            }
        }
    }

    fn begin_job(self: &Arc<Self>, held: Held) -> Hold {
        let held = Arc::new(held);
        self.jobs.state().begin(Instant::now(), &held);
        self.watch_job(held.job.clone());
        tracing::info!(job = held.job, hosts = held.places.len(), "a job holds nodes");
        Hold { job: Job { host: self.id().get(), id: held.job.clone() }, held }
    }

    /// Take over what an earlier life of this daemon left.
    pub(super) fn adopt_jobs(self: &Arc<Self>) {
        let member = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                let Some(member) = member.upgrade() else { return };
                match member.allocator.jobs().await {
                    Ok(jobs) => {
                        let adopted = member.jobs.state().adopt(Instant::now(), jobs);
                        for job in adopted {
                            tracing::info!(job, "an earlier life of this daemon left it");
                            member.watch_job(job);
                        }
                        return;
                    }
                    Err(error) => tracing::warn!("jobs of an earlier life: {}", chain(&error)),
                }
                drop(member);
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
    }

    /// Notice when the engine ends a job.
    fn watch_job(self: &Arc<Self>, job: String) {
        let member = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_EVERY).await;
                let Some(member) = member.upgrade() else { return };
                if !member.jobs.state().own.contains_key(&job) {
                    return;
                }
                match member.allocator.ended(&job).await {
                    Ok(None) => {}
                    Ok(Some(why)) => {
                        member.jobs.state().ended(Instant::now(), member.id(), &job, why);
                        return;
                    }
                    // Who does not answer ends nothing.
                    Err(error) => tracing::debug!(job, "{}", chain(&error)),
                }
            }
        });
    }

    /// End VMs whose job is over, and give back jobs that nobody needs.
    pub(super) fn tend_jobs(self: &Arc<Self>, core: &Arc<Core>) {
        let live = core.registry.live();
        let here = live.iter().filter_map(|vm| vm.identity.job.clone()).collect();
        let (now, own) = (self.now(), self.id());
        let unsure = self.roster.read(|book| {
            let others = book.members().map(|entry| entry.id).filter(|id| *id != own);
            others.filter(|id| book.liveness(*id, now) == Liveness::Suspect).collect()
        });
        let (unneeded, over) = {
            let mut state = self.jobs.state();
            let unneeded = state.tend(Instant::now(), here, own, &unsure);
            (unneeded, std::mem::take(&mut state.over))
        };
        for vm in live {
            let why = vm.identity.job.as_ref().and_then(|job| over.get(job));
            if let Some(why) = why {
                core.end(&vm, End::killed(why.clone()));
            }
        }
        for job in unneeded {
            let member = Arc::clone(self);
            tokio::spawn(async move {
                let released = member.allocator.release(&job).await;
                member.jobs.state().released(Instant::now(), &job, released.is_ok());
                match released {
                    Ok(()) => tracing::info!(job, "given back: nobody needs it"),
                    Err(error) => tracing::warn!(job, "give it back: {}", chain(&error)),
                }
            });
        }
    }

    /// This host is in no cluster any more: it holds nothing.
    pub(super) async fn release_jobs(&self) {
        let jobs: Vec<String> = self.jobs.state().own.keys().cloned().collect();
        for job in jobs {
            if let Err(error) = self.allocator.release(&job).await {
                tracing::warn!(job, "give it back: {}", chain(&error));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(id: u64) -> HostId {
        HostId::new(id).expect("not 0")
    }

    fn held(job: &str) -> Arc<Held> {
        let places = BTreeMap::from([(host(1), 2), (host(2), 2)]);
        Arc::new(Held { job: job.to_owned(), places, short: Vec::new() })
    }

    fn of(id: &str) -> Job {
        Job { host: 1, id: id.to_owned() }
    }

    fn news(needs: &[Job]) -> JobNews {
        JobNews { needs: needs.to_vec(), ended: Vec::new() }
    }

    #[test]
    fn a_job_lasts_while_a_fork_a_vm_here_or_one_elsewhere_needs_it() {
        let (jobs, began) = (Jobs::default(), Instant::now());
        let at = |s: u64| began + Duration::from_secs(s);
        let here = |ids: &[&str]| ids.iter().map(|id| of(id)).collect::<BTreeSet<_>>();
        let none = BTreeSet::new();
        let tend = |s, here| jobs.state().tend(at(s), here, host(1), &none);
        let fork = held("7");
        jobs.state().begin(at(0), &fork);
        assert!(tend(100, here(&[])).is_empty(), "the fork goes on");
        drop(fork);
        assert!(tend(104, here(&["7"])).is_empty(), "a VM of it is here");
        jobs.heard(host(1), host(2), &news(&[of("7"), Job { host: 2, id: "8".to_owned() }]));
        assert!(tend(200, here(&[])).is_empty(), "and one elsewhere");
        jobs.heard(host(1), host(2), &news(&[]));
        assert!(tend(204, here(&[])).is_empty(), "for a while");
        let silent = BTreeSet::from([host(2)]);
        assert!(jobs.state().tend(at(300), here(&[]), host(1), &silent).is_empty(), "who knows");
        assert_eq!(tend(305, here(&[])), ["7"]);
        assert!(tend(306, here(&[])).is_empty(), "under way");
        jobs.state().released(at(307), "7", false);
        assert_eq!(tend(309, here(&[])), ["7"], "tried again");
        jobs.state().released(at(310), "7", true);
        assert!(tend(400, here(&[])).is_empty());
    }

    #[test]
    fn vms_of_a_job_that_come_after_its_end_end_too() {
        let (jobs, now, none) = (Jobs::default(), Instant::now(), BTreeSet::new());
        let fork = held("7");
        jobs.state().begin(now, &fork);
        jobs.state().ended(now, host(1), "7", "CANCELLED".to_owned());
        jobs.state().over.clear();
        jobs.state().tend(now, BTreeSet::from([of("7"), of("8")]), host(1), &none);
        assert_eq!(jobs.state().over.keys().collect::<Vec<_>>(), [&of("7")]);
    }

    #[test]
    fn what_an_earlier_life_left_is_given_back_unless_somebody_names_it() {
        let (jobs, began) = (Jobs::default(), Instant::now());
        let at = |s: u64| began + Duration::from_secs(s);
        let mine = held("1");
        jobs.state().begin(at(0), &mine);
        let listed = ["1", "2", "3"].map(ToOwned::to_owned).into();
        assert_eq!(jobs.state().adopt(at(0), listed), ["2", "3"]);
        jobs.heard(host(1), host(2), &news(&[of("3")]));
        let none = BTreeSet::new();
        assert!(jobs.state().tend(at(29), BTreeSet::new(), host(1), &none).is_empty());
        assert_eq!(jobs.state().tend(at(30), BTreeSet::new(), host(1), &none), ["2"]);
    }

    #[test]
    fn what_the_engine_ends_is_told_and_ends_its_vms_wherever_they_are() {
        let (jobs, now) = (Jobs::default(), Instant::now());
        let fork = held("7");
        jobs.state().begin(now, &fork);
        jobs.state().ended(now, host(1), "7", "CANCELLED".to_owned());
        assert_eq!(jobs.state().over.get(&of("7")).map(String::as_str), Some("CANCELLED"));
        let told = jobs.news();
        assert_eq!(told.ended, [("7".to_owned(), "CANCELLED".to_owned())]);
        let there = Jobs::default();
        there.heard(host(2), host(1), &told);
        assert!(there.state().over.is_empty(), "no VM of it is there");
        let none = BTreeSet::new();
        there.state().tend(now, BTreeSet::from([of("7")]), host(2), &none);
        there.heard(host(2), host(3), &told);
        assert!(there.state().over.is_empty(), "another host's job");
        there.heard(host(2), host(1), &told);
        assert_eq!(there.state().over.len(), 1);
        // What was given back ends nobody's VMs.
        let gone = held("9");
        jobs.state().begin(now, &gone);
        drop(gone);
        let later = now + UNNEEDED_FOR;
        assert_eq!(jobs.state().tend(later, BTreeSet::new(), host(1), &none), ["9"]);
        jobs.state().ended(later, host(1), "9", "CANCELLED".to_owned());
        assert!(!jobs.state().over.contains_key(&of("9")));
    }
}
