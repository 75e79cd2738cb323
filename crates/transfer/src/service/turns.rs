//! Turns of background reads: a limited number is read at a time, the others wait a while.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

#[derive(Debug)]
pub(super) struct Turns {
    left: Mutex<Left>,
    given_back: Condvar,
}

#[derive(Debug)]
struct Left {
    turns: usize,
    closed: bool,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(super) fn new(turns: usize) -> Self {
        Self { left: Mutex::new(Left { turns, closed: false }), given_back: Condvar::new() }
    }

    /// Wait for one. `None`: there was none in time, or there will be none any more.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Turn<'_>> {
        let none_left = |left: &mut Left| left.turns == 0 && !left.closed;
        let waited = self.given_back.wait_timeout_while(lock(&self.left), timeout, none_left);
        let (mut left, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if left.closed {
            return None;
        }
        left.turns = left.turns.checked_sub(1)?;
        Some(Turn(self))
    }

    /// End all waits, and let no read wait any more.
    pub(super) fn close(&self) {
        lock(&self.left).closed = true;
        self.given_back.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.left).turns += 1;
        self.0.given_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn there_is_a_limit_of_turns_and_each_comes_back() {
        let turns = Turns::new(2);
        let (first, second) = (turns.wait(SHORT), turns.wait(SHORT));
        assert!(first.is_some() && second.is_some() && turns.wait(SHORT).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| turns.wait(LONG).is_some());
            drop(first);
            assert!(waits.join().expect("no panic"));
        });
    }

    #[test]
    fn no_read_waits_for_a_turn_after_the_end() {
        let turns = Turns::new(0);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| turns.wait(LONG).is_none());
            turns.close();
            assert!(waits.join().expect("no panic"));
        });
    }
}
