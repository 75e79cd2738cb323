//! What came, and what is to be sent, without a copy of either.
//!
//! Promises: neither buffer is filled with zeros again for each request. What [`Out::space`] gives
//! may hold older bytes of the same client, and the caller overwrites all of it.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;

/// Kept of a buffer that was larger.
const KEPT_BYTES: usize = 4 << 20;

/// What came, and was not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// The next `len` bytes, once they are there.
    pub(crate) fn front(&self, len: usize) -> Option<&[u8]> {
        let end = self.start.checked_add(len).filter(|end| *end <= self.end)?;
        self.bytes.get(self.start..end)
    }

    /// `len` of the bytes have been used.
    pub(crate) fn take(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Where the next bytes go: at least `room`, and so that `front` bytes fit in one piece.
    pub(crate) fn space(&mut self, room: usize, front: usize) -> &mut [u8] {
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
    pub(crate) fn came(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }
}

/// Some bytes of a file, to send without reading them first.
#[derive(Debug, Clone)]
pub struct FilePart {
    pub file: Arc<File>,
    pub offset_bytes: u64,
    pub len_bytes: usize,
}

/// Replies to send, one after the other: bytes, and parts of files between them.
#[derive(Debug, Default)]
pub struct Out {
    bytes: Vec<u8>,
    used: usize,
    sent: usize,
    /// Each with its place: before which of the bytes, counted from the first.
    files: VecDeque<(usize, FilePart)>,
}

/// How far [`Out`] is filled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filled {
    pending: usize,
    files: usize,
}

/// What is to be sent next.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    Bytes(&'a [u8]),
    /// What was sent of it is cut from its front, and it is gone when it is empty.
    File(&'a mut FilePart),
    Nothing,
}

impl Out {
    /// Space for `len` more bytes, which the caller fills: old bytes may be in it.
    pub fn space(&mut self, len: usize) -> &mut [u8] {
        if self.sent > KEPT_BYTES && self.sent > self.used - self.sent {
            // A client that never takes all of it must not let it grow.
            self.bytes.copy_within(self.sent..self.used, 0);
            self.files.iter_mut().for_each(|(place, _)| *place -= self.sent);
            (self.sent, self.used) = (0, self.used - self.sent);
        }
        let at = self.used;
        self.used += len;
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
        self.bytes.get_mut(at..self.used).unwrap_or_default()
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    pub(crate) fn put_file(&mut self, part: FilePart) {
        if part.len_bytes > 0 {
            self.files.push_back((self.used, part));
        }
    }

    /// All that is still to be sent of `other` follows.
    pub(crate) fn append(&mut self, mut other: Self) {
        loop {
            match other.next() {
                Next::Nothing => return,
                Next::Bytes(bytes) => {
                    self.put(bytes);
                    let len = bytes.len();
                    other.gone(len);
                }
                Next::File(part) => {
                    self.put_file(part.clone());
                    part.len_bytes = 0;
                }
            }
        }
    }

    /// For [`Out::cut`], before anything is sent.
    pub(crate) fn filled(&self) -> Filled {
        Filled { pending: self.used - self.sent, files: self.files.len() }
    }

    /// Takes back all that was put since.
    pub(crate) fn cut(&mut self, before: Filled) {
        self.used = self.used.min(self.sent + before.pending);
        self.files.truncate(before.files);
    }

    /// How much is still to be sent.
    pub(crate) fn pending_bytes(&self) -> usize {
        let files = self.files.iter().map(|(_, part)| part.len_bytes);
        self.used - self.sent + files.sum::<usize>()
    }

    /// The bytes that are still to be sent, up to the first part of a file.
    pub fn leading_bytes(&self) -> &[u8] {
        let end = self.files.front().map_or(self.used, |(place, _)| *place);
        self.bytes.get(self.sent..end).unwrap_or_default()
    }

    /// The first piece that is still to be sent.
    pub(crate) fn next(&mut self) -> Next<'_> {
        while self.files.front().is_some_and(|(_, part)| part.len_bytes == 0) {
            self.files.pop_front();
        }
        if !self.leading_bytes().is_empty() {
            return Next::Bytes(self.leading_bytes());
        }
        match self.files.front_mut() {
            Some((_, part)) => Next::File(part),
            None => Next::Nothing,
        }
    }

    /// `len` of the bytes have been sent.
    pub(crate) fn gone(&mut self, len: usize) {
        self.sent = (self.sent + len).min(self.used);
        if self.sent == self.used && self.files.is_empty() {
            (self.sent, self.used) = (0, 0);
            if self.bytes.len() > KEPT_BYTES {
                self.bytes.truncate(KEPT_BYTES);
                self.bytes.shrink_to_fit();
            }
        }
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

    /// All that is still to be sent; files are their names in order.
    fn pending(mut out: Out) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            match out.next() {
                Next::Nothing => return all,
                Next::Bytes(bytes) => {
                    all.extend_from_slice(bytes);
                    let len = bytes.len();
                    out.gone(len);
                }
                Next::File(part) => {
                    all.push(u8::try_from(part.offset_bytes).expect("small"));
                    // In two steps.
                    part.len_bytes /= 2;
                }
            }
        }
    }

    fn part(name: u8) -> FilePart {
        let file = Arc::new(File::open("/dev/null").expect("a file"));
        FilePart { file, offset_bytes: u64::from(name), len_bytes: 1 }
    }

    #[test]
    fn replies_go_out_in_pieces_and_one_that_failed_is_taken_back() {
        let mut out = Out::default();
        out.put(b"one");
        let before = out.filled();
        out.put(b"failed");
        out.put_file(part(b'-'));
        out.cut(before);
        out.put(b"two");
        out.gone(2);
        assert_eq!(out.pending_bytes(), 4);
        out.cut(Filled { pending: 1, files: 0 });
        let Next::Bytes(b"e") = out.next() else { panic!("{out:?}") };
        for _ in 0..100 {
            out.space(1 << 20).fill(7);
            let len = out.pending_bytes() - 1;
            out.gone(len);
            assert_eq!(out.pending_bytes(), 1);
        }
        assert!(out.bytes.len() < 12 << 20, "{}", out.bytes.len());
        assert_eq!(pending(out), [7]);
    }

    #[test]
    fn parts_of_files_stay_at_their_place() {
        let mut out = Out::default();
        out.put_file(part(b'A'));
        out.put(b"b");
        out.put_file(part(b'C'));
        out.put_file(part(b'D'));
        let mut other = Out::default();
        other.put(b"sent");
        other.gone(4);
        other.put(b"e");
        other.put_file(part(b'F'));
        other.put(b"g");
        out.append(other);
        assert_eq!(out.pending_bytes(), 7);
        assert_eq!(pending(out), *b"AbCDeFg");

        // Bytes move to the front, and the part with them.
        let mut out = Out::default();
        out.space(5 << 20).fill(1);
        out.put(b"x");
        out.put_file(part(b'Y'));
        out.put(b"z");
        out.gone(5 << 20);
        out.put(b"!");
        assert_eq!(out.used, 3);
        assert_eq!(pending(out), *b"xYz!");
    }
}
