//! The daemon's end: finds or starts the holder of a state folder, and asks it.
//!
//! Promises: every wait has a bound. A holder that does not answer is an error, not a hang.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::MARK;
use crate::packet::{Packet, address, open_folder, receive, send};
use crate::proto::{Kind, NOTE_BYTES_MAX, Name, Refusal, Reply, Request};

/// A holder answers at once. One that does not by then hangs.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// From its start until it listens.
const START_WAIT: Duration = Duration::from_secs(5);
/// From SIGKILL, or from its last reply, until it is gone.
const GONE_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    #[error("no holder answers in {state}")]
    Absent { state: PathBuf },
    #[error("{doing}")]
    Io {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the holder refuses: {0}")]
    Refused(Refusal),
    #[error("the holder has ended")]
    Ended,
    #[error("the holder does not speak as a holder does")]
    Nonsense,
    #[error("a note has at most {NOTE_BYTES_MAX} bytes")]
    NoteTooLong,
    #[error("start the holder {program}")]
    Start {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the holder {program} ended, or hung, before it was ready")]
    NotReady { program: PathBuf },
}

impl HolderError {
    /// There is no holder, as opposed to one that does not answer well.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent { .. })
    }
}

fn failed(doing: &'static str) -> impl FnOnce(Errno) -> HolderError {
    move |source| HolderError::Io { doing, source: source.into() }
}

/// An entry, as the holder tells of it.
#[derive(Debug)]
pub struct Held<T> {
    pub name: Name,
    pub kind: Kind,
    pub note: Vec<u8>,
    /// Of the daemon that put or got it last.
    pub generation: u32,
    /// The fd, if it was asked for.
    pub fd: T,
}

/// The connection of the daemon that owns the entries. While it is open, the holder does not end by
/// itself.
#[derive(Debug)]
pub struct Owner {
    socket: OwnedFd,
    generation: u32,
}

