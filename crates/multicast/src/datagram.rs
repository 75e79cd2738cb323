//! What multicast datagrams are, byte by byte; little endian. No I/O, and no keys: the body of one
//! is read here after it was opened.
//!
//! ```text
//! head, 24       0        4         5      6          8         16
//! (in the clear, +--------+---------+------+----------+---------+---------+
//! authenticated) | "VFMC" | version | kind | listener | session | counter |
//!                |        | u8      | u8   | u16      | u64     | u64     |
//!                +--------+---------+------+----------+---------+---------+
//!                kind 1: of the sender, to all (listener 0). 2: of a listener, to the sender
//!
//! body of kind 1, records of 16 and their bytes
//!                +------------+------+---+-------+-----+-----+-------- - - -+
//!                | first page | form | 0 | total | at  | len | bytes        |
//!                | u64        | u8   | u8| u16   | u16 | u16 |              |
//!                +------------+------+---+-------+-----+-----+-------- - - -+
//!                form 0: a page's bytes as they are; 1: as one lz4 block. `total` bytes in all, `len` of them here, from `at` on
//!                form 2: `total` pages of zeros. 3: `first page` is the number of listeners
//!
//! body of kind 2 +---------------+   requests of 16:  +------------+-------+-------+-----+
//!                | received, u64 |                    | first page | pages | flags | 0   |
//!                +---------------+                    | u64        | u32   | u8    | u24 |
//!                                                     +------------+-------+-------+-----+
//!                received: bytes per second, all ones: nothing new. flags 1: demand. 2: requested before
//! ```
//!
//! A page that does not fit into a datagram is cut at multiples of [`PART_BYTES`]. So no datagram
//! is fragmented by IP where links carry 1450 bytes. A fragment is not authenticated, and one that
//! is forged or lost spoils all others. Firewalls drop fragments, and what is put together from
//! them has little room in the kernel.

use std::collections::{HashMap, VecDeque};

use vmfork_image::{PAGES_MAX, PageIdx, PageRange};
use vmfork_policy::transfer::multicast::Request;
use vmfork_transfer::proto::{PAGE, ProtoError, wrong};

pub const HEAD_BYTES: usize = 24;
pub const RECORD_BYTES: usize = 16;
/// Of AES-GCM.
pub const TAG_BYTES: usize = 16;
/// Most bytes of a page in one datagram.
pub const PART_BYTES: usize = PAGE.div_ceil(3);
/// Most datagrams of a page.
pub const PARTS_MAX: u64 = PAGE.div_ceil(PART_BYTES) as u64;
/// Longest body.
pub const BODY_BYTES_MAX: usize = RECORD_BYTES + PART_BYTES;
pub const DATAGRAM_BYTES_MAX: usize = HEAD_BYTES + BODY_BYTES_MAX + TAG_BYTES;
/// With UDP's and IP's own 28: what a link of 1500 carries within VXLAN.
const _: () = assert!(DATAGRAM_BYTES_MAX + 28 <= 1450);

/// Requests of one datagram.
pub const REQUESTS_MAX: usize = (BODY_BYTES_MAX - 8) / RECORD_BYTES;
/// Pages of one of them.
pub const REQUEST_PAGES_MAX: u64 = 512;

const MAGIC: [u8; 4] = *b"VFMC";
const VERSION: u8 = 1;
const FLAG_DEMAND: u8 = 1;
const FLAG_REPEAT: u8 = 2;

/// The sender of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    Sender,
    Listener(u16),
}

/// The beginning of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub from: From,
    pub session: u64,
    /// Of all datagrams under one key, each has another.
    pub counter: u64,
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let (kind, listener) = match self.from {
            From::Sender => (1, 0),
            From::Listener(number) => (2, number),
        };
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        (bytes[4], bytes[5]) = (VERSION, kind);
        bytes[6..8].copy_from_slice(&listener.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..].copy_from_slice(&self.counter.to_le_bytes());
        bytes
    }

    /// `None`: no datagram of this protocol.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let listener = u16::from_le_bytes([bytes[6], bytes[7]]);
        let from = match (bytes[5], listener) {
            (1, 0) => From::Sender,
            (2, number) => From::Listener(number),
            _ => return None,
        };
        let known = bytes[..4] == MAGIC && bytes[4] == VERSION;
        let u64_at = |at| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        known.then(|| Self { from, session: u64_at(8), counter: u64_at(16) })
    }
}

