//! Places for clones on other hosts: each host grants what it has, out of its own accounts.
//!
//! What is granted is set aside there at once, so two hosts that ask at the same time never get the
//! same memory or virtual CPUs; it is given back when it is not used in time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmfork_cluster::HostId;

use crate::error::TicketError;
use crate::remote_fork::receive::SetAside;
use vmfork_guest_link::tickets::LEASE;
use vmfork_host::admission::{Admission, ForkAsk, ForkGrant, Lease};
use vmfork_host::quotas::{Allowed, User};

/// Where places are asked for.
pub(crate) const LEASES: &str = "/cluster/v1/leases";
/// Where they are given back.
pub(crate) const RELEASE: &str = "/cluster/v1/leases/release";
/// Beyond what a ticket waits to be used: the way of an order to start clones.
const GRACE: Duration = Duration::from_secs(30);
/// Most of one host's at a time.
const LEASES_MAX: usize = 4096;

/// What a host is asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PlacesAsk {
    /// By which the asker speaks of it. It gives each number once.
    pub lease: u64,
    pub parent: String,
    pub family: String,
    pub user: User,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub count: u32,
    /// What of the parent's memory has to come besides, as far as the asker knows.
    pub coming_bytes: u64,
}

impl PlacesAsk {
    /// What is done, for its error.
    pub(crate) fn message(&self) -> String {
        format!("make room for clones of `{}`", self.parent)
    }

    /// Of this host's accounts.
    pub(crate) fn of_clones<'a>(&'a self, message: &'a str) -> ForkAsk<'a> {
        ForkAsk {
            message,
            family: &self.family,
            user: self.user,
            ram_bytes: self.memory_bytes,
            cpus: self.cpus,
            count: self.count,
            by_guest: true,
            allowed: None,
        }
    }
}

#[derive(Debug)]
struct Granted {
    parent: String,
    is: SetAside,
    expires: Instant,
}

/// What this host has set aside for others, by who asked.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<HashMap<(HostId, u64), Granted>>);

