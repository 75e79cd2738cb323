//! Output that may block: no process reads the pipe, or Ctrl-S was typed.

use std::io;

use bytes::{Buf as _, Bytes};
use tokio::fs::File;
use tokio::io::AsyncWriteExt as _;

/// Bytes on their way to standard output or error.
#[derive(Debug)]
pub(super) struct Outflow {
    file: File,
    waiting: Bytes,
    /// What `file` has taken may not have been written yet.
    unflushed: bool,
}

impl Outflow {
    pub(super) fn new(file: File) -> Self {
        Self { file, waiting: Bytes::new(), unflushed: false }
    }

    /// More bytes. Only while nothing is under way: what waits would be lost.
    pub(super) fn push(&mut self, bytes: Bytes) {
        self.waiting = bytes;
        self.unflushed = true;
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.unflushed
    }

    /// Write what waits. Can be given up and asked for again.
    ///
    /// # Errors
    /// Those of write(2); what waits is dropped.
    pub(super) async fn drain(&mut self) -> io::Result<()> {
        let written = self.write().await;
        self.waiting.clear();
        self.unflushed = false;
        written
    }

    async fn write(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let taken = self.file.write(&self.waiting).await?;
            self.waiting.advance(taken);
        }
        self.file.flush().await
    }
}
