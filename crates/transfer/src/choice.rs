//! Whether a host is asked for compressed answers, by what came of earlier ones. No I/O.

use std::time::Duration;

/// Only answers of about this many pages are compared with each other: with few pages the time is
/// all latency, with many all bytes.
const CLASSES: [u64; 3] = [4, 64, u64::MAX];
/// Each way is tried this often before the first is preferred …
const TRIES: u32 = 8;
/// … and from then on, the other one once per this many answers.
const AGAIN_EVERY: u32 = 64;
/// What leaves out a quarter of the bytes, or more, may take a quarter longer: others need the
/// link, too. Of few pages it may not: a VM waits for them, most often.
const WORTH_IT: f64 = 0.25;

/// What is best of this peer: bytes as they are, or compressed.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    classes: [Ways; CLASSES.len()],
}

#[derive(Debug, Default)]
struct Ways {
    /// Not to be compressed, and to be if it pays there.
    ways: [Way; 2],
    answers: u32,
}

/// Moving averages of a page's.
#[derive(Debug, Default, Clone, Copy)]
struct Way {
    tries: u32,
    ns: f64,
    bytes: f64,
}

/// An answer, or several at once.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Came {
    /// Without those of zeros.
    pub(crate) sent_pages: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) took: Duration,
}

impl Choice {
    fn class(pages: u64) -> usize {
        CLASSES.iter().position(|most| pages < *most).unwrap_or(0)
    }

    /// Whether the next answer, of this many pages, may be compressed.
    pub(crate) fn may_compress(&mut self, pages: u64) -> bool {
        let class = Self::class(pages);
        let Ways { ways: [plain, packed], answers } = &mut self.classes[class];
        *answers = answers.wrapping_add(1);
        if plain.tries < TRIES || packed.tries < TRIES {
            return packed.tries < plain.tries;
        }
        let saves = class > 0 && packed.bytes <= plain.bytes * (1.0 - WORTH_IT);
        let may_take = plain.ns * if saves { 1.0 + WORTH_IT } else { 1.0 };
        (packed.ns < may_take) != answers.is_multiple_of(AGAIN_EVERY)
    }

    /// An answer of this many pages has come. Zeros alone teach nothing.
    pub(crate) fn took(&mut self, may_compress: bool, pages: u64, came: Came) {
        if came.sent_pages == 0 {
            return;
        }
        let way = &mut self.classes[Self::class(pages)].ways[usize::from(may_compress)];
        // The precision does not matter.
        let a_page = |all: f64| all / came.sent_pages as f64;
        let (ns, bytes) = (a_page(came.took.as_secs_f64() * 1e9), a_page(came.wire_bytes as f64));
        if way.tries == 0 {
            (way.ns, way.bytes) = (ns, bytes);
        } else {
            // What took very long took so for another reason.
            way.ns += (ns.min(way.ns * 4.0) - way.ns) / 8.0;
            way.bytes += (bytes - way.bytes) / 8.0;
        }
        way.tries = way.tries.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of this many answers are compressed. `ns` is the time of a page each way, and
    /// `bytes` the size of a compressed one.
    fn chosen(choice: &mut Choice, answers: u32, pages: u64, ns: (u64, u64), bytes: u64) -> u32 {
        let mut compressed = 0;
        for _ in 0..answers {
            let may = choice.may_compress(pages);
            compressed += u32::from(may);
            let (ns, bytes) = if may { (ns.1, bytes) } else { (ns.0, 4096) };
            let took = Duration::from_nanos(ns * pages);
            choice.took(may, pages, Came { sent_pages: pages, wire_bytes: bytes * pages, took });
        }
        compressed
    }

    #[test]
    fn the_quicker_way_is_taken_and_the_other_tried_now_and_then() {
        let mut choice = Choice::default();
        let fast = chosen(&mut choice, 1000, 16, (2000, 5000), 1000);
        assert!((8..40).contains(&fast), "{fast} on a fast link");
        // The link has become slow.
        let slow = chosen(&mut choice, 2000, 16, (30_000, 12_000), 1000);
        assert!(slow > 1000, "{slow} on a slow link");
        // And of single pages nothing is known by that.
        let single = chosen(&mut choice, 1000, 1, (90_000, 95_000), 1000);
        assert!(single < 40, "{single} of single pages");
    }

    #[test]
    fn what_saves_much_may_take_a_little_longer() {
        let took = (10_000, 11_000);
        assert!(chosen(&mut Choice::default(), 1000, 16, took, 3000) > 900);
        assert!(chosen(&mut Choice::default(), 1000, 16, took, 3500) < 40, "it saves little");
        assert!(
            chosen(&mut Choice::default(), 1000, 16, (10_000, 13_000), 1000) < 40,
            "it takes long"
        );
    }

    #[test]
    fn one_answer_that_took_long_changes_nothing() {
        let mut choice = Choice::default();
        chosen(&mut choice, 100, 16, (9000, 5000), 4096);
        let took = Duration::from_secs(5);
        choice.took(true, 16, Came { sent_pages: 16, wire_bytes: 65_536, took });
        assert!(chosen(&mut choice, 60, 16, (9000, 5000), 4096) > 50);
    }
}
