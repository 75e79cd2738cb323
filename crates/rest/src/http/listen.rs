//! The sockets: who may connect, and that there is one daemon to a socket.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

use super::auth::Token;

/// Linux has room for 107 bytes; the socket is made in a folder beside its place first.
pub const SOCKET_PATH_BYTES_MAX: usize = 90;
/// A daemon that does not accept within this is taken for alive all the same.
const PROBE_WAIT: Duration = Duration::from_secs(1);
/// Of a socket that is taken over; what the library gives new ones.
const BACKLOG: i32 = 1024;

/// Device and inode of a socket's file.
pub type FileId = (u64, u64);

/// Owner and mode of the unix socket: 0660 root:root, but for the group.
#[derive(Debug, Clone, Copy, Default)]
pub struct SocketOwner {
    pub gid: Option<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("another vmforkd answers on {path}")]
    InUse { path: PathBuf },
    #[error("{path} is in the way: it is no socket")]
    NoSocket { path: PathBuf },
    #[error("make the socket {path}")]
    Unix {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("listen on {address}")]
    Tcp {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// Where requests come in.
#[derive(Debug)]
pub struct Listeners {
    pub(super) unix: UnixListener,
    pub(super) tcp: Option<(TcpListener, Token)>,
    pub(super) file: SocketFile,
}

impl Listeners {
    /// Make the unix socket at `path`. One that a dead daemon left is replaced.
    ///
    /// # Errors
    /// If a daemon answers there, something else is there, or the kernel refuses.
    pub async fn unix(path: &Path, owner: SocketOwner) -> Result<Self, ListenError> {
        make_room(path).await?;
        let (unix, file) = bind(path, owner)
            .map_err(|source| ListenError::Unix { path: path.to_owned(), source })?;
        Ok(Self { unix, tcp: None, file })
    }

    /// Serve a unix socket that is listened on already and whose file at `path` is `file`. `None`:
    /// it is not that file any more, so that no client would come here.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn taken_over(
        socket: OwnedFd,
        path: &Path,
        file: FileId,
        owner: SocketOwner,
    ) -> Result<Option<Self>, ListenError> {
        let failed = |source| ListenError::Unix { path: path.to_owned(), source };
        let is_there = fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == file);
        if !is_there || !sockopt::socket_acceptconn(&socket).unwrap_or(false) {
            return Ok(None);
        }
        let gid = owner.gid.unwrap_or_else(|| rustix::process::getegid().as_raw());
        chown(path, None, Some(gid)).map_err(failed)?;
        fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(failed)?;
        let unix = listen_again(socket)
            .and_then(|socket| UnixListener::from_std(socket.into()))
            .map_err(failed)?;
        let file = SocketFile { path: path.to_owned(), file, leave: Arc::default() };
        Ok(Some(Self { unix, tcp: None, file }))
    }

    /// Listen on TCP as well, for clients that have the token.
    ///
    /// # Errors
    /// If the kernel refuses, as when the port is taken.
    pub async fn and_tcp(mut self, address: SocketAddr, token: Token) -> Result<Self, ListenError> {
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| ListenError::Tcp { address, source })?;
        self.tcp = Some((listener, token));
        Ok(self)
    }

    /// The same with a socket that is listened on already.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn and_tcp_taken_over(
        mut self,
        socket: OwnedFd,
        address: SocketAddr,
        token: Token,
    ) -> Result<Self, ListenError> {
        let listener = listen_again(socket)
            .and_then(|socket| TcpListener::from_std(socket.into()))
            .map_err(|source| ListenError::Tcp { address, source })?;
        self.tcp = Some((listener, token));
        Ok(self)
    }

    pub fn unix_fd(&self) -> BorrowedFd<'_> {
        self.unix.as_fd()
    }

    pub fn tcp_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tcp.as_ref().map(|(listener, _)| listener.as_fd())
    }

    /// The unix socket's file.
    pub fn file_id(&self) -> FileId {
        self.file.file
    }

    /// While it is true, the unix socket's file stays when the socket is closed here: another
    /// process has the socket, too.
    pub fn leave_file(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.file.leave)
    }

    /// The port that was given, where 0 was asked for.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }
}

/// The socket's place in the file system, given up on drop, unless another socket is there by then.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    file: FileId,
    leave: Arc<AtomicBool>,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.leave.load(Relaxed) {
            return;
        }
        if fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Nothing may answer at `path`, and nothing but a socket may be there.
