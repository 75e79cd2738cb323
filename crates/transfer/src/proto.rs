//! What goes over a connection, byte by byte; little endian. No I/O.
//!
//! ```text
//! client, once   "VFPG"  version, u16  0, u16
//!
//! request, 32    0        8        16           24       28   29      30
//!                +--------+--------+------------+--------+----+-------+----------+
//!                | host   | image  | first page | pages  | op | flags | sequence |
//!                | u64    | u64    | u64        | u32    | u8 | u8    | u16      |
//!                +--------+--------+------------+--------+----+-------+----------+
//!                op 1: read, of 1 to 512 pages. 2: which are held, of 1 to 262,144. 3: an invitation to the image's group; 1 page. 4: sums, of 1 to 512.
//!                5: read, one of them first: pages is a u16 then, 2 to 512, and behind it is the place of that one, u16
//!                flags 1: a background read (ahead). 2: may be compressed. 4: not from elsewhere. 8: they are on their way there
//!
//! answer, 16     0          2        3      4       6     8         12
//!                +----------+--------+------+-------+-----+---------+-----------+------- - - -+----- - - -+
//!                | sequence | status | form | runs  | 0   | bytes   | server_us | runs × u16  | bytes     |
//!                | u16      | u8     | u8   | u16   | u16 | u32     | u32       |             |           |
//!                +----------+--------+------+-------+-----+---------+-----------+------- - - -+----- - - -+
//!                status 0: pages, or what is held. Else the kind of a refusal, and the bytes are its text (UTF-8); of `elsewhere` a host's id, u64, and
//!                then the sum of each page that was asked for, or nothing
//!                run: 0x8000 | pages of zeros, or pages whose bytes follow
//!                form 0: those bytes as they are. 1: as one lz4 block
//! ```
//!
//! A read with one first has two answers: that page, then the others in their order; or one, a
//! refusal.
//!
//! The runs of an answer to `read` are as many pages as were requested. The answer to `held` has no
//! runs. Its bytes are a bitmap: a bit per page from the first on, the lowest bit of a byte first.
//! A bit is 0 where there are no pages. A sequence is its connection's own; an answer repeats that
//! of its request. `server_us`: how long the server took, until it began to send.
//!
//! Anything else ends the connection.

use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange};
pub use vmfork_policy::transfer::Urgency;
pub use vmfork_policy::transfer::swarm::Route;

use self::invitation::INVITATION_BYTES;
pub use self::invitation::{Invitation, KEY_BYTES, Key, local_group};
pub(crate) use self::refusal::Elsewhere;
pub use self::refusal::{REFUSAL_BYTES_MAX, Refusal, RefusalKind};
use crate::sums::SUM_BYTES;

mod invitation;
mod refusal;

/// What a client sends first: which protocol, and its version.
pub const PREAMBLE: [u8; 8] = [b'V', b'F', b'P', b'G', VERSION, 0, 0, 0];
const VERSION: u8 = 4;

/// Most pages of one read: a block's.
pub const READ_PAGES_MAX: u64 = 512;
/// Most pages of which is asked at a time whether they are held: 1 GiB, a bitmap of 32 KiB.
pub const HELD_PAGES_MAX: u64 = 1 << 18;

pub const REQUEST_BYTES: usize = 32;
pub const HEAD_BYTES: usize = 16;
/// A page, as an array's length.
pub const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);

const ZERO_RUN: u16 = 0x8000;
const FLAG_AHEAD: u8 = 1;
const FLAG_MAY_COMPRESS: u8 = 2;
const FLAG_INSIST: u8 = 4;
const FLAG_REDIRECTED: u8 = 8;

/// Bytes that are not what the protocol has in their place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProtoError(String);

/// # Errors
/// Always: what is wrong.
pub fn wrong<T>(what: impl Into<String>) -> Result<T, ProtoError> {
    Err(ProtoError(what.into()))
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// The bytes of pages.
    Read,
    /// Which of them the host has.
    Held,
    /// What they should be: the sum of each.
    Sums,
    /// To hear the group that they are sent to.
    Invite,
}

impl Op {
    const fn pages_max(self) -> u64 {
        match self {
            Self::Read => READ_PAGES_MAX,
            Self::Held => HELD_PAGES_MAX,
            Self::Sums => READ_PAGES_MAX,
            Self::Invite => 1,
        }
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    pub image: ImageName,
    /// Not empty, and no more than its operation allows.
    pub range: PageRange,
    pub op: Op,
    pub urgency: Urgency,
    pub route: Route,
    pub may_compress: bool,
    /// Of a read of several pages: the demanded one, which is answered before the others.
    pub first: Option<PageIdx>,
    pub sequence: u16,
}

impl Request {
    /// How many of the pages come before the first one.
    pub(crate) fn first_place(&self) -> Option<u64> {
        let first = self.first.filter(|_| self.op == Op::Read && self.range.len() > 1)?;
        first.0.checked_sub(self.range.start().0).filter(|place| *place < self.range.len())
    }

