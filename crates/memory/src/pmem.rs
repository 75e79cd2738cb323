//! Persistent memory that shows a file to the guest: its size, and the block that it begins with.
//!
//! ```text
//!   0        4096       8192            2 MiB                        size
//!   +--------+----------+---------------+------------------+---------+
//!   | zeros  | info     | zeros         | the file         | zeros   |
//!   +--------+----------+---------------+------------------+---------+
//! ```
//!
//! The info block makes Linux treat the rest as a block device with DAX, in its mode `fsdax`. The
//! guest keeps 64 bytes of its RAM for each page, which is 16 MiB for each GiB.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use vmfork_image::PAGE_BYTES;

/// Where the file begins. Linux demands this alignment.
pub const PMEM_FILE_OFFSET: u64 = 2 << 20;
const ALIGN_BYTES: u64 = 2 << 20;
/// Where Linux looks for the info block.
const INFO_OFFSET: u64 = 4096;
const INFO_BYTES: usize = 4096;
const CHECKSUM_OFFSET: usize = INFO_BYTES - 8;
/// Bytes of RAM that the guest keeps for each page: Linux's `struct page`.
const PAGE_STRUCT_BYTES: u16 = 64;

/// Size in bytes of the persistent memory that shows a file of `file_bytes`.
#[must_use]
pub fn pmem_bytes(file_bytes: u64) -> u64 {
    file_bytes.next_multiple_of(ALIGN_BYTES).saturating_add(PMEM_FILE_OFFSET)
}

/// Bytes of its RAM that a guest spends on so much persistent memory.
#[must_use]
pub fn pmem_cost_bytes(pmem_bytes: u64) -> u64 {
    pmem_bytes / PAGE_BYTES * u64::from(PAGE_STRUCT_BYTES)
}

/// A file in memory with the info block, and holes else. A hole that the guest reads takes memory
/// of the host. The file that is shown leaves at most 4 MiB of holes.
pub(crate) fn placeholder(pmem_bytes: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("vmfork-pmem", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, pmem_bytes)?;
    let info = info_block(pmem_bytes);
    let written = rustix::io::pwrite(&file, &info, INFO_OFFSET)?;
    if written == info.len() { Ok(file) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// `struct nd_pfn_sb` of Linux (drivers/nvdimm/pfn.h), version 1.4, of a namespace without a label:
/// its parent's UUID is zero.
fn info_block(pmem_bytes: u64) -> [u8; INFO_BYTES] {
    let pages = pmem_bytes.saturating_sub(PMEM_FILE_OFFSET) / PAGE_BYTES;
    let fields: [&[u8]; 15] = [
        b"NVDIMM_PFN_INFO\0",
        b"vmfork root pmem",              // UUID: any but zero
        &[0; 16],                         // the parent's UUID
        &0_u32.to_le_bytes(),             // flags
        &1_u16.to_le_bytes(),             // major version
        &4_u16.to_le_bytes(),             // minor version
        &PMEM_FILE_OFFSET.to_le_bytes(),  // dataoff
        &pages.to_le_bytes(),             // npfns
        &1_u32.to_le_bytes(),             // mode: `struct page`s are in RAM
        &0_u32.to_le_bytes(),             // start_pad
        &0_u32.to_le_bytes(),             // end_trunc
        &0x20_0000_u32.to_le_bytes(),     // align
        &4096_u32.to_le_bytes(),          // page_size
        &PAGE_STRUCT_BYTES.to_le_bytes(), // page_struct_size
        &[0; 2],
    ];
    let mut block = [0; INFO_BYTES];
    for (to, from) in block.iter_mut().zip(fields.into_iter().flatten()) {
        *to = *from;
    }
    let sum = fletcher64(&block).to_le_bytes();
    for (to, from) in block.iter_mut().skip(CHECKSUM_OFFSET).zip(sum) {
        *to = from;
    }
    block
}

/// As Linux's `nd_fletcher64`, of words in little endian.
fn fletcher64(bytes: &[u8]) -> u64 {
    let (mut low, mut high) = (0_u32, 0_u64);
    for word in bytes.as_chunks().0 {
        low = low.wrapping_add(u32::from_le_bytes(*word));
        high = high.wrapping_add(u64::from(low));
    }
    high << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_fits_into_its_memory() {
        for (file_bytes, expected) in [(4096, 2), (2 << 20, 2), ((2 << 20) + 1, 4)] {
            assert_eq!(pmem_bytes(file_bytes), (expected << 20) + PMEM_FILE_OFFSET);
        }
        assert_eq!(pmem_cost_bytes(1 << 30), 16 << 20);
    }

    /// What the kernel reads, at the offsets of `struct nd_pfn_sb`, and a sum made by hand.
    #[test]
    fn the_info_block_is_what_linux_reads() {
        let block = info_block(pmem_bytes(300 << 20));
        let at = |offset: usize, len: usize| &block[offset..offset + len];
        assert_eq!(at(0, 16), b"NVDIMM_PFN_INFO\0");
        assert_eq!((at(52, 2), at(54, 2)), (&[1, 0][..], &[4, 0][..]));
        assert_eq!(at(56, 8), (2_u64 << 20).to_le_bytes());
        assert_eq!(at(64, 8), (300_u64 << 8).to_le_bytes());
        assert_eq!(at(72, 4), 1_u32.to_le_bytes());
        assert_eq!(at(84, 4), (2_u32 << 20).to_le_bytes());
        assert_eq!(at(88, 4), 4096_u32.to_le_bytes());
        assert_eq!(at(92, 2), 64_u16.to_le_bytes());
        let mut unsigned = block;
        unsigned[CHECKSUM_OFFSET..].fill(0);
        assert_eq!(at(CHECKSUM_OFFSET, 8), fletcher64(&unsigned).to_le_bytes());
        assert_eq!(fletcher64(&[1, 0, 0, 0, 2, 0, 0, 0]), (1 + 3) << 32 | 3);
    }
}
