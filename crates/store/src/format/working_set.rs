//! The pages that a snapshot's clones touch first, stored apart so that one sequential read brings
//! them all in.
//!
//! ```text
//!    0   4  "VFWS"
//!    4   1  version, 1
//!    5   3  0
//!    8  16  id of the snapshot
//!   24   4  bytes of this header, to the end of its hash
//!   28   …  varint number of runs, then each run:
//!             varint  pages from the end of the one before (of the first: from page 0) to its start: twice as many,
//!                     or, if it is before that, twice as many less one
//!             varint  pages
//!           for each frame:
//!             varint  stored bytes
//!             32      blake3 of the stored bytes
//!       32  blake3 of all before
//!       …   the frames, one after the other
//! ```
//!
//! Runs are in the order in which their pages are needed, so that what is read first is needed
//! first. So are vmTorrent's profiles (CoNEXT 2012, section 3.2). None overlaps another. Their
//! pages, of any owner, in that order, are cut into frames of 1 MiB, the last one shorter. A frame
//! with as many stored bytes as it has raw ones is stored as it is; any other is zstd. Each can be
//! decompressed by itself, so that several threads keep up with one that reads.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use blake3::Hash;
use parking_lot::Mutex;
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};

use super::chunk::unzstd;
use super::descriptor::SnapshotId;
use vmfork_image::bytes::{Cursor, Flaw, put_varint};

const MAGIC: [u8; 4] = *b"VFWS";
const VERSION: u8 = 1;
/// Up to the header's length, which says how much more of it there is.
const FIXED_BYTES: u32 = 28;
/// A header of this size has five million runs.
const HEADER_BYTES_MAX: u32 = 32 << 20;

/// Most raw bytes: what is worth reading before a VM starts, and a bound for who has to read all of
/// it to check it.
pub(crate) const WORKING_SET_BYTES_MAX: u64 = 1 << 30;

/// Raw bytes of a frame.
pub(crate) const FRAME_BYTES: u64 = 1 << 20;

/// A frame as it is stored.
pub(crate) fn pack_frame(raw: &[u8], zstd: Option<&mut zstd::bulk::Compressor<'_>>) -> Vec<u8> {
    let packed = zstd.and_then(|zstd| zstd.compress(raw).ok());
    packed.filter(|packed| packed.len() < raw.len()).unwrap_or_else(|| raw.to_vec())
}

/// A distance, forth or back, as a number without a sign.
fn zigzag(from: u64, to: u64) -> u64 {
    match to.checked_sub(from) {
        Some(forth) => forth << 1,
        None => ((from - to) << 1) - 1,
    }
}

/// Where such a distance leads to; `None`: to no page.
fn unzigzag(from: u64, distance: u64) -> Option<u64> {
    match distance & 1 {
        0 => from.checked_add(distance >> 1),
        _ => from.checked_sub((distance >> 1) + 1),
    }
}

/// The file. `runs` do not overlap, and none begins where the one before ends; `frames` hold their
/// pages.
pub(crate) fn encode(id: SnapshotId, runs: &[PageRange], frames: &[Vec<u8>]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&[VERSION, 0, 0, 0]);
    file.extend_from_slice(&id.0);
    file.extend_from_slice(&[0; 4]);
    put_varint(&mut file, runs.len() as u64);
    let mut end = 0;
    for run in runs {
        put_varint(&mut file, zigzag(end, run.start().0));
        put_varint(&mut file, run.len());
        end = run.end().0;
    }
    for frame in frames {
        put_varint(&mut file, frame.len() as u64);
        file.extend_from_slice(blake3::hash(frame).as_bytes());
    }
    // One that is too long for its reader is refused by it.
    let header_bytes = u32::try_from(file.len() + blake3::OUT_LEN).unwrap_or(u32::MAX);
    file[24..28].copy_from_slice(&header_bytes.to_le_bytes());
    let hash = blake3::hash(&file);
    file.extend_from_slice(hash.as_bytes());
    frames.iter().for_each(|frame| file.extend_from_slice(frame));
    file
}

#[derive(Debug)]
struct Frame {
    stored_bytes: u64,
    raw_bytes: u64,
    hash: Hash,
    /// Where its pages begin: in which run, and how many pages into it.
    run: usize,
    skipped_pages: u64,
}

