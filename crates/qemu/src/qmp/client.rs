//! One connection: a reader task, a queue of waiters, and writes that are whole or end the
//! connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::AbortHandle;

use super::QmpError;
use super::stall::{self, IoError};
use super::wire::{Decoder, Event, Greeting, Message, encode};

/// Commands without an answer yet, those whose caller gave up among them.
const OUTSTANDING_MAX: usize = 32;
/// Events a slow subscriber may lag behind before it loses some.
const EVENTS_KEPT: usize = 256;
/// For commands that QEMU answers at once. Long, since a host under load stalls QEMU's main loop.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to one QEMU. Clones share it; it closes with the last.
#[derive(Debug, Clone)]
pub struct Qmp {
    handle: Arc<Handle>,
}

/// Ends the reader with the last clone of [`Qmp`].
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    greeting: Greeting,
    reader: AbortHandle,
    migrating: tokio::sync::Mutex<()>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

#[derive(Debug)]
struct Shared {
    stream: UnixStream,
    writing: tokio::sync::Mutex<()>,
    queue: Mutex<Queue>,
    events: broadcast::Sender<Event>,
    /// Status of the last `MIGRATION` event since [`Qmp::forget_migration`].
    migration: watch::Sender<Option<String>>,
    /// What keeps the VM from running, until it runs again.
    stall: watch::Sender<Option<IoError>>,
    closed: watch::Sender<Option<String>>,
}

#[derive(Debug, Default)]
struct Queue {
    waiters: VecDeque<oneshot::Sender<Result<Value, Refusal>>>,
    lost: Option<String>,
}

#[derive(Debug)]
struct Refusal {
    class: String,
    desc: String,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Fail everybody who waits, and everybody to come. The first reason stands.
    fn lose(&self, reason: &str) {
        let waiters = {
            let mut queue = self.queue();
            queue.lost.get_or_insert_with(|| reason.to_owned());
            std::mem::take(&mut queue.waiters)
        };
        // A dropped sender reads as lost.
        drop(waiters);
        self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            closed.get_or_insert_with(|| reason.to_owned());
            first
        });
    }

    fn lost(&self) -> QmpError {
        let reason = self.queue().lost.clone();
        QmpError::Lost { reason: reason.unwrap_or_else(|| "closed".to_owned()) }
    }

    fn on_message(&self, message: Message) {
        match message {
            Message::Return(value) => self.answer(Ok(value)),
            Message::Error { class, desc } => self.answer(Err(Refusal { class, desc })),
            Message::Event(event) => {
                tracing::trace!(event = event.name, data = %event.data, "QEMU event");
                if event.name == "MIGRATION" {
                    let status = event.text("status").unwrap_or("unknown").to_owned();
                    self.migration.send_replace(Some(status));
                }
                self.stall.send_if_modified(|stall| stall::update(stall, &event));
                // No listener is fine.
                let _ = self.events.send(event);
            }
            Message::Greeting(_) => tracing::warn!("QEMU greeted twice"),
            Message::Unknown(value) => tracing::warn!(%value, "unknown QMP message"),
        }
    }

    fn answer(&self, answer: Result<Value, Refusal>) {
        let waiter = self.queue().waiters.pop_front();
        match waiter {
            // A caller who gave up has dropped its end.
            Some(waiter) => drop(waiter.send(answer)),
            None => tracing::warn!(?answer, "QMP answer to no command"),
        }
    }

    /// Send what the socket takes of `line`. With the first bytes the waiter takes its place in the
    /// queue, under the lock, or the reply could come before it.
    fn send_some(
        &self,
        line: &[u8],
        fd: Option<BorrowedFd<'_>>,
        waiter: &mut Option<oneshot::Sender<Result<Value, Refusal>>>,
    ) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() && waiter.is_some() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let mut queue = self.queue();
        let sent = sendmsg(&self.stream, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
        if let Some(waiter) = waiter.take() {
            queue.waiters.push_back(waiter);
        }
        Ok(sent)
    }
}

/// A line that was sent in part can't be taken back: if the caller goes away, so does the
/// connection.
struct WholeLine<'a> {
    shared: &'a Shared,
    begun: bool,
}

impl Drop for WholeLine<'_> {
    fn drop(&mut self) {
        if self.begun {
            self.shared.lose("a command was given up while half sent");
        }
    }
}

