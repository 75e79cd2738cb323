//! What a user may have in the whole cluster.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::LeaseId;
use super::leases::expiry;
use crate::id::{HostId, sha256};
use crate::room::Room;

/// Most holdings that one keeper counts; each costs some 150 bytes.
const HOLDINGS_MAX: usize = 65_536;

/// The host that counts what a user has: every member finds the same one, and if members come or go, few users get
/// another. Highest random weight, or rendezvous, hashing (Thaler and Ravishankar, "Using name-based mappings to increase
/// hit rates", IEEE/ACM Transactions on Networking 6 (1), 1998).
///
/// Of `members` the active ones that are not gone should be given. While hosts disagree on who that is, a user may for a
/// while have his quota twice; what each host gives away is bounded by its leases all the same.
pub fn keeper_of(user: &str, members: impl IntoIterator<Item = HostId>) -> Option<HostId> {
    let weight = |host: HostId| {
        let mut text = host.get().to_be_bytes().to_vec();
        text.extend_from_slice(user.as_bytes());
        sha256(&text)
    };
    members.into_iter().max_by_key(|host| (weight(*host), *host))
}

/// A bound for one user. The default is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub clones: u32,
    pub room: Room,
}

impl Default for Quota {
    fn default() -> Self {
        Self { clones: u32::MAX, room: Room { memory_bytes: u64::MAX, vcpus: u32::MAX } }
    }
}

/// What is asked of a user's keeper, or told it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaAsk {
    /// Names what is taken.
    pub id: LeaseId,
    pub user: String,
    pub count: u32,
    /// Of one clone.
    pub shape: Room,
    /// When it is given back by itself, if it is not renewed. Clones that run are renewed by their ticket's host.
    pub ttl_ms: u64,
}

#[derive(Debug, Clone)]
struct Holding {
    count: u32,
    shape: Room,
    expires: Duration,
}

/// The book of a keeper: what users have now. Soft: it is not written down, but told anew by renewals.
#[derive(Debug, Clone, Default)]
pub struct Quotas {
    default: Quota,
    users: BTreeMap<String, Quota>,
    holdings: BTreeMap<String, BTreeMap<LeaseId, Holding>>,
}

impl Quotas {
    /// `default` for all who are not in `users`.
    pub fn new(default: Quota, users: BTreeMap<String, Quota>) -> Self {
        Self { default, users, holdings: BTreeMap::new() }
    }

    /// A user's bound.
    pub fn quota(&self, user: &str) -> Quota {
        self.users.get(user).copied().unwrap_or(self.default)
    }

    /// What a user has: clones, and what they need together.
    pub fn used(&self, user: &str) -> (u32, Room) {
        let holdings = self.holdings.get(user).into_iter().flat_map(BTreeMap::values);
        holdings.fold((0, Room::default()), |(count, room), it| {
            (it.count.saturating_add(count), room.plus(it.shape.times(it.count)))
        })
    }

    /// Takes as much as asked for, or as the quota still allows; 0: nothing. The same id gets the same again.
    pub fn take(&mut self, ask: &QuotaAsk, now: Duration) -> u32 {
        self.expire(now);
        if let Some(holding) = self.holdings.get(&ask.user).and_then(|it| it.get(&ask.id)) {
            return holding.count;
        }
        let quota = self.quota(&ask.user);
        let (clones, room) = self.used(&ask.user);
        let by_room = quota.room.less(room).places(ask.shape);
        let count = ask.count.min(quota.clones.saturating_sub(clones)).min(by_room);
        if count == 0 || self.len() >= HOLDINGS_MAX {
            return 0;
        }
        self.put(ask, count, now);
        count
    }

    /// What there is of `ask.id` from now on, for `ask.ttl_ms`; 0 clones: nothing. Taken as it is, over the quota or
    /// unknown: who tells it has them, and was granted them, if by another keeper.
    pub fn keep(&mut self, ask: &QuotaAsk, now: Duration) {
        self.expire(now);
        if ask.count == 0 {
            if let Some(holdings) = self.holdings.get_mut(&ask.user) {
                holdings.remove(&ask.id);
            }
            self.holdings.retain(|_, holdings| !holdings.is_empty());
        } else if self.len() < HOLDINGS_MAX {
            self.put(ask, ask.count, now);
        }
    }

