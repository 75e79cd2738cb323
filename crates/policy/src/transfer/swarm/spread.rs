//! Which hosts get a piece from here, and which from those that got it.

use std::collections::{BTreeMap, VecDeque};

use vmfork_image::PageRange;

use super::Pieces;
use crate::transfer::HostId;

/// Sizes of [`Spread`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpreadConfig {
    /// As everywhere in the swarm. A power of two, 1 to 512.
    pub piece_pages: u64,
    /// The number of hosts to which a host passes on what it got where VMs wait for it, at least 1.
    /// The higher, the fewer steps, each of which is a wait …
    pub fanout: u32,
    /// … and for background reads: the fewer, the less depends on a host that got all of it before
    /// the others asked.
    pub fanout_ahead: u32,
    /// Most hosts that are kept for a piece.
    pub hosts_max: usize,
}

impl Default for SpreadConfig {
    fn default() -> Self {
        Self { piece_pages: 16, fanout: 8, fanout_ahead: 2, hosts_max: 32 }
    }
}

/// What to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serve {
    /// With the pages.
    Here,
    /// That this host has them, or is about to: see
    /// [`Holders::redirected`](super::Holders::redirected).
    At(HostId),
}

/// Decides for an origin which requests it serves itself.
///
/// Clones in lockstep request the same piece at nearly the same time, before any of them can have
/// announced it. Served one by one, that is unicast. So the first gets it from here, the next few
/// are sent to the first, and the next ones to those. This is a tree for each piece, by the order
/// of the requests; with a fan-out of two:
///
/// ```text
///   origin ──► 1st ──► 2nd ──► 4th
///                 │       └──► 5th
///                 └──► 3rd ──► 6th …
/// ```
///
/// A host that was sent elsewhere and failed reports that when it asks again (`insist`), and is
/// served here. This is not vmTorrent's, where the seed is one peer among others.
#[derive(Debug)]
pub struct Spread {
    config: SpreadConfig,
    pieces: Pieces,
    /// For each piece, the hosts that requested a part of it, the first first.
    entries: BTreeMap<u64, VecDeque<Entry>>,
    /// Of how many entries each host is.
    hosts: BTreeMap<HostId, usize>,
}

/// A host asked for pages of a piece.
#[derive(Debug)]
struct Entry {
    host: HostId,
    pages: PageRange,
    /// To how many it has been asked to pass them on.
    told: u32,
    /// They come as fast as for a VM that waits: one does there, or they have been sent.
    is_quick: bool,
}

impl Spread {
    /// For an image of `pages` pages.
    pub fn new(pages: u64, config: SpreadConfig) -> Self {
        let pieces = Pieces::new(pages, config.piece_pages);
        Self { config, pieces, entries: BTreeMap::new(), hosts: BTreeMap::new() }
    }

    /// A host asks for pages; `demand`: a VM of it waits for them. Requests for more than one piece
    /// are served here.
    ///
    /// Only a host that requested all of these pages is named. For a VM that waits, only one is
    /// named where a VM waited or that has been sent them.
    pub fn ask(&mut self, from: HostId, pages: PageRange, insist: bool, demand: bool) -> Serve {
        let SpreadConfig { fanout, fanout_ahead, hosts_max, .. } = self.config;
        let pieces = self.pieces.touching(pages);
        if pieces.end - pieces.start != 1 {
            return Serve::Here;
        }
        let entries = self.entries.entry(pieces.start).or_default();
        let mut all = entries.iter_mut().filter(|entry| entry.pages.covers(&pages));
        if let Some(again) = all.find(|entry| entry.host == from) {
            again.is_quick |= demand;
            return Serve::Here;
        }
        let most = if demand { fanout } else { fanout_ahead };
        let may_pass_on = |entry: &&mut Entry| {
            entry.pages.covers(&pages) && entry.told < most && (entry.is_quick || !demand)
        };
        let named = entries.iter_mut().find(may_pass_on).filter(|_| !insist);
        let at = named.map_or(Serve::Here, |entry| {
            entry.told += 1;
            Serve::At(entry.host)
        });
        if entries.len() >= hosts_max {
            // One that is not named any more makes room; if it asks again, it may be sent to
            // another.
            let Some(full) = entries.iter().position(|entry| entry.told >= fanout_ahead) else {
                return at;
            };
            if let Some(gone) = entries.remove(full) {
                Self::forget(&mut self.hosts, gone.host);
            }
        }
        entries.push_back(Entry { host: from, pages, told: 0, is_quick: demand });
        *self.hosts.entry(from).or_default() += 1;
        at
    }

    /// A host was sent what it had asked for.
    pub fn served(&mut self, to: HostId, pages: PageRange) {
        for piece in self.pieces.touching(pages) {
            let entries = self.entries.get_mut(&piece).into_iter().flatten();
            let its = entries.filter(|entry| entry.host == to && pages.covers(&entry.pages));
            its.for_each(|entry| entry.is_quick = true);
        }
    }

    /// A host has left: no host is sent there any more.
    pub fn left(&mut self, host: HostId) {
        if self.hosts.remove(&host).is_none() {
            return;
        }
        self.entries.retain(|_, entries| {
            entries.retain(|entry| entry.host != host);
            !entries.is_empty()
        });
    }

    /// The hosts that may be named.
    pub fn hosts(&self) -> impl Iterator<Item = HostId> {
        self.hosts.keys().copied()
    }

    fn forget(hosts: &mut BTreeMap<HostId, usize>, host: HostId) {
        if let Some(entries) = hosts.get_mut(&host) {
            *entries -= 1;
            if *entries == 0 {
                hosts.remove(&host);
            }
        }
    }
}
