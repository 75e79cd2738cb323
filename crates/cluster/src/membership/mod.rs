//! Who belongs to the cluster, and who of them is there.
//!
//! ```text
//!   drain, leave, admit ──► entries ◄── merge ◄── a peer's entries
//!                              │                        ▲
//!                              ▼                        │
//!   due ──► heartbeat_to ──► digest, and entries if the peer's digest was another
//!                              │
//!                  on_heartbeat, on_answer ──► alive ─► suspect ─► gone, by silence
//! ```
//!
//! Every member holds an [`Entry`] for every host, and may change any: there is no centre. Of two
//! entries of a host the later one wins: by incarnation, and an entry that says that it left is
//! always later. So members that have heard the same hold the same, in whatever order. Each sends
//! every other a heartbeat, with a [`Digest`] of all members. Only where digests differ do entries
//! travel, both ways.
//!
//! A host that left stays in the book, as a *tombstone*, so that a member that missed it can't
//! bring it back. It goes when `TOMBSTONE_S` have passed *and* every member has since shown that it
//! agrees on who is there.
//!
//! A host knows itself best. Others may report a wrong address or certificate of it, or two hosts
//! may have got one name while they could not hear each other. Then it publishes its entry again,
//! with a higher incarnation. It accepts that it was removed.
//!
//! Promises: `merge` is commutative, associative and idempotent; nothing of a peer's that can't be
//! is taken; entries are bounded. Left to others: sending, encryption, who is at the other end of a
//! connection (`crate::keys`), when to write to disk (whenever [`Merged::changed`] is not empty).
//! No I/O, no clock: times are passed in.

mod entry;
mod heartbeat;
mod persist;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::{Fingerprint, HostId, sha256, shortened};
use crate::room::Room;

pub use entry::{Entry, EntryError, HOST_NAME_BYTES_MAX, HostState, check_address, check_name};
pub use heartbeat::{Digest, Heartbeat, HeartbeatError, Liveness, Timing};
pub use persist::LoadError;

/// Most hosts that an instance knows, tombstones included. Each costs about 300 bytes, here and in
/// a heartbeat that carries them.
pub const HOSTS_MAX: usize = 4096;

/// How long a tombstone stays at least: `cluster ls --all` tells what became of a host for a week.
const TOMBSTONE_S: u64 = 7 * 24 * 3600;

/// What time it is, twice: liveness goes by a clock that never jumps, tombstones and tokens by one
/// that hosts share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Since any fixed instant of this process.
    pub monotonic: Duration,
    /// Seconds since 1970.
    pub unix_s: u64,
}

/// The book.
#[derive(Debug, Clone)]
pub struct Membership {
    own: HostId,
    /// What this host knows better than anybody.
    address: String,
    fingerprint: Fingerprint,
    entries: BTreeMap<HostId, Entry>,
    peers: BTreeMap<HostId, Peer>,
    timing: Timing,
    digest: Digest,
}

/// What this process has seen of another host. Not written down: after a start all have to be heard
/// again.
#[derive(Debug, Clone)]
struct Peer {
    /// When it was first known here; for a tombstone, when that came.
    since: Duration,
    heard: Option<Duration>,
    sent: Option<Duration>,
    digest: Option<Digest>,
    /// When its digest was last the same as ours.
    agreed: Option<Duration>,
    room: Option<Room>,
}

impl Peer {
    fn new(now: Now) -> Self {
        Self {
            since: now.monotonic,
            heard: None,
            sent: None,
            digest: None,
            agreed: None,
            room: None,
        }
    }
}

/// What a merge did.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The hosts of which something else is known now. If there are any, the book should be written
    /// down.
    pub changed: BTreeSet<HostId>,
    /// This host was removed from the cluster by another member.
    pub removed: bool,
    /// This host's new name, if a member of lower id had the same.
    pub renamed: Option<String>,
}

/// Something that the book does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    #[error("host `{name}` is in the cluster already, as {id}")]
    NameTaken { name: String, id: HostId },
    #[error("host id {id} is in the cluster already, as `{name}`")]
    IdTaken { id: HostId, name: String },
    #[error(
        "the cluster has {HOSTS_MAX} hosts, those that left not long ago included; it can have no more"
    )]
    Full,
    #[error("no host `{wanted}` in the cluster")]
    Unknown { wanted: String },
    #[error(
        "`{name}` names several hosts, which joined while they could not reach each other: {}",
        list(ids)
    )]
    Ambiguous { name: String, ids: Vec<HostId> },
    #[error("host `{name}` ({id}) has left the cluster")]
    HasLeft { name: String, id: HostId },
    #[error(transparent)]
    Entry(#[from] EntryError),
}

