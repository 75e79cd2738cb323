//! The drain: frozen pages that nobody asked for move to the cache, and their originals back to the host.

use vmfork_image::{PageIdx, PageRange};

use crate::host_image::{HostImage, PageLost};

/// Pages copied in one go: 256 KiB, about 60 µs, which a fault may have to wait.
const STEP_PAGES: u64 = 64;

/// Originals are given back in stretches of 16 MiB: each is a call to the keeper.
const RELEASE_PAGES: u64 = 4096;

/// Where the drain stands in one image.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    next: u64,
    released: u64,
    complete: bool,
}

impl Drain {
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Copy the next few pages. The image is sealed.
    ///
    /// # Errors
    /// Pages could not be had.
    pub(crate) fn step(&mut self, image: &HostImage, buffer: &mut Vec<u8>) -> Result<(), PageLost> {
        let Some(table) = image.table() else { return Ok(()) };
        let Some(run) = table.next_of(image.id(), PageIdx(self.next)) else {
            self.complete = true;
            // Dropping the last reference gives back what is left of the moved range.
            image.set_frozen(None);
            return Ok(());
        };
        let (part, present) = image.cache().presence().run(run.truncate(STEP_PAGES));
        if !present {
            fill(image, image, part, buffer)?;
            image.counters.drained_bytes.add(part.byte_len());
        }
        self.next = part.end().0;
        if self.next >= self.released + RELEASE_PAGES {
            if let Some(frozen) = image.frozen() {
                frozen.release_until(PageIdx(self.next));
            }
            self.released = self.next;
        }
        Ok(())
    }
}

/// Bring pages of `owner` into the cache of `image` (the same, or one that descends from it).
///
/// # Errors
/// The pages could not be had, or the host is out of memory.
pub(crate) fn fill(
    image: &HostImage,
    owner: &HostImage,
    range: PageRange,
    buffer: &mut Vec<u8>,
) -> Result<(), PageLost> {
    buffer.resize(usize::try_from(range.byte_len()).unwrap_or(0), 0);
    owner.read_owned(range, buffer)?;
    image.cache().write(range, buffer).map_err(|error| PageLost {
        page: range.start(),
        image: image.id(),
        reason: format!("its cache can't grow: {error}"),
    })?;
    image.cache().presence().set(range);
    let counter = if std::ptr::eq(image, owner) {
        &image.counters.from_frozen_bytes
    } else {
        &image.counters.from_image_bytes
    };
    counter.add(range.byte_len());
    Ok(())
}
