//! Whether a VM still fits into the host's memory.
//!
//! A VM is admitted against what it may come to use, its *commitment*, not what it uses now:
//!
//! | what | commitment |
//! |---|---|
//! | a VM that boots | all of its memory + 40 MiB for QEMU |
//! | a clone | 10 % of its memory, at least 16 MiB, at most all of it, + 20 MiB for QEMU |
//! | a QEMU of the pool | 20 MiB, until it becomes a clone |
//! | a snapshot (a fork, whatever its clones) | the growth of one clone: the parent writes anew what the snapshot keeps |
//!
//! Clones share what they do not write; measured ones write a few per cent, and who knows better
//! says so by `--clone-growth-percent` (100: memory is never overcommitted). A VM that was forked is
//! a clone of its own snapshot, and from then on counts like one ([`Lease::is_now_a_clone`]): its
//! old pages are in the snapshot's cache, which the kernel counts as used.
//!
//! ```text
//!   admissible = MemAvailable - reserve - Σ over leases of (commitment - private memory), if > 0
//! ```
//!
//! `MemAvailable` already lacks what VMs use, so a lease only holds back what its VM has yet to use.
//! That is looked up (`/proc/PID/statm`) when a request would otherwise be refused, and at most
//! once per `PROBE_EVERY`.
//!
//! Promises: requests that are decided at the same time never get the same memory; what a lease
//! holds comes back when it is dropped. Left to others: enforcing (see [`crate::cgroup`]).

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmfork_api::{ErrorBody, ErrorCode};

const MIB: u64 = 1 << 20;
/// QEMU 7.2 beside the memory of its guest: 29 MB PSS with a kernel loaded, and room for I/O.
const QEMU_BOOTED_BYTES: u64 = 40 * MIB;
/// The same for a clone, which loads no kernel: 15 MB PSS.
const QEMU_CLONE_BYTES: u64 = 20 * MIB;
/// A clone that does anything writes as much.
const GROWTH_BYTES_MIN: u64 = 16 * MIB;
/// How old the figures of what VMs use may be when a request would be refused by them.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// The rules.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// What VMs never get.
    pub reserve_bytes: u64,
    /// How much of its memory a clone is expected to write, 1 to 100.
    pub clone_growth_percent: u8,
}

impl Policy {
    fn booted(&self, ram_bytes: u64) -> u64 {
        ram_bytes.saturating_add(QEMU_BOOTED_BYTES)
    }

    fn growth(&self, ram_bytes: u64) -> u64 {
        let share = ram_bytes / 100 * u64::from(self.clone_growth_percent)
            + ram_bytes % 100 * u64::from(self.clone_growth_percent) / 100;
        share.max(GROWTH_BYTES_MIN).min(ram_bytes)
    }

    fn clone(&self, ram_bytes: u64) -> u64 {
        self.growth(ram_bytes).saturating_add(QEMU_CLONE_BYTES)
    }
}

/// What the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    pub total_bytes: u64,
    /// What the kernel could still give out, caches that it can drop included.
    pub available_bytes: u64,
}

/// Where the figures come from: the kernel, or a test.
pub trait Probe: Send + Sync {
    fn host(&self) -> HostMemory;
    /// Memory that only this process holds, 0 if it is gone.
    fn private_bytes(&self, pid: u32) -> u64;
}

/// The figures of `/proc`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcProbe;

impl Probe for ProcProbe {
    fn host(&self) -> HostMemory {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        HostMemory {
            total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
        }
    }

    fn private_bytes(&self, pid: u32) -> u64 {
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        statm_private_pages(&statm) * rustix::param::page_size() as u64
    }
}