/// How a page's bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Raw,
    Lz4,
}

/// What a sender tells all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    Part {
        page: PageIdx,
        form: Form,
        total: u16,
        at: u16,
        bytes: &'a [u8],
    },
    Zeros(PageRange),
    /// How many hosts listen.
    Listeners(u64),
}

impl Record<'_> {
    pub fn encode_into(&self, body: &mut Vec<u8>) {
        let (first, form, total, at, bytes) = match *self {
            Self::Part { page, form: Form::Raw, total, at, bytes } => (page.0, 0, total, at, bytes),
            Self::Part { page, form: Form::Lz4, total, at, bytes } => (page.0, 1, total, at, bytes),
            Self::Zeros(run) => {
                (run.start().0, 2, u16::try_from(run.len()).unwrap_or(u16::MAX), 0, &[][..])
            }
            Self::Listeners(count) => (count, 3, 0, 0, &[][..]),
        };
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        body.extend(first.to_le_bytes());
        body.extend([form, 0]);
        body.extend(total.to_le_bytes());
        body.extend(at.to_le_bytes());
        body.extend(len.to_le_bytes());
        body.extend_from_slice(bytes);
    }
}

/// The records of a sender's datagram.
///
/// # Errors
/// What is wrong with it.
pub fn decode_records(mut body: &[u8]) -> Result<Vec<Record<'_>>, ProtoError> {
    let mut records = Vec::new();
    while !body.is_empty() {
        let Some((head, rest)) = body.split_first_chunk::<RECORD_BYTES>() else {
            return wrong("half a record");
        };
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let first = head.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let (form, total, at, len) = (head[8], u16_at(10), u16_at(12), u16_at(14));
        let Some((bytes, rest)) = rest.split_at_checked(len.into()) else {
            return wrong(format!("a record of {len} bytes, of which {} came", rest.len()));
        };
        body = rest;
        if head[9] != 0 || form >= 2 && (at, len) != (0, 0) {
            return wrong("something in a record that should be 0");
        }
        records.push(match form {
            0 | 1 => {
                let form = if form == 0 { Form::Raw } else { Form::Lz4 };
                if first >= PAGES_MAX || !is_part(form, total, at, len) {
                    return wrong(format!("bytes {at}+{len} of {total}, of page {first}"));
                }
                Record::Part { page: PageIdx(first), form, total, at, bytes }
            }
            2 => match PageRange::new(PageIdx(first), total.into()) {
                Ok(run) if (1..=REQUEST_PAGES_MAX).contains(&run.len()) => Record::Zeros(run),
                _ => return wrong(format!("{total} pages of zeros from {first}")),
            },
            3 if total == 0 => Record::Listeners(first),
            _ => return wrong(format!("a record of form {form}, which is not known here")),
        });
    }
    Ok(records)
}

/// Whether a page is cut so.
fn is_part(form: Form, total: u16, at: u16, len: u16) -> bool {
    let (total, at) = (usize::from(total), usize::from(at));
    let whole = match form {
        Form::Raw => total == PAGE,
        Form::Lz4 => (1..PAGE).contains(&total),
    };
    whole
        && at.is_multiple_of(PART_BYTES)
        && at < total
        && usize::from(len) == (total - at).min(PART_BYTES)
}

/// What a listener tells the sender.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Asking {
    /// Bytes per second that come in.
    pub received: Option<u64>,
    /// At most [`REQUESTS_MAX`], each of at most [`REQUEST_PAGES_MAX`] pages.
    pub requests: Vec<Request>,
}

