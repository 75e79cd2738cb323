//! The two ends of a flow-controlled stream.

use std::collections::VecDeque;

use bytes::Bytes;
use vmfork_agent_proto::{Kind, WINDOW_BYTES};

/// Credit is sent when so much is due: often enough that a sender never waits for a reader that
/// keeps up (three quarters of the window remain), seldom enough not to answer each line of output.
pub(super) const CREDIT_BYTES_MIN: u32 = WINDOW_BYTES / 4;

/// Stream bytes per frame. A larger frame would only delay other channels' on the same port.
const FRAME_BYTES: usize = 32 * 1024;

/// A stream from the guest.
#[derive(Debug, Default)]
pub(super) struct Rx {
    /// Came and was not taken by the consumer.
    held: u32,
    /// Was taken and not credited.
    due: u32,
    /// The multiplexer knows that credit is due.
    announced: bool,
    pub(super) ended: bool,
}

impl Rx {
    /// Bytes came. `false`: more than the window allows.
    pub(super) fn arrived(&mut self, bytes: u32) -> bool {
        match self.held.checked_add(bytes) {
            Some(held) if held + self.due <= WINDOW_BYTES => {
                self.held = held;
                true
            }
            _ => false,
        }
    }

    /// The consumer took bytes; `true`: credit has become due.
    pub(super) fn taken(&mut self, bytes: u32) -> bool {
        debug_assert!(bytes <= self.held);
        let bytes = bytes.min(self.held);
        self.held -= bytes;
        self.due += bytes;
        let due = !self.ended && !self.announced && self.due >= CREDIT_BYTES_MIN;
        self.announced |= due;
        due
    }

    /// The credit to send now.
    pub(super) fn take_due(&mut self) -> u32 {
        self.announced = false;
        if self.ended { 0 } else { std::mem::take(&mut self.due) }
    }

    /// All that the guest believes to be on its way.
    pub(super) fn uncredited(&self) -> u32 {
        if self.ended { 0 } else { self.held + self.due }
    }
}

/// A stream towards the guest.
#[derive(Debug)]
pub(super) struct Tx {
    pub(super) kind: Kind,
    queue: VecDeque<Bytes>,
    /// The end was asked for; it follows the last of `queue`.
    end: bool,
    pub(super) ended: bool,
    credit: u32,
    /// Stands in the multiplexer's round.
    pub(super) scheduled: bool,
}

impl Tx {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            queue: VecDeque::new(),
            end: false,
            ended: false,
            credit: WINDOW_BYTES,
            scheduled: false,
        }
    }

    pub(super) fn push(&mut self, bytes: Bytes, end: bool) {
        if self.end {
            return;
        }
        if !bytes.is_empty() {
            self.queue.push_back(bytes);
        }
        self.end |= end;
    }

    /// `false`: the guest credits what was never sent.
    pub(super) fn credited(&mut self, bytes: u32) -> bool {
        match self.credit.checked_add(bytes) {
            Some(credit) if credit <= WINDOW_BYTES => {
                self.credit = credit;
                true
            }
            _ => false,
        }
    }

    pub(super) fn can_send(&self) -> bool {
        match self.queue.front() {
            Some(_) => self.credit > 0,
            None => self.end && !self.ended,
        }
    }

    /// The next frame's payload and whether it is the last.
    pub(super) fn next(&mut self) -> Option<(Bytes, bool)> {
        if !self.can_send() {
            return None;
        }
        let payload = match self.queue.front_mut() {
            None => Bytes::new(),
            Some(front) => {
                let credit = usize::try_from(self.credit).unwrap_or(usize::MAX);
                let bytes = front.len().min(FRAME_BYTES).min(credit);
                let payload = front.split_to(bytes);
                if front.is_empty() {
                    self.queue.pop_front();
                }
                payload
            }
        };
        self.credit -= u32::try_from(payload.len()).unwrap_or(self.credit);
        self.ended = self.end && self.queue.is_empty();
        Some((payload, self.ended))
    }
}
