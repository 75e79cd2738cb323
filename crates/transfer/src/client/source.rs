//! An image whose pages are on other hosts, as a source of this host's.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, Origin, PageRange, PageSource};

use super::holders::Holders;
use super::peer::PeerError;
use crate::counters::Counter;
use crate::proto::{READ_PAGES_MAX, Urgency};

/// What one fault brings in: 64 KiB, half a millisecond at 1 Gbit/s.
const UNIT_PAGES: u64 = 16;
/// So that a link of 1 Gbit/s is full at a round trip of some milliseconds.
const READS_AHEAD: usize = 8;
/// How long hosts that all failed are asked again: one that restarts, or a network that is mended, is there within it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two rounds through them at first; doubled each time …
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// … up to this.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What became of reads of one image.
#[derive(Debug, Default)]
pub struct SourceCounters {
    pub reads: Counter,
    pub pages: Counter,
    /// Reads that another host answered than the one asked first.
    pub resourced: Counter,
    pub failures: Counter,
}

/// Reads pages of one image from the hosts that have it.
#[derive(Debug)]
pub struct PeerSource {
    image: ImageName,
    holders: Arc<Holders>,
    patience: Duration,
    counters: SourceCounters,
}

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
        Self { image, holders, patience: PATIENCE, counters: SourceCounters::default() }
    }

    /// The same, but hosts that all failed are asked again for so long.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
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
        if bytes.len() as u64 != range.byte_len() {
            let text = format!("{} bytes for pages {range}", bytes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let give_up = Instant::now() + self.patience;
        let (mut rest, mut bytes) = (range, bytes);
        while !rest.is_empty() {
            let piece = rest.truncate(READ_PAGES_MAX);
            let len = usize::try_from(piece.byte_len()).unwrap_or(usize::MAX).min(bytes.len());
            let (front, back) = bytes.split_at_mut(len);
            if let Err(error) = self.read_piece(urgency, piece, front, give_up) {
                self.counters.failures.add(1);
                return Err(io::Error::other(error));
            }
            (rest, bytes) = (rest.from_page(piece.end()), back);
        }
        self.counters.reads.add(1);
        self.counters.pages.add(range.len());
        Ok(())
    }

    /// Go round the hosts until one gives the pages, all say that they never will, or it has taken too long.
    fn read_piece(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        give_up: Instant,
    ) -> Result<(), NobodyHas> {
        let mut pause = PAUSE_MIN;
        loop {
            let (peers, version) = self.holders.in_order();
            let mut failed: Vec<(String, PeerError)> = Vec::new();
            for peer in &peers {
                match peer.read(self.image, piece, urgency, bytes) {
                    Ok(()) => {
                        self.counters.resourced.add(u64::from(!failed.is_empty()));
                        return Ok(());
                    }
                    Err(error) => {
                        let host = format!("{} ({})", peer.name(), peer.address());
                        tracing::debug!(image = %self.image, %piece, host, %error, "no pages");
                        self.holders.on_failed(peer, &error);
                        failed.push((host, error));
                    }
                }
            }
            let may_pass = failed.iter().any(|(_, error)| error.is_passing());
            let left = give_up.saturating_duration_since(Instant::now());
            let wait = if may_pass { pause.min(left) } else { Duration::ZERO };
            let has_changed = self.holders.wait_changed(version, wait);
            if left.is_zero() || !(may_pass || has_changed) {
                let line =
                    |(host, error): (String, PeerError)| format!("{host}: {}", error.to_line());
                let answers = failed.into_iter().map(line).collect();
                return Err(NobodyHas { image: self.image, range: piece, answers });
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
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
}