/// What comes before the frames.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) id: SnapshotId,
    pub(crate) runs: Vec<PageRange>,
    frames: Vec<Frame>,
    bytes: u64,
}

impl Header {
    fn read(from: &mut dyn Read) -> Result<Self, ReadError> {
        let mut header = Vec::new();
        from.take(u64::from(FIXED_BYTES)).read_to_end(&mut header)?;
        let mut cursor = Cursor::new(&header);
        cursor.magic(MAGIC, VERSION, "working set")?;
        if cursor.array::<3>("three zeros")? != [0; 3] {
            return Err(Flaw::at(5, "bytes that are not known to mean anything").into());
        }
        let id = SnapshotId(cursor.array("the snapshot's id")?);
        let bytes = cursor.u32("the header's length")?;
        let rest = bytes.checked_sub(FIXED_BYTES).filter(|_| bytes <= HEADER_BYTES_MAX);
        let Some(rest) = rest else {
            return Err(Flaw::at(24, format!("a header of {bytes} bytes")).into());
        };
        // Grows as bytes come, whatever the length says.
        from.take(u64::from(rest)).read_to_end(&mut header)?;
        let Some((body, hash)) = header.split_last_chunk::<{ blake3::OUT_LEN }>() else {
            return Err(Flaw::at(header.len(), "cut short: no room for a hash").into());
        };
        if header.len() as u64 != u64::from(bytes) || blake3::hash(body) != Hash::from_bytes(*hash)
        {
            let what = "changed or cut: the hash at the header's end is not that of the header";
            return Err(Flaw::at(body.len(), what).into());
        }
        let mut cursor = Cursor::new(body);
        cursor.take(FIXED_BYTES as usize, "the header")?;
        let runs = Self::decode_runs(&mut cursor)?;
        let mut frames = Vec::new();
        // Runs don't overlap, so this is at most as many as there are page numbers.
        let pages = runs.iter().map(PageRange::len).sum::<u64>();
        if pages > WORKING_SET_BYTES_MAX / PAGE_BYTES {
            let what = format!("{pages} pages, of at most {}", WORKING_SET_BYTES_MAX / PAGE_BYTES);
            return Err(Flaw::at(FIXED_BYTES as usize, what).into());
        }
        let mut left = pages * PAGE_BYTES;
        let (mut run, mut skipped_pages) = (0, 0);
        // Ends: each frame takes 33 bytes of the header at least.
        while left > 0 {
            let at = cursor.offset();
            let raw_bytes = left.min(FRAME_BYTES);
            let stored_bytes = cursor.varint("a frame's length")?;
            if stored_bytes == 0 || stored_bytes > raw_bytes {
                let what = format!("a frame of {stored_bytes} bytes for {raw_bytes}");
                return Err(Flaw::at(at, what).into());
            }
            let hash = Hash::from_bytes(cursor.array("a frame's hash")?);
            frames.push(Frame { stored_bytes, raw_bytes, hash, run, skipped_pages });
            left -= raw_bytes;
            skipped_pages += raw_bytes / PAGE_BYTES;
            while let Some(of) = runs.get(run).filter(|of| of.len() <= skipped_pages) {
                skipped_pages -= of.len();
                run += 1;
            }
        }
        cursor.end("header")?;
        Ok(Self { id, runs, frames, bytes: u64::from(bytes) })
    }

    fn decode_runs(cursor: &mut Cursor<'_>) -> Result<Vec<PageRange>, Flaw> {
        let at = cursor.offset();
        let count = cursor.varint("the number of runs")?;
        let room = cursor.rest_bytes() / 2;
        let count = match usize::try_from(count) {
            Ok(count) if count <= room => count,
            _ => return Err(Flaw::at(at, format!("{count} runs, {room} at most follow"))),
        };
        let mut runs = Vec::with_capacity(count);
        let mut end = 0u64;
        for i in 0..count {
            let at = cursor.offset();
            let gap = cursor.varint("a run's start")?;
            let len = cursor.varint("a run's length")?;
            let start = unzigzag(end, gap).filter(|_| len > 0 && (i == 0 || gap > 0));
            let run = start.and_then(|start| PageRange::new(PageIdx(start), len).ok());
            let Some(run) = run else {
                let what = format!("a run of {len} pages, {gap} halves from page {end}");
                return Err(Flaw::at(at, what));
            };
            end = run.end().0;
            runs.push(run);
        }
        let mut ascending = runs.clone();
        ascending.sort_unstable_by_key(PageRange::start);
        if let Some([one, other]) = ascending.array_windows().find(|[a, b]| a.end() > b.start()) {
            return Err(Flaw::at(at, format!("pages {one} and pages {other} overlap")));
        }
        Ok(runs)
    }

