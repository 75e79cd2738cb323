//! What is fuzzed: one module per parser of bytes that others write.
//!
//! Each has `run`, which panics if a promise is broken, and `seeds`, real inputs to begin with.
//! `fuzz_targets/` hands them to libFuzzer, [`random`] runs them on stable Rust: for moments in
//! `tests/smoke.rs`, for as long as is wanted by `src/bin/random.rs`.

pub mod agent_frames;
pub mod holder_messages;
pub mod nbd;
pub mod nbd_client;
pub mod page_datagrams;
pub mod page_messages;
pub mod page_tables;
pub mod planted;
pub mod profile;
pub mod qmp_lines;
pub mod random;
pub mod store_chunk;
pub mod store_descriptor;
pub mod store_import;
pub mod store_sealed;
pub mod store_table;
pub mod store_working_set;
pub mod tap_packets;

/// One parser under test.
#[derive(Debug)]
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets. The last has a bug on purpose.
pub const TARGETS: [Target; 17] = [
    Target { name: "agent_frames", run: agent_frames::run, seeds: agent_frames::seeds },
    Target { name: "holder_messages", run: holder_messages::run, seeds: holder_messages::seeds },
    Target { name: "nbd", run: nbd::run, seeds: nbd::seeds },
    Target { name: "nbd_client", run: nbd_client::run, seeds: nbd_client::seeds },
    Target { name: "page_datagrams", run: page_datagrams::run, seeds: page_datagrams::seeds },
    Target { name: "page_messages", run: page_messages::run, seeds: page_messages::seeds },
    Target { name: "page_tables", run: page_tables::run, seeds: page_tables::seeds },
    Target { name: "qmp_lines", run: qmp_lines::run, seeds: qmp_lines::seeds },
    Target { name: "profile", run: profile::run, seeds: profile::seeds },
    Target { name: "store_chunk", run: store_chunk::run, seeds: store_chunk::seeds },
    Target { name: "store_descriptor", run: store_descriptor::run, seeds: store_descriptor::seeds },
    Target { name: "store_import", run: store_import::run, seeds: store_import::seeds },
    Target { name: "store_sealed", run: store_sealed::run, seeds: store_sealed::seeds },
    Target { name: "store_table", run: store_table::run, seeds: store_table::seeds },
    Target {
        name: "store_working_set",
        run: store_working_set::run,
        seeds: store_working_set::seeds,
    },
    Target { name: "tap_packets", run: tap_packets::run, seeds: tap_packets::seeds },
    Target { name: "planted", run: planted::run, seeds: planted::seeds },
];

/// `data` with the hash of all of it behind it, as several of a store's files end. Their contents
/// have to be read with care even if the hash is right: anyone can compute it.
fn sealed(data: &[u8]) -> Vec<u8> {
    [data, blake3::hash(data).as_bytes()].concat()
}

/// Cuts an input in two: how it arrives (the first four bytes: lengths of reads, repeated), and
/// the bytes that do.
fn reads(data: &[u8]) -> (&[u8], impl Iterator<Item = &[u8]>) {
    let (cuts, stream) = data.split_at(data.len().min(4));
    let mut rest = stream;
    let mut at = 0;
    let pieces = std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let cut = cuts.get(at % 4).copied().unwrap_or(1);
        at += 1;
        let (piece, after) = rest.split_at(rest.len().min(usize::from(cut) + 1));
        rest = after;
        Some(piece)
    });
    (stream, pieces)
}
