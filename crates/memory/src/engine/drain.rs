//! The drain: frozen pages that nobody asked for move to the cache, and their originals back to the host.
//!
//! ```text
//!   Idle ──sealed──► Copying ──all tried──► Releasing ──all given back──► Complete
//!                       └──some lost──► Incomplete
//! ```
//!
//! The scheduler's [`vmfork_policy::Drain`] says which pages; what is kept here is how far originals may be
//! given back, which holds for as long as the drain goes through the image in order and none of it fails.

use std::sync::Arc;
use std::time::Duration;

use vmfork_image::{BLOCK_PAGES, Origin, PageIdx, PageRange, PageTable};
use vmfork_policy::{Fetch, Reason};

use crate::host_image::{HostImage, PageLost};
use crate::presence::Presence;

/// Pages copied in one go: 256 KiB, about 60 µs, which a fault may have to wait.
pub(super) const STEP_PAGES: u64 = 64;

/// How long what nobody waits for is left to another engine that is bringing it.
const OTHERS_WAIT: Duration = Duration::from_secs(2);

/// Fewer come as quickly together as one does alone.
const SPLIT_PAGES_MIN: u64 = 4;

/// The policy's name in the scheduler.
pub(super) const NAME: &str = "drain";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not frozen, or not sealed yet.
    #[default]
    Idle,
    Copying,
    /// All pages are in the cache.
    Releasing,
    /// And the originals are given back.
    Complete,
    /// Some pages could not be had. Originals stay where they are, as far as there are any.
    Incomplete,
}

/// Where the drain stands in one image.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) stage: Stage,
    /// All own pages before this one are present.
    copied: u64,
    failed: bool,
    /// There is more to copy, when something that is under way has come.
    pub(super) is_held_up: bool,
}

