//! What is said between a daemon and its holder: bytes, no I/O.
//!
//! ```text
//!           0         2      4         8            10           12           16
//!           +---------+------+---------+------------+------------+------------+------+------+
//!  request  | version |  op  |  value  | name_bytes | note_bytes |     0      | name | note |
//!  reply    | version |status|  value  | name_bytes | note_bytes | generation | name | note |
//!           | u16, 1  | u16  |  u32    |  u16       |  u16       |  u32       |      |      |
//!           +---------+------+---------+------------+------------+------------+------+------+
//! ```
//!
//! Little endian; one message is one packet. A field that an op or a status has no use for is 0 or
//! empty, so each message has one form.

use std::fmt;

/// Compared by both sides before anything else is read.
pub const VERSION: u16 = 1;

/// A path of a unix socket fits, and a word about it.
pub const NOTE_BYTES_MAX: usize = 512;
pub const NAME_BYTES_MAX: usize = 128;
pub const HEAD_BYTES: usize = 16;
pub const MESSAGE_BYTES_MAX: usize = HEAD_BYTES + NAME_BYTES_MAX + NOTE_BYTES_MAX;

/// 1 to [`NAME_BYTES_MAX`] visible ASCII characters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// `None`: that is no name.
    pub fn new(text: &str) -> Option<Self> {
        let fits = (1..=NAME_BYTES_MAX).contains(&text.len());
        (fits && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What an fd is, for the daemon that gets it back. To the holder it is a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind(pub u32);

impl Kind {
    /// A socket that is listened on.
    pub const LISTENER: Self = Self(1);
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The sender is the daemon of this state folder from now on. If it is gone for `linger_ms`,
    /// the holder ends.
    Hello { linger_ms: u32 },
    /// Keep the fd that comes along; it takes the place of one with the same name.
    Put { name: Name, kind: Kind, note: Vec<u8> },
    /// A copy of the fd. It stays here, too.
    Get { name: Name },
    /// The first entry behind `after`, or the first of all.
    List { after: Option<Name> },
    /// Close the fd.
    Drop { name: Name },
    /// Close all, and end.
    End,
}

/// Why a request is not fulfilled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the versions of holder and daemon differ")]
    Version,
    #[error("the message is malformed")]
    Malformed,
    #[error("there is no such operation")]
    UnknownOp,
    #[error("there is no entry of this name")]
    NoSuchName,
    #[error("the holder is full")]
    Full,
    #[error("only the daemon that said hello last may do this")]
    NotOwner,
    #[error("`Put` takes one file descriptor, all others none")]
    WrongFd,
    #[error("the holder serves its own user only")]
    Denied,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// To `Hello`: the number of the daemon that sent it.
    Welcome {
        generation: u32,
    },
    /// To `Put`, `Drop` and `End`.
    Done,
    /// To `Get`, with the fd; to `List`, without. `generation`: the daemon that put or got it last.
    Entry {
        generation: u32,
        name: Name,
        kind: Kind,
        note: Vec<u8>,
    },
    Refused(Refusal),
}

mod op {
    pub(super) const HELLO: u16 = 1;
    pub(super) const PUT: u16 = 2;
    pub(super) const GET: u16 = 3;
    pub(super) const LIST: u16 = 4;
    pub(super) const DROP: u16 = 5;
    pub(super) const END: u16 = 6;
}

mod status {
    pub(super) const DONE: u16 = 0;
    pub(super) const WELCOME: u16 = 1;
    pub(super) const ENTRY: u16 = 2;
}

/// Statuses of refusals are from 16 on.
const REFUSALS: [(u16, Refusal); 8] = [
    (16, Refusal::Version),
    (17, Refusal::Malformed),
    (18, Refusal::UnknownOp),
    (19, Refusal::NoSuchName),
    (20, Refusal::Full),
    (21, Refusal::NotOwner),
    (22, Refusal::WrongFd),
    (23, Refusal::Denied),
];

/// A message taken apart, not yet understood.
struct Parts<'a> {
    code: u16,
    value: u32,
    generation: u32,
    name: &'a [u8],
    note: &'a [u8],
}

