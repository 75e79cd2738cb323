//! Working sets of stored snapshots.

use std::sync::atomic::AtomicBool;

use vmfork_store::SnapshotId;
use vmfork_store::format::working_set::flaw_of;

/// Read to the end, or refused; also one whose header has the right length and hash.
pub fn run(data: &[u8]) {
    let check = |file: &[u8]| {
        let found = flaw_of(file, SnapshotId([7; 16]), 64, &AtomicBool::new(false));
        found.expect("never cancelled").is_none()
    };
    check(data);
    let mut header = data.to_vec();
    if let (Some(length), Ok(bytes)) = (header.get_mut(24..28), u32::try_from(data.len() + 32)) {
        length.copy_from_slice(&bytes.to_le_bytes());
        let file = crate::sealed(&header);
        check(&file);
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let fixed = [&b"VFWS\x01\0\0\0"[..], &[7; 16], &[0; 4]].concat();
    let runs = [&fixed[..], b"\x02\x03\x02\x05\x01", &[90], &[9; 32]].concat();
    let none = [&fixed[..], &[0]].concat();
    vec![runs, none]
}
