//! The keeper: answers `vmforkd`, one request at a time, by changing QEMU's address space.

use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI32, AtomicU64};

use linux_raw_sys::general::{MREMAP_DONTUNMAP, MREMAP_FIXED, MREMAP_MAYMOVE};
use vmfork_tap_proto::{
    ALIGN_BYTES, ATTACH_BY_PAGE, BLOCK_BYTES, Op, RAM_BYTES_MAX, REPLY_BYTES, REQUEST_BYTES, Reply,
    Request, STATUS_MERGEABLE, VERSION,
};

use crate::{blocks, pmem, ram, seccomp, sys};

const STACK_BYTES: usize = 64 << 10;

/// A bit per block of RAM: another mapping may begin here. A freeze moves each mapping by itself.
static BOUNDARIES: [AtomicU64; blocks::BLOCKS_MAX / 64] =
    [const { AtomicU64::new(0) }; blocks::BLOCKS_MAX / 64];
static CONTROL: AtomicI32 = AtomicI32::new(-1);
static QEMU_PIDFD: AtomicI32 = AtomicI32::new(-1);

const EINVAL: u32 = libc::EINVAL.unsigned_abs();
/// RAM is in a state in which the VM must not go on.
const HALF_DONE: u32 = libc::ENOTRECOVERABLE.unsigned_abs();

/// Start the keeper on this control socket. If it can't be started, the socket closes, and
/// `vmforkd` knows.
pub(crate) fn start(control: c_int) {
    let Some(pidfd) = sys::pidfd_open(sys::getpid()).ok().and_then(|fd| c_int::try_from(fd).ok())
    else {
        return;
    };
    CONTROL.store(control, Relaxed);
    QEMU_PIDFD.store(pidfd, Relaxed);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let Ok(stack) =
        (unsafe { sys::mmap(0, STACK_BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) })
    else {
        return;
    };
    let top: *mut c_void = core::ptr::with_exposed_provenance_mut(stack + STACK_BYTES);
    // SAFETY:
    // - `top` is the 16-byte aligned end of a stack that nothing else uses and nothing unmaps.
    // - `serve` never returns, unwinds, allocates or touches thread-local storage, which it shares
    //   with the calling thread, and makes system calls only by `sys`.
    // - CLONE_PARENT makes it a child of vmforkd, which reaps it.
    unsafe {
        libc::clone(
            serve,
            top,
            libc::CLONE_VM | libc::CLONE_PARENT | libc::SIGCHLD,
            core::ptr::null_mut(),
        );
    }
    sys::close(pidfd);
}

extern "C" fn serve(_: *mut c_void) -> c_int {
    sys::block_signals();
    // The three fds that it needs get the lowest numbers, the rest is closed: QEMU's sockets must
    // not stay open when QEMU is gone.
    let keep = [CONTROL.load(Relaxed), ram::userfaultfd(), QEMU_PIDFD.load(Relaxed)];
    let mut kept = [-1; 3];
    for (to, from) in kept.iter_mut().zip(keep) {
        *to = sys::dup_from(from, 500).ok().and_then(|fd| c_int::try_from(fd).ok()).unwrap_or(-1);
    }
    let least = kept.iter().copied().min().unwrap_or(-1);
    let most = kept.iter().copied().max().unwrap_or(-1);
    if least < 0 || most - least != 2 {
        sys::exit_group(1);
    }
    sys::close_range(0, (least - 1).unsigned_abs());
    sys::close_range((most + 1).unsigned_abs(), u32::MAX);
    let [control, userfaultfd, pidfd] = kept;
    // In this process's fd table; QEMU's hooks go on using their own number, which stays in the
    // static.
    let keeper = Keeper { control, userfaultfd };
    if sys::die_with_parent() && seccomp::confine() {
        while keeper.answer_one() {}
    }
    // vmforkd has gone, or wants it: QEMU's faults would never be answered.
    sys::pidfd_kill(pidfd);
    sys::exit_group(0)
}

