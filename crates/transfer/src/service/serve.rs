//! One connection, from its first byte to its last.

use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustls::{Connection, ServerConnection};
use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange};
use vmfork_policy::transfer::bounds::{ARRIVAL_PAUSE_MAX, ARRIVAL_PAUSE_MIN, LOOKS_AFTER};

use super::connections::Place;
use super::turns::Turn;
use super::{Shared, Wanted};
use crate::channel::Channel;
use crate::pack::{self, Packer};
use crate::proto::{
    self, Elsewhere, Form, Head, Op, PAGE, PREAMBLE, REQUEST_BYTES, Refusal, RefusalKind, Request,
    Route, Urgency,
};
use crate::sums::{self, Sum, UNKNOWN};

/// Memory that a connection keeps for its next answer: enough for what one fault brings in. After a
/// larger answer the rest is given back.
const KEPT_BYTES: usize = 256 << 10;
/// Answers are put together up to this size, while the next request is present already, before they
/// are sent.
const TOGETHER_BYTES: usize = 64 << 10;

/// Why a connection ends early: not an error of this host.
type Ended = Box<dyn std::error::Error + Send + Sync>;

/// Serve a connection in a thread of its own, or close it at once.
pub(super) fn spawn(tcp: TcpStream, address: SocketAddr, shared: &Arc<Shared>) {
    let place = match tcp.try_clone() {
        Ok(to_end) => shared.connections.begin(to_end).ok_or("there are too many"),
        Err(error) => {
            tracing::debug!(%error, "no fd to end a connection by");
            Err("no fds are left")
        }
    };
    let for_thread = Arc::clone(shared);
    let spawned = place.and_then(|place| {
        let run = move || match serve(tcp, address, &for_thread, &place) {
            Ok(()) => tracing::trace!(%address, "connection ended"),
            Err(why) => tracing::debug!(%address, %why, "connection ended"),
        };
        let thread = std::thread::Builder::new().name("pages-serve".to_owned()).spawn(run);
        thread.map_err(|_| "no thread for it")
    });
    if let Err(why) = spawned {
        shared.counters.turned_away.add(1);
        tracing::warn!(%address, why, "a connection is closed at once");
    }
}

fn serve(tcp: TcpStream, address: SocketAddr, shared: &Shared, place: &Place) -> Result<(), Ended> {
    let limits = &shared.limits;
    let handshake = || -> Result<Channel, Ended> {
        tcp.set_nonblocking(false)?;
        let tls = ServerConnection::new(Arc::clone(&shared.tls))?;
        Ok(Channel::open(Connection::Server(tls), tcp, limits.io)?)
    };
    let mut channel = handshake().inspect_err(|_| shared.counters.handshakes_failed.add(1))?;
    let admitted = match channel.certificate() {
        Some(certificate) => shared.pages.admit(certificate, address),
        None => Err(Refusal::new(RefusalKind::NotMember, "no certificate was shown")),
    };
    // A client that may not stay receives the reason, in answer to its first request.
    let admitted = admitted.and_then(|member| match place.of_member(member) {
        true => Ok(member),
        false => {
            let most = limits.connections_per_member_max;
            Err(Refusal::new(RefusalKind::Busy, format!("{most} connections are open already")))
        }
    });
    match &admitted {
        Ok(_) => shared.counters.connections.add(1),
        Err(_) => shared.counters.handshakes_failed.add(1),
    }
    let answer = Answer::default();
    let served = Session { shared, channel: &mut channel, answer, ended: None }.run(admitted);
    if served.is_ok() {
        channel.close();
    }
    served
}

/// Memory for answers.
#[derive(Default)]
struct Answer {
    pages: Vec<u8>,
    packer: Packer,
    head: Vec<u8>,
    /// The page that was to come first is being sent, and at the front of `pages`.
    has_begun: bool,
}

