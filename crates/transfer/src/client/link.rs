//! One connection to another host, used by one at a time: for one request, or for several, which
//! are sent together.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustls::{ClientConnection, Connection};
use vmfork_image::{ImageName, PageIdx, PageRange};

use super::peer::PeerConfig;
use crate::channel::Channel;
use crate::pack::{self, Scratch};
use crate::proto::{
    self, HEAD_BYTES, Head, Invitation, Op, PAGE, PREAMBLE, ProtoError, Refusal, Request, Route,
    Run, Urgency,
};
use crate::sums::{SUM_BYTES, Sum};

/// Memory that a connection keeps for its next answer.
const KEPT_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct Link {
    channel: Channel,
    scratch: Scratch,
    sequence: u16,
    /// It has been used: the preamble is sent along with the first request.
    began: bool,
}

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question {
    pub(super) image: ImageName,
    pub(super) range: PageRange,
    pub(super) urgency: Urgency,
    pub(super) route: Route,
    pub(super) may_compress: bool,
    /// The page whose answer comes before the others'.
    pub(super) first: Option<PageIdx>,
}

/// Of pages that came.
#[derive(Debug, Clone, Copy)]
pub(super) struct Came {
    pub(super) zero_pages: u64,
    pub(super) wire_bytes: u64,
    /// From the request's first byte to the answer's last.
    pub(super) took: Duration,
    /// What of it the other host needed before it began to send.
    pub(super) server: Duration,
}

/// Why there is no answer, or another.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The connection has ended; nothing of an answer had come.
    Unanswered(io::Error),
    /// The connection has ended within the answer.
    Cut(io::Error),
    /// What came is none.
    Wrong(ProtoError),
    /// The connection is as good as before, unless the other side closes it now.
    Refused(Refusal),
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        Self::Cut(error)
    }
}

impl From<ProtoError> for LinkError {
    fn from(error: ProtoError) -> Self {
        Self::Wrong(error)
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) struct NotOpen {
    pub(super) error: io::Error,
    /// No program listens there, or another one than the host.
    pub(super) is_gone: bool,
}

impl NotOpen {
    fn connecting(error: io::Error) -> Self {
        // What this host lacks says nothing of the other.
        let own = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ADDRNOTAVAIL];
        let is_own = Errno::from_io_error(&error).is_some_and(|errno| own.contains(&errno));
        Self { error, is_gone: !is_own }
    }

    /// A host that takes a connection, and is slow then or ends it, may have too many.
    fn shaking_hands(error: io::Error) -> Self {
        let is_gone = error.kind() == io::ErrorKind::InvalidData;
        Self { error, is_gone }
    }
}

