//! A chunk: the own pages of one window, compressed by themselves, known by the hash of their
//! content.
//!
//! ```text
//!    0   4  "VFCK"
//!    4   1  version, 1
//!    5   1  encoding: 0 none, 1 zstd
//!    6   2  pages, 1 to 512
//!    8   4  raw bytes, 4096 × pages
//!   12   4  payload bytes
//!   16   8  seal: the first 8 bytes of blake3 over bytes 0 to 15 and, if compressed, the payload
//!   24   …  payload
//! ```
//!
//! Numbers are little-endian. The hash in the chunk's name is over the raw bytes: it says that the
//! content is right. The seal says that the file is as it was written, which a changed bit that
//! decompression ignores would not show.

use std::cell::RefCell;

use blake3::Hash;
use vmfork_image::PAGE_BYTES;
use zstd::bulk::{Compressor, Decompressor};

use super::{CHUNK_PAGES_MAX, Compression};
use vmfork_image::bytes::{Cursor, Flaw};

const MAGIC: [u8; 4] = *b"VFCK";
const VERSION: u8 = 1;
const SEALED_BYTES: usize = 16;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 24;

/// Most bytes a chunk's file can have: a payload that would be longer than its content is stored as
/// it is.
pub const CHUNK_FILE_BYTES_MAX: u64 = HEADER_BYTES as u64 + CHUNK_PAGES_MAX * PAGE_BYTES;

const ENCODING_NONE: u8 = 0;
const ENCODING_ZSTD: u8 = 1;

/// Makes chunks; keeps the compressor's tables from one to the next.
pub struct ChunkEncoder {
    zstd: Option<Compressor<'static>>,
}

impl std::fmt::Debug for ChunkEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkEncoder").field("zstd", &self.zstd.is_some()).finish()
    }
}

impl ChunkEncoder {
    /// # Errors
    /// A zstd level that there isn't, or no memory for its tables.
    pub fn new(compression: Compression) -> std::io::Result<Self> {
        let zstd = match compression {
            Compression::None => None,
            Compression::Zstd { level } => Some(Compressor::new(level)?),
        };
        Ok(Self { zstd })
    }

    /// The file of a chunk with `raw` as content.
    ///
    /// # Panics
    /// If `raw` isn't 1 to 512 whole pages.
    pub fn encode(&mut self, raw: &[u8]) -> Vec<u8> {
        let pages = raw.len() as u64 / PAGE_BYTES;
        assert!(
            (1..=CHUNK_PAGES_MAX).contains(&pages) && pages * PAGE_BYTES == raw.len() as u64,
            "{} bytes are no chunk",
            raw.len()
        );
        let mut file = vec![0; HEADER_BYTES + raw.len()];
        // One byte less than the content has: a payload as long as that is none.
        let room = &mut file[HEADER_BYTES..HEADER_BYTES + raw.len() - 1];
        let packed = self.zstd.as_mut().and_then(|zstd| zstd.compress_to_buffer(raw, room).ok());
        let encoding = match packed {
            Some(bytes) => {
                file.truncate(HEADER_BYTES + bytes);
                ENCODING_ZSTD
            }
            None => {
                file[HEADER_BYTES..].copy_from_slice(raw);
                ENCODING_NONE
            }
        };
        let payload_bytes = file.len() - HEADER_BYTES;
        let small = |n: usize| u32::try_from(n).expect("at most 2 MiB");
        file[0..4].copy_from_slice(&MAGIC);
        file[4] = VERSION;
        file[5] = encoding;
        file[6..8].copy_from_slice(&u16::try_from(pages).expect("at most 512").to_le_bytes());
        file[8..12].copy_from_slice(&small(raw.len()).to_le_bytes());
        file[12..16].copy_from_slice(&small(payload_bytes).to_le_bytes());
        let seal = seal(&file);
        file[16..24].copy_from_slice(&seal);
        file
    }
}

fn seal(file: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&file[..SEALED_BYTES]);
    // What is stored as it is, the hash of the content speaks for: no need to go over it twice.
    if file[5] != ENCODING_NONE {
        hasher.update(&file[HEADER_BYTES..]);
    }
    let mut seal = [0; 8];
    seal.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    seal
}

