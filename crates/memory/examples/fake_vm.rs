//! A stand-in for QEMU in tests of the shim and the engine: maps its "RAM" as QEMU does, then reads
//! and writes it on command. One command a line on stdin, one answer a line on stdout.
//!
//! | command | answer |
//! |---|---|
//! | `fill PAGE COUNT SEED` | `ok`: each page gets bytes that follow from SEED and its number |
//! | `poke PAGE SEED` | `ok`: as `fill`, one page |
//! | `sum PAGE COUNT` | a hash per page, in hex, separated by blanks; 0 for a page of zeros |
//! | `drop PAGE COUNT` | `ok`: `madvise(MADV_DONTNEED)`, as a balloon does |
//! | `pread PAGE COUNT FILE` | `ok`: whole pages read from a file |
//! | `recv PAGE COUNT BYTES PIECE` | `ok`: whole pages asked for of a stream socket that gets BYTES of 0x5a, by pieces |
//! | `recv-datagram PAGE COUNT` | `N of M`: bytes of a datagram of COUNT pages of 0x5a that one call received |
//! | `touch PAGE COUNT STRIDE` | ns that reading a byte of every STRIDE-th of COUNT pages took: median, 99th percentile, sum |
//! | `huge` | `ok`: `madvise(MADV_HUGEPAGE)`, as QEMU does |
//! | `race BLOCKS PAGE N` | `ok`, or `block B is 0`: N threads read that page of each block at once, as nearly as can be |
//! | `block-userfaultfd` | `ok`: reads of the shim's userfaultfd wait from now on, as a hostile guest might have it |
//! | `clutter SPARE` | `ok`: all but SPARE of the mappings that a process may have are used up |
//! | `pmem PAGE COUNT` | as `sum`, of persistent memory |
//! | `threads PAGE COUNT N` | `ok`: N threads read all the pages at once |

#![allow(
    clippy::print_stdout,
    clippy::cast_sign_loss,
    reason = "a program for tests that talks on stdout"
)]

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;

const PAGE: usize = 4096;

fn main() {
    let bytes: usize =
        std::env::args().nth(1).and_then(|text| text.parse().ok()).expect("RAM's size");
    let ram_fd: i32 = std::env::args().nth(2).and_then(|text| text.parse().ok()).expect("RAM's fd");
    let ram = map_ram(bytes, ram_fd);
    let pmem = std::env::args().nth(3).and_then(|text| text.parse().ok()).map_or(0, map_pmem);
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("stdin");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().expect("a number");
        let answer = match words[0] {
            "fill" => {
                for page in number(1)..number(1) + number(2) {
                    write_page(ram, page, number(3) as u64);
                }
                "ok".to_owned()
            }
            "poke" => {
                write_page(ram, number(1), number(2) as u64);
                "ok".to_owned()
            }
            "sum" => sums(ram, number(1), number(2)),
            "pmem" => sums(pmem, number(1), number(2)),
            "drop" => {
                let at = (ram + number(1) * PAGE) as *mut libc::c_void;
                // SAFETY: a part of RAM, which nothing but this program uses.
                let done = unsafe { libc::madvise(at, number(2) * PAGE, libc::MADV_DONTNEED) };
                if done == 0 { "ok".to_owned() } else { "failed".to_owned() }
            }
            "pread" => {
                let file = std::fs::File::open(words[3]).expect("file");
                let at = (ram + number(1) * PAGE) as *mut libc::c_void;
                // SAFETY: a part of RAM, which nothing but this program uses.
                let read = unsafe { libc::pread64(file.as_raw_fd(), at, number(2) * PAGE, 0) };
                if read as usize == number(2) * PAGE {
                    "ok".to_owned()
                } else {
                    format!("read {read}")
                }
            }
            "recv" => {
                let at = ram + number(1) * PAGE;
                receive(at, number(2) * PAGE, number(3), number(4))
            }
            "recv-datagram" => receive_datagram(ram + number(1) * PAGE, number(2) * PAGE),
            "touch" => touch(ram, number(1), number(2), number(3)),
            "huge" => {
                let at = ram as *mut libc::c_void;
                // SAFETY: all of RAM; advice changes no contents.
                let done = unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
                if done == 0 { "ok".to_owned() } else { "failed".to_owned() }
            }
            "clutter" => clutter(number(1)),
            "block-userfaultfd" => block_userfaultfd(),
            "race" => race(ram, number(1), number(2), number(3)),
            "threads" => {
                let (first, count) = (number(1), number(2));
                let threads: Vec<_> = (0..number(3))
                    .map(|_| {
                        std::thread::spawn(move || {
                            (first..first + count)
                                .map(|page| sum_page(ram, page))
                                .fold(0u64, u64::wrapping_add)
                        })
                    })
                    .collect();
                let sums: Vec<u64> =
                    threads.into_iter().map(|thread| thread.join().expect("thread")).collect();
                if sums.windows(2).all(|pair| pair[0] == pair[1]) {
                    "ok".to_owned()
                } else {
                    "differ".to_owned()
                }
            }
            other => panic!("{other}"),
        };
        println!("{answer}");
        std::io::stdout().flush().expect("stdout");
    }
}