struct Session<'a> {
    shared: &'a Shared,
    channel: &'a mut Channel,
    answer: Answer,
    /// Why it ends with what is being answered.
    ended: Option<Ended>,
}

impl<'a> Session<'a> {
    /// Answer until the other side has enough, or is not to be answered any more.
    fn run(&mut self, admitted: Result<u64, Refusal>) -> Result<(), Ended> {
        let mut preamble = [0; PREAMBLE.len()];
        if !self.receive(&mut preamble)? {
            return Ok(());
        }
        let mut admitted = admitted.and_then(|member| {
            proto::check_preamble(&preamble).map_err(bad_request)?;
            Ok(member)
        });
        let mut bytes = [0; REQUEST_BYTES];
        while self.receive(&mut bytes)? {
            let began = Instant::now();
            let request = Request::decode(&bytes).map_err(bad_request);
            // Of a request that makes no sense: the client has to recognise the answer.
            let sequence = u16::from_le_bytes([bytes[REQUEST_BYTES - 2], bytes[REQUEST_BYTES - 1]]);
            admitted = admitted.and_then(|member| match self.shared.pages.is_member(member) {
                true => Ok(member),
                false => Err(Refusal::new(RefusalKind::NotMember, "not a member any more")),
            });
            let request = admitted.clone().and_then(|member| Ok((member, request?)));
            match request {
                Ok((member, request)) => self.answer(member, &request, began)?,
                Err(refusal) => {
                    self.refuse(sequence, began, &refusal)?;
                    self.channel.flush()?;
                    return Err(refusal.into());
                }
            }
        }
        Ok(())
    }

