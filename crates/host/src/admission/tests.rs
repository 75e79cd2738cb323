use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use vmfork_api::ErrorCode;

use super::*;

const GIB: u64 = 1 << 30;

/// A host with 8 GiB, of which processes use what the test says.
#[derive(Debug, Default)]
struct Made {
    used: Mutex<HashMap<u32, u64>>,
    probes: AtomicU64,
}

impl Probe for Arc<Made> {
    fn host(&self) -> HostMemory {
        let used: u64 = self.used.lock().expect("lock").values().sum();
        HostMemory { total_bytes: 8 * GIB, available_bytes: 8 * GIB - used }
    }

    fn private_bytes(&self, pid: u32) -> u64 {
        self.probes.fetch_add(1, Ordering::SeqCst);
        self.used.lock().expect("lock").get(&pid).copied().unwrap_or(0)
    }
}

fn admission() -> (Admission, Arc<Made>) {
    let made = Arc::new(Made::default());
    let policy = Policy { reserve_bytes: GIB, family_vms_max: 6, ..POLICY };
    (Admission::new(policy, Box::new(made.clone())), made)
}

/// The defaults, but for the reserve.
const POLICY: Policy = Policy {
    reserve_bytes: 0,
    clone_growth_percent: 10,
    family_vms_max: 256,
    family_memory_percent: 75,
    family_vcpus_percent: 75,
    cores: 4,
    vcpus_per_core: 64,
};

/// From outside, of a VM with 4 GiB.
fn web(count: u32) -> ForkAsk<'static> {
    ForkAsk {
        message: "fork `web`",
        family: "f",
        user: User::Uid(0),
        ram_bytes: 4 * GIB,
        cpus: 2,
        count,
        by_guest: false,
        allowed: None,
    }
}

fn boot<'a>(name: &'a str, family: &'a str, ram_bytes: u64) -> BootAsk<'a> {
    BootAsk { name, family, user: User::Uid(0), ram_bytes, cpus: 2 }
}

#[test]
fn what_is_promised_is_not_promised_twice_and_comes_back() {
    let (admission, _) = admission();
    assert_eq!(admission.admissible_bytes(), 7 * GIB);
    let first = admission.boot(boot("a", "f", 4 * GIB)).expect("fits");
    assert_eq!(first.bytes(), 4 * GIB + 40 * MIB);
    admission.boot(boot("b", "f", 4 * GIB)).expect_err("does not fit");
    assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB);
    drop(first);
    admission.boot(boot("b", "f", 4 * GIB)).expect("fits now");
}

/// What has come is used memory, which the kernel tells of.
#[test]
fn pages_of_a_stored_snapshot_are_promised_until_they_have_come() {
    let (admission, made) = admission();
    let error = admission.cache(8 * GIB).expect_err("does not fit");
    assert!(error.to_string().starts_with("8192 MiB needed, 7168 MiB"));
    let lease = admission.cache(6 * GIB).expect("fits");
    assert_eq!(admission.admissible_bytes(), GIB);
    made.used.lock().expect("lock").insert(7, 4 * GIB);
    lease.is_enough(2 * GIB);
    assert_eq!(admission.admissible_bytes(), GIB);
    lease.is_enough(3 * GIB);
    assert_eq!(lease.bytes(), 2 * GIB, "nothing leaves a cache");
    drop(lease);
    assert_eq!(admission.admissible_bytes(), 3 * GIB);
}

#[test]
fn a_refusal_says_the_figures_and_what_to_do() {
    let (admission, _) = admission();
    let _held = admission.boot(boot("a", "f", 4 * GIB)).expect("fits");
    let error = admission.boot(boot("web", "f", 4 * GIB)).expect_err("does not fit");
    assert_eq!(error.code, ErrorCode::NoCapacity);
    assert_eq!(
        error.to_string(),
        "run `web` with 4096 MiB of memory: 4136 MiB needed, 3032 MiB admissible: of 8192 MiB \
         the host has 8192 MiB available, 4136 MiB of that are promised to VMs that have yet \
         to use it (4136 MiB in all), 1024 MiB are in reserve"
    );
    assert!(error.remedy.expect("remedy").contains("--memory-reserve-mib"));
}

