//! The allocator that needs nothing but the hosts themselves.

use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use super::{
    AllocateError, Allocator, Ask, Boxed, LeaseAsk, LeaseId, PLACES_MAX, Peers, Places, Plan,
    Policy, QuotaAsk, Ticket,
};
use crate::id::RandomError;

/// Most reasons that a ticket tells: who reads them wants to know what is wrong, not a list of all hosts.
const REASONS_MAX: usize = 8;

/// Grants by what hosts have: the user's quota first, then leases of the hosts that a [`Plan`] names.
///
/// If it is dropped in between, what it was granted by then ends by itself, as every lease does.
#[derive(Debug, Clone)]
pub struct BuiltIn {
    peers: Arc<dyn Peers>,
    policy: Policy,
    ttl_ms: u64,
}

impl BuiltIn {
    /// `ttl_ms`: how long the places of a ticket wait to be used.
    pub fn new(peers: Arc<dyn Peers>, policy: Policy, ttl_ms: u64) -> Self {
        Self { peers, policy, ttl_ms }
    }

    fn quota_ask(&self, id: LeaseId, ask: &Ask, count: u32) -> QuotaAsk {
        let (user, shape) = (ask.user.clone(), ask.shape);
        QuotaAsk { id, user, count, shape, ttl_ms: self.ttl_ms }
    }

    async fn grant(&self, ask: &Ask) -> Result<Ticket, AllocateError> {
        if ask.count == 0 {
            return Err(AllocateError::Zero);
        }
        let wanted = ask.count.min(PLACES_MAX);
        let id = LeaseId::random()?;
        let allowed = self.peers.take_quota(self.quota_ask(id, ask, wanted)).await;
        let allowed = allowed
            .map_err(|source| AllocateError::Keeper { user: ask.user.clone(), source })?
            .min(wanted);
        if allowed == 0 {
            return Err(AllocateError::Quota { user: ask.user.clone() });
        }
        let mut short = Vec::new();
        if allowed < ask.count {
            let bound =
                if allowed < wanted { "the user's quota allows" } else { "a ticket can have" };
            short.push(format!("{bound} {allowed}"));
        }
        let views = self.peers.views();
        let mut plan = Plan::new(&views, allowed, ask.shape, self.policy, ask.near);
        let taken = take_places(self.peers.as_ref(), &mut plan, ask, self.ttl_ms).await;
        let got = taken.as_ref().map_or(0, |(places, _)| places.iter().map(|it| it.count).sum());
        if got < allowed {
            self.peers.keep_quota(self.quota_ask(id, ask, got)).await;
        }
        let (places, failures) = taken?;
        if got < allowed {
            let closed = views.iter().filter_map(|view| {
                let none = (view.places(ask.shape) == 0).then_some("it has no room left");
                view.closed.or(none).map(|why| format!("{}: {why}", view.name))
            });
            short.extend(failures);
            short.extend(closed);
            shorten(&mut short);
        }
        if places.is_empty() {
            return Err(AllocateError::NoRoom { asked: ask.count, shape: ask.shape, why: short });
        }
        Ok(Ticket { id: id.to_string(), asked: ask.count, places, quota: Some(id), short })
    }
}

pub(crate) fn shorten(reasons: &mut Vec<String>) {
    let more = reasons.len().saturating_sub(REASONS_MAX);
    if more > 0 {
        reasons.truncate(REASONS_MAX);
        reasons.push(format!("and {more} more"));
    }
}

/// Carries a plan out: asks those it names, all at once, and goes on until it names nobody any more. What was granted, and
/// why some granted less; for allocators.
///
/// # Errors
/// There are no random bytes for names of leases. What was granted by then was given back.
pub async fn take_places(
    peers: &dyn Peers,
    plan: &mut Plan,
    ask: &Ask,
    ttl_ms: u64,
) -> Result<(Vec<Places>, Vec<String>), RandomError> {
    let mut under_way = FuturesUnordered::new();
    let mut places: Vec<Places> = Vec::new();
    let mut failures = Vec::new();
    let mut broken = None;
    loop {
        // In the order of the plan; it ends since each host that grants less is not asked again.
        for (host, count) in if broken.is_none() { plan.next_asks() } else { Vec::new() } {
            let lease = match LeaseId::random() {
                Ok(lease) => lease,
                Err(error) => {
                    broken = Some(error);
                    break;
                }
            };
            let lease_ask = LeaseAsk {
                id: lease,
                count,
                shape: ask.shape,
                user: ask.user.clone(),
                family: ask.family.clone(),
                ttl_ms,
            };
            let answer = peers.lease(host, lease_ask);
            under_way.push(async move { (host, lease, count, answer.await) });
        }
        let Some((host, lease, asked, answer)) = under_way.next().await else { break };
        let count = answer.as_ref().map_or(0, |count| *count).min(asked);
        plan.on_granted(host, count);
        if count > 0 {
            places.push(Places { host, count, lease });
        }
        if count < asked {
            let name = peers
                .views()
                .into_iter()
                .find(|view| view.id == host)
                .map_or_else(|| host.to_string(), |view| view.name);
            match answer {
                Ok(_) => failures.push(format!("{name}: it had room for {count} of {asked}")),
                Err(failure) => {
                    failures.push(format!("{name}: {failure}"));
                    // It may have granted it, and the answer was lost.
                    peers.release(host, lease).await;
                }
            }
        }
    }
    if let Some(error) = broken {
        for it in &places {
            peers.release(it.host, it.lease).await;
        }
        return Err(error);
    }
    places.sort_by_key(|it| it.host);
    Ok((places, failures))
}