impl Qmp {
    /// Take over the connected socket, wait for QEMU's greeting and leave negotiation mode.
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`QmpError::Lost`] if QEMU ends or says something else, [`QmpError::Timeout`].
    pub async fn connect(socket: OwnedFd, timeout: Duration) -> Result<Self, QmpError> {
        let lost = |reason: String| QmpError::Lost { reason };
        let stream = StdUnixStream::from(socket);
        stream.set_nonblocking(true).map_err(|e| lost(e.to_string()))?;
        let stream = UnixStream::from_std(stream).map_err(|e| lost(e.to_string()))?;

        let mut decoder = Decoder::default();
        let first = tokio::time::timeout(timeout, next_message(&stream, &mut decoder)).await;
        let greeting = match first {
            Ok(Ok(Message::Greeting(greeting))) => greeting,
            Ok(Ok(other)) => return Err(lost(format!("no greeting but {other:?}"))),
            Ok(Err(reason)) => return Err(lost(reason)),
            Err(_) => return Err(timed_out("greeting", timeout)),
        };

        let shared = Arc::new(Shared {
            stream,
            writing: tokio::sync::Mutex::new(()),
            queue: Mutex::default(),
            events: broadcast::channel(EVENTS_KEPT).0,
            migration: watch::Sender::new(None),
            stall: watch::Sender::new(None),
            closed: watch::Sender::new(None),
        });
        let reader = tokio::spawn(read(shared.clone(), decoder)).abort_handle();
        let migrating = tokio::sync::Mutex::new(());
        let qmp = Self { handle: Arc::new(Handle { shared, greeting, reader, migrating }) };
        qmp.execute("qmp_capabilities", None, timeout).await?;
        Ok(qmp)
    }

    /// QEMU's version.
    pub fn greeting(&self) -> &Greeting {
        &self.handle.greeting
    }

    /// Send one command and wait for its answer.
    ///
    /// Dropping the future while it waits for the answer is harmless.
    ///
    /// # Errors
    /// All of [`QmpError`] but `Migration`.
    pub async fn execute(
        &self,
        command: &str,
        arguments: Option<Value>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        self.send(command, arguments, None, timeout).await
    }

    /// As [`Qmp::execute`], with a copy of `fd` for QEMU beside the command (`getfd`).
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn execute_with_fd(
        &self,
        command: &str,
        arguments: Option<Value>,
        fd: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        self.send(command, arguments, Some(fd), timeout).await
    }

    async fn send(
        &self,
        command: &str,
        arguments: Option<Value>,
        fd: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let line = encode(command, arguments.as_ref());
        let answer = async {
            let reply = self.write(command, &line, fd).await?;
            reply.await.map_err(|_| self.handle.shared.lost())
        };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer?.map_err(|Refusal { class, desc }| QmpError::Refused {
                command: command.to_owned(),
                class,
                desc,
            }),
            Err(_) => Err(timed_out(command, timeout)),
        }
    }

    async fn write(
        &self,
        command: &str,
        line: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<oneshot::Receiver<Result<Value, Refusal>>, QmpError> {
        let shared = &*self.handle.shared;
        let _turn = shared.writing.lock().await;
        let outstanding = {
            let queue = shared.queue();
            if queue.lost.is_some() {
                drop(queue);
                return Err(shared.lost());
            }
            queue.waiters.len()
        };
        if outstanding >= OUTSTANDING_MAX {
            return Err(QmpError::Busy { command: command.to_owned(), outstanding });
        }
        let (waiter, reply) = oneshot::channel();
        let mut waiter = Some(waiter);
        let mut whole = WholeLine { shared, begun: false };
        let mut rest = line;
        while !rest.is_empty() {
            let sent = shared
                .stream
                .async_io(Interest::WRITABLE, || shared.send_some(rest, fd, &mut waiter))
                .await;
            match sent {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(error) => {
                    shared.lose(&format!("write: {error}"));
                    return Err(shared.lost());
                }
            }
            whole.begun = true;
        }
        whole.begun = false;
        // The reader may have failed everybody just before this waiter joined.
        if shared.queue().lost.is_some() {
            return Err(shared.lost());
        }
        Ok(reply)
    }

    /// Events from now on. A subscriber that lags 256 events behind loses the oldest.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.handle.shared.events.subscribe()
    }

    /// Why QEMU has stopped the VM by itself: a drive failed. `None` while there is no such reason,
    /// and again once the VM has been resumed. [`Qmp::cont`] resumes it, and repeats the request;
    /// if that fails too, the VM stops again. The sender ends with the connection's last handle.
    pub fn stall(&self) -> watch::Receiver<Option<IoError>> {
        self.handle.shared.stall.subscribe()
    }

    /// Wait until the connection is gone; the reason.
    pub async fn closed(&self) -> String {
        let mut closed = self.handle.shared.closed.subscribe();
        let reason = closed.wait_for(Option::is_some).await;
        reason.ok().and_then(|r| r.clone()).unwrap_or_else(|| "closed".to_owned())
    }

    /// The connection stands.
    pub fn is_open(&self) -> bool {
        self.handle.shared.closed.borrow().is_none()
    }

    pub(super) fn migration_turn(&self) -> &tokio::sync::Mutex<()> {
        &self.handle.migrating
    }

    /// Let only events to come count for [`Qmp::migration_end`].
    pub(super) fn forget_migration(&self) {
        self.handle.shared.migration.send_replace(None);
    }

    /// Wait for the end of the migration that runs: `completed`, `failed` or `cancelled`.
    pub(super) async fn migration_end(&self, timeout: Duration) -> Result<String, QmpError> {
        let mut status = self.handle.shared.migration.subscribe();
        let ended = |status: &Option<String>| {
            matches!(status.as_deref(), Some("completed" | "failed" | "cancelled"))
        };
        tokio::select! {
            biased;
            end = status.wait_for(ended) => {
                let end = end.ok().and_then(|status| status.clone());
                end.ok_or_else(|| self.handle.shared.lost())
            }
            reason = self.closed() => Err(QmpError::Lost { reason }),
            () = tokio::time::sleep(timeout) => Err(timed_out("migrate", timeout)),
        }
    }
}

fn timed_out(command: &str, timeout: Duration) -> QmpError {
    QmpError::Timeout { command: command.to_owned(), timeout_ms: timeout.as_millis() }
}

async fn read(shared: Arc<Shared>, mut decoder: Decoder) {
    let reason = loop {
        match next_message(&shared.stream, &mut decoder).await {
            Ok(message) => shared.on_message(message),
            Err(reason) => break reason,
        }
    };
    shared.lose(&reason);
}

async fn next_message(stream: &UnixStream, decoder: &mut Decoder) -> Result<Message, String> {
    let mut bytes = vec![0; 16 << 10];
    loop {
        if let Some(message) = decoder.next_message().map_err(|e| e.to_string())? {
            return Ok(message);
        }
        stream.readable().await.map_err(|e| e.to_string())?;
        match stream.try_read(&mut bytes) {
            Ok(0) => return Err("QEMU closed it".to_owned()),
            Ok(count) => decoder.push(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("read: {error}")),
        }
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