struct Keeper {
    control: c_int,
    userfaultfd: c_int,
}

/// Room for one fd beside a packet, aligned as a `cmsghdr` wants it.
#[repr(C, align(8))]
struct Ancillary([u8; 24]);

const _: () = assert!(size_of::<libc::cmsghdr>() == 16);

impl Keeper {
    /// Take one request and answer it. False: the other end has gone, or asked for the end.
    fn answer_one(&self) -> bool {
        let mut packet = [0u8; REQUEST_BYTES];
        let Some((len, fd)) = self.receive(&mut packet) else { return false };
        if len == 0 {
            return false;
        }
        let request = Request::from_bytes(&packet);
        let op = Op::from_u32(request.op);
        // Of a run that can't be mapped: the block that QEMU has touched.
        let touched = Cell::new(0);
        let outcome = match op {
            _ if len != REQUEST_BYTES => Err(EINVAL),
            Some(Op::Status) => Ok(self.status()),
            Some(Op::Attach) => self.attach(request.args, fd).map(|()| [0; 6]),
            Some(Op::Freeze) => self.freeze(fd),
            Some(Op::MapCache) => self.map_run(request.args, Some(fd), &touched).map(|()| [0; 6]),
            Some(Op::MapZero) => self.map_run(request.args, None, &touched).map(|()| [0; 6]),
            Some(Op::Release) => Self::release(request.args).map(|()| [0; 6]),
            Some(Op::MapPmem) => {
                let [offset, len, ..] = request.args;
                pmem::map(offset, len, fd).map(|()| [0; 6])
            }
            Some(Op::Exit) => Ok([0; 6]),
            None => Err(EINVAL),
        };
        if fd >= 0 {
            sys::close(fd);
        }
        let (errno, values) = match outcome {
            Ok(values) => (0, values),
            Err(errno) => (errno, [touched.get() as u64, 0, 0, 0, 0, 0]),
        };
        let reply = Reply { errno, sequence: request.sequence, values };
        let with = if op == Some(Op::Status) { self.userfaultfd } else { -1 };
        self.send(&reply, with) && op != Some(Op::Exit)
    }

    /// One packet and the fd beside it (or -1); `None` if the socket is gone.
    fn receive(&self, packet: &mut [u8; REQUEST_BYTES]) -> Option<(usize, c_int)> {
        let mut ancillary = Ancillary([0; 24]);
        let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
        // SAFETY: all-zero is a value of this plain C struct.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut ancillary.0).cast();
        message.msg_controllen = ancillary.0.len();
        let mut interrupted = 0;
        let len = loop {
            // SAFETY: the message points to a live buffer and live room for ancillary data.
            match unsafe { sys::recvmsg(self.control, &mut message, libc::MSG_CMSG_CLOEXEC) } {
                Ok(len) => break len,
                Err(errno) if errno == libc::EINTR.unsigned_abs() && interrupted < 1000 => {
                    interrupted += 1
                }
                Err(_) => return None,
            }
        };
        // A packet that was cut short is none that is known.
        let len = if message.msg_flags & libc::MSG_TRUNC == 0 { len } else { packet.len() + 1 };
        let mut fd = -1;
        if message.msg_controllen >= 20 {
            let word = |at: usize| {
                let mut bytes = [0; 4];
                bytes.copy_from_slice(&ancillary.0[at..at + 4]);
                i32::from_ne_bytes(bytes)
            };
            if word(8) == libc::SOL_SOCKET && word(12) == libc::SCM_RIGHTS {
                fd = word(16);
            }
        }
        Some((len, fd))
    }

