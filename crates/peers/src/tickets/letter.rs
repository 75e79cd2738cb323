//! What the hosts of a ticket's parent and of its clones write each other.
//!
//! ```text
//!   4 bytes  length of the head, little endian
//!   head     JSON: whose line, the number of the first word, the words, how many bytes go with each
//!   then     those bytes: the messages of workers
//! ```

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vmfork_agent_proto::RequestError;

use crate::error::LetterError;
use vmfork_guest_link::agent::ROOM_BYTES;

/// Words of one letter, and the bytes that go with them, unless a single message is longer.
pub(super) const WORDS_MAX: usize = 1024;
pub(super) const BODIES_MAX: u64 = 4 << 20;
/// Of a letter: the longest message, and far more than words take.
pub(crate) const BYTES_MAX: usize = (256 + 16) << 20;
const _: () = assert!(BYTES_MAX as u64 >= ROOM_BYTES + (16 << 20));

/// Names a line between two hosts: by the order to start clones that it came of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct LineId {
    /// The parent's host.
    pub(super) parent: u64,
    pub(super) order: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    // From where the clones run; `vm` is the number of a clone's first worker, `ask` numbers what
    // is answered:
    Exit {
        ask: u64,
        vm: u32,
        vmid: u32,
        error: Option<String>,
    },
    /// With the message's bytes.
    Send {
        ask: u64,
        vm: u32,
        vmid: u32,
    },
    /// The clone has ended, or was not started.
    Ended {
        vm: u32,
        reason: String,
    },
    // From where the parent runs:
    Done {
        ask: u64,
        value: u64,
    },
    Failed {
        ask: u64,
        error: RequestError,
    },
    /// The message has left the host.
    Taken {
        ask: u64,
    },
    /// For whose messages the parent waits: of these workers, or of any.
    Want {
        of: Vec<Option<u32>>,
    },
    Kill {
        vm: u32,
    },
}

/// A word, and the bytes that go with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) word: Word,
    pub(super) body: Vec<Bytes>,
}

impl Item {
    pub(super) fn bytes(&self) -> u64 {
        self.body.iter().map(|piece| piece.len() as u64).sum()
    }
}

impl From<Word> for Item {
    fn from(word: Word) -> Self {
        Self { word, body: Vec::new() }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Letter {
    pub(super) line: LineId,
    pub(super) first: u64,
    pub(super) items: Vec<Item>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    line: LineId,
    first: u64,
    words: Vec<(Word, u64)>,
}

impl Letter {
    /// # Errors
    /// Never, in practice: its head is made of structs.
    pub(super) fn encode(&self) -> Result<Bytes, LetterError> {
        let words = self.items.iter().map(|item| (item.word.clone(), item.bytes())).collect();
        let head = serde_json::to_vec(&Head { line: self.line, first: self.first, words })?;
        let length = u32::try_from(head.len()).map_err(|_| LetterError::Short)?;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(head);
        for piece in self.items.iter().flat_map(|item| &item.body) {
            bytes.extend_from_slice(piece);
        }
        Ok(bytes.into())
    }

    /// # Errors
    /// It is none.
    pub(super) fn decode(mut bytes: Bytes) -> Result<Self, LetterError> {
        let whole = bytes.len();
        let length = bytes.first_chunk().map(|length| u32::from_le_bytes(*length));
        let _length = take(&mut bytes, 4)?;
        let head = take(&mut bytes, length.unwrap_or(0).into())?;
        let Head { line, first, words } = serde_json::from_slice(&head)?;
        let mut items = Vec::new();
        for (word, length) in words {
            let body = match length {
                0 => Vec::new(),
                length => vec![alone(take(&mut bytes, length)?, whole)],
            };
            items.push(Item { word, body });
        }
        match bytes.len() {
            0 => Ok(Self { line, first, items }),
            left => Err(LetterError::Long { left }),
        }
    }
}

/// A message out of a letter of `whole` bytes.
/// It may stay here for long, and must not keep the whole letter in memory if it is a small part of
/// it.
fn alone(body: Bytes, whole: usize) -> Bytes {
    if body.len() < whole / 2 { Bytes::copy_from_slice(&body) } else { body }
}

fn take(bytes: &mut Bytes, wanted: u64) -> Result<Bytes, LetterError> {
    match usize::try_from(wanted) {
        Ok(wanted) if wanted <= bytes.len() => Ok(bytes.split_to(wanted)),
        _ => Err(LetterError::Short),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn letter() -> Letter {
        let send = |ask| Word::Send { ask, vm: 1, vmid: 2 };
        let with = |word, body: &'static [u8]| Item { word, body: vec![Bytes::from_static(body)] };
        Letter {
            line: LineId { parent: u64::MAX, order: 7 },
            first: 3,
            items: vec![
                with(send(1), b"one"),
                Word::Exit { ask: 2, vm: 1, vmid: 2, error: Some("gone".to_owned()) }.into(),
                send(3).into(),
                with(send(4), b"four"),
                Word::Want { of: vec![None, Some(4)] }.into(),
            ],
        }
    }

    #[test]
    fn it_comes_back_as_it_went() {
        let bytes = letter().encode().expect("plain");
        assert_eq!(Letter::decode(bytes).expect("whole"), letter());
    }

    #[test]
    fn what_is_cut_or_followed_by_more_is_refused() {
        let bytes = letter().encode().expect("plain");
        for len in 0..bytes.len() {
            Letter::decode(bytes.slice(..len)).expect_err("cut");
        }
        let more = [&bytes[..], &[0]].concat();
        assert!(matches!(Letter::decode(more.into()), Err(LetterError::Long { left: 1 })));
    }

    #[test]
    fn a_short_message_does_not_keep_its_letter() {
        let long = Item { word: Word::Taken { ask: 1 }, body: vec![vec![7; 1 << 20].into()] };
        let letter = Letter { items: vec![letter().items.remove(0), long], ..letter() };
        let read = Letter::decode(letter.encode().expect("plain")).expect("whole");
        assert_eq!(read, letter);
        let [short, long] = read.items.as_slice() else { panic!("{read:?}") };
        assert!(short.body[0].is_unique() && long.body[0].is_unique(), "each has its own");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(any: Vec<u8>, flip in any::<prop::sample::Index>(), to: u8) {
            let _any = Letter::decode(any.into());
            let mut bytes = letter().encode().expect("plain").to_vec();
            let at = flip.index(bytes.len());
            bytes[at] = to;
            let _any = Letter::decode(bytes.into());
        }
    }
}
