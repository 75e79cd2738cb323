//! Whether a VM still fits into the host's memory, and onto its cores.
//!
//! A VM is admitted against the memory that it may come to use, its *commitment*, not what it uses
//! now:
//!
//! | what | commitment |
//! |---|---|
//! | a VM that boots | all of its memory + 40 MiB for QEMU |
//! | a clone | 10 % of its memory, at least 16 MiB, at most all of it, + 20 MiB for QEMU |
//! | a QEMU of the pool | 20 MiB, until it becomes a clone |
//! | a fork, until the last of its clones runs | the growth of one clone: the parent copies what it writes, and the snapshot keeps the original |
//! | a snapshot from a store, or from another host, with VMs | what of it is not in memory yet, once for all of them |
//!
//! Clones share what they do not write; measured ones write a few per cent, and who knows better
//! says so by `--clone-growth-percent` (100: memory is never overcommitted). A VM that was forked
//! is a clone of its own snapshot, and from then on counts like one ([`Lease::is_now_a_clone`]):
//! its old pages are in the snapshot's cache, which the kernel counts as used.
//!
//! ```text
//!   admissible = MemAvailable - reserve - Σ over leases of (commitment - private memory), if > 0
//! ```
//!
//! `MemAvailable` already lacks what VMs use, so a lease only holds back what its VM has yet to
//! use. That is looked up (`/proc/PID/statm`) together with `MemAvailable`, and again once the
//! figures are older than `PROBE_EVERY` or a VM has ended. In between the lower of then and now
//! counts as available: what a VM has given back meanwhile is still promised to it.
//!
//! A VM counts with all its virtual CPUs, booted or clone, from its admission to its end; what
//! waits in the pool, snapshots and caches run nothing and count with none:
//!
//! ```text
//!   admissible = cores × vcpus_per_core - Σ over VMs of their virtual CPUs, if > 0
//! ```
//!
//! Most VMs of a family wait most of the time, so that a core is shared by many; who wants a core
//! for each says so by `--vcpus-per-core 1`.
//!
//! What a guest asks for by tickets is also bounded by what its family has already, in VMs, memory
//! and virtual CPUs.
//! So a program that forks forever leaves some of the host to others.
//! The quota of the user whose VMs they are bounds it as well. All hosts are asked for it before
//! ([`crate::quotas`]).
//!
//! Promises: requests that are decided at the same time never get the same memory or virtual CPUs;
//! what a lease holds comes back when it is dropped. Left to others: enforcing (see
//! [`crate::cgroup`]).

mod accounts;
mod asks;
mod probe;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmfork_api::ErrorBody;
use vmfork_cluster::Room;
use vmfork_cluster::allocate::Amount;

use self::accounts::{Account, Accounts};
pub use self::asks::{BootAsk, ForkAsk, ForkGrant, Loan};
pub use self::probe::{HostMemory, Probe, ProcProbe, cores};
use crate::config::Config;
use crate::error::{Error, Figure, MIB, Refusal, mib};
use crate::quotas::{Allowed, User};

/// QEMU 7.2 beside the memory of its guest: 29 MB PSS with a kernel loaded, and room for I/O.
const QEMU_BOOTED_BYTES: u64 = 40 * MIB;
/// The same for a clone, which loads no kernel: 15 MB PSS.
const QEMU_CLONE_BYTES: u64 = 20 * MIB;
/// A clone that does anything writes as much.
const GROWTH_BYTES_MIN: u64 = 16 * MIB;
/// How old the figures of what VMs use may be when something is granted or refused by them.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// The rules.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// What VMs never get.
    pub reserve_bytes: u64,
    /// How much of its memory a clone is expected to write, 1 to 100.
    pub clone_growth_percent: u8,
    /// How many VMs guests may make of their family by themselves, those that were made from
    /// outside counted too.
    pub family_vms_max: u32,
    /// How much of what VMs may have on this host guests may promise to their family, 1 to 100.
    pub family_memory_percent: u8,
    /// The same of the virtual CPUs that VMs may have on it.
    pub family_vcpus_percent: u8,
    /// What the host has.
    pub cores: u32,
    /// How many virtual CPUs VMs may have for each of them, at least 1.
    pub vcpus_per_core: u32,
}

impl Policy {
    /// The limits of a host with this many cores.
    pub fn of(config: &Config, cores: usize) -> Self {
        Self {
            reserve_bytes: config.memory_reserve_bytes,
            clone_growth_percent: config.clone_growth_percent,
            family_vms_max: config.family_vms_max,
            family_memory_percent: config.family_memory_percent,
            family_vcpus_percent: config.family_vcpus_percent,
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            vcpus_per_core: config.vcpus_per_core,
        }
    }

    /// How many virtual CPUs all VMs may have together.
    fn vcpus_max(&self) -> u32 {
        self.cores.saturating_mul(self.vcpus_per_core)
    }

