//! A file of bytes that mean nothing here, compressed as a whole: device state, a profile.
//!
//! ```text
//!    0   4  magic: "VFST" device state, "VFPR" profile
//!    4   1  version, 1
//!    5   1  encoding: 0 none, 1 zstd
//!    6   2  0
//!    8   8  raw bytes
//!   16   8  payload bytes
//!   24  32  blake3 over bytes 0 to 23 and the payload
//!   56   …  payload
//! ```

use std::io::Read as _;

use vmfork_image::bytes::{Cursor, Flaw};

const VERSION: u8 = 1;
const HASHED_BYTES: usize = 24;
const HEADER_BYTES: usize = 56;

const ENCODING_NONE: u8 = 0;
const ENCODING_ZSTD: u8 = 1;

/// Device state is small: worth a level that takes its time.
const LEVEL: i32 = 3;

/// What a sealed file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SealedKind {
    State,
    Profile,
}

impl SealedKind {
    const fn magic(self) -> [u8; 4] {
        match self {
            Self::State => *b"VFST",
            Self::Profile => *b"VFPR",
        }
    }

    /// Most raw bytes that one may hold. Device state has some 200 kB, and 16 MiB more with a
    /// display; a profile has at most 120 kB for each GiB of memory.
    pub const fn raw_bytes_max(self) -> u64 {
        match self {
            Self::State => 64 << 20,
            Self::Profile => 16 << 20,
        }
    }

    /// Most bytes of its file: it is stored as it is rather than longer.
    pub(crate) const fn file_bytes_max(self) -> u64 {
        HEADER_BYTES as u64 + self.raw_bytes_max()
    }

    const fn what(self) -> &'static str {
        match self {
            Self::State => "device state",
            Self::Profile => "profile",
        }
    }
}

/// The file that holds `raw`. More than [`SealedKind::raw_bytes_max`] bytes it could not be read
/// back with.
pub fn seal(kind: SealedKind, raw: &[u8]) -> Vec<u8> {
    let packed = zstd::bulk::compress(raw, LEVEL).ok().filter(|packed| packed.len() < raw.len());
    let (encoding, payload) = match &packed {
        Some(packed) => (ENCODING_ZSTD, packed.as_slice()),
        None => (ENCODING_NONE, raw),
    };
    let mut file = Vec::with_capacity(HEADER_BYTES + payload.len());
    file.extend_from_slice(&kind.magic());
    file.extend_from_slice(&[VERSION, encoding, 0, 0]);
    file.extend_from_slice(&(raw.len() as u64).to_le_bytes());
    file.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    let hash = blake3::Hasher::new().update(&file).update(payload).finalize();
    file.extend_from_slice(hash.as_bytes());
    file.extend_from_slice(payload);
    file
}

/// What `file` holds.
///
/// # Errors
/// It is of another kind, or not as it was written.
pub fn unseal(kind: SealedKind, file: &[u8]) -> Result<Vec<u8>, Flaw> {
    let mut cursor = Cursor::new(file);
    cursor.magic(kind.magic(), VERSION, kind.what())?;
    let encoding = cursor.u8("the encoding")?;
    if cursor.u16("two zeros")? != 0 {
        return Err(Flaw::at(6, "bytes that are not known to mean anything"));
    }
    let raw_bytes = cursor.u64("the raw length")?;
    let payload_bytes = cursor.u64("the payload's length")?;
    let hash = blake3::Hash::from_bytes(cursor.array("the hash")?);
    if raw_bytes > kind.raw_bytes_max() || payload_bytes > raw_bytes {
        let what = format!("{payload_bytes} bytes of payload for {raw_bytes}");
        return Err(Flaw::at(8, format!("{what}, of at most {}", kind.raw_bytes_max())));
    }
    // Both fit a usize: at most 64 MiB.
    let (raw_bytes, payload_bytes) = (as_usize(raw_bytes), as_usize(payload_bytes));
    let payload = cursor.take(payload_bytes, "the payload")?;
    cursor.end(kind.what())?;
    let mut hasher = blake3::Hasher::new();
    if hasher.update(&file[..HASHED_BYTES]).update(payload).finalize() != hash {
        return Err(Flaw::at(24, "changed since it was written: the hash is not that of the file"));
    }
    let raw = match encoding {
        ENCODING_NONE => payload.to_vec(),
        ENCODING_ZSTD => grow(payload, raw_bytes)
            .map_err(|e| Flaw::at(HEADER_BYTES, format!("the payload does not decompress: {e}")))?,
        other => return Err(Flaw::at(5, format!("encoding {other} is not known"))),
    };
    if raw.len() == raw_bytes {
        return Ok(raw);
    }
    let what = format!("the payload holds other than {raw_bytes} bytes");
    Err(Flaw::at(HEADER_BYTES, what))
}

/// Grows as bytes come: a file that promises much and holds little takes little memory. At most a
/// byte more than `raw_bytes`.
fn grow(payload: &[u8], raw_bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut raw = Vec::new();
    let decoder = zstd::stream::read::Decoder::with_buffer(payload)?;
    decoder.take(raw_bytes as u64 + 1).read_to_end(&mut raw)?;
    Ok(raw)
}

fn as_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("bounded before")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_sealed_comes_back(raw: Vec<u8>, repeat in 1usize..100) {
            let raw = raw.repeat(repeat);
            let file = seal(SealedKind::State, &raw);
            prop_assert_eq!(unseal(SealedKind::State, &file), Ok(raw));
            prop_assert!(unseal(SealedKind::Profile, &file).is_err());
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            prop_assert!(unseal(SealedKind::Profile, &bytes).is_err());
        }
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_noticed() {
        let file = seal(SealedKind::Profile, &b"profile ".repeat(20));
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(unseal(SealedKind::Profile, &bad).is_err(), "bit {bit}");
        }
        for bytes in 0..file.len() {
            assert!(unseal(SealedKind::Profile, &file[..bytes]).is_err(), "{bytes}");
        }
    }

    #[test]
    fn a_file_that_says_it_is_huge_is_refused_before_memory_is_taken() {
        let mut file = seal(SealedKind::State, &[7; 100]);
        file[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        let flaw = unseal(SealedKind::State, &file).expect_err("huge");
        assert!(flaw.what.contains("18446744073709551615"), "{flaw}");
    }
}
