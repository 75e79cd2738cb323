//! Which of some pieces to fetch next, where the caller lists what is missing.

use std::time::Duration;

use vmfork_image::PageRange;

use super::Holders;
use super::holders::mixed;
use crate::transfer::bounds::URGENT_AMONG;

/// Times of [`Pick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PickConfig {
    /// When to look again, having found nothing.
    pub pause: Duration,
}

impl Default for PickConfig {
    fn default() -> Self {
        Self { pause: Duration::from_millis(50) }
    }
}

/// What [`Pick::next`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Picked {
    /// The piece at this place.
    Piece(usize),
    /// None yet: poll again after this time, or when something has come.
    Later(Duration),
}

/// Decides for the keeper of a list of what is missing: of the pieces that it could fetch next,
/// which one.
///
/// ```text
///   one of this host's share that no peer has ──► it: the origin has room
///       none ──► one that a peer has; of these one that the fewest have
///           none ──► the first: if the origin has sent it to somebody, it says to whom (Spread)
/// ```
///
/// No host waits for others to get their shares: how long they take is not known.
///
/// Pieces come in an order that differs on each host: [`Pick::place`], or [`Pick::place_near`]
/// where some are more urgent than others. No host is asked which is next.
#[derive(Debug)]
pub struct Pick {
    config: PickConfig,
    /// This host's number, and of how many.
    share: (u64, u64),
}

impl Pick {
    pub fn new(config: PickConfig) -> Self {
        Self { config, share: (0, 1) }
    }

    /// This host is number `index` of `of` that want the image: its share is what a hash of the
    /// piece gives it. All should use the same order of hosts; if for a moment they don't, two ask
    /// the origin for a piece.
    pub fn set_share(&mut self, index: u64, of: u64) {
        self.share = (index, of.max(1));
    }

    /// Where a piece is in the order of a host; `salt` is another on each.
    pub fn place(piece: PageRange, salt: u64) -> u64 {
        mixed(piece.start().0 ^ mixed(salt))
    }

    /// The same in a list that is most urgent first, of a piece that is number `at` of it. The
    /// result is its number, or a little later, by a number of the host's own below
    /// [`URGENT_AMONG`]. A host that follows that order (of equals, the more urgent first) brings
    /// the next piece from among the `URGENT_AMONG` most urgent that are left. It brings nothing
    /// much later than it was wanted.
    pub fn place_near(at: u64, piece: PageRange, salt: u64) -> u64 {
        at.saturating_add(Self::place(piece, salt) % URGENT_AMONG)
    }

