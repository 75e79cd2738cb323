//! How a page is read while the drain may be moving it: from the cache, or from where the freeze
//! left it.
//!
//! ```text
//!   drain     write the cache ──► set presence ──► give the original back
//!   reader    presence? ──no──► copy the original ──► presence still unset? ──► the copy is good
//!                 └──yes─► copy from the cache ◄──────────────no──────────┘
//! ```
//!
//! No lock: an original that is given back was in the cache before, and the reader looks again
//! after it has copied. The order of a reader's copy and its second look at presence is the
//! kernel's: reading another process's memory and unmapping it take that process's `mmap_lock`.
//!
//! The model: `RUSTFLAGS="--cfg loom" cargo test -p vmfork-engine --lib loom --target-dir
//! target/loom`

use vmfork_image::{PageIdx, PageRange};

use crate::presence::Presence;

/// Read `range` piece by piece: `from_cache` runs whose pages are present, `from_original` runs
/// whose pages are not. A failure of `from_original` counts only if the page is still absent
/// afterwards. `lasts`: originals are never given back, so that what was read of them is good. →
/// how many pages were read from originals.
///
/// Bounded: each turn either reads a run or finds a page present that was absent, and present pages
/// stay so.
///
/// # Errors
/// The page that could not be read, and what reading it answered.
pub(crate) fn read<E>(
    presence: &Presence,
    range: PageRange,
    lasts: bool,
    mut from_cache: impl FnMut(PageRange) -> Result<(), E>,
    mut from_original: impl FnMut(PageRange) -> Result<(), E>,
) -> Result<u64, (PageIdx, E)> {
    let mut at = range.start();
    let mut originals = 0;
    while at < range.end() {
        let (run, present) = presence.run(range.from_page(at));
        if present {
            from_cache(run).map_err(|error| (at, error))?;
            at = run.end();
            continue;
        }
        let outcome = from_original(run);
        if lasts && outcome.is_ok() {
            originals += run.len();
            at = run.end();
            continue;
        }
        let (after, present) = presence.run(run);
        if present {
            continue; // drained meanwhile: take it from the cache
        }
        outcome.map_err(|error| (at, error))?;
        originals += after.len();
        at = after.end();
    }
    Ok(originals)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn each_page_is_read_once_from_where_it_is() {
        let presence = Presence::new(8);
        presence.set(range(2, 3));
        let (mut cached, mut originals) = (Vec::new(), Vec::new());
        let count = read::<()>(
            &presence,
            range(1, 6),
            false,
            |run| {
                cached.push(run);
                Ok(())
            },
            |run| {
                originals.push(run);
                Ok(())
            },
        );
        assert_eq!(count, Ok(3));
        assert_eq!(cached, [range(2, 3)]);
        assert_eq!(originals, [range(1, 1), range(5, 2)]);
    }

    #[test]
    fn an_original_that_was_given_back_meanwhile_is_read_from_the_cache() {
        let presence = Presence::new(4);
        let mut cached = Vec::new();
        let count = read(
            &presence,
            range(0, 4),
            false,
            |run| {
                cached.push(run);
                Ok(())
            },
            |run| {
                presence.set(range(0, 2)); // the drain has come by
                if run.start() < PageIdx(2) { Err("unmapped") } else { Ok(()) }
            },
        );
        assert_eq!(count, Ok(2));
        assert_eq!(cached, [range(0, 2)]);
    }

    #[test]
    fn a_page_that_is_nowhere_is_named() {
        let presence = Presence::new(4);
        presence.set(range(0, 2));
        let outcome = read(&presence, range(0, 4), false, |_| Ok(()), |_| Err("gone"));
        assert_eq!(outcome, Err((PageIdx(2), "gone")));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const RIGHT: u64 = 7;
    const ELSEWHERE: u64 = 99;

    struct Memory {
        presence: Presence,
        cache: [AtomicU64; 2],
        original: [AtomicU64; 2],
    }

    /// The drain moves two pages and gives both originals back, whose addresses QEMU uses for
    /// something else at once; a reader sees the right bytes whatever the order.
    #[test]
    fn loom_a_reader_never_sees_an_original_that_was_given_back() {
        loom::model(|| {
            let memory = Arc::new(Memory {
                presence: Presence::new(2),
                cache: [AtomicU64::new(0), AtomicU64::new(0)],
                original: [AtomicU64::new(RIGHT), AtomicU64::new(RIGHT + 1)],
            });
            let drained = Arc::clone(&memory);
            let drain = loom::thread::spawn(move || {
                for page in 0..2 {
                    let bytes = drained.original[page].load(Ordering::Acquire);
                    drained.cache[page].store(bytes, Ordering::Relaxed);
                    drained.presence.set(PageIdx(page as u64).range());
                }
                // Release and Acquire here stand for the `mmap_lock` of the process that holds the
                // originals.
                for original in &drained.original {
                    original.store(ELSEWHERE, Ordering::Release);
                }
            });
            let mut seen = [0; 2];
            let out = std::cell::RefCell::new(&mut seen);
            let copy = |run: PageRange, from: &[AtomicU64; 2], order| {
                for page in run.pages() {
                    let at = usize::try_from(page.0).expect("small");
                    out.borrow_mut()[at] = from[at].load(order);
                }
                Ok::<_, ()>(())
            };
            let origin = read(
                &memory.presence,
                PageRange::first(2),
                false,
                |run| copy(run, &memory.cache, Ordering::Relaxed),
                |run| copy(run, &memory.original, Ordering::Acquire),
            );
            assert!(origin.is_ok());
            drop(out);
            assert_eq!(seen, [RIGHT, RIGHT + 1]);
            drain.join().expect("drain");
        });
    }
}
