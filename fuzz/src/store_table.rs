//! Page tables of stored snapshots.

use vmfork_store::{Extent, Table};

/// Bytes that are a table are its only encoding, and say of each window what its extents do.
pub fn run(data: &[u8]) {
    for file in [data, &crate::sealed(data)] {
        let Ok(table) = Table::decode(file) else { continue };
        assert_eq!(table.encode(), file);
        let in_windows: u64 = table.windows().iter().map(|window| window.own_pages).sum();
        assert_eq!(in_windows, table.count(Extent::Own));
        for window in table.windows() {
            let runs = table.own_runs(table.window_range(window.index));
            assert_eq!(runs.map(|run| run.len()).sum::<u64>(), window.own_pages);
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    // pages, pages a window, extents; then each window's chunk.
    let mixed = [&b"VFTB\x01\x40\x08\x03\x02\x08\x01\x05\x00\x10"[..]].concat();
    let chunks = [&[7; 32][..], &[100], &[8; 32], &[101], &[9; 32], &[102]].concat();
    let empty = b"VFTB\x01\x01\x01\x00".to_vec();
    vec![[mixed, chunks].concat(), empty.clone(), crate::sealed(&empty)]
}