impl Progress {
    pub(super) fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Copying | Stage::Releasing)
    }

    /// Pages that the drain proposed were copied.
    pub(super) fn on_filled(&mut self, range: PageRange) {
        if !self.failed {
            self.copied = self.copied.max(range.end().0);
        }
    }

    /// Or were not.
    pub(super) fn on_failed(&mut self) {
        self.failed = true;
    }

    /// Originals before this page may be given back: whole blocks, since a huge page that is given back in part
    /// is split.
    pub(super) fn release_limit(&self, pages: u64) -> PageIdx {
        match self.stage {
            Stage::Releasing => PageIdx(pages),
            _ => PageIdx(self.copied / BLOCK_PAGES * BLOCK_PAGES),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether there is something to do at once.
    pub(super) fn is_due(&self) -> bool {
        self.is_running() && !self.is_held_up
    }

    /// Everything has been tried. Nothing is given back unless all of it is there, whatever has been counted.
    pub(super) fn on_copied(&mut self, image: &HostImage, table: &PageTable) {
        let all_there = |presence: &Presence| {
            table.pages_of(image.id()).all(|run| presence.count(run) == run.len())
        };
        self.stage = match all_there(image.cache().presence()) {
            true => Stage::Releasing,
            false => Stage::Incomplete,
        };
    }
}

/// Bring pages of `owner` into the cache of `image` (the same, or one that descends from it). What comes from another host stays
/// in both: another descendant, with a cache of its own for them, shall not ask for them again. `early` is told when the page that is waited
/// for is there before the others.
///
/// # Errors
/// The pages could not be had, or the host is out of memory.
pub(super) fn fill(
    image: &HostImage,
    owner: &HostImage,
    fetch: Fetch,
    buffer: &mut Vec<u8>,
    early: &mut dyn FnMut(PageIdx),
) -> Result<(), PageLost> {
    if is_there(image, owner, fetch) {
        return Ok(());
    }
    let range = fetch.range;
    let may_be_left = fetch.reason != Reason::Demand && owner.source().is_some();
    let _bringing = if may_be_left { owner.incoming.begin(range, OTHERS_WAIT) } else { None };
    if may_be_left && is_there(image, owner, fetch) {
        return Ok(()); // another engine brought it
    }
    buffer.resize(usize::try_from(range.byte_len()).unwrap_or(0), 0);
    let first = fetch.first.filter(|page| range.len() >= SPLIT_PAGES_MIN && range.contains(*page));
    let origin = match (fetch.reason, first) {
        (Reason::Demand, Some(page)) => {
            owner.read_owned_first(range, page, buffer, &mut |bytes| {
                if put(image, owner, page.range(), Origin::Peer, bytes).is_ok() {
                    early(page);
                }
            })?
        }
        (Reason::Demand, None) => owner.read_owned(range, buffer)?,
        (Reason::Background(_), _) => owner.read_owned_ahead(range, buffer)?,
    };
    store(image, owner, fetch, origin, buffer)
}

/// The same for several of one owner, of which nobody waits for any. `done` is told of each once, with its place.
pub(super) fn fill_together(
    owner: &HostImage,
    wanted: &[(Arc<HostImage>, Fetch)],
    buffer: &mut Vec<u8>,
    done: &mut dyn FnMut(usize, Result<(), PageLost>),
) {
    let source = owner.source().map(|source| source.origin());
    // What is here in part is put together from both places, by itself; so is what another engine brings.
    let is_absent = |range| owner.cache().presence().count(range) == 0;
    let (mut far, mut bringing) = (Vec::new(), Vec::new());
    let (mut places, mut later): (Vec<(usize, &HostImage, Fetch)>, Vec<_>) = Default::default();
    for (place, (image, fetch)) in wanted.iter().enumerate() {
        let range = fetch.range;
        let begun = match source {
            Some(_) if is_absent(range) => owner.incoming.begin(range, Duration::ZERO),
            _ => None,
        };
        if is_there(image, owner, *fetch) {
            done(place, Ok(()));
        } else if begun.is_some() {
            far.push(range);
            places.push((place, image, *fetch));
            bringing.push(begun);
        } else {
            later.push((place, image, *fetch));
        }
    }
    let mut each = |at, came: Result<&[u8], PageLost>| {
        let Some(&(place, image, fetch)) = places.get(at) else { return };
        let Some(origin) = source else { return };
        let outcome = match came.and_then(|bytes| store(image, owner, fetch, origin, bytes)) {
            // Another answer was first.
            Err(_) if is_there(image, owner, fetch) => Ok(()),
            outcome => outcome,
        };
        drop(bringing.get_mut(at).and_then(Option::take));
        done(place, outcome);
    };
    if !far.is_empty() {
        owner.read_far_ahead(&far, buffer, &mut each);
    }
    drop(bringing);
    for (place, image, fetch) in later {
        done(place, fill(image, owner, fetch, buffer, &mut |_| ()));
    }
}

/// Whether pages are in the cache already, if need be now, from the owner's.
fn is_there(image: &HostImage, owner: &HostImage, fetch: Fetch) -> bool {
    let range = fetch.range;
    if image.cache().presence().count(range) == range.len() {
        return true; // meanwhile
    }
    let is_cached = owner.cache().presence().count(range) == range.len();
    if !is_cached || image.cache().copy_from(owner.cache(), range).is_err() {
        return false;
    }
    image.cache().presence().set(range);
    count(image, owner, fetch, Origin::Cache);
    true
}

/// Have in the cache what was read.
fn store(
    image: &HostImage,
    owner: &HostImage,
    fetch: Fetch,
    origin: Origin,
    bytes: &[u8],
) -> Result<(), PageLost> {
    let range = fetch.range;
    if image.cache().presence().count(range) == range.len() {
        return Ok(()); // another answer was first
    }
    put(image, owner, range, origin, bytes)?;
    count(image, owner, fetch, origin);
    Ok(())
}

fn put(
    image: &HostImage,
    owner: &HostImage,
    range: PageRange,
    origin: Origin,
    bytes: &[u8],
) -> Result<(), PageLost> {
    if origin == Origin::Peer && !std::ptr::eq(image, owner) {
        owner.keep(range, bytes);
    }
    image.cache().add(range, bytes).map_err(|error| PageLost {
        page: range.start(),
        image: image.id(),
        reason: format!("its cache can't grow: {error}"),
    })
}

fn count(image: &HostImage, owner: &HostImage, fetch: Fetch, origin: Origin) {
    let bytes = fetch.range.byte_len();
    let counter = match origin {
        Origin::Chunk => &image.counters.from_stored_bytes,
        Origin::Peer => &image.counters.from_peer_bytes,
        _ if std::ptr::eq(image, owner) => &image.counters.from_frozen_bytes,
        _ => &image.counters.from_image_bytes,
    };
    counter.add(bytes);
    if origin == Origin::Peer && fetch.reason != Reason::Demand {
        image.counters.from_peer_ahead_bytes.add(bytes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn nothing_is_given_back_behind_a_page_that_failed() {
        let mut progress = Progress { stage: Stage::Copying, ..Progress::default() };
        progress.on_filled(range(0, 600));
        assert_eq!(progress.release_limit(4096), PageIdx(512));
        progress.on_failed();
        progress.on_filled(range(600, 2000));
        assert_eq!(progress.release_limit(4096), PageIdx(512));
    }
}
