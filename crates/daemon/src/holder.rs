//! The daemon's dealings with its holder: what a successor finds when this daemon is gone.
//!
//! ```text
//!   begin ──► take (a predecessor's sockets) ──► keep (ours) ─ ─ ─► part: end it, or leave it
//!                                                  ▲    │
//!                                                  └────┘ watch: it died, start another
//! ```
//!
//! Promises: a daemon that ends for good ends its holder too. A daemon that restarts or dies leaves
//! its sockets in the holder. Without a holder a daemon serves as well, and warns: its clients are
//! then refused while it restarts.
//!
//! Left to others: the holder's own end ([`vmfork_holder`]). That there is one daemon to a state
//! folder is the lock's promise ([`vmfork_host::state`]). It must be held before
//! [`Holding::begin`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::task::spawn_blocking;
use vmfork_holder::{HolderError, Kind, Name, Owner, kill_other, start};

use crate::config::Config;
use vmfork_rest::http::{FileId, ListenError, Listeners, SocketOwner};

/// Below the folder of the shim and the agent.
const PROGRAM: &str = "vmfork-holder";
/// The API's sockets, in the holder.
const UNIX: &str = "api.unix";
const TCP: &str = "api.tcp";
/// Before another is started in place of one that died: a service manager may be faster.
const RENEW_AFTER: Duration = Duration::from_millis(500);
/// The longest pause between two tries.
const RENEW_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Why a daemon ends, and whether another one takes over from it.
#[derive(Debug, Clone, Copy)]
pub struct Ending {
    pub why: &'static str,
    pub successor: bool,
}

impl From<&'static str> for Ending {
    /// For good.
    fn from(why: &'static str) -> Self {
        Self { why, successor: false }
    }
}

/// What `doctor` reports of the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HolderStatus {
    /// The settings want none.
    Off,
    /// It keeps this many sockets, which are all that we serve.
    Keeps(usize),
    /// It did not take all `of` them.
    Lacks { held: usize, of: usize },
    /// It could not be started, or has died and no other is there yet.
    Missing,
}

/// Our holder, if there is one.
#[derive(Debug)]
pub struct Holding {
    state: PathBuf,
    program: PathBuf,
    linger: Duration,
    inner: Mutex<Inner>,
    parting: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    owner: Option<Owner>,
    /// It was there before us: what it keeps is not for us alone to give up.
    inherited: bool,
    /// For another holder, should this one die.
    kept: BTreeMap<Name, Kept>,
    /// True while the holder has the unix socket: its file is not ours to remove then.
    leave_file: Option<Arc<AtomicBool>>,
    child: Option<Child>,
    /// We part: no other holder is started.
    parted: bool,
}

#[derive(Debug)]
struct Kept {
    note: Vec<u8>,
    fd: OwnedFd,
    /// The holder has said that it has a copy.
    is_held: bool,
}

impl Holding {
    /// Find the holder of the folder `state`, or start one. The folder's lock must be ours.
    pub fn begin(config: &Config, state: &Path) -> Self {
        let holding = Self {
            state: state.to_owned(),
            program: config.host.libdir.join(PROGRAM),
            linger: config.holder_linger,
            inner: Mutex::default(),
            parting: Condvar::new(),
        };
        if holding.linger.is_zero() {
            holding.end_other();
            return holding;
        }
        match holding.join() {
            Ok((owner, child)) => {
                let mut inner = holding.lock();
                inner.inherited = child.is_none();
                (inner.owner, inner.child) = (Some(owner), child);
            }
            Err(error) => tracing::warn!(
                "no holder, so clients are refused while this daemon restarts: {:#}",
                anyhow::Error::from(error)
            ),
        }
        holding
    }

    /// Say hello to the one that is there, or to one that we start.
    fn join(&self) -> Result<(Owner, Option<Child>), HolderError> {
        match Owner::hello(&self.state, self.linger) {
            Ok(owner) => return Ok((owner, None)),
            Err(error) if error.is_absent() => {}
            Err(error) => {
                tracing::warn!(
                    "the holder is of no use, another takes its place: {:#}",
                    anyhow::Error::from(error)
                );
                kill_other(&self.state)?;
            }
        }
        let child = start(&self.program, &self.state)?;
        Ok((Owner::hello(&self.state, self.linger)?, Some(child)))
    }

    /// Without a holder of ours there shall be none: it would keep our sockets from us.
    fn end_other(&self) {
        let ended = match Owner::hello(&self.state, self.linger) {
            Ok(owner) => owner.end(),
            Err(error) => Err(error),
        };
        match ended {
            Err(error) if !error.is_absent() => self.kill(error),
            _ => {}
        }
    }