impl<'a> Parts<'a> {
    fn of(code: u16) -> Self {
        Self { code, value: 0, generation: 0, name: &[], note: &[] }
    }

    fn parse(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let Some((version, rest)) = bytes.split_first_chunk::<2>() else {
            return Err(Refusal::Malformed);
        };
        // What is behind it may look otherwise in other versions.
        if u16::from_le_bytes(*version) != VERSION {
            return Err(Refusal::Version);
        }
        let Some((head, rest)) = rest.split_first_chunk::<{ HEAD_BYTES - 2 }>() else {
            return Err(Refusal::Malformed);
        };
        let [c0, c1, v0, v1, v2, v3, n0, n1, o0, o1, g0, g1, g2, g3] = *head;
        let name_bytes = usize::from(u16::from_le_bytes([n0, n1]));
        let note_bytes = usize::from(u16::from_le_bytes([o0, o1]));
        let bounded = name_bytes <= NAME_BYTES_MAX && note_bytes <= NOTE_BYTES_MAX;
        if !bounded || rest.len() != name_bytes + note_bytes {
            return Err(Refusal::Malformed);
        }
        let (name, note) = rest.split_at(name_bytes);
        Ok(Self {
            code: u16::from_le_bytes([c0, c1]),
            value: u32::from_le_bytes([v0, v1, v2, v3]),
            generation: u32::from_le_bytes([g0, g1, g2, g3]),
            name,
            note,
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let length = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_le_bytes();
        [
            &VERSION.to_le_bytes()[..],
            &self.code.to_le_bytes(),
            &self.value.to_le_bytes(),
            &length(self.name),
            &length(self.note),
            &self.generation.to_le_bytes(),
            self.name,
            self.note,
        ]
        .concat()
    }

    fn name(&self) -> Result<Name, Refusal> {
        let text = std::str::from_utf8(self.name).map_err(|_| Refusal::Malformed)?;
        Name::new(text).ok_or(Refusal::Malformed)
    }
}

impl Request {
    /// # Errors
    /// What the holder answers to such bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let parts = Parts::parse(bytes)?;
        let request = match parts.code {
            op::HELLO => Self::Hello { linger_ms: parts.value },
            op::PUT => Self::Put {
                name: parts.name()?,
                kind: Kind(parts.value),
                note: parts.note.to_vec(),
            },
            op::GET => Self::Get { name: parts.name()? },
            op::LIST if parts.name.is_empty() => Self::List { after: None },
            op::LIST => Self::List { after: Some(parts.name()?) },
            op::DROP => Self::Drop { name: parts.name()? },
            op::END => Self::End,
            _ => return Err(Refusal::UnknownOp),
        };
        // Fields that this op has no use for.
        if request.to_bytes() == bytes { Ok(request) } else { Err(Refusal::Malformed) }
    }

    /// A note that is too long makes a message that no holder takes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let parts = match self {
            Self::Hello { linger_ms } => Parts { value: *linger_ms, ..Parts::of(op::HELLO) },
            Self::Put { name, kind, note } => {
                Parts { value: kind.0, name: name.0.as_bytes(), note, ..Parts::of(op::PUT) }
            }
            Self::Get { name } => Parts { name: name.0.as_bytes(), ..Parts::of(op::GET) },
            Self::List { after } => {
                let name = after.as_ref().map_or(&[][..], |name| name.0.as_bytes());
                Parts { name, ..Parts::of(op::LIST) }
            }
            Self::Drop { name } => Parts { name: name.0.as_bytes(), ..Parts::of(op::DROP) },
            Self::End => Parts::of(op::END),
        };
        parts.to_bytes()
    }
}