#[test]
fn memory_that_a_vm_uses_is_not_counted_twice() {
    let (admission, made) = admission();
    let lease = admission.boot(boot("a", "f", 4 * GIB)).expect("fits");
    made.used.lock().expect("lock").insert(7, 4 * GIB);
    // The memory has no owner yet.
    assert_eq!(admission.admissible_bytes(), 0);
    lease.used_by(7);
    admission.0.accounts().probed = None;
    assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB);
}

#[test]
fn processes_are_not_looked_at_each_time() {
    let (admission, made) = admission();
    let began = Instant::now();
    let _leases: Vec<_> = (0..10)
        .map(|pid| {
            let lease = admission.boot(boot("a", "f", 64 * MIB)).expect("fits");
            lease.used_by(pid);
            lease
        })
        .collect();
    for _ in 0..50 {
        admission.boot(boot("b", "f", 64 * GIB)).expect_err("does not fit");
    }
    let windows = began.elapsed().as_millis() / PROBE_EVERY.as_millis() + 1;
    assert!(u128::from(made.probes.load(Ordering::SeqCst)) <= 10 * windows);
}

/// Else it would be promised to another while the VM that has it back may use it again.
#[test]
fn what_a_vm_gives_back_stays_promised_to_it() {
    let policy = Policy { reserve_bytes: GIB, clone_growth_percent: 100, ..POLICY };
    let made = Arc::new(Made::default());
    let admission = Admission::new(policy, Box::new(made.clone()));
    let lease = admission.boot(boot("a", "f", 4 * GIB)).expect("fits");
    lease.used_by(7);
    made.used.lock().expect("lock").insert(7, 4 * GIB);
    admission.0.accounts().probed = None;
    assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB, "all of it is in use");
    made.used.lock().expect("lock").insert(7, 0);
    admission.boot(boot("b", "g", 5 * GIB)).expect_err("at once, by figures of before");
    admission.0.accounts().probed = None;
    admission.boot(boot("b", "g", 5 * GIB)).expect_err("by new figures");
    assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB);
}

#[test]
fn a_fork_gets_what_fits_or_all_or_nothing() {
    let (admission, _) = admission();
    // A clone of 4 GiB: 409.6 MiB of growth and 20 MiB of QEMU; 6.6 GiB hold 15 of them.
    let grant = admission.fork(web(20), false).expect("some fit");
    assert_eq!(grant.clones.len(), 15);
    let refused = grant.refused.as_ref().expect("not all fit");
    assert_eq!(refused.message, "fork `web`: 15 of 20 fit");
    assert!(admission.admissible_bytes() < 430 * MIB);
    drop(grant);
    assert_eq!(admission.admissible_bytes(), 7 * GIB);

    admission.fork(web(20), true).expect_err("all or nothing");
    assert_eq!(admission.admissible_bytes(), 7 * GIB);
    let all = admission.fork(web(15), true).expect("all fit");
    assert!(all.refused.is_none());
    admission.fork(web(1), false).expect_err("not one fits");
}

#[test]
fn guests_make_their_family_no_larger_than_they_may() {
    let (admission, _) = admission();
    let by_guest =
        |family, count| ForkAsk { ram_bytes: 64 * MIB, family, by_guest: true, ..web(count) };
    let _root = admission.boot(boot("web", "f", 64 * MIB)).expect("fits");
    // At most 6; the root and what was forked from outside count.
    let outside =
        admission.fork(ForkAsk { by_guest: false, ..by_guest("f", 2) }, true).expect("fit");
    let some = admission.fork(by_guest("f", 9), false).expect("3 fit");
    assert_eq!(some.clones.len(), 3);
    let refused = some.refused.as_ref().expect("not all fit");
    assert!(
        refused.to_string().ends_with("its family has 3 VMs, and guests may make it 6"),
        "{refused}"
    );
    let error = admission.fork(by_guest("f", 1), false).expect_err("it is full").to_body("m");
    assert!(error.remedy.expect("remedy").contains("--family-vms-max"));
    assert_eq!(admission.fork(by_guest("g", 9), false).expect("another family").clones.len(), 6);
    admission.fork(ForkAsk { by_guest: false, ..by_guest("f", 9) }, true).expect("from outside");
    drop(outside);
    assert_eq!(admission.fork(by_guest("f", 9), false).expect("there is room").clones.len(), 2);
}