/// 0 if there is no such line.
fn meminfo_bytes(meminfo: &str, key: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// `size resident shared …`: what is resident and neither of a file nor shared memory.
fn statm_private_pages(statm: &str) -> u64 {
    let mut fields = statm.split_ascii_whitespace().skip(1).map(|field| field.parse::<u64>());
    match (fields.next(), fields.next()) {
        (Some(Ok(resident)), Some(Ok(shared))) => resident.saturating_sub(shared),
        _ => 0,
    }
}

#[derive(Debug, Clone, Copy)]
struct Account {
    committed_bytes: u64,
    private_bytes: u64,
    pid: Option<u32>,
}

#[derive(Debug, Default)]
struct Accounts {
    next: u64,
    leases: HashMap<u64, Account>,
    probed: Option<Instant>,
}

impl Accounts {
    fn outstanding_bytes(&self) -> u64 {
        let owed =
            |account: &Account| account.committed_bytes.saturating_sub(account.private_bytes);
        self.leases.values().map(owed).fold(0, u64::saturating_add)
    }

    fn committed_bytes(&self) -> u64 {
        self.leases.values().map(|account| account.committed_bytes).fold(0, u64::saturating_add)
    }

    fn add(&mut self, committed_bytes: u64) -> u64 {
        let id = self.next;
        self.next += 1;
        self.leases.insert(id, Account { committed_bytes, private_bytes: 0, pid: None });
        id
    }
}

struct Inner {
    policy: Policy,
    probe: Box<dyn Probe>,
    accounts: Mutex<Accounts>,
}

impl Inner {
    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        // No step leaves the accounts half-changed.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The accounts of one host. Cheap to clone.
#[derive(Clone)]
pub struct Admission(Arc<Inner>);

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Admission").field(&self.0.policy).finish()
    }
}

/// Memory promised to one VM (or snapshot); given back on drop.
pub struct Lease {
    admission: Admission,
    id: u64,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("bytes", &self.bytes()).finish()
    }
}

/// What of a fork fits.
#[derive(Debug)]
pub struct ForkGrant {
    /// Lives as long as the snapshot.
    pub snapshot: Lease,
    /// One for each clone that may be started: as many as were asked for, or fewer.
    pub clones: Vec<Lease>,
    /// Why the others may not.
    pub refused: Option<ErrorBody>,
}

/// A grant of earlier, lent to the fork that it was made for. If that comes to nothing it is here again.
#[derive(Debug, Clone)]
pub struct Loan(Arc<Mutex<Option<ForkGrant>>>);

impl Loan {
    pub fn new(grant: ForkGrant) -> Self {
        Self(Arc::new(Mutex::new(Some(grant))))
    }

    /// What is lent, once.
    pub fn take(&self) -> Option<ForkGrant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// It was not used.
    pub fn give_back(&self, grant: ForkGrant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(grant);
    }
}

impl Admission {
    pub fn new(policy: Policy, probe: Box<dyn Probe>) -> Self {
        Self(Arc::new(Inner { policy, probe, accounts: Mutex::default() }))
    }

    /// Memory for a VM named `name` (for the error's text) that boots with `ram_bytes`.
    ///
    /// # Errors
    /// `no_capacity` with the figures.
    pub fn boot(&self, name: &str, ram_bytes: u64) -> Result<Lease, ErrorBody> {
        let want = self.0.policy.booted(ram_bytes);
        let mut accounts = self.0.accounts();
        let admissible = self.admissible(&mut accounts, want);
        if want > admissible {
            let message = format!("run `{name}` with {} of memory", mib(ram_bytes));
            return Err(self.refusal(&accounts, message, want, admissible));
        }
        Ok(self.lease(&mut accounts, want))
    }

    /// Memory for a fork of `parent`, which has `ram_bytes`, into `count` clones.
    ///
    /// # Errors
    /// `no_capacity` with the figures, if not even one clone fits, or not all do and
    /// `all_or_nothing` is set.
    pub fn fork(
        &self,
        parent: &str,
        ram_bytes: u64,
        count: u32,
        all_or_nothing: bool,
    ) -> Result<ForkGrant, ErrorBody> {
        let (snapshot, each) = (self.0.policy.growth(ram_bytes), self.0.policy.clone(ram_bytes));
        let want = each.saturating_mul(u64::from(count)).saturating_add(snapshot);
        let mut accounts = self.0.accounts();
        let admissible = self.admissible(&mut accounts, want);
        let fitting = admissible.saturating_sub(snapshot) / each;
        let granted = u32::try_from(fitting).unwrap_or(u32::MAX).min(count);
        let refused = (granted < count).then(|| {
            let message = format!("fork `{parent}` into {count}: {granted} fit");
            self.refusal(&accounts, message, want, admissible)
        });
        match refused {
            Some(refused) if granted == 0 || all_or_nothing => Err(refused),
            refused => Ok(ForkGrant {
                snapshot: self.lease(&mut accounts, snapshot),
                clones: (0..granted).map(|_| self.lease(&mut accounts, each)).collect(),
                refused,
            }),
        }
    }