async fn make_room(path: &Path) -> Result<(), ListenError> {
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(ListenError::Unix { path: path.to_owned(), source }),
    };
    if !there.file_type().is_socket() {
        return Err(ListenError::NoSocket { path: path.to_owned() });
    }
    match timeout(PROBE_WAIT, UnixStream::connect(path)).await {
        // A full backlog shows as a wait or as EAGAIN: a daemon is there.
        Err(_) | Ok(Ok(_)) => Err(ListenError::InUse { path: path.to_owned() }),
        Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => {
            Err(ListenError::InUse { path: path.to_owned() })
        }
        Ok(Err(error))
            if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            Ok(())
        }
        Ok(Err(source)) => Err(ListenError::Unix { path: path.to_owned(), source }),
    }
}

/// Makes the socket in a closed folder, sets its owner and mode, and then moves it to its place. So
/// at no moment can an unauthorized client connect, and a stale socket is replaced in one step.
fn bind(path: &Path, owner: SocketOwner) -> io::Result<(UnixListener, SocketFile)> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let made = folder.join(format!(".{}", std::process::id()));
    let _left_by_a_namesake = fs::remove_dir_all(&made);
    fs::create_dir(&made)?;
    let result = (|| {
        fs::set_permissions(&made, Permissions::from_mode(0o700))?;
        let socket = made.join("s");
        let listener = UnixListener::bind(&socket)?;
        if let Some(gid) = owner.gid {
            chown(&socket, None, Some(gid))?;
        }
        fs::set_permissions(&socket, Permissions::from_mode(0o660))?;
        let metadata = fs::symlink_metadata(&socket)?;
        fs::rename(&socket, path)?;
        let file = (metadata.dev(), metadata.ino());
        Ok((listener, SocketFile { path: path.to_owned(), file, leave: Arc::default() }))
    })();
    let _ = fs::remove_dir_all(&made);
    result
}

/// Listening again has the kernel name us, and not an ended daemon, to clients that connect from
/// now on (SO_PEERCRED).
fn listen_again(socket: OwnedFd) -> io::Result<OwnedFd> {
    rustix::net::listen(&socket, BACKLOG)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// A stream of events ends when its client has acknowledged nothing for this long. Keep-alive sends
/// no probes while data is unacknowledged, and the kernel's own bound is 15 minutes.
const UNHEARD_MAX: Duration = Duration::from_secs(60);

/// The socket of a TCP connection, beside its stream. The connection owns both, and ends both.
#[derive(Debug, Clone)]
pub(super) struct Socket(Arc<OwnedFd>);

impl Socket {
    /// `None`: the host is out of fds.
    pub(super) fn of(stream: &TcpStream) -> Option<Self> {
        stream.as_fd().try_clone_to_owned().map(|fd| Self(Arc::new(fd))).ok()
    }

    /// Until the result is dropped, the connection breaks if its client has acknowledged nothing
    /// for [`UNHEARD_MAX`]. This includes a client that does not read: only for clients that
    /// connect again.
    pub(super) fn watch(self) -> Watched {
        self.set(UNHEARD_MAX);
        Watched(self)
    }

    fn set(&self, bound: Duration) {
        let ms = u32::try_from(bound.as_millis()).unwrap_or(u32::MAX);
        if let Err(error) = sockopt::set_tcp_user_timeout(&self.0, ms) {
            tracing::debug!("bound the silence of a connection: {error}");
        }
    }
}

/// While it lives, a client that vanished is found out soon.
#[derive(Debug)]
pub(super) struct Watched(Socket);

impl Drop for Watched {
    fn drop(&mut self) {
        // The kernel's own.
        self.0.set(Duration::ZERO);
    }
}

/// Find out within about a minute that a client's machine is gone. A client that merely does not
/// read is not gone: its kernel answers for it.
pub fn keep_alive(stream: &TcpStream) {
    let set = || {
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
        sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
        sockopt::set_tcp_keepcnt(stream, 3)?;
        sockopt::set_tcp_nodelay(stream, true)
    };
    if let Err(error) = set() {
        tracing::debug!("set keep-alive on a connection: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_silence_of_a_client_is_bounded_while_it_is_watched() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let client = TcpStream::connect(listener.local_addr().expect("bound"));
        let (client, accepted) = tokio::join!(client, listener.accept());
        let (_client, (stream, _)) = (client.expect("connected"), accepted.expect("accepted"));
        let bound = || sockopt::tcp_user_timeout(&stream).expect("told");
        let watched = Socket::of(&stream).expect("an fd").watch();
        assert_eq!(bound(), 60_000);
        drop(watched);
        assert_eq!(bound(), 0);
    }
}
