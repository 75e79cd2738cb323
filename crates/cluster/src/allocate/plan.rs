//! Whom to ask for how much, and whom next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::{Deserialize, Serialize};

use super::{Held, PLACES_MAX};
use crate::id::HostId;
use crate::room::Room;

/// How clones are laid out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// On all hosts, each by what it has free: most cores for a parallel job.
    #[default]
    Spread,
    /// On as few as can be; first where the parent is, then where others of its family are: least
    /// to send.
    Pack,
}

/// A host, as the one that plans last heard of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostView {
    pub id: HostId,
    pub name: String,
    /// Why it gets nothing new: it drains, or is silent.
    pub closed: Option<&'static str>,
    pub free: Room,
    /// What clones take there once, however many they are: for pages that have to come.
    pub once_bytes: u64,
    /// Whether it has VMs of the family, and so some of its pages.
    pub has_family: bool,
}

impl HostView {
    /// How many of `shape` fit there.
    pub fn places(&self, shape: Room) -> u32 {
        self.free.less(Room { memory_bytes: self.once_bytes, vcpus: 0 }).places(shape)
    }
}

/// A plan for one ticket. Ask the hosts that [`Plan::next_asks`] names and report what they
/// granted, until it names none.
///
/// A host that grants less than it was asked for is not asked again, so that it ends.
#[derive(Debug, Clone)]
pub struct Plan {
    policy: Policy,
    wanted: u32,
    granted: u32,
    candidates: BTreeMap<HostId, Candidate>,
}

#[derive(Debug, Clone)]
struct Candidate {
    /// 0: where the parent is; 1: where its family is; 2: elsewhere.
    distance: u8,
    /// How many more it can have, as far as is known.
    left: u32,
    /// How many it has been asked for and not answered yet.
    asked: u32,
    granted: u32,
}

impl Plan {
    /// For `count` clones that each need `shape`, on those of `views` that take any.
    pub fn new(
        views: &[HostView],
        count: u32,
        shape: Room,
        policy: Policy,
        near: Option<HostId>,
    ) -> Self {
        Self::within(views, None, count, shape, policy, near)
    }

    /// The same, with no more on each host than an engine holds there for it.
    pub fn within(
        views: &[HostView],
        held: Option<&Held>,
        count: u32,
        shape: Room,
        policy: Policy,
        near: Option<HostId>,
    ) -> Self {
        let open = views.iter().filter(|view| view.closed.is_none());
        let places = open.map(|view| {
            let may = held.map_or(u32::MAX, |it| it.places.get(&view.id).copied().unwrap_or(0));
            (view, view.places(shape).min(may))
        });
        let candidate = |(view, left): (&HostView, u32)| {
            let distance = match near {
                Some(near) if near == view.id => 0,
                _ if view.has_family => 1,
                _ => 2,
            };
            (view.id, Candidate { distance, left: left.min(PLACES_MAX), asked: 0, granted: 0 })
        };
        let candidates = places.map(candidate).collect();
        Self { policy, wanted: count.min(PLACES_MAX), granted: 0, candidates }
    }

    /// How many were granted so far.
    pub fn granted(&self) -> u32 {
        self.granted
    }

    /// How many are neither granted nor asked for.
    fn missing(&self) -> u32 {
        let asked: u32 = self.candidates.values().map(|it| it.asked).sum();
        self.wanted.saturating_sub(self.granted).saturating_sub(asked)
    }

    /// Which hosts to ask now, and for how many, besides those in flight. A host has at most one
    /// request at a time. Empty if all is granted or asked for, or no host has anything left. Once
    /// all have answered, that is the end.
    pub fn next_asks(&mut self) -> Vec<(HostId, u32)> {
        let missing = self.missing();
        let mut shares = match self.policy {
            Policy::Spread => self.spread(missing),
            Policy::Pack => self.pack(missing),
        };
        shares.retain(|_, share| *share > 0);
        for (id, share) in &shares {
            if let Some(candidate) = self.candidates.get_mut(id) {
                candidate.asked = *share;
                candidate.left -= share;
            }
        }
        shares.into_iter().collect()
    }

    /// Those who can be asked.
    fn open(&self) -> impl Iterator<Item = (HostId, &Candidate)> {
        let open = self.candidates.iter().filter(|(_, it)| it.left > 0 && it.asked == 0);
        open.map(|(id, it)| (*id, it))
    }

    /// One after the other, each to the host that this ticket fills least, as a share of what it
    /// could have.
    fn spread(&self, missing: u32) -> BTreeMap<HostId, u32> {
        let fill = |given: u32, places: u32| (u64::from(given) << 32) / u64::from(places.max(1));
        let places = |it: &Candidate| it.granted + it.left;
        let mut heap: BinaryHeap<_> = self
            .open()
            .map(|(id, it)| Reverse((fill(it.granted + 1, places(it)), it.distance, id)))
            .collect();
        let mut shares = BTreeMap::new();
        for _ in 0..missing {
            let Some(Reverse((_, distance, id))) = heap.pop() else { break };
            let Some(it) = self.candidates.get(&id) else { continue };
            let share: &mut u32 = shares.entry(id).or_default();
            *share += 1;
            if *share < it.left {
                let next = fill(it.granted + *share + 1, places(it));
                heap.push(Reverse((next, distance, id)));
            }
        }
        shares
    }