    fn kill(&self, why: HolderError) {
        tracing::warn!("the holder does not end by itself: {:#}", anyhow::Error::from(why));
        if let Err(error) = kill_other(&self.state) {
            tracing::warn!("end the holder: {:#}", anyhow::Error::from(error));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each field is whole at any time.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The unix socket that a predecessor served at `path`, if it is there still.
    ///
    /// # Errors
    /// If the kernel refuses to have it as `owner` says.
    pub fn take_unix(
        &self,
        path: &Path,
        owner: SocketOwner,
    ) -> Result<Option<Listeners>, ListenError> {
        let Some((note, fd)) = self.take(UNIX) else { return Ok(None) };
        let Some((file, noted)) = read_unix_note(&note) else {
            self.release(UNIX);
            return Ok(None);
        };
        if noted == path
            && let Some(listeners) = Listeners::taken_over(fd, path, file, owner)?
        {
            let mut inner = self.lock();
            let leave = listeners.leave_file();
            leave.store(true, Relaxed);
            inner.leave_file = Some(leave);
            return Ok(Some(listeners));
        }
        // No daemon serves it any more.
        self.release(UNIX);
        if fs::symlink_metadata(noted).is_ok_and(|now| (now.dev(), now.ino()) == file) {
            let _ = fs::remove_file(noted);
        }
        Ok(None)
    }

    /// The TCP socket that a predecessor was told to serve at `address`.
    pub fn take_tcp(&self, address: SocketAddr) -> Option<OwnedFd> {
        let (note, fd) = self.take(TCP)?;
        if note == address.to_string().as_bytes() {
            return Some(fd);
        }
        // Before another is made: it may be in its way.
        self.release(TCP);
        None
    }

    fn take(&self, name: &'static str) -> Option<(Vec<u8>, OwnedFd)> {
        let mut inner = self.lock();
        match inner.owner.as_mut()?.get(&named(name)) {
            Ok(held) => {
                held.filter(|held| held.kind == Kind::LISTENER).map(|held| (held.note, held.fd))
            }
            Err(error) => {
                tracing::warn!(name, "take over a socket: {:#}", anyhow::Error::from(error));
                None
            }
        }
    }

    fn release(&self, name: &'static str) {
        let mut inner = self.lock();
        let Some(owner) = inner.owner.as_mut() else { return };
        if let Err(error) = owner.release(&named(name)) {
            tracing::warn!(name, "give up a socket: {:#}", anyhow::Error::from(error));
        }
    }

    /// Leave `listeners`, which are all that we serve, to a successor, and nothing that we did not
    /// take over.
    ///
    /// # Errors
    /// If there can be no copies of the sockets.
    pub fn keep(&self, config: &Config, listeners: &Listeners) -> io::Result<()> {
        let mut inner = self.lock();
        let unix = (UNIX, unix_note(listeners.file_id(), &config.socket), listeners.unix_fd());
        let tcp = listeners.tcp_fd().zip(config.tcp.as_ref());
        let tcp = tcp.map(|(fd, tcp)| (TCP, tcp.address.to_string().into_bytes(), fd));
        for (name, note, fd) in [unix].into_iter().chain(tcp) {
            let kept = Kept { note, fd: fd.try_clone_to_owned()?, is_held: false };
            inner.kept.insert(named(name), kept);
        }
        inner.leave_file = Some(listeners.leave_file());
        inner.put_all();
        if let Err(error) = inner.drop_unclaimed() {
            tracing::warn!("look what the holder keeps: {:#}", anyhow::Error::from(error));
        }
        Ok(())
    }

    /// The daemon ends. Without a successor the holder does, too.
    pub async fn part(self: &Arc<Self>, ending: Ending) {
        let this = Arc::clone(self);
        let parted =
            spawn_blocking(move || if ending.successor { this.leave() } else { this.end() });
        if let Err(error) = parted.await {
            tracing::error!("part with the holder: {error}");
        }
    }

    /// The daemon could not start. What its predecessor left is for the next one.
    pub fn give_up(&self) {
        if self.lock().inherited { self.leave() } else { self.end() }
    }

    fn leave(&self) {
        let mut inner = self.lock();
        inner.parted = true;
        self.parting.notify_all();
        if inner.owner.is_none() {
            tracing::warn!("no holder: clients are refused until a successor serves them");
            inner.file_is_ours();
        }
    }

    fn end(&self) {
        let mut inner = self.lock();
        inner.parted = true;
        self.parting.notify_all();
        inner.file_is_ours();
        if let Some(owner) = inner.owner.take()
            && let Err(error) = owner.end()
        {
            self.kill(error);
        }
    }

    /// Whether clients wait while this daemon restarts. Takes seconds while another holder is
    /// started.
    pub async fn status(self: &Arc<Self>) -> HolderStatus {
        let this = Arc::clone(self);
        let looked = spawn_blocking(move || this.status_here()).await;
        looked.unwrap_or_else(|error| {
            tracing::error!("look at the holder: {error}");
            HolderStatus::Missing
        })
    }

    fn status_here(&self) -> HolderStatus {
        let inner = self.lock();
        let (held, of) =
            (inner.kept.values().filter(|kept| kept.is_held).count(), inner.kept.len());
        match &inner.owner {
            _ if self.linger.is_zero() => HolderStatus::Off,
            None => HolderStatus::Missing,
            Some(_) if held < of => HolderStatus::Lacks { held, of },
            Some(_) => HolderStatus::Keeps(held),
        }
    }

    /// Start another holder whenever it dies, until we part: on a thread, which waits in `poll`.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn watch(self: &Arc<Self>) -> io::Result<()> {
        let this = Arc::clone(self);
        thread::Builder::new().name("holder".into()).spawn(move || this.watch_here()).map(drop)
    }

    fn watch_here(&self) {
        let mut pause = RENEW_AFTER;
        while let Some(socket) = self.socket() {
            if let Some(socket) = socket {
                wait_until_closed(&socket);
                pause = RENEW_AFTER;
            }
            let inner = self.lock();
            let paused = self.parting.wait_timeout_while(inner, pause, |inner| !inner.parted);
            drop(paused);
            if let Err(error) = self.renew() {
                let error = anyhow::Error::from(error);
                // Once is enough for the log.
                if pause == RENEW_AFTER {
                    tracing::warn!("start another holder: {error:#}");
                } else {
                    tracing::debug!("start another holder: {error:#}");
                }
            }
            pause = (pause * 2).min(RENEW_PAUSE_MAX);
        }
    }

    /// Of the holder; `Some(None)` if it has died, `None` if we have parted or want none.
    fn socket(&self) -> Option<Option<OwnedFd>> {
        let inner = self.lock();
        if inner.parted || self.linger.is_zero() {
            return None;
        }
        let socket = inner.owner.as_ref().map(|owner| owner.socket().try_clone_to_owned());
        Some(socket.transpose().unwrap_or_default())
    }

    fn renew(&self) -> Result<(), HolderError> {
        let mut inner = self.lock();
        if inner.parted {
            return Ok(());
        }
        inner.owner = None;
        inner.file_is_ours();
        if let Some(mut child) = inner.child.take() {
            // If it has not ended, it is of no use either.
            let _ = child.kill();
            let _ = child.wait();
        }
        let (owner, child) = self.join()?;
        (inner.owner, inner.child) = (Some(owner), child);
        inner.put_all();
        tracing::warn!("the holder had died; another keeps the sockets now");
        Ok(())
    }
}

impl Inner {
    /// Have the holder, if there is one, keep all that we serve.
    fn put_all(&mut self) {
        let Some(owner) = &mut self.owner else { return };
        for (name, kept) in &mut self.kept {
            let put = owner.put(name, Kind::LISTENER, &kept.note, kept.fd.as_fd());
            kept.is_held = put.is_ok();
            match put {
                Ok(()) if name.as_str() == UNIX => {
                    if let Some(leave) = &self.leave_file {
                        leave.store(true, Relaxed);
                    }
                }
                Ok(()) => {}
                Err(error) => tracing::warn!(
                    %name,
                    "clients are refused while this daemon restarts: {:#}",
                    anyhow::Error::from(error)
                ),
            }
        }
    }