impl Asking {
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(8 + self.requests.len() * RECORD_BYTES);
        body.extend(self.received.unwrap_or(u64::MAX).to_le_bytes());
        for Request { pages, demand, repeat } in &self.requests {
            let demand = if *demand { FLAG_DEMAND } else { 0 };
            let repeat = if *repeat { FLAG_REPEAT } else { 0 };
            body.extend(pages.start().0.to_le_bytes());
            body.extend(u32::try_from(pages.len()).unwrap_or(u32::MAX).to_le_bytes());
            body.extend([demand | repeat, 0, 0, 0]);
        }
        body
    }

    /// # Errors
    /// What is wrong with it.
    pub fn decode(body: &[u8]) -> Result<Self, ProtoError> {
        let Some((received, rest)) = body.split_first_chunk() else {
            return wrong("half a word of a listener");
        };
        let (requests, half) = rest.as_chunks::<RECORD_BYTES>();
        if !half.is_empty() || requests.len() > REQUESTS_MAX {
            return wrong(format!("requests of {} bytes", rest.len()));
        }
        let requests = requests.iter().map(|bytes| {
            let first = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            let pages = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
            let (flags, pages) = (bytes[12], u64::from(pages));
            let is_known = flags & !(FLAG_DEMAND | FLAG_REPEAT) == 0 && bytes[13..] == [0; 3];
            match PageRange::new(PageIdx(first), pages) {
                Ok(run) if is_known && (1..=REQUEST_PAGES_MAX).contains(&pages) => Ok(Request {
                    pages: run,
                    demand: flags & FLAG_DEMAND != 0,
                    repeat: flags & FLAG_REPEAT != 0,
                }),
                _ => wrong(format!("a request for {pages} pages from {first}")),
            }
        });
        let received = u64::from_le_bytes(*received);
        Ok(Self {
            received: (received != u64::MAX).then_some(received),
            requests: requests.collect::<Result<_, _>>()?,
        })
    }
}

/// Most pages of which a part is kept until the others come: those of the oldest are forgotten
/// then, and asked for again.
pub const PARTIAL_PAGES_MAX: usize = 1024;

/// Puts pages together from parts, in whatever order they come.
#[derive(Debug, Default)]
pub struct Assembler {
    partial: HashMap<PageIdx, Partial>,
    /// In the order in which they were begun; some are done.
    begun: VecDeque<PageIdx>,
}

#[derive(Debug)]
struct Partial {
    form: Form,
    bytes: Vec<u8>,
    /// Which parts have come, a bit each.
    came: u8,
}

impl Assembler {
    /// Part of a page, as it was read from a datagram. → the page, if it was the last.
    ///
    /// # Errors
    /// The parts are no page.
    pub fn add(
        &mut self,
        page: PageIdx,
        form: Form,
        total: u16,
        at: u16,
        bytes: &[u8],
    ) -> Result<Option<Box<[u8; PAGE]>>, ProtoError> {
        let total = usize::from(total);
        if bytes.len() == total {
            self.partial.remove(&page);
            return unpack(form, bytes).map(Some);
        }
        let is_same = |known: &Partial| known.form == form && known.bytes.len() == total;
        if !self.partial.get(&page).is_some_and(is_same) {
            // It is sent in another form now than before.
            let begun = Partial { form, bytes: vec![0; total], came: 0 };
            if self.partial.insert(page, begun).is_none() {
                self.begun.push_back(page);
                self.forget();
            }
        }
        let Some(partial) = self.partial.get_mut(&page) else { return Ok(None) };
        let at = usize::from(at);
        if let Some(place) = partial.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
            partial.came |= 1 << (at / PART_BYTES);
        }
        if partial.came.count_ones() as usize != total.div_ceil(PART_BYTES) {
            return Ok(None);
        }
        let Some(whole) = self.partial.remove(&page) else { return Ok(None) };
        unpack(whole.form, &whole.bytes).map(Some)
    }

    /// Pages of which parts have come.
    pub fn partial_pages(&self) -> usize {
        self.partial.len()
    }

    fn forget(&mut self) {
        while self.begun.len() > PARTIAL_PAGES_MAX {
            if let Some(oldest) = self.begun.pop_front() {
                self.partial.remove(&oldest);
            }
        }
    }
}

