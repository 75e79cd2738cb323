//! Another host, as something that pages can be read from.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use vmfork_image::{AheadRead, ImageName, PAGE_BYTES, PageIdx, PageRange};
use vmfork_policy::transfer::bounds;

use super::link::{Came, LinkError, Question};
use super::pool::{Lease, Pool, Wanted};
use crate::choice::{self, Choice};
use crate::counters::PeerCounters;
use crate::lock;
use crate::proto::{
    Elsewhere, HELD_PAGES_MAX, Invitation, ProtoError, READ_PAGES_MAX, Refusal, RefusalKind, Route,
    Urgency,
};
use crate::sums::Sum;

/// Which host, and how it is reached.
#[derive(Clone)]
pub struct PeerConfig {
    /// What people call it.
    pub name: String,
    pub address: SocketAddr,
    /// The name that its certificate has to have.
    pub server_name: ServerName<'static>,
    /// With this host's own certificate.
    pub tls: Arc<ClientConfig>,
    /// Have pages compressed where that is found to be quicker.
    pub compress: bool,
}

impl fmt::Debug for PeerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, address, server_name, compress, tls: _ } = self;
        f.debug_struct("PeerConfig")
            .field("name", name)
            .field("address", address)
            .field("server_name", server_name)
            .field("compress", compress)
            .finish_non_exhaustive()
    }
}

/// Bounds of what is asked of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLimits {
    /// Connections, and so requests, at a time.
    pub connections_max: usize,
    /// To connect, and then again to shake hands.
    pub connect: Duration,
    /// An answer, from the request on; and waiting for a connection that others use.
    pub answer: Duration,
    /// How long an unused connection is kept. Less than a service keeps one for.
    pub idle: Duration,
    /// How long a host that gave no answer is asked only after others.
    pub avoid: Duration,
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self {
            connections_max: 32,
            connect: Duration::from_secs(2),
            answer: bounds::ANSWER,
            idle: Duration::from_secs(60),
            avoid: bounds::AVOID,
        }
    }
}

/// A host gave no pages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    #[error("connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        source: io::Error,
        /// It was not there: no program listens, or another host.
        is_gone: bool,
    },
    #[error("not tried for another {} ms: connect to {address}: {why}", left.as_millis())]
    BackingOff {
        address: SocketAddr,
        left: Duration,
        why: String,
        /// As of [`PeerError::Connect`].
        is_gone: bool,
    },
    #[error("all {connections} connections were in use for {} s", waited.as_secs_f32())]
    AllInUse { connections: usize, waited: Duration },
    #[error("no answer within {} s", timeout.as_secs_f32())]
    Timeout { timeout: Duration },
    #[error("the connection ended before there was an answer")]
    Lost(#[source] io::Error),
    #[error("an answer that makes no sense")]
    Wrong(#[source] ProtoError),
    #[error("refused: {0}")]
    Refused(Refusal),
    #[error("page {page} is another than its origin has")]
    Forged { page: PageIdx },
    #[error("what it gave can't be compared with what its origin has, which does not answer")]
    Undecided,
    #[error("{pages} pages into {bytes} bytes: at most {most} are read at a time")]
    Misuse { pages: u64, bytes: usize, most: u64 },
}

impl PeerError {
    /// Whether it may be otherwise in a moment, without a change by a user or another host.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::BackingOff { .. }
            | Self::AllInUse { .. }
            | Self::Timeout { .. }
            | Self::Lost(_) => true,
            Self::Refused(refusal) => {
                matches!(refusal.kind, RefusalKind::Busy | RefusalKind::Draining)
            }
            Self::Undecided => true,
            Self::Wrong(_) | Self::Forged { .. } | Self::Misuse { .. } => false,
        }
    }

    /// Whether it says something of the host, and not of what was asked of it.
    fn is_of_host(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::AllInUse { .. } | Self::Misuse { .. })
    }

    /// Whether the host is not there any more, or has nothing more to say of what it was asked.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Self::Connect { is_gone, .. } | Self::BackingOff { is_gone, .. } => *is_gone,
            Self::Refused(refusal) => matches!(
                refusal.kind,
                RefusalKind::UnknownImage | RefusalKind::NotMember | RefusalKind::Draining
            ),
            _ => false,
        }
    }

    /// Where the pages are, if it is this that was answered.
    pub(super) fn elsewhere(&self) -> Option<&Elsewhere> {
        match self {
            Self::Refused(refusal) => refusal.whereabouts(),
            _ => None,
        }
    }

    /// With its causes, in one line.
    pub(super) fn to_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            line.push_str(": ");
            line.push_str(&error.to_string());
            cause = error.source();
        }
        line
    }
}

