//! Messages between `vmforkd` and the *keeper*, the process that the shim starts beside QEMU.
//!
//! One SOCK_SEQPACKET socket. Each request is one packet of [`Request`], each answered by one
//! packet of [`Reply`]; file descriptors travel beside them. Native byte order and layout: both
//! ends are built from this file and run on one host; [`VERSION`] guards against a shim of another
//! build.
//!
//! The shim learns of its surroundings from the environment. [`ENV_CONTROL`], [`ENV_USERFAULTFD`],
//! [`ENV_RAM`], [`ENV_PMEM`] and [`ENV_KVM`] are numbers of inherited fds. [`ENV_ROLE`] is its
//! [`Role`].

#![no_std]

/// The keeper's end of the control socket.
pub const ENV_CONTROL: &str = "VMFORK_TAP_CONTROL";
/// An open `/dev/userfaultfd`.
pub const ENV_USERFAULTFD: &str = "VMFORK_TAP_USERFAULTFD";
/// The placeholder file that QEMU is told its RAM is (`mem-path=/proc/self/fd/N`): a memfd of RAM's
/// size that is never written. The shim knows RAM's mapping by this file's inode.
pub const ENV_RAM: &str = "VMFORK_TAP_RAM";
/// The file that QEMU is told its persistent memory is, read-only; absent without. The shim knows
/// that mapping by this file's inode. It stays a mapping of this file wherever
/// [`Op::MapPmem`] maps nothing over it.
pub const ENV_PMEM: &str = "VMFORK_TAP_PMEM";
/// An open `/dev/kvm`, given to QEMU when it opens that path; absent without KVM.
pub const ENV_KVM: &str = "VMFORK_TAP_KVM";
/// `boot` or `wait`.
pub const ENV_ROLE: &str = "VMFORK_TAP_ROLE";

/// Raised with every change of this file.
pub const VERSION: u32 = 4;

/// RAM is managed, and accounted, in blocks of 2 MiB: what one page-table page maps.
pub const BLOCK_BYTES: u64 = 2 << 20;

/// Largest RAM of a VM: 256 GiB. Bounds the keeper's tables.
pub const RAM_BYTES_MAX: u64 = 256 << 30;

/// RAM and where it is moved to are aligned to 1 GiB, so that whole page tables move.
pub const ALIGN_BYTES: u64 = 1 << 30;

/// What a QEMU is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A VM boots in it: RAM is anonymous memory, huge pages welcome.
    Boot,
    /// It waits for a snapshot: RAM is an empty stand-in until [`Op::Attach`].
    Wait,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Wait => "wait",
        }
    }
}

/// What a request asks for. `args` and `values` not named are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// → values: [`VERSION`], keeper's pid, RAM's address, RAM's size in bytes, how many mappings
    /// of the RAM file QEMU has made (must be 1), flags ([`STATUS_MERGEABLE`]); fd: the
    /// userfaultfd.
    Status = 1,
    /// Map the cache in the fd over RAM, private, and register it for missing faults. args:
    /// [`ATTACH_BY_PAGE`], or 0.
    Attach = 2,
    /// Move RAM's pages aside, then as [`Op::Attach`] with the new image's cache in the fd. QEMU
    /// must have been stopped (SIGSTOP): its threads look into RAM even when its vCPUs stand still.
    /// → values: the address of the moved pages, ns spent moving, ns spent mapping and registering,
    /// mappings moved, the address of a word that can be read for as long as QEMU's memory is
    /// there.
    Freeze = 3,
    /// Map a run of another cache over a part of the view that no page was ever installed in, and
    /// register it. args: offset in bytes (also the offset in the cache), length in bytes; fd: the
    /// cache. Its UFFD_EVENT_REMAP must be read from the userfaultfd before the answer comes.
    /// EBUSY: QEMU itself has installed pages in a block of the run (a disk read, a balloon);
    /// nothing was mapped. → values: that block's number.
    MapCache = 4,
    /// Map zeros (anonymous memory) over such a part; not registered: the kernel serves it alone.
    /// args: offset, length in bytes. EBUSY: as for `MapCache`.
    MapZero = 5,
    /// Unmap a part of a moved range. args: address, length in bytes.
    Release = 6,
    /// End the keeper.
    Exit = 7,
    /// Map a file from its start over a part of persistent memory, shared and read-only. The fd is
    /// the file. args: offset in persistent memory and length, in bytes, multiples of the page.
    /// ENODEV: QEMU has made no mapping of [`ENV_PMEM`], or more than one.
    MapPmem = 8,
}

