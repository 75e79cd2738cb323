//! What the handles ask of the driver.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use tokio::sync::{Semaphore, oneshot};
use vmfork_agent_proto::{FileInfo, ForkIdentity, ToGuest};
use vmfork_api::ErrorBody;

use super::error::{CloseReason, LinkError};
use super::link::AgentInfo;
use super::mux::{Inheritance, Reply};
use super::outlet::Outlet;
use super::request::Lease;
use vmfork_control::ExecOutput;

/// A caller's number for what it opens, chosen before the channel's is known.
pub(super) type Key = u64;

pub(super) type Answer<T> = oneshot::Sender<Result<T, LinkError>>;

/// What the handles ask of the driver.
#[derive(Debug)]
pub(super) enum Command {
    Hello {
        message: ToGuest,
        answer: Answer<AgentInfo>,
    },
    /// Answered when the guest has said hello, and its first-boot command does not run.
    Ready {
        answer: Answer<AgentInfo>,
    },
    Ping {
        token: u64,
        answer: Answer<()>,
    },
    Poweroff,
    /// End the link.
    GiveUp {
        reason: CloseReason,
    },
    Open {
        key: Key,
        message: ToGuest,
        port: Port,
    },
    Push {
        key: Key,
        bytes: Bytes,
        end: bool,
    },
    /// Permits for `bytes` come back when it has left.
    Signal {
        key: Key,
        message: ToGuest,
        bytes: usize,
    },
    Cancel {
        key: Key,
    },
    Reply {
        channel: u32,
        reply: Reply,
        lease: Option<Lease>,
    },
    MailReleased {
        vmid: u32,
        cost: u64,
    },
    Prepare {
        fork: u64,
        broken: Arc<AtomicBool>,
        answer: Answer<Inheritance>,
    },
    Release {
        fork: u64,
    },
    Identity {
        identity: Box<ForkIdentity>,
        answer: Answer<()>,
    },
}

/// The driver's end of one exec or transfer.
#[derive(Debug)]
pub(super) struct Port {
    /// Names it in errors: "run `ls`".
    pub(super) what: String,
    /// Room for bytes towards the guest that have not left yet.
    pub(super) permits: Arc<Semaphore>,
    pub(super) side: Side,
    /// Dropped with the port, which ends the session's helper task.
    pub(super) _done: oneshot::Sender<()>,
}

#[derive(Debug)]
pub(super) enum Side {
    Exec { started: Option<Answer<u32>>, output: Outlet<ExecOutput> },
    Read { opened: Option<Answer<FileInfo>>, content: Outlet<Result<Bytes, ErrorBody>> },
    Write { written: Option<Answer<u64>> },
}

impl Port {
    /// No more will come from the guest; `error` unless it ended as it should.
    pub(super) fn end(&mut self, error: Option<&LinkError>) {
        let body = error.map(|error| error.to_body(&self.what));
        match &mut self.side {
            Side::Exec { started, output } => {
                if let (Some(started), Some(error)) = (started.take(), error) {
                    let _ = started.send(Err(error.clone()));
                }
                output.finish(body.map(ExecOutput::Error));
            }
            Side::Read { opened, content } => {
                if let (Some(opened), Some(error)) = (opened.take(), error) {
                    let _ = opened.send(Err(error.clone()));
                }
                content.finish(body.map(Err));
            }
            Side::Write { written } => {
                if let (Some(written), Some(error)) = (written.take(), error) {
                    let _ = written.send(Err(error.clone()));
                }
            }
        }
    }
}