fn list(ids: &[HostId]) -> String {
    ids.iter().map(HostId::to_string).collect::<Vec<_>>().join(", ")
}

impl MemberError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::NameTaken { .. } => Some(
                "choose another name with `--name`, or remove that host first with `vmfork cluster leave`",
            ),
            Self::IdTaken { .. } => Some("join again: each join gets an id of its own"),
            Self::Full => Some("hosts that left are forgotten after a week"),
            Self::Unknown { .. } => Some("`vmfork cluster ls` lists the hosts"),
            Self::Ambiguous { .. } => {
                Some("give the id; they will be renamed once they hear each other")
            }
            Self::HasLeft { .. } => {
                Some("it can come back with `vmfork cluster join` and a new token")
            }
            Self::Entry(error) => Some(error.remedy()),
        }
    }
}

/// A peer's entries that were not taken, none of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    #[error("the entry of host {id} can't be")]
    Entry {
        id: HostId,
        #[source]
        source: EntryError,
    },
    #[error(
        "{count} hosts, here and there together, are more than the {HOSTS_MAX} that a cluster can have"
    )]
    TooMany { count: usize },
}

impl Membership {
    /// A cluster of one, with no other member yet.
    ///
    /// # Errors
    /// Name or address can't be one.
    pub fn alone(
        id: HostId,
        name: &str,
        address: &str,
        fingerprint: Fingerprint,
    ) -> Result<Self, EntryError> {
        let entry = new_entry(id, name, address, fingerprint);
        entry.check()?;
        Ok(Self::of(entry, BTreeMap::new()))
    }

    /// `own` and `others`, all checked.
    fn of(own: Entry, mut others: BTreeMap<HostId, Entry>) -> Self {
        let mut it = Self {
            own: own.id,
            address: own.address.clone(),
            fingerprint: own.fingerprint,
            entries: BTreeMap::new(),
            peers: BTreeMap::new(),
            timing: Timing::default(),
            digest: Digest::default(),
        };
        // Since before anything: this process has heard no host yet.
        let start = Now { monotonic: Duration::ZERO, unix_s: 0 };
        it.peers = others.keys().map(|id| (*id, Peer::new(start))).collect();
        others.insert(own.id, own);
        it.entries = others;
        it.digest = it.digest_of_all();
        it
    }

    /// This process begins now: who was not heard since counts from here. Call it once, after a
    /// load.
    pub fn begin(&mut self, now: Now) {
        for peer in self.peers.values_mut() {
            *peer = Peer::new(now);
        }
    }

    /// Sets when heartbeats go, and when silence means what.
    pub fn set_timing(&mut self, timing: Timing) {
        self.timing = timing;
    }

    /// This host.
    pub fn own(&self) -> HostId {
        self.own
    }

    /// This host's entry.
    pub fn own_entry(&self) -> &Entry {
        self.entries.get(&self.own).expect("a host is always in its own book")
    }

    /// Whether this host was removed, or has left by itself. No member talks to it any more.
    pub fn has_left(&self) -> bool {
        self.own_entry().state.is_left()
    }

    /// All that is known, by id; those that left not long ago too.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Those that take part: active or draining, this host too.
    pub fn members(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values().filter(|entry| !entry.state.is_left())
    }

    /// What is known of a host.
    pub fn get(&self, id: HostId) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// A member's entry; `None` if it is unknown or left.
    pub fn member(&self, id: HostId) -> Option<&Entry> {
        self.get(id).filter(|entry| !entry.state.is_left())
    }

    /// The member that shows this certificate.
    pub fn member_by_fingerprint(&self, fingerprint: Fingerprint) -> Option<&Entry> {
        self.members().find(|entry| entry.fingerprint == fingerprint)
    }

