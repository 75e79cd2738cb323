//! What a process has installed in a range: `PAGEMAP_SCAN` (Linux 6.7).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use linux_raw_sys::general::{
    PAGE_IS_FILE, PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, page_region, pm_scan_arg,
};
use vmfork_image::{PAGE_BYTES, PageIdx, PageRange};

const _: () = assert!(size_of::<pm_scan_arg>() == 96);
const _: () = assert!(size_of::<page_region>() == 24);

/// `_IOWR('f', 16, struct pm_scan_arg)`; linux-raw-sys lacks it.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;

/// Regions asked for in one call.
const REGIONS: usize = 1024;

/// What a stretch of a private mapping holds that is not the file's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// Pages that the process wrote.
    Private,
    /// The zero page.
    Zero,
}

/// Which pages a scan is about: mapped ones without a category, told apart by another.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    without: u32,
    told: u32,
}

/// `/proc/PID/pagemap` of a process.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    /// # Errors
    /// The process has gone, or may not be looked into.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        Ok(Self { file: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Calls `found` for each run of private or zero pages in `range` of the memory that begins at
    /// address `base`, in order. Pages of the mapped file, and pages never touched, are left out.
    ///
    /// # Errors
    /// The call failed; runs found before remain reported.
    pub(crate) fn scan(
        &self,
        base: u64,
        range: PageRange,
        mut found: impl FnMut(PageRange, Held),
    ) -> io::Result<()> {
        let not_file = Wanted { without: PAGE_IS_FILE, told: PAGE_IS_PFNZERO };
        self.regions(base, range, not_file, |run, categories| {
            let zero = categories & u64::from(PAGE_IS_PFNZERO) != 0;
            found(run, if zero { Held::Zero } else { Held::Private });
        })
    }

    /// Calls `found` for each run of pages that the process has mapped, be they the file's or its
    /// own; zero pages are left out. Where the file has pages in memory, a read maps those around
    /// it, too (64 KiB, Linux's fault-around), so that it is known to 16 pages what was touched;
    /// not in views that are attached by page.
    ///
    /// # Errors
    /// As [`Pagemap::scan`].
    pub(crate) fn scan_touched(
        &self,
        base: u64,
        range: PageRange,
        mut found: impl FnMut(PageRange),
    ) -> io::Result<()> {
        let not_zero = Wanted { without: PAGE_IS_PFNZERO, told: 0 };
        self.regions(base, range, not_zero, |run, _| found(run))
    }

    fn regions(
        &self,
        base: u64,
        range: PageRange,
        wanted: Wanted,
        mut found: impl FnMut(PageRange, u64),
    ) -> io::Result<()> {
        let mut regions = [page_region { start: 0, end: 0, categories: 0 }; REGIONS];
        let end = base + range.end().byte_offset();
        let mut next = base + range.byte_offset();
        while next < end {
            let mut argument = pm_scan_arg {
                size: size_of::<pm_scan_arg>() as u64,
                flags: 0,
                start: next,
                end,
                walk_end: 0,
                vec: (&raw mut regions).expose_provenance() as u64,
                vec_len: REGIONS as u64,
                max_pages: 0,
                category_inverted: u64::from(wanted.without),
                category_mask: u64::from(wanted.without),
                category_anyof_mask: u64::from(PAGE_IS_PRESENT | PAGE_IS_SWAPPED),
                return_mask: u64::from(wanted.told),
            };
            // SAFETY:
            // - The file is an open pagemap.
            // - The argument is a live `pm_scan_arg` whose `size` is right.
            // - `vec` points to `vec_len` live, writable `page_region`s.
            let count =
                unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            for region in &regions[..count.min(REGIONS)] {
                let first = PageIdx((region.start - base) / PAGE_BYTES);
                let last = PageIdx((region.end - base) / PAGE_BYTES);
                found(PageRange::between(first, last), region.categories);
            }
            if argument.walk_end <= next {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            next = argument.walk_end;
        }
        Ok(())
    }
}
