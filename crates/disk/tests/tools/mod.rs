//! A served disk, and the programs that others made to talk to it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use vmfork_disk::{
    Disk, DiskExport, DiskImage, DiskServer, DiskSet, DiskSpec, DiskStore, Durability, StoreOptions,
};

/// A store, and a server of its disks.
pub(crate) struct Served {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) server: DiskServer,
    pub(crate) store: DiskStore,
}

impl Served {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let options = StoreOptions { floor_bytes: 0 };
        let store = DiskStore::open(&folder.path().join("store"), options).expect("a store");
        let socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket"));
        let uid = rustix::process::geteuid().as_raw();
        let server = DiskServer::start(socket.expect("a socket"), uid).expect("a server");
        Self { folder, server, store }
    }

    /// A disk on an image, served by its name.
    pub(crate) fn add(&self, name: &str, on: &DiskImage, size_bytes: u64) -> Arc<Disk> {
        self.add_as(name, on, size_bytes, Durability::Host)
    }

    pub(crate) fn add_as(
        &self,
        name: &str,
        on: &DiskImage,
        size_bytes: u64,
        durability: Durability,
    ) -> Arc<Disk> {
        let (vm, set) = ("test".to_owned(), DiskSet::new(None));
        let spec = DiskSpec { name: name.to_owned(), vm, size_bytes, set };
        let disk = Arc::new(self.store.create(&spec, on).expect("a disk"));
        assert!(self.server.add(name, DiskExport::new(Arc::clone(&disk), durability)));
        disk
    }

    /// As QEMU's programs name it.
    pub(crate) fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.folder.path().join("socket").display())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Runs a program to its end. → what it said; `None`: it is not installed.
pub(crate) fn try_run(program: &str, args: &[&str]) -> Option<Output> {
    match Command::new(program).args(args).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!(
                "SKIPPED: {program} is not installed (apt-get install qemu-utils libnbd-bin)"
            );
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

/// The same, and it succeeds.
pub(crate) fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = try_run(program, args)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {text}{error}");
    Some(text + &error)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}
