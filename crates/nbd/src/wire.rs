//! The numbers of the NBD protocol, and its messages as bytes.
//!
//! Source: the protocol's document, `doc/proto.md` of the NBD project. Names are those of that
//! document.
//!
//! Left to others: what is answered ([`crate::handshake`], [`crate::request`]).

/// Begins the greeting: "NBDMAGIC".
pub(crate) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Begins each option: "IHAVEOPT".
pub(crate) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Begins each reply to an option.
pub(crate) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Begins each request.
const REQUEST: u32 = 0x2560_9513;
/// Begins a simple reply.
pub(crate) const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub(crate) const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Flags of the greeting and its answer.
pub(crate) mod hello {
    pub(crate) const FIXED_NEWSTYLE: u16 = 1;
    pub(crate) const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub(crate) mod reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR + 1;
    pub(crate) const ERR_INVALID: u32 = ERROR + 3;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR + 6;
    pub(crate) const ERR_TOO_BIG: u32 = ERROR + 9;
}

/// What an option's reply tells of an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub(crate) mod can {
    pub(crate) const HAS_FLAGS: u16 = 1;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const FLUSH: u16 = 1 << 2;
    pub(crate) const FUA: u16 = 1 << 3;
    pub(crate) const TRIM: u16 = 1 << 5;
    pub(crate) const WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const FAST_ZERO: u16 = 1 << 11;
}

/// Requests.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub(crate) mod flag {
    pub(crate) const FUA: u16 = 1;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Types of chunks of structured replies.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR: u16 = (1 << 15) + 1;
    /// The last one of a reply.
    pub(crate) const DONE: u16 = 1;
}

/// What `base:allocation` says of bytes.
pub(crate) mod allocation {
    pub(crate) const HOLE: u32 = 1;
    pub(crate) const ZERO: u32 = 2;
}

/// Bytes of an option's head: magic, option, length.
pub(crate) const OPTION_HEAD_BYTES: usize = 16;
/// Bytes of a request, without what it writes.
pub const REQUEST_BYTES: usize = 28;

/// Numbers at the front of some bytes, as the network has them: big-endian.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A text whose length comes first.
    pub(crate) fn text(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }
}

/// What a server says first.
pub(crate) fn greeting() -> Vec<u8> {
    let flags = hello::FIXED_NEWSTYLE | hello::NO_ZEROES;
    [&NBDMAGIC.to_be_bytes()[..], &IHAVEOPT.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// An option, as a client says it.
pub(crate) fn option(option: u32, content: &[u8]) -> Vec<u8> {
    let (magic, len) = (IHAVEOPT.to_be_bytes(), length(content).to_be_bytes());
    [&magic[..], &option.to_be_bytes(), &len, content].concat()
}

/// A reply to an option.
pub(crate) fn option_reply(option: u32, kind: u32, content: &[u8]) -> Vec<u8> {
    [
        &OPTION_REPLY.to_be_bytes()[..],
        &option.to_be_bytes(),
        &kind.to_be_bytes(),
        &length(content).to_be_bytes(),
        content,
    ]
    .concat()
}

/// A request's head, as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawRequest {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    /// The client's own mark, which the reply carries.
    pub(crate) cookie: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u32,
}

impl RawRequest {
    /// `None`: the bytes do not begin a request.
    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut fields = Fields(bytes);
        (fields.u32()? == REQUEST).then_some(())?;
        Some(Self {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset_bytes: fields.u64()?,
            len_bytes: fields.u32()?,
        })
    }
}

impl RawRequest {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut head = [0; REQUEST_BYTES];
        head[..4].copy_from_slice(&REQUEST.to_be_bytes());
        head[4..6].copy_from_slice(&self.flags.to_be_bytes());
        head[6..8].copy_from_slice(&self.command.to_be_bytes());
        head[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        head[16..24].copy_from_slice(&self.offset_bytes.to_be_bytes());
        head[24..].copy_from_slice(&self.len_bytes.to_be_bytes());
        head
    }
}

/// A simple reply's head. The bytes of a read follow it if there was no error.
pub(crate) fn simple_reply(error: u32, cookie: u64) -> [u8; 16] {
    let mut head = [0; 16];
    head[..4].copy_from_slice(&SIMPLE_REPLY.to_be_bytes());
    head[4..8].copy_from_slice(&error.to_be_bytes());
    head[8..].copy_from_slice(&cookie.to_be_bytes());
    head
}

/// The head of a chunk whose content has `len` bytes.
pub(crate) fn chunk_head(flags: u16, kind: u16, cookie: u64, len: u32) -> [u8; 20] {
    let mut head = [0; 20];
    head[..4].copy_from_slice(&STRUCTURED_REPLY.to_be_bytes());
    head[4..6].copy_from_slice(&flags.to_be_bytes());
    head[6..8].copy_from_slice(&kind.to_be_bytes());
    head[8..16].copy_from_slice(&cookie.to_be_bytes());
    head[16..].copy_from_slice(&len.to_be_bytes());
    head
}

/// Of what this side says itself, which is short.
fn length(content: &[u8]) -> u32 {
    u32::try_from(content.len()).unwrap_or(u32::MAX)
}