/// Connections reserved for demand reads.
const FOR_DEMAND: usize = 8;

/// It gave no answer, and is asked only after others.
#[derive(Debug)]
struct Avoided {
    until: Instant,
    /// It was not there.
    is_gone: bool,
}

/// Another host. Shared by all images of which it has pages.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
    limits: PeerLimits,
    pool: Pool,
    choice: Mutex<Choice>,
    avoided: Mutex<Option<Avoided>>,
    counters: PeerCounters,
}

/// The demanded one of several pages.
pub(super) struct Early<'a> {
    pub(super) page: PageIdx,
    /// Called with its bytes when they have come, if that is before the others.
    pub(super) came: &'a mut dyn FnMut(&[u8]),
}

impl Peer {
    /// Connects when it is first asked for something.
    pub fn new(config: PeerConfig, limits: PeerLimits) -> Self {
        Self {
            config,
            limits,
            pool: Pool::default(),
            choice: Mutex::default(),
            avoided: Mutex::default(),
            counters: PeerCounters::default(),
        }
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    pub fn address(&self) -> SocketAddr {
        self.config.address
    }

    pub fn counters(&self) -> &PeerCounters {
        &self.counters
    }

    /// How many connections are there: idle ones, and those in use.
    pub fn connections(&self) -> (usize, usize) {
        self.pool.counts()
    }

    /// Whether it gave no answer a while ago, so that others are better asked first.
    pub fn is_avoided(&self) -> bool {
        lock(&self.avoided).as_ref().is_some_and(|avoided| avoided.until > Instant::now())
    }

    /// Whether it was not even there.
    pub(super) fn is_gone(&self) -> bool {
        let avoided = lock(&self.avoided);
        avoided.as_ref().is_some_and(|avoided| avoided.is_gone && avoided.until > Instant::now())
    }

    /// Read `range`, at most [`READ_PAGES_MAX`] pages, into `out`, which is as long. Ends within
    /// four time-outs: waiting for a connection, making one, asking on one that turns out to have
    /// ended, and asking.
    ///
    /// # Errors
    /// [`PeerError`]; then `out` has no meaning.
    pub fn read(
        &self,
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
        out: &mut [u8],
    ) -> Result<(), PeerError> {
        self.read_by((Route::Insist, self.limits.answer), image, range, urgency, out, None)
    }

    /// The same by another route and with less patience: an answer may take no longer than
    /// `timeout`. One page may be to come early.
    ///
    /// # Errors
    /// As [`Peer::read`], and that another host has the pages.
    pub(super) fn read_by(
        &self,
        (route, timeout): (Route, Duration),
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
        out: &mut [u8],
        mut early: Option<&mut Early<'_>>,
    ) -> Result<(), PeerError> {
        let timeout = timeout.min(self.limits.answer);
        let (pages, most) = (range.len(), READ_PAGES_MAX);
        if pages == 0 || pages > most || out.len() as u64 != range.byte_len() {
            return Err(PeerError::Misuse { pages, bytes: out.len(), most });
        }
        let may_compress = self.config.compress && lock(&self.choice).may_compress(pages);
        let first = early.as_ref().map(|early| early.page).filter(|page| range.contains(*page));
        let question = Question { image, range, urgency, route, may_compress, first };
        let came = self.ask(urgency, timeout, |lease| match &mut lease.link {
            Some(link) => link.read(question, timeout, out, &mut |bytes| {
                if let Some(early) = &mut early {
                    (early.came)(bytes);
                }
            }),
            None => Err(io::Error::from(io::ErrorKind::NotConnected).into()),
        })?;
        let sent_pages = self.count(&question, came);
        if self.config.compress {
            let (wire_bytes, took) = (came.wire_bytes, came.took);
            lock(&self.choice).took(
                may_compress,
                pages,
                choice::Came { sent_pages, wire_bytes, took },
            );
        }
        self.counters.latency.add(came.took);
        self.counters.set_last_rtt(came.took.saturating_sub(came.server));
        Ok(())
    }

    /// Pages came. → how many of them were sent.
    fn count(&self, question: &Question, came: Came) -> u64 {
        let (counters, pages) = (&self.counters, question.range.len());
        let sent_pages = pages.saturating_sub(came.zero_pages);
        counters.requests.add(1);
        counters.pages.add(pages);
        counters.zero_pages.add(came.zero_pages);
        counters.raw_bytes.add(sent_pages * PAGE_BYTES);
        counters.wire_bytes.add(came.wire_bytes);
        if question.urgency == Urgency::Ahead {
            counters.ahead.add(pages, came.wire_bytes);
        }
        sent_pages
    }

    fn count_refused(&self, error: &PeerError) {
        let PeerCounters { redirected, failures, .. } = &self.counters;
        if error.elsewhere().is_some() { redirected } else { failures }.add(1);
    }

    /// Several background reads, sent together, by a route; each may take no longer than an answer.
    /// `each` is called for every read, with its place and, if they came, the pages.
    ///
    /// # Errors
    /// [`PeerError`]: those of which `each` has not heard are not answered.
    pub(super) fn read_together(
        &self,
        route: Route,
        image: ImageName,
        reads: &mut [&mut AheadRead<'_>],
        mut each: impl FnMut(usize, Result<&[u8], PeerError>),
    ) -> Result<(), PeerError> {
        let (urgency, timeout, most) = (Urgency::Ahead, self.limits.answer, READ_PAGES_MAX);
        let fits = |read: &AheadRead<'_>| {
            let pages = read.range.len();
            pages > 0 && pages <= most && read.bytes.len() as u64 == read.range.byte_len()
        };
        if let Some(read) = reads.iter().find(|read| !fits(read)) {
            let (pages, bytes) = (read.range.len(), read.bytes.len());
            return Err(PeerError::Misuse { pages, bytes, most });
        }
        let all_pages = reads.iter().map(|read| read.range.len()).sum();
        let may_compress = self.config.compress && lock(&self.choice).may_compress(all_pages);
        let question = |range| Question { image, range, urgency, route, may_compress, first: None };
        let questions: Vec<Question> = reads.iter().map(|read| question(read.range)).collect();
        let mut all = choice::Came::default();
        all.took = self.ask(urgency, timeout, |lease| {
            let Some(link) = &mut lease.link else {
                return Err(io::Error::from(io::ErrorKind::NotConnected).into());
            };
            let began = Instant::now();
            let mut outs: Vec<&mut [u8]> = reads.iter_mut().map(|read| &mut *read.bytes).collect();
            link.read_together(&questions, timeout, &mut outs, |place, answer| {
                each(
                    place,
                    match (answer, questions.get(place)) {
                        (Ok((came, bytes)), Some(question)) => {
                            all.sent_pages += self.count(question, came);
                            all.wire_bytes += came.wire_bytes;
                            Ok(bytes)
                        }
                        (Ok((_, bytes)), None) => Ok(bytes),
                        (Err(refusal), _) => {
                            let refused = PeerError::Refused(refusal);
                            self.count_refused(&refused);
                            Err(refused)
                        }
                    },
                );
            })?;
            Ok(began.elapsed())
        })?;
        if self.config.compress {
            lock(&self.choice).took(may_compress, all_pages, all);
        }
        Ok(())
    }

    /// Which pages of `range`, at most [`HELD_PAGES_MAX`], the host has, as runs.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn held(&self, image: ImageName, range: PageRange) -> Result<Vec<PageRange>, PeerError> {
        let (pages, most) = (range.len(), HELD_PAGES_MAX);
        if pages == 0 || pages > most {
            return Err(PeerError::Misuse { pages, bytes: 0, most });
        }
        let (urgency, route) = (Urgency::Ahead, Route::Direct);
        let question = Question { image, range, urgency, route, may_compress: false, first: None };
        self.ask(urgency, self.limits.answer, |lease| match &mut lease.link {
            Some(link) => link.held(question, self.limits.answer),
            None => Err(io::Error::from(io::ErrorKind::NotConnected).into()),
        })
    }