impl Leases {
    fn all(&self, now: Instant) -> MutexGuard<'_, HashMap<(HostId, u64), Granted>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, granted| granted.expires > now);
        all
    }

    /// Set aside what fits of an ask, out of what `admission` has and the user's quota allows. An
    /// ask that comes again gets the same answer. → for how many clones.
    ///
    /// # Errors
    /// Not even one fits, or what has to come does not.
    pub(crate) fn grant(
        &self,
        now: Instant,
        from: HostId,
        ask: &PlacesAsk,
        (admission, allowed): (&Admission, Option<Allowed>),
    ) -> Result<u32, TicketError> {
        let mut all = self.all(now);
        let count = |grant: &ForkGrant| u32::try_from(grant.clones.len()).unwrap_or(u32::MAX);
        if let Some(granted) = all.get(&(from, ask.lease)) {
            return Ok(count(&granted.is.grant));
        }
        if all.keys().filter(|(asker, _)| *asker == from).count() >= LEASES_MAX {
            return Err(TicketError::TooMany { limit: LEASES_MAX });
        }
        let message = ask.message();
        let of_parent = all
            .iter()
            .filter(|((asker, _), granted)| *asker == from && granted.parent == ask.parent);
        let sum = |leases: &[Arc<Lease>]| leases.iter().map(|lease| lease.bytes()).sum::<u64>();
        let promised = of_parent.map(|(_, granted)| &granted.is.coming);
        let mut coming = promised.max_by_key(|it| sum(it)).cloned().unwrap_or_default();
        let lacks = ask.coming_bytes.saturating_sub(sum(&coming));
        if lacks > 0 {
            coming.push(Arc::new(admission.cache(lacks)?));
        }
        let fork = ForkAsk { allowed, ..ask.of_clones(&message) };
        let grant = admission.fork(fork, false)?;
        let granted = count(&grant);
        let (parent, expires) = (ask.parent.clone(), now + LEASE + GRACE);
        let is = SetAside { grant, coming };
        all.insert((from, ask.lease), Granted { parent, is, expires });
        Ok(granted)
    }

    /// What was set aside, for the clones that come now; `None`: it was used, given back, or has
    /// expired.
    pub(crate) fn take(&self, now: Instant, from: HostId, lease: u64) -> Option<SetAside> {
        self.all(now).remove(&(from, lease)).map(|granted| granted.is)
    }

    /// Give back what was not used in time.
    pub(crate) fn expire(&self, now: Instant) {
        drop(self.all(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_host::testing::Host;

    fn ask(lease: u64, parent: &str, count: u32, coming_bytes: u64) -> PlacesAsk {
        PlacesAsk {
            lease,
            parent: parent.to_owned(),
            family: "f".to_owned(),
            user: User::Uid(0),
            memory_bytes: 8 << 30,
            cpus: 1,
            count,
            coming_bytes,
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_that_ask_at_once_never_get_the_same_memory_and_unused_places_come_back() {
        let host = Host::start().await;
        let admission = &host.core.admission;
        let all = admission.admissible_bytes();
        let each = admission.clone_bytes(8 << 30);
        let fits = u32::try_from(all / each).expect("few");
        let leases = Leases::default();
        let now = Instant::now();
        let [one, other] = [1, 2].map(|id| HostId::new(id).expect("not 0"));
        let grant = |from, lease, count, now| {
            leases.grant(now, from, &ask(lease, "web", count, 0), (admission, None))
        };
        let first = grant(one, 1, 4, now).expect("room");
        assert_eq!(first, 4);
        let second = grant(other, 1, 100, now).expect("room");
        assert!(first + second <= fits, "{first} + {second} > {fits}");
        grant(one, 2, 1, now).expect_err("full");
        assert_eq!(grant(one, 1, 4, now).expect("the same again"), 4);
        assert_eq!(leases.take(now, one, 1).expect("granted").grant.clones.len(), 4);
        assert!(leases.take(now, one, 1).is_none(), "once");
        let later = now + LEASE + GRACE;
        leases.expire(later);
        assert_eq!(admission.admissible_bytes(), all);
        assert!(leases.take(later, other, 1).is_none(), "too late");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_has_to_come_is_set_aside_once_for_all_clones_of_a_vm() {
        let host = Host::start().await;
        let admission = &host.core.admission;
        let all = admission.admissible_bytes();
        let clones = admission.clone_bytes(8 << 30) + admission.fork_bytes(8 << 30);
        let (leases, now) = (Leases::default(), Instant::now());
        let from = HostId::new(1).expect("not 0");
        let grant = |ask| leases.grant(now, from, &ask, (admission, None));
        let left = |lacks: u64| assert_eq!(admission.admissible_bytes(), all - lacks);
        grant(ask(1, "web", 1, all)).expect_err("no room for its pages");
        left(0);
        let coming = 64 << 20;
        grant(ask(1, "web", 1, coming)).expect("room");
        left(clones + coming);
        grant(ask(2, "web", 1, coming + (1 << 20))).expect("room");
        left(2 * clones + coming + (1 << 20));
        grant(ask(3, "db", 1, coming)).expect("room");
        left(3 * clones + 2 * coming + (1 << 20));
        // What the host itself finds to be missing takes its place.
        let first = leases.take(now, from, 1).expect("granted");
        drop(first.grant);
        left(2 * clones + 2 * coming + (1 << 20));
        let more = all + 1;
        admission.cache_in_place_of(more, &first.coming).expect_err("too much");
        left(2 * clones + 2 * coming + (1 << 20));
        let cache = admission.cache_in_place_of(3 << 20, &first.coming);
        drop(first.coming);
        left(2 * clones + coming + (4 << 20));
        drop((cache, leases.take(now, from, 2), leases.take(now, from, 3)));
        left(0);
    }
}
