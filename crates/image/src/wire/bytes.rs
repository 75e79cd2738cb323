//! Reading numbers off bytes that may say anything, and writing them.

use super::WireError;

/// Most bytes of a LEB128 number of 64 bits.
const VARINT_BYTES_MAX: u32 = 10;

pub(super) fn flaw(offset: usize, what: impl Into<String>) -> WireError {
    WireError { what: what.into(), offset: offset as u64 }
}

/// Takes bytes off the front; every error has the offset.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn offset(&self) -> usize {
        self.at
    }

    pub(super) fn rest_bytes(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// `what` is the thing that was expected, for the error.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], WireError> {
        let rest = &self.bytes[self.at..];
        let Some(array) = rest.first_chunk::<N>() else {
            let what = format!("cut short: {what} needs {N} bytes, {} are left", rest.len());
            return Err(flaw(self.at, what));
        };
        self.at += N;
        Ok(*array)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// LEB128, in its shortest form only, so that a number has one encoding.
    pub(super) fn varint(&mut self, what: &str) -> Result<u64, WireError> {
        let begin = self.at;
        let mut value = 0u64;
        for i in 0..VARINT_BYTES_MAX {
            let [byte] = self.array(what)?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for the highest bit alone.
            if i == VARINT_BYTES_MAX - 1 && bits > 1 {
                break;
            }
            value |= bits << (7 * i);
            if byte & 0x80 == 0 {
                if byte == 0 && i > 0 {
                    return Err(flaw(begin, format!("{what}: a number with a needless byte")));
                }
                return Ok(value);
            }
        }
        Err(flaw(begin, format!("{what}: a number of more than 64 bits")))
    }
}

pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_reads_back(value: u64, shift in 0u32..64) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut cursor = Cursor::new(&bytes);
            prop_assert_eq!(cursor.varint("n"), Ok(value));
            prop_assert_eq!(cursor.rest_bytes(), 0);
        }

        #[test]
        fn bytes_that_are_a_number_are_its_only_encoding(bytes: Vec<u8>) {
            let mut cursor = Cursor::new(&bytes);
            if let Ok(value) = cursor.varint("n") {
                let mut again = Vec::new();
                put_varint(&mut again, value);
                prop_assert_eq!(&bytes[..cursor.offset()], &again[..]);
            }
        }
    }

    #[test]
    fn an_error_says_what_and_where() {
        let mut cursor = Cursor::new(&[1, 2, 3]);
        cursor.array::<1>("a").expect("there");
        let error = cursor.u64("the host").expect_err("two bytes only");
        assert_eq!(error.to_string(), "cut short: the host needs 8 bytes, 2 are left (at byte 1)");
        let error = Cursor::new(&[0xff; 11]).varint("n").expect_err("too long");
        assert_eq!(error.to_string(), "n: a number of more than 64 bits (at byte 0)");
        let error = Cursor::new(&[0x80, 0]).varint("n").expect_err("padded");
        assert_eq!(error.to_string(), "n: a number with a needless byte (at byte 0)");
    }
}
