//! Where the data of a sparse file is.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::SeekFrom;

/// The next bytes of `file` from `at` on that are no hole, within its first `size` bytes. Moves the
/// file's offset. All are data, where the file system does not know holes.
///
/// # Errors
/// The medium's.
pub(crate) fn next_data(file: &File, at: u64, size: u64) -> io::Result<Option<Range<u64>>> {
    if at >= size {
        return Ok(None);
    }
    let begin = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(begin) => begin,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => at,
        Err(error) => return Err(error.into()),
    };
    if begin >= size {
        return Ok(None);
    }
    let end = rustix::fs::seek(file, SeekFrom::Hole(begin)).unwrap_or(size);
    // The file may have changed meanwhile.
    Ok(Some(begin..end.clamp(begin + 1, size)))
}