/// As shipped, with VMs that take little memory: other families still get theirs.
#[test]
fn guests_leave_virtual_cpus_to_other_families() {
    let admission = Admission::new(POLICY, Box::new(Arc::new(Made::default())));
    let ask = |count| ForkAsk { ram_bytes: MIB, cpus: 4, by_guest: true, ..web(count) };
    let _root = admission.boot(BootAsk { cpus: 4, ..boot("web", "f", MIB) }).expect("fits");
    let grant = admission.fork(ask(100), false).expect("some fit");
    assert_eq!(grant.clones.len(), 47, "192 of 256 for all of the family");
    let refused = grant.refused.as_ref().expect("not all fit");
    assert!(
        refused
            .to_string()
            .ends_with("its family has 4 virtual CPUs, and guests may make that 192"),
        "{refused}"
    );
    let error = admission.fork(ask(1), false).expect_err("it has three quarters").to_body("m");
    assert!(error.remedy.expect("remedy").contains("--family-vcpus-percent"));
    admission.fork(ForkAsk { family: "g", ..ask(16) }, true).expect("another family");
    admission.fork(ForkAsk { by_guest: false, ..ask(16) }, true).expect("from outside");
    // Of three, three quarters are all.
    let few = Policy { cores: 3, vcpus_per_core: 1, ..POLICY };
    let few = Admission::new(few, Box::new(Arc::new(Made::default())));
    few.fork(ForkAsk { cpus: 1, ..ask(3) }, true).expect("all of them");
}

/// As shipped, on a small host: other families still get theirs.
#[test]
fn guests_leave_memory_to_other_families() {
    let policy = Policy { reserve_bytes: GIB / 2, ..POLICY };
    let admission = Admission::new(policy, Box::new(Arc::new(Made::default())));
    let ask = |family, count| ForkAsk { family, ram_bytes: GIB / 2, by_guest: true, ..web(count) };
    let _roots =
        ["f", "g"].map(|family| admission.boot(boot("web", family, GIB / 2)).expect("fits"));
    let mut held = Vec::new();
    for _ in 0..100 {
        held.extend(admission.fork(ask("f", 4096), false));
    }
    let error = admission.fork(ask("f", 1), false).expect_err("it has three quarters").to_body("m");
    assert!(error.to_string().contains("and guests may make that 5760 MiB"), "{error}");
    assert!(error.remedy.expect("remedy").contains("--family-memory-percent"));
    let promised: usize = held.iter().map(|grant| grant.clones.len()).sum();
    assert!((60..80).contains(&promised), "{promised}");
    assert_eq!(admission.fork(ask("g", 8), false).expect("another family").clones.len(), 8);
    admission.boot(boot("new", "h", GIB / 2)).expect("a third one");
    admission.fork(ForkAsk { by_guest: false, ..ask("f", 1) }, true).expect("from outside");
}

/// A host of four cores that lets VMs have one virtual CPU for each.
fn four_cores() -> Admission {
    let policy = Policy { vcpus_per_core: 1, ..POLICY };
    Admission::new(policy, Box::new(Arc::new(Made::default())))
}

