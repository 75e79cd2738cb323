//! Whose bytes a page holds, and where those are kept.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

/// The name of an image. No two images that a daemon ever knew have the same. Shown as hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId(NonZeroU64);

impl ImageId {
    /// `None` for 0, which names no image (and lets a [`Source`] fit one word).
    pub const fn new(id: u64) -> Option<Self> {
        match NonZeroU64::new(id) {
            Some(id) => Some(Self(id)),
            None => None,
        }
    }

    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl From<NonZeroU64> for ImageId {
    fn from(id: NonZeroU64) -> Self {
        Self(id)
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageId({self})")
    }
}

/// A text that is no image id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an image id: 1 to 16 hex digits, not all 0")]
pub struct ImageIdError {
    text: String,
}

impl FromStr for ImageId {
    type Err = ImageIdError;

    fn from_str(text: &str) -> Result<Self, ImageIdError> {
        let digits = (1..=16).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        u64::from_str_radix(text, 16)
            .ok()
            .filter(|_| digits)
            .and_then(Self::new)
            .ok_or_else(|| ImageIdError { text: text.to_owned() })
    }
}

/// What a page table says of a page: whose bytes it holds.
///
/// Not where they are: image k's own pages are in k's cache, or still with one of k's [`Origin`]s.
/// Image k decides that, and it may change (by draining, by a lost host) while the many tables that
/// name k stay as they are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// All bytes are 0; nothing is stored anywhere.
    Zero,
    /// The same page of this image, which may be the table's own.
    Image(ImageId),
}

// A table of millions of pages is made of these.
const _: () = assert!(size_of::<Source>() == 8);

impl Source {
    /// The same in a word, which compares quicker than an enum.
    pub(crate) const fn word(self) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Image(id) => id.get(),
        }
    }

    /// The image that keeps the bytes, if any has to.
    pub const fn image(self) -> Option<ImageId> {
        match self {
            Self::Zero => None,
            Self::Image(id) => Some(id),
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zero"),
            Self::Image(id) => write!(f, "image {id}"),
        }
    }
}

/// A kind of place that an image's own pages can be read from. The order is the one in which to
/// try them: the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// In the image's cache on this host.
    Cache,
    /// Moved aside in the process that the image was frozen from.
    Frozen,
    /// In a stored file, possibly compressed.
    Chunk,
    /// On another host.
    Peer,
}

impl Origin {
    /// One word, for logs, metrics and errors.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Frozen => "frozen",
            Self::Chunk => "chunk",
            Self::Peer => "peer",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_id_is_shown_and_read_as_hex() {
        let id = ImageId::new(0x1f).expect("not 0");
        assert_eq!(id.to_string(), "1f");
        assert_eq!("1f".parse(), Ok(id));
        for bad in ["", "0", "0000", "+1f", "-1", "g", "11112222333344445", "1f "] {
            let error = bad.parse::<ImageId>().expect_err(bad);
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
    }

    #[test]
    fn nearer_origins_are_tried_first() {
        let mut origins = [Origin::Peer, Origin::Cache, Origin::Chunk, Origin::Frozen];
        origins.sort();
        assert_eq!(origins, [Origin::Cache, Origin::Frozen, Origin::Chunk, Origin::Peer]);
    }
}