impl Reply {
    /// `None`: no holder says that.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let parts = match Parts::parse(bytes) {
            Ok(parts) => parts,
            // That of another version: its reply to us begins like ours, and that is all we know.
            Err(Refusal::Version) => return Some(Self::Refused(Refusal::Version)),
            Err(_) => return None,
        };
        let reply = match parts.code {
            status::DONE => Self::Done,
            status::WELCOME => Self::Welcome { generation: parts.generation },
            status::ENTRY => Self::Entry {
                generation: parts.generation,
                name: parts.name().ok()?,
                kind: Kind(parts.value),
                note: parts.note.to_vec(),
            },
            code => Self::Refused(REFUSALS.iter().find(|(known, _)| *known == code)?.1),
        };
        (reply.to_bytes() == bytes).then_some(reply)
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let parts = match self {
            Self::Done => Parts::of(status::DONE),
            Self::Welcome { generation } => {
                Parts { generation: *generation, ..Parts::of(status::WELCOME) }
            }
            Self::Entry { generation, name, kind, note } => Parts {
                code: status::ENTRY,
                value: kind.0,
                generation: *generation,
                name: name.0.as_bytes(),
                note,
            },
            Self::Refused(refusal) => {
                let code = REFUSALS.iter().find(|(_, known)| known == refusal);
                Parts::of(code.map_or(u16::MAX, |(code, _)| *code))
            }
        };
        parts.to_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).expect("a name")
    }

    fn requests() -> Vec<Request> {
        vec![
            Request::Hello { linger_ms: 60_000 },
            Request::Put { name: name("a"), kind: Kind::LISTENER, note: b"/x \xff".to_vec() },
            Request::Get { name: name("api.unix") },
            Request::List { after: None },
            Request::List { after: Some(name("a")) },
            Request::Drop { name: name("a") },
            Request::End,
        ]
    }

    #[test]
    fn what_is_said_is_understood() {
        for request in requests() {
            assert_eq!(Request::parse(&request.to_bytes()), Ok(request.clone()), "{request:?}");
        }
        let entry =
            Reply::Entry { generation: 7, name: name("a"), kind: Kind(3), note: b"n".to_vec() };
        let refused = REFUSALS.map(|(_, refusal)| Reply::Refused(refusal));
        for reply in [Reply::Done, Reply::Welcome { generation: 1 }, entry].iter().chain(&refused) {
            assert_eq!(Reply::parse(&reply.to_bytes()).as_ref(), Some(reply));
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_document() {
        let put = Request::Put { name: name("ab"), kind: Kind::LISTENER, note: b"n".to_vec() };
        let bytes = b"\x01\0\x02\0\x01\0\0\0\x02\0\x01\0\0\0\0\0abn";
        assert_eq!(put.to_bytes(), bytes);
        let welcome = Reply::Welcome { generation: 258 };
        assert_eq!(welcome.to_bytes(), b"\x01\0\x01\0\0\0\0\0\0\0\0\0\x02\x01\0\0");
    }

    #[test]
    fn each_wrong_message_is_refused_for_what_is_wrong() {
        let good = Request::Get { name: name("a") }.to_bytes();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Request::parse(&bytes)
        };
        assert_eq!(with(0, 2), Err(Refusal::Version));
        assert_eq!(with(2, 99), Err(Refusal::UnknownOp));
        // A value, a generation, a length and a name that do not belong there.
        for (at, byte) in [(4, 1), (12, 1), (8, 2), (10, 1), (16, b' '), (16, 0xff)] {
            assert_eq!(with(at, byte), Err(Refusal::Malformed), "{at}");
        }
        for length in 0..good.len() {
            assert_eq!(Request::parse(&good[..length]), Err(Refusal::Malformed), "{length}");
        }
        let long = vec![0; NOTE_BYTES_MAX + 1];
        let put = Request::Put { name: name("a"), kind: Kind(1), note: long };
        assert_eq!(Request::parse(&put.to_bytes()), Err(Refusal::Malformed));
        // A holder of another version.
        assert_eq!(Reply::parse(b"\x02\0?"), Some(Reply::Refused(Refusal::Version)));
        assert_eq!(Reply::parse(&[]), None);
    }

    #[test]
    fn names_are_short_and_visible() {
        let longest = "x".repeat(NAME_BYTES_MAX);
        assert!(Name::new(&longest).is_some());
        for bad in ["", "a b", "é", "a\0", "a\n", &format!("{longest}x")] {
            assert!(Name::new(bad).is_none(), "{bad:?}");
        }
    }
}
