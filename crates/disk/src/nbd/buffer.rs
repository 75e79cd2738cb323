//! Bytes that came, and bytes to send, without a copy of either.
//!
//! Promises: neither buffer is filled with zeros again for each request. What [`Out::space`] gives
//! may hold older bytes of the same client, and the caller overwrites all of it.

/// Kept of a buffer that was larger.
const KEPT_BYTES: usize = 4 << 20;

/// What came, and was not taken yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// The next `len` bytes, once they are there.
    pub(super) fn front(&self, len: usize) -> Option<&[u8]> {
        let end = self.start.checked_add(len).filter(|end| *end <= self.end)?;
        self.bytes.get(self.start..end)
    }

    /// `len` of the bytes have been used.
    pub(super) fn take(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Where the next bytes go: at least `room`, and so that `front` bytes fit in one piece.
    pub(super) fn space(&mut self, room: usize, front: usize) -> &mut [u8] {
        let wanted = room.max(front.saturating_sub(self.end - self.start));
        if self.bytes.len() - self.end < wanted && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < wanted {
            self.bytes.resize(self.end + wanted, 0);
        }
        self.bytes.get_mut(self.end..).unwrap_or_default()
    }

    /// `len` bytes came into [`Inbox::space`].
    pub(super) fn came(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }
}

/// Replies to send, one after the other.
#[derive(Debug, Default)]
pub struct Out {
    bytes: Vec<u8>,
    used: usize,
    sent: usize,
}

impl Out {
    /// Space for `len` more bytes, which the caller fills: old bytes may be in it.
    pub(super) fn space(&mut self, len: usize) -> &mut [u8] {
        if self.sent > KEPT_BYTES && self.sent > self.used - self.sent {
            // A client that never takes all of it must not let it grow.
            self.bytes.copy_within(self.sent..self.used, 0);
            (self.sent, self.used) = (0, self.used - self.sent);
        }
        let at = self.used;
        self.used += len;
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
        self.bytes.get_mut(at..self.used).unwrap_or_default()
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    /// Takes back all but the first `pending` of the bytes that are still to send.
    pub(super) fn cut(&mut self, pending: usize) {
        self.used = self.used.min(self.sent + pending);
    }

    /// What is still to send.
    pub fn pending(&self) -> &[u8] {
        self.bytes.get(self.sent..self.used).unwrap_or_default()
    }

    /// `len` bytes have been sent.
    pub(super) fn gone(&mut self, len: usize) {
        self.sent = (self.sent + len).min(self.used);
        if self.sent == self.used {
            (self.sent, self.used) = (0, 0);
            if self.bytes.len() > KEPT_BYTES {
                self.bytes.truncate(KEPT_BYTES);
                self.bytes.shrink_to_fit();
            }
        }
    }

    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.used);
        self.bytes.drain(..self.sent);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_pieces_and_are_taken_in_others() {
        let mut inbox = Inbox::default();
        let (mut came, mut taken) = (0_u8, 0_u8);
        for step in 0..2000_usize {
            let piece = step * 7 % 50;
            let space = inbox.space(50, 30);
            assert!(space.len() >= 50);
            for byte in &mut space[..piece] {
                *byte = came;
                came = came.wrapping_add(1);
            }
            inbox.came(piece);
            while let Some(front) = inbox.front(30) {
                for byte in front {
                    assert_eq!(*byte, taken);
                    taken = taken.wrapping_add(1);
                }
                inbox.take(30);
            }
        }
        assert!(inbox.bytes.len() < 1000, "{}", inbox.bytes.len());
        assert!(inbox.front(usize::MAX).is_none());
    }

    #[test]
    fn replies_go_out_in_pieces_and_one_that_failed_is_taken_back() {
        let mut out = Out::default();
        out.put(b"one");
        let before = out.pending().len();
        out.put(b"failed");
        out.cut(before);
        out.put(b"two");
        out.gone(2);
        assert_eq!(out.pending(), b"etwo");
        out.cut(1);
        assert_eq!(out.pending(), b"e");
        for _ in 0..100 {
            out.space(1 << 20).fill(7);
            let len = out.pending().len() - 1;
            out.gone(len);
            assert_eq!(out.pending().len(), 1);
        }
        assert!(out.bytes.len() < 12 << 20, "{}", out.bytes.len());
        assert_eq!(out.into_bytes(), [7]);
    }
}