    /// Memory for a QEMU that waits in the pool.
    ///
    /// # Errors
    /// `no_capacity` with the figures: not now.
    pub fn waiting(&self) -> Result<Lease, ErrorBody> {
        let mut accounts = self.0.accounts();
        let admissible = self.admissible(&mut accounts, QEMU_CLONE_BYTES);
        if QEMU_CLONE_BYTES > admissible {
            let message = "start a QEMU for the pool".to_owned();
            return Err(self.refusal(&accounts, message, QEMU_CLONE_BYTES, admissible));
        }
        Ok(self.lease(&mut accounts, QEMU_CLONE_BYTES))
    }

    /// What may still be handed out.
    pub fn admissible_bytes(&self) -> u64 {
        self.admissible(&mut self.0.accounts(), u64::MAX)
    }

    /// The host's own figures.
    pub fn host(&self) -> HostMemory {
        self.0.probe.host()
    }

    fn admissible(&self, accounts: &mut Accounts, want: u64) -> u64 {
        let free = self.0.probe.host().available_bytes.saturating_sub(self.0.policy.reserve_bytes);
        let admissible = free.saturating_sub(accounts.outstanding_bytes());
        let is_fresh = accounts.probed.is_some_and(|probed| probed.elapsed() < PROBE_EVERY);
        if want <= admissible || is_fresh {
            return admissible;
        }
        for account in accounts.leases.values_mut() {
            account.private_bytes = account.pid.map_or(0, |pid| self.0.probe.private_bytes(pid));
        }
        accounts.probed = Some(Instant::now());
        free.saturating_sub(accounts.outstanding_bytes())
    }

    fn lease(&self, accounts: &mut Accounts, bytes: u64) -> Lease {
        Lease { admission: self.clone(), id: accounts.add(bytes) }
    }

    fn refusal(
        &self,
        accounts: &Accounts,
        message: String,
        want: u64,
        admissible: u64,
    ) -> ErrorBody {
        let host = self.0.probe.host();
        let cause = format!(
            "{} needed, {} admissible: of {} the host has {} available, {} of that are promised to \
             VMs that have yet to use it ({} in all), {} are in reserve",
            mib(want),
            mib(admissible),
            mib(host.total_bytes),
            mib(host.available_bytes),
            mib(accounts.outstanding_bytes()),
            mib(accounts.committed_bytes()),
            mib(self.0.policy.reserve_bytes),
        );
        ErrorBody::new(ErrorCode::NoCapacity, message).cause(cause).remedy(
            "end VMs (`vmfork ps`, `vmfork kill`), ask for less memory, or lower vmforkd's \
             --memory-reserve-mib or --clone-growth-percent",
        )
    }
}

impl Lease {
    /// The process that uses this memory. Until it is known, all of it is held back.
    pub fn used_by(&self, pid: u32) {
        self.change(|account| account.pid = Some(pid));
    }

    /// The VM was forked: it goes on as a clone of its own snapshot. Saying it again is fine.
    pub fn is_now_a_clone(&self, ram_bytes: u64) {
        let clone = self.admission.0.policy.clone(ram_bytes);
        self.change(|account| {
            account.committed_bytes = account.committed_bytes.min(clone);
            // Its pages were moved aside: what it had is no measure for what it has.
            account.private_bytes = 0;
        });
    }

    /// What is promised.
    pub fn bytes(&self) -> u64 {
        let accounts = self.admission.0.accounts();
        accounts.leases.get(&self.id).map_or(0, |account| account.committed_bytes)
    }

    fn change(&self, change: impl FnOnce(&mut Account)) {
        if let Some(account) = self.admission.0.accounts().leases.get_mut(&self.id) {
            change(account);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.admission.0.accounts().leases.remove(&self.id);
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

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
        let policy = Policy { reserve_bytes: GIB, clone_growth_percent: 10 };
        (Admission::new(policy, Box::new(made.clone())), made)
    }

    #[test]
    fn what_is_promised_is_not_promised_twice_and_comes_back() {
        let (admission, _) = admission();
        assert_eq!(admission.admissible_bytes(), 7 * GIB);
        let first = admission.boot("a", 4 * GIB).expect("fits");
        assert_eq!(first.bytes(), 4 * GIB + 40 * MIB);
        admission.boot("b", 4 * GIB).expect_err("does not fit");
        assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB);
        drop(first);
        admission.boot("b", 4 * GIB).expect("fits now");
    }

