//! The sockets: who may connect, and that there is one daemon to a socket.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

use super::auth::Token;

/// Linux has room for 107 bytes; the socket is made in a folder beside its place first.
pub const SOCKET_PATH_BYTES_MAX: usize = 90;
/// A daemon that does not accept within this is taken for alive all the same.
const PROBE_WAIT: Duration = Duration::from_secs(1);

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
    pub(super) _file: SocketFile,
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
        Ok(Self { unix, tcp: None, _file: file })
    }

    /// Listen on TCP as well, for those who have the token.
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

    /// The port that was given, where 0 was asked for.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }
}

/// The socket's place in the file system, given up on drop, unless another socket is there by then.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.inode) {
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
        // A full backlog shows as a wait or as EAGAIN; somebody is there.
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

/// The socket comes to be in a folder that only we can enter, gets its owner and mode, and is then
/// moved to its place: at no moment may somebody connect who should not, and a stale socket is
/// replaced in one step.
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
        let inode = (metadata.dev(), metadata.ino());
        Ok((listener, SocketFile { path: path.to_owned(), inode }))
    })();
    let _ = fs::remove_dir_all(&made);
    result
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
