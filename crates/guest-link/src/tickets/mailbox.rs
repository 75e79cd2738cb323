//! Messages of one ticket's workers that their parent has not received, and the waiters for one.

use std::collections::{BTreeMap, VecDeque};

/// A waiter: for a message of this worker, or of any.
type Waiter<R> = (Option<u32>, R);

/// `R` answers a request, `M` is a message.
#[derive(Debug)]
pub(super) struct Mailbox<R, M> {
    /// In order of arrival, by an ever growing number.
    messages: BTreeMap<u64, (u32, M)>,
    next: u64,
    waiting: VecDeque<Waiter<R>>,
}

impl<R, M> Default for Mailbox<R, M> {
    fn default() -> Self {
        Self { messages: BTreeMap::new(), next: 0, waiting: VecDeque::new() }
    }
}

impl<R, M> Mailbox<R, M> {
    /// A message arrived. If a waiter wants it, that waiter gets it.
    pub(super) fn send(&mut self, vmid: u32, message: M) -> Option<(R, M)> {
        let place = self.waiting.iter().position(|(of, _)| of.is_none_or(|of| of == vmid));
        match place.and_then(|place| self.waiting.remove(place)) {
            Some((_, reply)) => Some((reply, message)),
            None => {
                self.messages.insert(self.next, (vmid, message));
                self.next += 1;
                None
            }
        }
    }

    /// The oldest message of a worker, or of any.
    pub(super) fn receive(&mut self, of: Option<u32>) -> Option<(u32, M)> {
        let number = match of {
            None => *self.messages.first_key_value()?.0,
            Some(of) => *self.messages.iter().find(|(_, (vmid, _))| *vmid == of)?.0,
        };
        self.messages.remove(&number)
    }

    /// Nothing is there; wait for it.
    pub(super) fn wait(&mut self, of: Option<u32>, reply: R) {
        self.waiting.push_back((of, reply));
    }

    /// Whose messages are waited for.
    pub(super) fn wanted(&self) -> impl Iterator<Item = Option<u32>> {
        self.waiting.iter().map(|(of, _)| *of)
    }

    /// The waiters that cannot succeed, now that some workers have ended.
    pub(super) fn take_hopeless(&mut self, hopeless: impl Fn(Option<u32>) -> bool) -> Vec<R> {
        let (gone, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition::<VecDeque<_>, _>(|(of, _)| hopeless(*of));
        self.waiting = waiting;
        gone.into_iter().map(|(_, reply)| reply).collect()
    }

    /// Forget the waiters for which `gone` returns true.
    pub(super) fn abandon(&mut self, gone: &mut impl FnMut(&R) -> bool) {
        self.waiting.retain(|(_, reply)| !gone(reply));
    }
}