    /// The member of that name or id.
    ///
    /// # Errors
    /// There is none; it has left; or there are several of the name.
    pub fn find(&self, wanted: &str) -> Result<&Entry, MemberError> {
        let named: Vec<&Entry> = self.members().filter(|entry| entry.name == wanted).collect();
        match named.as_slice() {
            [one] => return Ok(one),
            [] => {}
            several => {
                let ids = several.iter().map(|entry| entry.id).collect();
                return Err(MemberError::Ambiguous { name: wanted.to_owned(), ids });
            }
        }
        let by_id = wanted.parse().ok().and_then(|id| self.get(id));
        let gone = || self.entries.values().find(|entry| entry.name == wanted);
        match by_id.or_else(gone) {
            Some(entry) if !entry.state.is_left() => Ok(entry),
            Some(entry) => Err(has_left(entry)),
            None => Err(MemberError::Unknown { wanted: shortened(wanted) }),
        }
    }

    /// Whether a newcomer could be [`Membership::admit`]ted.
    ///
    /// # Errors
    /// Why not.
    pub fn check_newcomer(&self, id: HostId, name: &str, address: &str) -> Result<(), MemberError> {
        check_name(name)?;
        check_address(address)?;
        if let Some(entry) = self.get(id) {
            return Err(MemberError::IdTaken { id, name: entry.name.clone() });
        }
        if let Some(entry) = self.members().find(|entry| entry.name == name) {
            return Err(MemberError::NameTaken { name: name.to_owned(), id: entry.id });
        }
        if self.entries.len() >= HOSTS_MAX { Err(MemberError::Full) } else { Ok(()) }
    }

    /// Takes a newcomer in, as active.
    ///
    /// # Errors
    /// Name or id are taken, or can't be; the cluster is full.
    pub fn admit(
        &mut self,
        id: HostId,
        name: &str,
        address: &str,
        fingerprint: Fingerprint,
        now: Now,
    ) -> Result<(), MemberError> {
        self.check_newcomer(id, name, address)?;
        self.put(new_entry(id, name, address, fingerprint), now);
        self.hurry();
        Ok(())
    }

    /// Gives a member nothing new from now on. Whether that changed anything.
    ///
    /// # Errors
    /// It is no member.
    pub fn drain(&mut self, id: HostId, now: Now) -> Result<bool, MemberError> {
        self.set_state(id, HostState::Draining, now)
    }

    /// Takes a draining member back into use. Whether that changed anything.
    ///
    /// # Errors
    /// It is no member.
    pub fn activate(&mut self, id: HostId, now: Now) -> Result<bool, MemberError> {
        self.set_state(id, HostState::Active, now)
    }

    /// Takes a member out for good: this host, or another that won't come back. Its certificate is
    /// refused at once here, and elsewhere as they hear of it. A host that has left continues its
    /// heartbeats until [`Membership::due`] names no host any more, or its patience ends: that is
    /// how the others learn.
    ///
    /// # Errors
    /// It is no member.
    pub fn leave(&mut self, id: HostId, now: Now) -> Result<(), MemberError> {
        self.set_state(id, HostState::Left { at_unix_s: now.unix_s }, now).map(drop)
    }

    fn set_state(&mut self, id: HostId, state: HostState, now: Now) -> Result<bool, MemberError> {
        let entry = self.get(id).ok_or_else(|| MemberError::Unknown { wanted: id.to_string() })?;
        if entry.state.is_left() {
            return Err(has_left(entry));
        }
        if entry.state == state {
            return Ok(false);
        }
        let incarnation = entry.incarnation.saturating_add(1);
        self.put(Entry { state, incarnation, ..entry.clone() }, now);
        if self.has_left() {
            // No peer knows yet.
            self.peers.values_mut().for_each(|peer| peer.agreed = None);
        }
        self.hurry();
        Ok(true)
    }

    /// Where this host listens from now on. Whether that is elsewhere than before.
    ///
    /// # Errors
    /// It can't be an address.
    #[cfg(test)]
    pub(crate) fn set_own_address(&mut self, address: &str, now: Now) -> Result<bool, EntryError> {
        check_address(address)?;
        address.clone_into(&mut self.address);
        let changed = self.own_entry().address != address;
        self.settle(now, &mut Merged::default());
        if changed {
            self.hurry();
        }
        Ok(changed)
    }

