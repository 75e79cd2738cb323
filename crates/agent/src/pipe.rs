//! The two halves of a flow-controlled stream, as the agent holds them: [`Sink`] towards a program,
//! [`Window`] towards the daemon.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use vmfork_agent_proto::WINDOW_BYTES;

/// How much of a stream may still be sent to the daemon.
#[derive(Debug)]
pub(crate) struct Window(u32);

impl Window {
    pub(crate) fn full() -> Self {
        Self(WINDOW_BYTES)
    }

    /// At most this many bytes may be sent now.
    pub(crate) fn left(&self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }

    pub(crate) fn spend(&mut self, bytes: usize) {
        self.0 = self.0.saturating_sub(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// A daemon that credits more than it was sent gains nothing.
    pub(crate) fn credit(&mut self, bytes: u32) {
        self.0 = self.0.saturating_add(bytes).min(WINDOW_BYTES);
    }
}

/// The daemon sent more of a stream than it had credit for.
#[derive(Debug)]
pub(crate) struct Overrun;

/// Bytes on their way to a file descriptor that may not take them now, or ever.
#[derive(Debug)]
pub(crate) struct Sink {
    fd: Option<OwnedFd>,
    buffer: Vec<u8>,
    written: usize,
    /// Nothing more will come.
    ended: bool,
}

impl Sink {
    /// `fd` must be non-blocking. Without one, everything is dropped.
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self { fd, buffer: Vec::new(), written: 0, ended: false }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Whether to poll for room.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.fd.is_some() && self.written < self.buffer.len()
    }

    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// All is written and nothing more will come.
    pub(crate) fn is_finished(&self) -> bool {
        self.ended && (self.fd.is_none() || self.written == self.buffer.len())
    }

    pub(crate) fn close(&mut self) {
        self.fd = None;
        self.buffer = Vec::new();
        self.written = 0;
    }

    /// Take bytes of the stream. They count against the window until written.
    ///
    /// # Errors
    /// [`Overrun`]; nothing was taken.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), Overrun> {
        let waiting = self.buffer.len() - self.written;
        if waiting + bytes.len() > usize::try_from(WINDOW_BYTES).unwrap_or(usize::MAX) {
            return Err(Overrun);
        }
        if waiting == 0 {
            self.buffer.clear();
            self.written = 0;
        } else if self.written > self.buffer.len() / 2 {
            self.buffer.drain(..self.written);
            self.written = 0;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Write what fits; returns how many bytes are done with, and may be credited. A reader that
    /// has gone takes everything.
    pub(crate) fn write(&mut self) -> u32 {
        let mut done = 0;
        while let Some(waiting) = self.buffer.get(self.written..).filter(|bytes| !bytes.is_empty())
        {
            let Some(fd) = &self.fd else {
                done += waiting.len();
                self.written = self.buffer.len();
                break;
            };
            match rustix::io::write(fd, waiting) {
                Ok(n) => {
                    done += n;
                    self.written += n;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => self.fd = None,
            }
        }
        u32::try_from(done).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn a_reader_that_has_gone_still_gives_credit() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("pipe");
        drop(read);
        let mut sink = Sink::new(Some(write));
        sink.push(&[1; 1000]).expect("within the window");
        assert_eq!(sink.write(), 1000);
        sink.end();
        assert!(sink.is_finished());
    }

    #[test]
    fn a_full_pipe_keeps_at_most_a_window() {
        let (_read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("pipe");
        let mut sink = Sink::new(Some(write));
        let mut uncredited: usize = 0;
        while uncredited + 4096 <= WINDOW_BYTES as usize {
            sink.push(&[1; 4096]).expect("within the window");
            uncredited += 4096;
            uncredited -= sink.write() as usize;
        }
        assert!(sink.push(&[1; 4097]).is_err());
    }
}