    fn put(&mut self, ask: &QuotaAsk, count: u32, now: Duration) {
        let holding = Holding { count, shape: ask.shape, expires: expiry(now, ask.ttl_ms) };
        self.holdings.entry(ask.user.clone()).or_default().insert(ask.id, holding);
    }

    fn len(&self) -> usize {
        self.holdings.values().map(BTreeMap::len).sum()
    }

    /// Ends what was not renewed; all calls that change something do so first.
    pub fn expire(&mut self, now: Duration) {
        self.holdings.retain(|_, holdings| {
            holdings.retain(|_, holding| holding.expires > now);
            !holdings.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Room = Room { memory_bytes: 10, vcpus: 1 };

    fn ask(n: u8, user: &str, count: u32) -> QuotaAsk {
        let id = LeaseId::from_bytes([n; 16]);
        QuotaAsk { id, user: user.into(), count, shape: SHAPE, ttl_ms: 1000 }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn quotas() -> Quotas {
        let few = Quota { clones: 10, ..Quota::default() };
        let small = Quota { room: Room { memory_bytes: 35, vcpus: 100 }, ..Quota::default() };
        Quotas::new(few, BTreeMap::from([("small".to_owned(), small)]))
    }

    #[test]
    fn a_user_gets_up_to_the_quota_and_again_what_was_given_back() {
        let mut quotas = quotas();
        assert_eq!(quotas.take(&ask(1, "u", 7), ms(0)), 7);
        assert_eq!(quotas.take(&ask(1, "u", 7), ms(0)), 7, "sent again");
        assert_eq!(quotas.take(&ask(2, "u", 7), ms(0)), 3);
        assert_eq!(quotas.take(&ask(3, "u", 1), ms(0)), 0);
        assert_eq!(quotas.take(&ask(3, "v", 1), ms(0)), 1, "another user");
        assert_eq!(quotas.take(&ask(4, "small", 9), ms(0)), 3, "by memory");
        quotas.keep(&ask(1, "u", 2), ms(0));
        assert_eq!(quotas.used("u"), (5, SHAPE.times(5)));
        quotas.keep(&ask(2, "u", 0), ms(0));
        assert_eq!(quotas.take(&ask(5, "u", 20), ms(0)), 8);
        quotas.keep(&ask(1, "u", 2), ms(900));
        assert_eq!(quotas.take(&ask(6, "u", 20), ms(1000)), 8, "what was not renewed is over");
    }

    #[test]
    fn a_new_keeper_learns_by_renewals_what_there_is() {
        let mut quotas = quotas();
        quotas.keep(&ask(1, "u", 14), ms(0));
        assert_eq!(quotas.used("u").0, 14, "it is so, over the quota or not");
        assert_eq!(quotas.take(&ask(2, "u", 1), ms(0)), 0);
    }

    #[test]
    fn without_a_quota_there_is_no_bound() {
        let mut quotas = Quotas::default();
        assert_eq!(quotas.take(&ask(1, "u", 60_000), ms(0)), 60_000);
        assert_eq!(quotas.take(&ask(2, "u", 60_000), ms(0)), 60_000);
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

    proptest! {
        #[test]
        fn no_take_goes_beyond_the_quota(
            steps in prop::collection::vec((0..8u8, 0..8u32, 0..4u8, 0..400u64), 1..60),
        ) {
            let mut quotas = quotas();
            let mut now = ms(0);
            for (id, count, what, passed) in steps {
                now += ms(passed);
                let ask = ask(id, "u", count);
                if what == 0 {
                    quotas.keep(&QuotaAsk { count: 0, ..ask }, now);
                } else {
                    quotas.take(&ask, now);
                }
                prop_assert!(quotas.used("u").0 <= 10);
            }
        }
    }
}
