//! A user of its own for each QEMU, so that none can signal or trace another.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmfork_qemu::RunAs;

/// Hands out ids in turn: one that was given back comes again last, when its QEMU's keeper has long
/// gone, too.
#[derive(Debug)]
pub(crate) struct Users {
    base: u32,
    count: u32,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Offsets from `base`.
    taken: HashSet<u32>,
    next: u32,
}

/// The user of one QEMU; given back on drop.
#[derive(Debug)]
pub(crate) struct User {
    users: Arc<Users>,
    offset: u32,
}

impl Users {
    /// `count` ids from `base` on.
    pub(crate) fn new(base: u32, count: u32) -> Arc<Self> {
        Arc::new(Self { base, count, inner: Mutex::default() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that no other QEMU has; `None` if all are taken.
    pub(crate) fn take(self: &Arc<Self>) -> Option<User> {
        let mut inner = self.inner();
        let from = inner.next;
        let offset = (from..self.count).chain(0..from).find(|id| !inner.taken.contains(id))?;
        inner.taken.insert(offset);
        inner.next = (offset + 1) % self.count;
        drop(inner);
        Some(User { users: Arc::clone(self), offset })
    }
}

impl User {
    pub(crate) fn run_as(&self) -> RunAs {
        let id = self.users.base + self.offset;
        RunAs { uid: id, gid: id }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.users.inner().taken.remove(&self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_have_one_id_however_often_they_come_round() {
        let users = Users::new(1000, 4);
        let uid = |user: &User| user.run_as().uid;
        let long_lived = users.take().expect("free");
        assert_eq!(uid(&long_lived), 1000);
        for turn in 0..10 {
            let young = users.take().expect("free");
            assert_ne!(uid(&young), uid(&long_lived), "turn {turn}");
        }
        let others: Vec<User> = std::iter::from_fn(|| users.take()).collect();
        assert_eq!(others.len(), 3);
        drop(long_lived);
        assert_eq!(users.take().as_ref().map(uid), Some(1000));
    }

    #[test]
    fn an_id_that_is_given_back_comes_again_last() {
        let users = Users::new(0, 3);
        let ids = [(); 6].map(|()| users.take().map_or(u32::MAX, |user| user.run_as().uid));
        assert_eq!(ids, [0, 1, 2, 0, 1, 2]);
    }
}