    /// The sums of pages, at most [`READ_PAGES_MAX`], of an image that the host froze.
    ///
    /// # Errors
    /// [`PeerError`].
    pub(super) fn sums(
        &self,
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
        timeout: Duration,
    ) -> Result<Vec<Sum>, PeerError> {
        let route = Route::Direct;
        let question = Question { image, range, urgency, route, may_compress: false, first: None };
        let timeout = timeout.min(self.limits.answer);
        let answer = self.ask(urgency, timeout, |lease| match &mut lease.link {
            Some(link) => link.sums(question, timeout),
            None => Err(io::Error::from(io::ErrorKind::NotConnected).into()),
        });
        if matches!(answer, Err(PeerError::Timeout { .. })) {
            // The next reader that asks it for the pages finds out whether it answers at all.
            *lock(&self.avoided) = None;
        }
        answer
    }

    /// To the group that an image is sent to.
    ///
    /// # Errors
    /// [`PeerError`]; with [`RefusalKind::BadRequest`] the host sends none to groups.
    pub fn invitation(&self, image: ImageName) -> Result<Invitation, PeerError> {
        self.ask(Urgency::Ahead, self.limits.answer, |lease| match &mut lease.link {
            Some(link) => link.invitation(image, self.limits.answer),
            None => Err(io::Error::from(io::ErrorKind::NotConnected).into()),
        })
    }

