use std::collections::VecDeque;

use tokio::sync::Semaphore;
use vmfork_cluster::Room;
use vmfork_cluster::allocate::{AllocateError, Boxed, Policy};

use super::*;
use vmfork_host::testing::SOON;

fn host(id: u64) -> HostId {
    HostId::new(id).expect("not 0")
}

fn held(job: &str) -> Arc<Held> {
    let places = BTreeMap::from([(host(1), 2), (host(2), 2)]);
    Arc::new(Held { job: job.to_owned(), places, short: Vec::new() })
}

fn jobs() -> Arc<Jobs> {
    Jobs::new(host(1), Arc::new(BuiltIn), Pace::default())
}

fn of(id: &str) -> Job {
    Job { host: 1, id: id.to_owned() }
}

/// Host 2 is the only other one.
fn others(is: Liveness) -> BTreeMap<HostId, Liveness> {
    BTreeMap::from([(host(2), is)])
}

fn news(needs: &[Job]) -> JobNews {
    JobNews { needs: needs.to_vec(), ended: Vec::new() }
}

#[test]
fn a_job_lasts_while_a_fork_a_vm_here_or_one_elsewhere_needs_it() {
    let (jobs, began) = (jobs(), Instant::now());
    let at = |s: u64| began + Duration::from_secs(s);
    let here = |ids: &[&str]| ids.iter().map(|id| of(id)).collect::<BTreeSet<_>>();
    let tend = |s, here| jobs.state().tend(at(s), here, host(1), &others(Liveness::Alive));
    let fork = held("7");
    jobs.state().begin(at(0), &fork);
    assert!(tend(100, here(&[])).is_empty(), "the fork goes on");
    drop(fork);
    assert!(tend(104, here(&["7"])).is_empty(), "a VM of it is here");
    jobs.heard(host(2), &news(&[of("7"), Job { host: 2, id: "8".to_owned() }]));
    assert!(tend(200, here(&[])).is_empty(), "and one elsewhere");
    jobs.heard(host(2), &news(&[]));
    assert!(tend(204, here(&[])).is_empty(), "for a while");
    let silent = others(Liveness::Suspect);
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
    let (jobs, now, none) = (jobs(), Instant::now(), BTreeMap::new());
    let fork = held("7");
    jobs.state().begin(now, &fork);
    jobs.state().ended(now, host(1), "7", "CANCELLED".to_owned());
    jobs.state().over.clear();
    jobs.state().tend(now, BTreeSet::from([of("7"), of("8")]), host(1), &none);
    assert_eq!(jobs.state().over.keys().collect::<Vec<_>>(), [&of("7")]);
}

#[test]
fn what_an_earlier_life_left_is_given_back_unless_somebody_names_it() {
    let (jobs, began) = (jobs(), Instant::now());
    let at = |s: u64| began + Duration::from_secs(s);
    let mine = held("1");
    jobs.state().begin(at(0), &mine);
    let listed = ["1", "2", "3"].map(ToOwned::to_owned).into();
    assert_eq!(jobs.state().adopt(at(0), listed).expect("none is asked for"), ["2", "3"]);
    jobs.heard(host(2), &news(&[of("3")]));
    let tend = |s| jobs.state().tend(at(s), BTreeSet::new(), host(1), &others(Liveness::Alive));
    assert!(tend(29).is_empty());
    assert_eq!(tend(30), ["2"]);
}

#[test]
fn what_the_engine_ends_is_told_and_ends_its_vms_wherever_they_are() {
    let (jobs, now) = (jobs(), Instant::now());
    let fork = held("7");
    jobs.state().begin(now, &fork);
    jobs.state().ended(now, host(1), "7", "CANCELLED".to_owned());
    assert_eq!(jobs.state().over.get(&of("7")).map(String::as_str), Some("CANCELLED"));
    let told = jobs.news();
    assert_eq!(told.ended, [("7".to_owned(), "CANCELLED".to_owned())]);
    let there = Jobs::new(host(2), Arc::new(BuiltIn), Pace::default());
    there.heard(host(1), &told);
    assert!(there.state().over.is_empty(), "no VM of it is there");
    let none = BTreeMap::new();
    there.state().tend(now, BTreeSet::from([of("7")]), host(2), &none);
    there.heard(host(3), &told);
    assert!(there.state().over.is_empty(), "another host's job");
    there.heard(host(1), &told);
    assert_eq!(there.state().over.len(), 1);
    // A job that was given back ends no VMs.
    let gone = held("9");
    jobs.state().begin(now, &gone);
    drop(gone);
    let later = now + UNNEEDED_FOR;
    assert_eq!(jobs.state().tend(later, BTreeSet::new(), host(1), &none), ["9"]);
    jobs.state().ended(later, host(1), "9", "CANCELLED".to_owned());
    assert!(!jobs.state().over.contains_key(&of("9")));
}

