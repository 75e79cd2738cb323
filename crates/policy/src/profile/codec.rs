//! A profile as bytes.
//!
//! All numbers are little endian. A *varint* has seven bits in a byte, the lowest first, and the
//! eighth set in all but the last (LEB128). It is never longer than needed, so that one profile has
//! one form.
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | `VMFPROF` and 0 |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | pages of a cluster |
//! | 16 | 8 | pages of the image |
//! | 24 | 4 | runs that were merged |
//! | 28 | 8 | *n*, touched clusters |
//! | 36 | | *n* times, in order of clusters: clusters left out since the last one (varint), average first access in ms (varint), score (2) |
//! | end - 4 | 4 | CRC-32 of all before |
//!
//! A cluster takes 4 to 7 bytes, and 1 more for each 128 clusters left out before it. For 4 GiB in
//! clusters of 16 pages that is at most 460 kB, even if all are touched.

use vmfork_image::{BLOCK_PAGES, PAGES_MAX};

use super::{Profile, SCORE_MAX, TIME_MS_MAX, Touched, whole};

const MAGIC: [u8; 8] = *b"VMFPROF\0";
const VERSION: u32 = 1;

/// The least that a cluster takes.
const CLUSTER_BYTES_MIN: usize = 4;

/// Sizes that make no profile, or bytes that are none. A damaged one can be thrown away: the next
/// starts make another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    #[error("profile of an image of {pages} pages; none has more than {PAGES_MAX}")]
    Pages { pages: u64 },
    #[error(
        "profile in clusters of {cluster_pages} pages; it must be a power of two from 1 to {BLOCK_PAGES}"
    )]
    Cluster { cluster_pages: u64 },
    #[error("profile is cut off: it ends at byte {len}, within {what} at byte {at}")]
    Short { len: usize, at: usize, what: &'static str },
    #[error("not a profile: it begins with {found:02x?} and not with {wanted:02x?}")]
    Magic { found: [u8; 8], wanted: [u8; 8] },
    #[error(
        "profile of version {version}, and only version {VERSION} is known here: reset it, or read it with the vmfork that \
         wrote it"
    )]
    Version { version: u32 },
    #[error("profile is damaged at byte {at}: {what} is {value}, which {why}")]
    Value { at: usize, what: &'static str, value: u64, why: &'static str },
    #[error("profile is damaged: {len} bytes too many at byte {at}")]
    Trailing { at: usize, len: usize },
    #[error(
        "profile is damaged: its checksum is {computed:08x}, and at byte {at} it says {stored:08x}"
    )]
    Checksum { at: usize, stored: u32, computed: u32 },
}

impl Profile {
    /// As bytes, which [`Profile::decode`] reads; the same for equal profiles.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.touched.len() * 7 + 64);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(u32::try_from(self.cluster_pages).unwrap_or(0).to_le_bytes());
        bytes.extend(self.pages.to_le_bytes());
        bytes.extend(self.runs.to_le_bytes());
        bytes.extend((self.touched.len() as u64).to_le_bytes());
        let mut next = 0;
        for touched in &self.touched {
            put_varint(&mut bytes, touched.index - next);
            put_varint(&mut bytes, u64::from(touched.first_ms));
            bytes.extend(u16::try_from(touched.score).unwrap_or(u16::MAX).to_le_bytes());
            next = touched.index + 1;
        }
        bytes.extend(crc32(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`Profile::encode`] wrote. Takes memory for what is there, not for what the bytes
    /// say there is.
    ///
    /// # Errors
    /// If the bytes are anything else: what, and where.
    pub fn decode(bytes: &[u8]) -> Result<Self, ProfileError> {
        let mut reader = Reader::begin(bytes, MAGIC, VERSION)?;
        let cluster_pages = u64::from(u32::from_le_bytes(reader.array("the cluster size")?));
        let pages = u64::from_le_bytes(reader.array("the number of pages")?);
        let mut profile = Self::new(pages, cluster_pages)?;
        profile.runs = u32::from_le_bytes(reader.array("the number of runs")?);
        profile.whole = whole(profile.runs);
        let at = reader.at;
        let count = u64::from_le_bytes(reader.array("the number of clusters")?);
        let limit = pages.div_ceil(cluster_pages);
        if count > limit {
            let (what, why) = ("the number of clusters", "is more than the image has");
            return Err(ProfileError::Value { at, what, value: count, why });
        }
        let room = (bytes.len() - reader.at) / CLUSTER_BYTES_MIN;
        profile.touched.reserve_exact(usize::try_from(count).unwrap_or(room).min(room));
        let mut next = 0;
        for _ in 0..count {
            let touched = reader.touched(next, limit, profile.whole)?;
            next = touched.index + 1;
            profile.touched.push(touched);
        }
        reader.end()?;
        Ok(profile)
    }
}

pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Behind the magic number and the version.
    pub(super) fn begin(
        bytes: &'a [u8],
        wanted: [u8; 8],
        known: u32,
    ) -> Result<Self, ProfileError> {
        let mut reader = Self { bytes, at: 0 };
        let found = reader.array("the magic number")?;
        if found != wanted {
            return Err(ProfileError::Magic { found, wanted });
        }
        match u32::from_le_bytes(reader.array("the version")?) {
            version if version == known => Ok(reader),
            version => Err(ProfileError::Version { version }),
        }
    }

