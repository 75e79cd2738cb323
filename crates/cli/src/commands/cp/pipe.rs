//! Joins the blocking world of archives to the async one of the session: a writer and a reader over
//! bounded channels. When one side is dropped, the other gets a broken pipe, or the end.

use std::io::{self, Read, Write};

use bytes::Bytes;
use tokio::sync::mpsc;

/// Chunks under way between the two.
pub(super) const QUEUE_LEN: usize = 8;

/// For a thread that may block.
#[derive(Debug)]
pub(super) struct ChannelWriter(pub(super) mpsc::Sender<Bytes>);

impl Write for ChannelWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .blocking_send(Bytes::copy_from_slice(bytes))
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// For a thread that may block.
#[derive(Debug)]
pub(super) struct ChannelReader {
    rx: mpsc::Receiver<Bytes>,
    rest: Bytes,
}

impl ChannelReader {
    pub(super) fn new(rx: mpsc::Receiver<Bytes>) -> Self {
        Self { rx, rest: Bytes::new() }
    }
}

impl Read for ChannelReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.rx.blocking_recv() {
                Some(chunk) => self.rest = chunk,
                None => return Ok(0),
            }
        }
        let len = buffer.len().min(self.rest.len());
        buffer[..len].copy_from_slice(&self.rest.split_to(len));
        Ok(len)
    }
}