    /// Which of `pieces` to fetch now.
    pub fn next(&self, pieces: &[PageRange], holders: &Holders, now: Duration) -> Picked {
        let (index, of) = self.share;
        let copies: Vec<u16> = pieces.iter().map(|piece| holders.copies(*piece)).collect();
        let is_own = |piece: &PageRange| mixed(holders.piece_at(*piece)) % of == index;
        let own = pieces.iter().zip(&copies).position(|(piece, n)| *n == 0 && is_own(piece));
        let origin_is_full = holders.origins_are_full(now);
        if let Some(own) = own.filter(|_| !origin_is_full) {
            return Picked::Piece(own);
        }
        let there = copies.iter().enumerate().filter(|(_, copies)| **copies > 0);
        match there.min_by_key(|(_, copies)| **copies) {
            Some((rarest, _)) => Picked::Piece(rarest),
            None if origin_is_full => Picked::Later(self.config.pause),
            None => Picked::Piece(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmfork_image::PageIdx;

    use super::super::{Choice, HoldersConfig, Serve, Spread, SpreadConfig};
    use super::*;
    use crate::transfer::HostId;

    const ORIGIN: HostId = HostId(100);
    const PIECES: u64 = 64;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn piece(at: u64) -> PageRange {
        PageRange::new(PageIdx(at * 16), 16).expect("small")
    }

    fn holders(peers: u64) -> Holders {
        let mut holders = Holders::new(PIECES * 16, HoldersConfig::default());
        assert!(holders.joined(ORIGIN, true, 2));
        assert!((1..=peers).all(|peer| holders.joined(HostId(peer), false, 1)));
        holders
    }

    #[test]
    fn without_others_it_is_the_order_that_was_given() {
        let (pick, holders) = (Pick::new(PickConfig::default()), holders(0));
        let pieces = [piece(9), piece(3)];
        assert_eq!(pick.next(&pieces, &holders, ms(0)), Picked::Piece(0));
    }

    #[test]
    fn the_own_share_comes_first_then_the_rarest_that_peers_have_then_the_rest() {
        let (mut pick, mut holders) = (Pick::new(PickConfig::default()), holders(2));
        pick.set_share(1, 3);
        let is_own = |piece: &PageRange| mixed(piece.start().0 / 16) % 3 == 1;
        let (own, others): (Vec<_>, Vec<_>) = (0..PIECES).map(piece).partition(is_own);
        holders.announced(HostId(1), others[5]);
        holders.announced(HostId(1), others[7]);
        holders.announced(HostId(2), others[5]);
        let all = [others[5], others[7], others[6], own[0]];
        assert_eq!(pick.next(&all, &holders, ms(0)), Picked::Piece(3));
        assert_eq!(pick.next(&all[..3], &holders, ms(0)), Picked::Piece(1), "the rarer");
        assert_eq!(pick.next(&[others[6], others[8]], &holders, ms(0)), Picked::Piece(0));
    }

    #[test]
    fn an_origin_that_has_enough_to_do_is_given_time() {
        let (pick, mut holders) = (Pick::new(PickConfig::default()), holders(1));
        let max = HoldersConfig::default().origin_ahead_in_flight_max as u64;
        for at in 0..max {
            assert_eq!(holders.choose_unwaited(piece(at), ms(0)), Choice::Ask(ORIGIN));
        }
        assert_eq!(pick.next(&[piece(40)], &holders, ms(0)), Picked::Later(ms(50)));
        holders.announced(HostId(1), piece(41));
        assert_eq!(pick.next(&[piece(40), piece(41)], &holders, ms(0)), Picked::Piece(1));
        assert_eq!(holders.choose_unwaited(piece(41), ms(0)), Choice::Ask(HostId(1)));
        holders.answered(ORIGIN, piece(0), ms(1));
        assert_eq!(pick.next(&[piece(40)], &holders, ms(1)), Picked::Piece(0));
    }

    /// A list of this many pieces, most urgent first, in the order of a host.
    fn in_order_of(salt: u64, count: u64) -> Vec<u64> {
        let mut order: Vec<u64> = (0..count).collect();
        order.sort_by_key(|at| Pick::place_near(*at, piece(*at * 7), salt));
        order
    }

    #[test]
    fn two_hosts_bring_the_most_urgent_in_different_orders_and_each_always_in_its_own() {
        assert_eq!(in_order_of(1, 1000), in_order_of(1, 1000));
        for salt in 2..50 {
            let (one, other) = (in_order_of(1, 1000), in_order_of(salt, 1000));
            let alike = one.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(alike < 50, "{alike} of 1000 at the same place with salt {salt}");
        }
    }

    proptest! {
        #[test]
        fn each_piece_comes_once_from_among_the_most_urgent_that_are_left(
            salt in any::<u64>(),
            count in 0..700u64,
        ) {
            let mut left: Vec<u64> = (0..count).collect();
            for (step, next) in (0..).zip(in_order_of(salt, count)) {
                let at = left.iter().position(|piece| *piece == next);
                prop_assert!(at.is_some(), "{} comes twice", next);
                let at = at.expect("just seen");
                prop_assert!((at as u64) < URGENT_AMONG, "{} were more urgent than {}", at, next);
                prop_assert!(step < next + URGENT_AMONG, "{} comes after {} others", next, step);
                left.remove(at);
            }
            prop_assert!(left.is_empty());
        }

        /// Hosts that all lack everything, in rounds: each fetches one piece, and they hear what
        /// the others have after some of them.
        #[test]
        fn what_all_want_leaves_the_origin_about_once(
            hosts in 1..9u64,
            heard_every in 1..6u64,
            salt in any::<u64>(),
        ) {
            let mut all: Vec<_> = (0..hosts).map(|host| {
                let mut holders = holders(0);
                for other in (0..hosts).filter(|other| *other != host) {
                    holders.joined(HostId(other), false, 1);
                }
                let mut pick = Pick::new(PickConfig::default());
                pick.set_share(host, hosts);
                let mut left: Vec<_> = (0..PIECES).map(piece).collect();
                left.sort_by_key(|piece| Pick::place(*piece, salt ^ host));
                (holders, pick, left, Vec::new())
            }).collect();
            let (mut from_origin, mut round) = (0, 0);
            let mut spread = Spread::new(PIECES * 16, SpreadConfig::default());
            while all.iter().any(|(.., left, _)| !left.is_empty()) {
                round += 1;
                prop_assert!(round < 10_000, "somebody waits for ever");
                let now = ms(round * 10);
                for (own, (holders, pick, left, has)) in (0..).zip(&mut all) {
                    if left.is_empty() {
                        continue;
                    }
                    let Picked::Piece(at) = pick.next(left, holders, now) else { continue };
                    let piece = left.remove(at);
                    let Choice::Ask(mut host) = holders.choose_unwaited(piece, now) else {
                        return Err(TestCaseError::fail("no host to ask"));
                    };
                    if host == ORIGIN && let Serve::At(to) = spread.ask(HostId(own), piece, false, false) {
                        prop_assert_eq!(holders.redirected(ORIGIN, piece, to, now), Some((to, false)));
                        host = to;
                    }
                    from_origin += u64::from(host == ORIGIN);
                    holders.answered(host, piece, now + ms(1));
                    has.push(piece);
                }
                if round % heard_every == 0 {
                    let told: Vec<Vec<_>> = all.iter().map(|(.., has)| has.clone()).collect();
                    for (host, (holders, ..)) in all.iter_mut().enumerate() {
                        for (other, runs) in told.iter().enumerate().filter(|(other, _)| *other != host) {
                            runs.iter().for_each(|run| holders.announced(HostId(other as u64), *run));
                        }
                    }
                }
            }
            prop_assert_eq!(from_origin, PIECES);
        }
    }
}