    /// Read all of `bytes`. → whether there are any: the other side may have closed the connection,
    /// or be idle for too long.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<bool, Ended> {
        self.channel.set_timeout(self.shared.limits.idle);
        let read = match self.channel.read(bytes) {
            Ok(0) => return Ok(false),
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        // Most often all has come at once.
        if let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
            self.channel.set_timeout(self.shared.limits.io);
            self.channel.read_exact(rest)?;
        }
        Ok(true)
    }

    fn answer(&mut self, member: u64, request: &Request, began: Instant) -> Result<(), Ended> {
        self.answer.has_begun = false;
        let read = std::panic::catch_unwind(AssertUnwindSafe(|| match request.op {
            Op::Read => self.read_or_name(member, request, began),
            Op::Held => self.find_held(member, request),
            Op::Sums => self.sum_up(member, request),
            Op::Invite => self.invite(member, request),
        }));
        let read = read.unwrap_or_else(|_| {
            tracing::error!(image = %request.image, pages = %request.range, "reading panicked");
            Err(Refusal::new(RefusalKind::Failed, "reading the pages failed: see the host's log"))
        });
        if let Some(why) = self.ended.take() {
            return Err(why);
        }
        if let Err(refusal) = read {
            if self.answer.has_begun {
                self.shared.counters.refused(refusal.kind);
                return Err(refusal.into());
            }
            pack::shrink(&mut self.answer.pages, KEPT_BYTES);
            return self.refuse(request.sequence, began, &refusal);
        }
        self.channel.set_timeout(self.shared.limits.io);
        match request.op {
            Op::Held | Op::Sums | Op::Invite => {
                let Answer { pages, .. } = &self.answer;
                let begin = Head {
                    sequence: request.sequence,
                    refusal: None,
                    form: Form::Raw,
                    runs: 0,
                    bytes: u32::try_from(pages.len()).unwrap_or(u32::MAX),
                    server_us: us_since(began),
                };
                self.channel.put(&[&begin.encode()[..], &pages[..]])?;
            }
            Op::Read => {
                let len = self.answer.pages.len();
                let place = request.first_place().and_then(|place| usize::try_from(place).ok());
                if let Some(place) = place.filter(|_| !self.answer.has_begun) {
                    let until_it = len.min((place + 1) * PAGE);
                    self.answer.pages[..until_it].rotate_right(PAGE);
                    self.send_first(request, began)?;
                }
                self.put_pages(request, began, place.map_or(0, |_| PAGE)..len)?;
                let Shared { counters, spreads, .. } = self.shared;
                counters.requests.add(1);
                spreads.served(request.image, member, request.range);
                self.answer.packer.shrink(KEPT_BYTES);
            }
        }
        pack::shrink(&mut self.answer.pages, KEPT_BYTES);
        self.send_unless_next()
    }

    /// Send the page that comes first: its waiter does not wait for the others.
    fn send_first(&mut self, request: &Request, began: Instant) -> Result<(), Ended> {
        self.put_pages(request, began, 0..PAGE)?;
        Ok(self.channel.flush()?)
    }

    /// Put an answer with some of the bytes that were read.
    fn put_pages(
        &mut self,
        request: &Request,
        began: Instant,
        bytes: Range<usize>,
    ) -> Result<(), Ended> {
        let Answer { pages, packer, head, .. } = &mut self.answer;
        let pages = pages.get(bytes).unwrap_or_default();
        let packed = packer.pack(pages, request.may_compress);
        let len = packed.len();
        let begin = Head {
            sequence: request.sequence,
            refusal: None,
            form: packed.form,
            runs: u16::try_from(packed.runs.len()).unwrap_or(u16::MAX),
            bytes: u32::try_from(len).unwrap_or(u32::MAX),
            server_us: us_since(began),
        };
        head.clear();
        head.extend(begin.encode());
        packed.runs.iter().for_each(|run| head.extend(run.encode()));
        let parts: Vec<&[u8]> = std::iter::once(&**head).chain(packed.bytes).collect();
        self.channel.put(&parts)?;
        let counters = &self.shared.counters;
        let count = pages.len() as u64 / PAGE_BYTES;
        counters.pages.add(count);
        counters.zero_pages.add(packed.zero_pages);
        counters.raw_bytes.add(count.saturating_sub(packed.zero_pages) * PAGE_BYTES);
        counters.wire_bytes.add(len as u64);
        if request.urgency == Urgency::Ahead {
            counters.ahead.add(count, len as u64);
        }
        Ok(())
    }

    /// Send the answer: with the next one, if that comes at once.
    fn send_unless_next(&mut self) -> Result<(), Ended> {
        let has_next = self.channel.has(REQUEST_BYTES);
        if !has_next || self.channel.unsent() >= TOGETHER_BYTES {
            self.channel.flush()?;
        }
        Ok(())
    }

    /// A turn for a background read.
    fn turn(&mut self, wait: Duration) -> Result<Turn<'a>, Refusal> {
        let turns = &self.shared.turns;
        if let Some(turn) = turns.wait(Duration::ZERO) {
            return Ok(turn);
        }
        self.send_before_waiting()?;
        turns.wait(wait).ok_or_else(busy)
    }

    /// A client that waits for earlier answers need not wait for the next one.
    ///
    /// # Errors
    /// The client does not take them: the connection has ended, and no client receives this error.
    fn send_before_waiting(&mut self) -> Result<(), Refusal> {
        self.channel.set_timeout(self.shared.limits.io);
        self.channel.flush().map_err(|error| {
            self.ended = Some(error.into());
            Refusal::new(RefusalKind::Failed, "earlier answers are not taken")
        })
    }

    fn read_or_name(
        &mut self,
        member: u64,
        request: &Request,
        began: Instant,
    ) -> Result<(), Refusal> {
        let Request { image, range, urgency, route, .. } = *request;
        let Shared { pages, spreads, answering, limits, .. } = self.shared;
        if let Some(Wanted { pages: len, is_own }) = pages.asked(member, image, range, urgency) {
            let is_busy = || answering.load(Ordering::Relaxed) > limits.demand_max;
            let demand = urgency == Urgency::Demand;
            let may_refuse = is_own || !demand || is_busy();
            let how = (route != Route::Direct || !may_refuse, demand);
            let may_name = |host| pages.is_alive(host);
            if let Some(host) = spreads.elsewhere((image, len), member, range, how, may_name) {
                // A host that gets them from there need not ask what they should be.
                let sums = is_own.then(|| self.own_sums(member, (image, len), range));
                let sums =
                    sums.and_then(Result::ok).filter(|sums| sums.iter().any(|sum| *sum != UNKNOWN));
                return Err(Refusal::at(Elsewhere { host, sums: sums.unwrap_or_default() }));
            }
        }
        let patience = match (route, urgency) {
            (Route::Direct | Route::Insist, _) => Duration::ZERO,
            (Route::Redirected, Urgency::Demand) => limits.arrival,
            (Route::Redirected, Urgency::Ahead) => limits.arrival_ahead,
        };
        let give_up = Instant::now() + patience;
        let (mut pause, mut looks_left) = (ARRIVAL_PAUSE_MIN, LOOKS_AFTER);
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            let wait = if patience.is_zero() { limits.io } else { left };
            let refusal = match self.read(member, request, began, wait) {
                Err(refusal) if refusal.kind == RefusalKind::NotHere && !self.answer.has_begun => {
                    refusal
                }
                read => return read,
            };
            // What was in flight at the last poll may have come since.
            looks_left = if pages.is_coming(image, range) { LOOKS_AFTER } else { looks_left };
            self.send_before_waiting()?;
            if looks_left == 0 || left <= pause || self.shared.connections.wait_closed(pause) {
                return Err(refusal);
            }
            looks_left -= 1;
            pause = (pause * 2).min(ARRIVAL_PAUSE_MAX);
        }
    }

    /// A background read takes a turn, for which it waits no longer than `wait`.
    fn read(
        &mut self,
        member: u64,
        request: &Request,
        began: Instant,
        wait: Duration,
    ) -> Result<(), Refusal> {
        let Request { image, range, urgency, first, .. } = *request;
        let Shared { pages, answering, .. } = self.shared;
        let bytes = usize::try_from(range.byte_len()).unwrap_or(0);
        self.answer.pages.resize(bytes, 0);
        if let Some(first) = first.filter(|_| {
            let comes_first = urgency == Urgency::Demand && request.first_place().is_some();
            comes_first && pages.has(image, range)
        }) {
            return self.read_first(member, request, first, began);
        }
        let _answering;
        let _turn = match urgency {
            Urgency::Demand => {
                _answering = Answering::begin(answering);
                None
            }
            Urgency::Ahead => Some(self.turn(wait)?),
        };
        pages.read(member, image, range, urgency, &mut self.answer.pages)
    }

    /// The page that comes first is sent before the others are read, which are all here. If one is
    /// not any more by then, the connection ends.
    fn read_first(
        &mut self,
        member: u64,
        request: &Request,
        first: PageIdx,
        began: Instant,
    ) -> Result<(), Refusal> {
        let Request { image, range, urgency, .. } = *request;
        let Shared { pages, answering, .. } = self.shared;
        let reading = Answering::begin(answering);
        pages.read(member, image, first.range(), urgency, &mut self.answer.pages[..PAGE])?;
        self.answer.has_begun = true;
        drop(reading); // a client that takes nothing blocks no other answer
        self.channel.set_timeout(self.shared.limits.io);
        if let Err(why) = self.send_first(request, began) {
            self.ended = Some(why);
            return Ok(());
        }
        let _reading = Answering::begin(answering);
        let mut rest = &mut self.answer.pages[PAGE..];
        for run in [range.until_page(first), range.from_page(PageIdx(first.0 + 1))] {
            let (bytes, later) = rest.split_at_mut(usize::try_from(run.byte_len()).unwrap_or(0));
            rest = later;
            if !run.is_empty() {
                pages.read(member, image, run, urgency, bytes)?;
            }
        }
        Ok(())
    }

    fn find_held(&mut self, member: u64, request: &Request) -> Result<(), Refusal> {
        let range = request.range;
        let bitmap = &mut self.answer.pages;
        bitmap.clear();
        bitmap.resize(usize::try_from(range.len().div_ceil(8)).unwrap_or(0), 0);
        let mut each = |run| proto::set_held(bitmap, range, run);
        self.shared.pages.held(member, request.image, range, &mut each)
    }

    fn sum_up(&mut self, member: u64, request: &Request) -> Result<(), Refusal> {
        let Request { image, range, urgency, .. } = *request;
        let Shared { pages, limits, .. } = self.shared;
        // What another host gave is asked for, too.
        let wanted = pages.asked(member, image, range, urgency);
        let len = wanted.map_or(range.end().0, |wanted| wanted.pages);
        let _turn = match urgency {
            Urgency::Demand => None,
            Urgency::Ahead => Some(self.turn(limits.io)?),
        };
        let all = self.own_sums(member, (image, len), range)?;
        self.answer.pages = all.concat();
        Ok(())
    }

    /// What pages of an image of this many, which was frozen here, should be. Of those that are not
    /// here nothing is known.
    fn own_sums(
        &mut self,
        member: u64,
        (image, len): (ImageName, u64),
        range: PageRange,
    ) -> Result<Vec<Sum>, Refusal> {
        let Shared { pages, spreads, .. } = self.shared;
        let mut own = Vec::new();
        pages.own(member, image, range, &mut |run| own.push(run))?;
        let mut all = spreads.sums(image, range);
        for run in own {
            let from = usize::try_from(run.start().0.saturating_sub(range.start().0));
            let Some(part) = from.ok().and_then(|from| all.get_mut(from..)) else { continue };
            let part = part.iter_mut().take(usize::try_from(run.len()).unwrap_or(0));
            let part: Vec<_> = part.collect();
            if part.iter().all(|sum| **sum != UNKNOWN) {
                continue;
            }
            let bytes = &mut self.answer.pages;
            bytes.resize(usize::try_from(run.byte_len()).unwrap_or(0), 0);
            // What is said of others shall not depend on these.
            if let Err(refusal) = pages.read(member, image, run, Urgency::Ahead, bytes) {
                tracing::debug!(%image, %run, %refusal, "read pages to sum them up");
                continue;
            }
            let sums: Vec<_> = bytes.as_chunks::<PAGE>().0.iter().map(|p| sums::of(p)).collect();
            spreads.summed((image, len), run, &sums);
            part.into_iter().zip(sums).for_each(|(place, sum)| *place = sum);
        }
        Ok(all)
    }

    fn invite(&mut self, member: u64, request: &Request) -> Result<(), Refusal> {
        let invitation = self.shared.pages.invite(member, request.image)?;
        self.answer.pages = invitation.encode();
        Ok(())
    }

    fn refuse(&mut self, sequence: u16, began: Instant, refusal: &Refusal) -> Result<(), Ended> {
        self.shared.counters.refused(refusal.kind);
        let bytes = refusal.encode();
        let head = Head {
            sequence,
            refusal: Some(refusal.kind),
            form: Form::Raw,
            runs: 0,
            bytes: u32::try_from(bytes.len()).unwrap_or(0),
            server_us: us_since(began),
        };
        self.channel.set_timeout(self.shared.limits.io);
        self.channel.put(&[&head.encode()[..], &bytes])?;
        self.send_unless_next()
    }
}

fn bad_request(error: proto::ProtoError) -> Refusal {
    Refusal::new(RefusalKind::BadRequest, error.to_string())
}

fn busy() -> Refusal {
    Refusal::new(RefusalKind::Busy, "many background reads are under way")
}

/// One of the requests that VMs wait for and that are being read, while it lives.
struct Answering<'a>(&'a AtomicUsize);

impl<'a> Answering<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn us_since(began: Instant) -> u32 {
    u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX)
}
