//! Who gets a piece from here, and who from those that got it.

use std::collections::{BTreeMap, VecDeque};

use vmfork_image::PageRange;

use super::Pieces;
use crate::transfer::HostId;

/// Sizes of [`Spread`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpreadConfig {
    /// As everywhere in the swarm. A power of two, 1 to 512.
    pub piece_pages: u64,
    /// To how many a host passes on what it got where VMs wait for it, at least 1: the more, the fewer steps, each of which is a wait …
    pub fanout: u32,
    /// … and what nobody waits for: the fewer, the less hangs on a host that got all of it before the others asked.
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
    /// That this host has them, or is about to: see [`Holders::redirected`](super::Holders::redirected).
    At(HostId),
}

/// Decides for an origin which requests it serves itself.
///
/// Clones in lockstep ask for the same piece at nearly the same time, before any of them can have announced it; served one by one, that is unicast.
/// So the first gets it from here, the next few are sent to the first, the next to those: a tree for each piece, by the order in
/// which it was asked for; with a fan-out of two:
///
/// ```text
///   origin ──► 1st ──► 2nd ──► 4th
///                 │       └──► 5th
///                 └──► 3rd ──► 6th …
/// ```
///
/// A host that is sent elsewhere in vain says so when it asks again (`insist`), and is served here. This is not vmTorrent's, where the seed is
/// one peer among others.
#[derive(Debug)]
pub struct Spread {
    config: SpreadConfig,
    pieces: Pieces,
    /// For each piece, who can pass it on, and to how many it has been told to.
    hosts: BTreeMap<u64, VecDeque<(HostId, u32)>>,
}

impl Spread {
    /// For an image of `pages` pages.
    pub fn new(pages: u64, config: SpreadConfig) -> Self {
        Self { config, pieces: Pieces::new(pages, config.piece_pages), hosts: BTreeMap::new() }
    }

    /// A host asks for pages; `demand`: a VM of it waits for them. Requests for more than one piece are served here.
    pub fn ask(&mut self, from: HostId, pages: PageRange, insist: bool, demand: bool) -> Serve {
        let pieces = self.pieces.touching(pages);
        if pieces.end - pieces.start != 1 {
            return Serve::Here;
        }
        let hosts = self.hosts.entry(pieces.start).or_default();
        let known = hosts.iter().any(|(host, _)| *host == from);
        let mut at = Serve::Here;
        if !insist
            && !known
            && let Some((host, told)) = hosts.front_mut()
        {
            at = Serve::At(*host);
            *told += 1;
            let SpreadConfig { fanout, fanout_ahead, .. } = self.config;
            if *told >= if demand { fanout } else { fanout_ahead } {
                hosts.pop_front();
            }
        }
        if !known && hosts.len() < self.config.hosts_max {
            hosts.push_back((from, 0));
        }
        at
    }

    /// A host is gone: nobody is sent there any more.
    pub fn left(&mut self, host: HostId) {
        self.hosts.retain(|_, hosts| {
            hosts.retain(|(known, _)| *known != host);
            !hosts.is_empty()
        });
    }

    /// Whether nobody can be named for any piece.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }
}
