//! What has been done to each block of a view, so that the keeper never maps over pages that QEMU
//! installed.
//!
//! The page engine asks for a run of another cache to be mapped over blocks *it* never installed
//! anything in. QEMU's own threads may install pages there, too: zeros, before a disk read or after
//! a balloon's report. Per block:
//!
//! ```text
//!            hook                          keeper
//!   FRESH ─────────► TOUCHED      FRESH ─────────► MAPPING ─────────► MAPPED
//!                                    ▲                 │ failed
//!                                    └─────────────────┘
//! ```
//!
//! Both leave FRESH by compare-and-swap, so one of them wins. A hook that meets MAPPING does not
//! wait. It leaves the pages alone, which costs only a fetch, since the VM never touched them
//! before.
//!
//! The model: `RUSTFLAGS="--cfg loom" cargo test -p vmfork-tap --lib loom --target-dir target/loom`

use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};

#[cfg(not(loom))]
use core::sync::atomic::AtomicU8;
#[cfg(loom)]
use loom::sync::atomic::AtomicU8;

use vmfork_tap_proto::{BLOCK_BYTES, RAM_BYTES_MAX};

const FRESH: u8 = 0;
const TOUCHED: u8 = 1;
const MAPPING: u8 = 2;
const MAPPED: u8 = 3;

pub(crate) const BLOCKS_MAX: usize = (RAM_BYTES_MAX / BLOCK_BYTES) as usize;

/// The blocks of RAM.
#[cfg(not(loom))]
pub(crate) static RAM: Blocks<BLOCKS_MAX> = Blocks([const { AtomicU8::new(FRESH) }; BLOCKS_MAX]);
#[cfg(loom)]
loom::lazy_static! {
    pub(crate) static ref RAM: Blocks<2> = Blocks::new();
}

pub(crate) struct Blocks<const N: usize>([AtomicU8; N]);

impl<const N: usize> Blocks<N> {
    #[cfg(any(test, loom))]
    fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicU8::new(FRESH)))
    }

    /// A hook wants to install pages in a block. False: leave it alone.
    pub(crate) fn touch(&self, block: usize) -> bool {
        let Some(state) = self.0.get(block) else { return false };
        match state.compare_exchange(FRESH, TOUCHED, AcqRel, Acquire) {
            Ok(_) => true,
            Err(now) => now != MAPPING,
        }
    }

    /// The keeper wants to map over blocks. Err: QEMU has touched this one of them; none is
    /// claimed.
    pub(crate) fn claim(&self, first: usize, end: usize) -> Result<(), usize> {
        for block in first..end {
            let won = self.0.get(block).is_some_and(|state| {
                state.compare_exchange(FRESH, MAPPING, AcqRel, Acquire).is_ok()
            });
            if !won {
                self.settle(first, block, false);
                return Err(block);
            }
        }
        Ok(())
    }

    /// What became of claimed blocks.
    pub(crate) fn settle(&self, first: usize, end: usize, mapped: bool) {
        for state in self.0.iter().take(end).skip(first) {
            state.store(if mapped { MAPPED } else { FRESH }, Release);
        }
    }

    /// RAM, of `blocks` blocks, is mapped again as a whole. Only while the VM is stopped.
    pub(crate) fn reset(&self, blocks: usize) {
        for state in self.0.iter().take(blocks) {
            state.store(FRESH, Release);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_claim_fails_as_a_whole_and_leaves_nothing_behind() {
        let blocks = Blocks::<4>::new();
        assert!(blocks.touch(2));
        assert_eq!(blocks.claim(0, 4), Err(2));
        assert_eq!(blocks.claim(0, 2), Ok(()), "given back");
        assert!(!blocks.touch(0), "being mapped");
        blocks.settle(0, 2, true);
        assert!(blocks.touch(0), "holes of what is mapped may be filled");
        assert_eq!(blocks.claim(0, 1), Err(0), "but it is never mapped over again");
        assert_eq!(blocks.claim(3, 5), Err(4), "beyond the end");
        blocks.reset(4);
        assert_eq!(blocks.claim(0, 4), Ok(()));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const NOTHING: u64 = 0;
    const ZEROS: u64 = 1;
    const MAPPED_CACHE: u64 = 2;

    /// What QEMU installed is never lost under a mapping. A hook that may install is either before
    /// the claim, which then fails, or after the mapping.
    #[test]
    fn loom_the_keeper_never_maps_over_what_a_hook_installed() {
        loom::model(|| {
            let ram =
                Arc::new((Blocks::<2>::new(), [AtomicU64::new(NOTHING), AtomicU64::new(NOTHING)]));
            let keeper = Arc::clone(&ram);
            let keeper = loom::thread::spawn(move || {
                let (blocks, installed) = &*keeper;
                if blocks.claim(0, 2).is_err() {
                    return false;
                }
                for block in installed {
                    let before = block.swap(MAPPED_CACHE, Ordering::Relaxed);
                    assert_eq!(before, NOTHING, "mapped over what QEMU installed");
                }
                blocks.settle(0, 2, true);
                true
            });
            let hook = Arc::clone(&ram);
            let hook = loom::thread::spawn(move || {
                let (blocks, installed) = &*hook;
                if blocks.touch(1) {
                    // UFFDIO_ZEROPAGE: installs where nothing is.
                    let outcome = installed[1].compare_exchange(
                        NOTHING,
                        ZEROS,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    );
                    assert!(matches!(outcome, Ok(_) | Err(MAPPED_CACHE)));
                }
            });
            let mapped = keeper.join().expect("keeper");
            hook.join().expect("hook");
            let (blocks, installed) = &*ram;
            if mapped {
                assert_eq!(installed[1].load(Ordering::Relaxed), MAPPED_CACHE);
            } else {
                assert_eq!(installed[0].load(Ordering::Relaxed), NOTHING);
                assert!(blocks.claim(0, 1).is_ok(), "a claim that failed gave back what it had");
            }
        });
    }
}
