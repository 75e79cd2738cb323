//! What a holder keeps and for whom, as a state machine: no I/O, no clock.
//!
//! ```text
//!   started ─────────► alone ──Hello──► owned ──Hello of another──► owned (by that one)
//!                       │ ▲               │
//!        linger is over │ └──owner gone───┤
//!                       ▼                 ▼
//!                     ended ◄─────End─────┘
//! ```
//!
//! Promises: the daemon that said hello last owns the entries; only it changes them or gets fds. An
//! entry goes only by `Drop`, by a `Put` of the same name, or with the table. What is refused
//! changes nothing.
//!
//! Left to others: times are passed in, in milliseconds since any one instant. `F` is an fd.

use std::collections::BTreeMap;
use std::ops::Bound;

use crate::proto::{Kind, Name, Refusal, Reply, Request};

/// Far more than listening sockets; a daemon with some hundred VMs needs a few for each.
pub const ENTRIES_MAX: usize = 1024;

/// A connection. Its numbers never come again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

#[derive(Debug)]
struct Entry<F> {
    fd: F,
    kind: Kind,
    note: Vec<u8>,
    /// Of the daemon that put or got it last.
    generation: u32,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Alone { since_ms: u64 },
    Owned { by: PeerId },
    Ended,
}

/// See the module.
#[derive(Debug)]
pub struct Table<F> {
    entries: BTreeMap<Name, Entry<F>>,
    phase: Phase,
    generation: u32,
    linger_ms: u64,
}

impl<F> Table<F> {
    /// Empty and without a daemon, for which it waits `linger_ms`.
    pub fn new(now_ms: u64, linger_ms: u64) -> Self {
        let phase = Phase::Alone { since_ms: now_ms };
        Self { entries: BTreeMap::new(), phase, generation: 0, linger_ms }
    }

    /// Answer a request of `peer`, with the fd that came along. The fd that is returned goes out
    /// with the reply.
    pub fn request(
        &mut self,
        peer: PeerId,
        request: Request,
        fd: Option<F>,
    ) -> (Reply, Option<&F>) {
        match self.answer(peer, request, fd) {
            Ok((reply, None)) => (reply, None),
            Ok((reply, Some(name))) => (reply, self.entries.get(&name).map(|entry| &entry.fd)),
            Err(refusal) => (Reply::Refused(refusal), None),
        }
    }

