//! The log itself.

use std::collections::VecDeque;

use crate::cursor::Cursor;

/// Most that a log holds. The oldest events leave first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub events_max: usize,
    /// Of all events together, as [`Log::push`] counts them.
    pub bytes_max: usize,
}

/// A log of one life. It does not know the kind of its events.
#[derive(Debug)]
pub struct Log<T> {
    epoch: u64,
    limits: Limits,
    /// The sequence number of the oldest event that is held, or of the next one.
    first: u64,
    /// Each with its size.
    held: VecDeque<(T, usize)>,
    bytes: usize,
}

/// What is after a cursor.
#[derive(Debug, PartialEq, Eq)]
pub enum Read<'a, T> {
    /// The next events, each with its cursor, in order. Empty: there is no newer one yet.
    Events(Vec<(Cursor, &'a T)>),
    /// The events `lost_from` to `lost_to` came after the cursor, and have left the log. Reading
    /// continues at `resume`.
    Gap { lost_from: u64, lost_to: u64, resume: Cursor },
    /// The cursor is of another life of the log. What that life had after it is not known. Of this
    /// life the first `lost` events have left the log. Reading continues at `resume`.
    OtherEpoch { lost: u64, resume: Cursor },
    /// The cursor is of this life, but no event has that number yet: the log never gave it out.
    Ahead { newest: Cursor },
}

impl<T> Log<T> {
    /// An empty log. `epoch` differs from that of every other life of it.
    pub fn new(epoch: u64, limits: Limits) -> Self {
        Self { epoch, limits, first: 1, held: VecDeque::new(), bytes: 0 }
    }

    /// The place of the event that is pushed next.
    pub fn next(&self) -> Cursor {
        self.at(self.first + self.len())
    }

    /// The place of the newest event: what comes later is after it.
    pub fn newest(&self) -> Cursor {
        self.at(self.first + self.len() - 1)
    }

    /// The place before the oldest event that is held.
    pub fn start(&self) -> Cursor {
        self.at(self.first - 1)
    }

    /// Adds an event of `bytes` bytes. Older ones leave to make room. An event that is larger than
    /// the log may be is not held at all: each reader is told that it lost it.
    pub fn push(&mut self, event: T, bytes: usize) -> Cursor {
        let cursor = self.next();
        self.held.push_back((event, bytes));
        self.bytes = self.bytes.saturating_add(bytes);
        while self.held.len() > self.limits.events_max || self.bytes > self.limits.bytes_max {
            let Some((_, bytes)) = self.held.pop_front() else { break };
            self.bytes -= bytes;
            self.first += 1;
        }
        cursor
    }

    /// At most `max` events after a cursor, or why there is no such list.
    pub fn read(&self, after: Cursor, max: usize) -> Read<'_, T> {
        if after.epoch != self.epoch {
            return Read::OtherEpoch { lost: self.first - 1, resume: self.start() };
        }
        if after.seq > self.newest().seq {
            return Read::Ahead { newest: self.newest() };
        }
        let from = after.seq + 1;
        let Some(skip) = from.checked_sub(self.first) else {
            let lost_to = self.first - 1;
            return Read::Gap { lost_from: from, lost_to, resume: self.start() };
        };
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let wanted = self.held.iter().skip(skip).take(max);
        Read::Events((from..).map(|seq| self.at(seq)).zip(wanted.map(|(event, _)| event)).collect())
    }

    /// How many bytes the events that are held have.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn len(&self) -> u64 {
        // As many as fit into memory.
        self.held.len() as u64
    }

    fn at(&self, seq: u64) -> Cursor {
        Cursor { epoch: self.epoch, seq }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(events_max: usize, bytes_max: usize) -> Log<u64> {
        Log::new(7, Limits { events_max, bytes_max })
    }

    fn at(seq: u64) -> Cursor {
        Cursor { epoch: 7, seq }
    }

    #[test]
    fn what_fell_out_of_the_window_is_told_by_number() {
        let mut log = log(3, 100);
        for n in 1..=5 {
            assert_eq!(log.push(n, 1), at(n));
        }
        assert_eq!((log.start(), log.newest()), (at(2), at(5)));
        assert_eq!(log.read(at(0), 9), Read::Gap { lost_from: 1, lost_to: 2, resume: at(2) });
        assert_eq!(log.read(at(1), 9), Read::Gap { lost_from: 2, lost_to: 2, resume: at(2) });
        assert_eq!(log.read(at(2), 2), Read::Events(vec![(at(3), &3), (at(4), &4)]));
        assert_eq!(log.read(at(5), 2), Read::Events(vec![]));
        assert_eq!(log.read(at(6), 2), Read::Ahead { newest: at(5) });
    }

    #[test]
    fn a_cursor_of_another_life_is_recognised_whatever_its_number() {
        let mut log = log(1, 100);
        let (earlier, later) = (Cursor { epoch: 6, seq: 0 }, Cursor { epoch: 8, seq: u64::MAX });
        assert_eq!(log.read(earlier, 9), Read::OtherEpoch { lost: 0, resume: at(0) });
        log.push(1, 1);
        log.push(2, 1);
        assert_eq!(log.read(later, 9), Read::OtherEpoch { lost: 1, resume: at(1) });
    }

    #[test]
    fn an_event_larger_than_the_log_is_told_as_lost() {
        let mut log = log(10, 100);
        log.push(1, 60);
        log.push(2, 101);
        assert_eq!((log.bytes(), log.newest()), (0, at(2)));
        assert_eq!(log.read(at(1), 9), Read::Gap { lost_from: 2, lost_to: 2, resume: at(2) });
        log.push(3, 100);
        assert_eq!(log.read(at(2), 9), Read::Events(vec![(at(3), &3)]));
    }
}
