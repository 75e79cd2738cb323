//! Replies of a server, put together from their chunks.

use std::io::{self, Read};

use super::Answer;
use crate::request::{Command, Extent, NbdError, Span};
use crate::wire::{self, Fields, allocation, chunk};

/// Most extents of one reply that are kept.
const EXTENTS_MAX: u32 = 1 << 16;
/// Longest text of an error.
const TEXT_BYTES_MAX: u32 = 4096;

/// A connection that can't go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReplyError {
    #[error("the connection")]
    Socket(#[from] io::Error),
    #[error("a reply begins with {magic:#010x}")]
    Magic { magic: u32 },
    #[error("a reply to request {cookie}, which does not wait for one")]
    Unasked { cookie: u64 },
    #[error("a chunk of type {kind} with {len} bytes does not fit the request")]
    Chunk { kind: u16, len: u32 },
}

/// How a reply, or a chunk of one, begins.
#[derive(Debug, Clone, Copy)]
pub(super) enum Head {
    Simple { error: u32, cookie: u64 },
    Chunk { flags: u16, kind: u16, cookie: u64, len: u32 },
}

impl Head {
    pub(super) fn cookie(&self) -> u64 {
        match *self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => cookie,
        }
    }
}

/// The next head.
pub(super) fn head(from: &mut impl Read) -> Result<Head, ReplyError> {
    let mut magic = [0; 4];
    from.read_exact(&mut magic)?;
    let mut rest = [0; 16];
    match u32::from_be_bytes(magic) {
        wire::SIMPLE_REPLY => {
            let rest = rest.get_mut(..12).unwrap_or_default();
            from.read_exact(rest)?;
            let mut fields = Fields(rest);
            let (error, cookie) = (fields.u32().unwrap_or(0), fields.u64().unwrap_or(0));
            Ok(Head::Simple { error, cookie })
        }
        wire::STRUCTURED_REPLY => {
            from.read_exact(&mut rest)?;
            let mut fields = Fields(&rest);
            let (flags, kind) = (fields.u16().unwrap_or(0), fields.u16().unwrap_or(0));
            let (cookie, len) = (fields.u64().unwrap_or(0), fields.u32().unwrap_or(0));
            Ok(Head::Chunk { flags, kind, cookie, len })
        }
        magic => Err(ReplyError::Magic { magic }),
    }
}

/// What has come of a reply.
#[derive(Debug, Default)]
pub(super) struct Got {
    answer: Answer,
    /// Of a read: bytes that have come.
    filled: u64,
    /// What was asked, if bytes or extents are the answer.
    reads: Option<Span>,
    tells: Option<Span>,
    error: Option<NbdError>,
}

/// A part of a reply was taken.
#[derive(Debug)]
pub(super) enum Part {
    More,
    Last(Result<Answer, NbdError>),
}

impl Got {
    /// Nothing yet.
    pub(super) fn of(command: &Command) -> Self {
        let (reads, tells) = match *command {
            Command::Read { span, .. } => (Some(span), None),
            Command::BlockStatus { span, .. } => (None, Some(span)),
            _ => (None, None),
        };
        Self { reads, tells, ..Self::default() }
    }

    /// Takes what follows the head.
    pub(super) fn take(&mut self, head: &Head, from: &mut impl Read) -> Result<Part, ReplyError> {
        let (flags, kind, len) = match *head {
            Head::Simple { error: 0, .. } if self.reads.is_none() && self.tells.is_none() => {
                return Ok(Part::Last(Ok(Answer::default())));
            }
            // A read is answered in chunks, as was agreed.
            Head::Simple { error: 0, .. } => return Err(ReplyError::Chunk { kind: 0, len: 0 }),
            Head::Simple { error, .. } => return Ok(Part::Last(Err(NbdError::of(error)))),
            Head::Chunk { flags, kind, len, .. } => (flags, kind, len),
        };
        let misfit = || ReplyError::Chunk { kind, len };
        match kind {
            chunk::NONE if len == 0 => {}
            chunk::OFFSET_DATA if len > 8 => {
                let offset_bytes = number(from)?;
                self.part(offset_bytes, len - 8, Some(from))?.ok_or_else(misfit)?;
            }
            chunk::OFFSET_HOLE if len == 12 => {
                let offset_bytes = number(from)?;
                let mut hole = [0; 4];
                from.read_exact(&mut hole)?;
                let len = u32::from_be_bytes(hole);
                self.part(offset_bytes, len, None::<&mut io::Empty>)?.ok_or_else(misfit)?;
            }
            chunk::BLOCK_STATUS => self.status(len, from)?.ok_or_else(misfit)?,
            kind if kind & (1 << 15) != 0 && (6..TEXT_BYTES_MAX).contains(&len) => {
                let mut content = vec![0; len as usize];
                from.read_exact(&mut content)?;
                let error = Fields(&content).u32().unwrap_or(0);
                self.error.get_or_insert(NbdError::of(error));
            }
            _ => return Err(misfit()),
        }
        Ok(if flags & chunk::DONE != 0 { Part::Last(self.end()) } else { Part::More })
    }

    /// Some bytes of a read; zeros if they come from nowhere. `None`: they were not asked for.
    fn part(
        &mut self,
        offset_bytes: u64,
        len: u32,
        from: Option<&mut impl Read>,
    ) -> io::Result<Option<()>> {
        let Some(span) = self.reads else { return Ok(None) };
        let all = span.len_bytes as usize;
        let at = offset_bytes.checked_sub(span.offset_bytes);
        let Some(at) = at.and_then(|at| usize::try_from(at).ok()) else { return Ok(None) };
        if self.answer.bytes.len() < all {
            // A server that says more than it was asked gets no memory.
            self.answer.bytes.resize(all, 0);
        }
        let Some(end) = at.checked_add(len as usize) else { return Ok(None) };
        let Some(into) = self.answer.bytes.get_mut(at..end) else { return Ok(None) };
        match from {
            Some(from) => from.read_exact(into)?,
            None => into.fill(0),
        }
        self.filled += u64::from(len);
        Ok(Some(()))
    }

    /// `None`: it was not asked for, or is no list of extents.
    fn status(&mut self, len: u32, from: &mut impl Read) -> io::Result<Option<()>> {
        if self.tells.is_none() || len < 12 || !(len - 4).is_multiple_of(8) {
            return Ok(None);
        }
        if (len - 4) / 8 > EXTENTS_MAX {
            return Ok(None);
        }
        let mut content = vec![0; len as usize];
        from.read_exact(&mut content)?;
        let mut fields = Fields(&content);
        let _context = fields.u32();
        while let (Some(len), Some(flags)) = (fields.u32(), fields.u32()) {
            let zero = flags & allocation::ZERO != 0;
            self.answer.extents.push(Extent { len_bytes: u64::from(len), zero });
        }
        Ok(Some(()))
    }

    fn end(&mut self) -> Result<Answer, NbdError> {
        let answer = std::mem::take(&mut self.answer);
        if let Some(error) = self.error {
            return Err(error);
        }
        let is_whole = match (self.reads, self.tells) {
            (Some(span), _) => self.filled == u64::from(span.len_bytes),
            (_, Some(_)) => !answer.extents.is_empty(),
            _ => true,
        };
        if is_whole { Ok(answer) } else { Err(NbdError::Io) }
    }
}

fn number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}
