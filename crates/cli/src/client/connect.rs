//! A connection to the daemon, over a unix socket or TCP.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, sleep, timeout};

use crate::config::Endpoint;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a socket whose daemon has died is given to be served by the next one. A service manager
/// starts that after a second.
const SUCCESSOR_BOUND: Duration = Duration::from_secs(3);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// There is no socket, or no process listens on it.
    Absent(io::Error),
    Other(io::Error),
}

impl ConnectError {
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Absent(error) | Self::Other(error) => error,
        }
    }
}

/// The same, to find out whether a daemon is running. The socket of a daemon that died still takes
/// connections for a while, and the next daemon answers them. If none starts soon, none is running.
pub(crate) async fn find(endpoint: &Endpoint) -> Result<Stream, ConnectError> {
    find_within(endpoint, SUCCESSOR_BOUND).await
}

/// The same, without waiting for the next daemon.
pub(crate) async fn find_now(endpoint: &Endpoint) -> Result<Stream, ConnectError> {
    find_within(endpoint, Duration::ZERO).await
}

async fn find_within(endpoint: &Endpoint, bound: Duration) -> Result<Stream, ConnectError> {
    let deadline = Instant::now() + bound;
    loop {
        let stream = connect(endpoint).await?;
        if stream.is_served() {
            return Ok(stream);
        }
        if Instant::now() >= deadline {
            let text = "the daemon has died, and its socket waits for the next one";
            let error = io::Error::new(io::ErrorKind::ConnectionRefused, text);
            return Err(ConnectError::Absent(error));
        }
        sleep(POLL_INTERVAL).await;
    }
}

impl Stream {
    /// The process that listens on the other side, or did when it died.
    pub(crate) fn peer(&self) -> Option<Pid> {
        let Self::Unix(stream) = self else { return None };
        stream.peer_cred().ok()?.pid().and_then(Pid::from_raw)
    }

    /// Whether that process lives. Where the kernel does not tell, as across containers, it does.
    fn is_served(&self) -> bool {
        let Some(pid) = self.peer() else { return true };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => {
                // Readable from its end on, though its parent may not have taken note.
                let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
                poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&at_once)) != Ok(1)
            }
            Err(error) => error != rustix::io::Errno::SRCH,
        }
    }
}

pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Stream, ConnectError> {
    let connecting = async {
        match endpoint {
            Endpoint::Unix(path) => UnixStream::connect(path).await.map(Stream::Unix),
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    };
    match timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ConnectError::Absent(error)
            }
            _ => ConnectError::Other(error),
        }),
        Err(_) => Err(ConnectError::Other(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no connection within {} s", CONNECT_TIMEOUT.as_secs()),
        ))),
    }
}

/// A stream that can still be read when the other side has stopped reading.
///
/// A daemon that refuses an upload half way answers, and closes with the rest of the upload unread.
/// The next write then fails, and the answer, which says why, would be lost with it. Here it seems
/// to succeed instead; if there is no answer to read either, reading fails.
#[derive(Debug)]
pub(crate) struct Patient(pub(crate) Stream);

impl AsyncRead for Patient {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.get_mut().0).poll_write(cx, buf) {
            Poll::Ready(Err(error)) if is_closed(&error) => Poll::Ready(Ok(buf.len())),
            other => other,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.get_mut().0).poll_shutdown(cx) {
            Poll::Ready(Err(error)) if is_closed(&error) => Poll::Ready(Ok(())),
            other => other,
        }
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