    fn answer(
        &mut self,
        peer: PeerId,
        request: Request,
        fd: Option<F>,
    ) -> Result<(Reply, Option<Name>), Refusal> {
        if fd.is_some() != matches!(request, Request::Put { .. }) {
            return Err(Refusal::WrongFd);
        }
        if !matches!(request, Request::Hello { .. } | Request::List { .. }) && !self.is_owner(peer)
        {
            return Err(Refusal::NotOwner);
        }
        let generation = self.generation;
        match request {
            Request::Hello { linger_ms } => {
                self.generation = self.generation.wrapping_add(1);
                self.linger_ms = linger_ms.into();
                self.phase = Phase::Owned { by: peer };
                Ok((Reply::Welcome { generation: self.generation }, None))
            }
            Request::Put { name, kind, note } => {
                let fd = fd.ok_or(Refusal::WrongFd)?;
                if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&name) {
                    return Err(Refusal::Full);
                }
                self.entries.insert(name, Entry { fd, kind, note, generation });
                Ok((Reply::Done, None))
            }
            Request::Get { name } => {
                let entry = self.entries.get_mut(&name).ok_or(Refusal::NoSuchName)?;
                entry.generation = generation;
                Ok((entry.told(&name), Some(name)))
            }
            Request::List { after } => {
                let from = after.map_or(Bound::Unbounded, Bound::Excluded);
                let next = self.entries.range((from, Bound::Unbounded)).next();
                let (name, entry) = next.ok_or(Refusal::NoSuchName)?;
                Ok((entry.told(name), None))
            }
            Request::Drop { name } => {
                self.entries.remove(&name).ok_or(Refusal::NoSuchName)?;
                Ok((Reply::Done, None))
            }
            Request::End => {
                self.end();
                Ok((Reply::Done, None))
            }
        }
    }

    /// A connection was closed by its peer.
    pub fn gone(&mut self, peer: PeerId, now_ms: u64) {
        if self.is_owner(peer) {
            self.phase = Phase::Alone { since_ms: now_ms };
        }
    }

    /// Let time pass: without a daemon for longer than the linger time, the holder ends.
    pub fn tick(&mut self, now_ms: u64) {
        if self.ends_at_ms().is_some_and(|end| now_ms >= end) {
            self.end();
        }
    }

    /// When it ends unless a daemon says hello; `None`: it has one, or has ended.
    pub fn ends_at_ms(&self) -> Option<u64> {
        match self.phase {
            Phase::Alone { since_ms } => Some(since_ms.saturating_add(self.linger_ms)),
            Phase::Owned { .. } | Phase::Ended => None,
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    pub fn is_owner(&self, peer: PeerId) -> bool {
        matches!(self.phase, Phase::Owned { by } if by == peer)
    }

    fn end(&mut self) {
        self.entries.clear();
        self.phase = Phase::Ended;
    }
}

impl<F> Entry<F> {
    fn told(&self, name: &Name) -> Reply {
        let Self { kind, generation, ref note, .. } = *self;
        Reply::Entry { generation, name: name.clone(), kind, note: note.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PeerId = PeerId(1);
    const B: PeerId = PeerId(2);

    fn name(text: &str) -> Name {
        Name::new(text).expect("a name")
    }

    fn put(table: &mut Table<u32>, peer: PeerId, text: &str, fd: u32) -> Reply {
        let request = Request::Put { name: name(text), kind: Kind::LISTENER, note: Vec::new() };
        table.request(peer, request, Some(fd)).0
    }

    fn hello(table: &mut Table<u32>, peer: PeerId) -> u32 {
        match table.request(peer, Request::Hello { linger_ms: 100 }, None).0 {
            Reply::Welcome { generation } => generation,
            reply => panic!("{reply:?}"),
        }
    }

    #[test]
    fn a_successor_gets_what_was_put_and_its_predecessor_nothing_more() {
        let mut table = Table::new(0, 1000);
        assert_eq!(hello(&mut table, A), 1);
        assert_eq!(put(&mut table, A, "a", 7), Reply::Done);
        // A successor comes while the connection of the dead one is not yet closed.
        assert_eq!(hello(&mut table, B), 2);
        for request in [Request::Get { name: name("a") }, Request::End] {
            let (reply, fd) = table.request(A, request, None);
            assert_eq!((reply, fd), (Reply::Refused(Refusal::NotOwner), None));
        }
        table.gone(A, 5);
        assert_eq!(table.ends_at_ms(), None, "the end of the old one is not that of the new one");
        let (reply, fd) = table.request(B, Request::Get { name: name("a") }, None);
        assert_eq!(fd, Some(&7));
        assert!(matches!(reply, Reply::Entry { generation: 2, kind: Kind::LISTENER, .. }));
    }

    #[test]
    fn it_ends_when_no_daemon_came_in_time_and_when_told_to() {
        let mut table = Table::<u32>::new(0, 1000);
        table.tick(999);
        assert!(!table.has_ended());
        hello(&mut table, A);
        table.tick(9999);
        assert!(!table.has_ended(), "it has a daemon");
        table.gone(A, 10_000);
        assert_eq!(table.ends_at_ms(), Some(10_100), "the daemon said how long");
        table.tick(10_099);
        assert!(!table.has_ended());
        table.tick(10_100);
        assert!(table.has_ended());

        let mut table = Table::new(0, 1000);
        hello(&mut table, A);
        put(&mut table, A, "a", 7);
        assert_eq!(table.request(A, Request::End, None).0, Reply::Done);
        assert!(table.has_ended() && table.entries.is_empty());
    }

    #[test]
    fn looking_takes_no_ownership() {
        let mut table = Table::new(0, 1000);
        hello(&mut table, A);
        put(&mut table, A, "a", 7);
        let (reply, fd) = table.request(B, Request::List { after: None }, None);
        assert!(matches!(reply, Reply::Entry { .. }) && fd.is_none());
        let behind = Request::List { after: Some(name("a")) };
        assert_eq!(table.request(B, behind, None).0, Reply::Refused(Refusal::NoSuchName));
        assert!(table.is_owner(A));
    }

    #[test]
    fn it_is_full_at_its_bound_and_still_replaces() {
        let mut table = Table::new(0, 1000);
        hello(&mut table, A);
        for i in 0..ENTRIES_MAX {
            assert_eq!(put(&mut table, A, &format!("n{i}"), 1), Reply::Done);
        }
        assert_eq!(put(&mut table, A, "one-more", 1), Reply::Refused(Refusal::Full));
        assert_eq!(put(&mut table, A, "n0", 2), Reply::Done);
        assert_eq!(table.request(A, Request::Drop { name: name("n1") }, None).0, Reply::Done);
        assert_eq!(put(&mut table, A, "one-more", 1), Reply::Done);
    }

    #[test]
    fn an_fd_comes_with_put_and_with_nothing_else() {
        let mut table = Table::new(0, 1000);
        hello(&mut table, A);
        let request = Request::Put { name: name("a"), kind: Kind(1), note: Vec::new() };
        assert_eq!(table.request(A, request, None).0, Reply::Refused(Refusal::WrongFd));
        let (reply, _) = table.request(A, Request::End, Some(3));
        assert_eq!(reply, Reply::Refused(Refusal::WrongFd));
        assert!(!table.has_ended());
    }
}
