//! A place in a log, which a reader keeps and gives back.

use std::fmt;
use std::str::FromStr;

/// Digits of an epoch in text.
const EPOCH_DIGITS: usize = 16;

/// The place after one event of one life of the log. As text: `EPOCH-SEQ`, the epoch as 16 hex
/// digits and the sequence number as a decimal number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The life of the log.
    pub epoch: u64,
    /// The event that was read last; 0: none.
    pub seq: u64,
}

/// A text that is not a cursor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a cursor: it has the form EPOCH-SEQ, 16 hex digits and a number")]
pub struct CursorError {
    /// The first characters of it.
    text: String,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.epoch, self.seq)
    }
}

impl FromStr for Cursor {
    type Err = CursorError;

    /// Only the text that [`Cursor`] prints is one: two texts never name the same place.
    fn from_str(text: &str) -> Result<Self, CursorError> {
        let parsed = text.split_once('-').and_then(|(epoch, seq)| {
            let epoch = u64::from_str_radix(epoch, 16).ok().filter(|_| epoch.len() == EPOCH_DIGITS);
            Some(Self { epoch: epoch?, seq: seq.parse().ok()? })
        });
        parsed
            .filter(|cursor| cursor.to_string() == text)
            .ok_or_else(|| CursorError { text: text.chars().take(64).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_printed() {
        for cursor in [
            Cursor { epoch: 0, seq: 0 },
            Cursor { epoch: 0xabc, seq: 17 },
            Cursor { epoch: u64::MAX, seq: u64::MAX },
        ] {
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
        assert_eq!(Cursor { epoch: 0xabc, seq: 17 }.to_string(), "0000000000000abc-17");
    }

    #[test]
    fn any_other_text_is_refused() {
        for bad in [
            "",
            "0",
            "-",
            "17",
            "abc-17",
            "0000000000000abc-",
            "0000000000000abc",
            "0000000000000ABC-17",
            "0000000000000abc-017",
            "0000000000000abc-+17",
            "+000000000000abc-17",
            "0000000000000abc--1",
            "0000000000000abc-17 ",
            "0000000000000abc-99999999999999999999",
        ] {
            assert!(bad.parse::<Cursor>().is_err(), "{bad:?}");
        }
        let long = "x".repeat(100_000).parse::<Cursor>().expect_err("no cursor");
        assert!(long.to_string().len() < 200, "the error does not repeat all of it");
    }
}