    /// Takes what a peer says, all of it or nothing.
    ///
    /// # Errors
    /// Something of it can't be.
    pub fn merge(&mut self, entries: &[Entry], now: Now) -> Result<Merged, MergeError> {
        for entry in entries {
            entry.check().map_err(|source| MergeError::Entry { id: entry.id, source })?;
        }
        let new: BTreeSet<HostId> = entries
            .iter()
            .map(|entry| entry.id)
            .filter(|id| !self.entries.contains_key(id))
            .collect();
        let count = self.entries.len() + new.len();
        if count > HOSTS_MAX {
            return Err(MergeError::TooMany { count });
        }
        let mut merged = Merged::default();
        for entry in entries {
            let is_later = self.get(entry.id).is_none_or(|known| entry.supersedes(known));
            if is_later {
                merged.changed.insert(entry.id);
                self.insert(entry.clone(), now);
            }
        }
        self.digest = self.digest_of_all();
        self.settle(now, &mut merged);
        merged.removed = merged.changed.contains(&self.own) && self.has_left();
        Ok(merged)
    }

    /// Publishes again what others have wrong of this host.
    fn settle(&mut self, now: Now, merged: &mut Merged) {
        let mut own = self.own_entry().clone();
        if own.state.is_left() {
            return;
        }
        own.address.clone_from(&self.address);
        own.fingerprint = self.fingerprint;
        let namesake = self.members().any(|entry| entry.id < self.own && entry.name == own.name);
        if namesake {
            own.name = self.free_name(&own.name);
            merged.renamed = Some(own.name.clone());
        }
        if own != *self.own_entry() {
            own.incarnation = own.incarnation.saturating_add(1);
            merged.changed.insert(self.own);
            self.put(own, now);
        }
    }

    /// A name like `name` for this host that no other member has.
    fn free_name(&self, name: &str) -> String {
        const SUFFIX_DIGITS: usize = 4;
        let id = self.own.to_string();
        let kept = name.len().min(HOST_NAME_BYTES_MAX - 1 - SUFFIX_DIGITS);
        let candidate = format!("{}-{}", &name[..kept], &id[..SUFFIX_DIGITS]);
        // Names are ASCII. No other host is called by this id.
        if self.members().any(|entry| entry.name == candidate) { id } else { candidate }
    }

    fn put(&mut self, entry: Entry, now: Now) {
        self.insert(entry, now);
        self.digest = self.digest_of_all();
    }

    /// Leaves the digest to the caller: one for many entries.
    fn insert(&mut self, entry: Entry, now: Now) {
        let id = entry.id;
        let is_new_tombstone = entry.state.is_left() && self.member(id).is_some();
        self.entries.insert(id, entry);
        if id != self.own {
            let peer = self.peers.entry(id).or_insert_with(|| Peer::new(now));
            if is_new_tombstone {
                *peer = Peer::new(now);
            }
        }
    }

    /// Forgets tombstones that are not needed any more. Whether there were any: then the book
    /// should be written down.
    pub fn forget(&mut self, now: Now) -> bool {
        let members: Vec<&Peer> =
            self.members().filter_map(|entry| self.peers.get(&entry.id)).collect();
        let all_agreed_after =
            |since| members.iter().all(|peer| peer.agreed.is_some_and(|at| at > since));
        let is_over = |entry: &Entry| match (entry.state, self.peers.get(&entry.id)) {
            (HostState::Left { at_unix_s }, Some(tombstone)) => {
                at_unix_s.saturating_add(TOMBSTONE_S) <= now.unix_s
                    && all_agreed_after(tombstone.since)
            }
            _ => false,
        };
        let over: Vec<HostId> =
            self.entries.values().filter(|entry| is_over(entry)).map(|entry| entry.id).collect();
        for id in &over {
            self.entries.remove(id);
            self.peers.remove(id);
        }
        !over.is_empty()
    }

    /// Of members only: who never heard of a host that left need not hear of it now.
    fn digest_of_all(&self) -> Digest {
        let mut text = Vec::new();
        for entry in self.members() {
            serde_json::to_writer(&mut text, entry).expect("plain data to memory");
        }
        Digest::of(&sha256(&text))
    }
}

fn new_entry(id: HostId, name: &str, address: &str, fingerprint: Fingerprint) -> Entry {
    Entry {
        id,
        name: name.to_owned(),
        address: address.to_owned(),
        fingerprint,
        state: HostState::Active,
        incarnation: 1,
    }
}

fn has_left(entry: &Entry) -> MemberError {
    MemberError::HasLeft { name: entry.name.clone(), id: entry.id }
}
