//! A new volume gets its content: a copy, so that it depends on nothing.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use vmfork_disk::{Disk, DiskImage, Lower};
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};
use vmfork_nbd::Span;

/// Copied at once.
const PIECE_PAGES: u64 = 256;

/// Copies what is not zeros, until `given_up`. Blocking.
///
/// # Errors
/// The medium's, or it is full; `Interrupted`: it was given up.
pub(super) fn copy(from: &DiskImage, to: &Disk, given_up: &AtomicBool) -> io::Result<()> {
    let mut data: Vec<PageRange> = Vec::new();
    let all = PageRange::first(from.size_bytes().div_ceil(PAGE_BYTES));
    from.runs(all, &mut |run, zero| {
        if !zero {
            data.push(run);
        }
    });
    let mut bytes = Vec::new();
    for run in data {
        let mut rest = run;
        while !rest.is_empty() {
            if given_up.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let end = rest.end().min(PageIdx(rest.start().0.saturating_add(PIECE_PAGES)));
            copy_piece(from, to, rest.until_page(end), &mut bytes)?;
            rest = rest.from_page(end);
        }
    }
    Ok(())
}

/// Copies a piece by its pages: a file that was written whole has zeros where others have holes.
fn copy_piece(
    from: &DiskImage,
    to: &Disk,
    piece: PageRange,
    bytes: &mut Vec<u8>,
) -> io::Result<()> {
    bytes.resize(small(piece.byte_len())?, 0);
    from.read(piece, bytes)?;
    let pages: Vec<&[u8]> = bytes.chunks(small(PAGE_BYTES)?).collect();
    let (mut offset_bytes, mut rest) = (piece.start().byte_offset(), &bytes[..]);
    for run in pages.chunk_by(|page, next| is_zeros(page) == is_zeros(next)) {
        let (data, beyond) = rest.split_at(run.iter().map(|page| page.len()).sum());
        if run.first().is_some_and(|page| !is_zeros(page)) {
            // The last page may end beyond the disk.
            let len = data.len().min(small(to.size_bytes().saturating_sub(offset_bytes))?);
            let len_bytes = u32::try_from(len).map_err(|_| too_large())?;
            let span = Span { offset_bytes, len_bytes };
            to.write(span, data.get(..len).unwrap_or_default())?;
        }
        offset_bytes += data.len() as u64;
        rest = beyond;
    }
    Ok(())
}

fn is_zeros(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

fn too_large() -> io::Error {
    io::ErrorKind::InvalidInput.into()
}

fn small(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| too_large())
}
