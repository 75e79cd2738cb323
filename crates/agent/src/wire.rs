//! What programs and the agent say to each other over `fork.sock`, a unix stream socket.
//!
//! ```text
//!   request   0         2      4        8            16             24
//!             +---------+------+--------+------------+--------------+ - - - - - - -
//!             | version |  op  |  a32   |    a64     | length_bytes | (Send: payload)
//!             +---------+------+--------+------------+--------------+ - - - - - - -
//!   reply     0                4        8            16             24
//!             +----------------+--------+------------+--------------+ - - - - - - -
//!             | status         |  a32   |    a64     | length_bytes | payload
//!             +----------------+--------+------------+--------------+ - - - - - - -
//!   native byte order; status is 0 or a negative errno
//! ```
//!
//! | op | request | reply |
//! |---|---|---|
//! | `RequestTicket` 1 | a32 = n, a64 = hierarchical | a64 = ticket, a32 = granted |
//! | `Clone` 2 | a64 = ticket | parent: a32 = 0, a64 = workers started; clone: a32 = vmid, a64 = workers in this VM, and a64 − 1 sockets beside it (SCM_RIGHTS) |
//! | `Exit` 3 | | |
//! | `Join` 4, `Kill` 5 | a64 = ticket | a32 = workers, a64 = those that failed; payload per worker: vmid (u32), length (u32), why (UTF-8) |
//! | `Send` 6 | length, payload | |
//! | `Recv` 7 | a64 = ticket, a32 = vmid or 0 for any | a32 = sender, length, payload |
//!
//! One request at a time on a connection. A program that closes it gives its request up.
//!
//! **Workers.** In a clone the connection that asked for `Clone` belongs to the first worker from
//! then on. The sockets that came beside the answer belong to the others: the library forks, and
//! each process keeps one. A worker whose connection closes without `Exit` has failed. So no worker
//! can be lost between its birth and its first call.

/// Version of this protocol: the library and the agent of one image belong together.
pub(crate) const VERSION: u16 = 1;

pub(crate) const REQUEST_BYTES: usize = 24;

/// A request's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    RequestTicket,
    Clone,
    Exit,
    Join,
    Kill,
    Send,
    Recv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) a32: u32,
    pub(crate) a64: u64,
    pub(crate) length_bytes: u64,
}

impl Request {
    /// `None` for another version or an unknown op.
    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let [v0, v1, o0, o1, a0, a1, a2, a3, rest @ ..] = *bytes;
        let (words, []) = rest.as_chunks::<8>() else { return None };
        let [a64, length_bytes] = words else { return None };
        if u16::from_ne_bytes([v0, v1]) != VERSION {
            return None;
        }
        let op = match u16::from_ne_bytes([o0, o1]) {
            1 => Op::RequestTicket,
            2 => Op::Clone,
            3 => Op::Exit,
            4 => Op::Join,
            5 => Op::Kill,
            6 => Op::Send,
            7 => Op::Recv,
            _ => return None,
        };
        Some(Self {
            op,
            a32: u32::from_ne_bytes([a0, a1, a2, a3]),
            a64: u64::from_ne_bytes(*a64),
            length_bytes: u64::from_ne_bytes(*length_bytes),
        })
    }
}

/// The header of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    /// 0, or a negative errno.
    pub(crate) status: i32,
    pub(crate) a32: u32,
    pub(crate) a64: u64,
    pub(crate) length_bytes: u64,
}

impl Reply {
    /// `errno` is positive; anything else counts as `EIO`, lest a failure look like success.
    pub(crate) fn error(errno: i32) -> Self {
        Self { status: -(if errno > 0 { errno } else { libc::EIO }), ..Self::default() }
    }

    pub(crate) fn encode(self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[..4].copy_from_slice(&self.status.to_ne_bytes());
        out[4..8].copy_from_slice(&self.a32.to_ne_bytes());
        out[8..16].copy_from_slice(&self.a64.to_ne_bytes());
        out[16..].copy_from_slice(&self.length_bytes.to_ne_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_has_these_bytes() {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[0] = 1;
        bytes[2] = 7;
        bytes[4..8].copy_from_slice(&3u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&9u64.to_ne_bytes());
        let request = Request { op: Op::Recv, a32: 3, a64: 9, length_bytes: 0 };
        assert_eq!(Request::decode(&bytes), Some(request));
        bytes[0] = 2;
        assert_eq!(Request::decode(&bytes), None);
    }

    #[test]
    fn an_error_is_never_zero() {
        assert_eq!(Reply::error(0).status, -libc::EIO);
        assert_eq!(Reply::error(-3).status, -libc::EIO);
    }
}