    /// The nearest first; of those as near, the smallest that can have all of the rest, or else the
    /// largest.
    fn pack(&self, missing: u32) -> BTreeMap<HostId, u32> {
        let mut open: Vec<(HostId, &Candidate)> = self.open().collect();
        let mut shares = BTreeMap::new();
        let mut rest = missing;
        while rest > 0 {
            let order = |(id, it): &(HostId, &Candidate)| {
                let by_size = if it.left >= rest { (0, it.left) } else { (1, u32::MAX - it.left) };
                (it.distance, by_size, *id)
            };
            let best = open.iter().enumerate().min_by_key(|(_, candidate)| order(candidate));
            let Some((index, _)) = best else { break };
            let (id, it) = open.swap_remove(index);
            let share = it.left.min(rest);
            shares.insert(id, share);
            rest -= share;
        }
        shares
    }

    /// What a host answered to what it was asked for. More than that does not count.
    pub fn on_granted(&mut self, host: HostId, count: u32) {
        let Some(candidate) = self.candidates.get_mut(&host) else { return };
        let asked = std::mem::take(&mut candidate.asked);
        let count = count.min(asked);
        if count < asked {
            candidate.left = 0;
        }
        candidate.granted += count;
        self.granted += count;
    }

    /// A host granted nothing, or did not answer.
    pub fn on_refused(&mut self, host: HostId) {
        self.on_granted(host, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Room = Room { memory_bytes: 10, vcpus: 1 };

    fn host(id: u64) -> HostId {
        HostId::new(id).expect("not 0")
    }

    fn view(id: u64, places: u32) -> HostView {
        let free = Room { memory_bytes: u64::from(places) * 10 + 9, vcpus: 1000 };
        let name = format!("h{id}");
        HostView { id: host(id), name, closed: None, free, once_bytes: 0, has_family: false }
    }

    fn plan(views: &[HostView], count: u32, policy: Policy, near: Option<u64>) -> Plan {
        Plan::new(views, count, SHAPE, policy, near.map(host))
    }

    fn shares(plan: &mut Plan) -> Vec<(u64, u32)> {
        plan.next_asks().into_iter().map(|(id, share)| (id.get(), share)).collect()
    }

    #[test]
    fn equal_hosts_get_equal_shares() {
        let views: Vec<_> = (1..=4).map(|id| view(id, 100)).collect();
        let mut plan = plan(&views, 32, Policy::Spread, Some(2));
        assert_eq!(shares(&mut plan), [(1, 8), (2, 8), (3, 8), (4, 8)]);
        assert_eq!(shares(&mut plan), [], "all are asked");
        for id in 1..=4 {
            plan.on_granted(host(id), 8);
        }
        assert_eq!((plan.granted(), shares(&mut plan)), (32, vec![]));
    }

    #[test]
    fn shares_go_by_what_hosts_have() {
        let views = [view(1, 30), view(2, 10), view(3, 0)];
        assert_eq!(shares(&mut plan(&views, 8, Policy::Spread, None)), [(1, 6), (2, 2)]);
        assert_eq!(shares(&mut plan(&views, 100, Policy::Spread, None)), [(1, 30), (2, 10)]);
        // The first is where the family is, if there is not one for each.
        let mut views = [view(1, 5), view(2, 5), view(3, 5)];
        views[2].has_family = true;
        assert_eq!(shares(&mut plan(&views, 2, Policy::Spread, Some(2))), [(2, 1), (3, 1)]);
    }

    #[test]
    fn packed_clones_stay_near_and_on_few_hosts() {
        let mut views = [view(1, 4), view(2, 9), view(3, 20), view(4, 6)];
        assert_eq!(shares(&mut plan(&views, 5, Policy::Pack, None)), [(4, 5)], "the smallest");
        assert_eq!(shares(&mut plan(&views, 28, Policy::Pack, None)), [(2, 8), (3, 20)]);
        assert_eq!(shares(&mut plan(&views, 5, Policy::Pack, Some(1))), [(1, 4), (4, 1)]);
        views[3].has_family = true;
        assert_eq!(shares(&mut plan(&views, 12, Policy::Pack, Some(1))), [(1, 4), (2, 2), (4, 6)]);
    }

    #[test]
    fn who_is_closed_gets_nothing() {
        let mut views = [view(1, 4), view(2, 9)];
        views[1].closed = Some("draining");
        assert_eq!(shares(&mut plan(&views, 9, Policy::Spread, None)), [(1, 4)]);
        assert_eq!(shares(&mut plan(&views, 9, Policy::Pack, Some(2))), [(1, 4)]);
    }

    #[test]
    fn what_clones_take_once_leaves_room_for_fewer() {
        let mut views = [view(1, 4), view(2, 9)];
        views[0].once_bytes = 15;
        views[1].once_bytes = 100;
        assert_eq!(shares(&mut plan(&views, 9, Policy::Spread, None)), [(1, 3)]);
        assert_eq!(shares(&mut plan(&views, 9, Policy::Pack, Some(2))), [(1, 3)]);
    }

    #[test]
    fn a_host_gets_no_more_than_it_has_virtual_cpus_left_for() {
        let mut views = [view(1, 100), view(2, 100)];
        views[0].free.vcpus = 7;
        let shape = Room { vcpus: 3, ..SHAPE };
        let plan = |policy| Plan::new(&views, 8, shape, policy, Some(host(1)));
        assert_eq!(shares(&mut plan(Policy::Pack)), [(1, 2), (2, 6)]);
        let mut all = Plan::new(&views, 1000, shape, Policy::Spread, None);
        assert_eq!(shares(&mut all), [(1, 2), (2, 100)]);
    }

    #[test]
    fn what_one_does_not_grant_the_next_is_asked_for() {
        let views = [view(1, 10), view(2, 10), view(3, 10)];
        let mut plan = plan(&views, 9, Policy::Spread, None);
        assert_eq!(shares(&mut plan), [(1, 3), (2, 3), (3, 3)]);
        plan.on_granted(host(1), 1);
        assert_eq!(shares(&mut plan), [], "the others have not answered");
        plan.on_granted(host(2), 3);
        assert_eq!(shares(&mut plan), [(2, 2)]);
        plan.on_refused(host(3));
        plan.on_granted(host(2), 2);
        assert_eq!(shares(&mut plan), [(2, 3)]);
        plan.on_granted(host(2), 1000);
        assert_eq!((plan.granted(), shares(&mut plan)), (9, vec![]));
        plan.on_granted(host(2), 5);
        assert_eq!(plan.granted(), 9, "not asked for");
    }

    #[test]
    fn no_host_gets_more_than_an_engine_holds_there() {
        let views = [1, 2, 3].map(|n| HostView {
            id: HostId::new(n).expect("not 0"),
            name: format!("h{n}"),
            closed: None,
            free: Room { memory_bytes: 40, vcpus: 100 },
            once_bytes: 0,
            has_family: false,
        });
        let ids = [views[0].id, views[1].id];
        let places = BTreeMap::from([(ids[0], 1), (ids[1], 9)]);
        let held = Held { job: "7".into(), places, short: Vec::new() };
        let shape = Room { memory_bytes: 10, vcpus: 1 };
        let mut plan = Plan::within(&views, Some(&held), 8, shape, Policy::Spread, None);
        assert_eq!(plan.next_asks(), [(ids[0], 1), (ids[1], 4)]);
    }

    proptest! {
        #[test]
        fn a_plan_ends_with_all_that_is_to_be_had(
            rooms in prop::collection::vec((0..40u32, 0..40u32, any::<bool>()), 0..8),
            count in 0..150u32,
            pack in any::<bool>(),
            near in prop::option::of(1..8u64),
            late in any::<prop::sample::Index>(),
        ) {
            // What each says that it has, and what it really has.
            let views: Vec<HostView> = rooms
                .iter()
                .zip(1..)
                .map(|((says, _, family), id)| HostView { has_family: *family, ..view(id, *says) })
                .collect();
            let mut left: BTreeMap<HostId, u32> =
                views.iter().zip(&rooms).map(|(view, (_, has, _))| (view.id, *has)).collect();
            let policy = if pack { Policy::Pack } else { Policy::Spread };
            let mut plan = plan(&views, count, policy, near);
            let mut under_way: Vec<(HostId, u32)> = Vec::new();
            let mut answers = 0;
            loop {
                for (id, asked) in plan.next_asks() {
                    prop_assert!(under_way.iter().all(|(other, _)| *other != id), "asked twice at a time");
                    under_way.push((id, asked));
                }
                let sum: u32 = under_way.iter().map(|(_, asked)| asked).sum();
                prop_assert!(plan.granted() + sum <= count, "never more than wanted");
                if under_way.is_empty() {
                    break;
                }
                let (id, asked) = under_way.remove(late.index(under_way.len()));
                let has = left.get_mut(&id).expect("a host");
                let granted = asked.min(*has);
                *has -= granted;
                plan.on_granted(id, granted);
                answers += 1;
                prop_assert!(answers <= 1000, "it does not end");
            }
            // All that hosts both say that they have and have.
            let to_be_had: u32 = rooms.iter().map(|(says, has, _)| says.min(has)).sum();
            prop_assert_eq!(plan.granted(), count.min(to_be_had));
        }
    }
}
