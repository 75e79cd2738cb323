//! Reading bytes that may say anything, files' and other hosts', and writing the same.

/// What is wrong with bytes, and where in them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} (at byte {offset})")]
pub struct Flaw {
    pub what: String,
    /// From the start of the file or the stream.
    pub offset: u64,
}

impl Flaw {
    pub fn at(offset: usize, what: impl Into<String>) -> Self {
        Self { what: what.into(), offset: offset as u64 }
    }
}

/// Most bytes of a LEB128 number of 64 bits.
const VARINT_BYTES_MAX: u32 = 10;

/// Takes bytes off the front; every error has the offset.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub fn offset(&self) -> usize {
        self.at
    }

    pub fn rest_bytes(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// `what` is the thing that was expected, for the error.
    pub fn take(&mut self, bytes: usize, what: &str) -> Result<&'a [u8], Flaw> {
        let rest = &self.bytes[self.at..];
        let Some((taken, _)) = rest.split_at_checked(bytes) else {
            let what = format!("cut short: {what} needs {bytes} bytes, {} are left", rest.len());
            return Err(Flaw::at(self.at, what));
        };
        self.at += bytes;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Flaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub fn u8(&mut self, what: &str) -> Result<u8, Flaw> {
        Ok(self.array::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &str) -> Result<u16, Flaw> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, Flaw> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, Flaw> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// LEB128, in its shortest form only, so that a number has one encoding.
    pub fn varint(&mut self, what: &str) -> Result<u64, Flaw> {
        let begin = self.at;
        let mut value = 0u64;
        for i in 0..VARINT_BYTES_MAX {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for the highest bit alone.
            if i == VARINT_BYTES_MAX - 1 && bits > 1 {
                break;
            }
            value |= bits << (7 * i);
            if byte & 0x80 == 0 {
                if byte == 0 && i > 0 {
                    return Err(Flaw::at(begin, format!("{what}: a number with a needless byte")));
                }
                return Ok(value);
            }
        }
        Err(Flaw::at(begin, format!("{what}: a number of more than 64 bits")))
    }

    /// Four letters that say what file it is, and the version of its layout.
    pub fn magic(&mut self, magic: [u8; 4], version: u8, what: &str) -> Result<(), Flaw> {
        if self.array(what)? != magic {
            return Err(Flaw::at(
                0,
                format!("no {what}: it does not begin with {}", letters(magic)),
            ));
        }
        match self.u8(what)? {
            found if found == version => Ok(()),
            found => {
                let what = format!("{what} of version {found}, of which nothing is known here");
                Err(Flaw::at(4, what))
            }
        }
    }

    pub fn end(&self, what: &str) -> Result<(), Flaw> {
        match self.rest_bytes() {
            0 => Ok(()),
            more => Err(Flaw::at(self.at, format!("{more} bytes after the end of the {what}"))),
        }
    }
}

fn letters(magic: [u8; 4]) -> String {
    format!("`{}`", magic.escape_ascii())
}

pub fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let bits = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            out.push(bits);
            return;
        }
        out.push(bits | 0x80);
    }
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
        cursor.u8("a").expect("there");
        let flaw = cursor.u32("the length").expect_err("two bytes only");
        assert_eq!(flaw.to_string(), "cut short: the length needs 4 bytes, 2 are left (at byte 1)");
        let flaw = Cursor::new(&[0xff; 11]).varint("n").expect_err("too long");
        assert_eq!(flaw.to_string(), "n: a number of more than 64 bits (at byte 0)");
        let flaw = Cursor::new(&[0x80, 0]).varint("n").expect_err("padded");
        assert_eq!(flaw.to_string(), "n: a number with a needless byte (at byte 0)");
    }
}