    /// What makes it that of another snapshot than `id`, with `pages`.
    pub(crate) fn flaw_for(&self, id: SnapshotId, pages: u64) -> Option<Flaw> {
        if self.id != id {
            let what = format!("the working set of snapshot {}, not of {id}", self.id);
            return Some(Flaw::at(8, what));
        }
        let beyond = self.runs.iter().find(|run| run.end().0 > pages)?;
        Some(Flaw::at(FIXED_BYTES as usize, format!("it has pages {beyond}, of {pages}")))
    }

    /// The pieces of a frame, in order.
    fn pieces(&self, frame: &Frame) -> impl Iterator<Item = PageRange> + '_ {
        let (mut skipped, mut left) = (frame.skipped_pages, frame.raw_bytes / PAGE_BYTES);
        self.runs[frame.run..].iter().map_while(move |run| {
            let rest = run.from_page(PageIdx(run.start().0 + skipped)).truncate(left);
            skipped = 0;
            left -= rest.len();
            (!rest.is_empty()).then_some(rest)
        })
    }
}

/// Why a working set can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Flaw(#[from] Flaw),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("put a piece of it in place")]
    Each(#[source] io::Error),
}

/// A working set, from its header on.
pub(crate) struct Frames<'a> {
    header: Header,
    next: Mutex<Next<'a>>,
}

struct Next<'a> {
    from: Box<dyn Read + Send + 'a>,
    frame: usize,
    offset: u64,
}

impl std::fmt::Debug for Frames<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frames").field("header", &self.header).finish_non_exhaustive()
    }
}

