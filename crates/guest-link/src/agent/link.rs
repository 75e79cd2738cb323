//! The handle: what the daemon can ask of one guest's agent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use vmfork_agent_proto::{Firstboot, ForkIdentity, PROTOCOL_VERSION, ToGuest, WINDOW_BYTES};

use super::command::{Command, Key, Port, Side};
use super::driver::{Closed, Driver};
use super::error::{CloseReason, LinkError};
use super::mux::{Inheritance, MailLimits, Mux};
use super::request::GuestRequest;
use super::room::MailRoom;

/// How often `Hello` is said to a guest that boots.
const HELLO_PERIOD: Duration = Duration::from_secs(1);

/// Where a link's unasked-for output and its guest's requests go.
#[derive(Debug)]
pub struct LinkOptions {
    /// Output of programs that this link did not start: a clone's, inherited from its parent. What
    /// the channel can't take is dropped, and a line in it says how much.
    pub log: mpsc::Sender<Bytes>,
    /// What programs in the guest ask for.
    pub requests: mpsc::Sender<GuestRequest>,
    /// How much of its workers' messages may wait here.
    pub mail: MailLimits,
    /// And of those of all workers of their parent.
    pub room: MailRoom,
}

/// The first words to a VM that boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloRequest {
    /// The VM's name; also its host name.
    pub name: String,
    /// 32 hex digits.
    pub machine_id: String,
    /// 64 bytes from the host's random pool, as hex.
    pub entropy: String,
}

/// What an agent says of itself and its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    pub agent_version: String,
    /// `uname -r`.
    pub kernel: String,
    pub cpus: u32,
    /// What has become of the image's first-boot command, if it has one.
    pub firstboot: Option<Firstboot>,
    /// The root is read from persistent memory.
    #[serde(default)]
    pub pmem_root: bool,
}

impl AgentInfo {
    /// The first-boot command does not run (any more).
    pub fn is_ready(&self) -> bool {
        self.firstboot != Some(Firstboot::Running)
    }
}

/// A handle on one guest's agent; clones of it are the same link. The link ends when the guest's
/// port closes, when the guest breaks the protocol, or when the last handle and session are
/// dropped.
#[derive(Debug, Clone)]
pub struct AgentLink {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    closed: watch::Receiver<Closed>,
    keys: Arc<AtomicU64>,
}

impl AgentLink {
    /// The link of a VM that boots. `stream`'s other end is QEMU's character device. Must be called
    /// within a tokio runtime.
    pub fn start(stream: UnixStream, options: LinkOptions) -> Self {
        let mux = Mux::new(options.mail);
        Self::spawn(stream, mux, options)
    }

    /// The link of a clone. `inheritance` is from its parent's [`Held`]. Everything asked of it
    /// waits until [`AgentLink::identity`] was confirmed.
    pub fn start_clone(
        stream: UnixStream,
        options: LinkOptions,
        inheritance: &Inheritance,
    ) -> Self {
        let mux = Mux::new_clone(options.mail, inheritance);
        Self::spawn(stream, mux, options)
    }

    fn spawn(stream: UnixStream, mux: Mux, options: LinkOptions) -> Self {
        let (commands, commands_rx) = mpsc::unbounded_channel();
        let (closed_tx, closed) = watch::channel(None);
        let back = commands.downgrade();
        let LinkOptions { log, requests, room, .. } = options;
        let mux = mux.in_room(room);
        let driver = Driver::new(stream, mux, commands_rx, back, closed_tx, requests, log);
        tokio::spawn(driver.run());
        Self { commands, closed, keys: Arc::new(AtomicU64::new(1)) }
    }

