//! What a user may have in the whole cluster.
//!
//! ```text
//!   a host: VMs to admit ── QuotaAsk ──► the user's keeper: Counts::take ──► how many it may admit
//!           what it has of each user ── Tally, with every heartbeat ──► all hosts: Counts::heard
//! ```
//!
//! [`keeper_of`] names the one host that counts for a user. It gives out what other hosts do not
//! have, and records at once what it gave. All hosts hear what each has of each user, so that any
//! can be the next keeper. So no user gets beyond the quota, on any host and in any order, as long
//! as there is one keeper. A new keeper first hears all others.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::id::{HostId, sha256};
use crate::room::Room;

/// Most users of whom a host may tell. Each costs some 100 bytes.
const USERS_MAX: usize = 4096;

/// The host that counts what a user has: every member finds the same one, and if members come or
/// go, few users get another. Highest random weight, or rendezvous, hashing (Thaler and
/// Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on
/// Networking 6 (1), 1998).
///
/// Of `members` those that are not gone should be given.
pub fn keeper_of(user: &str, members: impl IntoIterator<Item = HostId>) -> Option<HostId> {
    let weight = |host: HostId| {
        let mut text = host.get().to_be_bytes().to_vec();
        text.extend_from_slice(user.as_bytes());
        sha256(&text)
    };
    members.into_iter().max_by_key(|host| (weight(*host), *host))
}

/// VMs, and what they need together: what a user has, or may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    pub vms: u32,
    pub room: Room,
}

impl Amount {
    /// As what a user may have: no bound.
    pub const ALL: Self =
        Self { vms: u32::MAX, room: Room { memory_bytes: u64::MAX, vcpus: u32::MAX } };

    /// `count` VMs of one shape.
    #[must_use]
    pub fn of(count: u32, shape: Room) -> Self {
        Self { vms: count, room: shape.times(count) }
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { vms: self.vms.saturating_add(other.vms), room: self.room.plus(other.room) }
    }

    /// What is left after `other`; nothing where that is more.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self { vms: self.vms.saturating_sub(other.vms), room: self.room.less(other.room) }
    }

    /// Of each the greater.
    #[must_use]
    fn most(self, other: Self) -> Self {
        let room = Room {
            memory_bytes: self.room.memory_bytes.max(other.room.memory_bytes),
            vcpus: self.room.vcpus.max(other.room.vcpus),
        };
        Self { vms: self.vms.max(other.vms), room }
    }

    /// How many VMs of a shape fit.
    pub fn places(self, shape: Room) -> u32 {
        self.vms.min(self.room.places(shape))
    }
}

/// What each user may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// Of all that are not in `users`.
    pub default: Amount,
    pub users: BTreeMap<String, Amount>,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { default: Amount::ALL, users: BTreeMap::new() }
    }
}

impl Bounds {
    pub fn of(&self, user: &str) -> Amount {
        self.users.get(user).copied().unwrap_or(self.default)
    }
}

/// A host asks a user's keeper for more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaAsk {
    pub user: String,
    /// Which life of the asker's daemon it is.
    pub life: u32,
    /// Later asks and tallies of that life have higher ones. What is asked again has the same.
    pub number: u64,
    /// What the host has of the user already.
    pub has: Amount,
    /// How many VMs more it wants.
    pub count: u32,
    /// Of each.
    pub shape: Room,
}

/// What the keeper says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaAnswer {
    /// How many of those it asked for the host may have.
    pub count: u32,
    /// What the user has on all hosts, without those.
    pub has: Amount,
    pub may: Amount,
}

/// What a host has of whom.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub life: u32,
    pub number: u64,
    /// Of whom nothing is said it has nothing.
    pub users: BTreeMap<String, Amount>,
    /// For whom it is just asking for more: what it has may be more than that by now.
    pub asking: BTreeSet<String>,
}

#[derive(Debug, Clone, Default)]
struct Told {
    life: u32,
    /// Of its last tally.
    number: Option<u64>,
    users: BTreeMap<String, (u64, Amount)>,
}

/// What users have on each host, as far as this one has heard.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    hosts: BTreeMap<HostId, Told>,
}

impl Counts {
    /// What a user has on all hosts but one.
    fn elsewhere(&self, user: &str, but: HostId) -> Amount {
        let others = self.hosts.iter().filter(|(host, _)| **host != but);
        let has = others.filter_map(|(_, told)| Some(told.users.get(user)?.1));
        has.fold(Amount::default(), Amount::plus)
    }

    /// Whether a host has told what it has.
    pub fn has_heard(&self, host: HostId) -> bool {
        self.hosts.get(&host).is_some_and(|told| told.number.is_some())
    }

