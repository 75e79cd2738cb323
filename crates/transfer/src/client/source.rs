//! An image whose pages are on other hosts, as a source of this host's.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::{
    AheadOrder, AheadRead, ImageName, NextAhead, Origin, PageIdx, PageRange, PageSource,
};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::bounds::PATIENCE;
use vmfork_policy::transfer::swarm::{READS_AHEAD, UNIT_PAGES};

use super::group::PageGroup;
use super::holders::Holders;
use super::peer::{Early, Peer};
use super::pipelined::TOGETHER;
use super::read::Read;
use super::swarm::Swarm;
use super::verify::Verifier;
use crate::counters::Counter;
use crate::proto::{READ_PAGES_MAX, Urgency};

/// The origin, without a swarm: no named host has this id ([`Holders`] counts down from the next).
const UNNAMED_ORIGIN: HostId = HostId(u64::MAX);

/// What became of reads of one image, or of several that count together.
#[derive(Debug, Default)]
pub struct SourceCounters {
    pub reads: Counter,
    pub pages: Counter,
    /// How many of the pages came from a host that has the whole image, where one is known that has
    /// not.
    pub origin_pages: Counter,
    /// How many from others that hold it.
    pub holder_pages: Counter,
    /// How many were sent to all that need them.
    pub group_pages: Counter,
    /// How many of those could not be compared with their origin's.
    pub unverified_pages: Counter,
    /// Answers with another page than the origin has: none of it was used.
    pub forged: Counter,
    /// Answers that another host has the pages.
    pub redirected: Counter,
    /// Reads that another host answered than the one asked first or named by it.
    pub resourced: Counter,
    pub failures: Counter,
}

/// Reads pages of one image from the hosts that have it.
#[derive(Debug)]
pub struct PeerSource {
    image: ImageName,
    began: Instant,
    holders: Arc<Holders>,
    swarm: Option<Arc<Swarm>>,
    group: Option<Arc<dyn PageGroup>>,
    /// The host that froze the image, if there is no swarm to say so.
    origin: Option<Arc<Peer>>,
    patience: Duration,
    verifier: Verifier,
    counters: Arc<SourceCounters>,
}

impl PeerSource {
    /// Of image `image`, from the hosts that `holders` has at the time.
    pub fn new(image: ImageName, holders: Arc<Holders>) -> Self {
        Self {
            image,
            began: Instant::now(),
            holders,
            swarm: None,
            group: None,
            origin: None,
            patience: PATIENCE,
            verifier: Verifier::new(image),
            counters: Arc::default(),
        }
    }

    /// The same, but hosts that all failed are asked again for this time.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The same, but the best host of `swarm` is asked first; the others are for what no host there
    /// gives.
    #[must_use]
    pub fn with_swarm(self, swarm: Arc<Swarm>) -> Self {
        Self { swarm: Some(swarm), ..self }
    }

    /// The same without a swarm, but what others give than `origin`, which froze the image, is
    /// compared with what that has.
    #[must_use]
    pub fn with_origin(self, origin: Arc<Peer>) -> Self {
        Self { origin: Some(origin), ..self }
    }

    /// The same, but while the image's group is heard, pages are asked for there first.
    #[must_use]
    pub fn with_group(self, group: Arc<impl PageGroup + 'static>) -> Self {
        Self { group: Some(group), ..self }
    }

    /// The same, but counted there.
    #[must_use]
    pub fn with_counters(self, counters: Arc<SourceCounters>) -> Self {
        Self { counters, ..self }
    }

    pub fn image(&self) -> ImageName {
        self.image
    }

    pub fn holders(&self) -> &Arc<Holders> {
        &self.holders
    }

    pub fn counters(&self) -> &SourceCounters {
        &self.counters
    }

    /// As [`PageSource::read`], and says whether a VM waits.
    ///
    /// # Errors
    /// As there.
    pub fn read_for(&self, urgency: Urgency, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read_until(self.give_up(), urgency, range, bytes, None)
    }

    /// The time, by one clock with the swarm's.
    pub(super) fn now(&self) -> Duration {
        self.swarm.as_ref().map_or_else(|| self.began.elapsed(), |swarm| swarm.now())
    }

    /// Until when a read that begins now asks hosts again.
    pub(super) fn give_up(&self) -> Duration {
        self.now() + self.patience
    }

