//! Places for clones on other hosts: each host grants what it has, out of its own accounts.
//!
//! What is granted is set aside there at once, so two hosts that ask at the same time never get the
//! same memory or virtual CPUs; it is given back when it is not used in time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorBody;
use vmfork_cluster::allocate::{Ask, Plan, Policy};
use vmfork_cluster::{HostId, Room};

use crate::client::CallError;
use crate::coming::Coming;
use crate::member::{Member, WORD_WAIT};
use vmfork_fork::{Allotted, Reserved};
use vmfork_guest_link::tickets::LEASE;
use vmfork_host::admission::{Admission, ForkAsk, ForkGrant, Lease};
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::quotas::{Allowed, User};
use vmfork_host::vm::Vm;

/// Where places are asked for.
pub(crate) const LEASES: &str = "/cluster/v1/leases";
/// Where they are given back.
pub(crate) const RELEASE: &str = "/cluster/v1/leases/release";
/// Beyond what a ticket waits to be used: the way of an order to start clones.
const GRACE: Duration = Duration::from_secs(30);
/// How long the guest image may take to come to hosts that lack it, before they are asked for
/// places.
const IMAGE_WAIT: Duration = Duration::from_secs(120);
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

/// What is set aside for an ask.
#[derive(Debug)]
pub(crate) struct SetAside {
    pub grant: ForkGrant,
    /// For what has to come of the parent's memory: once for all asks for clones of it.
    pub coming: Vec<Arc<Lease>>,
}

