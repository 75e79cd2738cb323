//! What other hosts have asked this one to start: decisions without I/O.
//!
//! An order that its sender gives up leaves nothing. The order, its answer and the message that
//! gives it up may arrive in any order, late or never. So the sender repeats the message until it
//! is confirmed, and this host remembers it, also of orders that have not arrived.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_cluster::HostId;

/// An order's sender, and the number that it has there.
pub(crate) type OrderId = (HostId, u64);

/// How long what became of an order is remembered: longer than any order takes, and than its sender
/// speaks of it.
const REMEMBERED: Duration = Duration::from_secs(2 * 3600);

#[derive(Debug)]
enum State {
    Running(CancellationToken),
    /// The VMs that it started.
    Done(Vec<String>),
    GivenUp,
}

/// The orders that a host was given.
#[derive(Debug, Default)]
pub(crate) struct Orders(HashMap<OrderId, (Instant, State)>);

impl Orders {
    fn tidy(&mut self, now: Instant) {
        self.0.retain(|_, (since, state)| {
            matches!(state, State::Running(_)) || now.saturating_duration_since(*since) < REMEMBERED
        });
    }

    /// An order has come. → what is cancelled when it is given up; `None`: it was, or it came
    /// before.
    pub(crate) fn begin(&mut self, now: Instant, id: OrderId) -> Option<CancellationToken> {
        self.tidy(now);
        if self.0.contains_key(&id) {
            return None;
        }
        let given_up = CancellationToken::new();
        self.0.insert(id, (now, State::Running(given_up.clone())));
        Some(given_up)
    }

    /// It was carried out, and started these VMs. → those of them that are not wanted any more.
    pub(crate) fn done(&mut self, now: Instant, id: OrderId, vms: Vec<String>) -> Vec<String> {
        match self.0.get_mut(&id) {
            Some((since, state @ State::Running(_))) => {
                (*since, *state) = (now, State::Done(vms));
                Vec::new()
            }
            _ => vms,
        }
    }

    /// Its sender does not want it any more. → the VMs that it started.
    pub(crate) fn give_up(&mut self, now: Instant, id: OrderId) -> Vec<String> {
        self.tidy(now);
        match self.0.insert(id, (now, State::GivenUp)) {
            Some((_, State::Running(given_up))) => {
                given_up.cancel();
                Vec::new()
            }
            Some((_, State::Done(vms))) => vms,
            Some((_, State::GivenUp)) | None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> OrderId {
        (HostId::new(7).expect("not 0"), number)
    }

    fn vms() -> Vec<String> {
        vec!["a".to_owned(), "b".to_owned()]
    }

    #[test]
    fn one_that_is_given_up_leaves_nothing_whatever_comes_first() {
        let now = Instant::now();
        // After its answer.
        let mut orders = Orders::default();
        orders.begin(now, id(1)).expect("new");
        assert!(orders.done(now, id(1), vms()).is_empty(), "they are wanted");
        assert_eq!(orders.give_up(now, id(1)), vms());
        assert!(orders.give_up(now, id(1)).is_empty(), "once is enough");
        // While it is carried out: what was started all the same is not wanted.
        let given_up = orders.begin(now, id(2)).expect("new");
        assert!(orders.give_up(now, id(2)).is_empty() && given_up.is_cancelled());
        assert_eq!(orders.done(now, id(2), vms()), vms());
        // Before it comes.
        orders.give_up(now, id(3));
        assert!(orders.begin(now, id(3)).is_none());
    }

    #[test]
    fn an_order_is_carried_out_once() {
        let now = Instant::now();
        let mut orders = Orders::default();
        orders.begin(now, id(1)).expect("new");
        assert!(orders.begin(now, id(1)).is_none());
        orders.begin(now, (HostId::new(8).expect("not 0"), 1)).expect("another host's");
    }

    #[test]
    fn what_became_of_them_is_forgotten_in_time_but_not_those_that_go_on() {
        let now = Instant::now();
        let later = now + REMEMBERED;
        let mut orders = Orders::default();
        let runs = orders.begin(now, id(1)).expect("new");
        orders.begin(now, id(2)).expect("new");
        orders.done(now, id(2), vms());
        orders.begin(later, id(3)).expect("new");
        assert_eq!(orders.0.len(), 2);
        assert!(orders.give_up(later, id(1)).is_empty() && runs.is_cancelled());
    }
}