    /// Greet a guest that boots, once a second until it answers. Its first-boot command may still
    /// run: see [`AgentLink::ready`].
    ///
    /// # Errors
    /// `Timeout`, `Closed`, or `Version` if the agent speaks another protocol.
    pub async fn hello(
        &self,
        hello: HelloRequest,
        timeout: Duration,
    ) -> Result<AgentInfo, LinkError> {
        let deadline = Instant::now() + timeout;
        let mut waiting = Vec::new();
        loop {
            let message = ToGuest::Hello {
                protocol: PROTOCOL_VERSION,
                name: hello.name.clone(),
                machine_id: hello.machine_id.clone(),
                entropy: hello.entropy.clone(),
                realtime_ns: realtime_ns(),
            };
            let (answer, answer_rx) = oneshot::channel();
            self.send(Command::Hello { message, answer })?;
            // All are answered by the first `Hello` of the guest, so the newest will do; the older
            // ones only must not be dropped before.
            waiting.push(answer_rx);
            let Some(newest) = waiting.last_mut() else { continue };
            let next = deadline.min(Instant::now() + HELLO_PERIOD);
            match timeout_at(next, newest).await {
                Ok(Ok(info)) => return info,
                Ok(Err(_closed)) => return Err(self.why()),
                Err(_elapsed) if next == deadline => {
                    return Err(LinkError::Timeout { what: "hello", after: timeout });
                }
                Err(_elapsed) => {}
            }
        }
    }

    /// Wait until a guest that was greeted has run its first-boot command. How that ended is in the
    /// result.
    ///
    /// # Errors
    /// `Timeout` or `Closed`.
    pub async fn ready(&self, timeout: Duration) -> Result<AgentInfo, LinkError> {
        let (answer, answer_rx) = oneshot::channel();
        self.send(Command::Ready { answer })?;
        self.answer("ready", timeout, answer_rx).await
    }

    /// Whether the agent is alive.
    ///
    /// # Errors
    /// `Timeout` or `Closed`.
    pub async fn ping(&self, timeout: Duration) -> Result<(), LinkError> {
        let token = self.key();
        let (answer, answer_rx) = oneshot::channel();
        self.send(Command::Ping { token, answer })?;
        self.answer("ping", timeout, answer_rx).await
    }

    /// Ask the guest to power itself off. It answers by ending: see [`AgentLink::closed`].
    ///
    /// # Errors
    /// `Closed`.
    pub fn poweroff(&self) -> Result<(), LinkError> {
        self.send(Command::Poweroff)
    }

    /// Bring both directions to a frame boundary for a freeze. While the result lives nothing is
    /// sent, and QEMU has nothing to read. `fork` is a number not used before for this VM.
    ///
    /// Dropping the future gives the fork up and lets the guest go on.
    ///
    /// # Errors
    /// `Busy` if another fork is in progress, `Timeout`, or `Closed`.
    pub async fn prepare(&self, fork: u64, timeout: Duration) -> Result<Held, LinkError> {
        let (answer, answer_rx) = oneshot::channel();
        let broken = Arc::new(AtomicBool::new(false));
        self.send(Command::Prepare { fork, broken: broken.clone(), answer })?;
        let mut held = Held {
            commands: self.commands.clone(),
            fork,
            inheritance: Inheritance::default(),
            broken,
            released: false,
        };
        match self.answer("prepare", timeout, answer_rx).await {
            Ok(inheritance) => {
                held.inheritance = inheritance;
                Ok(held)
            }
            Err(error) => {
                // Another's fork, perhaps of the same number, is not ours to end.
                held.released = error == LinkError::Busy;
                Err(error)
            }
        }
    }

    /// Tell a clone who it is, and wait until it has become that.
    ///
    /// # Errors
    /// `Refused`, `Timeout` or `Closed`: the clone must be killed. `Busy` if it has an identity.
    pub async fn identity(
        &self,
        identity: ForkIdentity,
        timeout: Duration,
    ) -> Result<(), LinkError> {
        let (answer, answer_rx) = oneshot::channel();
        self.send(Command::Identity { identity: Box::new(identity), answer })?;
        self.answer("identity", timeout, answer_rx).await
    }

