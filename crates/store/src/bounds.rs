//! How many bytes a store may have under each key.

use crate::format::chunk::CHUNK_FILE_BYTES_MAX;
use crate::format::descriptor::DESCRIPTOR_BYTES_MAX;
use crate::format::sealed::SealedKind;
use crate::names::{CHUNKS, FORMAT_KEY, ORIGIN, PROFILE, STATE};

/// Most bytes that are read or written in one piece. The largest file is a working set: 1 GiB, and
/// what says which pages those are.
pub(crate) const BLOB_BYTES_MAX: u64 = (1 << 30) + (32 << 20);
/// A line of text.
const LINE_BYTES_MAX: u64 = 4096;

/// Most bytes of what is under a key. A reader of a store that others write to takes no more memory
/// than a chunk may need.
pub fn bytes_max(key: &str) -> u64 {
    if key.starts_with(CHUNKS) {
        return CHUNK_FILE_BYTES_MAX;
    }
    match key.rsplit_once(['.', '/']).map_or(key, |(_, ending)| ending) {
        FORMAT_KEY | ORIGIN => LINE_BYTES_MAX,
        "json" => DESCRIPTOR_BYTES_MAX,
        STATE => SealedKind::State.file_bytes_max(),
        PROFILE => SealedKind::Profile.file_bytes_max(),
        _ => BLOB_BYTES_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{DESCRIPTOR, chunk_key, snapshot_key};

    #[test]
    fn a_key_says_how_much_there_may_be() {
        let chunk = chunk_key(&blake3::hash(b"x"));
        assert_eq!(bytes_max(&chunk), CHUNK_FILE_BYTES_MAX);
        assert_eq!(bytes_max(FORMAT_KEY), 4096);
        assert_eq!(bytes_max("snapshots/web/x.origin"), 4096);
        assert_eq!(bytes_max(&snapshot_key("web", DESCRIPTOR)), DESCRIPTOR_BYTES_MAX);
        assert_eq!(bytes_max(&snapshot_key("a.state", "x.profile")), (16 << 20) + 56);
        assert_eq!(bytes_max(&snapshot_key("web", "x.working-set")), BLOB_BYTES_MAX);
    }
}