    /// The same for as many pages as one of its answers has.
    pub(crate) fn part(&self, pages: u64) -> Self {
        Self { range: self.range.truncate(pages), first: None, ..*self }
    }

    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.image.host.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.image.image.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.range.start().0.to_le_bytes());
        let pages = u32::try_from(self.range.len()).unwrap_or(u32::MAX);
        let place = self.first_place().and_then(|place| u32::try_from(place).ok());
        let word = pages | place.unwrap_or(0) << 16;
        bytes[24..28].copy_from_slice(&word.to_le_bytes());
        bytes[28] = match self.op {
            Op::Read if place.is_some() => 5,
            Op::Read => 1,
            Op::Held => 2,
            Op::Sums => 4,
            Op::Invite => 3,
        };
        let ahead = if self.urgency == Urgency::Ahead { FLAG_AHEAD } else { 0 };
        let route = match self.route {
            Route::Direct => 0,
            Route::Insist => FLAG_INSIST,
            Route::Redirected => FLAG_REDIRECTED,
        };
        bytes[29] = ahead | route | if self.may_compress { FLAG_MAY_COMPRESS } else { 0 };
        bytes[30..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, ProtoError> {
        let image = ImageName { host: u64_at(bytes, 0), image: u64_at(bytes, 8) };
        let first = u64_at(bytes, 16);
        let (pages, place) = match bytes[28] {
            5 => (u64::from(u16_at(bytes, 24)), Some(u64::from(u16_at(bytes, 26)))),
            _ => (u64::from(u32_at(bytes, 24)), None),
        };
        let op = match bytes[28] {
            1 | 5 => Op::Read,
            2 => Op::Held,
            4 => Op::Sums,
            3 => Op::Invite,
            other => return wrong(format!("request {other}, which is not known here")),
        };
        let flags = bytes[29];
        let route = match flags & (FLAG_INSIST | FLAG_REDIRECTED) {
            0 => Some(Route::Direct),
            FLAG_INSIST => Some(Route::Insist),
            FLAG_REDIRECTED => Some(Route::Redirected),
            _ => None,
        };
        let known = FLAG_AHEAD | FLAG_MAY_COMPRESS | FLAG_INSIST | FLAG_REDIRECTED;
        let Some(route) = route.filter(|_| flags & !known == 0) else {
            return wrong(format!("flags {flags:#x}, which are not known here"));
        };
        if pages == 0 || pages > op.pages_max() {
            let most = op.pages_max();
            return wrong(format!("{pages} pages at a time; it must be 1 to {most}"));
        }
        let Ok(range) = PageRange::new(PageIdx(first), pages) else {
            return wrong(format!("{pages} pages from {first}, which no image has"));
        };
        if let Some(place) = place.filter(|place| pages < 2 || *place >= pages) {
            return wrong(format!("page {place} first, of {pages}"));
        }
        let ahead = flags & FLAG_AHEAD != 0;
        Ok(Self {
            image,
            range,
            op,
            urgency: if ahead { Urgency::Ahead } else { Urgency::Demand },
            route,
            may_compress: flags & FLAG_MAY_COMPRESS != 0,
            first: place.map(|place| PageIdx(first + place)),
            sequence: u16_at(bytes, 30),
        })
    }
}

/// Whether the first bytes of a client are of this protocol.
///
/// # Errors
/// What they are instead.
pub fn check_preamble(bytes: &[u8; 8]) -> Result<(), ProtoError> {
    if bytes[..4] != PREAMBLE[..4] {
        let found = bytes[..4].escape_ascii();
        return wrong(format!("no client for pages: it begins with `{found}`"));
    }
    match u16_at(bytes, 4) {
        version if version != u16::from(VERSION) => {
            wrong(format!("version {version} of the protocol; here is {VERSION}"))
        }
        _ if bytes[6..] != [0, 0] => wrong("something behind the version that should be 0"),
        _ => Ok(()),
    }
}

/// How the bytes of pages are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Raw,
    Lz4,
}