    /// Where the next byte is.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The checksum, and nothing behind it.
    pub(super) fn end(&mut self) -> Result<(), ProfileError> {
        let (bytes, at) = (self.bytes, self.at);
        let computed = crc32(&bytes[..at]);
        let stored = u32::from_le_bytes(self.array("the checksum")?);
        if self.at < bytes.len() {
            return Err(ProfileError::Trailing { at: self.at, len: bytes.len() - self.at });
        }
        if stored != computed {
            return Err(ProfileError::Checksum { at, stored, computed });
        }
        Ok(())
    }

    /// The next `len` bytes.
    pub(super) fn take(
        &mut self,
        len: usize,
        what: &'static str,
    ) -> Result<&'a [u8], ProfileError> {
        let rest = self.bytes.get(self.at..).and_then(|rest| rest.get(..len));
        let short = ProfileError::Short { len: self.bytes.len(), at: self.at, what };
        self.at += rest.map_or(0, <[u8]>::len);
        rest.ok_or(short)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], ProfileError> {
        let short = ProfileError::Short { len: self.bytes.len(), at: self.at, what };
        let rest = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk());
        self.at += N;
        rest.copied().ok_or(short)
    }

    /// At most `max`; `why` says what is wrong with more.
    fn varint(
        &mut self,
        what: &'static str,
        max: u64,
        why: &'static str,
    ) -> Result<u64, ProfileError> {
        let start = self.at;
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.array(what)?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 != 0 {
                continue;
            }
            let wrong = |why| Err(ProfileError::Value { at: start, what, value, why });
            return match value {
                _ if byte == 0 && shift > 0 => wrong("is written longer than needed"),
                _ if value > max => wrong(why),
                _ => Ok(value),
            };
        }
        let why = "goes on, and has more than 64 bits already";
        Err(ProfileError::Value { at: start, what, value, why })
    }

    /// A cluster of `limit` that the image has, `next` or later.
    fn touched(&mut self, next: u64, limit: u64, whole: u32) -> Result<Touched, ProfileError> {
        let at = self.at;
        let what = "the number of clusters left out";
        let why = "leads beyond the image";
        let Some(left_out_max) = limit.checked_sub(next + 1) else {
            return Err(ProfileError::Value { at, what, value: 0, why });
        };
        let index = next + self.varint(what, left_out_max, why)?;
        let why = "is more than three days of ms";
        let first_ms = self.varint("a first access", u64::from(TIME_MS_MAX), why)?;
        let at = self.at;
        let score = u32::from(u16::from_le_bytes(self.array("a score")?));
        if score == 0 || score > whole {
            let why = "does not go with the number of runs";
            return Err(ProfileError::Value { at, what: "a score", value: u64::from(score), why });
        }
        Ok(Touched { index, score, first_ms: u32::try_from(first_ms).unwrap_or(TIME_MS_MAX) })
    }
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

// Scores fit the two bytes they have.
const _: () = assert!(SCORE_MAX <= u16::MAX as u32);

/// CRC-32 as in IEEE 802.3, four bits at a time.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 16] = {
        let mut table = [0; 16];
        let (mut index, mut nibble) = (0, 0);
        while index < 16 {
            let (mut crc, mut bit) = (nibble, 0);
            while bit < 4 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
                bit += 1;
            }
            table[index] = crc;
            index += 1;
            nibble += 1;
        }
        table
    };
    let nibble = |crc: u32| TABLE[(crc & 15) as usize] ^ crc >> 4;
    !bytes.iter().fold(!0, |crc, byte| nibble(nibble(crc ^ u32::from(*byte))))
}

/// Makes the checksum right.
#[cfg(test)]
pub(super) fn seal(bytes: &mut [u8]) {
    let (body, crc) = bytes.split_at_mut(bytes.len() - 4);
    crc.copy_from_slice(&crc32(body).to_le_bytes());
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(super::crc32(b""), 0);
    }
}
