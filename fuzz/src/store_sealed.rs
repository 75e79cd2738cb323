//! Device states and profiles of stored snapshots, sealed.

use vmfork_store::format::sealed::{SealedKind, seal, unseal};

const KINDS: [SealedKind; 2] = [SealedKind::State, SealedKind::Profile];

/// What is read is no more than its kind may have, and can be sealed and read again; also one whose
/// hash is right.
pub fn run(data: &[u8]) {
    let mut file = data.to_vec();
    for _ in 0..2 {
        for kind in KINDS {
            if let Ok(raw) = unseal(kind, &file) {
                assert!(raw.len() as u64 <= kind.raw_bytes_max());
                assert_eq!(unseal(kind, &seal(kind, &raw)), Ok(raw));
            }
        }
        if let Some((head, payload)) = file.split_at_checked(56) {
            let hash = blake3::Hasher::new().update(&head[..24]).update(payload).finalize();
            file[24..56].copy_from_slice(hash.as_bytes());
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let contents = [&b""[..], b"as it is", &[7; 900]];
    KINDS.iter().flat_map(|kind| contents.map(|raw| seal(*kind, raw))).collect()
}