    fn booted(&self, ram_bytes: u64) -> u64 {
        ram_bytes.saturating_add(QEMU_BOOTED_BYTES)
    }

    fn growth(&self, ram_bytes: u64) -> u64 {
        let share = percent(ram_bytes, self.clone_growth_percent);
        share.max(GROWTH_BYTES_MIN).min(ram_bytes)
    }

    fn clone(&self, ram_bytes: u64) -> u64 {
        self.growth(ram_bytes).saturating_add(QEMU_CLONE_BYTES)
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

/// What keeps a fork from getting more clones.
#[derive(Debug, Clone, Copy)]
enum Bound {
    Memory,
    Vcpus,
    Family { by: Figure, has: Amount, may: Amount },
    Quota(Allowed),
}

/// What is promised to one VM (or snapshot); given back on drop.
pub struct Lease {
    admission: Admission,
    id: u64,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("bytes", &self.bytes()).finish()
    }
}

impl Admission {
    pub fn new(policy: Policy, probe: Box<dyn Probe>) -> Self {
        Self(Arc::new(Inner { policy, probe, accounts: Mutex::default() }))
    }

    /// Memory and virtual CPUs for a VM that boots, the root of a family.
    ///
    /// # Errors
    /// `no_capacity` with the figures.
    pub fn boot(&self, ask: BootAsk<'_>) -> Result<Lease, ErrorBody> {
        self.lease_to_boot(ask).map_err(|why| {
            let what = match &why {
                Refusal::Vcpus { .. } => format!("{} virtual CPUs", ask.cpus),
                _ => format!("{} of memory", mib(ask.ram_bytes)),
            };
            Error::from(why).to_body(format!("run `{}` with {what}", ask.name))
        })
    }

    fn lease_to_boot(&self, ask: BootAsk<'_>) -> Result<Lease, Refusal> {
        let BootAsk { family, user, ram_bytes, cpus, name: _ } = ask;
        let want = self.0.policy.booted(ram_bytes);
        let mut accounts = self.0.accounts();
        self.check_memory(&mut accounts, want)?;
        if cpus > self.vcpus_left(&accounts) {
            return Err(self.no_vcpus(&accounts, cpus));
        }
        Ok(self.vm(&mut accounts, want, family.into(), (user, cpus)))
    }

    /// What a VM that boots is expected to come to use.
    pub fn boot_bytes(&self, ram_bytes: u64) -> u64 {
        self.0.policy.booted(ram_bytes)
    }

    /// What each user's VMs have or were promised.
    pub fn of_users(&self) -> BTreeMap<User, Amount> {
        self.0.accounts().of_users()
    }

    /// What a clone of so much memory is expected to come to use, for plans.
    pub fn clone_bytes(&self, ram_bytes: u64) -> u64 {
        self.0.policy.clone(ram_bytes)
    }

    /// What a fork takes besides its clones, for plans.
    pub fn fork_bytes(&self, ram_bytes: u64) -> u64 {
        self.0.policy.growth(ram_bytes)
    }

    /// Memory and virtual CPUs for a fork, for as many of its clones as fit.
    ///
    /// # Errors
    /// The figures, if not even one clone fits, or not all do and
    /// `all_or_nothing` is set.
    pub fn fork(&self, ask: ForkAsk<'_>, all_or_nothing: bool) -> Result<ForkGrant, Error> {
        let policy = &self.0.policy;
        let (snapshot, each) = (policy.growth(ask.ram_bytes), policy.clone(ask.ram_bytes));
        let want = each.saturating_mul(u64::from(ask.count)).saturating_add(snapshot);
        let mut accounts = self.0.accounts();
        let admissible = self.admissible(&mut accounts);
        let clones =
            |bytes: u64| u32::try_from(bytes.saturating_sub(snapshot) / each).unwrap_or(u32::MAX);
        let places = |vcpus: u32| vcpus.checked_div(ask.cpus).unwrap_or(u32::MAX);
        let by_vcpus = places(self.vcpus_left(&accounts));
        let mut bounds = vec![(clones(admissible), Bound::Memory), (by_vcpus, Bound::Vcpus)];
        if ask.by_guest {
            let (has, may) = (accounts.of_family(ask.family), self.family_may());
            let left = may.less(has);
            bounds.extend([
                (left.vms, Bound::Family { by: Figure::Vms, has, may }),
                (clones(left.room.memory_bytes), Bound::Family { by: Figure::Memory, has, may }),
                (places(left.room.vcpus), Bound::Family { by: Figure::Vcpus, has, may }),
            ]);
        }
        bounds.extend(ask.allowed.map(|allowed| (allowed.count, Bound::Quota(allowed))));
        let tightest = bounds.into_iter().min_by_key(|(count, _)| *count);
        let (fitting, bound) = tightest.unwrap_or((0, Bound::Memory));
        if ask.count == 0 && snapshot > admissible {
            return Err(self.no_memory(&accounts, snapshot, admissible).into());
        }
        let granted = fitting.min(ask.count);
        let refused = (granted < ask.count).then(|| {
            let want_vcpus = ask.cpus.saturating_mul(ask.count);
            let why = match bound {
                Bound::Memory => self.no_memory(&accounts, want, admissible),
                Bound::Vcpus => self.no_vcpus(&accounts, want_vcpus),
                Bound::Quota(allowed) => allowed.refused(),
                Bound::Family { by, has, may } => Refusal::Family { by, has, may },
            };
            Error::Few { granted, asked: ask.count, why }
        });
        match refused {
            Some(refused) if granted == 0 || all_or_nothing => Err(refused),
            refused => {
                let family: Arc<str> = ask.family.into();
                Ok(ForkGrant {
                    snapshot: self.lease(&mut accounts, snapshot, Some(Arc::clone(&family))),
                    clones: (0..granted)
                        .map(|_| {
                            let owner = (ask.user, ask.cpus);
                            self.vm(&mut accounts, each, Arc::clone(&family), owner)
                        })
                        .collect(),
                    refused: refused.map(|error| error.to_body(ask.message)),
                })
            }
        }
    }