    /// Send a request on some connection, and again on a new one if the first had ended while it
    /// was unused.
    fn ask<T>(
        &self,
        urgency: Urgency,
        timeout: Duration,
        mut put: impl FnMut(&mut Lease<'_>) -> Result<T, LinkError>,
    ) -> Result<T, PeerError> {
        let answer = match self.ask_once(false, urgency, timeout, &mut put) {
            Err(Asked::EndedWhileIdle) => {
                self.counters.retries.add(1);
                self.ask_once(true, urgency, timeout, &mut put)
            }
            answer => answer,
        };
        let answer = answer.map_err(|asked| match asked {
            Asked::EndedWhileIdle => PeerError::Lost(io::ErrorKind::UnexpectedEof.into()),
            Asked::Failed(error) => error,
        });
        match &answer {
            Ok(_) => *lock(&self.avoided) = None,
            Err(error) => {
                self.count_refused(error);
                if error.is_of_host() {
                    let until = Instant::now() + self.limits.avoid;
                    *lock(&self.avoided) = Some(Avoided { until, is_gone: error.is_gone() });
                } else if let PeerError::Refused(_) = error
                    && let Some(avoided) = &mut *lock(&self.avoided)
                {
                    avoided.is_gone = false;
                }
            }
        }
        answer
    }

    fn ask_once<T>(
        &self,
        fresh: bool,
        urgency: Urgency,
        timeout: Duration,
        put: &mut impl FnMut(&mut Lease<'_>) -> Result<T, LinkError>,
    ) -> Result<T, Asked> {
        // What there is little time for does not wait long for a connection, either.
        let connections_max = match urgency {
            Urgency::Demand => self.limits.connections_max,
            Urgency::Ahead => self.limits.connections_max.saturating_sub(FOR_DEMAND).max(1),
        };
        let wanted = Wanted { fresh, within: timeout, connections_max };
        let lease = self.pool.lease(&self.config, &self.limits, wanted);
        let mut lease = lease.map_err(Asked::Failed)?;
        if !lease.was_idle {
            self.counters.connections.add(1);
        }
        let timed_out = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
        Err(Asked::Failed(match put(&mut lease) {
            Ok(answer) => {
                lease.keep();
                return Ok(answer);
            }
            Err(LinkError::Refused(refusal)) => {
                lease.keep();
                PeerError::Refused(refusal)
            }
            Err(LinkError::Unanswered(error) | LinkError::Cut(error)) if timed_out(&error) => {
                PeerError::Timeout { timeout }
            }
            Err(LinkError::Unanswered(_)) if lease.was_idle => return Err(Asked::EndedWhileIdle),
            Err(LinkError::Unanswered(error) | LinkError::Cut(error)) => PeerError::Lost(error),
            Err(LinkError::Wrong(error)) => PeerError::Wrong(error),
        }))
    }
}

/// Why a question was not answered.
enum Asked {
    EndedWhileIdle,
    Failed(PeerError),
}
