//! Why a host does not give what it was asked for, and where else it is.

use std::fmt;

use super::{Op, ProtoError, wrong};
use crate::sums::{SUM_BYTES, Sum};

/// Longest text of a refusal, in bytes.
pub const REFUSAL_BYTES_MAX: usize = 512;
/// A host's id.
const HOST_BYTES: usize = size_of::<u64>();

/// Why a host does not give what it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RefusalKind {
    /// It has no such image, or none with such pages.
    UnknownImage,
    /// The pages are another host's, and it does not have them (yet).
    NotHere,
    /// It had the page, and can't read it any more.
    PageLost,
    /// Too much is asked of it.
    Busy,
    /// It is about to leave, and serves no client any more.
    Draining,
    /// It does not know the client, or not any more.
    NotMember,
    /// The request makes no sense to it.
    BadRequest,
    /// Something of its own went wrong.
    Failed,
    /// It has sent the pages to another host, and that has them, or is about to
    /// ([`Refusal::elsewhere`]).
    Elsewhere,
}

impl RefusalKind {
    pub const ALL: [Self; 9] = [
        Self::UnknownImage,
        Self::NotHere,
        Self::PageLost,
        Self::Busy,
        Self::Draining,
        Self::NotMember,
        Self::BadRequest,
        Self::Failed,
        Self::Elsewhere,
    ];

    pub(crate) const fn place(self) -> usize {
        self as usize
    }

    pub(super) const fn status(self) -> u8 {
        match self {
            Self::UnknownImage => 1,
            Self::PageLost => 2,
            Self::Busy => 3,
            Self::Draining => 4,
            Self::NotMember => 5,
            Self::BadRequest => 6,
            Self::Failed => 7,
            Self::NotHere => 8,
            Self::Elsewhere => 9,
        }
    }

    /// One word, for logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownImage => "unknown-image",
            Self::NotHere => "not-here",
            Self::Elsewhere => "elsewhere",
            Self::PageLost => "page-lost",
            Self::Busy => "busy",
            Self::Draining => "draining",
            Self::NotMember => "not-member",
            Self::BadRequest => "bad-request",
            Self::Failed => "failed",
        }
    }
}

impl RefusalKind {
    /// Of a refusal to `op` of this many pages.
    pub(super) const fn bytes_max(self, op: Op, pages: u64) -> u64 {
        match (self, op) {
            (Self::Elsewhere, Op::Read) => HOST_BYTES as u64 + pages * SUM_BYTES as u64,
            _ => REFUSAL_BYTES_MAX as u64,
        }
    }
}

impl fmt::Display for RefusalKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a host says that does not give what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({kind})")]
pub struct Refusal {
    pub kind: RefusalKind,
    text: String,
    elsewhere: Option<Elsewhere>,
}

/// Where pages are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    pub(crate) host: u64,
    /// Of each page, if the refusing host knows them; else nothing.
    pub(crate) sums: Vec<Sum>,
}

impl Refusal {
    /// `text` says why, for people; of a long one the beginning is kept. What is no visible
    /// character is left out.
    pub fn new(kind: RefusalKind, text: impl AsRef<str>) -> Self {
        let mut kept = String::new();
        for c in text.as_ref().chars().filter(|c| !c.is_control()) {
            if kept.len() + c.len_utf8() > REFUSAL_BYTES_MAX {
                break;
            }
            kept.push(c);
        }
        Self { kind, text: kept, elsewhere: None }
    }

    /// The pages are at host `id`.
    pub fn elsewhere(id: u64) -> Self {
        Self::at(Elsewhere { host: id, sums: Vec::new() })
    }

    pub(crate) fn at(elsewhere: Elsewhere) -> Self {
        let text = format!("at host {:016x}", elsewhere.host);
        Self { elsewhere: Some(elsewhere), ..Self::new(RefusalKind::Elsewhere, text) }
    }

    /// Where they are, if this is one that says so.
    pub(crate) fn whereabouts(&self) -> Option<&Elsewhere> {
        self.elsewhere.as_ref()
    }

    /// As it is sent.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Some(Elsewhere { host, sums }) = &self.elsewhere else {
            return self.text.clone().into_bytes();
        };
        [&host.to_le_bytes()[..], sums.as_flattened()].concat()
    }

    /// One that was sent in answer to a request of this many pages.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(kind: RefusalKind, bytes: &[u8], pages: u64) -> Result<Self, ProtoError> {
        if kind != RefusalKind::Elsewhere {
            return Ok(Self::new(kind, String::from_utf8_lossy(bytes)));
        }
        let Some((host, sums)) = bytes.split_first_chunk::<HOST_BYTES>() else {
            return wrong(format!("a host's id of {} bytes", bytes.len()));
        };
        let (all, rest) = sums.as_chunks::<SUM_BYTES>();
        if !rest.is_empty() || !(all.is_empty() || all.len() as u64 == pages) {
            return wrong(format!("{} bytes of sums of {pages} pages", sums.len()));
        }
        Ok(Self::at(Elsewhere { host: u64::from_le_bytes(*host), sums: all.to_vec() }))
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it concerns the client, and not the pages: the host may have closed the connection
    /// after it.
    pub(crate) fn may_be_the_last(&self) -> bool {
        use RefusalKind::{BadRequest, Busy, Draining, NotMember};
        matches!(self.kind, BadRequest | Busy | Draining | NotMember)
    }
}