    /// Memory for the pages that a VM overwrites while a snapshot of it is being stored.
    ///
    /// # Errors
    /// There is not enough: the figures.
    pub fn snapshot(&self, family: &str, ram_bytes: u64) -> Result<Lease, Refusal> {
        let want = self.0.policy.growth(ram_bytes);
        let mut accounts = self.0.accounts();
        self.check_memory(&mut accounts, want)?;
        Ok(self.lease(&mut accounts, want, Some(family.into())))
    }

    /// Memory for the pages of a stored snapshot that VMs start from, which come from its store as
    /// they are touched.
    ///
    /// # Errors
    /// There is not enough: the figures.
    pub fn cache(&self, missing_bytes: u64) -> Result<Lease, Refusal> {
        self.cache_in_place_of(missing_bytes, &[])
    }

    /// The same in place of what was set aside before. Once this is granted, the former reservation
    /// is released.
    ///
    /// # Errors
    /// As [`Admission::cache`]; what was set aside stays.
    pub fn cache_in_place_of(
        &self,
        missing_bytes: u64,
        before: &[Arc<Lease>],
    ) -> Result<Lease, Refusal> {
        let mut accounts = self.0.accounts();
        let mut set_aside = Vec::new();
        for lease in before {
            if let Some(account) = accounts.leases.get_mut(&lease.id) {
                set_aside.push((lease.id, std::mem::take(&mut account.committed_bytes)));
            }
        }
        if let Err(why) = self.check_memory(&mut accounts, missing_bytes) {
            for (id, bytes) in set_aside {
                if let Some(account) = accounts.leases.get_mut(&id) {
                    account.committed_bytes = bytes;
                }
            }
            return Err(why);
        }
        Ok(self.lease(&mut accounts, missing_bytes, None))
    }

    /// Memory for a QEMU that waits in the pool.
    ///
    /// # Errors
    /// There is not enough now: the figures.
    pub fn waiting(&self) -> Result<Lease, Refusal> {
        let mut accounts = self.0.accounts();
        self.check_memory(&mut accounts, QEMU_CLONE_BYTES)?;
        Ok(self.lease(&mut accounts, QEMU_CLONE_BYTES, None))
    }

    /// What may still be handed out.
    pub fn admissible_bytes(&self) -> u64 {
        self.admissible(&mut self.0.accounts())
    }

    /// What may still be handed out, for plans.
    pub fn room(&self) -> Room {
        let mut accounts = self.0.accounts();
        let memory_bytes = self.admissible(&mut accounts);
        Room { memory_bytes, vcpus: self.vcpus_left(&accounts) }
    }

    /// How many virtual CPUs VMs have or were promised.
    pub fn vcpus(&self) -> u32 {
        self.0.accounts().vcpus()
    }

    /// How many virtual CPUs all VMs may have together.
    pub fn vcpus_max(&self) -> u32 {
        self.0.policy.vcpus_max()
    }

    /// The host's own figures.
    pub fn host(&self) -> HostMemory {
        self.0.probe.host()
    }

    fn admissible(&self, accounts: &mut Accounts) -> u64 {
        let now = self.0.probe.host().available_bytes;
        let known = accounts.probed.filter(|(at, _)| at.elapsed() < PROBE_EVERY);
        let then = known.map_or_else(|| self.probe(accounts), |(_, then)| then);
        let free = now.min(then).saturating_sub(self.0.policy.reserve_bytes);
        free.saturating_sub(accounts.outstanding_bytes())
    }