impl<'a> Frames<'a> {
    pub(crate) fn open(mut from: Box<dyn Read + Send + 'a>) -> Result<Self, ReadError> {
        let header = Header::read(&mut *from)?;
        let offset = header.bytes;
        Ok(Self { header, next: Mutex::new(Next { from, frame: 0, offset }) })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    pub(crate) fn len(&self) -> usize {
        self.header.frames.len()
    }

    /// Read the next frame and hand over its pages, run by run. Returns its raw bytes. Several
    /// threads may do so: one reads while the others decompress. With [`Frames::len`] calls all is
    /// read, and checked to end there.
    pub(crate) fn next(
        &self,
        each: &(dyn Fn(PageRange, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<u64, ReadError> {
        let (at, offset, stored) = {
            let mut next = self.next.lock();
            let Some(frame) = self.header.frames.get(next.frame) else { return Ok(0) };
            let (at, offset) = (next.frame, next.offset);
            let mut stored = Vec::new();
            (&mut next.from).take(frame.stored_bytes).read_to_end(&mut stored)?;
            next.frame += 1;
            next.offset += stored.len() as u64;
            if next.frame == self.len() && next.from.read(&mut [0])? > 0 {
                let what = "bytes after the end of the working set".to_owned();
                return Err(Flaw { what, offset: next.offset }.into());
            }
            (at, offset, stored)
        };
        let frame = &self.header.frames[at];
        if stored.len() as u64 != frame.stored_bytes || blake3::hash(&stored) != frame.hash {
            let what = format!("frame {at} was changed or cut: its hash is another");
            return Err(Flaw { what, offset }.into());
        }
        let raw_bytes = frame.raw_bytes;
        let raw = if frame.stored_bytes == raw_bytes {
            stored
        } else {
            let mut raw = vec![0; usize::try_from(raw_bytes).unwrap_or(0)];
            let what = |why| Flaw { what: format!("frame {at} {why}"), offset };
            unzstd(&stored, &mut raw).map_err(what)?;
            raw
        };
        let mut rest = &raw[..];
        for piece in self.header.pieces(frame) {
            // The pieces of a frame have as many bytes as the frame.
            let len = usize::try_from(piece.byte_len()).unwrap_or(usize::MAX).min(rest.len());
            let (bytes, after) = rest.split_at(len);
            each(piece, bytes).map_err(ReadError::Each)?;
            rest = after;
        }
        Ok(raw_bytes)
    }
}

/// What is wrong with the working set of snapshot `id`, which has `pages`, if anything is: all of
/// it is read and thrown away.
///
/// # Errors
/// `cancelled` was set.
pub fn flaw_of(
    file: &[u8],
    id: SnapshotId,
    pages: u64,
    cancelled: &AtomicBool,
) -> Result<Option<Flaw>, Cancelled> {
    match check(file, id, pages, cancelled) {
        Ok(()) => Ok(None),
        Err(CheckError::Cancelled) => Err(Cancelled),
        Err(CheckError::Read(ReadError::Flaw(flaw))) => Ok(Some(flaw)),
        Err(CheckError::Read(other)) => Ok(Some(Flaw::at(0, other.to_string()))),
    }
}

/// The reader was told to stop before the end of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cancelled")]
pub struct Cancelled;

enum CheckError {
    Cancelled,
    Read(ReadError),
}

impl<E: Into<ReadError>> From<E> for CheckError {
    fn from(error: E) -> Self {
        Self::Read(error.into())
    }
}

fn check(
    file: &[u8],
    id: SnapshotId,
    pages: u64,
    cancelled: &AtomicBool,
) -> Result<(), CheckError> {
    let frames = Frames::open(Box::new(file))?;
    // Before the frames: whose it is costs nothing to tell.
    frames.header().flaw_for(id, pages).map_or(Ok(()), Err)?;
    for _ in 0..frames.len() {
        if cancelled.load(Ordering::Relaxed) {
            return Err(CheckError::Cancelled);
        }
        frames.next(&|_, _| Ok(()))?;
    }
    // Without frames there was nothing to read to the end of.
    let end = frames.header().bytes;
    if frames.len() == 0 && file.len() as u64 > end {
        let what = "bytes after the end of the working set".into();
        return Err(Flaw { what, offset: end }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PAGE_LEN;
    use super::*;

    const ID: SnapshotId = SnapshotId([7; 16]);
    const PAGES: u64 = 10_000;

    fn check(file: &[u8], id: SnapshotId) -> Result<(), Flaw> {
        flaw_of(file, id, PAGES, &AtomicBool::new(false))
            .expect("not cancelled")
            .map_or(Ok(()), Err)
    }

    /// Gaps and lengths, made into runs, the second half of them first; each page filled with its
    /// number.
    fn file_of(pieces: &[(u64, u64)]) -> (Vec<PageRange>, Vec<u8>) {
        let (mut runs, mut raw, mut end) = (Vec::new(), Vec::new(), 0);
        for (gap, len) in pieces {
            let run = PageRange::new(PageIdx(end + gap + 1), *len).expect("small");
            end = run.end().0;
            runs.push(run);
        }
        runs.rotate_right(pieces.len() / 2);
        for run in &runs {
            for page in run.pages() {
                let at = raw.len();
                raw.resize(at + PAGE_LEN, page.0.to_le_bytes()[0]);
                blake3::Hasher::new()
                    .update(&page.0.to_le_bytes())
                    .finalize_xof()
                    .fill(&mut raw[at..at + 99]);
            }
        }
        let mut zstd = zstd::bulk::Compressor::new(1).expect("zstd");
        let frame_bytes = usize::try_from(FRAME_BYTES).expect("small");
        let mut frames = Vec::new();
        for (i, raw) in raw.chunks(frame_bytes).enumerate() {
            frames.push(pack_frame(raw, i.is_multiple_of(2).then_some(&mut zstd)));
        }
        (runs.clone(), encode(ID, &runs, &frames))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn a_working_set_reads_back(pieces in prop::collection::vec((0u64..50, 1u64..300), 0..8)) {
            let (runs, file) = file_of(&pieces);
            let frames = Frames::open(Box::new(io::Cursor::new(file.clone()))).expect("as written");
            prop_assert_eq!(&frames.header().runs, &runs);
            let read = Mutex::new(Vec::new());
            for _ in 0..frames.len() {
                frames.next(&|range, bytes| {
                    for (page, bytes) in range.pages().zip(bytes.chunks_exact(PAGE_LEN)) {
                        assert_eq!(bytes[PAGE_LEN - 1], page.0.to_le_bytes()[0]);
                    }
                    assert_eq!(bytes.len() as u64, range.byte_len());
                    read.lock().extend(range.pages());
                    Ok(())
                }).expect("as written");
            }
            let all: Vec<_> = runs.iter().flat_map(PageRange::pages).collect();
            prop_assert_eq!(&*read.lock(), &all);
            prop_assert_eq!(check(&file, ID), Ok(()));
            prop_assert!(check(&file, SnapshotId([8; 16])).is_err());
            prop_assert!(check(&[&file[..], &[0]].concat(), ID).is_err());
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            prop_assert!(check(&bytes, ID).is_err());
            let mut file = [&MAGIC[..], &[VERSION, 0, 0, 0], &ID.0].concat();
            let header_bytes = FIXED_BYTES + u32::try_from(bytes.len()).expect("small") + 32;
            file.extend_from_slice(&header_bytes.to_le_bytes());
            file.extend_from_slice(&bytes);
            file.extend_from_slice(blake3::hash(&file).as_bytes());
            // A few bytes can be a working set of no pages; none of these is one of any.
            let _ = check(&file, ID);
        }
    }

    #[test]
    fn every_changed_bit_and_every_cut_is_noticed() {
        let (_, file) = file_of(&[(3, 2), (5, 1)]);
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&bad, ID).is_err(), "bit {bit}");
        }
        for bytes in 0..file.len() {
            assert!(check(&file[..bytes], ID).is_err(), "{bytes}");
        }
    }

    #[test]
    fn runs_that_overlap_or_belong_together_are_refused() {
        let range = |start, len| PageRange::new(PageIdx(start), len).expect("small");
        let flaw = |runs: &[PageRange]| {
            let pages: u64 = runs.iter().map(PageRange::len).sum();
            let frame = pack_frame(&vec![0; usize::try_from(pages).expect("few") * PAGE_LEN], None);
            check(&encode(ID, runs, &[frame]), ID).err().map(|flaw| flaw.what)
        };
        assert_eq!(flaw(&[range(40, 2), range(7, 9), range(20, 1)]), None);
        let overlap = flaw(&[range(40, 2), range(7, 9), range(15, 1)]).expect("refused");
        assert_eq!(overlap, "pages 7+9 and pages 15+1 overlap");
        assert!(flaw(&[range(40, 2), range(42, 9)]).is_some(), "one run");
    }

    #[test]
    fn what_would_take_long_is_refused_by_its_header_and_ends_when_told() {
        // A frame's worth of header for each MiB: no more than a few bytes for any number of them.
        let header = |pages: u64| {
            let run = PageRange::between(PageIdx(0), PageIdx(pages));
            let frames =
                vec![vec![0]; usize::try_from(run.byte_len().div_ceil(FRAME_BYTES)).expect("few")];
            encode(ID, &[run], &frames)
        };
        let most = WORKING_SET_BYTES_MAX / PAGE_BYTES;
        let flaw = |pages| {
            let file = header(pages);
            flaw_of(&file, ID, most, &AtomicBool::new(false))
                .expect("not cancelled")
                .expect("wrong")
                .what
        };
        assert_eq!(flaw(most + 1), "262145 pages, of at most 262144");
        assert!(flaw(most).contains("frame 0"), "as far as that");
        let of_fewer =
            flaw_of(&header(most), ID, most - 1, &AtomicBool::new(false)).expect("not cancelled");
        assert!(
            of_fewer.is_some_and(|flaw| flaw.what.contains("it has pages 0+262144, of 262143"))
        );
        let (_, file) = file_of(&[(3, 2)]);
        assert_eq!(flaw_of(&file, ID, PAGES, &AtomicBool::new(true)), Err(Cancelled));
    }
}