    /// Forget hosts that are no members any more.
    pub fn keep(&mut self, is_member: impl Fn(HostId) -> bool) {
        self.hosts.retain(|host, _| is_member(*host));
    }

    /// What it had in an earlier life has ended with that.
    fn host(&mut self, from: HostId, life: u32) -> &mut Told {
        let told = self.hosts.entry(from).or_default();
        if told.life != life {
            *told = Told { life, ..Told::default() };
        }
        told
    }

    /// As the user's keeper, give a host as much of what it asks for as the quota still allows.
    pub fn take(&mut self, from: HostId, ask: &QuotaAsk, may: Amount) -> QuotaAnswer {
        let has = self.elsewhere(&ask.user, from).plus(ask.has);
        let mut count = may.less(has).places(ask.shape).min(ask.count);
        let told = self.host(from, ask.life);
        if told.users.len() >= USERS_MAX && !told.users.contains_key(&ask.user) {
            count = 0;
        } else {
            let then = ask.has.plus(Amount::of(count, ask.shape));
            told.users.insert(ask.user.clone(), (ask.number, then));
        }
        QuotaAnswer { count, has, may }
    }

    /// A host has told what it has. What it has asked for since stands.
    pub fn heard(&mut self, from: HostId, tally: &Tally) {
        let told = self.host(from, tally.life);
        if told.number.is_some_and(|number| number > tally.number) {
            return;
        }
        told.number = Some(tally.number);
        let asks = |user: &String| tally.asking.contains(user);
        told.users.retain(|user, (number, _)| *number > tally.number || asks(user));
        for (user, has) in tally.users.iter().take(USERS_MAX) {
            let (number, known) = told.users.entry(user.clone()).or_insert((tally.number, *has));
            if *number <= tally.number {
                (*number, *known) = (tally.number, known.most(*has));
            }
        }
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

    fn ask(number: u64, has: u32, count: u32) -> QuotaAsk {
        let has = Amount::of(has, SHAPE);
        QuotaAsk { user: "u".into(), life: 1, number, has, count, shape: SHAPE }
    }

    fn tally(number: u64, has: u32) -> Tally {
        let users = BTreeMap::from([("u".to_owned(), Amount::of(has, SHAPE))]);
        Tally { life: 1, number, users, asking: BTreeSet::new() }
    }

    fn tally_while_asking(number: u64, has: u32) -> Tally {
        Tally { asking: BTreeSet::from(["u".to_owned()]), ..tally(number, has) }
    }

    const TEN: Amount = Amount { vms: 10, ..Amount::ALL };

    #[test]
    fn a_user_gets_up_to_the_quota_and_again_what_has_ended() {
        let mut counts = Counts::default();
        let take =
            |counts: &mut Counts, from, ask: QuotaAsk| counts.take(host(from), &ask, TEN).count;
        assert_eq!(take(&mut counts, 1, ask(1, 0, 7)), 7);
        assert_eq!(take(&mut counts, 1, ask(1, 0, 7)), 7, "sent again");
        assert_eq!(take(&mut counts, 2, ask(1, 0, 7)), 3);
        let answer = counts.take(host(3), &ask(1, 0, 1), TEN);
        assert_eq!((answer.count, answer.has, answer.may), (0, Amount::of(10, SHAPE), TEN));
        counts.heard(host(1), &tally(2, 2));
        assert_eq!(take(&mut counts, 3, ask(2, 0, 20)), 5);
        counts.keep(|id| id != host(2));
        assert_eq!(take(&mut counts, 3, ask(3, 5, 20)), 3);
        let by_memory = Amount { room: Room { memory_bytes: 105, vcpus: 99 }, ..Amount::ALL };
        assert_eq!(counts.take(host(4), &ask(1, 0, 9), by_memory).count, 0);
        let other = QuotaAsk { user: "v".into(), ..ask(2, 0, 20) };
        assert_eq!(counts.take(host(4), &other, by_memory).count, 10, "another user");
    }

    #[test]
    fn what_is_told_late_takes_nothing_back_that_was_given_since() {
        let mut counts = Counts::default();
        assert!(!counts.has_heard(host(1)));
        counts.heard(host(1), &tally(3, 0));
        assert!(counts.has_heard(host(1)));
        assert_eq!(counts.take(host(1), &ask(5, 0, 6), TEN).count, 6);
        counts.heard(host(1), &tally(4, 0));
        counts.heard(host(1), &tally_while_asking(6, 0));
        assert_eq!(counts.take(host(2), &ask(1, 0, 9), TEN).count, 4);
        counts.heard(host(1), &tally(8, 1));
        counts.heard(host(1), &tally(7, 6));
        assert_eq!(counts.take(host(2), &ask(2, 4, 9), TEN).count, 5);
        counts.heard(host(1), &Tally { life: 1, number: 12, ..Tally::default() });
        counts.heard(host(1), &tally(11, 6));
        assert_eq!(counts.take(host(2), &ask(3, 5, 9), TEN).count, 5, "what has ended since");
        // A daemon that was restarted has nothing.
        counts.heard(host(1), &Tally { life: 2, ..Tally::default() });
        assert_eq!(counts.take(host(2), &ask(4, 9, 9), TEN).count, 1);
    }

    #[test]
    fn a_new_keeper_hears_what_there_is_also_of_those_who_ask() {
        let mut counts = Counts::default();
        counts.heard(host(1), &tally_while_asking(4, 7));
        assert_eq!(counts.take(host(2), &ask(1, 0, 9), TEN).count, 3);
        // It had got more from the keeper before than it had told this one.
        counts.heard(host(1), &tally_while_asking(5, 8));
        assert_eq!(counts.take(host(2), &ask(2, 0, 9), TEN).count, 2);
        assert_eq!(counts.take(host(1), &ask(3, 8, 9), TEN).count, 0);
    }

    #[test]
    fn without_a_quota_there_is_no_bound() {
        let mut counts = Counts::default();
        let may = Bounds::default().of("u");
        assert_eq!(counts.take(host(1), &ask(1, 0, 60_000), may).count, 60_000);
        assert_eq!(counts.take(host(2), &ask(1, 0, 60_000), may).count, 60_000);
    }

    #[test]
    fn few_users_move_when_a_host_comes_or_goes() {
        let hosts: Vec<HostId> = (1..=10).filter_map(HostId::new).collect();
        let keepers = |hosts: &[HostId]| -> Vec<HostId> {
            let keeper = |n| keeper_of(&format!("user{n}"), hosts.iter().copied());
            (0..1000).map(|n| keeper(n).expect("there are hosts")).collect()
        };
        let all = keepers(&hosts);
        for host in &hosts {
            let count = all.iter().filter(|keeper| *keeper == host).count();
            assert!((50..150).contains(&count), "{count} of 1000 by one of 10");
        }
        let fewer = keepers(&hosts[1..]);
        for (before, after) in all.iter().zip(&fewer) {
            assert!(before == after || *before == hosts[0], "only who lost his keeper moves");
        }
        assert_eq!(keeper_of("u", []), None);
    }

    /// A host of the model: what it has, what it may add by an answer that is under way.
    #[derive(Debug, Clone, Default)]
    struct Model {
        number: u64,
        has: u32,
        asking: Option<u32>,
        /// On the way to the keeper.
        tallies: Vec<Tally>,
    }

    proptest! {
        /// No user gets beyond the quota, in any order of events and with any number of tallies
        /// lost or late. What has ended is available again once its end is reported.
        #[test]
        fn no_take_goes_beyond_the_quota(
            steps in prop::collection::vec((0..3usize, 0..5u8, 1..8u32, any::<prop::sample::Index>()), 1..80),
        ) {
            let mut counts = Counts::default();
            let mut hosts = vec![Model::default(); 3];
            for (of, what, count, index) in steps {
                let (id, it) = (host(of as u64 + 1), &mut hosts[of]);
                match what {
                    0 if it.asking.is_none() => {
                        it.number += 1;
                        it.asking = Some(counts.take(id, &ask(it.number, it.has, count), TEN).count);
                    }
                    // The answer has come.
                    1 => it.has += it.asking.take().unwrap_or(0),
                    2 => {
                        it.number += 1;
                        let make = if it.asking.is_none() { tally } else { tally_while_asking };
                        it.tallies.push(make(it.number, it.has));
                    }
                    3 if !it.tallies.is_empty() => {
                        let tally = it.tallies.swap_remove(index.index(it.tallies.len()));
                        counts.heard(id, &tally);
                    }
                    // Not what is told as asked for: a turn has all it asked with until it is over.
                    4 if it.asking.is_none() => it.has = it.has.saturating_sub(count),
                    _ => {}
                }
                let all: u32 = hosts.iter().map(|it| it.has + it.asking.unwrap_or(0)).sum();
                prop_assert!(all <= 10, "{all}");
            }
            for (n, it) in hosts.iter_mut().enumerate() {
                (it.has, it.asking) = (0, None);
                counts.heard(host(n as u64 + 1), &tally(it.number + 1, 0));
            }
            prop_assert_eq!(counts.take(host(9), &ask(1, 0, 10), TEN).count, 10);
        }
    }
}