impl Op {
    pub fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            1 => Self::Status,
            2 => Self::Attach,
            3 => Self::Freeze,
            4 => Self::MapCache,
            5 => Self::MapZero,
            6 => Self::Release,
            7 => Self::Exit,
            8 => Self::MapPmem,
            _ => return None,
        })
    }
}

/// Report what the VM touches of this view page by page. The kernel then maps no pages beside those
/// that the VM touches, if it can. It can in Linux 5.19 and later, where files in memory can be
/// registered for write protection.
pub const ATTACH_BY_PAGE: u64 = 1;

/// RAM was marked mergeable (KSM) in spite of `mem-merge=off`: a freeze would walk every page.
pub const STATUS_MERGEABLE: u64 = 1;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    pub op: u32,
    /// Returned in the reply.
    pub sequence: u32,
    pub args: [u64; 4],
}

/// Its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Reply {
    /// 0, or an errno.
    pub errno: u32,
    pub sequence: u32,
    pub values: [u64; 6],
}

/// Bytes of a [`Request`] on the socket.
pub const REQUEST_BYTES: usize = 40;
/// Bytes of a [`Reply`] on the socket.
pub const REPLY_BYTES: usize = 56;

const _: () = assert!(size_of::<Request>() == REQUEST_BYTES);
const _: () = assert!(size_of::<Reply>() == REPLY_BYTES);

impl Request {
    pub fn to_bytes(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        put(&mut out, 0, &self.op.to_ne_bytes());
        put(&mut out, 4, &self.sequence.to_ne_bytes());
        for (i, arg) in self.args.iter().enumerate() {
            put(&mut out, 8 + 8 * i, &arg.to_ne_bytes());
        }
        out
    }

    pub fn from_bytes(bytes: &[u8; REQUEST_BYTES]) -> Self {
        let mut args = [0; 4];
        for (i, arg) in args.iter_mut().enumerate() {
            *arg = get_u64(bytes, 8 + 8 * i);
        }
        Self { op: get_u32(bytes, 0), sequence: get_u32(bytes, 4), args }
    }
}

impl Reply {
    pub fn to_bytes(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        put(&mut out, 0, &self.errno.to_ne_bytes());
        put(&mut out, 4, &self.sequence.to_ne_bytes());
        for (i, value) in self.values.iter().enumerate() {
            put(&mut out, 8 + 8 * i, &value.to_ne_bytes());
        }
        out
    }

    pub fn from_bytes(bytes: &[u8; REPLY_BYTES]) -> Self {
        let mut values = [0; 6];
        for (i, value) in values.iter_mut().enumerate() {
            *value = get_u64(bytes, 8 + 8 * i);
        }
        Self { errno: get_u32(bytes, 0), sequence: get_u32(bytes, 4), values }
    }
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    for (to, from) in out.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    for (to, from) in word.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    u32::from_ne_bytes(word)
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    for (to, from) in word.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_back_as_they_went() {
        let request = Request { op: Op::Freeze as u32, sequence: 7, args: [1, u64::MAX, 3, 4] };
        assert_eq!(Request::from_bytes(&request.to_bytes()), request);
        let reply = Reply { errno: 22, sequence: 7, values: [1, 2, 3, 4, 5, u64::MAX] };
        assert_eq!(Reply::from_bytes(&reply.to_bytes()), reply);
    }
}