    /// The same, but hosts that all failed are asked again until `give_up`.
    pub(super) fn read_until(
        &self,
        give_up: Duration,
        urgency: Urgency,
        range: PageRange,
        bytes: &mut [u8],
        mut early: Option<&mut Early<'_>>,
    ) -> io::Result<()> {
        if bytes.len() as u64 != range.byte_len() {
            let text = format!("{} bytes for pages {range}", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if !self.is_group_heard() {
            self.refresh_soon();
        }
        let (mut rest, mut bytes) = (range, bytes);
        while !rest.is_empty() {
            let piece = rest.truncate(READ_PAGES_MAX);
            let len = usize::try_from(piece.byte_len()).unwrap_or(usize::MAX).min(bytes.len());
            let (front, back) = bytes.split_at_mut(len);
            let mut read = Read::begin(self, urgency, piece, give_up);
            read.run(front, early.as_deref_mut()).map_err(io::Error::other)?;
            (rest, bytes) = (rest.from_page(piece.end()), back);
        }
        self.count(range);
        Ok(())
    }

    /// A read ended well.
    pub(super) fn count(&self, range: PageRange) {
        self.counters.reads.add(1);
        self.counters.pages.add(range.len());
    }

    /// Ask others what they hold, if it is time.
    pub(super) fn refresh_soon(&self) {
        self.swarm.as_ref().inspect(|swarm| swarm.refresh_soon());
    }

    pub(super) fn swarm(&self) -> Option<&Arc<Swarm>> {
        self.swarm.as_ref()
    }

    pub(super) fn verifier(&self) -> &Verifier {
        &self.verifier
    }

    pub(super) fn is_group_heard(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.is_heard())
    }

    pub(super) fn group(&self) -> Option<&Arc<dyn PageGroup>> {
        self.group.as_ref()
    }

    /// Without a swarm: the id of the host that froze the image.
    pub(super) fn origin_id(&self) -> Option<HostId> {
        let origin = self.origin.as_ref()?;
        Some(self.holders.id_of(origin).unwrap_or(UNNAMED_ORIGIN))
    }

    /// A member of the swarm, or a named host.
    pub(super) fn peer(&self, host: HostId) -> Option<Arc<Peer>> {
        if host == UNNAMED_ORIGIN {
            return self.origin.clone();
        }
        let member = self.swarm.as_ref().and_then(|swarm| swarm.peer(host));
        member.or_else(|| self.holders.peer(host))
    }
}

impl PageSource for PeerSource {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        UNIT_PAGES
    }

    fn reads_ahead(&self) -> usize {
        READS_AHEAD
    }

    /// From the best host that gives them. Ends within the patience and one round through all
    /// hosts.
    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read_for(Urgency::Demand, range, bytes)
    }

    fn read_first(
        &self,
        range: PageRange,
        page: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut early = Early { page, came };
        self.read_until(self.give_up(), Urgency::Demand, range, bytes, Some(&mut early))
    }

    fn read_ahead(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read_for(Urgency::Ahead, range, bytes)
    }

    fn together(&self) -> usize {
        // In a group each is heard for by itself.
        if self.is_group_heard() { 1 } else { TOGETHER }
    }

    fn read_ahead_all(
        &self,
        reads: &mut [AheadRead<'_>],
        done: &mut dyn FnMut(usize, io::Result<&[u8]>),
    ) {
        self.read_pipelined(reads, done);
    }

    fn order(&self) -> Option<&dyn AheadOrder> {
        self.swarm.as_ref().map(|_| self as &dyn AheadOrder)
    }
}

/// Of the swarm; without one, there is no other order than the pages'.
impl AheadOrder for PeerSource {
    fn place(&self, piece: PageRange) -> u64 {
        self.swarm.as_ref().map_or(piece.start().0, |swarm| swarm.place(piece))
    }

    fn place_near(&self, at: u64, piece: PageRange) -> u64 {
        self.swarm.as_ref().map_or(at, |swarm| swarm.place_near(at, piece))
    }

    fn next(&self, pieces: &[PageRange]) -> NextAhead {
        let Some(swarm) = &self.swarm else { return NextAhead::Piece(0) };
        if self.is_group_heard() {
            // Whichever reader requests it, all get it.
            return NextAhead::Piece(0);
        }
        // While all that is missing is demanded, nothing else asks.
        swarm.refresh_soon();
        swarm.next_ahead(pieces)
    }
}
