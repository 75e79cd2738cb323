//! A disk as what an NBD server serves.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmfork_image::PageIdx;

use crate::counters::Operation;
use crate::disk::Disk;
use vmfork_nbd::{Command, Export, Extent, FilePart, NbdError, Span, Target};

/// What "durable" means to a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// What was acknowledged survives QEMU and the daemon, but not the host. A VM's memory does not
    /// survive that either.
    #[default]
    Host,
    /// It survives a power cut: a flush waits for the medium.
    Medium,
}

/// A disk that a client may read and write.
#[derive(Debug)]
pub struct DiskExport {
    disk: Arc<Disk>,
    durability: Durability,
    read_only: bool,
    /// A file could not be sent: its error is found by a read, and told to the client.
    reads_only: AtomicBool,
    _held: Option<Arc<dyn Debug + Send + Sync>>,
}

impl DiskExport {
    pub fn new(disk: Arc<Disk>, durability: Durability) -> Self {
        let reads_only = AtomicBool::new(false);
        Self { disk, durability, read_only: false, reads_only, _held: None }
    }

    /// Clients may only read it.
    pub fn read_only(disk: Arc<Disk>) -> Self {
        Self { read_only: true, ..Self::new(disk, Durability::Host) }
    }

    /// Never sent from files: of a client that can't ask again for a file that fails.
    #[must_use]
    pub fn copied(self) -> Self {
        Self { reads_only: AtomicBool::new(true), ..self }
    }

    /// `guard` is dropped after the last request that was carried out, when none can come any more.
    #[must_use]
    pub fn holding(self, guard: Arc<dyn Debug + Send + Sync>) -> Self {
        Self { _held: Some(guard), ..self }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// As clients see it, by this name.
    pub fn described(&self, name: impl Into<String>) -> Export {
        let (size_bytes, read_only) = (self.disk.size_bytes(), self.read_only);
        let flushes = self.durability == Durability::Medium;
        let (name, description) = (name.into(), String::new());
        Export { name, description, size_bytes, read_only, flushes }
    }

    /// Counts an error. → what the client is told of it.
    fn failed(&self, error: &io::Error, offset_bytes: u64) -> NbdError {
        let told = told(error);
        let counters = self.disk.counters();
        counters.errors.add(1);
        if told == NbdError::NoSpace {
            counters.no_space.add(1);
            // A guest that meets a full host may try many times a second.
            tracing::debug!(offset_bytes, %error, "a disk has no space");
        } else {
            let error = chain(error);
            let page = PageIdx::of_byte(offset_bytes);
            tracing::warn!(%page, error, "a disk can't be read or written");
            self.disk.has_problem(format!("a request at page {page}: {error}"));
        }
        told
    }

    fn durable(&self, wanted: bool) -> io::Result<()> {
        match self.durability {
            Durability::Medium if wanted => self.disk.sync(),
            _ => Ok(()),
        }
    }
}

/// An error with all its causes.
fn chain(error: &io::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// What a client is told of an error.
fn told(error: &io::Error) -> NbdError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => NbdError::NoSpace,
        _ => NbdError::Io,
    }
}

impl Target for DiskExport {
    fn extents(&self, span: Span) -> Vec<Extent> {
        self.disk.extents(span)
    }

    fn reads(&self, span: Span) {
        self.disk.counters().reads.add(1);
        self.disk.counters().read_bytes.add(u64::from(span.len_bytes));
    }

    fn took(&self, command: &Command, took: Duration) {
        if let Some(operation) = Operation::of(command) {
            self.disk.counters().took(operation, took);
        }
    }

    fn is_quick(&self, command: &Command) -> bool {
        let waits_for_medium = self.durability == Durability::Medium;
        match *command {
            Command::Read { span, .. } => self.disk.is_here(span),
            Command::Write { span, durable } => {
                self.disk.is_here_for_write(span) && !(durable && waits_for_medium)
            }
            Command::WriteZeroes { span, durable, .. } => {
                self.disk.is_here_for_write(span) && !(durable && waits_for_medium)
            }
            Command::Trim { durable, .. } => !(durable && waits_for_medium),
            Command::Flush => !waits_for_medium,
            Command::BlockStatus { .. } | Command::Disconnect => true,
        }
    }

    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError> {
        self.disk.read(span, bytes).map_err(|error| self.failed(&error, span.offset_bytes))
    }

    fn files(&self, span: Span) -> Option<Vec<FilePart>> {
        if self.reads_only.load(Ordering::Relaxed) { None } else { self.disk.files(span) }
    }

    fn file_failed(&self, error: &io::Error) {
        self.reads_only.store(true, Ordering::Relaxed);
        tracing::warn!(%error, "a part of a disk can't be sent: it is read from now on");
    }

    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError> {
        let counters = self.disk.counters();
        let (done, offset_bytes) = match *command {
            Command::Write { span, durable } => {
                counters.writes.add(1);
                counters.written_bytes.add(u64::from(span.len_bytes));
                let done = self.disk.write(span, bytes).and_then(|()| self.durable(durable));
                (done, span.offset_bytes)
            }
            Command::WriteZeroes { span, durable, .. } | Command::Trim { span, durable } => {
                counters.trims.add(1);
                counters.trimmed_bytes.add(u64::from(span.len_bytes));
                let done = match command {
                    Command::Trim { .. } => self.disk.trim(span),
                    _ => self.disk.zero(span),
                };
                (done.and_then(|()| self.durable(durable)), span.offset_bytes)
            }
            Command::Flush => {
                counters.flushes.add(1);
                (self.durable(true), 0)
            }
            Command::Read { .. } | Command::BlockStatus { .. } | Command::Disconnect => {
                return Ok(());
            }
        };
        done.map_err(|error| self.failed(&error, offset_bytes))
    }
}
