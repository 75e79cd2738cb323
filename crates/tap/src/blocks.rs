//! What has been done to each block of a view, so that the keeper never maps over pages that QEMU installed.
//!
//! The page engine asks for a run of another cache to be mapped over blocks *it* never installed anything in.
//! QEMU's own threads may install pages there, too: zeros, before a disk read or after a balloon's report. Per
//! block:
//!
//! ```text
//!            hook                          keeper
//!   FRESH ─────────► TOUCHED      FRESH ─────────► MAPPING ─────────► MAPPED
//!                                    ▲                 │ failed
//!                                    └─────────────────┘
//! ```
//!
//! Both leave FRESH by compare-and-swap, so one of them wins. A hook that meets MAPPING does not wait: it
//! leaves the pages alone, which costs a fetch and nothing else, since the VM never touched them before.

use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use vmfork_tap_proto::{BLOCK_BYTES, RAM_BYTES_MAX};

const FRESH: u8 = 0;
const TOUCHED: u8 = 1;
const MAPPING: u8 = 2;
const MAPPED: u8 = 3;

pub(crate) const BLOCKS_MAX: usize = (RAM_BYTES_MAX / BLOCK_BYTES) as usize;

static STATES: [AtomicU8; BLOCKS_MAX] = [const { AtomicU8::new(FRESH) }; BLOCKS_MAX];

/// A hook wants to install pages in a block. False: leave it alone.
pub(crate) fn touch(block: usize) -> bool {
    let Some(state) = STATES.get(block) else { return false };
    match state.compare_exchange(FRESH, TOUCHED, AcqRel, Acquire) {
        Ok(_) => true,
        Err(now) => now != MAPPING,
    }
}

/// The keeper wants to map over blocks. False: QEMU has touched one of them; none is claimed.
pub(crate) fn claim(first: usize, end: usize) -> bool {
    for block in first..end {
        let won = STATES
            .get(block)
            .is_some_and(|state| state.compare_exchange(FRESH, MAPPING, AcqRel, Acquire).is_ok());
        if !won {
            settle(first, block, false);
            return false;
        }
    }
    true
}

/// What became of claimed blocks.
pub(crate) fn settle(first: usize, end: usize, mapped: bool) {
    for state in STATES.iter().take(end).skip(first) {
        state.store(if mapped { MAPPED } else { FRESH }, Release);
    }
}

/// RAM, of so many blocks, is mapped anew as a whole. Only while the VM is stopped.
pub(crate) fn reset(blocks: usize) {
    for state in STATES.iter().take(blocks) {
        state.store(FRESH, Release);
    }
}
