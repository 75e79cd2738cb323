//! Which host counts what a user has, and asking it for more.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmfork_cluster::HostId;
use vmfork_cluster::allocate::{Counts, QuotaAnswer, QuotaAsk, Tally, keeper_of};

use super::client::WORD_WAIT;
use super::error::{NotTold, TicketError, Unsettled};
use super::hosts::Hosts;
use vmfork_host::core::{Core, TOLD_WITHIN};

/// Where a user's keeper is asked for more.
pub(super) const QUOTAS: &str = "/cluster/v1/quotas";
/// After hosts joined or left: the time until all have heard of that, and a new keeper knows what
/// each host has.
/// Three heartbeats may be lost.
const SETTLED_AFTER: Duration = Duration::from_secs(4);
/// How long who asks waits until a keeper can tell, and how often it asks.
const ASK_FOR: Duration = Duration::from_secs(8);
const ASK_EVERY: Duration = Duration::from_millis(250);

/// This host as one that counts.
#[derive(Debug)]
pub(super) struct Keeper {
    hosts: Arc<Hosts>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    counts: Counts,
    /// Those who may count.
    candidates: BTreeSet<HostId>,
    /// Since when it is those.
    since: Option<Instant>,
}

impl Keeper {
    pub(super) fn new(hosts: &Arc<Hosts>) -> Self {
        Self { hosts: Arc::clone(hosts), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Who may count now.
    fn look(&mut self, now: Instant, candidates: BTreeSet<HostId>) {
        if self.candidates != candidates {
            (self.candidates, self.since) = (candidates, Some(now));
        }
    }

    /// What this host, a candidate itself, waits for before it counts for others; `None`: nothing.
    fn waits_for(&self, now: Instant, own: HostId) -> Option<Unsettled> {
        let others = || self.candidates.iter().filter(|host| **host != own);
        // Alone, it counts at once.
        others().next()?;
        if self.since.is_none_or(|since| now.saturating_duration_since(since) < SETTLED_AFTER) {
            return Some(Unsettled::JustChanged);
        }
        let all_told = others().all(|host| self.counts.has_heard(*host));
        (!all_told).then_some(Unsettled::NotAllTold)
    }
}

impl Keeper {
    /// Notice who may count, and forget what hosts had that are none any more.
    pub(super) fn tend(&self, now: Instant) {
        let candidates = self.hosts.candidates();
        let mut state = self.state();
        state.look(now, candidates);
        state.counts.keep(|host| self.hosts.has(host));
    }

    pub(super) fn keeper_of(&self, user: &str) -> Option<HostId> {
        keeper_of(user, self.hosts.candidates())
    }

    /// A host has told what users have there.
    pub(super) fn heard(&self, from: HostId, tally: &Tally) {
        self.state().counts.heard(from, tally);
    }

    /// As a user's keeper, give a host what it asks for.
    ///
    /// # Errors
    /// This host can't tell now; a conflict.
    pub(super) fn keep(
        &self,
        core: &Core,
        from: HostId,
        ask: &QuotaAsk,
        now: Instant,
    ) -> Result<QuotaAnswer, Unsettled> {
        let candidates = self.hosts.candidates();
        let is_keeper = keeper_of(&ask.user, candidates.iter().copied()) == Some(self.hosts.id);
        let mut state = self.state();
        state.look(now, candidates);
        let waits_for = match is_keeper {
            true => state.waits_for(now, self.hosts.id),
            false => Some(Unsettled::OtherKeeper),
        };
        if let Some(why) = waits_for {
            return Err(why);
        }
        state.counts.heard(self.hosts.id, &core.quotas.tally(&core.admission));
        Ok(state.counts.take(from, ask, core.quotas.bounds().of(&ask.user)))
    }

    /// Ask the user's keeper for more.
    ///
    /// # Errors
    /// It does not answer, or hosts do not agree on who that is, for a while.
    pub(crate) async fn take(
        &self,
        core: &Core,
        ask: QuotaAsk,
    ) -> Result<QuotaAnswer, TicketError> {
        let until = Instant::now() + ASK_FOR;
        let mut is_second = false;
        loop {
            let source = match self.ask_keeper(core, &ask).await {
                Ok(answer) if answer.count < ask.count && !is_second => {
                    // What has just ended on another host may not have been told yet.
                    is_second = true;
                    tokio::time::sleep(TOLD_WITHIN).await;
                    continue;
                }
                Ok(answer) => return Ok(answer),
                Err(source) => source,
            };
            if Instant::now() >= until {
                return Err(TicketError::Untold { user: ask.user, source: Box::new(source) });
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// → why there is no answer.
    async fn ask_keeper(&self, core: &Core, ask: &QuotaAsk) -> Result<QuotaAnswer, NotTold> {
        let keeper = self.keeper_of(&ask.user).ok_or(NotTold::NoKeeper)?;
        if keeper == self.hosts.id {
            return Ok(self.keep(core, self.hosts.id, ask, Instant::now())?);
        }
        let peer = self.hosts.peer_of(keeper)?;
        let answer = peer.ask::<QuotaAsk, QuotaAnswer>(QUOTAS, ask, WORD_WAIT).await?;
        Ok(QuotaAnswer { count: answer.count.min(ask.count), ..answer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_counts_when_all_know_of_it_and_have_told_what_they_have() {
        let [own, other] = [1, 2].map(|id| HostId::new(id).expect("not 0"));
        let (mut state, began) = (State::default(), Instant::now());
        state.look(began, BTreeSet::from([own]));
        assert_eq!(state.waits_for(began, own), None, "alone");
        state.look(began, BTreeSet::from([own, other]));
        state.counts.heard(other, &Tally::default());
        assert!(state.waits_for(began, own).is_some(), "just come");
        let later = began + SETTLED_AFTER;
        state.look(later, BTreeSet::from([own, other]));
        assert_eq!(state.waits_for(later, own), None);
        state.counts.keep(|host| host == own);
        assert!(state.waits_for(later, own).is_some(), "it has told nothing");
    }
}
