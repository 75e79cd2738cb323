//! A folder with one file, whose bytes an export has.

use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use vmfork_nbd::{BLOCK_BYTES_MAX, Client, Command, NbdError, Span};

const FOLDER: INodeNo = INodeNo::ROOT;
const FILE: INodeNo = INodeNo(2);
/// The smallest request of an export.
const BLOCK_BYTES: u64 = 512;
/// Largest read or write of the kernel, and how far it reads ahead.
const REQUEST_BYTES: u32 = 1 << 20;
/// Largest part of an export that is made zeros by one request.
const ZERO_BYTES: u64 = 1 << 30;
/// Nothing of the file changes but its bytes, which the kernel knows of.
const KEPT_FOR: Duration = Duration::from_secs(86_400);

/// The file, in its folder.
#[derive(Debug)]
pub(crate) struct ImageFile {
    client: Arc<Client>,
    name: OsString,
    owner: (u32, u32),
    made: SystemTime,
}

impl ImageFile {
    pub(crate) fn new(client: Arc<Client>, name: &str) -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let owner = (uid, rustix::process::getegid().as_raw());
        Self { client, name: name.into(), owner, made: SystemTime::now() }
    }

    fn size_bytes(&self) -> u64 {
        self.client.export().size_bytes
    }

    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        let may_write = !self.client.export().read_only;
        let (kind, perm, size) = match ino {
            FOLDER => (FileType::Directory, 0o555, 0),
            FILE if may_write => (FileType::RegularFile, 0o644, self.size_bytes()),
            FILE => (FileType::RegularFile, 0o444, self.size_bytes()),
            _ => return None,
        };
        let (uid, gid) = self.owner;
        Some(FileAttr {
            ino,
            size,
            blocks: size.div_ceil(BLOCK_BYTES),
            atime: self.made,
            mtime: self.made,
            ctime: self.made,
            crtime: self.made,
            kind,
            perm,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    /// Write bytes at any place. The blocks that it begins and ends in are read first.
    fn write_at(&self, offset_bytes: u64, data: &[u8]) -> Result<(), NbdError> {
        let start = floor(offset_bytes);
        let end = offset_bytes + data.len() as u64;
        let len = small(ceil(end) - start)?;
        let mut bytes = vec![0; len];
        let (head, tail) = (small(offset_bytes - start)?, small(ceil(end) - end)?);
        if head > 0 {
            self.client.read(start, first(&mut bytes)?)?;
        }
        if tail > 0 && (head == 0 || len > small(BLOCK_BYTES)?) {
            let last = len - small(BLOCK_BYTES)?;
            self.client.read(start + last as u64, bytes.get_mut(last..).unwrap_or_default())?;
        }
        let into = bytes.get_mut(head..len - tail).ok_or(NbdError::Invalid)?;
        into.copy_from_slice(data);
        let len_bytes = u32::try_from(len).map_err(|_| NbdError::Invalid)?;
        let span = Span { offset_bytes: start, len_bytes };
        self.client.wait_for(Command::Write { span, durable: false }, bytes).map(drop)
    }

    /// Makes bytes of the file zeros. `may_punch`: their space may be given back.
    fn zero(&self, offset_bytes: u64, end: u64, may_punch: bool) -> Result<(), NbdError> {
        let end = end.min(self.size_bytes());
        let (from, to) = (ceil(offset_bytes).min(end), floor(end));
        let edge = |from: u64, to: u64| match to.checked_sub(from) {
            None | Some(0) => Ok(()),
            Some(len) => self.write_at(from, &vec![0; small(len)?]),
        };
        if from >= to {
            return edge(offset_bytes, end);
        }
        edge(offset_bytes, from)?;
        let mut at = from;
        while at < to {
            let len = (to - at).min(ZERO_BYTES);
            let len_bytes = u32::try_from(len).map_err(|_| NbdError::Invalid)?;
            let span = Span { offset_bytes: at, len_bytes };
            let command = Command::WriteZeroes { span, durable: false, may_punch };
            self.client.wait_for(command, Vec::new())?;
            at += len;
        }
        edge(to, end)
    }

    /// Where data or zeros begin next.
    fn seek(&self, offset_bytes: u64, wants_data: bool) -> Result<u64, Errno> {
        let size = self.size_bytes();
        if offset_bytes >= size {
            return Err(Errno::ENXIO);
        }
        let mut at = offset_bytes;
        while at < size {
            let start = floor(at);
            let len = (size - start).min(ZERO_BYTES);
            let len_bytes = u32::try_from(len).map_err(|_| Errno::EINVAL)?;
            let span = Span { offset_bytes: start, len_bytes };
            let command = Command::BlockStatus { span, one: false };
            let told = self.client.wait_for(command, Vec::new()).map_err(errno)?;
            let mut end = start;
            for extent in told.extents {
                end += extent.len_bytes;
                if end > at && extent.zero != wants_data {
                    return Ok(at);
                }
                at = at.max(end);
            }
            if end == start {
                return Err(Errno::EIO);
            }
        }
        // The end of a file is a hole.
        if wants_data { Err(Errno::ENXIO) } else { Ok(size) }
    }
}

impl Filesystem for ImageFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A smaller number is what the kernel takes.
        let _taken = config.set_max_write(REQUEST_BYTES);
        let _taken = config.set_max_readahead(REQUEST_BYTES);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE) {
            Some(found) if parent == FOLDER && name == self.name => {
                reply.entry(&KEPT_FOR, &found, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(found) => reply.attr(&KEPT_FOR, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Times and the size that it has are taken, and change nothing.
    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<fuser::TimeOrNow>,
        _mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = mode.is_some() || uid.is_some() || gid.is_some();
        match self.attributes(ino) {
            Some(found) if !changes && size.is_none_or(|size| size == found.size) => {
                reply.attr(&KEPT_FOR, &found);
            }
            _ => reply.error(Errno::EPERM),
        }
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        if ino != FILE {
            reply.error(Errno::EISDIR);
        } else if writes && self.client.export().read_only {
            reply.error(Errno::EROFS);
        } else {
            // All changes come through this mount, so what the kernel has stays right.
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = offset.saturating_add(u64::from(size)).min(self.size_bytes());
        if offset >= end {
            return reply.data(&[]);
        }
        let start = floor(offset);
        let len_bytes = match u32::try_from(ceil(end) - start) {
            Ok(len_bytes) if len_bytes <= BLOCK_BYTES_MAX => len_bytes,
            _ => return reply.error(Errno::EINVAL),
        };
        let span = Span { offset_bytes: start, len_bytes };
        let range = usize::try_from(offset - start).unwrap_or(0)
            ..usize::try_from(end - start).unwrap_or(usize::MAX);
        let done = move |answer: Result<vmfork_nbd::Answer, NbdError>| match answer {
            Ok(answer) => match answer.bytes.get(range) {
                Some(bytes) => reply.data(bytes),
                None => reply.error(Errno::EIO),
            },
            Err(error) => reply.error(errno(error)),
        };
        self.client.ask(Command::Read { span, whole: false }, Vec::new(), Box::new(done));
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let end = offset.saturating_add(data.len() as u64);
        let Ok(size) = u32::try_from(data.len()) else { return reply.error(Errno::EINVAL) };
        if end > self.size_bytes() {
            return reply.error(Errno::ENOSPC);
        }
        if floor(offset) != offset || floor(end) != end {
            return match self.write_at(offset, data) {
                Ok(()) => reply.written(size),
                Err(error) => reply.error(errno(error)),
            };
        }
        let span = Span { offset_bytes: offset, len_bytes: size };
        let done = move |answer: Result<vmfork_nbd::Answer, NbdError>| match answer {
            Ok(_) => reply.written(size),
            Err(error) => reply.error(errno(error)),
        };
        let command = Command::Write { span, durable: false };
        self.client.ask(command, data.to_vec(), Box::new(done));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Each write is with the server when it is answered.
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if !self.client.export().flushes {
            return reply.ok();
        }
        let done = move |answer: Result<vmfork_nbd::Answer, NbdError>| match answer {
            Ok(_) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        };
        self.client.ask(Command::Flush, Vec::new(), Box::new(done));
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        const KEEP_SIZE: i32 = 1;
        const PUNCH_HOLE: i32 = 2;
        const ZERO_RANGE: i32 = 16;
        let end = offset.saturating_add(length);
        let may_punch = mode & PUNCH_HOLE != 0;
        let result = match mode & !KEEP_SIZE {
            0 if end <= self.size_bytes() => Ok(()),
            0 => Err(Errno::ENOSPC),
            ZERO_RANGE if mode & KEEP_SIZE == 0 && end > self.size_bytes() => Err(Errno::ENOSPC),
            PUNCH_HOLE | ZERO_RANGE => self.zero(offset, end, may_punch).map_err(errno),
            _ => Err(Errno::EOPNOTSUPP),
        };
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        const SEEK_DATA: i32 = 3;
        const SEEK_HOLE: i32 = 4;
        let found = match (u64::try_from(offset), whence) {
            (Ok(offset), SEEK_DATA | SEEK_HOLE) => self.seek(offset, whence == SEEK_DATA),
            _ => Err(Errno::EINVAL),
        };
        match found.map(i64::try_from) {
            Ok(Ok(offset)) => reply.offset(offset),
            Ok(Err(_)) => reply.error(Errno::EOVERFLOW),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino != FOLDER {
            return reply.error(Errno::ENOTDIR);
        }
        let entries = [
            (FOLDER, FileType::Directory, OsStr::new(".")),
            (FOLDER, FileType::Directory, OsStr::new("..")),
            (FILE, FileType::RegularFile, &self.name),
        ];
        for (place, (ino, kind, name)) in (1..).zip(entries) {
            if place > offset && reply.add(ino, place, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// What a program is told.
fn errno(error: NbdError) -> Errno {
    match error {
        NbdError::Perm => Errno::EPERM,
        NbdError::Invalid => Errno::EINVAL,
        NbdError::NoSpace => Errno::ENOSPC,
        NbdError::NotSupported => Errno::EOPNOTSUPP,
        NbdError::Io | NbdError::Shutdown => Errno::EIO,
    }
}

const fn floor(bytes: u64) -> u64 {
    bytes - bytes % BLOCK_BYTES
}

const fn ceil(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}

fn small(bytes: u64) -> Result<usize, NbdError> {
    usize::try_from(bytes).map_err(|_| NbdError::Invalid)
}

fn first(bytes: &mut [u8]) -> Result<&mut [u8], NbdError> {
    bytes.get_mut(..small(BLOCK_BYTES)?).ok_or(NbdError::Invalid)
}
