//! Heartbeats: who is there, and whether two members hold the same.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Entry, MemberError, Membership, MergeError, Merged, Now};
use crate::id::{HostId, hex, shortened, unhex};
use crate::room::Room;

/// When heartbeats go, and when silence means what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Between two heartbeats to one host. With 100 hosts each sends 100 small requests in this
    /// time.
    pub every: Duration,
    /// Between two to a host that is gone: it may come back, but nothing waits for it.
    pub every_if_gone: Duration,
    /// Silence after which a host is suspect: three heartbeats or their answers were lost, or its
    /// daemon is stuck.
    pub suspect_after: Duration,
    /// Silence after which it is gone.
    pub gone_after: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(1),
            every_if_gone: Duration::from_secs(10),
            suspect_after: Duration::from_millis(3500),
            gone_after: Duration::from_secs(15),
        }
    }
}

/// Whether a member is there, as far as this host can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Liveness {
    Alive,
    /// Silent for a while, or not heard yet: gets nothing new, loses nothing.
    Suspect,
    /// Silent for so long that what runs there counts as lost.
    Gone,
}

impl fmt::Display for Liveness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::Gone => "gone",
        })
    }
}

/// The same for two books, in all probability, if and only if they have the same members in them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    pub(super) fn of(hash: &[u8; 32]) -> Self {
        let mut half = [0; 16];
        half.copy_from_slice(&hash[..16]);
        Self(half)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let why = || format!("`{}` is no digest: it has 32 hex digits", shortened(text));
        unhex(text).map(Self).ok_or_else(why)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What one member tells another every second, and what that answers. About 120 bytes if they
/// agree.
///
/// Whom it is from is for the connection's certificate to say, not for the message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Of the sender's book, before it has seen what the other answers.
    pub digest: Digest,
    /// What the sender has left for clones; `None` if it does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<Room>,
    /// The whole of the sender's book, if it seems to differ from the receiver's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Entry>,
}

/// A heartbeat that was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeartbeatError {
    #[error("host {from} is no member of this cluster")]
    Stranger { from: HostId },
    #[error("what host {from} says of the cluster was not taken")]
    Merge {
        from: HostId,
        #[source]
        source: MergeError,
    },
}

impl Membership {
    /// The digest of this host's book.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether a member is there. This host always is; who is no member never.
    pub fn liveness(&self, id: HostId, now: Now) -> Liveness {
        if self.member(id).is_none() {
            return Liveness::Gone;
        }
        if id == self.own {
            return Liveness::Alive;
        }
        let Some(peer) = self.peers.get(&id) else { return Liveness::Gone };
        let silent_for = now.monotonic.saturating_sub(peer.heard.unwrap_or(peer.since));
        if silent_for >= self.timing.gone_after {
            Liveness::Gone
        } else if peer.heard.is_none() || silent_for >= self.timing.suspect_after {
            Liveness::Suspect
        } else {
            Liveness::Alive
        }
    }

    /// How long ago a member was heard last; `None` if it never was, in the life of this process.
    pub fn silent_for(&self, id: HostId, now: Now) -> Option<Duration> {
        let heard = self.peers.get(&id)?.heard?;
        Some(now.monotonic.saturating_sub(heard))
    }

    /// What a member last told that it has left for clones.
    pub fn room(&self, id: HostId) -> Option<Room> {
        self.peers.get(&id)?.room
    }

    /// Up to `most` members to send a heartbeat to now, those first who have waited longest. They
    /// count as sent.
    pub fn due(&mut self, now: Now, most: usize) -> Vec<HostId> {
        let mut due: Vec<(Duration, HostId)> =
            self.turns(now).filter(|(at, _)| *at <= now.monotonic).collect();
        due.sort_unstable();
        due.truncate(most);
        for (_, id) in &due {
            if let Some(peer) = self.peers.get_mut(id) {
                peer.sent = Some(now.monotonic);
            }
        }
        due.into_iter().map(|(_, id)| id).collect()
    }

    /// When the next heartbeat is to go, by the monotonic clock; `None` if there is no host to
    /// send one to.
    #[cfg(test)]
    pub(crate) fn next_due(&self, now: Now) -> Option<Duration> {
        self.turns(now).map(|(at, _)| at).min()
    }

