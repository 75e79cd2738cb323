//! An export whose disk may come after its client.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use vmfork_nbd::{Command, Export, Extent, FilePart, NbdError, Span, Target};

use crate::export::DiskExport;

/// An export. Until its disk is there, each request fails.
#[derive(Debug)]
pub(crate) struct LateExport {
    /// What clients are told of it. Its name is a part of that where it is asked for.
    promised: Export,
    export: OnceLock<DiskExport>,
}

impl LateExport {
    /// Its disk comes later.
    pub(crate) fn waiting(promised: Export) -> Self {
        Self { promised, export: OnceLock::new() }
    }

    pub(crate) fn new(export: DiskExport) -> Self {
        Self { promised: export.described(""), export: OnceLock::from(export) }
    }

    /// → whether it had none, and this one is as clients were told.
    pub(crate) fn fill(&self, export: DiskExport) -> bool {
        let name = self.promised.name.as_str();
        export.described(name) == self.promised && self.export.set(export).is_ok()
    }

    /// Whether its disk has come.
    pub(crate) fn is_filled(&self) -> bool {
        self.export.get().is_some()
    }

    /// As clients see it, by this name.
    pub(crate) fn described(&self, name: &str) -> Export {
        match self.export.get() {
            Some(export) => export.described(name),
            None => Export { name: name.to_owned(), ..self.promised.clone() },
        }
    }

    /// The client that had it has come again.
    pub(crate) fn reconnected(&self) {
        if let Some(export) = self.export.get() {
            export.disk().counters().reconnects.add(1);
        }
    }

    fn get(&self) -> Result<&DiskExport, NbdError> {
        self.export.get().ok_or(NbdError::Io)
    }
}

impl Target for LateExport {
    fn extents(&self, span: Span) -> Vec<Extent> {
        let data = || Extent { len_bytes: span.len_bytes.into(), zero: false };
        self.get().map_or_else(|_| vec![data()], |export| export.extents(span))
    }

    fn reads(&self, span: Span) {
        if let Ok(export) = self.get() {
            export.reads(span);
        }
    }

    fn took(&self, command: &Command, took: Duration) {
        if let Ok(export) = self.get() {
            export.took(command, took);
        }
    }

    fn is_quick(&self, command: &Command) -> bool {
        self.get().map_or(true, |export| export.is_quick(command))
    }

    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError> {
        self.get()?.read(span, bytes)
    }

    fn files(&self, span: Span) -> Option<Vec<FilePart>> {
        self.get().ok()?.files(span)
    }

    fn file_failed(&self, error: &io::Error) {
        if let Ok(export) = self.get() {
            export.file_failed(error);
        }
    }

    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError> {
        self.get()?.change(command, bytes)
    }
}
