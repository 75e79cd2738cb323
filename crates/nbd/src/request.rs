//! Requests of a client, checked, and the replies to them as bytes.
//!
//! Promises: a [`Request`] lies within the export and is at most [`BLOCK_BYTES_MAX`] long where it
//! carries bytes. What is refused names the reason as an NBD error.
//!
//! Left to others: what is read and written. No I/O.

use crate::buffer::Out;
pub use crate::handshake::BLOCK_BYTES_MAX;
use crate::handshake::{Agreed, BLOCK_BYTES_MIN, Export, Flaw, allocation_context};
use crate::wire::{self, REQUEST_BYTES, RawRequest, allocation, chunk, command, flag};

/// Longest part of an export that one `BLOCK_STATUS` describes, in extents.
const EXTENTS_MAX: usize = 8192;

/// Errors as the protocol numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NbdError {
    /// A write to what is read-only.
    Perm,
    /// It can't be had, or not be kept.
    Io,
    Invalid,
    /// The host or the VM's quota has no space left.
    NoSpace,
    /// It can't be done quickly, as was asked.
    NotSupported,
    /// The server ends.
    Shutdown,
}

impl NbdError {
    const fn number(self) -> u32 {
        match self {
            Self::Perm => 1,
            Self::Io => 5,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::NotSupported => 95,
            Self::Shutdown => 108,
        }
    }

    /// What a server's number means. One that is not known is a failure like any other.
    pub(crate) const fn of(number: u32) -> Self {
        match number {
            1 => Self::Perm,
            22 | 75 => Self::Invalid,
            28 => Self::NoSpace,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

/// Bytes of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub offset_bytes: u64,
    pub len_bytes: u32,
}

impl Span {
    /// Where it ends. A [`Request`]'s span ends within its export.
    pub const fn end(self) -> u64 {
        self.offset_bytes + self.len_bytes as u64
    }
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Read {
        span: Span,
        /// In one chunk.
        whole: bool,
    },
    /// Its bytes come next.
    Write {
        span: Span,
        /// It is durable before it is answered.
        durable: bool,
    },
    /// All that was answered is durable before it is answered.
    Flush,
    /// The bytes are not needed any more.
    Trim { span: Span, durable: bool },
    WriteZeroes {
        span: Span,
        durable: bool,
        /// Space may be given back.
        may_punch: bool,
    },
    /// Which bytes are there. `one`: the first extent only.
    BlockStatus { span: Span, one: bool },
    /// It ends the connection, and gets no reply.
    Disconnect,
}

impl Command {
    /// As a client says it, without the bytes that a write writes.
    pub(crate) fn encode(&self, cookie: u64) -> [u8; REQUEST_BYTES] {
        let whole = Span { offset_bytes: 0, len_bytes: 0 };
        let flag = |flag, is_set: bool| if is_set { flag } else { 0 };
        let (command, span, flags) = match *self {
            Self::Read { span, whole } => (command::READ, span, flag(flag::DF, whole)),
            Self::Write { span, durable } => (command::WRITE, span, flag(flag::FUA, durable)),
            Self::Flush => (command::FLUSH, whole, 0),
            Self::Trim { span, durable } => (command::TRIM, span, flag(flag::FUA, durable)),
            Self::WriteZeroes { span, durable, may_punch } => {
                let flags = flag(flag::FUA, durable) | flag(flag::NO_HOLE, !may_punch);
                (command::WRITE_ZEROES, span, flags)
            }
            Self::BlockStatus { span, one } => {
                (command::BLOCK_STATUS, span, flag(flag::REQ_ONE, one))
            }
            Self::Disconnect => (command::DISC, whole, 0),
        };
        let Span { offset_bytes, len_bytes } = span;
        RawRequest { flags, command, cookie, offset_bytes, len_bytes }.encode()
    }
}

/// A checked request, or why it is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The client's own mark, which the reply carries.
    pub cookie: u64,
    pub command: Result<Command, NbdError>,
    /// How many bytes follow the head, also if it is refused.
    pub payload_bytes: u32,
}

impl Request {
    /// # Errors
    /// The connection can't go on.
    pub fn decode(
        bytes: &[u8; REQUEST_BYTES],
        export: &Export,
        agreed: Agreed,
    ) -> Result<Self, Flaw> {
        let raw = RawRequest::decode(bytes).ok_or(Flaw::RequestMagic)?;
        let payload_bytes = match raw.command {
            command::WRITE if raw.len_bytes > BLOCK_BYTES_MAX => {
                return Err(Flaw::WriteLength { len: raw.len_bytes });
            }
            command::WRITE => raw.len_bytes,
            _ => 0,
        };
        Ok(Self { cookie: raw.cookie, command: check(&raw, export, agreed), payload_bytes })
    }
}

fn check(raw: &RawRequest, export: &Export, agreed: Agreed) -> Result<Command, NbdError> {
    let (takes, writes) = match raw.command {
        command::READ => (flag::DF, false),
        command::WRITE | command::TRIM => (flag::FUA, true),
        command::WRITE_ZEROES => (flag::FUA | flag::NO_HOLE | flag::FAST_ZERO, true),
        command::BLOCK_STATUS if agreed.allocation => (flag::REQ_ONE, false),
        command::FLUSH => (0, false),
        command::DISC => return Ok(Command::Disconnect),
        _ => return Err(NbdError::Invalid),
    };
    // FUA is allowed, and means nothing, where nothing is written.
    if raw.flags & !(takes | flag::FUA) != 0 {
        return Err(NbdError::Invalid);
    }
    if raw.command == command::FLUSH {
        return if raw.offset_bytes == 0 && raw.len_bytes == 0 {
            Ok(Command::Flush)
        } else {
            Err(NbdError::Invalid)
        };
    }
    if writes && export.read_only {
        return Err(NbdError::Perm);
    }
    let span = Span { offset_bytes: raw.offset_bytes, len_bytes: raw.len_bytes };
    let aligned = |bytes: u64| bytes.is_multiple_of(u64::from(BLOCK_BYTES_MIN));
    let end = raw.offset_bytes.checked_add(u64::from(raw.len_bytes)).ok_or(NbdError::Invalid)?;
    if end > export.size_bytes {
        return Err(if writes { NbdError::NoSpace } else { NbdError::Invalid });
    }
    if raw.len_bytes == 0 || !aligned(raw.offset_bytes) || !aligned(u64::from(raw.len_bytes)) {
        return Err(NbdError::Invalid);
    }
    let has = |bit| raw.flags & bit != 0;
    let durable = has(flag::FUA);
    match raw.command {
        command::READ if raw.len_bytes > BLOCK_BYTES_MAX => Err(NbdError::Invalid),
        command::READ => Ok(Command::Read { span, whole: has(flag::DF) }),
        command::WRITE => Ok(Command::Write { span, durable }),
        command::TRIM => Ok(Command::Trim { span, durable }),
        command::WRITE_ZEROES => {
            Ok(Command::WriteZeroes { span, durable, may_punch: !has(flag::NO_HOLE) })
        }
        _ => Ok(Command::BlockStatus { span, one: has(flag::REQ_ONE) }),
    }
}

/// What some bytes of an export are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub len_bytes: u64,
    /// They are zeros that take no space.
    pub zero: bool,
}