impl PlacesAsk {
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
    ) -> Result<u32, ErrorBody> {
        let mut all = self.all(now);
        let count = |grant: &ForkGrant| u32::try_from(grant.clones.len()).unwrap_or(u32::MAX);
        if let Some(granted) = all.get(&(from, ask.lease)) {
            return Ok(count(&granted.is.grant));
        }
        let message = format!("make room for clones of `{}`", ask.parent);
        if all.keys().filter(|(asker, _)| *asker == from).count() >= LEASES_MAX {
            return Err(ErrorBody::new(vmfork_api::ErrorCode::NoCapacity, message)
                .cause(format!("{LEASES_MAX} tickets of that host wait to be used")));
        }
        let of_parent = all
            .iter()
            .filter(|((asker, _), granted)| *asker == from && granted.parent == ask.parent);
        let sum = |leases: &[Arc<Lease>]| leases.iter().map(|lease| lease.bytes()).sum::<u64>();
        let promised = of_parent.map(|(_, granted)| &granted.is.coming);
        let mut coming = promised.max_by_key(|it| sum(it)).cloned().unwrap_or_default();
        let lacks = ask.coming_bytes.saturating_sub(sum(&coming));
        if lacks > 0 {
            coming.push(Arc::new(admission.cache(&message, lacks)?));
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

/// Places for `vms` clones of a VM on this and other hosts, laid out by `policy`: as many as there
/// are.
pub(crate) async fn reserve(
    core: &Core,
    member: &Arc<Member>,
    parent: &Vm,
    (mut vms, policy): (u32, Policy),
    message: &str,
) -> Allotted {
    let identity = &parent.identity;
    let shape = Room {
        memory_bytes: core.admission.clone_bytes(identity.spec().memory_bytes),
        vcpus: identity.spec().cpus,
    };
    let mut views = member.hosts.views(core);
    let coming = match parent.running_machine() {
        Ok(machine) => member.estimates.coming(&core.admission, identity, &machine, &mut views),
        Err(_) => Coming::default(),
    };
    let over = match core.quota_left(identity.user, (vms, shape), message).await {
        Ok(None) => None,
        Ok(Some(allowed)) => {
            let wish = std::mem::replace(&mut vms, allowed.count);
            Some(allowed.refusal(format!("{message}: {vms} of {wish} fit")))
        }
        Err(error) => return Allotted { refused: Some(error), ..Allotted::default() },
    };
    if vms == 0 {
        return Allotted { refused: over, ..Allotted::default() };
    }
    let ask = Ask { count: vms, shape, family: identity.family.clone(), policy };
    let hold = match member.jobs.hold(&ask, &views, message).await {
        Ok(hold) => hold,
        Err(error) => return Allotted { refused: Some(error), ..Allotted::default() },
    };
    let held = hold.as_ref().map(|hold| Arc::clone(&hold.held));
    let new = |views: &[_]| {
        Plan::within(views, held.as_deref(), vms, shape, policy, Some(member.hosts.id()))
    };
    // Places on hosts that can't have the guest image would be of no use.
    let (until, given_up) = (Instant::now() + IMAGE_WAIT, CancellationToken::new());
    let mut shares = new(&views).next_asks();
    while matches!(
        member.guest_images.give(identity, &shares, &mut views, (until, &given_up)).await,
        Ok(true)
    ) {
        shares = new(&views).next_asks();
    }
    let mut plan = new(&views);
    let mut allotted = Allotted { hold, refused: over, ..Allotted::default() };
    loop {
        let asks = plan.next_asks();
        if asks.is_empty() {
            let short = held.as_ref().map(|held| held.short.join("; "));
            if let Some(short) = short.filter(|short| !short.is_empty()) {
                let error = ErrorBody::new(vmfork_api::ErrorCode::NoCapacity, message).cause(short);
                allotted.refused.get_or_insert(error);
            }
            return allotted;
        }
        let elsewhere = asks.iter().filter(|(host, _)| *host != member.hosts.id());
        let elsewhere = elsewhere.map(|(host, count)| {
            let ask = PlacesAsk {
                lease: member.next_order(),
                parent: identity.name.clone(),
                family: identity.family.clone(),
                user: identity.user,
                memory_bytes: identity.spec().memory_bytes,
                cpus: identity.spec().cpus,
                count: *count,
                coming_bytes: coming.to(*host),
            };
            async move { (*host, lease(member, *host, ask).await) }
        });
        for (_, count) in asks.iter().filter(|(host, _)| *host == member.hosts.id()) {
            match core.admit(identity.ask(message, *count, true), false).await {
                Ok(grant) => {
                    plan.on_granted(
                        member.hosts.id(),
                        u32::try_from(grant.clones.len()).unwrap_or(0),
                    );
                    allotted.add_here(grant);
                }
                Err(error) => {
                    plan.on_refused(member.hosts.id());
                    allotted.refused = Some(error);
                }
            }
        }
        for (host, answer) in join_all(elsewhere).await {
            match answer {
                Ok(reserved) => {
                    plan.on_granted(host, reserved.count);
                    allotted.away.push(reserved);
                }
                Err(error) => {
                    plan.on_refused(host);
                    allotted.refused = Some(error.to_body(message));
                }
            }
        }
    }
}

async fn lease(member: &Arc<Member>, host: HostId, ask: PlacesAsk) -> Result<Reserved, CallError> {
    let (lease, asked) = (ask.lease, ask.count);
    // From here on, so that it is given back if its answer is lost.
    let weak = Arc::downgrade(member);
    let mut reserved = Reserved::new(host, lease, move |host, lease| {
        if let Some(member) = weak.upgrade() {
            give_back(member, host, lease);
        }
    });
    let peer = member
        .hosts
        .peer_of(host, "ask for places")
        .map_err(|source| CallError::Refused { host: host.to_string(), source })?;
    let granted: u32 = peer.ask(LEASES, &ask, WORD_WAIT).await?;
    reserved.count = granted.min(asked);
    Ok(reserved)
}

/// Places there are not needed.
fn give_back(member: Arc<Member>, host: HostId, lease: u64) {
    tokio::spawn(async move {
        let Ok(peer) = member.hosts.peer_of(host, "give places back") else { return };
        if let Err(error) = peer.ask::<u64, ()>(RELEASE, &lease, WORD_WAIT).await {
            tracing::debug!(host = peer.name, "it keeps them a while: {}", chain(&error));
        }
    });
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
        admission.cache_in_place_of("start", more, &first.coming).expect_err("too much");
        left(2 * clones + 2 * coming + (1 << 20));
        let cache = admission.cache_in_place_of("start", 3 << 20, &first.coming);
        drop(first.coming);
        left(2 * clones + coming + (4 << 20));
        drop((cache, leases.take(now, from, 2), leases.take(now, from, 3)));
        left(0);
    }
}
