//! Writable disks, served as the daemon serves them: by an NBD server on threads of this process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use vmfork_disk::{
    Disk, DiskExport, DiskImage, DiskServer, DiskSet, DiskSpec, DiskStore, Durability, StoreOptions,
};
use vmfork_nbd::Span;
use vmfork_qemu::{DiskSlot, DriveContent, NbdSocket};

pub(crate) const SECTOR_BYTES: u64 = 512;
pub(crate) const PAGE_BYTES: u64 = 4096;
const SOCKET: &str = "disk";
const EXPORT: &str = "data";

/// A disk of a VM, in a folder where only its socket can be reached.
#[derive(Debug)]
pub(crate) struct TestDisk {
    pub(crate) disk: Arc<Disk>,
    store: Arc<Store>,
    folder: tempfile::TempDir,
}

/// Where layers are, and what they may hold in all.
#[derive(Debug)]
struct Store {
    store: DiskStore,
    set: Arc<DiskSet>,
    _folder: tempfile::TempDir,
}

impl TestDisk {
    /// Zeros, but for what it begins with.
    pub(crate) fn new(pages: u64, content: &[u8]) -> Self {
        Self::with_quota(None, pages, content)
    }

    /// Its layers, and those of disks beside it, may hold this many pages.
    pub(crate) fn with_quota(quota_pages: Option<u64>, pages: u64, content: &[u8]) -> Self {
        let folder = tempfile::tempdir().expect("temp dir");
        let options = StoreOptions { floor_bytes: 0 };
        let store = DiskStore::open(folder.path(), options).expect("room");
        let set = DiskSet::new(quota_pages.map(|pages| pages * PAGE_BYTES));
        let store = Arc::new(Store { store, set, _folder: folder });
        let all = Self::on(store, &DiskImage::blank(pages * PAGE_BYTES).expect("possible"));
        all.write(0, content);
        all
    }

    fn on(store: Arc<Store>, image: &DiskImage) -> Self {
        let folder = tempfile::tempdir().expect("temp dir");
        // QEMU's user may search it, and not list it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).expect("ours");
        let (name, vm, size_bytes) = (EXPORT.to_owned(), "test".to_owned(), image.size_bytes());
        let spec = DiskSpec { name, vm, size_bytes, set: Arc::clone(&store.set) };
        let disk = Arc::new(store.store.create(&spec, image).expect("room"));
        Self { disk, store, folder }
    }

    /// A disk beside it, of zeros.
    pub(crate) fn beside(&self) -> Self {
        let blank = DiskImage::blank(self.disk.size_bytes()).expect("possible");
        Self::on(Arc::clone(&self.store), &blank)
    }

    /// A disk with its content. Its VM stands still.
    pub(crate) fn fork(&self) -> Self {
        Self::on(Arc::clone(&self.store), &self.disk.freeze().expect("room"))
    }

    pub(crate) fn write(&self, offset_bytes: u64, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).expect("small");
        self.disk.write(Span { offset_bytes, len_bytes }, bytes).expect("room");
    }

    pub(crate) fn read(&self, offset_bytes: u64, len_bytes: u32) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len_bytes).expect("64 bits")];
        self.disk.read(Span { offset_bytes, len_bytes }, &mut bytes).expect("here");
        bytes
    }

    /// What its server tells QEMU.
    pub(crate) fn slot(&self) -> DiskSlot {
        DiskSlot { size_bytes: self.disk.size_bytes(), read_only: false, flushes: false }
    }

    /// What QEMU needs.
    pub(crate) fn content(&self) -> DriveContent {
        let folder = fs::File::open(self.folder.path()).expect("made");
        let slot = self.slot();
        DriveContent::Disk(NbdSocket::new(folder, SOCKET, EXPORT, slot).expect("possible"))
    }

    /// Only the owner may search its folder from now on.
    pub(crate) fn close_folder(&self) {
        let mode = fs::Permissions::from_mode(0o700);
        fs::set_permissions(self.folder.path(), mode).expect("ours");
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// Where a server would listen.
    pub(crate) fn listener(&self) -> UnixListener {
        let listener = UnixListener::bind(self.path()).expect("free");
        fs::set_permissions(self.path(), fs::Permissions::from_mode(0o666)).expect("ours");
        listener
    }

    /// Clients of QEMU's user get it.
    pub(crate) fn serve(&self) -> Server {
        let own = rustix::process::geteuid().as_raw();
        let uid = super::unprivileged().map_or(own, |user| user.uid);
        let server = DiskServer::start(self.listener(), uid).expect("threads left");
        assert!(server.add(EXPORT, DiskExport::new(Arc::clone(&self.disk), Durability::Host)));
        Server { server: Some(server), path: self.path() }
    }
}

/// Serves a disk while it lives. Then its connections are cut off, and its socket is removed.
#[derive(Debug)]
pub(crate) struct Server {
    server: Option<DiskServer>,
    path: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.server.take());
        let _removed = fs::remove_file(&self.path);
    }
}