#[test]
fn virtual_cpus_are_promised_once_and_come_back() {
    let admission = four_cores();
    assert_eq!((admission.vcpus(), admission.vcpus_max(), admission.room().vcpus), (0, 4, 4));
    let first = admission.boot(boot("a", "f", GIB)).expect("fits");
    // What runs no guest takes none.
    let _waiting = admission.waiting().expect("fits");
    let _second = admission.boot(BootAsk { cpus: 1, ..boot("b", "f", GIB) }).expect("fits");
    assert_eq!((admission.vcpus(), admission.room().vcpus), (3, 1));
    let error = admission.boot(boot("web", "f", GIB)).expect_err("1 is left");
    assert_eq!(error.code, ErrorCode::NoCapacity);
    assert_eq!(
        error.to_string(),
        "run `web` with 2 virtual CPUs: 2 virtual CPUs needed, 1 admissible: VMs may have 4 on this host \
         (cores: 4, 1 each), 3 are promised"
    );
    assert!(error.remedy.expect("remedy").contains("--vcpus-per-core"));
    // A parent goes on with all it had.
    first.is_now_a_clone(GIB);
    assert_eq!(admission.vcpus(), 3);
    drop(first);
    admission.boot(boot("web", "f", GIB)).expect("fits now");
}

#[test]
fn a_fork_gets_clones_for_as_many_virtual_cpus_as_are_left_or_all_or_nothing() {
    let admission = four_cores();
    let parent = admission.boot(BootAsk { cpus: 1, ..boot("web", "f", GIB) }).expect("fits");
    // By guests, 3 of the 4 for one family.
    for by_guest in [false, true] {
        let grant = admission.fork(ForkAsk { by_guest, ..web(3) }, false).expect("one fits");
        assert_eq!((grant.clones.len(), admission.room().vcpus), (1, 1));
        assert_eq!(
            grant.refused.as_ref().expect("not all fit").to_string(),
            "fork `web`: 1 of 3 fit: 6 virtual CPUs needed, 3 admissible: VMs may have 4 on this host \
             (cores: 4, 1 each), 1 are promised"
        );
        admission.fork(ForkAsk { by_guest, ..web(1) }, false).expect_err("1 virtual CPU is left");
        drop(grant);
        assert_eq!(admission.room().vcpus, 3);
        admission.fork(ForkAsk { by_guest, ..web(3) }, true).expect_err("all or nothing");
        assert_eq!(admission.room().vcpus, 3);
    }
    drop(parent);
    let all = admission.fork(web(2), true).expect("all fit");
    assert!(all.refused.is_none());
    let error = admission.fork(web(1), false).expect_err("not one fits").to_body("m");
    assert!(error.remedy.expect("remedy").contains("--vcpus-per-core"));
}

#[test]
fn a_small_clone_counts_as_no_more_than_all_its_memory() {
    let policy = POLICY;
    assert_eq!(policy.growth(8 * MIB), 8 * MIB);
    assert_eq!(policy.growth(64 * MIB), 16 * MIB);
    assert_eq!(policy.growth(1000 * MIB), 100 * MIB);
    let never_over = Policy { clone_growth_percent: 100, ..policy };
    assert_eq!(never_over.growth(64 * GIB), 64 * GIB);
    assert_eq!(never_over.growth(u64::MAX), u64::MAX);
}

#[test]
fn a_waiting_qemu_counts_and_one_that_does_not_fit_is_not_started() {
    let (admission, made) = admission();
    let waiting = admission.waiting().expect("fits");
    assert_eq!(admission.admissible_bytes(), 7 * GIB - QEMU_CLONE_BYTES);
    // What it uses is not counted twice.
    waiting.used_by(7);
    made.used.lock().expect("lock").insert(7, 15 * MIB);
    admission.0.accounts().probed = None;
    assert_eq!(admission.admissible_bytes(), 7 * GIB - QEMU_CLONE_BYTES);
    let rest = admission.admissible_bytes();
    let _vm = admission.boot(boot("a", "f", rest - QEMU_BOOTED_BYTES - MIB)).expect("fits");
    let error = admission.waiting().expect_err("1 MiB is left");
    assert!(error.to_string().starts_with("20 MiB needed"), "{error}");
    drop(waiting);
    made.used.lock().expect("lock").clear();
    admission.waiting().expect("its memory came back");
}

