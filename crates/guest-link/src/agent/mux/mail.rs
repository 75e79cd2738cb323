//! How much of the messages that a clone's workers send to their parent may lie on the host.
//!
//! The first window of a message comes without asking. The rest is credited once the message is
//! *admitted*: its worker has nothing undelivered, or the whole message fits into what the worker
//! may have undelivered. Admission is of whole messages, so half a message never waits for the
//! room that another half takes; and it is per worker, so a parent that waits for one worker is
//! never kept from it by the others' messages. Beside that, a message needs a [`Share`] of its
//! parent's [`MailRoom`].

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::agent::room::{Entry, MailRoom, Share};

/// What a message costs besides its bytes, so that empty ones are bounded too.
const MESSAGE_OVERHEAD_BYTES: u64 = 256;

/// Pieces of a message are joined up to this size.
const PIECE_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(super) struct Mail {
    /// The worker numbers that live in this VM; empty in a VM that is not a clone.
    pub(super) workers: Range<u32>,
    /// Theirs.
    pub(super) ticket: u64,
    pub(super) room: MailRoom,
    undelivered_bytes_max: u64,
    undelivered: HashMap<u32, u64>,
    /// Channels whose messages are not admitted yet, in order of their coming.
    waiting: VecDeque<(u32, u32, u64)>,
}

impl Mail {
    pub(super) fn new(undelivered_bytes_max: u64) -> Self {
        Self { undelivered_bytes_max, ..Self::default() }
    }

    /// What a message of that length takes of its worker's allowance.
    pub(super) fn cost(length_bytes: u64) -> u64 {
        length_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES)
    }

    /// A worker has begun a message on `channel`.
    pub(super) fn begin(&mut self, channel: u32, vmid: u32, cost: u64) {
        self.waiting.push_back((channel, vmid, cost));
    }

    /// A message was given up before it was whole; `admitted` says whether it had been admitted.
    pub(super) fn give_up(&mut self, channel: u32, vmid: u32, cost: u64, admitted: bool) {
        if admitted {
            self.release(vmid, cost);
        } else {
            self.waiting.retain(|(waiting, ..)| *waiting != channel);
        }
    }

    /// A message has left the host.
    pub(super) fn release(&mut self, vmid: u32, cost: u64) {
        if let Some(bytes) = self.undelivered.get_mut(&vmid) {
            *bytes = bytes.saturating_sub(cost);
            if *bytes == 0 {
                self.undelivered.remove(&vmid);
            }
        }
    }

    /// Whether a message waits.
    pub(super) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next channel whose message may come whole, with its share of the room, or may not come
    /// at all. Messages of one worker are admitted in order.
    pub(super) fn admit(&mut self) -> Option<(u32, Result<Share, Refused>)> {
        let mut passed_over = Vec::new();
        let mut found = None;
        for (place, (_, vmid, cost)) in self.waiting.iter().enumerate() {
            if passed_over.contains(vmid) {
                continue;
            }
            let undelivered = self.undelivered.get(vmid).copied().unwrap_or(0);
            let fits =
                undelivered == 0 || undelivered.saturating_add(*cost) <= self.undelivered_bytes_max;
            let entry = if fits { self.room.admit(self.ticket, *vmid, *cost) } else { Entry::Wait };
            match entry {
                Entry::Wait => passed_over.push(*vmid),
                Entry::In(share) => found = Some((place, Ok(share))),
                Entry::Refused => found = Some((place, Err(Refused))),
            }
            if found.is_some() {
                break;
            }
        }
        let (place, entry) = found?;
        let (channel, vmid, cost) = self.waiting.remove(place)?;
        if entry.is_ok() {
            *self.undelivered.entry(vmid).or_default() += cost;
        }
        Some((channel, entry))
    }
}

/// The host has no room for this message.
#[derive(Debug)]
pub(super) struct Refused;

/// Append to a message in pieces of sensible size, however small the frames are.
pub(super) fn append(pieces: &mut Vec<Vec<u8>>, bytes: Vec<u8>) {
    match pieces.last_mut() {
        Some(last) if last.len() + bytes.len() <= PIECE_BYTES => last.extend_from_slice(&bytes),
        _ => pieces.push(bytes),
    }
}