fn unpack(form: Form, bytes: &[u8]) -> Result<Box<[u8; PAGE]>, ProtoError> {
    let mut page = Box::new([0; PAGE]);
    match form {
        Form::Raw if bytes.len() == PAGE => page.copy_from_slice(bytes),
        Form::Raw => wrong(format!("a page of {} bytes", bytes.len()))?,
        Form::Lz4 => match lz4_flex::block::decompress_into(bytes, &mut page[..]) {
            Ok(PAGE) => {}
            Ok(len) => wrong(format!("a compressed page of {len} bytes"))?,
            Err(error) => wrong(format!("a compressed page that is none: {error}"))?,
        },
    }
    Ok(page)
}

/// After a page that did not get smaller, up to this many are sent without a try.
const SKIP_MAX: u32 = 64;

/// Cuts pages into bodies of datagrams.
#[derive(Debug, Default)]
pub struct Cutter {
    compressed: Vec<u8>,
    /// Pages in a row that did not get smaller.
    in_vain: u32,
    skip: u32,
}

impl Cutter {
    /// The pages of `range` with these bytes, in bodies: zeros as a number, small ones together,
    /// compressed if fewer datagrams are enough then.
    pub fn cut(&mut self, range: PageRange, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut bodies = Bodies::default();
        let mut zeros: Option<PageRange> = None;
        for (page, bytes) in range.pages().zip(bytes.as_chunks::<PAGE>().0) {
            if bytes[..16] == [0; 16] && *bytes == [0; PAGE] {
                zeros = Some(match zeros {
                    Some(run) => PageRange::between(run.start(), PageIdx(page.0 + 1)),
                    None => page.range(),
                });
                continue;
            }
            zeros.take().into_iter().for_each(|run| bodies.push(Record::Zeros(run)));
            let (form, bytes): (_, &[u8]) = match self.compress(bytes) {
                true => (Form::Lz4, &self.compressed),
                false => (Form::Raw, bytes),
            };
            let total = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
            for (part, bytes) in (0u16..).zip(bytes.chunks(PART_BYTES)) {
                let at = part * u16::try_from(PART_BYTES).unwrap_or(u16::MAX);
                bodies.push(Record::Part { page, form, total, at, bytes });
            }
        }
        zeros.into_iter().for_each(|run| bodies.push(Record::Zeros(run)));
        bodies.0
    }

    /// → whether `compressed` takes fewer datagrams.
    fn compress(&mut self, page: &[u8; PAGE]) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.compressed.resize(lz4_flex::block::get_maximum_output_size(PAGE), 0);
        match lz4_flex::block::compress_into(page, &mut self.compressed) {
            Ok(len) if len <= PART_BYTES * 2 => {
                self.compressed.truncate(len);
                self.in_vain = 0;
                true
            }
            _ => {
                self.in_vain = self.in_vain.saturating_add(1);
                self.skip = (1 << self.in_vain.min(SKIP_MAX.ilog2())) - 1;
                false
            }
        }
    }
}

/// Bodies, each as full as it gets.
#[derive(Debug, Default)]
struct Bodies(Vec<Vec<u8>>);

impl Bodies {
    fn push(&mut self, record: Record<'_>) {
        let bytes = match record {
            Record::Part { bytes, .. } => bytes.len(),
            _ => 0,
        };
        let fits = |body: &&mut Vec<u8>| body.len() + RECORD_BYTES + bytes <= BODY_BYTES_MAX;
        match self.0.last_mut().filter(fits) {
            Some(last) => record.encode_into(last),
            None => {
                let mut body = Vec::with_capacity(BODY_BYTES_MAX + TAG_BYTES);
                record.encode_into(&mut body);
                self.0.push(body);
            }
        }
    }
}