    /// Drop what a predecessor had and we don't: no daemon would ever answer there.
    fn drop_unclaimed(&mut self) -> Result<(), HolderError> {
        let Some(owner) = &mut self.owner else { return Ok(()) };
        for held in owner.list()? {
            if held.generation != owner.generation() {
                tracing::info!(name = %held.name, "an earlier daemon's, and of no use to this one");
                owner.release(&held.name)?;
            }
        }
        Ok(())
    }

    fn file_is_ours(&self) {
        if let Some(leave) = &self.leave_file {
            leave.store(false, Relaxed);
        }
    }
}

/// Until the holder has closed its end.
fn wait_until_closed(socket: &OwnedFd) {
    loop {
        match poll(&mut [PollFd::new(socket, PollFlags::empty())], None) {
            Err(Errno::INTR) => {}
            _hung_up => return,
        }
    }
}

fn named(name: &'static str) -> Name {
    Name::new(name).unwrap_or_else(|| unreachable!("{name:?} is visible ASCII"))
}

/// `DEV INODE PATH`: the socket's file, by which a successor knows that it is there still.
fn unix_note((dev, ino): FileId, path: &Path) -> Vec<u8> {
    [format!("{dev} {ino} ").as_bytes(), path.as_os_str().as_bytes()].concat()
}

fn read_unix_note(note: &[u8]) -> Option<(FileId, &Path)> {
    let mut parts = note.splitn(3, |byte| *byte == b' ');
    let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
    let file = (number()?, number()?);
    Some((file, Path::new(std::ffi::OsStr::from_bytes(parts.next()?))))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::thread::JoinHandle;

    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
        listen, recv, send, socket_with,
    };
    use tokio::time::timeout;
    use vmfork_holder::proto::{Refusal, Reply, Request};

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn holding(state: &Path) -> Holding {
        let (state, program) = (state.to_owned(), PathBuf::new());
        let (inner, parting) = (Mutex::default(), Condvar::new());
        Holding { state, program, linger: SOON, inner, parting }
    }

