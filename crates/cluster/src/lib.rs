//! Hosts that fork onto each other: who they are, who belongs to them, who gives room to whom.
//!
//! ```text
//!   Folder ──► Cluster: Authority, Identity, Membership          vmfork cluster init, join
//!                  │          │          │
//!   JoinToken ─► admit        ▼          ▼
//!                            Tls ◄──── Roster ◄──── heartbeats, drain, leave
//!                                          │
//!   Ask ──► Allocator: BuiltIn, Slurm ◄────┘ who has how much ──► Ticket: leases of hosts
//! ```
//!
//! A **host** has a [`HostId`], a certificate and an entry in the [`Membership`] that every host
//! keeps. There is no centre. Any member can admit ([`admit`]) and remove, and says so in its next
//! heartbeat. Any member can allocate ([`allocate`]), and each host decides itself what it gives.
//!
//! Promises: only a member completes a handshake ([`Tls`]). What peers say is bounded and checked.
//! Nothing is half written ([`Folder`]). No host promises more than it has.
//!
//! Left to others: sockets, HTTP and clocks (the daemon's). Times are passed in; but for [`Folder`]
//! and [`slurm`], nothing here does I/O. It knows neither pages nor QEMU.

#![deny(unsafe_code)]

pub mod allocate;
mod folder;
mod id;
mod join;
pub mod keys;
pub mod membership;
mod room;
mod roster;
pub mod slurm;
mod token;

pub use folder::{Folder, FolderError, Opened};
pub use id::{Fingerprint, HostId, IdError, RandomError};
pub use join::{Cluster, JoinAnswer, JoinError, JoinRequest, Newcomer, SecretText, admit};
pub use keys::{Authority, HostKey, Identity, JOIN_PROTOCOL, KeyError, PeerError, Tls};
pub use membership::{
    Digest, Entry, Heartbeat, HeartbeatError, HostState, Liveness, MemberError, Membership, Merged,
    Now, Timing,
};
pub use room::Room;
pub use roster::Roster;
pub use token::{
    IssueError, JoinToken, RedeemError, Secret, TOKENS_MAX, TokenError, Tokens, TokensError,
};