/// Replies to one client, in the form that it agreed to.
#[derive(Debug, Clone, Copy)]
pub struct Replies(pub Agreed);

impl Replies {
    /// Of a request that carried out all, and tells nothing.
    pub fn done(out: &mut Out, cookie: u64) {
        out.put(&wire::simple_reply(0, cookie));
    }

    /// Of a request that failed. `reads`: it was a read or a status, whose replies are chunks.
    pub fn failed(self, out: &mut Out, cookie: u64, error: NbdError, reads: bool) {
        if !(reads && self.0.structured) {
            return out.put(&wire::simple_reply(error.number(), cookie));
        }
        out.put(&wire::chunk_head(chunk::DONE, chunk::ERROR, cookie, 6));
        out.put(&error.number().to_be_bytes());
        out.put(&0_u16.to_be_bytes());
    }

    /// Of a read of `extents`, which follow each other from `span` on. `fill` gets each run that is
    /// not zeros, and puts all its bytes into the reply.
    ///
    /// # Errors
    /// Those of `fill`. A part of the reply is in `out` then.
    pub fn read<E>(
        self,
        out: &mut Out,
        cookie: u64,
        (span, whole): (Span, bool),
        extents: &[Extent],
        mut fill: impl FnMut(Span, &mut Out) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.0.structured {
            out.put(&wire::simple_reply(0, cookie));
        } else if whole {
            data_head(out, chunk::DONE, cookie, span);
        }
        let one = !self.0.structured || whole;
        let mut offset_bytes = span.offset_bytes;
        for (number, extent) in extents.iter().enumerate() {
            let last = number + 1 == extents.len();
            let flags = if last { chunk::DONE } else { 0 };
            // Extents of a span are no longer than it is.
            let len_bytes = u32::try_from(extent.len_bytes).unwrap_or(u32::MAX);
            let part = Span { offset_bytes, len_bytes };
            if extent.zero && !one {
                out.put(&wire::chunk_head(flags, chunk::OFFSET_HOLE, cookie, 12));
                out.put(&offset_bytes.to_be_bytes());
                out.put(&len_bytes.to_be_bytes());
            } else {
                if !one {
                    data_head(out, flags, cookie, part);
                }
                if extent.zero {
                    out.space(len_bytes as usize).fill(0);
                } else {
                    fill(part, out)?;
                }
            }
            offset_bytes = part.end();
        }
        Ok(())
    }

    /// Of a request for the status of what `extents` are, from its start on.
    pub fn status(out: &mut Out, cookie: u64, extents: &[Extent]) {
        let told = extents.len().min(EXTENTS_MAX);
        let len = u32::try_from(4 + 8 * told).unwrap_or(u32::MAX);
        out.put(&wire::chunk_head(chunk::DONE, chunk::BLOCK_STATUS, cookie, len));
        out.put(&allocation_context().to_be_bytes());
        for Extent { len_bytes, zero } in extents.iter().take(told) {
            let flags = if *zero { allocation::HOLE | allocation::ZERO } else { 0 };
            out.put(&u32::try_from(*len_bytes).unwrap_or(u32::MAX).to_be_bytes());
            out.put(&flags.to_be_bytes());
        }
    }
}

/// The head of a chunk of data, up to its bytes.
fn data_head(out: &mut Out, flags: u16, cookie: u64, span: Span) {
    out.put(&wire::chunk_head(flags, chunk::OFFSET_DATA, cookie, 8 + span.len_bytes));
    out.put(&span.offset_bytes.to_be_bytes());
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
