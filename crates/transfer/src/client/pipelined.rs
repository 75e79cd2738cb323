//! Prefetches that go out together: each request alone would cost both hosts more than its pages.
//!
//! ```text
//!   reads ──► by host and route ──read_together──► replies ──► done
//!                  ▲                                  │
//!                  └──────────────(once)──────────────┤ elsewhere, failed
//!                                                     └──► one after the other, by Read::run
//! ```

use std::io;

use vmfork_image::{AheadRead, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::swarm::READS_AHEAD;

use super::peer::PeerError;
use super::read::Read;
use super::source::PeerSource;
use crate::proto::{READ_PAGES_MAX, Route, Urgency};

/// How many reads are sent at once: half of those that are in flight at a time, so that the others
/// come meanwhile.
pub(super) const TOGETHER: usize = READS_AHEAD / 2;

/// How often reads are sorted by the host that is to be asked: at first, and once those that failed
/// know another one.
const ROUNDS: usize = 2;

/// A read of several, with its place among them.
#[derive(Debug)]
struct Placed<'a> {
    place: usize,
    read: Read<'a>,
}

/// Reads for which one host is asked in one way.
#[derive(Debug)]
struct Group<'a> {
    host: HostId,
    route: Route,
    reads: Vec<Placed<'a>>,
}

/// Sorts reads by the host that each is to ask. → the groups, and the reads that ask none now.
fn sorted(reads: Vec<Placed<'_>>) -> (Vec<Group<'_>>, Vec<Placed<'_>>) {
    let (mut groups, mut others): (Vec<Group<'_>>, Vec<Placed<'_>>) = (Vec::new(), Vec::new());
    for placed in reads {
        let Some((host, route)) = placed.read.next_host() else {
            others.push(placed);
            continue;
        };
        let is_its = |group: &&mut Group<'_>| group.host == host && group.route == route;
        match groups.iter_mut().find(is_its) {
            Some(group) => group.reads.push(placed),
            None => groups.push(Group { host, route, reads: vec![placed] }),
        }
    }
    (groups, others)
}

impl PeerSource {
    /// As [`vmfork_image::PageSource::read_ahead_all`].
    pub(super) fn read_pipelined(
        &self,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        let fits = |read: &AheadRead<'_>| {
            let pages = read.range.len();
            (1..=READ_PAGES_MAX).contains(&pages)
                && read.bytes.len() as u64 == read.range.byte_len()
        };
        // The last one has no more time than one that is asked for alone.
        let give_up = self.give_up();
        if reads.len() < 2 || self.is_group_heard() || !reads.iter().all(fits) {
            for (place, AheadRead { range, bytes }) in reads.iter_mut().enumerate() {
                let outcome = self.read_until(give_up, Urgency::Ahead, *range, bytes, None);
                done(place, outcome.map(|()| &**bytes));
            }
            return;
        }
        self.refresh_soon();
        let begin = |(place, read): (usize, &AheadRead<'_>)| {
            let read = Read::begin(self, Urgency::Ahead, read.range, give_up);
            Placed { place, read }
        };
        let mut rest: Vec<_> = reads.iter().enumerate().map(begin).collect();
        for _ in 0..ROUNDS {
            let (groups, others) = sorted(rest);
            rest = others;
            for group in groups {
                rest.append(&mut self.ask_together(group, reads, done));
            }
        }
        rest.sort_by_key(|placed| placed.place);
        for Placed { place, mut read } in rest {
            let Some(AheadRead { range, bytes }) = reads.get_mut(place) else { continue };
            match read.run(bytes, None) {
                Ok(()) => {
                    self.count(*range);
                    done(place, Ok(bytes));
                }
                Err(failed) => done(place, Err(io::Error::other(failed))),
            }
        }
    }

    /// Ask one host. → the reads that are not done then.
    fn ask_together<'a>(
        &'a self,
        group: Group<'a>,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) -> Vec<Placed<'a>> {
        let Group { host, route, reads: mut its } = group;
        // It may have left in this moment: each read finds out alone.
        let Some(peer) = self.peer(host) else { return its };
        its.sort_by_key(|placed| placed.place);
        let is_its = |place: usize| its.binary_search_by_key(&place, |it| it.place).is_ok();
        let asked = reads.iter_mut().enumerate().filter(|(place, _)| is_its(*place));
        let mut asked: Vec<_> = asked.map(|(_, read)| read).collect();
        its.reverse();
        let (mut unanswered, mut others) = (its, Vec::new());
        let each = |_, reply: Result<&[u8], PeerError>| {
            // They are answered one after the other.
            let Some(mut placed) = unanswered.pop() else { return };
            match (placed.read.replied(&peer, reply.as_ref().map(|bytes| *bytes)), reply) {
                (true, Ok(bytes)) => {
                    self.count(placed.read.pages());
                    done(placed.place, Ok(bytes));
                }
                _ => others.push(placed),
            }
        };
        let Err(error) = peer.read_together(route, self.image(), &mut asked, each) else {
            return others;
        };
        if let Some(swarm) = self.swarm() {
            let ranges: Vec<PageRange> = unanswered.iter().map(|it| it.read.pages()).collect();
            swarm.cut_off(host, &ranges, &error);
        }
        for placed in &mut unanswered {
            placed.read.cut_off(&peer, &error);
        }
        others.append(&mut unanswered);
        others
    }
}