/// Parts as a guest's request has them: some pages each, wherever the rest begins.
fn parts_of(at: usize, len: usize) -> Vec<libc::iovec> {
    let (mut start, mut parts) = (at, Vec::new());
    while start < at + len {
        let end = (start + 1).next_multiple_of(7 * PAGE).min(at + len);
        parts.push(libc::iovec { iov_base: start as *mut libc::c_void, iov_len: end - start });
        start = end;
    }
    parts
}

/// One `recvmsg` into a part of RAM. → what it returned.
fn receive_some(socket: &impl AsRawFd, at: usize, len: usize, flags: libc::c_int) -> isize {
    let mut parts = parts_of(at, len);
    // SAFETY: plain data, valid as zeros.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: parts of RAM, which nothing but this program uses.
    unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) }
}

/// As QEMU's NBD client: until all is there, asking for the rest each time.
fn receive(at: usize, len: usize, bytes: usize, piece: usize) -> String {
    let (mut to, from) = std::os::unix::net::UnixStream::pair().expect("socketpair");
    let sender = std::thread::spawn(move || {
        for piece in vec![0x5a; bytes].chunks(piece) {
            to.write_all(piece).expect("sent");
        }
        to
    });
    let mut received = 0;
    while received < bytes {
        let mut fd = libc::pollfd { fd: from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, alive here.
        unsafe { libc::poll(&raw mut fd, 1, -1) };
        match receive_some(&from, at + received, len - received, libc::MSG_DONTWAIT) {
            some @ 1.. => received += some as usize,
            other => return format!("{other} after {received}"),
        }
    }
    let _open = sender.join().expect("it sends");
    // Nothing is there any more: no page may change.
    match receive_some(&from, at + received, len - received, libc::MSG_DONTWAIT) {
        ..=0 => "ok".to_owned(),
        more => format!("{more} more"),
    }
}

fn receive_datagram(at: usize, len: usize) -> String {
    let (to, from) = std::os::unix::net::UnixDatagram::pair().expect("socketpair");
    let sender = std::thread::spawn(move || {
        // The receiver waits by then, mostly.
        std::thread::park_timeout(std::time::Duration::from_millis(50));
        to.send(&vec![0x5a; len]).expect("sent")
    });
    let received = receive_some(&from, at, len, 0);
    let sent = sender.join().expect("it sends");
    format!("{received} of {sent}")
}

fn clutter(spare: usize) -> String {
    let mut pages = Vec::with_capacity(100_000);
    for n in 0..pages.capacity() {
        // Neighbours that differ don't become one.
        let protection = if n % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping that nothing else uses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            break;
        }
        pages.push(page);
    }
    let full = pages.len() < pages.capacity();
    for page in pages.into_iter().rev().take(spare) {
        // SAFETY: made above.
        unsafe { libc::munmap(page, PAGE) };
    }
    if full { "ok" } else { "there is no end" }.to_owned()
}