impl Link {
    /// Connect and shake hands.
    pub(super) fn open(config: &PeerConfig, timeout: Duration) -> Result<Self, NotOpen> {
        let tcp = TcpStream::connect_timeout(&config.address, timeout);
        let tcp = tcp.map_err(NotOpen::connecting)?;
        let tls = ClientConnection::new(Arc::clone(&config.tls), config.server_name.clone());
        let tls = tls.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error));
        let channel = tls.and_then(|tls| Channel::open(Connection::Client(tls), tcp, timeout));
        let channel = channel.map_err(NotOpen::shaking_hands)?;
        Ok(Self { channel, scratch: Scratch::default(), sequence: 0, began: false })
    }

    /// `came` is called for the page that was to come first, unless the others are present already.
    pub(super) fn read(
        &mut self,
        question: Question,
        timeout: Duration,
        out: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> Result<Came, LinkError> {
        let began = Instant::now();
        let request = self.request(Op::Read, question);
        self.send(&[request], timeout)?;
        let place = request.first_place().and_then(|place| usize::try_from(place).ok());
        let head = self.head(&request)?;
        let Some((place, (first, others))) = place.zip(out.split_at_mut_checked(PAGE)) else {
            return self.pages(&head, out, began);
        };
        let page = self.pages(&head, first, began)?;
        if !self.channel.has(HEAD_BYTES) {
            came(first);
        }
        let head = match self.head(&request.part(request.range.len() - 1)) {
            Err(LinkError::Unanswered(error)) => return Err(LinkError::Cut(error)),
            Err(LinkError::Refused(refusal)) => {
                return Ok(proto::wrong(format!("pages of which the rest is refused: {refusal}"))?);
            }
            head => head?,
        };
        let rest = self.pages(&head, others, began)?;
        // As they were asked for.
        out[..(place + 1) * PAGE].rotate_left(PAGE);
        Ok(Came {
            zero_pages: page.zero_pages + rest.zero_pages,
            wire_bytes: page.wire_bytes + rest.wire_bytes,
            took: rest.took,
            server: page.server,
        })
    }

    /// The pages that follow a head.
    fn pages(&mut self, head: &Head, out: &mut [u8], began: Instant) -> Result<Came, LinkError> {
        let Self { channel, scratch, .. } = self;
        let runs = pack::receive(head, out, scratch, |part| -> Result<(), LinkError> {
            Ok(channel.read_exact(part)?)
        })?;
        scratch.shrink(KEPT_BYTES);
        let zero = runs.iter().filter(|run| matches!(run, Run::Zero(_)));
        Ok(Came {
            zero_pages: zero.map(|run| u64::from(run.pages())).sum(),
            wire_bytes: u64::from(head.bytes),
            took: began.elapsed(),
            server: Duration::from_micros(u64::from(head.server_us)),
        })
    }

    /// Several requests for pages at once, which are answered one after the other, each within
    /// `timeout`. `each` is called for every answer, with its place and, if there are any, the
    /// pages.
    ///
    /// # Errors
    /// [`LinkError`]: of the questions of which `each` has not heard there will be no answer. A refusal: the other side has sent us away with
    /// it.
    pub(super) fn read_together(
        &mut self,
        questions: &[Question],
        timeout: Duration,
        outs: &mut [&mut [u8]],
        mut each: impl FnMut(usize, Result<(Came, &[u8]), Refusal>),
    ) -> Result<(), LinkError> {
        let began = Instant::now();
        let requests: Vec<Request> =
            questions.iter().map(|it| self.request(Op::Read, *it)).collect();
        self.send(&requests, timeout)?;
        let mut sent_away = None;
        for (place, (request, out)) in requests.iter().zip(outs).enumerate() {
            // Not of the time of those before it, nor of what was made of them.
            self.channel.set_timeout(timeout);
            let came = match self.head(request) {
                Ok(head) => self.pages(&head, out, began),
                Err(error) => Err(error),
            };
            match came {
                Ok(came) => {
                    sent_away = None;
                    each(place, Ok((came, out)));
                }
                Err(LinkError::Refused(refusal)) => {
                    sent_away = Some(refusal.clone()).filter(Refusal::may_be_the_last);
                    each(place, Err(refusal));
                }
                Err(LinkError::Unanswered(error)) if place > 0 => {
                    // A client that is refused receives the reason once.
                    let refused = sent_away.filter(|_| error.kind() != io::ErrorKind::TimedOut);
                    return Err(refused.map_or(LinkError::Cut(error), LinkError::Refused));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn held(
        &mut self,
        question: Question,
        timeout: Duration,
    ) -> Result<Vec<PageRange>, LinkError> {
        let head = self.ask(Op::Held, question, timeout)?;
        let mut bitmap = vec![0; usize::try_from(head.bytes).unwrap_or(0)];
        self.channel.read_exact(&mut bitmap)?;
        Ok(proto::decode_held(&bitmap, question.range)?)
    }

    pub(super) fn sums(
        &mut self,
        question: Question,
        timeout: Duration,
    ) -> Result<Vec<Sum>, LinkError> {
        let head = self.ask(Op::Sums, question, timeout)?;
        let mut bytes = vec![0; usize::try_from(head.bytes).unwrap_or(0)];
        self.channel.read_exact(&mut bytes)?;
        let (sums, rest) = bytes.as_chunks::<SUM_BYTES>();
        match sums.len() as u64 == question.range.len() && rest.is_empty() {
            true => Ok(sums.to_vec()),
            false => {
                let (bytes, range) = (bytes.len(), question.range);
                Ok(proto::wrong(format!("{bytes} bytes of sums of pages {range}"))?)
            }
        }
    }

    pub(super) fn invitation(
        &mut self,
        image: ImageName,
        timeout: Duration,
    ) -> Result<Invitation, LinkError> {
        let (range, urgency, route) = (PageRange::first(1), Urgency::Ahead, Route::Direct);
        let question = Question { image, range, urgency, route, may_compress: false, first: None };
        let head = self.ask(Op::Invite, question, timeout)?;
        let mut bytes = vec![0; usize::try_from(head.bytes).unwrap_or(0)];
        self.channel.read_exact(&mut bytes)?;
        Ok(Invitation::decode(&bytes)?)
    }

    /// Put a question. → the head of its answer.
    fn ask(&mut self, op: Op, question: Question, timeout: Duration) -> Result<Head, LinkError> {
        let request = self.request(op, question);
        self.send(&[request], timeout)?;
        self.head(&request)
    }

    fn request(&mut self, op: Op, question: Question) -> Request {
        let Question { image, range, urgency, route, may_compress, first } = question;
        let sequence = self.sequence;
        self.sequence = self.sequence.wrapping_add(1);
        Request { image, range, op, urgency, route, may_compress, first, sequence }
    }

    fn send(&mut self, requests: &[Request], timeout: Duration) -> Result<(), LinkError> {
        self.channel.set_timeout(timeout);
        let preamble: &[u8] = if self.began { &[] } else { &PREAMBLE };
        self.began = true;
        let requests: Vec<_> = requests.iter().map(Request::encode).collect();
        let parts = requests.iter().map(|request| &request[..]);
        let parts: Vec<_> = std::iter::once(preamble).chain(parts).collect();
        self.channel.send(&parts).map_err(LinkError::Unanswered)
    }

    /// The head of the answer to a request that was sent.
    fn head(&mut self, request: &Request) -> Result<Head, LinkError> {
        let mut head = [0; HEAD_BYTES];
        match self.channel.read(&mut head).map_err(LinkError::Unanswered)? {
            0 => return Err(LinkError::Unanswered(io::ErrorKind::UnexpectedEof.into())),
            read => self.channel.read_exact(&mut head[read..])?,
        }
        let head = Head::decode(&head, request)?;
        let Some(kind) = head.refusal else { return Ok(head) };
        let mut bytes = vec![0; usize::try_from(head.bytes).unwrap_or(0)];
        self.channel.read_exact(&mut bytes)?;
        Err(LinkError::Refused(Refusal::decode(kind, &bytes, request.range.len())?))
    }

    pub(super) fn close(self) {
        self.channel.close();
    }
}
