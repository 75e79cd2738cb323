//! Limits the memory of messages that were not received yet on this host, over all VMs.
//!
//! ```text
//!   a clone's link ──admit──► MailRoom of the parent ──► HostMail
//!        message ◄── Share ──────────┘ given back, by dropping it, when the message has gone
//! ```
//!
//! Each link limits what one worker may have undelivered ([`super::MailLimits`]).
//! The workers of all tickets of one parent share that parent's *room*.
//! Where it is full, a message waits in its guest until the parent has received some.
//! All rooms share the host. Where that is full a message is refused, since the rooms that fill it
//! may never be emptied.
//!
//! A parent may wait for one worker, or for those of one ticket, while the messages of others fill
//! its room.
//! It must not wait forever. So what it waits for is taken beyond the room, one message at a time.
//! A room thus holds [`ROOM_BYTES`] and one message.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Undelivered bytes of all workers of one parent.
pub const ROOM_BYTES: u64 = 256 * 1024 * 1024;

/// Undelivered bytes on one host.
const HOST_BYTES: u64 = 1024 * 1024 * 1024;

/// The host's account.
#[derive(Debug, Clone)]
pub struct HostMail {
    held_bytes: Arc<AtomicU64>,
    bytes_max: u64,
}

impl Default for HostMail {
    fn default() -> Self {
        Self::new(HOST_BYTES)
    }
}

impl HostMail {
    pub fn new(bytes_max: u64) -> Self {
        Self { held_bytes: Arc::default(), bytes_max }
    }

    /// What lies here now.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Room for a message of a clone on another host, where it waits for its turn; `None`: there is
    /// none.
    pub fn hold(&self, bytes: u64) -> Option<HostShare> {
        self.take(bytes).then(|| HostShare { host: self.clone(), bytes })
    }

    fn take(&self, bytes: u64) -> bool {
        let taken = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.bytes_max);
        self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }
}

/// A part of the host's account; given back on drop.
#[derive(Debug)]
pub struct HostShare {
    host: HostMail,
    bytes: u64,
}

impl Drop for HostShare {
    fn drop(&mut self) {
        self.host.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A parent's room. Clones of it are the same room.
#[derive(Debug, Clone)]
pub struct MailRoom(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: HostMail,
    bytes_max: u64,
    held: Mutex<Held>,
    /// Something may fit now that did not.
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: u64,
    /// A message lies here beyond the room.
    express: bool,
    /// The worker of which ticket (`None`: any) a message is waited for.
    wanted: BTreeSet<(u64, Option<u32>)>,
}

impl Inner {
    fn held(&self) -> MutexGuard<'_, Held> {
        // No step leaves it half-changed.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a message may come.
#[derive(Debug)]
pub(super) enum Entry {
    In(Share),
    /// Ask again after a change of [`MailRoom::changes`].
    Wait,
    /// The host is full.
    Refused,
}

impl Default for MailRoom {
    fn default() -> Self {
        Self::new(&HostMail::default(), ROOM_BYTES)
    }
}

impl MailRoom {
    pub fn new(host: &HostMail, bytes_max: u64) -> Self {
        let held = Mutex::default();
        Self(Arc::new(Inner {
            host: host.clone(),
            bytes_max,
            held,
            changes: watch::Sender::new(()),
        }))
    }

    /// Room for a message. One that is longer than the room may come when it is the only one.
    pub(super) fn admit(&self, ticket: u64, vmid: u32, bytes: u64) -> Entry {
        let mut held = self.0.held();
        let fits = held.bytes == 0 || held.bytes.saturating_add(bytes) <= self.0.bytes_max;
        let wanted = || [None, Some(vmid)].iter().any(|of| held.wanted.contains(&(ticket, *of)));
        if !fits && (held.express || !wanted()) {
            return Entry::Wait;
        }
        if !self.0.host.take(bytes) {
            return Entry::Refused;
        }
        if fits {
            held.bytes += bytes;
        } else {
            held.express = true;
        }
        Entry::In(Share { room: self.clone(), bytes, express: !fits })
    }

    /// For whose messages the parent waits now: the ticket and the worker, or any of the ticket.
    pub fn want(&self, wanted: BTreeSet<(u64, Option<u32>)>) {
        let mut held = self.0.held();
        if held.wanted == wanted {
            return;
        }
        held.wanted = wanted;
        drop(held);
        self.0.changes.send_replace(());
    }

    /// For which of a ticket's workers the parent waits; `None`: for any.
    pub fn wanted(&self, ticket: u64) -> Vec<Option<u32>> {
        let held = self.0.held();
        held.wanted.iter().filter(|(of, _)| *of == ticket).map(|(_, worker)| *worker).collect()
    }

    /// The account of the host that it is on.
    pub fn host(&self) -> &HostMail {
        &self.0.host
    }

    /// Changes whenever something may fit that did not.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.0.changes.subscribe()
    }
}

/// A message's part of its room; given back on drop.
#[derive(Debug)]
pub(crate) struct Share {
    room: MailRoom,
    bytes: u64,
    express: bool,
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.room.0, &other.room.0) && self.bytes == other.bytes
    }
}