    fn send(&self, reply: &Reply, fd: c_int) -> bool {
        let mut bytes: [u8; REPLY_BYTES] = reply.to_bytes();
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut ancillary = Ancillary([0; 24]);
        ancillary.0[0..8].copy_from_slice(&20u64.to_ne_bytes()); // CMSG_LEN(4)
        ancillary.0[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
        ancillary.0[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
        ancillary.0[16..20].copy_from_slice(&fd.to_ne_bytes());
        // SAFETY: all-zero is a value of this plain C struct.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if fd >= 0 {
            message.msg_control = (&raw mut ancillary.0).cast();
            message.msg_controllen = ancillary.0.len();
        }
        // SAFETY: the message points to a live buffer and live ancillary data.
        unsafe { sys::sendmsg(self.control, &message, libc::MSG_NOSIGNAL) }.is_ok()
    }

    fn status(&self) -> [u64; 6] {
        let (start, bytes) = ram::range();
        let flags = if ram::mergeable() { STATUS_MERGEABLE } else { 0 };
        [
            u64::from(VERSION),
            sys::getpid(),
            start as u64,
            bytes as u64,
            u64::from(ram::mappings()),
            flags,
        ]
    }

    /// RAM's range, if it is one that can be managed.
    fn manageable_ram() -> Result<(usize, usize), u32> {
        let (start, bytes) = ram::range();
        let block = BLOCK_BYTES as usize;
        let fits = ram::mappings() == 1
            && bytes > 0
            && start % block == 0
            && bytes % block == 0
            && bytes as u64 <= RAM_BYTES_MAX;
        if fits { Ok((start, bytes)) } else { Err(libc::ENODEV.unsigned_abs()) }
    }

    fn attach(&self, args: [u64; 4], cache: c_int) -> Result<(), u32> {
        let (start, bytes) = Self::manageable_ram()?;
        ram::set_by_page(args[0] & ATTACH_BY_PAGE != 0);
        self.map_view(cache, start, bytes)?;
        forget_parts(bytes);
        ram::set_view();
        Ok(())
    }

    /// Map a cache over a range of RAM, at the same offset, and register it.
    fn map_view(&self, cache: c_int, at: usize, len: usize) -> Result<(), u32> {
        map_cache(cache, at, len)?;
        ram::register(self.userfaultfd, at, len)
    }

    fn freeze(&self, cache: c_int) -> Result<[u64; 6], u32> {
        let (start, bytes) = Self::manageable_ram()?;
        if cache < 0 {
            return Err(libc::EBADF.unsigned_abs());
        }
        let began = sys::monotonic_ns();
        let aside = reserve(start, bytes)?;
        if ram::is_view() {
            // Else the registration would move along, and this would wait until that event is read.
            // Linux (since 6.14) also moves a registered range page by page instead of by whole
            // page tables. That takes 20 ns for each page that the VM has touched.
            if let Err(errno) = ram::unregister(self.userfaultfd, start, bytes) {
                return Err(self.give_back(start, aside, 0, errno));
            }
        }
        let (moved, stretches) = match move_mappings(start, bytes, aside) {
            Ok(stretches) => (bytes, stretches),
            Err((moved, errno)) => return Err(self.give_back(start, aside, moved, errno)),
        };
        let between = sys::monotonic_ns();
        // The VM that continues in the new view touches it again, and is not watched.
        ram::set_by_page(false);
        if let Err(errno) = self.map_view(cache, start, bytes) {
            return Err(self.give_back(start, aside, moved, errno));
        }
        forget_parts(bytes);
        ram::set_view();
        let end = sys::monotonic_ns();
        Ok([aside as u64, between - began, end - between, stretches, ram::witness() as u64, 0])
    }

    /// Undo a freeze that failed half-way: the first `moved` bytes go back where they were. Returns
    /// the errno to report: the one given, or ENOTRECOVERABLE if RAM could not be restored (QEMU
    /// must be killed then).
    fn give_back(&self, start: usize, aside: usize, moved: usize, errno: u32) -> u32 {
        for (offset, len) in Stretches::of(moved) {
            // SAFETY: puts a stretch of RAM back to its own place, which is mapped but empty.
            let back = unsafe {
                sys::mremap(aside + offset, len, MREMAP_MAYMOVE | MREMAP_FIXED, start + offset)
            };
            if back.is_err() {
                return HALF_DONE;
            }
        }
        let (_, bytes) = ram::range();
        // Runs of zeros, too, are registered from now on: the page engine answers their faults as
        // well.
        if ram::is_view() && ram::register(self.userfaultfd, start, bytes).is_err() {
            return HALF_DONE;
        }
        if moved < bytes {
            // SAFETY: the part of the reserved address space that nothing was ever moved to.
            let _unreserved = unsafe { sys::munmap(aside + moved, bytes - moved) };
        }
        errno
    }

    fn map_run(
        &self,
        args: [u64; 4],
        cache: Option<c_int>,
        touched: &Cell<usize>,
    ) -> Result<(), u32> {
        let (start, bytes) = Self::manageable_ram()?;
        let [offset, len, ..] = args;
        let aligned = offset % BLOCK_BYTES == 0 && len % BLOCK_BYTES == 0 && len > 0;
        let end = offset.checked_add(len).ok_or(EINVAL)?;
        if !aligned || end > bytes as u64 || !ram::is_view() {
            return Err(EINVAL);
        }
        let at = start + usize::try_from(offset).map_err(|_| EINVAL)?;
        let len = usize::try_from(len).map_err(|_| EINVAL)?;
        let (first_block, end_block) =
            ((offset / BLOCK_BYTES) as usize, (end / BLOCK_BYTES) as usize);
        if let Err(block) = blocks::RAM.claim(first_block, end_block) {
            touched.set(block);
            return Err(libc::EBUSY.unsigned_abs());
        }
        let mapped = self.map_over(at, len, cache);
        // What is half done is never mapped over again.
        let changed = mapped.is_ok() || mapped == Err(HALF_DONE);
        blocks::RAM.settle(first_block, end_block, changed);
        set_boundary(first_block);
        set_boundary(end_block);
        mapped
    }

    fn map_over(&self, at: usize, len: usize, cache: Option<c_int>) -> Result<(), u32> {
        if let Some(cache) = cache {
            self.move_over(at, len, cache)
        } else {
            let flags =
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: as in `map_cache`.
            unsafe { sys::mmap(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)? };
            // SAFETY: advice for a range mapped just now; it is allowed to fail.
            let _advised = unsafe { sys::madvise(at, len, libc::MADV_NOHUGEPAGE) };
            Ok(())
        }
    }

    /// Map a cache over a range of a running VM's RAM. A vCPU that touches it meanwhile finds
    /// either the old contents or the new mapping *with* its registration. Without it, the vCPU
    /// would get a hole of the cache, as zeros. So the cache is mapped and registered elsewhere,
    /// and moved here. `vmforkd` has to read the event of that.
    fn move_over(&self, at: usize, len: usize, cache: c_int) -> Result<(), u32> {
        if cache < 0 {
            return Err(libc::EBADF.unsigned_abs());
        }
        let (start, _) = ram::range();
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let elsewhere = unsafe { sys::mmap(0, len, prot, flags, cache, at - start)? };
        let moved = ram::register(self.userfaultfd, elsewhere, len).and_then(|()| {
            let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            // SAFETY: the source is the mapping made just now, and the target lies in RAM, whose
            // contents the request gives up: nothing was installed there.
            let moved = unsafe { sys::mremap(elsewhere, len, flags, at) };
            // SAFETY: advice that changes nothing: it is what every mapping begins with. It is
            // refused where something is not mapped.
            let is_whole = || unsafe { sys::madvise(at, len, libc::MADV_NORMAL) }.is_ok();
            // A process with as many mappings as it may have is refused before anything has
            // changed.
            moved.map_err(|errno| if is_whole() { errno } else { HALF_DONE })
        });
        if moved.is_err() {
            // SAFETY: the mapping made above, of which nothing else knows.
            let _gone = unsafe { sys::munmap(elsewhere, len) };
        }
        moved.map(|_| ())
    }

    fn release(args: [u64; 4]) -> Result<(), u32> {
        let [address, len, ..] = args.map(|arg| usize::try_from(arg).unwrap_or(usize::MAX));
        let (start, bytes) = ram::range();
        let end = address.checked_add(len).ok_or(EINVAL)?;
        let overlaps_ram = address < start + bytes && end > start;
        if len == 0 || address % ram::PAGE_BYTES != 0 || len % ram::PAGE_BYTES != 0 || overlaps_ram
        {
            return Err(EINVAL);
        }
        // SAFETY: vmforkd names parts of ranges that `freeze` moved aside, of which nothing in QEMU
        // knows.
        unsafe { sys::munmap(address, len) }.map(|_| ())
    }
}

/// Map a cache over a range of RAM, at the same offset.
fn map_cache(cache: c_int, at: usize, len: usize) -> Result<(), u32> {
    if cache < 0 {
        return Err(libc::EBADF.unsigned_abs());
    }
    let (start, _) = ram::range();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in RAM, whose contents the request gives up: nothing was installed
    // there, or it was moved aside just now.
    unsafe { sys::mmap(at, len, prot, flags, cache, at - start) }.map(|_| ())
}

/// RAM is one mapping again, with nothing installed.
fn forget_parts(ram_bytes: usize) {
    let blocks = ram_bytes / BLOCK_BYTES as usize;
    for word in BOUNDARIES.iter().take(blocks / 64 + 1) {
        word.store(0, Relaxed);
    }
    blocks::RAM.reset(blocks);
}

fn set_boundary(block: usize) {
    if let Some(word) = BOUNDARIES.get(block / 64) {
        word.fetch_or(1 << (block % 64), Relaxed);
    }
}

/// The first block at or after `from`, below `end`, where a mapping may begin; `end` if there is
/// none.
fn next_boundary(from: usize, end: usize) -> usize {
    let mut block = from;
    while block < end {
        let Some(word) = BOUNDARIES.get(block / 64) else { return end };
        let rest = word.load(Relaxed) >> (block % 64);
        if rest != 0 {
            return end.min(block + rest.trailing_zeros() as usize);
        }
        block = (block / 64 + 1) * 64;
    }
    end
}

/// Address space for the moved pages, aligned as RAM is, so that whole page tables move.
fn reserve(start: usize, bytes: usize) -> Result<usize, u32> {
    let align = ALIGN_BYTES as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let area = unsafe { sys::mmap(0, bytes + align, libc::PROT_NONE, flags, -1, 0)? };
    let aside = area + (start % align + align - area % align) % align;
    for (at, len) in [(area, aside - area), (aside + bytes, area + align - aside)] {
        if len > 0 {
            // SAFETY: the parts of the new mapping beside what is used.
            let _trimmed = unsafe { sys::munmap(at, len) };
        }
    }
    Ok(aside)
}

/// Move every mapping of RAM aside. → how many; on failure, how many bytes had been moved, and the
/// errno. RAM's own range stays mapped (MREMAP_DONTUNMAP), so that no other thread of QEMU can be
/// given a part of it in the meantime.
fn move_mappings(start: usize, bytes: usize, aside: usize) -> Result<u64, (usize, u32)> {
    let mut stretches = 0;
    for (offset, len) in Stretches::of(bytes) {
        let flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
        // SAFETY: the source is RAM of a stopped VM; the target is address space reserved for it.
        unsafe { sys::mremap(start + offset, len, flags, aside + offset) }
            .map_err(|errno| (offset, errno))?;
        stretches += 1;
    }
    Ok(stretches)
}

/// The stretches between boundaries, as (offset, length) in bytes.
struct Stretches {
    next_block: usize,
    blocks: usize,
}

impl Stretches {
    fn of(bytes: usize) -> Self {
        Self { next_block: 0, blocks: bytes / BLOCK_BYTES as usize }
    }
}

impl Iterator for Stretches {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let first = self.next_block;
        if first >= self.blocks {
            return None;
        }
        self.next_block = next_boundary(first + 1, self.blocks);
        let block = BLOCK_BYTES as usize;
        Some((first * block, (self.next_block - first) * block))
    }
}
