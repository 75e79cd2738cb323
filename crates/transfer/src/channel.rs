//! One TLS connection, blocking, with a time limit on whatever is going on.
//!
//! rustls takes 4 KiB at most from its reader at a time. A buffer of several records below it makes
//! one system call of what has come. All that is sent together goes out in one write.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustls::Connection;

/// What one read of the socket may bring: an answer of 16 pages, with TLS's own.
const READ_BYTES: usize = 72 << 10;
/// What is encrypted before it is written: 16 records, which go out in one system call.
const WRITE_BYTES: usize = 256 << 10;

/// A socket whose reads and writes end at a deadline.
///
/// Setting a socket's timeout is a system call. It is left as it is where it would end a wait too
/// early (the wait continues) or at most a quarter too late.
#[derive(Debug)]
struct Socket {
    tcp: TcpStream,
    deadline: Instant,
    read_timeout: Duration,
    write_timeout: Duration,
}

impl Socket {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::Error::new(ErrorKind::TimedOut, "the time for it is over")),
            false => Ok(left),
        }
    }

    /// Do something until it is done, fails, or the deadline has passed. `set` sets its time-out.
    fn until_deadline(
        &mut self,
        timeout: fn(&mut Self) -> &mut Duration,
        set: fn(&TcpStream, Duration) -> io::Result<()>,
        mut once: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut is_too_short = false;
        loop {
            let left = self.left()?;
            if is_too_short || *timeout(self) > left + left / 4 {
                set(&self.tcp, left)?;
                *timeout(self) = left;
            }
            match once(&mut self.tcp) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => is_too_short = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.until_deadline(
            |socket| &mut socket.read_timeout,
            |tcp, timeout| tcp.set_read_timeout(Some(timeout)),
            |tcp| tcp.read(bytes),
        )
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.until_deadline(
            |socket| &mut socket.write_timeout,
            |tcp, timeout| tcp.set_write_timeout(Some(timeout)),
            |tcp| tcp.write_vectored(bytes),
        )
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The socket, read through a buffer.
#[derive(Debug)]
struct Buffered(BufReader<Socket>);

impl Read for Buffered {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Buffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TLS connection.
#[derive(Debug)]
pub(crate) struct Channel {
    tls: Connection,
    socket: Buffered,
    /// Bytes that have come, and been decrypted.
    here: usize,
    /// Bytes that are to be sent with what follows.
    put: usize,
}

impl Channel {
    /// Shake hands on a socket.
    ///
    /// # Errors
    /// The other side is not the expected host, does not speak TLS, or took too long.
    pub(crate) fn open(tls: Connection, tcp: TcpStream, timeout: Duration) -> io::Result<Self> {
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(timeout))?;
        tcp.set_write_timeout(Some(timeout))?;
        let deadline = Instant::now() + timeout;
        let socket = Socket { tcp, deadline, read_timeout: timeout, write_timeout: timeout };
        let socket = Buffered(BufReader::with_capacity(READ_BYTES, socket));
        let mut channel = Self { tls, socket, here: 0, put: 0 };
        // What is written at a time is bounded by `send`.
        channel.tls.set_buffer_limit(None);
        while channel.tls.is_handshaking() {
            channel.tls.complete_io(&mut channel.socket)?;
        }
        channel.flush()?;
        Ok(channel)
    }

    /// The other side's certificate.
    pub(crate) fn certificate(&self) -> Option<&[u8]> {
        Some(self.tls.peer_certificates()?.first()?)
    }

    /// Whatever follows has to be done within `timeout`.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.socket.0.get_mut().deadline = Instant::now() + timeout;
    }

    /// Whether this many bytes can be read without waiting.
    pub(crate) fn has(&self, bytes: usize) -> bool {
        self.here >= bytes
    }

    /// How much waits for [`Channel::flush`].
    pub(crate) fn unsent(&self) -> usize {
        self.put
    }

    /// Send `parts`, one after the other.
    ///
    /// # Errors
    /// The connection has ended, or the other side takes too long to take it.
    pub(crate) fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.put(parts)?;
        self.flush()
    }

    /// The same, but they may be sent later, with what follows or by [`Channel::flush`].
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub(crate) fn put(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let mut room = WRITE_BYTES;
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(parts.len());
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(room));
                slices.push(IoSlice::new(now));
                (rest, room) = (later, room - now.len());
                if room == 0 {
                    self.encrypt(&mut slices)?;
                    self.flush()?;
                    room = WRITE_BYTES;
                }
            }
        }
        self.encrypt(&mut slices)
    }

    fn encrypt(&mut self, slices: &mut Vec<IoSlice<'_>>) -> io::Result<()> {
        let mut rest = slices.as_mut_slice();
        while !rest.is_empty() {
            let taken = self.tls.writer().write_vectored(rest)?;
            self.put += taken;
            IoSlice::advance_slices(&mut rest, taken);
        }
        slices.clear();
        Ok(())
    }

    /// Send what is put there.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.put = 0;
        while self.tls.wants_write() {
            if self.tls.write_tls(&mut self.socket)? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    /// Read as many bytes as have come, at least one; 0 if the other side has closed the connection
    /// properly.
    ///
    /// # Errors
    /// The connection has ended, what came is not from the other side, or nothing came in time.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => {
                    self.here = self.here.saturating_sub(*done.as_ref().unwrap_or(&0));
                    return done;
                }
            }
            self.tls.read_tls(&mut self.socket)?;
            match self.tls.process_new_packets() {
                Ok(state) => self.here = state.plaintext_bytes_to_read(),
                Err(error) => {
                    // The alert that says so; the error is this one in any case.
                    let _ = self.flush();
                    return Err(io::Error::new(ErrorKind::InvalidData, error));
                }
            }
            self.flush()?;
        }
    }

    /// # Errors
    /// As [`Channel::read`], or the other side closed the connection before all had come.
    pub(crate) fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.read(rest)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => rest = &mut rest[read..],
            }
        }
        Ok(())
    }

    /// Say goodbye, so that the other side can tell it from a cable that was cut. Does not wait.
    pub(crate) fn close(mut self) {
        self.tls.send_close_notify();
        let _gone_anyway = self.socket.0.get_ref().tcp.set_nonblocking(true);
        let _gone_anyway = self.tls.write_tls(&mut NoWait(&self.socket.0.get_ref().tcp));
        let _gone_anyway = self.socket.0.get_ref().tcp.shutdown(Shutdown::Both);
    }
}

/// A socket that does not block.
struct NoWait<'a>(&'a TcpStream);

impl Write for NoWait<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