#[test]
fn what_a_host_needs_that_is_gone_or_no_member_any_more_is_given_back() {
    for gone in [others(Liveness::Gone), BTreeMap::new()] {
        let (jobs, began) = (jobs(), Instant::now());
        let at = |s: u64| began + Duration::from_secs(s);
        drop({
            let fork = held("7");
            jobs.state().begin(at(0), &fork);
            fork
        });
        let tend = |s, others: &_| jobs.state().tend(at(s), BTreeSet::new(), host(1), others);
        jobs.heard(host(2), &news(&[of("7")]));
        assert!(tend(100, &others(Liveness::Alive)).is_empty(), "a VM of it is there");
        assert!(tend(104, &gone).is_empty(), "for a while");
        assert_eq!(tend(105, &gone), ["7"]);
    }
}

#[test]
fn what_is_just_being_granted_is_not_taken_over() {
    let (jobs, now) = (jobs(), Instant::now());
    let listed = || BTreeSet::from(["1".to_owned()]);
    let asking = jobs.ask();
    assert!(!jobs.state().may_look());
    assert_eq!(jobs.state().adopt(now, listed()), None);
    jobs.state().begin(now, &held("1"));
    drop(asking);
    jobs.state().look_again = true;
    assert_eq!(jobs.state().adopt(now, listed()), None, "another one failed meanwhile");
    assert!(jobs.state().may_look());
    assert_eq!(jobs.state().adopt(now, listed()), Some(Vec::new()), "it is known by now");
}

/// Grants job 7 when it may, or fails then; either way it has the job.
#[derive(Debug)]
struct Engine {
    may: Semaphore,
    grants: bool,
    has: Mutex<BTreeSet<String>>,
    /// What comes of those who want to give back, as long as there is something.
    refuses: Mutex<VecDeque<&'static str>>,
}

impl Engine {
    fn new(grants: bool) -> Arc<Self> {
        let (has, refuses) = (Mutex::default(), Mutex::default());
        Arc::new(Self { may: Semaphore::new(0), grants, has, refuses })
    }

    fn is_empty(&self) -> bool {
        self.has.lock().expect("whole").is_empty()
    }
}

fn failed() -> AllocateError {
    AllocateError::Engine { engine: "it", what: "no answer".to_owned() }
}

impl Allocator for Engine {
    fn hold<'a>(
        &'a self,
        _: &'a Ask,
        _: &'a [HostView],
    ) -> Boxed<'a, Result<Option<Held>, AllocateError>> {
        Box::pin(async {
            self.may.acquire().await.expect("open").forget();
            self.has.lock().expect("whole").insert("7".to_owned());
            let held = Held { job: "7".to_owned(), places: BTreeMap::new(), short: Vec::new() };
            if self.grants { Ok(Some(held)) } else { Err(failed()) }
        })
    }

    fn release<'a>(&'a self, job: &'a str) -> Boxed<'a, Result<(), AllocateError>> {
        Box::pin(async move {
            if self.refuses.lock().expect("whole").pop_front().is_some() {
                return Err(failed());
            }
            self.has.lock().expect("whole").remove(job);
            Ok(())
        })
    }

    fn ended<'a>(&'a self, _: &'a str) -> Boxed<'a, Result<Option<String>, AllocateError>> {
        Box::pin(async { Ok(None) })
    }

    fn jobs(&self) -> Boxed<'_, Result<BTreeSet<String>, AllocateError>> {
        Box::pin(async { Ok(self.has.lock().expect("whole").clone()) })
    }
}

fn ask() -> Ask {
    let shape = Room { memory_bytes: 1, vcpus: 1 };
    Ask { count: 1, shape, family: "f".to_owned(), policy: Policy::Spread }
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < give_up, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_job_is_given_back_that_is_granted_to_nobody_any_more_or_of_which_nobody_was_told() {
    for grants in [true, false] {
        let engine = Engine::new(grants);
        let jobs = Jobs::new(host(1), Arc::clone(&engine) as Arc<dyn Allocator>, Pace::default());
        let ask = ask();
        let hold = jobs.hold(&ask, &[]);
        match grants {
            true => {
                let waited = tokio::time::timeout(Duration::from_millis(20), hold).await;
                assert!(waited.is_err(), "it may not yet");
                engine.may.add_permits(1);
            }
            false => {
                engine.may.add_permits(1);
                hold.await.expect_err("no answer");
            }
        }
        let knows = || jobs.state().own.contains_key("7");
        until("somebody knows it", knows).await;
        let later = Instant::now() + ADOPTED_FOR;
        let none = BTreeMap::new();
        let unneeded = jobs.state().tend(later, BTreeSet::new(), host(1), &none);
        assert_eq!(unneeded, ["7"]);
    }
}

#[tokio::test]
async fn who_leaves_gives_back_what_it_has_and_what_it_still_gets() {
    let engine = Engine::new(true);
    let jobs = Jobs::new(host(1), Arc::clone(&engine) as Arc<dyn Allocator>, Pace::default());
    let ask = ask();
    engine.may.add_permits(1);
    let _hold = jobs.hold(&ask, &[]).await.expect("granted");
    engine.refuses.lock().expect("whole").push_back("once");
    jobs.release_all().await;
    assert!(engine.is_empty(), "it was tried again");
    engine.may.add_permits(1);
    let _late = jobs.hold(&ask, &[]).await.expect("granted");
    until("it is given back", || engine.is_empty()).await;
}
