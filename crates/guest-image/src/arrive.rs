//! An image that comes from another host, file by file. It is invisible until all of it arrived and
//! equals what the other host announced.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;

use crate::error::ArrivalError;
use crate::metadata::{FileInfo, INITRD_FILE, KERNEL_FILE, Metadata, ROOT_FILE, SCHEMA};
use crate::remedy::AtPath as _;
use crate::store::{Staging, Store};

/// Zeros of this length are left out of the file.
const HOLE_BYTES: usize = 64 << 10;

/// An image on its way into a store. Dropping it leaves nothing of it.
#[derive(Debug)]
pub struct Arrival {
    store: Store,
    staging: Staging,
    metadata: Metadata,
    missing: BTreeSet<String>,
}

/// One of its files.
#[derive(Debug)]
pub struct ArrivingFile {
    name: String,
    expected: FileInfo,
    path: PathBuf,
    file: File,
    hash: blake3::Hasher,
    bytes: u64,
}

impl Store {
    /// Begin to take in an image that is described so.
    ///
    /// # Errors
    /// The description is that of no image, or the folder cannot be written.
    pub fn arrive(&self, metadata: Metadata) -> Result<Arrival, ArrivalError> {
        check(&metadata).map_err(|why| ArrivalError::NoImage { why })?;
        // Where it comes from it may have been; here it is not yet.
        let metadata = Metadata { seeded: None, ..metadata };
        let staging = self.stage(&metadata.name)?;
        let missing = metadata.here().cloned().collect();
        Ok(Arrival { store: self.clone(), staging, metadata, missing })
    }
}

impl Arrival {
    /// The names of its files, each of which has to come.
    #[must_use]
    pub fn files(&self) -> Vec<String> {
        self.metadata.here().cloned().collect()
    }

    /// Begin with a file.
    ///
    /// # Errors
    /// The image has none of that name, or it cannot be written.
    pub fn begin(&self, name: &str) -> Result<ArrivingFile, ArrivalError> {
        let Some((name, expected)) = self.metadata.files.get_key_value(name) else {
            return Err(ArrivalError::NoImage { why: format!("it has no file `{name}`") });
        };
        let path = self.staging.path().join(name);
        let file = File::create(&path).map_err(ArrivalError::io("make", &path))?;
        Ok(ArrivingFile {
            name: name.clone(),
            expected: expected.clone(),
            path,
            file,
            hash: blake3::Hasher::new(),
            bytes: 0,
        })
    }

    /// A file has come.
    ///
    /// # Errors
    /// It is another one than was described.
    pub fn end(&mut self, file: ArrivingFile) -> Result<(), ArrivalError> {
        let name = file.end()?;
        self.missing.remove(&name);
        Ok(())
    }

    /// Let the image appear: under its own name or, if another image has that, with the beginning
    /// of its root disk's hash behind it. → what it is called here. An image that is there is never
    /// replaced.
    ///
    /// # Errors
    /// A file has not come; both names are taken; the folder cannot be written.
    pub fn commit(mut self) -> Result<String, ArrivalError> {
        if let Some(file) = self.missing.pop_first() {
            return Err(ArrivalError::Missing { file });
        }
        let names: Vec<_> = self.metadata.names().collect();
        for name in &names {
            self.metadata.name.clone_from(name);
            if self.store.commit_new(&self.staging, &self.metadata)? || self.is_there(name) {
                return Ok(name.clone());
            }
        }
        Err(ArrivalError::Names { names })
    }

    /// The same, in place of one of its name that has the same files: its root is here now.
    ///
    /// # Errors
    /// As [`Arrival::commit`]; the image of that name is another one.
    pub fn replace(mut self) -> Result<(), ArrivalError> {
        if let Some(file) = self.missing.pop_first() {
            return Err(ArrivalError::Missing { file });
        }
        match self.store.commit_over(&self.staging, &self.metadata)? {
            true => Ok(()),
            false => Err(ArrivalError::Names { names: vec![self.metadata.name] }),
        }
    }

    /// Whether the image that has its name now is the same: someone else was faster.
    fn is_there(&self, name: &str) -> bool {
        let there = self.store.open(name);
        there.is_ok_and(|there| {
            let has_root = there.metadata.root_stored.is_none();
            there.metadata.files == self.metadata.files
                && there.metadata.root_object == self.metadata.root_object
                && (has_root || self.metadata.root_stored.is_some())
        })
    }
}

impl ArrivingFile {
    /// How many bytes are to come.
    #[must_use]
    pub fn expected_bytes(&self) -> u64 {
        self.expected.size_bytes
    }

    /// Take the next bytes.
    ///
    /// # Errors
    /// They are more than there should be, or cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArrivalError> {
        self.bytes += bytes.len() as u64;
        if self.bytes > self.expected.size_bytes {
            return Err(self.of_another_size());
        }
        self.hash.update(bytes);
        self.store(bytes).map_err(ArrivalError::io("write", &self.path))
    }

    fn store(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(HOLE_BYTES) {
            if piece.iter().all(|byte| *byte == 0) {
                self.file.seek(SeekFrom::Current(piece.len().try_into().unwrap_or(0)))?;
            } else {
                self.file.write_all(piece)?;
            }
        }
        Ok(())
    }

    fn end(self) -> Result<String, ArrivalError> {
        if self.bytes != self.expected.size_bytes {
            return Err(self.of_another_size());
        }
        let found = self.hash.finalize().to_hex().to_string();
        if found != self.expected.blake3 {
            let wanted = self.expected.blake3;
            return Err(ArrivalError::Hash { file: self.name, wanted, found });
        }
        self.file.set_len(self.bytes).map_err(ArrivalError::io("write", &self.path))?;
        Ok(self.name)
    }

    fn of_another_size(&self) -> ArrivalError {
        let (file, wanted) = (self.name.clone(), self.expected.size_bytes);
        ArrivalError::Size { file, wanted, found: self.bytes }
    }
}

/// Whether it describes an image of this version. What is wrong else.
fn check(metadata: &Metadata) -> Result<(), String> {
    if metadata.schema != SCHEMA {
        return Err(format!("its layout is {}, not {SCHEMA}", metadata.schema));
    }
    if !vmfork_api::name_is_valid(&metadata.name) {
        return Err(format!("`{}` is not a valid image name", metadata.name));
    }
    for (name, info) in &metadata.files {
        if ![KERNEL_FILE, INITRD_FILE, ROOT_FILE].contains(&name.as_str()) {
            return Err(format!("an image has no file `{name}`"));
        }
        if blake3::Hash::from_hex(&info.blake3).is_err() {
            return Err(format!("`{}` is not a hash", info.blake3));
        }
    }
    if !metadata.boots() {
        return Err("it has no kernel".to_owned());
    }
    Ok(())
}

#[cfg(test)]
#[path = "arrive_tests.rs"]
mod tests;
