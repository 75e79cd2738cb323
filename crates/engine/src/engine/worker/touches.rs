//! What VMs touch, and when: told at the log level `trace`, to be played again elsewhere
//! (`python3 -m bench.traces`, `crates/sim`).
//!
//! What comes before it is touched is not seen. So as long as this is told, pages of stored images
//! and of other hosts come one by one, and nothing is predicted.

use std::time::Duration;

use vmfork_image::PageIdx;
use vmfork_policy::ViewId;

const TARGET: &str = "vmfork_engine::touches";

/// Whether the log level asks for touches.
pub(super) fn are_recorded() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::TRACE)
}

/// A view begins to wait for a page, so long after its engine began.
pub(super) fn waits((ViewId(view), page): (ViewId, PageIdx), is_write: bool, at: Duration) {
    tracing::trace!(target: TARGET, view, %page, is_write, at_us = at.as_micros(), "waits");
}

/// It goes on.
pub(super) fn came((ViewId(view), page): (ViewId, PageIdx), at: Duration) {
    tracing::trace!(target: TARGET, view, %page, at_us = at.as_micros(), "came");
}
