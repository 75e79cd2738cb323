//! What a consumer has not taken yet of what a guest sent: the driver's end of a session's output.

use std::collections::VecDeque;

use bytes::Bytes;
use tokio::sync::mpsc;
use vmfork_agent_proto::Kind;

/// Items that a session's channel holds beside what waits here.
pub(super) const OUTPUT_ITEMS: usize = 4;

/// Small pieces of one stream are joined up to this size while they wait.
const PIECE_BYTES: usize = 64 * 1024;

/// Where a stream of stdout, stderr or a file goes. Bounded by the streams' windows: credit is
/// given for what was passed on.
#[derive(Debug)]
pub(super) struct Outlet<T> {
    tx: mpsc::Sender<T>,
    wrap: fn(Kind, Bytes) -> T,
    data: VecDeque<(Kind, Vec<u8>)>,
    last: Option<T>,
    finished: bool,
    /// A wake-up for free room has been asked for.
    pub(super) waiting: bool,
}

/// What became of an outlet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flushed {
    /// All was passed on.
    Empty,
    /// The consumer has to take something first.
    Full,
    /// All was passed on and no more will come.
    Done,
    /// The consumer has gone.
    Gone,
}

impl<T> Outlet<T> {
    pub(super) fn new(tx: mpsc::Sender<T>, wrap: fn(Kind, Bytes) -> T) -> Self {
        Self { tx, wrap, data: VecDeque::new(), last: None, finished: false, waiting: false }
    }

    pub(super) fn push(&mut self, kind: Kind, bytes: Vec<u8>) {
        if self.finished || bytes.is_empty() {
            return;
        }
        match self.data.back_mut() {
            Some((last, piece)) if *last == kind && piece.len() + bytes.len() <= PIECE_BYTES => {
                piece.extend_from_slice(&bytes);
            }
            _ => self.data.push_back((kind, bytes)),
        }
    }

    /// No more will come, but for `last`. Only the first call counts.
    pub(super) fn finish(&mut self, last: Option<T>) {
        if !self.finished {
            self.finished = true;
            self.last = last;
        }
    }

    /// Pass on what the consumer has room for; `taken` learns of stream bytes.
    pub(super) fn flush(&mut self, mut taken: impl FnMut(Kind, usize)) -> Flushed {
        loop {
            if self.data.is_empty() && self.last.is_none() {
                return if self.finished { Flushed::Done } else { Flushed::Empty };
            }
            let permit = match self.tx.try_reserve() {
                Ok(permit) => permit,
                Err(mpsc::error::TrySendError::Full(())) => return Flushed::Full,
                Err(mpsc::error::TrySendError::Closed(())) => return Flushed::Gone,
            };
            if let Some((kind, bytes)) = self.data.pop_front() {
                taken(kind, bytes.len());
                permit.send((self.wrap)(kind, Bytes::from(bytes)));
            } else if let Some(last) = self.last.take() {
                permit.send(last);
            }
        }
    }

    pub(super) fn sender(&self) -> mpsc::Sender<T> {
        self.tx.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Item = (Kind, Bytes);

    fn outlet() -> (Outlet<Item>, mpsc::Receiver<Item>) {
        let (tx, rx) = mpsc::channel(1);
        (Outlet::new(tx, |kind, bytes| (kind, bytes)), rx)
    }

    #[test]
    fn only_what_was_passed_on_counts_as_taken_and_order_is_kept() {
        let (mut outlet, mut rx) = outlet();
        let mut total = 0;
        outlet.push(Kind::Stdout, b"a".to_vec());
        outlet.push(Kind::Stderr, b"b".to_vec());
        outlet.push(Kind::Stderr, b"c".to_vec());
        assert_eq!(outlet.flush(|_, n| total += n), Flushed::Full);
        assert_eq!(total, 1);
        assert_eq!(rx.try_recv().expect("item"), (Kind::Stdout, Bytes::from("a")));
        outlet.finish(None);
        assert_eq!(outlet.flush(|_, n| total += n), Flushed::Done);
        assert_eq!(total, 3);
        assert_eq!(rx.try_recv().expect("item"), (Kind::Stderr, Bytes::from("bc")));
    }

    #[test]
    fn a_consumer_that_has_gone_is_noticed() {
        let (mut outlet, rx) = outlet();
        drop(rx);
        outlet.push(Kind::Stdout, b"a".to_vec());
        assert_eq!(outlet.flush(|_, _| {}), Flushed::Gone);
    }
}
