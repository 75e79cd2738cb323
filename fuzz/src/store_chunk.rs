//! Chunks of stored snapshots.

use vmfork_store::Compression;
use vmfork_store::format::chunk::{ChunkEncoder, HEADER_BYTES, decode};

/// What is read is the content with the hash that was asked for, whatever the file says; also of
/// one whose seal is right.
pub fn run(data: &[u8]) {
    let mut file = data.to_vec();
    for _ in 0..2 {
        // What the content would be, were it stored as it is, and were it compressed.
        let content = file.get(HEADER_BYTES..).unwrap_or_default();
        let unpacked = zstd::bulk::decompress(content, 512 * 4096).unwrap_or_default();
        for content in [content, &unpacked] {
            if let Ok(raw) = decode(&file, &blake3::hash(content)) {
                assert_eq!(raw, content);
            }
        }
        if file.len() >= HEADER_BYTES {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&file[..16]);
            if file[5] != 0 {
                hasher.update(&file[HEADER_BYTES..]);
            }
            file[16..24].copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let kinds = [Compression::None, Compression::Zstd { level: 1 }];
    let encoders = kinds.into_iter().filter_map(|kind| ChunkEncoder::new(kind).ok());
    // One page uncompressed is a little more than the fuzzers try; two and more compressed are not.
    encoders
        .zip([1, 3])
        .map(|(mut encoder, pages)| encoder.encode(&vec![7; pages * 4096]))
        .collect()
}