impl Eq for Share {}

impl Drop for Share {
    fn drop(&mut self) {
        let inner = &self.room.0;
        let mut held = inner.held();
        if self.express {
            held.express = false;
        } else {
            held.bytes -= self.bytes;
        }
        drop(held);
        inner.host.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        inner.changes.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(entry: Entry) -> Share {
        match entry {
            Entry::In(share) => share,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn workers_of_one_parent_share_its_room_and_get_back_what_was_received() {
        let host = HostMail::default();
        let room = MailRoom::new(&host, 100);
        let mut changes = room.changes();
        let first = entered(room.admit(1, 1, 60));
        let second = entered(room.admit(1, 2, 40));
        assert!(matches!(room.admit(2, 9, 1), Entry::Wait));
        assert!(!changes.has_changed().expect("the room lives"));
        drop(second);
        assert!(changes.has_changed().expect("the room lives"));
        changes.mark_unchanged();
        let third = entered(room.admit(2, 9, 1));
        assert_eq!(host.held_bytes(), 61);
        drop((first, third));
        assert_eq!(host.held_bytes(), 0);
        // Longer than the room, and the only one.
        entered(room.admit(1, 1, 1000));
    }

    #[test]
    fn a_message_that_the_parent_waits_for_comes_in_beyond_a_full_room_and_one_only() {
        let room = MailRoom::new(&HostMail::default(), 100);
        let _full = entered(room.admit(1, 1, 100));
        let changes = room.changes();
        room.want(BTreeSet::from([(1, Some(2))]));
        assert!(changes.has_changed().expect("the room lives"), "worker 2 may try again");
        assert!(matches!(room.admit(1, 3, 10), Entry::Wait));
        assert!(matches!(room.admit(2, 2, 10), Entry::Wait), "another ticket's");
        let wanted = entered(room.admit(1, 2, 10));
        assert!(matches!(room.admit(1, 2, 10), Entry::Wait));
        drop(wanted);
        room.want(BTreeSet::from([(2, None)]));
        drop(entered(room.admit(2, 7, 10)));
        room.want(BTreeSet::new());
        assert!(matches!(room.admit(2, 7, 10), Entry::Wait));
    }

    #[test]
    fn rooms_share_the_host_and_who_does_not_fit_is_refused() {
        let host = HostMail::new(150);
        let rooms = [MailRoom::new(&host, 100), MailRoom::new(&host, 100)];
        let first = entered(rooms[0].admit(1, 1, 100));
        assert!(matches!(rooms[1].admit(2, 1, 51), Entry::Refused));
        let _second = entered(rooms[1].admit(2, 1, 50));
        drop(first);
        assert_eq!(host.held_bytes(), 50);
        entered(rooms[0].admit(1, 1, 100));
    }
}
