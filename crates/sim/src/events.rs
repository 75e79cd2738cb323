//! What happens next.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Events by time; those of one time in the order in which they were put in.
#[derive(Debug)]
pub(crate) struct Events<E> {
    heap: BinaryHeap<Entry<E>>,
    count: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Duration,
    number: u64,
    event: E,
}

impl<E> Events<E> {
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new(), count: 0 }
    }

    pub(crate) fn push(&mut self, at: Duration, event: E) {
        self.heap.push(Entry { at, number: self.count, event });
        self.count += 1;
    }

    pub(crate) fn pop(&mut self) -> Option<(Duration, E)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }

    /// How many there have been.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

impl<E> Ord for Entry<E> {
    /// The earliest is the greatest: a `BinaryHeap` gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}