thread_local! {
    /// Its tables take 150 KiB, which a fault should not have to allocate.
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Decompress `packed` into `raw`, which has to be filled exactly.
pub(super) fn unzstd(packed: &[u8], raw: &mut [u8]) -> Result<(), String> {
    DECOMPRESSOR.with_borrow_mut(|kept| {
        let zstd = match kept {
            Some(zstd) => zstd,
            None => kept.insert(Decompressor::new().map_err(|e| format!("no decompressor: {e}"))?),
        };
        match zstd.decompress_to_buffer(packed, raw) {
            Ok(bytes) if bytes == raw.len() => Ok(()),
            Ok(bytes) => Err(format!("holds {bytes} bytes, not {}", raw.len())),
            Err(error) => Err(format!("does not decompress to {} bytes: {error}", raw.len())),
        }
    })
}

/// The content of the chunk in `file`, which must have the hash `hash`.
///
/// # Errors
/// It is no chunk, not as it was written, or another one.
pub fn decode(file: &[u8], hash: &Hash) -> Result<Vec<u8>, Flaw> {
    let mut cursor = Cursor::new(file);
    cursor.magic(MAGIC, VERSION, "chunk")?;
    let encoding = cursor.u8("the encoding")?;
    let pages = cursor.u16("the number of pages")?;
    let raw_bytes = cursor.u32("the raw length")?;
    let payload_bytes = cursor.u32("the payload's length")?;
    let sealed = cursor.array::<8>("the seal")?;
    if !(1..=CHUNK_PAGES_MAX).contains(&u64::from(pages)) {
        return Err(Flaw::at(6, format!("a chunk of {pages} pages")));
    }
    if u64::from(raw_bytes) != u64::from(pages) * PAGE_BYTES {
        return Err(Flaw::at(8, format!("{raw_bytes} bytes are not {pages} pages")));
    }
    if u64::from(payload_bytes) > u64::from(raw_bytes) {
        return Err(Flaw::at(12, format!("{payload_bytes} bytes of payload for {raw_bytes}")));
    }
    let payload = cursor.take(payload_bytes as usize, "the payload")?;
    cursor.end("chunk")?;
    if seal(file) != sealed {
        return Err(Flaw::at(16, "changed since it was written: the seal is not that of the file"));
    }
    let mut raw = vec![0; raw_bytes as usize];
    match encoding {
        ENCODING_NONE if payload.len() == raw.len() => raw.copy_from_slice(payload),
        ENCODING_NONE => {
            let what = format!("{payload_bytes} bytes of payload, uncompressed, for {raw_bytes}");
            return Err(Flaw::at(12, what));
        }
        ENCODING_ZSTD => unzstd(payload, &mut raw)
            .map_err(|why| Flaw::at(HEADER_BYTES, format!("the payload {why}")))?,
        other => return Err(Flaw::at(5, format!("encoding {other} is not known"))),
    }
    match blake3::hash(&raw) {
        found if found == *hash => Ok(raw),
        found => Err(Flaw::at(HEADER_BYTES, format!("the content of another chunk, {found}"))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PAGE_LEN;
    use super::*;

    const ZSTD: Compression = Compression::Zstd { level: 1 };

    fn pages(seed: u8, pages: usize, entropy: bool) -> Vec<u8> {
        let mut raw = vec![seed; PAGE_LEN * pages];
        if entropy {
            blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut raw);
        }
        raw
    }

    fn encode(raw: &[u8], compression: Compression) -> (Vec<u8>, Hash) {
        let mut encoder = ChunkEncoder::new(compression).expect("encoder");
        (encoder.encode(raw), blake3::hash(raw))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_chunk_reads_back(seed: u8, count in 1usize..=8, entropy: bool, zstd: bool) {
            let raw = pages(seed, count, entropy);
            let compression = if zstd { ZSTD } else { Compression::None };
            let (file, hash) = encode(&raw, compression);
            prop_assert!(file.len() <= HEADER_BYTES + raw.len());
            prop_assert_eq!(decode(&file, &hash), Ok(raw));
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            prop_assert!(decode(&bytes, &blake3::hash(b"")).is_err());
        }
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        for compression in [ZSTD, Compression::None] {
            let (file, hash) = encode(&pages(3, 1, false), compression);
            for bit in 0..file.len() * 8 {
                let mut bad = file.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(decode(&bad, &hash).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn a_chunk_that_was_cut_is_noticed_at_every_length() {
        let (file, hash) = encode(&pages(3, 2, false), ZSTD);
        for bytes in 0..file.len() {
            assert!(decode(&file[..bytes], &hash).is_err(), "{bytes}");
        }
        let longer = [file, vec![0]].concat();
        let flaw = decode(&longer, &hash).expect_err("a byte more");
        assert!(flaw.what.contains("1 bytes after the end"), "{flaw}");
    }

    #[test]
    fn another_chunk_in_its_place_is_noticed() {
        let (_, hash) = encode(&pages(1, 1, true), ZSTD);
        let (other, _) = encode(&pages(2, 1, true), ZSTD);
        let flaw = decode(&other, &hash).expect_err("foreign");
        assert!(flaw.what.contains("another chunk"), "{flaw}");
    }

    #[test]
    fn what_does_not_shrink_is_stored_as_it_is() {
        let raw = pages(7, 4, true);
        let (file, hash) = encode(&raw, ZSTD);
        assert_eq!((file.len(), file[5]), (HEADER_BYTES + raw.len(), ENCODING_NONE));
        assert_eq!(decode(&file, &hash), Ok(raw));
    }
}