    /// Whether so much memory may be handed out.
    fn check_memory(&self, accounts: &mut Accounts, want: u64) -> Result<(), Refusal> {
        let admissible = self.admissible(accounts);
        match want > admissible {
            true => Err(self.no_memory(accounts, want, admissible)),
            false => Ok(()),
        }
    }

    fn no_memory(&self, accounts: &Accounts, want_bytes: u64, admissible_bytes: u64) -> Refusal {
        let HostMemory { total_bytes, available_bytes } = self.0.probe.host();
        Refusal::Memory {
            want_bytes,
            admissible_bytes,
            total_bytes,
            available_bytes,
            outstanding_bytes: accounts.outstanding_bytes(),
            committed_bytes: accounts.committed_bytes(),
            reserve_bytes: self.0.policy.reserve_bytes,
        }
    }

    fn no_vcpus(&self, accounts: &Accounts, want: u32) -> Refusal {
        let Policy { cores, vcpus_per_core, .. } = self.0.policy;
        Refusal::Vcpus {
            want,
            admissible: self.vcpus_left(accounts),
            max: self.vcpus_max(),
            per_core: vcpus_per_core,
            cores,
            promised: accounts.vcpus(),
        }
    }

    fn vcpus_left(&self, accounts: &Accounts) -> u32 {
        self.vcpus_max().saturating_sub(accounts.vcpus())
    }

    /// What all VMs use now; what the host has available after that.
    fn probe(&self, accounts: &mut Accounts) -> u64 {
        for account in accounts.leases.values_mut() {
            account.private_bytes = account.pid.map_or(0, |pid| self.0.probe.private_bytes(pid));
        }
        let available_bytes = self.0.probe.host().available_bytes;
        accounts.probed = Some((Instant::now(), available_bytes));
        available_bytes
    }

    /// How much guests may promise to one family.
    fn family_may(&self) -> Amount {
        let policy = &self.0.policy;
        let all_bytes = self.0.probe.host().total_bytes.saturating_sub(policy.reserve_bytes);
        // Rounded up: even of few, the first can be used.
        let share = u64::from(policy.vcpus_max()) * u64::from(policy.family_vcpus_percent);
        let room = Room {
            memory_bytes: percent(all_bytes, policy.family_memory_percent),
            vcpus: u32::try_from(share.div_ceil(100)).unwrap_or(u32::MAX),
        };
        Amount { vms: policy.family_vms_max, room }
    }

    fn lease(&self, accounts: &mut Accounts, bytes: u64, family: Option<Arc<str>>) -> Lease {
        Lease { admission: self.clone(), id: accounts.add(bytes, family) }
    }

    fn vm(
        &self,
        accounts: &mut Accounts,
        bytes: u64,
        family: Arc<str>,
        owner: (User, u32),
    ) -> Lease {
        let lease = self.lease(accounts, bytes, Some(family));
        if let Some(account) = accounts.leases.get_mut(&lease.id) {
            account.owner = Some(owner);
        }
        lease
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

    /// Counts for this family from now on: a VM that starts from a store begins a family, whose name
    /// is known only once the VM has an id.
    pub fn belongs_to(&self, family: &str) {
        self.change(|account| account.family = Some(family.into()));
    }

    /// No more than so much is still to be used.
    pub fn is_enough(&self, bytes: u64) {
        self.change(|account| account.committed_bytes = account.committed_bytes.min(bytes));
    }

    /// A part of it, or all, as a lease of its own, for no process.
    pub fn split_off(&self, bytes: u64) -> Lease {
        let mut accounts = self.admission.0.accounts();
        let (mut taken, mut family) = (0, None);
        if let Some(account) = accounts.leases.get_mut(&self.id) {
            taken = bytes.min(account.committed_bytes);
            account.committed_bytes -= taken;
            family = account.family.clone();
        }
        self.admission.lease(&mut accounts, taken, family)
    }

    /// What was promised by another one goes to this one.
    pub fn add(&self, other: Lease) {
        let mut accounts = self.admission.0.accounts();
        let other = accounts.leases.get_mut(&other.id);
        let bytes = other.map_or(0, |account| std::mem::take(&mut account.committed_bytes));
        if let Some(account) = accounts.leases.get_mut(&self.id) {
            account.committed_bytes = account.committed_bytes.saturating_add(bytes);
        }
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
        let mut accounts = self.admission.0.accounts();
        let ended = accounts.leases.remove(&self.id);
        if ended.is_some_and(|account| account.pid.is_some()) {
            // What it used is free now, or soon.
            accounts.probed = None;
        }
    }
}

/// Without overflow.
fn percent(bytes: u64, percent: u8) -> u64 {
    bytes / 100 * u64::from(percent) + bytes % 100 * u64::from(percent) / 100
}