fn block_userfaultfd() -> String {
    for entry in std::fs::read_dir("/proc/self/fd").expect("own fds").flatten() {
        let name = entry.file_name();
        let is_it = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]");
        if is_it && let Some(Ok(fd)) = name.to_str().map(str::parse::<i32>) {
            // SAFETY: a flag of an open file.
            let done = unsafe { libc::fcntl(fd, libc::F_SETFL, 0) };
            return if done == 0 { "ok" } else { "failed" }.to_owned();
        }
    }
    "none".to_owned()
}

/// No page is zero, by what `fill` writes.
fn race(ram: usize, blocks: usize, page: usize, threads: usize) -> String {
    let start = std::sync::Barrier::new(threads);
    let read = |thread: usize| {
        let mut wrong = None;
        for block in 0..blocks {
            start.wait();
            let at = ram + (block * 512 + page + thread) * PAGE;
            // So that some come in the middle of what the first one sets off.
            for _ in 0..thread * 200 * (block % 8) {
                std::hint::spin_loop();
            }
            // SAFETY: a word of RAM.
            if unsafe { (at as *const u64).read_volatile() } == 0 {
                wrong = Some(block);
            }
        }
        wrong
    };
    let wrong = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let read = &read;
                scope.spawn(move || read(thread))
            })
            .collect();
        running.into_iter().find_map(|thread| thread.join().expect("thread"))
    });
    wrong.map_or("ok".to_owned(), |block| format!("block {block} is 0"))
}

/// As QEMU's `qemu_ram_mmap`: reserve with room to align, then map the file over a part.
fn map_ram(bytes: usize, fd: i32) -> usize {
    let align = 1 << 30;
    // SAFETY: a new mapping at an address of the kernel's choice, and one within it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let area = libc::mmap(std::ptr::null_mut(), bytes + align, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(area, libc::MAP_FAILED);
        let start = (area as usize).next_multiple_of(align);
        let at = start as *mut libc::c_void;
        let ram = libc::mmap(
            at,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            fd,
            0,
        );
        assert_eq!(ram, at);
        start
    }
}

/// All of a file, as QEMU maps persistent memory that the guest can't write to.
fn map_pmem(fd: i32) -> usize {
    // SAFETY: an all-zero `stat` is valid, and fstat fills it.
    let bytes = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        assert_eq!(libc::fstat(fd, &raw mut stat), 0);
        usize::try_from(stat.st_size).expect("not negative")
    };
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    at as usize
}

/// What page `page` holds after `fill` with `seed`: never all zeros.
fn word(page: usize, seed: u64, at: usize) -> u64 {
    (page as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ^ seed.wrapping_mul(0xD134_2543_DE82_EF95)
        ^ (at as u64)
        | 1
}

fn write_page(ram: usize, page: usize, seed: u64) {
    for at in 0..PAGE / 8 {
        // SAFETY: a word of RAM.
        unsafe { ((ram + page * PAGE + at * 8) as *mut u64).write_volatile(word(page, seed, at)) };
    }
}

fn touch(ram: usize, first: usize, count: usize, stride: usize) -> String {
    let mut times: Vec<u128> = (first..first + count)
        .step_by(stride)
        .map(|page| {
            let began = std::time::Instant::now();
            // SAFETY: a byte of RAM.
            let _byte = unsafe { ((ram + page * PAGE) as *const u8).read_volatile() };
            began.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    format!("{} {} {}", at(50), at(99), times.iter().sum::<u128>())
}

fn sums(memory: usize, first: usize, count: usize) -> String {
    let pages = first..first + count;
    let sums: Vec<String> = pages.map(|page| format!("{:x}", sum_page(memory, page))).collect();
    sums.join(" ")
}

fn sum_page(ram: usize, page: usize) -> u64 {
    let mut sum = 0u64;
    for at in 0..PAGE / 8 {
        // SAFETY: a word of RAM.
        let word = unsafe { ((ram + page * PAGE + at * 8) as *const u64).read_volatile() };
        sum = if word == 0 {
            sum
        } else {
            (sum.rotate_left(5) ^ word).wrapping_mul(0x2545_F491_4F6C_DD1D)
        };
    }
    sum
}
