//! The holder's loop: one thread, which waits in `poll` and does what the [`Table`] says.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FlockOperation, Mode, flock, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
    sockopt,
};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit, umask};

use crate::SOCKET;
use crate::packet::{Packet, address, open_folder, receive, send};
use crate::proto::{MESSAGE_BYTES_MAX, Refusal, Reply, Request};
use crate::table::{ENTRIES_MAX, PeerId, Table};

/// A daemon, the dead one before it, and those who look.
const PEERS_MAX: usize = 16;
const BACKLOG: i32 = 16;
/// When accepting fails (out of memory or files, mostly): how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Beside the entries: peers, fds that come with refused requests, our own.
const FILES_BESIDE: u64 = 64;

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("another holder has {state}")]
    Taken { state: PathBuf },
    #[error("{doing} {path}")]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: Errno,
    },
}

struct Peer {
    id: PeerId,
    socket: OwnedFd,
}

struct Server {
    folder: OwnedFd,
    listener: OwnedFd,
    table: Table<OwnedFd>,
    /// Oldest first.
    peers: Vec<Peer>,
    peers_seen: u64,
    began: Instant,
    /// No connection is accepted before this.
    accept_from: Instant,
}

/// Serves as the holder of the folder `state`, until a daemon ends it or the linger time has passed
/// without a daemon. The time is `linger` until the first daemon sends its own. `ready` is called
/// once daemons can connect.
///
/// # Errors
/// If another holder has the folder, or the kernel refuses.
pub fn serve(state: &Path, linger: Duration, ready: impl FnOnce()) -> Result<(), ServeError> {
    let failed = |doing: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source: Errno| ServeError::Io { doing, path, source }
    };
    let folder = open_folder(state).map_err(failed("open", state))?;
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(ServeError::Taken { state: state.to_owned() }),
        Err(error) => return Err(failed("lock", state)(error)),
    }
    raise_files_limit();
    let listener = listen_in(state, &folder).map_err(failed("listen in", state))?;
    let now = Instant::now();
    let mut server = Server {
        folder,
        listener,
        table: Table::new(0, millis(linger)),
        peers: Vec::new(),
        peers_seen: 0,
        began: now,
        accept_from: now,
    };
    ready();
    let ended = server.run().map_err(failed("wait for daemons in", state));
    server.remove_socket();
    ended
}

/// The lock says that a socket which is there already is a dead holder's.
fn listen_in(state: &Path, folder: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    match unlinkat(folder, SOCKET, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let mask = umask(Mode::from_bits_retain(0o177));
    let bound = bind(&listener, &address(state, folder)?);
    umask(mask);
    bound?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Not being able to is no reason to fail: full is full then, a little earlier.
fn raise_files_limit() {
    let files = getrlimit(Resource::Nofile);
    let entries = u64::try_from(ENTRIES_MAX).unwrap_or(u64::MAX);
    let wanted = entries.saturating_add(FILES_BESIDE);
    let wanted = files.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    if files.current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum: files.maximum };
        let _refused = setrlimit(Resource::Nofile, limit);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Server {
    fn now_ms(&self) -> u64 {
        millis(self.began.elapsed())
    }

    fn run(&mut self) -> rustix::io::Result<()> {
        while !self.table.has_ended() {
            let (is_called, talking) = self.wait()?;
            for id in talking {
                self.hear(id);
                if self.table.has_ended() {
                    return Ok(());
                }
            }
            if is_called {
                self.accept();
            }
            let now_ms = self.now_ms();
            self.table.tick(now_ms);
        }
        Ok(())
    }

    /// Whether a peer wants to connect, and which have something to say or have gone.
    fn wait(&self) -> rustix::io::Result<(bool, Vec<PeerId>)> {
        let accept_in = self.accept_from.saturating_duration_since(Instant::now());
        let end_in = self.table.ends_at_ms().map(|end| end.saturating_sub(self.now_ms()));
        let end_in = end_in.map(Duration::from_millis);
        let wait =
            [end_in, (!accept_in.is_zero()).then_some(accept_in)].into_iter().flatten().min();
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        let mut fds = Vec::with_capacity(self.peers.len() + 1);
        fds.extend(self.peers.iter().map(|peer| PollFd::new(&peer.socket, PollFlags::IN)));
        if accept_in.is_zero() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let talking = self.peers.iter().zip(&fds).filter(|(_, fd)| is_ready(fd));
        let talking = talking.map(|(peer, _)| peer.id).collect();
        Ok((fds.get(self.peers.len()).is_some_and(is_ready), talking))
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(_) => {
                self.accept_from = Instant::now() + ACCEPT_PAUSE;
                return;
            }
        };
        // The socket's mode keeps others away. This is for fds of it that got elsewhere.
        if !sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == geteuid() || peer.uid.is_root())
        {
            let _ = send(&socket, &Reply::Refused(Refusal::Denied).to_bytes(), None);
            return;
        }
        if self.peers.len() >= PEERS_MAX {
            let others = self.peers.iter().position(|peer| !self.table.is_owner(peer.id));
            if let Some(oldest) = others {
                self.peers.remove(oldest);
            }
        }
        self.peers_seen += 1;
        self.peers.push(Peer { id: PeerId(self.peers_seen), socket });
    }

    /// One packet of a peer, answered.
    fn hear(&mut self, id: PeerId) {
        let Some(peer) = self.peers.iter().find(|peer| peer.id == id) else { return };
        let packet = match receive(&peer.socket, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) => return,
            Ok(packet) if !packet.bytes.is_empty() => packet,
            _ => return self.close(id),
        };
        let answered = match understand(packet) {
            Err(refusal) => send(&peer.socket, &Reply::Refused(refusal).to_bytes(), None),
            Ok((request, fd)) => {
                let is_end = request == Request::End;
                let (reply, fd) = self.table.request(id, request, fd);
                // By the reply, all is closed and gone.
                if is_end && reply == Reply::Done {
                    let _ = unlinkat(&self.folder, SOCKET, AtFlags::empty());
                }
                send(&peer.socket, &reply.to_bytes(), fd.map(AsFd::as_fd))
            }
        };
        // Also one that does not read its replies.
        if answered.is_err() {
            self.close(id);
        }
    }

    fn close(&mut self, id: PeerId) {
        self.peers.retain(|peer| peer.id != id);
        let now_ms = self.now_ms();
        self.table.gone(id, now_ms);
    }

    fn remove_socket(&self) {
        let _ = unlinkat(&self.folder, SOCKET, AtFlags::empty());
    }
}

fn understand(packet: Packet) -> Result<(Request, Option<OwnedFd>), Refusal> {
    let Packet { bytes, mut fds, fds_cut } = packet;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(Refusal::Malformed);
    }
    let request = Request::parse(&bytes)?;
    if fds_cut || fds.len() > 1 {
        return Err(Refusal::WrongFd);
    }
    Ok((request, fds.pop()))
}
