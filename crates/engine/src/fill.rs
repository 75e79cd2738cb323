//! Pages come into a cache: for a fault, for the drain, or ahead of any fault.
//!
//! ```text
//!   in the cache already? ──► done        in the owner's cache? ──► copied from there
//!   else read from the owner: its originals or its source ──► the cache ──► its presence
//! ```
//!
//! Promises: presence is set after the bytes are there; pages that are present keep their bytes.
//!
//! Left to others: which pages to bring and when ([`vmfork_policy`]), and which views wait for
//! them.

use std::sync::Arc;
use std::time::Duration;

use vmfork_image::{Origin, PageIdx, PageRange, Source};
use vmfork_policy::{Fetch, Reason};

use crate::host_image::{Brought, HostImage, PageLost};

/// How long a background fill waits for another engine that brings the same pages.
const OTHERS_WAIT: Duration = Duration::from_secs(2);

/// The same for a read that something waits for: of a large piece it needs little.
const DEMAND_OTHERS_WAIT: Duration = Duration::from_millis(100);

/// Fewer come as quickly together as one does alone.
const SPLIT_PAGES_MIN: u64 = 4;

/// Bring pages of `owner` into the cache of `image` (the same, or one that descends from it). Pages
/// of another host stay in both caches: another descendant, with a cache of its own, need not ask
/// for them again. `early` is called when the page of a demand fetch is there before the others.
///
/// # Errors
/// The pages could not be had, or the host is out of memory.
pub(crate) fn fill(
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
    let brought = match (fetch.reason, first) {
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
    store(image, owner, fetch, brought, buffer)
}

impl HostImage {
    /// Have own pages in the cache, for who reads them from there: of an image that is read from
    /// afar, and that no engine serves. Waits for the source. Of those who want the same pages at
    /// the same time, one asks the source. `is_ahead`: nothing waits for them. `came` is told of
    /// pages that have come, also if others do not.
    ///
    /// # Errors
    /// [`PageLost`]; also if the cache can't grow.
    pub fn bring(
        &self,
        range: PageRange,
        is_ahead: bool,
        came: &mut dyn FnMut(u64),
    ) -> Result<(), PageLost> {
        let mut buffer = Vec::new();
        let wait = if is_ahead { OTHERS_WAIT } else { DEMAND_OTHERS_WAIT };
        let reason = if is_ahead { Reason::Background("disk") } else { Reason::Demand };
        for run in self.cache().presence().absent(range) {
            let _bringing = self.incoming.begin(run, wait);
            for run in self.cache().presence().absent(run) {
                buffer.resize(usize::try_from(run.byte_len()).unwrap_or(0), 0);
                let brought = match is_ahead {
                    true => self.read_owned_ahead(run, &mut buffer)?,
                    false => self.read_owned(run, &mut buffer)?,
                };
                put(self, self, run, brought.origin, &buffer)?;
                let source = Source::Image(self.id());
                let fetch = Fetch { range: run, source, reason, first: None, again: false };
                count(self, self, fetch, brought);
                came(brought.pages);
            }
        }
        Ok(())
    }
}

/// The same for several background fetches of one owner. `done` is called once for each, with its
/// place.
pub(crate) fn fill_together(
    owner: &HostImage,
    wanted: &[(Arc<HostImage>, Fetch)],
    buffer: &mut Vec<u8>,
    done: &mut dyn FnMut(usize, Result<(), PageLost>),
) {
    let source = owner.source().map(|source| source.origin());
    // What is here in part is put together from both places, by itself; so is what another engine
    // brings.
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
    let mut each = |at: usize, came: Result<&[u8], PageLost>| {
        let Some(&(place, image, fetch)) = places.get(at) else { return };
        let Some(origin) = source else { return };
        let brought = Brought { origin, pages: fetch.range.len() };
        let outcome = match came.and_then(|bytes| store(image, owner, fetch, brought, bytes)) {
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
    count(image, owner, fetch, Brought { origin: Origin::Cache, pages: 0 });
    true
}

/// Have in the cache what was read.
fn store(
    image: &HostImage,
    owner: &HostImage,
    fetch: Fetch,
    brought: Brought,
    bytes: &[u8],
) -> Result<(), PageLost> {
    let range = fetch.range;
    if image.cache().presence().count(range) == range.len() {
        return Ok(()); // another answer was first
    }
    put(image, owner, range, brought.origin, bytes)?;
    count(image, owner, fetch, brought);
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

/// Each page is counted where it was: part of a range may have been in the owner's cache.
fn count(image: &HostImage, owner: &HostImage, fetch: Fetch, brought: Brought) {
    let bytes = PageRange::first(brought.pages).byte_len();
    let of_relative = &image.counters.from_image_bytes;
    let counter = match brought.origin {
        Origin::Chunk => &image.counters.from_stored_bytes,
        Origin::Peer => &image.counters.from_peer_bytes,
        _ if std::ptr::eq(image, owner) => &image.counters.from_frozen_bytes,
        _ => of_relative,
    };
    counter.add(bytes);
    if brought.origin == Origin::Peer && fetch.reason != Reason::Demand {
        image.counters.from_peer_ahead_bytes.add(bytes);
    }
    if !std::ptr::eq(image, owner) {
        of_relative.add(fetch.range.byte_len() - bytes);
    }
}
