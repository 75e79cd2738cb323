//! What is written down of a volume: `NAME.json`, whole or not at all, and durable.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmfork_api::{Labels, OnFork, name_is_valid};
use vmfork_image::ImageId;

/// Records of other versions are reported, and left as they are.
const VERSION: u32 = 1;
/// Longest record that is read: labels have a bound, too.
const BYTES_MAX: u64 = 64 << 10;
const SUFFIX: &str = ".json";
/// Of a record that is being written.
const UNFINISHED: &str = ".new-";

/// A volume's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u32,
    pub(super) name: String,
    pub(super) disk_id: String,
    /// When it was made.
    pub(super) size_bytes: u64,
    pub(super) on_fork: OnFork,
    pub(super) created_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub(super) labels: Labels,
}

impl Record {
    pub(super) fn new(name: String, disk_id: ImageId, size_bytes: u64) -> Self {
        Self {
            version: VERSION,
            name,
            disk_id: disk_id.to_string(),
            size_bytes,
            on_fork: OnFork::default(),
            created_unix_ms: 0,
            labels: Labels::default(),
        }
    }

    pub(super) fn disk_id(&self) -> Option<ImageId> {
        self.disk_id.parse().ok()
    }
}

/// A record that can't be read, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadRecord {
    pub(super) path: PathBuf,
    pub(super) reason: String,
}

/// All records of a folder. Removes those that were half-written.
///
/// # Errors
/// The folder can't be read.
pub(super) fn read_all(folder: &Path) -> io::Result<(Vec<Record>, Vec<BadRecord>)> {
    let (mut records, mut bad) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str() else { continue };
        if name.starts_with(UNFINISHED) {
            fs::remove_file(&path)?;
        } else if let Some(stem) = name.strip_suffix(SUFFIX) {
            match read(&path, stem) {
                Ok(record) => records.push(record),
                Err(reason) => bad.push(BadRecord { path, reason }),
            }
        }
    }
    Ok((records, bad))
}

fn read(path: &Path, stem: &str) -> Result<Record, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    let record: Record = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if record.version != VERSION {
        return Err(format!("it is of version {}, not {VERSION}", record.version));
    }
    if record.name != stem || !name_is_valid(stem) || record.disk_id().is_none() {
        return Err("its name or its disk's ID is not right".to_owned());
    }
    Ok(record)
}

/// Survives the host when this returns.
///
/// # Errors
/// The medium's, or it is full. The earlier record stands.
pub(super) fn write(folder: &Path, record: &Record) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(record)?;
    text.push(b'\n');
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(folder)?;
    file.write_all(&text)?;
    file.as_file().sync_all()?;
    file.persist(path(folder, &record.name)).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()
}

/// Gone for good when this returns.
///
/// # Errors
/// The medium's.
pub(super) fn remove(folder: &Path, name: &str) -> io::Result<()> {
    fs::remove_file(path(folder, name))?;
    File::open(folder)?.sync_all()
}

fn path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}{SUFFIX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written_and_others_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let id = ImageId::new(0xab).expect("not 0");
        let mut record = Record::new("db".to_owned(), id, 1 << 30);
        record.labels = Labels::parse(["team=a"]).expect("a label");
        write(folder, &record).expect("room");
        record.on_fork = OnFork::ReadOnly;
        write(folder, &record).expect("written again");
        fs::write(folder.join(".new-x"), "{").expect("half-written");
        fs::write(folder.join("notes.txt"), "of someone").expect("written");
        assert_eq!(read_all(folder).expect("read"), (vec![record.clone()], Vec::new()));
        assert!(!folder.join(".new-x").exists() && folder.join("notes.txt").exists());
        fs::copy(folder.join("db.json"), folder.join("other.json")).expect("copied");
        let text = fs::read_to_string(folder.join("db.json")).expect("text");
        fs::write(folder.join("db.json"), text.replace("\"version\": 1", "\"version\": 2"))
            .expect("written");
        let (records, mut bad) = read_all(folder).expect("read");
        bad.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(records, []);
        let reasons: Vec<_> = bad.iter().map(|bad| bad.reason.as_str()).collect();
        assert!(reasons[0].contains("version 2") && reasons[1].contains("its name"), "{reasons:?}");
        remove(folder, "db").expect("removed");
        assert!(remove(folder, "db").is_err());
    }
}
