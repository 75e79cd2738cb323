//! An image whose pages are on other hosts, as a source of this host's.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::{
    AheadOrder, AheadRead, ImageName, NextAhead, Origin, PageIdx, PageRange, PageSource,
};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::bounds::{
    DEMAND_WAIT, LATER_MAX, LATER_MIN, PATIENCE, PAUSE_MAX, PAUSE_MIN, REFRESH_WAIT,
};
use vmfork_policy::transfer::swarm::{READS_AHEAD, UNIT_PAGES};

use super::holders::Holders;
use super::peer::{Early, Peer, PeerError};
use super::swarm::{Asked, Chosen, Swarm};
use super::together::TOGETHER;
use super::verify::{Verdict, Verifier};
use crate::counters::Counter;
use crate::multicast::Listener;
use crate::proto::{Elsewhere, READ_PAGES_MAX, Route, Urgency};

/// What became of reads of one image, or of several that count together.
#[derive(Debug, Default)]
pub struct SourceCounters {
    pub reads: Counter,
    pub pages: Counter,
    /// How many of the pages came from a host that has the whole image, where one is known that has not.
    pub origin_pages: Counter,
    /// How many from others that hold it.
    pub holder_pages: Counter,
    /// How many were sent to all who need them.
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
    pub(super) image: ImageName,
    holders: Arc<Holders>,
    swarm: Option<Arc<Swarm>>,
    group: Option<Arc<Listener>>,
    /// Who froze the image, if there is no swarm to say so.
    origin: Option<Arc<Peer>>,
    patience: Duration,
    verifier: Verifier,
    counters: Arc<SourceCounters>,
}

/// A host that did not give what it was asked for, and why.
pub(super) type Vain = (Arc<Peer>, PeerError);

/// Nobody gave the pages.
#[derive(Debug)]
struct NobodyHas {
    image: ImageName,
    range: PageRange,
    /// Each host that was asked in the last round, and what it said.
    answers: Vec<String>,
}

impl fmt::Display for NobodyHas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, range, answers } = self;
        match answers.as_slice() {
            [] => write!(f, "no other host has pages {range} of image {image}"),
            answers => {
                write!(f, "pages {range} of image {image} from no host: {}", answers.join("; "))
            }
        }
    }
}

impl std::error::Error for NobodyHas {}

impl PeerSource {
    /// Of image `image`, from whoever `holders` has at the time.
    pub fn new(image: ImageName, holders: Arc<Holders>) -> Self {
        Self {
            image,
            holders,
            swarm: None,
            group: None,
            origin: None,
            patience: PATIENCE,
            verifier: Verifier::new(image, DEMAND_WAIT),
            counters: Arc::default(),
        }
    }

    /// The same, but hosts that all failed are asked again for so long.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The same, but first whoever of `swarm` is best is asked; the others are for what nobody there gives.
    #[must_use]
    pub fn with_swarm(self, swarm: Arc<Swarm>) -> Self {
        Self { swarm: Some(swarm), ..self }
    }

    /// The same without a swarm, but what others give than `origin`, which froze the image, is compared with what that has.
    #[must_use]
    pub fn with_origin(self, origin: Arc<Peer>) -> Self {
        Self { origin: Some(origin), ..self }
    }