impl Owner {
    /// Say hello to the holder of the folder `state`: its entries are ours from now on. If we are
    /// gone for `linger`, it ends.
    ///
    /// # Errors
    /// If there is none, or it does not answer as it should.
    pub fn hello(state: &Path, linger: Duration) -> Result<Self, HolderError> {
        let socket = call(state)?;
        let linger_ms = u32::try_from(linger.as_millis()).unwrap_or(u32::MAX);
        match ask(&socket, &Request::Hello { linger_ms }, None)? {
            (Reply::Welcome { generation }, None) => Ok(Self { socket, generation }),
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// The number of this daemon among those that the holder has had.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Give it a copy of `fd`.
    ///
    /// # Errors
    /// If it is full, or does not answer as it should.
    pub fn put(
        &mut self,
        name: &Name,
        kind: Kind,
        note: &[u8],
        fd: BorrowedFd<'_>,
    ) -> Result<(), HolderError> {
        if note.len() > NOTE_BYTES_MAX {
            return Err(HolderError::NoteTooLong);
        }
        let request = Request::Put { name: name.clone(), kind, note: note.to_vec() };
        match ask(&self.socket, &request, Some(fd))? {
            (Reply::Done, None) => Ok(()),
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// A copy of the fd of this name, if it has one.
    ///
    /// # Errors
    /// If it does not answer as it should.
    pub fn get(&mut self, name: &Name) -> Result<Option<Held<OwnedFd>>, HolderError> {
        match ask(&self.socket, &Request::Get { name: name.clone() }, None)? {
            (Reply::Entry { name, kind, note, generation }, Some(fd)) => {
                Ok(Some(Held { name, kind, note, generation, fd }))
            }
            (Reply::Refused(Refusal::NoSuchName), None) => Ok(None),
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// All that it keeps, by name.
    ///
    /// # Errors
    /// If it does not answer as it should.
    pub fn list(&mut self) -> Result<Vec<Held<()>>, HolderError> {
        list_over(&self.socket)
    }

    /// Have it close the fd of this name; none is fine.
    ///
    /// # Errors
    /// If it does not answer as it should.
    pub fn release(&mut self, name: &Name) -> Result<(), HolderError> {
        match ask(&self.socket, &Request::Drop { name: name.clone() }, None)? {
            (Reply::Done | Reply::Refused(Refusal::NoSuchName), None) => Ok(()),
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// Have it close all and end. Returns when it has.
    ///
    /// # Errors
    /// If it does not answer as it should.
    pub fn end(self) -> Result<(), HolderError> {
        match ask(&self.socket, &Request::End, None)? {
            (Reply::Done, None) => {}
            (reply, _) => return Err(unexpected(reply)),
        }
        if readable(self.socket.as_fd(), GONE_WAIT) { Ok(()) } else { Err(HolderError::Nonsense) }
    }

    /// Becomes readable when the holder is gone, and while it answers.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What the holder of the folder `state` keeps, without saying hello.
///
/// # Errors
/// If there is none, or it does not answer as it should.
pub fn list(state: &Path) -> Result<Vec<Held<()>>, HolderError> {
    list_over(&call(state)?)
}

fn list_over(socket: &OwnedFd) -> Result<Vec<Held<()>>, HolderError> {
    let mut found: Vec<Held<()>> = Vec::new();
    loop {
        let after = found.last().map(|last| last.name.clone());
        match ask(socket, &Request::List { after: after.clone() }, None)? {
            // Each behind the last, or there would be no end.
            (Reply::Entry { name, kind, note, generation }, None)
                if Some(&name) > after.as_ref() =>
            {
                found.push(Held { name, kind, note, generation, fd: () });
            }
            (Reply::Refused(Refusal::NoSuchName), None) => return Ok(found),
            (reply, _) => return Err(unexpected(reply)),
        }
    }
}

/// Kill the holder of the folder `state`, which does not answer or speaks another version. Only for
/// the daemon that has the folder's lock.
///
/// # Errors
/// If it can't be found out or killed, or does not end in time.
pub fn kill_other(state: &Path) -> Result<(), HolderError> {
    let socket = match call(state) {
        Ok(socket) => socket,
        Err(error) if error.is_absent() => return Ok(()),
        Err(error) => return Err(error),
    };
    let peer = sockopt::socket_peercred(&socket).map_err(failed("ask who the holder is"))?;
    let process = match pidfd_open(peer.pid, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(Errno::SRCH) => return Ok(()),
        Err(error) => return Err(failed("look at the holder's process")(error)),
    };
    // It still listens, so the process that we have opened is no later one of its number.
    drop(call(state)?);
    pidfd_send_signal(&process, Signal::KILL).map_err(failed("kill the holder"))?;
    if readable(process.as_fd(), GONE_WAIT) { Ok(()) } else { Err(HolderError::Nonsense) }
}

/// Start a holder of the folder `state` in a session of its own. Returns once it listens.
///
/// # Errors
/// If it can't be started, or ends at once, as when there is one already.
pub fn start(program: &Path, state: &Path) -> Result<Child, HolderError> {
    let mut child = Command::new(program)
        .arg("--state")
        .arg(state)
        .env_clear()
        .env(MARK, state)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|source| HolderError::Start { program: program.to_owned(), source })?;
    // It says a word, and closes the pipe, once it listens.
    let mut word = [0; 16];
    let said = match child.stdout.take() {
        Some(mut pipe) if readable(pipe.as_fd(), START_WAIT) => pipe.read(&mut word).unwrap_or(0),
        _ => 0,
    };
    if said == 0 {
        let _ = child.kill();
        let _ = child.wait();
        return Err(HolderError::NotReady { program: program.to_owned() });
    }
    Ok(child)
}

fn call(state: &Path) -> Result<OwnedFd, HolderError> {
    let absent = || HolderError::Absent { state: state.to_owned() };
    let folder = match open_folder(state) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Err(absent()),
        Err(error) => return Err(failed("open the state folder")(error)),
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(failed("make a socket"))?;
    for way in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
        sockopt::set_socket_timeout(&socket, way, Some(ANSWER_WAIT))
            .map_err(failed("bound the waits for the holder"))?;
    }
    let address = address(state, &folder).map_err(failed("name the holder's socket"))?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::INTR) => {}
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Err(absent()),
            Err(error) => return Err(failed("connect to the holder")(error)),
        }
    }
}

fn ask(
    socket: &OwnedFd,
    request: &Request,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<OwnedFd>), HolderError> {
    match send(socket, &request.to_bytes(), fd) {
        Ok(()) => {}
        Err(Errno::PIPE | Errno::CONNRESET) => return Err(HolderError::Ended),
        Err(error) => return Err(failed("ask the holder")(error)),
    }
    let Packet { bytes, mut fds, .. } = match receive(socket, RecvFlags::empty()) {
        Ok(packet) if packet.bytes.is_empty() => return Err(HolderError::Ended),
        Ok(packet) => packet,
        Err(Errno::CONNRESET) => return Err(HolderError::Ended),
        Err(error) => return Err(failed("hear from the holder")(error)),
    };
    Ok((Reply::parse(&bytes).ok_or(HolderError::Nonsense)?, fds.pop()))
}

fn unexpected(reply: Reply) -> HolderError {
    match reply {
        Reply::Refused(refusal) => HolderError::Refused(refusal),
        _ => HolderError::Nonsense,
    }
}

/// Whether something is to be read, or the end, within `wait`.
fn readable(fd: BorrowedFd<'_>, wait: Duration) -> bool {
    let Ok(wait) = Timespec::try_from(wait) else { return false };
    loop {
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}
