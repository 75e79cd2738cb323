//! What to fetch when nobody waits.

use std::time::Duration;

use vmfork_image::PageRange;

use super::holders::mixed;
use super::{Choice, Flags, Holders, Pieces};
use crate::Presence;
use crate::transfer::HostId;

/// Sizes of [`Ahead`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadConfig {
    /// From how many of the most urgent pieces one is picked at random, at least 1 (vmTorrent's k).
    pub urgent: usize,
    /// If peers have had nothing of use for so long, other hosts' shares are taken from the origin, too: those hosts may not want
    /// them, or be gone.
    pub patience: Duration,
}

impl Default for AheadConfig {
    /// vmTorrent's k = 300.
    fn default() -> Self {
        Self { urgent: 300, patience: Duration::from_millis(200) }
    }
}

/// Picks what nobody waits for, and whom to ask for it.
///
/// ```text
///   of this host's share, the most urgent that no peer has ──► the origin
///       none, or it has enough to do ──► of the 300 most urgent pieces, one at random that a peer has ──► a peer
///           none, for a while ──► of the 300, one at random ──► the origin
/// ```
///
/// The share goes first: what has not left the origin nobody can trade, and its link is what all wait for in the end.
#[derive(Debug)]
pub struct Ahead {
    config: AheadConfig,
    pieces: Pieces,
    /// Most urgent first, each once.
    order: Vec<u64>,
    /// How many of `order` are or were in `window`.
    at: usize,
    /// The most urgent that were absent when last looked at; in no order.
    window: Vec<u64>,
    /// The own share of `order`, from `mine_at` on.
    mine: Vec<u64>,
    mine_at: usize,
    /// Since when there has been nothing to do.
    alone_since: Option<Duration>,
}

impl Ahead {
    /// `urgent_first`: what is wanted, in order of urgency, such as a [`Profile::working_set`](crate::Profile::working_set), then the
    /// rest. `pages` and `piece_pages` as in [`Holders`].
    pub fn new(
        pages: u64,
        piece_pages: u64,
        urgent_first: &[PageRange],
        config: AheadConfig,
    ) -> Self {
        let pieces = Pieces::new(pages, piece_pages);
        let mut seen = Flags::new(pieces.count());
        let all = urgent_first.iter().flat_map(|run| pieces.touching(*run));
        let order: Vec<_> = all.filter(|piece| !seen.set(*piece, true)).collect();
        let config = AheadConfig { urgent: config.urgent.max(1), ..config };
        let mine = order.clone();
        Self {
            config,
            pieces,
            order,
            at: 0,
            window: Vec::new(),
            mine,
            mine_at: 0,
            alone_since: None,
        }
    }

    /// This host is number `index` of `of` that want the image: its share is what a hash of the piece gives it. All must use the
    /// same order of hosts; if for a moment they don't, a piece leaves the origin twice. Without a share, everything is one's own.
    pub fn set_share(&mut self, index: u64, of: u64) {
        let its = |piece: &&u64| mixed(**piece) % of.max(1) == index;
        self.mine = self.order.iter().filter(its).copied().collect();
        self.mine_at = 0;
    }

    /// What to fetch next, from whom; it is under way from now on, as after [`Holders::choose`]. `None`: nothing before the next
    /// event, or before [`AheadConfig::patience`] has passed.
    ///
    /// `presence`: what is here, or never has to travel. `random`: a number below the one it is given.
    pub fn next(
        &mut self,
        holders: &mut Holders,
        presence: &impl Presence,
        random: &mut impl FnMut(u64) -> u64,
        now: Duration,
    ) -> Option<(HostId, PageRange)> {
        let found = self.ask_for_own_share(holders, presence, now);
        let found = found.or_else(|| self.ask_a_peer(holders, presence, random, now));
        if found.is_some() {
            self.alone_since = None;
            return found;
        }
        let alone_since = *self.alone_since.get_or_insert(now);
        if now.saturating_sub(alone_since) < self.config.patience {
            return None;
        }
        let start = random(self.window.len().max(1) as u64);
        let start = usize::try_from(start).unwrap_or(0);
        for at in 0..self.window.len() {
            let piece = self.window[(start + at) % self.window.len()];
            let Some(absent) = presence.next_absent(self.pieces.pages(piece)) else { continue };
            match ask(holders, absent, true, now) {
                Asked::Host(host, pages) => return Some((host, pages)),
                Asked::Full => return None,
                Asked::No => {}
            }
        }
        None
    }

    /// When to call [`Ahead::next`] again though nothing has happened: once patience has ended. A time that is past means nothing.
    pub fn wake_at(&self) -> Option<Duration> {
        let since = self.alone_since.filter(|_| !self.is_done())?;
        Some(since.saturating_add(self.config.patience))
    }

    /// Whether all was present when last looked at.
    pub fn is_done(&self) -> bool {
        self.at == self.order.len() && self.window.is_empty()
    }

    /// From a random place on, the first that a peer has. The window is in no order, so that one is as good as another.
    fn ask_a_peer(
        &mut self,
        holders: &mut Holders,
        presence: &impl Presence,
        random: &mut impl FnMut(u64) -> u64,
        now: Duration,
    ) -> Option<(HostId, PageRange)> {
        self.fill_window(presence);
        let start = usize::try_from(random(self.window.len().max(1) as u64)).unwrap_or(0);
        let (mut at, mut left) = (start, self.window.len());
        while left > 0 && !self.window.is_empty() {
            at %= self.window.len();
            let Some(absent) = presence.next_absent(self.pieces.pages(self.window[at])) else {
                self.window.swap_remove(at);
                self.fill_window(presence);
                left = left.min(self.window.len());
                continue;
            };
            if holders.at_peers(self.window[at])
                && let Asked::Host(host, pages) = ask(holders, absent, false, now)
            {
                return Some((host, pages));
            }
            at += 1;
            left -= 1;
        }
        None
    }

    fn ask_for_own_share(
        &mut self,
        holders: &mut Holders,
        presence: &impl Presence,
        now: Duration,
    ) -> Option<(HostId, PageRange)> {
        while let Some(piece) = self.mine.get(self.mine_at)
            && presence.next_absent(self.pieces.pages(*piece)).is_none()
        {
            self.mine_at += 1;
        }
        // What is on its way stays: it may yet fail.
        for piece in self.mine[self.mine_at..].iter().take(self.config.urgent) {
            let Some(absent) = presence.next_absent(self.pieces.pages(*piece)) else { continue };
            if holders.at_peers(*piece) {
                continue;
            }
            match ask(holders, absent, true, now) {
                Asked::Host(host, pages) => return Some((host, pages)),
                Asked::Full => return None,
                Asked::No => {}
            }
        }
        None
    }

    fn fill_window(&mut self, presence: &impl Presence) {
        while self.window.len() < self.config.urgent && self.at < self.order.len() {
            let piece = self.order[self.at];
            self.at += 1;
            if presence.next_absent(self.pieces.pages(piece)).is_some() {
                self.window.push(piece);
            }
        }
    }
}

enum Asked {
    Host(HostId, PageRange),
    /// Nobody of this kind has room: no use in trying another piece.
    Full,
    No,
}

fn ask(holders: &mut Holders, pages: PageRange, origin: bool, now: Duration) -> Asked {
    match holders.choose_ahead(pages, origin, now) {
        Choice::Ask(host) => Asked::Host(host, pages),
        Choice::Later(_) if origin => Asked::Full,
        Choice::Later(_) | Choice::UnderWay | Choice::Nobody => Asked::No,
    }
}
