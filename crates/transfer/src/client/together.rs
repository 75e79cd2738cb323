//! Pages that nobody waits for, asked for many at a time: each request alone would cost both hosts more than its pages.
//!
//! ```text
//!   reads ──choose──► by host and route ──read_together──► came ──verified──► done
//!                          ▲                │ elsewhere
//!                          └────(once)──────┤
//!                                           └ failed, or nobody to ask ──► one after the other, by read_until
//! ```

use std::io;
use std::sync::Arc;

use vmfork_image::{AheadRead, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::swarm::READS_AHEAD;

use super::peer::{Peer, PeerError};
use super::source::PeerSource;
use super::swarm::{Asked, Chosen};
use crate::proto::{READ_PAGES_MAX, Route, Urgency};

/// So many reads go out at once: half of those that are under way at a time, so that the others come meanwhile.
pub(super) const TOGETHER: usize = READS_AHEAD / 2;

/// Reads, by their places, of which one host is asked in one way.
#[derive(Debug)]
struct Group {
    peer: Arc<Peer>,
    /// As the swarm knows it; without a swarm nobody is known.
    host: Option<(HostId, bool)>,
    route: Route,
    places: Vec<usize>,
}

/// Groups, and who is in none.
#[derive(Debug, Default)]
struct Sorted {
    groups: Vec<Group>,
    left: Vec<usize>,
    /// Those that somebody was asked for in vain.
    failed: Vec<usize>,
}

impl Sorted {
    fn put(&mut self, place: usize, asked: Option<Asked>) {
        let Some(Asked { host, peer, origin, route }) = asked else {
            return self.left.push(place);
        };
        let is_it = |group: &&mut Group| {
            group.host.is_some_and(|(known, _)| known == host) && group.route == route
        };
        match self.groups.iter_mut().find(is_it) {
            Some(group) => group.places.push(place),
            None => {
                let (host, places) = (Some((host, origin)), vec![place]);
                self.groups.push(Group { peer, host, route, places });
            }
        }
    }
}

impl PeerSource {
    /// As [`vmfork_image::PageSource::read_ahead_all`].
    pub(super) fn read_together(
        &self,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        let is_read = |read: &AheadRead<'_>| {
            read.range.len() <= READ_PAGES_MAX && read.bytes.len() as u64 == read.range.byte_len()
        };
        // Who is last has no more time than one that is asked for alone.
        let give_up = self.give_up();
        let mut rest = Sorted::default();
        if reads.len() > 1 && !self.is_group_heard() && reads.iter().all(is_read) {
            let mut sorted = self.sort(reads);
            let groups = std::mem::take(&mut sorted.groups);
            groups.into_iter().for_each(|group| self.ask(group, true, reads, &mut sorted, done));
            // Who is named may name nobody.
            let named = std::mem::take(&mut sorted.groups);
            named.into_iter().for_each(|group| self.ask(group, false, reads, &mut sorted, done));
            rest = sorted;
        } else {
            rest.left.extend(0..reads.len());
        }
        let failed = rest.failed.iter().map(|place| (*place, true));
        for (place, has_failed) in rest.left.iter().map(|place| (*place, false)).chain(failed) {
            let Some(AheadRead { range, bytes }) = reads.get_mut(place) else { continue };
            let outcome = self.read_until(give_up, Urgency::Ahead, *range, bytes, None);
            self.counters().resourced.add(u64::from(has_failed && outcome.is_ok()));
            done(place, outcome.map(|()| &**bytes));
        }
    }

    /// Whom to ask for what.
    fn sort(&self, reads: &[AheadRead<'_>]) -> Sorted {
        let mut sorted = Sorted::default();
        let places = 0..reads.len();
        let Some(swarm) = self.swarm() else {
            let (peers, _) = self.holders().in_order();
            match peers.into_iter().next() {
                Some(peer) => {
                    let (route, places) = (Route::Insist, places.collect());
                    sorted.groups.push(Group { peer, host: None, route, places });
                }
                None => sorted.left.extend(places),
            }
            return sorted;
        };
        swarm.refresh_soon();
        for (place, read) in places.zip(reads) {
            let asked = match swarm.choose(Urgency::Ahead, read.range) {
                Chosen::Ask(asked) => Some(asked),
                Chosen::Later(_) | Chosen::Nobody => None,
            };
            sorted.put(place, asked);
        }
        sorted
    }

    /// Ask one host. `sorted` takes what it does not give; by who else is to be asked, if it `may_name` others.
    fn ask(
        &self,
        group: Group,
        may_name: bool,
        reads: &mut [AheadRead<'_>],
        sorted: &mut Sorted,
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        let Group { peer, host, route, mut places } = group;
        places.sort_unstable();
        let (mut ranges, mut asked) = (Vec::new(), Vec::new());
        for (place, read) in reads.iter_mut().enumerate() {
            if places.binary_search(&place).is_ok() {
                ranges.push(read.range);
                asked.push(read);
            }
        }
        let mut unanswered: Vec<(usize, PageRange)> = places.into_iter().zip(ranges).collect();
        unanswered.reverse();
        let each = |_, answer: Result<&[u8], PeerError>| {
            // They are answered one after the other.
            let Some((place, range)) = unanswered.pop() else { return };
            let taken =
                answer.and_then(|bytes| self.took(&peer, host, range, bytes).map(|()| bytes));
            let error = match taken {
                Ok(bytes) => {
                    self.count(range);
                    self.tell_group(range);
                    return done(place, Ok(bytes));
                }
                Err(error) => error,
            };
            let at = error.elsewhere().filter(|_| may_name && route == Route::Direct);
            match (at, host, self.swarm()) {
                (Some(at), Some(host), Some(swarm)) => {
                    sorted.put(place, self.redirected(swarm, host, range, at));
                }
                _ => {
                    self.failed(&peer, host, range, &error);
                    sorted.failed.push(place);
                }
            }
        };
        let Err(error) = peer.read_together(route, self.image(), &mut asked, each) else { return };
        if let (Some((host, _)), Some(swarm)) = (host, self.swarm()) {
            let ranges: Vec<_> = unanswered.iter().map(|(_, range)| *range).collect();
            swarm.failed_all(host, &ranges, &error);
        }
        for (place, range) in unanswered {
            self.note_failure(&peer, range, &error);
            sorted.failed.push(place);
        }
    }

    fn failed(
        &self,
        peer: &Arc<Peer>,
        host: Option<(HostId, bool)>,
        range: PageRange,
        error: &PeerError,
    ) {
        if let (Some((host, _)), Some(swarm)) = (host, self.swarm()) {
            swarm.failed(host, range, error);
        }
        self.note_failure(peer, range, error);
    }

    /// A host gave pages: are they those of the origin?
    fn took(
        &self,
        peer: &Arc<Peer>,
        host: Option<(HostId, bool)>,
        range: PageRange,
        bytes: &[u8],
    ) -> Result<(), PeerError> {
        let origin = match (host, self.swarm()) {
            (Some((host, origin)), Some(swarm)) => {
                swarm.answered(host, range);
                origin
            }
            _ => self.is_origin(peer),
        };
        self.compared(Urgency::Ahead, range, bytes, peer, origin)
    }
}