    /// End the link: its agent is not there any more. Everything in progress fails with that
    /// reason.
    pub fn give_up(&self, reason: CloseReason) {
        // It may have ended by itself.
        let _ = self.send(Command::GiveUp { reason });
    }

    /// Waits until the link has ended, and says why.
    pub async fn closed(&self) -> CloseReason {
        let mut closed = self.closed.clone();
        match closed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(CloseReason::Dropped),
            Err(_driver_gone) => CloseReason::Dropped,
        }
    }

    /// Why the link has ended, if it has.
    pub fn closed_now(&self) -> Option<CloseReason> {
        self.closed.borrow().clone()
    }

    pub(super) fn why(&self) -> LinkError {
        LinkError::Closed(self.closed_now().unwrap_or(CloseReason::Dropped))
    }

    pub(super) fn send(&self, command: Command) -> Result<(), LinkError> {
        self.commands.send(command).map_err(|_closed| self.why())
    }

    pub(super) fn key(&self) -> Key {
        self.keys.fetch_add(1, Ordering::Relaxed)
    }

    /// Open a channel. Dropping the result cancels it.
    pub(super) fn open(
        &self,
        what: String,
        message: ToGuest,
        side: Side,
    ) -> Result<Opened, LinkError> {
        let key = self.key();
        let permits = Arc::new(Semaphore::new(WINDOW_BYTES as usize));
        let (done, done_rx) = oneshot::channel();
        let port = Port { what, permits: permits.clone(), side, _done: done };
        self.send(Command::Open { key, message, port })?;
        Ok(Opened { commands: self.commands.clone(), key, permits, done: done_rx })
    }

    pub(super) async fn answer<T>(
        &self,
        what: &'static str,
        timeout: Duration,
        answer: oneshot::Receiver<Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        match tokio::time::timeout(timeout, answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_closed)) => Err(self.why()),
            Err(_elapsed) => Err(LinkError::Timeout { what, after: timeout }),
        }
    }
}

/// A guest that is prepared: the VM may be frozen. Dropping it lets the guest go on.
#[derive(Debug)]
pub struct Held {
    commands: mpsc::UnboundedSender<Command>,
    fork: u64,
    inheritance: Inheritance,
    broken: Arc<AtomicBool>,
    released: bool,
}

impl Held {
    pub fn fork(&self) -> u64 {
        self.fork
    }

    /// For [`AgentLink::start_clone`] of the clones of this freeze.
    pub fn inheritance(&self) -> &Inheritance {
        &self.inheritance
    }

    /// Whether the guest has kept silent so far. It speaks again by itself after 30 s of its time;
    /// a freeze after that is worth nothing, so ask once the VM is stopped.
    pub fn is_intact(&self) -> bool {
        !self.broken.load(Ordering::Relaxed)
    }

    /// Let the guest go on. Call it when the parent runs again, or is about to.
    pub fn continue_(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.released {
            let _ = self.commands.send(Command::Release { fork: self.fork });
        }
    }
}

/// The near end of an open channel; cancels it when dropped, which does no harm after its end.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) key: Key,
    /// Room for bytes towards the guest.
    pub(super) permits: Arc<Semaphore>,
    /// Resolves when the channel has ended and all was passed on.
    pub(super) done: oneshot::Receiver<()>,
}

impl Opened {
    /// Wait for room, then send; long bytes go in parts.
    pub(super) async fn push(&self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(WINDOW_BYTES as usize / 4));
            self.room(part.len()).await;
            let _ = self.commands.send(Command::Push { key: self.key, bytes: part, end: false });
        }
    }

    pub(super) fn push_end(&self) {
        let _ = self.commands.send(Command::Push { key: self.key, bytes: Bytes::new(), end: true });
    }

    /// Wait for room for `bytes`; the driver gives it back when they have left.
    pub(super) async fn room(&self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(WINDOW_BYTES);
        if let Ok(permit) = self.permits.acquire_many(bytes).await {
            permit.forget();
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Cancel { key: self.key });
    }
}

/// The wall clock, in ns since 1970.
fn realtime_ns() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