impl Allocator for BuiltIn {
    fn allocate<'a>(&'a self, ask: &'a Ask) -> Boxed<'a, Result<Ticket, AllocateError>> {
        Box::pin(self.grant(ask))
    }

    fn release<'a>(&'a self, ticket: &'a Ticket) -> Boxed<'a, Result<(), AllocateError>> {
        Box::pin(async move {
            let releases: FuturesUnordered<_> =
                ticket.places.iter().map(|it| self.peers.release(it.host, it.lease)).collect();
            releases.collect::<Vec<()>>().await;
            Ok(())
        })
    }

    fn ended<'a>(&'a self, _ticket: &'a Ticket) -> Boxed<'a, String> {
        Box::pin(std::future::pending())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::allocate::{HostView, Leases, PeerFailure, Quota, Quotas};
    use crate::id::HostId;
    use crate::room::Room;

    const SHAPE: Room = Room { memory_bytes: 10, vcpus: 1 };
    const NOW: Duration = Duration::from_secs(1);

    #[derive(Debug)]
    struct Host {
        leases: Leases,
        capacity: u32,
        /// What others heard last.
        says: u32,
        draining: bool,
        silent: bool,
    }

    /// Hosts in one process. Each call yields a few times, so that those of several allocators mix.
    #[derive(Debug)]
    struct Fake {
        hosts: Mutex<BTreeMap<HostId, Host>>,
        quotas: Mutex<Quotas>,
        yields: u64,
    }

    fn host(id: u64) -> HostId {
        HostId::new(id).expect("not 0")
    }

    impl Fake {
        fn new(capacities: &[u32], quota: Quota) -> Self {
            let host = |(capacity, id): (&u32, u64)| {
                let (capacity, leases) = (*capacity, Leases::default());
                (
                    host(id),
                    Host { leases, capacity, says: capacity, draining: false, silent: false },
                )
            };
            let hosts = Mutex::new(capacities.iter().zip(1..).map(host).collect());
            Self { hosts, quotas: Mutex::new(Quotas::new(quota, BTreeMap::new())), yields: 0 }
        }

        fn held(&self) -> u32 {
            let hosts = self.hosts.lock().expect("whole");
            hosts.values().map(|host| host.leases.held().vcpus).sum()
        }

        fn quota_used(&self, user: &str) -> u32 {
            self.quotas.lock().expect("whole").used(user).0
        }

        fn change(&self, id: u64, change: impl FnOnce(&mut Host)) {
            change(self.hosts.lock().expect("whole").get_mut(&host(id)).expect("there"));
        }
    }

    impl Peers for Fake {
        fn views(&self) -> Vec<HostView> {
            let hosts = self.hosts.lock().expect("whole");
            let view = |(id, host): (&HostId, &Host)| HostView {
                id: *id,
                name: format!("h{}", id.get()),
                closed: host.draining.then_some("it is draining"),
                free: SHAPE.times(host.says),
                once_bytes: 0,
                has_family: false,
            };
            hosts.iter().map(view).collect()
        }

        fn lease(&self, id: HostId, ask: LeaseAsk) -> Boxed<'_, Result<u32, PeerFailure>> {
            Box::pin(async move {
                for _ in 0..(id.get() * 7 + u64::from(ask.count)) % (self.yields + 1) {
                    tokio::task::yield_now().await;
                }
                let mut hosts = self.hosts.lock().expect("whole");
                let host = hosts.get_mut(&id).expect("there");
                let free = SHAPE.times(host.capacity);
                let granted = host.leases.grant(&ask, free, host.draining, NOW);
                if host.silent {
                    return Err(PeerFailure { why: "no answer".into() });
                }
                granted.map_err(|refusal| PeerFailure { why: refusal.to_string() })
            })
        }

        fn release(&self, id: HostId, lease: LeaseId) -> Boxed<'_, ()> {
            Box::pin(async move {
                self.change(id.get(), |host| {
                    host.leases.release(lease);
                });
            })
        }