    /// The same, but while the image's group is heard, pages are asked for there first.
    #[must_use]
    pub fn with_group(self, group: Arc<Listener>) -> Self {
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

    /// As [`PageSource::read`], and says whether somebody waits.
    ///
    /// # Errors
    /// As there.
    pub fn read_for(&self, urgency: Urgency, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        self.read_until(self.give_up(), urgency, range, bytes, None)
    }

    /// Until when a read that begins now asks hosts again.
    pub(super) fn give_up(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// The same, but hosts that all failed are asked again until `give_up`.
    pub(super) fn read_until(
        &self,
        give_up: Instant,
        urgency: Urgency,
        range: PageRange,
        bytes: &mut [u8],
        mut early: Option<&mut Early<'_>>,
    ) -> io::Result<()> {
        if bytes.len() as u64 != range.byte_len() {
            let text = format!("{} bytes for pages {range}", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if let Some(swarm) = self.swarm.as_ref().filter(|_| !self.is_group_heard()) {
            swarm.refresh_soon();
        }
        let (mut rest, mut bytes) = (range, bytes);
        while !rest.is_empty() {
            let piece = rest.truncate(READ_PAGES_MAX);
            let len = usize::try_from(piece.byte_len()).unwrap_or(usize::MAX).min(bytes.len());
            let (front, back) = bytes.split_at_mut(len);
            if self.read_in_group(urgency, piece, front) {
                (rest, bytes) = (rest.from_page(piece.end()), back);
                continue;
            }
            if let Err(error) =
                self.read_piece(urgency, piece, front, give_up, early.as_deref_mut())
            {
                self.counters.failures.add(1);
                return Err(io::Error::other(error));
            }
            self.tell_group(piece);
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

    /// Pages came, but not there.
    pub(super) fn tell_group(&self, piece: PageRange) {
        if let Some(group) = &self.group {
            group.filled(piece);
        }
    }

    pub(super) fn swarm(&self) -> Option<&Arc<Swarm>> {
        self.swarm.as_ref()
    }

    pub(super) fn is_group_heard(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.is_heard())
    }

    /// Of what is sent to all. → whether they came.
    fn read_in_group(&self, urgency: Urgency, piece: PageRange, bytes: &mut [u8]) -> bool {
        let came = self.group.as_ref().is_some_and(|group| group.read(urgency, piece, bytes));
        self.counters.group_pages.add(if came { piece.len() } else { 0 });
        came
    }

    /// Go round the hosts until one gives the pages, all say that they never will, or it has taken too long.
    fn read_piece(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        give_up: Instant,
        mut early: Option<&mut Early<'_>>,
    ) -> Result<(), NobodyHas> {
        let mut pause = PAUSE_MIN;
        let mut all_were_asked = false;
        loop {
            let (peers, version) = self.holders.in_order();
            let mut failed: Vec<Vain> = Vec::new();
            if self.read_in_swarm(urgency, piece, bytes, give_up, early.as_deref_mut(), &mut failed)
                || self.read_in_order(
                    &peers,
                    urgency,
                    piece,
                    bytes,
                    early.as_deref_mut(),
                    &mut failed,
                )
                || all_were_asked
                    && self.read_from_any(
                        urgency,
                        piece,
                        bytes,
                        give_up,
                        early.as_deref_mut(),
                        &mut failed,
                    )
            {
                self.counters.resourced.add(u64::from(!failed.is_empty()));
                return Ok(());
            }
            if let Some(swarm) = self.swarm.as_ref().filter(|_| !all_were_asked) {
                // Somebody may have it of whom that is not known yet.
                let left = give_up.saturating_duration_since(Instant::now());
                swarm.refresh_within(left.min(REFRESH_WAIT));
                all_were_asked = true;
                continue;
            }
            let may_pass = failed.iter().any(|(_, error)| error.is_passing());
            let left = give_up.saturating_duration_since(Instant::now());
            let wait = if may_pass { pause.min(left) } else { Duration::ZERO };
            let has_changed = self.holders.wait_changed(version, wait);
            if left.is_zero() || !(may_pass || has_changed) {
                let line = |(peer, error): Vain| {
                    format!("{} ({}): {}", peer.name(), peer.address(), error.to_line())
                };
                let answers = failed.into_iter().map(line).collect();
                return Err(NobodyHas { image: self.image, range: piece, answers });
            }
            pause = (pause * 2).min(PAUSE_MAX);
            all_were_asked = false;
        }
    }

    /// From whoever is best of those that are known to have the pages, and from the next if that fails, until `give_up`. → whether
    /// they came.
    fn read_in_swarm(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        give_up: Instant,
        mut early: Option<&mut Early<'_>>,
        failed: &mut Vec<Vain>,
    ) -> bool {
        let Some(swarm) = &self.swarm else { return false };
        let (mut named, mut is_late) = (None, false);
        loop {
            let asked = match named.take().map_or_else(|| swarm.choose(urgency, piece), Chosen::Ask)
            {
                _ if is_late => return false,
                Chosen::Ask(asked) => asked,
                Chosen::Later(wait) if urgency == Urgency::Ahead && Instant::now() < give_up => {
                    std::thread::park_timeout(wait.clamp(LATER_MIN, LATER_MAX));
                    continue;
                }
                Chosen::Later(_) | Chosen::Nobody => return false,
            };
            is_late = Instant::now() >= give_up;
            let Asked { host, peer, origin, route } = asked;
            let may_wait = match urgency {
                Urgency::Demand if !origin => DEMAND_WAIT,
                _ => Duration::MAX,
            };
            let answer = self.checked(origin, early.as_deref_mut(), |early| {
                peer.read_by((route, may_wait), self.image, piece, urgency, bytes, early)
            });
            let error = match answer {
                Ok(()) => {
                    swarm.answered(host, piece);
                    match self.verified(urgency, piece, bytes, &peer, origin) {
                        Ok(()) => return true,
                        Err(error) => error,
                    }
                }
                // Only who is asked first names another: nobody is sent round and round.
                Err(error) => match error.elsewhere() {
                    Some(at) if route == Route::Direct => {
                        named = self.redirected(swarm, (host, origin), piece, at);
                        continue;
                    }
                    _ => error,
                },
            };
            swarm.failed(host, piece, &error);
            self.on_failed(peer, piece, error, failed);
        }
    }

    /// A host said where a piece is. → whom to ask for it.
    pub(super) fn redirected(
        &self,
        swarm: &Swarm,
        (host, origin): (HostId, bool),
        piece: PageRange,
        at: &Elsewhere,
    ) -> Option<Asked> {
        self.counters.redirected.add(1);
        if origin {
            self.verifier.told(piece, &at.sums);
        }
        swarm.redirected(host, piece, at.host)
    }

    /// A read of which one page may come early: it is told of if it is `believed`, or known to be what the origin has.
    pub(super) fn checked<T>(
        &self,
        believed: bool,
        early: Option<&mut Early<'_>>,
        read: impl FnOnce(Option<&mut Early<'_>>) -> T,
    ) -> T {
        let Some(Early { page, came }) = early else { return read(None) };
        let mut came = |bytes: &[u8]| {
            if believed || self.verifier.is_right(*page, bytes) {
                came(bytes);
            }
        };
        read(Some(&mut Early { page: *page, came: &mut came }))
    }

    /// What another host than the origin gave is compared with what that has; if it can't be, the origin is asked for it.
    pub(super) fn verified(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        peer: &Peer,
        origin: bool,
    ) -> Result<(), PeerError> {
        let undecided = match self.compared(urgency, piece, bytes, peer, origin) {
            Err(error @ PeerError::Undecided) => error,
            done => return done,
        };
        if let Some(swarm) = &self.swarm
            && let Some(Asked { host, peer: of, route, .. }) = swarm.ask_origin()
            && of.read_by((route, Duration::MAX), self.image, piece, urgency, bytes, None).is_ok()
        {
            swarm.answered(host, piece);
            self.came_from(true, piece);
            return Ok(());
        }
        // It may have been overwritten.
        Err(undecided)
    }

    /// Whether what a host gave is what the origin has. It is believed only if the origin is not there any more.
    ///
    /// # Errors
    /// It is not, or the origin does not say.
    pub(super) fn compared(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &[u8],
        peer: &Peer,
        origin: bool,
    ) -> Result<(), PeerError> {
        if self.swarm.is_none() && self.origin.is_none() {
            return Ok(());
        }
        if !origin {
            let of = match &self.swarm {
                Some(swarm) => swarm.ask_origin().map(|asked| asked.peer),
                None => self.origin.clone(),
            };
            match self.verifier.verify(urgency, piece, bytes, peer.name(), of.as_deref()) {
                Verdict::Right => {}
                Verdict::Wrong(page) => {
                    self.counters.forged.add(1);
                    return Err(PeerError::Forged { page });
                }
                Verdict::Undecided if of.is_some() => return Err(PeerError::Undecided),
                Verdict::Undecided | Verdict::Believed => {
                    self.counters.unverified_pages.add(piece.len());
                }
            }
        }
        self.came_from(origin, piece);
        Ok(())
    }

    /// Without a swarm: whether what a host gives need not be compared.
    pub(super) fn is_origin(&self, peer: &Arc<Peer>) -> bool {
        self.origin.as_ref().is_none_or(|origin| Arc::ptr_eq(origin, peer))
    }

    fn came_from(&self, origin: bool, piece: PageRange) {
        let SourceCounters { origin_pages, holder_pages, .. } = &*self.counters;
        if origin { origin_pages } else { holder_pages }.add(piece.len());
    }

    pub(super) fn on_failed(
        &self,
        peer: Arc<Peer>,
        piece: PageRange,
        error: PeerError,
        failed: &mut Vec<Vain>,
    ) {
        self.note_failure(&peer, piece, &error);
        failed.push((peer, error));
    }

    pub(super) fn note_failure(&self, peer: &Arc<Peer>, piece: PageRange, error: &PeerError) {
        let host = peer.name();
        tracing::debug!(image = %self.image, %piece, host, %error, "no pages");
        self.holders.on_failed(peer, error);
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

    /// From the best host that gives them. Ends within the patience and one round through all hosts.
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
        self.read_together(reads, done);
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
            // Whoever asks for it, all get it.
            return NextAhead::Piece(0);
        }
        // While all that is missing is waited for, nothing else asks.
        swarm.refresh_soon();
        swarm.next_ahead(pieces)
    }
}