#[test]
fn a_forked_parent_counts_like_a_clone() {
    let (admission, _) = admission();
    let parent = admission.boot(boot("a", "f", 2 * GIB)).expect("fits");
    parent.is_now_a_clone(2 * GIB);
    let expected = admission.0.policy.clone(2 * GIB);
    assert_eq!(parent.bytes(), expected);
    parent.is_now_a_clone(2 * GIB);
    assert_eq!(parent.bytes(), expected);
}

#[test]
fn parallel_requests_never_overbook() {
    let (admission, _) = admission();
    let granted: u64 = std::thread::scope(|scope| {
        let requests: Vec<_> = (0..8)
            .map(|_| {
                let admission = admission.clone();
                scope.spawn(move || {
                    let grants: Vec<_> =
                        (0..20).filter_map(|_| admission.fork(web(3), false).ok()).collect();
                    let bytes = grants.iter().flat_map(|g| g.clones.iter().map(Lease::bytes));
                    let bytes =
                        bytes.sum::<u64>() + grants.iter().map(|g| g.snapshot.bytes()).sum::<u64>();
                    // Held until all have asked.
                    std::mem::forget(grants);
                    bytes
                })
            })
            .collect();
        requests.into_iter().map(|request| request.join().expect("no panic")).sum()
    });
    assert!(granted <= 7 * GIB, "{granted}");
    assert_eq!(admission.admissible_bytes(), 7 * GIB - granted);
}

#[test]
fn parallel_requests_never_get_more_virtual_cpus_than_there_are() {
    let admission = Admission::new(POLICY, Box::new(Arc::new(Made::default())));
    let held: Vec<ForkGrant> = std::thread::scope(|scope| {
        let requests: Vec<_> = (0..8)
            .map(|_| {
                let ask = ForkAsk { ram_bytes: MIB, cpus: 3, ..web(7) };
                let admission = admission.clone();
                scope.spawn(move || {
                    (0..20).filter_map(|_| admission.fork(ask, false).ok()).collect::<Vec<_>>()
                })
            })
            .collect();
        requests.into_iter().flat_map(|request| request.join().expect("no panic")).collect()
    });
    let clones: usize = held.iter().map(|grant| grant.clones.len()).sum();
    assert_eq!((clones, admission.vcpus(), admission.room().vcpus), (85, 255, 1), "3 for each");
    drop(held);
    assert_eq!(admission.vcpus(), 0);
}

#[test]
fn a_user_has_what_was_promised_to_all_of_his_vms_and_gets_no_more_than_is_allowed() {
    let (admission, _) = admission();
    let user = User::Uid(1000);
    let of = |user| admission.of_users().get(&user).copied().unwrap_or_default();
    let booted = admission.boot(BootAsk { user, ..boot("a", "f", GIB) }).expect("fits");
    let _another = admission.boot(boot("b", "g", GIB)).expect("fits");
    let room = |memory_bytes, vcpus| Room { memory_bytes, vcpus };
    assert_eq!(of(user), Amount::of(1, room(GIB + 40 * MIB, 2)));
    booted.is_now_a_clone(GIB);
    let clone = room(admission.clone_bytes(GIB), 2);
    assert_eq!(of(user), Amount::of(1, clone));
    let may = Amount { vms: 3, room: Room { memory_bytes: 500 * MIB, vcpus: u32::MAX } };
    let allowed = Some(Allowed { count: 2, user, has: of(user), may });
    let ask = ForkAsk { user, allowed, ram_bytes: GIB, ..web(4) };
    let grant = admission.fork(ask, false).expect("some");
    assert_eq!((grant.clones.len(), of(user)), (2, Amount::of(3, clone)));
    let refused = grant.refused.as_ref().expect("two of them").to_string();
    assert_eq!(
        refused,
        "fork `web`: 2 of 4 fit: user 1000 has 1 of 3 VMs and 122 of 500 MiB on all hosts: the \
         quota leaves no room for more"
    );
    admission.fork(ask, true).expect_err("not all");
    drop((grant, booted));
    assert_eq!(of(user), Amount::default());
}