    /// When each other member's turn is. A host that has left tells each member so, and sends
    /// nothing after that.
    fn turns(&self, now: Now) -> impl Iterator<Item = (Duration, HostId)> {
        let others = self.members().filter(move |entry| entry.id != self.own);
        let has_left = self.has_left();
        others.filter_map(move |entry| {
            let peer = self.peers.get(&entry.id)?;
            if has_left && peer.agreed.is_some() {
                return None;
            }
            let every = match self.liveness(entry.id, now) {
                Liveness::Gone => self.timing.every_if_gone,
                _ => self.timing.every,
            };
            Some((peer.sent.map_or(Duration::ZERO, |at| at + every), entry.id))
        })
    }

    /// The heartbeat for a member: its entries only if that is known to hold something else.
    pub fn heartbeat_to(&self, peer: HostId, room: Option<Room>) -> Heartbeat {
        let entries = if self.knows_to_differ(peer) {
            self.entries.values().cloned().collect()
        } else {
            Vec::new()
        };
        Heartbeat { digest: self.digest, room, entries }
    }

    /// By which a member learns that it is removed: that of a book in which it has left. It is sent
    /// before that is so here, since no host talks to one that has left.
    ///
    /// # Errors
    /// It is no member.
    pub fn heartbeat_of_removal(&self, peer: HostId, now: Now) -> Result<Heartbeat, MemberError> {
        let mut without = self.clone();
        without.leave(peer, now)?;
        let entries = without.entries.values().cloned().collect();
        Ok(Heartbeat { digest: without.digest, room: None, entries })
    }

    fn knows_to_differ(&self, peer: HostId) -> bool {
        let theirs = self.peers.get(&peer).and_then(|peer| peer.digest);
        theirs.is_some_and(|digest| digest != self.digest)
    }

    /// Everybody's turn is now: there is something to tell.
    pub(super) fn hurry(&mut self) {
        for peer in self.peers.values_mut() {
            peer.sent = None;
        }
    }

    /// Takes a member's heartbeat; returns what to answer, and what that changed here.
    ///
    /// # Errors
    /// It is not from a member, or tells what can't be. Then nothing was changed.
    pub fn on_heartbeat(
        &mut self,
        from: HostId,
        heartbeat: &Heartbeat,
        room: Option<Room>,
        now: Now,
    ) -> Result<(Heartbeat, Merged), HeartbeatError> {
        let merged = self.hear(from, heartbeat, now)?;
        let entries = if heartbeat.digest == self.digest {
            Vec::new()
        } else {
            self.entries.values().cloned().collect()
        };
        Ok((Heartbeat { digest: self.digest, room, entries }, merged))
    }

    /// Takes what a member answered to a heartbeat; returns what that changed here. If they still
    /// differ, the member's turn is at once.
    ///
    /// # Errors
    /// As [`Membership::on_heartbeat`].
    pub fn on_answer(
        &mut self,
        from: HostId,
        answer: &Heartbeat,
        now: Now,
    ) -> Result<Merged, HeartbeatError> {
        // Whether the heartbeat that this answers carried our entries. If it did and we still
        // differ, the next one has to wait for its turn. Otherwise two hosts that can't agree would
        // exchange heartbeats as fast as the network allows.
        let had_entries = self.knows_to_differ(from);
        let merged = self.hear(from, answer, now)?;
        if !had_entries
            && self.knows_to_differ(from)
            && let Some(peer) = self.peers.get_mut(&from)
        {
            peer.sent = None;
        }
        Ok(merged)
    }

    fn hear(
        &mut self,
        from: HostId,
        heartbeat: &Heartbeat,
        now: Now,
    ) -> Result<Merged, HeartbeatError> {
        if from == self.own || self.member(from).is_none() {
            return Err(HeartbeatError::Stranger { from });
        }
        let merged = self
            .merge(&heartbeat.entries, now)
            .map_err(|source| HeartbeatError::Merge { from, source })?;
        let digest = self.digest;
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.heard = Some(now.monotonic);
            peer.digest = Some(heartbeat.digest);
            peer.room = heartbeat.room;
            if heartbeat.digest == digest {
                peer.agreed = Some(now.monotonic);
            }
        }
        Ok(merged)
    }
}