    #[test]
    fn a_refusal_says_the_figures_and_what_to_do() {
        let (admission, _) = admission();
        let _held = admission.boot("a", 4 * GIB).expect("fits");
        let error = admission.boot("web", 4 * GIB).expect_err("does not fit");
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
        let lease = admission.boot("a", 4 * GIB).expect("fits");
        made.used.lock().expect("lock").insert(7, 4 * GIB);
        // Nobody said yet whose memory that is.
        assert_eq!(admission.admissible_bytes(), 0);
        lease.used_by(7);
        admission.0.accounts().probed = None;
        assert_eq!(admission.admissible_bytes(), 3 * GIB - 40 * MIB);
    }

    #[test]
    fn processes_are_looked_at_only_when_it_matters() {
        let (admission, made) = admission();
        let _leases: Vec<_> = (0..10)
            .map(|pid| {
                let lease = admission.boot("a", 64 * MIB).expect("fits");
                lease.used_by(pid);
                lease
            })
            .collect();
        assert_eq!(made.probes.load(Ordering::SeqCst), 0);
        for _ in 0..5 {
            admission.boot("b", 64 * GIB).expect_err("does not fit");
        }
        assert_eq!(made.probes.load(Ordering::SeqCst), 10);
    }

    #[test]
    fn a_fork_gets_what_fits_or_all_or_nothing() {
        let (admission, _) = admission();
        // A clone of 4 GiB: 409.6 MiB of growth and 20 MiB of QEMU; 6.6 GiB hold 15 of them.
        let grant = admission.fork("web", 4 * GIB, 20, false).expect("some fit");
        assert_eq!(grant.clones.len(), 15);
        let refused = grant.refused.as_ref().expect("not all fit");
        assert!(refused.message.ends_with("into 20: 15 fit"), "{refused}");
        assert!(admission.admissible_bytes() < 430 * MIB);
        drop(grant);
        assert_eq!(admission.admissible_bytes(), 7 * GIB);

        admission.fork("web", 4 * GIB, 20, true).expect_err("all or nothing");
        assert_eq!(admission.admissible_bytes(), 7 * GIB);
        let all = admission.fork("web", 4 * GIB, 15, true).expect("all fit");
        assert!(all.refused.is_none());
        admission.fork("web", 4 * GIB, 1, false).expect_err("not one fits");
    }

    #[test]
    fn a_small_clone_counts_as_no_more_than_all_its_memory() {
        let policy = Policy { reserve_bytes: 0, clone_growth_percent: 10 };
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
        let _vm = admission.boot("a", rest - QEMU_BOOTED_BYTES - MIB).expect("fits");
        let error = admission.waiting().expect_err("1 MiB is left");
        assert_eq!(error.code, ErrorCode::NoCapacity);
        assert!(
            error.to_string().starts_with("start a QEMU for the pool: 20 MiB needed"),
            "{error}"
        );
        drop(waiting);
        made.used.lock().expect("lock").clear();
        admission.waiting().expect("its memory came back");
    }

    #[test]
    fn a_forked_parent_counts_like_a_clone() {
        let (admission, _) = admission();
        let parent = admission.boot("a", 2 * GIB).expect("fits");
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
                        let grants: Vec<_> = (0..20)
                            .filter_map(|_| admission.fork("a", 4 * GIB, 3, false).ok())
                            .collect();
                        let bytes = grants.iter().flat_map(|g| g.clones.iter().map(Lease::bytes));
                        let bytes = bytes.sum::<u64>()
                            + grants.iter().map(|g| g.snapshot.bytes()).sum::<u64>();
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
    fn the_kernels_figures_are_read() {
        let meminfo = "MemTotal:       24105 kB\nMemAvailable:      77 kB\nMemAvailableX: 1 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable"), 77 * 1024);
        assert_eq!(meminfo_bytes(meminfo, "Nope"), 0);
        assert_eq!(statm_private_pages("1000 300 120 1 0 5 0"), 180);
        assert_eq!(statm_private_pages(""), 0);
        let host = ProcProbe.host();
        assert!(host.available_bytes > 0 && host.available_bytes <= host.total_bytes);
        assert!(ProcProbe.private_bytes(std::process::id()) > 0);
        assert_eq!(ProcProbe.private_bytes(u32::MAX), 0);
    }
}