    /// A holder for one daemon, which takes as many fds as there is `room`. It ends with the
    /// daemon's connection.
    fn holder(state: &Path, room: &Arc<AtomicU32>) -> JoinHandle<()> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("fds left");
        let path = SocketAddrUnix::new(state.join(vmfork_holder::SOCKET)).expect("short");
        bind(&socket, &path).expect("an empty folder");
        listen(&socket, 1).expect("listens");
        let room = Arc::clone(room);
        thread::spawn(move || {
            let daemon = accept(&socket).expect("a daemon");
            let mut bytes = [0; 4096];
            while let Ok((length @ 1.., _)) = recv(&daemon, &mut bytes, RecvFlags::empty()) {
                let reply = match Request::parse(&bytes[..length]).expect("a request") {
                    Request::Hello { .. } => Reply::Welcome { generation: 1 },
                    _ if room
                        .fetch_update(Relaxed, Relaxed, |room| room.checked_sub(1))
                        .is_ok() =>
                    {
                        Reply::Done
                    }
                    _ => Reply::Refused(Refusal::Full),
                };
                send(&daemon, &reply.to_bytes(), SendFlags::empty()).expect("the daemon waits");
            }
        })
    }

    #[test]
    fn what_the_holder_has_refused_is_not_reported_as_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let (holding, room) = (holding(folder.path()), Arc::new(AtomicU32::new(1)));
        assert_eq!(holding.status_here(), HolderStatus::Missing);
        let holder = holder(folder.path(), &room);
        let mut inner = holding.lock();
        inner.owner = Some(Owner::hello(folder.path(), SOON).expect("it answers"));
        for name in [UNIX, TCP] {
            let fd = fs::File::open("/dev/null").expect("there").into();
            inner.kept.insert(named(name), Kept { note: Vec::new(), fd, is_held: false });
        }
        inner.put_all();
        drop(inner);
        assert_eq!(holding.status_here(), HolderStatus::Lacks { held: 1, of: 2 });
        room.store(2, Relaxed);
        holding.lock().put_all();
        assert_eq!(holding.status_here(), HolderStatus::Keeps(2));
        // What it had before counts no more.
        holding.lock().put_all();
        assert_eq!(holding.status_here(), HolderStatus::Lacks { held: 0, of: 2 });
        drop(holding);
        holder.join().expect("no panic");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_asks_for_the_status_keeps_no_other_request_waiting() {
        let folder = tempfile::tempdir().expect("a folder");
        let holding = Arc::new(holding(folder.path()));
        let (held_tx, held) = tokio::sync::oneshot::channel();
        let (done, until_done) = std::sync::mpsc::channel::<()>();
        let renewing = Arc::clone(&holding);
        let renewing = thread::spawn(move || {
            let _inner = renewing.lock();
            held_tx.send(()).expect("the test waits");
            until_done.recv_timeout(SOON).expect("the test goes on meanwhile");
        });
        held.await.expect("no panic");
        let mut status = Box::pin(holding.status());
        timeout(Duration::from_millis(20), &mut status).await.expect_err("it is being renewed");
        done.send(()).expect("still renewing");
        assert_eq!(status.await, HolderStatus::Missing);
        renewing.join().expect("no panic");
    }

    #[test]
    fn a_note_says_which_file_the_socket_has() {
        let path = Path::new("/run/a b/\u{e9}.sock");
        assert_eq!(read_unix_note(&unix_note((7, 8), path)), Some(((7, 8), path)));
        for bad in [&b""[..], b"7", b"7 8", b"x 8 /a", b"7 -8 /a"] {
            assert_eq!(read_unix_note(bad), None, "{bad:?}");
        }
    }
}