        fn take_quota(&self, ask: QuotaAsk) -> Boxed<'_, Result<u32, PeerFailure>> {
            Box::pin(async move { Ok(self.quotas.lock().expect("whole").take(&ask, NOW)) })
        }

        fn keep_quota(&self, ask: QuotaAsk) -> Boxed<'_, ()> {
            Box::pin(async move { self.quotas.lock().expect("whole").keep(&ask, NOW) })
        }
    }

    fn ask(count: u32) -> Ask {
        Ask { count, shape: SHAPE, user: "u".into(), family: "f".into(), near: None }
    }

    fn built_in(fake: &Arc<Fake>, policy: Policy) -> BuiltIn {
        BuiltIn::new(Arc::clone(fake) as Arc<dyn Peers>, policy, 1000)
    }

    #[tokio::test]
    async fn a_ticket_is_places_on_hosts_and_can_be_given_back() {
        let fake = Arc::new(Fake::new(&[10, 10, 10, 10], Quota::default()));
        let allocator = built_in(&fake, Policy::Spread);
        let ticket = allocator.allocate(&ask(32)).await.expect("room");
        let counts: Vec<u32> = ticket.places.iter().map(|it| it.count).collect();
        assert_eq!((counts, ticket.short.len()), (vec![8, 8, 8, 8], 0));
        assert_eq!((fake.held(), fake.quota_used("u")), (32, 32));
        allocator.release(&ticket).await.expect("given back");
        allocator.release(&ticket).await.expect("again");
        assert_eq!(fake.held(), 0);
    }

    #[tokio::test]
    async fn less_is_granted_with_the_reasons() {
        let fake = Arc::new(Fake::new(&[4, 4, 4, 4], Quota::default()));
        fake.change(2, |host| host.draining = true);
        fake.change(3, |host| host.capacity = 1);
        fake.change(4, |host| host.silent = true);
        let allocator = built_in(&fake, Policy::Spread);
        let mut ticket = allocator.allocate(&ask(20)).await.expect("some room");
        ticket.short.sort();
        assert_eq!(ticket.count(), 5);
        assert_eq!(
            ticket.short,
            ["h2: it is draining", "h3: it had room for 1 of 4", "h4: no answer"]
        );
        assert_eq!(fake.held(), 5, "what the silent one granted was given back");
        assert_eq!(fake.quota_used("u"), 5);
        let error = allocator.allocate(&ask(3)).await.expect_err("no room").to_string();
        assert!(error.starts_with("no room for any of 3 clones of 0 MiB and 1 CPUs: "), "{error}");
        assert!(error.contains("h1: it has no room left"), "{error}");
        assert_eq!(fake.quota_used("u"), 5, "nothing is kept of the quota");
    }

    #[tokio::test]
    async fn a_quota_bounds_a_user_on_all_hosts_together() {
        let quota = Quota { clones: 12, ..Quota::default() };
        let fake = Arc::new(Fake::new(&[10, 10], quota));
        let allocator = built_in(&fake, Policy::Pack);
        let ticket = allocator.allocate(&ask(15)).await.expect("room");
        assert_eq!((ticket.count(), ticket.short), (12, vec!["the user's quota allows 12".into()]));
        let error = allocator.allocate(&ask(1)).await.expect_err("the quota is used up");
        assert_eq!(error.to_string(), "user `u` has all that the quota allows");
        let other = Ask { user: "v".into(), ..ask(3) };
        assert_eq!(allocator.allocate(&other).await.expect("another user").count(), 3);
        assert!(matches!(allocator.allocate(&ask(0)).await, Err(AllocateError::Zero)));
    }

    proptest! {
        #[test]
        fn many_allocators_at_once_never_overbook_and_use_all(
            capacities in prop::collection::vec((0..12u32, 0..12u32), 1..5),
            asks in prop::collection::vec((1..20u32, any::<bool>()), 1..8),
            yields in 0..5u64,
        ) {
            let real: Vec<u32> = capacities.iter().map(|(capacity, _)| *capacity).collect();
            let mut fake = Fake::new(&real, Quota::default());
            fake.yields = yields;
            for ((_, more), id) in capacities.iter().zip(1..) {
                // Views are old: they say more than there is.
                fake.change(id, |host| host.says += more);
            }
            let fake = Arc::new(fake);
            let all = async {
                let allocations = asks.iter().map(|(count, pack)| {
                    let policy = if *pack { Policy::Pack } else { Policy::Spread };
                    let (allocator, ask) = (built_in(&fake, policy), ask(*count));
                    async move { allocator.allocate(&ask).await.map_or(0, |ticket| ticket.count()) }
                });
                futures_util::future::join_all(allocations).await
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let granted: Vec<u32> = runtime.block_on(all);
            let capacity: u32 = real.iter().sum();
            let wanted: u32 = asks.iter().map(|(count, _)| count).sum();
            for (got, (count, _)) in granted.iter().zip(&asks) {
                prop_assert!(got <= count);
            }
            let sum: u32 = granted.iter().sum();
            prop_assert_eq!(sum, wanted.min(capacity));
            prop_assert_eq!(fake.held(), sum);
            prop_assert_eq!(fake.quota_used("u"), sum);
            for host in fake.hosts.lock().expect("whole").values() {
                prop_assert!(host.leases.held().vcpus <= host.capacity);
            }
        }
    }
}