/// The beginning of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub sequence: u16,
    /// `None`: what was asked for follows.
    pub refusal: Option<RefusalKind>,
    pub form: Form,
    /// How many runs follow, and then how many bytes.
    pub runs: u16,
    pub bytes: u32,
    pub server_us: u32,
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..2].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[2] = self.refusal.map_or(0, RefusalKind::status);
        bytes[3] = match self.form {
            Form::Raw => 0,
            Form::Lz4 => 1,
        };
        bytes[4..6].copy_from_slice(&self.runs.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.server_us.to_le_bytes());
        bytes
    }

    /// The head of an answer to `request`: what follows it is no longer than an answer to that may
    /// be.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; HEAD_BYTES], request: &Request) -> Result<Self, ProtoError> {
        let sequence = u16_at(bytes, 0);
        if sequence != request.sequence {
            let asked = request.sequence;
            return wrong(format!("an answer to request {sequence}, and {asked} was asked"));
        }
        let refusal = match bytes[2] {
            0 => None,
            status => match RefusalKind::ALL.into_iter().find(|kind| kind.status() == status) {
                Some(kind) => Some(kind),
                None => return wrong(format!("status {status}, which is not known here")),
            },
        };
        let form = match bytes[3] {
            0 => Form::Raw,
            1 => Form::Lz4,
            form => return wrong(format!("bytes of form {form}, which is not known here")),
        };
        if u16_at(bytes, 6) != 0 {
            return wrong("something behind the number of runs that should be 0");
        }
        let (runs, len) = (u16_at(bytes, 4), u32_at(bytes, 8));
        let head = Self { sequence, refusal, form, runs, bytes: len, server_us: u32_at(bytes, 12) };
        let pages = request.range.len();
        let (runs_max, bytes_max) = match (refusal, request.op) {
            (Some(kind), op) => (0, kind.bytes_max(op, pages)),
            (None, Op::Read) if request.first_place().is_some() => (1, PAGE_BYTES),
            (None, Op::Read) => (pages, pages * PAGE_BYTES),
            (None, Op::Held) => (0, pages.div_ceil(8)),
            (None, Op::Sums) => (0, pages * SUM_BYTES as u64),
            (None, Op::Invite) => (0, INVITATION_BYTES as u64),
        };
        if u64::from(runs) > runs_max || u64::from(len) > bytes_max {
            return wrong(format!("{runs} runs and {len} bytes in answer to {pages} pages"));
        }
        let may_be_lz4 = refusal.is_none() && request.op == Op::Read && request.may_compress;
        if form == Form::Lz4 && !may_be_lz4 {
            return wrong("something compressed, which was not asked for");
        }
        Ok(head)
    }
}

/// Some pages of an answer, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    Zero(u16),
    /// Their bytes follow.
    Bytes(u16),
}

impl Run {
    pub const fn pages(self) -> u16 {
        match self {
            Self::Zero(pages) | Self::Bytes(pages) => pages,
        }
    }

    pub const fn encode(self) -> [u8; 2] {
        match self {
            Self::Zero(pages) => (pages | ZERO_RUN).to_le_bytes(),
            Self::Bytes(pages) => pages.to_le_bytes(),
        }
    }

    const fn decode(word: u16) -> Self {
        match word & ZERO_RUN {
            0 => Self::Bytes(word),
            _ => Self::Zero(word & !ZERO_RUN),
        }
    }
}

/// The runs of an answer of `pages` pages.
///
/// # Errors
/// They are not that many pages.
pub fn decode_runs(bytes: &[u8], pages: u64) -> Result<Vec<Run>, ProtoError> {
    let words = bytes.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word));
    let runs: Vec<Run> = words.map(Run::decode).collect();
    if runs.iter().any(|run| run.pages() == 0) {
        return wrong("a run of no pages");
    }
    match runs.iter().map(|run| u64::from(run.pages())).sum::<u64>() {
        sum if sum == pages => Ok(runs),
        sum => wrong(format!("runs of {sum} pages in answer to {pages}")),
    }
}

/// Which pages of `range` a bitmap has, as runs.
///
/// # Errors
/// It is of another length, or has more pages.
pub fn decode_held(bytes: &[u8], range: PageRange) -> Result<Vec<PageRange>, ProtoError> {
    if bytes.len() as u64 != range.len().div_ceil(8) {
        return wrong(format!("a bitmap of {} bytes for {} pages", bytes.len(), range.len()));
    }
    let last_bits = range.len() % 8;
    if last_bits > 0 && bytes.last().is_some_and(|last| last >> last_bits != 0) {
        return wrong("a bitmap with more pages than it was asked for");
    }
    let mut held: Vec<PageRange> = Vec::new();
    for (first, chunk) in (range.start().0..).step_by(64).zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let mut word = u64::from_le_bytes(word);
        let mut at = first;
        while word != 0 {
            let (gap, set) =
                (word.trailing_zeros(), (word >> word.trailing_zeros()).trailing_ones());
            let start = at + u64::from(gap);
            let run = PageRange::between(PageIdx(start), PageIdx(start + u64::from(set)));
            match held.last_mut() {
                Some(last) if last.end() == run.start() => {
                    *last = PageRange::between(last.start(), run.end());
                }
                _ => held.push(run),
            }
            at = run.end().0;
            word = word.checked_shr(gap + set).unwrap_or(0);
        }
    }
    Ok(held)
}

/// The pages of `run` in the bitmap of `range`.
pub(crate) fn set_held(bitmap: &mut [u8], range: PageRange, run: PageRange) {
    let run = run.intersect(&range);
    let place = |page: PageIdx| page.0 - range.start().0;
    let (from, to) = (place(run.start().max(range.start())), place(run.end().max(range.start())));
    let mut at = from;
    while at < to {
        // Up to the end of its byte.
        let bits = (8 - at % 8).min(to - at);
        let mask = (0xff_u8 >> (8 - bits)) << (at % 8);
        let Some(byte) = usize::try_from(at / 8).ok().and_then(|at| bitmap.get_mut(at)) else {
            return;
        };
        *byte |= mask;
        at += bits;
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
