//! How many VMs a user may have, on all hosts together.
//!
//! ```text
//!   VMs are to be admitted ── Core::turn ──► the user's keeper, on any host ──► this many may be
//!                                └── Turn: admission ──► the VMs count as the user's
//! ```
//!
//! What a user has on this host the accounts of [`crate::admission`] tell; so what VMs count with
//! is what they were promised, and what was set aside for a ticket counts as well. One turn of a
//! user on a host at a time; the keeper ([`vmfork_cluster::allocate::Counts`], on the host that all
//! agree on) has taken down what a turn may add before it adds it. Whose VMs they are is said where
//! their family begins (`run`, or a snapshot's start): all clones are that user's.
//!
//! Promise: no user has more than the quota, also when several hosts admit at the same time.
//! It does not hold between hosts that take each other for gone. VMs of a user without a quota wait
//! for no keeper.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::OwnedMutexGuard;
use vmfork_api::ErrorBody;
use vmfork_cluster::Room;
use vmfork_cluster::allocate::{Amount, Bounds, QuotaAnswer, QuotaAsk, Tally};

use super::Core;
use crate::admission::{Admission, ForkAsk, ForkGrant};
use crate::error::Error;
use crate::quotas::{Allowed, User};

/// What has ended on a host is reported within this time.
pub const TOLD_WITHIN: Duration = Duration::from_millis(400);

/// The host that counts what a user has on all hosts.
pub trait Keeper: Send + Sync {
    /// Ask it for more; `None`: this host is alone, and counts itself.
    fn take<'a>(
        &'a self,
        core: &'a Core,
        ask: QuotaAsk,
        message: &'a str,
    ) -> BoxFuture<'a, Result<Option<QuotaAnswer>, ErrorBody>>;
}

/// The quotas as this host knows them, and who is getting more here.
#[derive(Debug)]
pub struct Quotas {
    bounds: Bounds,
    /// Which life of the daemon it is.
    life: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of the last ask or tally.
    number: u64,
    turns: HashMap<User, Arc<tokio::sync::Mutex<()>>>,
    /// Those of whom VMs are being admitted.
    busy: HashSet<User>,
    /// What the keeper takes a user to have here, as far as it was given out.
    given: HashMap<User, Amount>,
}

/// A user's turn to get more on this host, until it is dropped: by then what is admitted must be in
/// the accounts.
#[derive(Debug)]
pub struct Turn<'a> {
    allowed: Option<Allowed>,
    _busy: Option<Busy<'a>>,
}

impl Turn<'_> {
    /// `None`: the user has no quota.
    pub fn allowed(&self) -> Option<Allowed> {
        self.allowed
    }
}

#[derive(Debug)]
struct Busy<'a> {
    quotas: &'a Quotas,
    user: User,
    _one_at_a_time: OwnedMutexGuard<()>,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.quotas.state().busy.remove(&self.user);
    }
}

impl Quotas {
    pub fn new(bounds: Bounds, life: u32) -> Self {
        Self { bounds, life, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    async fn busy(&self, user: User) -> Busy<'_> {
        let turn = Arc::clone(self.state().turns.entry(user).or_default());
        let one_at_a_time = turn.lock_owned().await;
        self.state().busy.insert(user);
        Busy { quotas: self, user, _one_at_a_time: one_at_a_time }
    }

    fn next(&self) -> u64 {
        let mut state = self.state();
        state.number += 1;
        state.number
    }

    /// What users have here, for all who may have to count it.
    pub fn tally(&self, admission: &Admission) -> Tally {
        let mut state = self.state();
        state.number += 1;
        let has = admission.of_users().into_iter();
        let users = has.map(|(user, has)| (user.to_string(), has)).collect();
        let asking = state.busy.iter().map(User::to_string).collect();
        Tally { life: self.life, number: state.number, users, asking }
    }

    /// Users that have less here by now than their keepers know: the keepers should be notified
    /// soon.
    pub fn shrunk(&self, admission: &Admission) -> Vec<User> {
        let mut state = self.state();
        if state.given.is_empty() {
            return Vec::new();
        }
        let has = admission.of_users();
        let State { given, busy, .. } = &mut *state;
        let mut shrunk = Vec::new();
        given.retain(|user, given| {
            let has = has.get(user).copied().unwrap_or_default();
            if *given != has && !busy.contains(user) {
                *given = has;
                shrunk.push(*user);
            }
            *given != Amount::default()
        });
        shrunk
    }
}

impl Core {
    /// Wait until it is a user's turn to get `count` VMs more on this host, and ask how many may
    /// be; `message` says what is done.
    ///
    /// # Errors
    /// That can't be told now: the host that counts does not answer.
    pub async fn turn(
        &self,
        user: User,
        (count, shape): (u32, Room),
        message: &str,
    ) -> Result<Turn<'_>, Error> {
        let name = user.to_string();
        let may = self.quotas.bounds.of(&name);
        if may == Amount::ALL {
            return Ok(Turn { allowed: None, _busy: None });
        }
        let busy = self.quotas.busy(user).await;
        let has = self.admission.of_users().get(&user).copied().unwrap_or_default();
        let (life, number) = (self.quotas.life, self.quotas.next());
        let ask = QuotaAsk { user: name, life, number, has, count, shape };
        let answer = match self.keeper.take(self, ask, message).await.map_err(Error::Keeper)? {
            None => {
                let count = may.less(has).places(shape).min(count);
                QuotaAnswer { count, has, may }
            }
            Some(answer) => {
                let given = has.plus(Amount::of(answer.count, shape));
                self.quotas.state().given.insert(user, given);
                answer
            }
        };
        let QuotaAnswer { count, has, may } = answer;
        Ok(Turn { allowed: Some(Allowed { count, user, has, may }), _busy: Some(busy) })
    }

    /// What a user's quota leaves of `count` VMs, wherever they are to be; `None`: all of them.
    /// Others may take it meanwhile.
    ///
    /// # Errors
    /// As [`Core::turn`].
    pub async fn quota_left(
        &self,
        user: User,
        (count, shape): (u32, Room),
        message: &str,
    ) -> Result<Option<Allowed>, Error> {
        let mut left = None;
        for is_second in [false, true] {
            if is_second {
                // What has just ended on another host may not have been told yet.
                tokio::time::sleep(TOLD_WITHIN).await;
            }
            let allowed = self.turn(user, (0, shape), message).await?.allowed();
            left = allowed.map(|it| Allowed { count: it.may.less(it.has).places(shape), ..it });
            if left.is_none_or(|allowed| allowed.count >= count) {
                return Ok(None);
            }
        }
        Ok(left)
    }

    /// A turn to get clones of a VM with so much memory.
    ///
    /// # Errors
    /// As [`Core::turn`].
    pub async fn turn_of_clones(&self, ask: &ForkAsk<'_>) -> Result<Turn<'_>, Error> {
        let memory_bytes = self.admission.clone_bytes(ask.ram_bytes);
        let shape = Room { memory_bytes, vcpus: ask.cpus };
        self.turn(ask.user, (ask.count, shape), ask.message).await
    }

    /// Memory for a fork, for as many of its clones as fit and their user's quota allows.
    ///
    /// # Errors
    /// As [`Admission::fork`], or [`Core::turn`].
    pub async fn admit(&self, ask: ForkAsk<'_>, all_or_nothing: bool) -> Result<ForkGrant, Error> {
        let turn = self.turn_of_clones(&ask).await?;
        let ask = ForkAsk { allowed: turn.allowed(), ..ask };
        self.admission.fork(ask, all_or_nothing)
    }
}

#[cfg(test)]
#[path = "quotas_tests.rs"]
mod tests;
