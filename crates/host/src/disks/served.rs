//! The disks of one QEMU, and the socket that it reads them from.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use vmfork_api::{Durability, OnFork};
use vmfork_disk::layer::LayerError;
use vmfork_disk::{Disk, DiskCounts, DiskExport, DiskServer, DiskSet, DiskStore};
use vmfork_image::ImageId;
use vmfork_nbd::Export;
use vmfork_qemu::{DiskSlot, LateFd, NbdSocket, NbdSocketError};

use super::{DiskContent, DiskError, DiskSpec, OfVolume, VolumeLease, grow};
use crate::state::DISK_SOCKET;

/// How long a disk that was detached may take to carry out its last request.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long ago a request may have failed that a VM is stalled by. A stalled VM tries again after
/// 10 s at most.
const PROBLEM_FRESH: Duration = Duration::from_secs(15);

/// Disks that one QEMU has. Dropping it ends their service, on a thread that may block; their files
/// go with the last VM that needs them. Volumes are given back.
#[derive(Debug)]
pub struct MachineDisks {
    /// In the order of the drives. One may take another's place: see [`MachineDisks::offer`].
    disks: Mutex<Vec<Served>>,
    /// Of which QEMU does not say whether it uses them.
    undecided: Mutex<Vec<Served>>,
    /// How often that was tried.
    offers: AtomicU64,
    /// Until this is dropped.
    server: Option<DiskServer>,
    socket: Option<Socket>,
    folder: OwnedFd,
}

/// A disk that a machine has.
#[derive(Debug)]
pub(super) struct Served {
    spec: DiskSpec,
    disk: Arc<Disk>,
    set: Arc<DiskSet>,
    on_clients_file: bool,
    /// Of a volume.
    lease: Option<Arc<VolumeLease>>,
    /// What its server calls it.
    export: String,
    /// Of one that took another's place.
    late: Option<LateFd>,
    /// What it had done before its machine had it: a volume may have served others.
    before: DiskCounts,
}

impl Served {
    /// A disk of the machine's own. `vm` is for the notes on its files.
    pub(super) fn create(
        content: &DiskContent,
        vm: &str,
        store: &DiskStore,
    ) -> Result<Self, DiskError> {
        let DiskContent { spec, image, set, on_clients_file, .. } = content;
        let (name, vm, set) = (spec.name.clone(), vm.to_owned(), Arc::clone(set));
        let new = vmfork_disk::DiskSpec { name, vm, size_bytes: spec.size_bytes, set };
        let disk = store.create(&new, image).map_err(DiskError::Layer)?;
        let (spec, on_clients_file) = (spec.clone(), *on_clients_file);
        let (disk, export, before) = (Arc::new(disk), spec.name.clone(), DiskCounts::default());
        let (set, lease, late) = (new.set, None, None);
        Ok(Self { spec, disk, set, on_clients_file, lease, export, late, before })
    }

    /// A volume.
    pub(super) fn volume(content: &DiskContent, lease: VolumeLease) -> Self {
        // It may have grown since it was asked for.
        let size_bytes = lease.disk().size_bytes();
        Self {
            spec: DiskSpec { size_bytes, ..content.spec.clone() },
            before: lease.disk().counts(),
            disk: Arc::clone(lease.disk()),
            set: Arc::clone(&content.set),
            on_clients_file: false,
            lease: Some(Arc::new(lease)),
            export: content.spec.name.clone(),
            late: None,
        }
    }

    fn socket(&self, folder: &OwnedFd) -> Result<NbdSocket, NbdSocketError> {
        NbdSocket::new(folder, DISK_SOCKET, self.export.as_str(), self.spec.slot())
    }

    /// The same disk, for another connection.
    fn again(&self) -> Self {
        Self {
            spec: self.spec.clone(),
            disk: Arc::clone(&self.disk),
            set: Arc::clone(&self.set),
            on_clients_file: self.on_clients_file,
            lease: self.lease.clone(),
            export: String::new(),
            late: None,
            before: self.before,
        }
    }

    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    fn volume_name(&self) -> Option<&str> {
        self.spec.volume.as_ref().map(|volume| volume.name.as_str())
    }

    pub(super) fn export(&self) -> DiskExport {
        let disk = Arc::clone(&self.disk);
        let export = match (self.spec.is_shared(), self.spec.durability) {
            (true, _) => DiskExport::read_only(disk),
            (false, Durability::Host) => DiskExport::new(disk, vmfork_disk::Durability::Host),
            (false, Durability::Medium) => DiskExport::new(disk, vmfork_disk::Durability::Medium),
        };
        match &self.lease {
            // A request that takes long may go on after the server has ended.
            Some(lease) => export.holding(Arc::<VolumeLease>::clone(lease)),
            None => export,
        }
    }

    /// What it holds, while the vCPUs stand still, as clones get it.
    fn freeze(&self) -> Result<DiskContent, LayerError> {
        let (spec, set) = (self.spec.clone(), Arc::clone(&self.set));
        if spec.is_shared() {
            let (image, lease) = (self.disk.image(), self.lease.clone());
            return Ok(DiskContent { spec, image, set, on_clients_file: false, lease });
        }
        let (image, on_clients_file) = (self.disk.freeze()?, self.on_clients_file);
        let spec = self.clones_spec(image.size_bytes());
        Ok(DiskContent { spec, image, set, on_clients_file, lease: None })
    }

    /// What clones have of it: their disks are their own, unless they share it.
    fn clones_spec(&self, size_bytes: u64) -> DiskSpec {
        match self.spec.is_shared() {
            true => self.spec.clone(),
            false => DiskSpec {
                volume: None,
                durability: Durability::Host,
                size_bytes,
                ..self.spec.clone()
            },
        }
    }
}

impl MachineDisks {
    pub(super) fn start(disks: Vec<Served>, uid: u32, folder: &Path) -> Result<Self, DiskError> {
        let (socket, folder, listener) = Socket::make(folder, uid).map_err(DiskError::Serve)?;
        let exports = disks.iter().map(|served| (served.export.clone(), served.export()));
        let server = DiskServer::start_with(listener, uid, exports).map_err(DiskError::Serve)?;
        Ok(Self::of(disks, server, socket, folder))
    }

    /// Of a QEMU that waits: it may connect, and what its disks hold comes later. → also where it
    /// finds each, in the order of its drives.
    pub(super) fn wait(
        slots: impl IntoIterator<Item = DiskSlot>,
        uid: u32,
        folder: &Path,
    ) -> Result<(Self, Vec<NbdSocket>), DiskError> {
        let (socket, folder, listener) = Socket::make(folder, uid).map_err(DiskError::Serve)?;
        let (mut sockets, mut promised) = (Vec::new(), Vec::new());
        for (index, slot) in slots.into_iter().enumerate() {
            let (name, description) = (late_name(index), String::new());
            let socket = NbdSocket::new(&folder, DISK_SOCKET, name.as_str(), slot);
            sockets.push(socket.map_err(|error| match error {
                NbdSocketError::Folder(source) => DiskError::Serve(source),
                error => DiskError::Serve(io::Error::other(error)),
            })?);
            let DiskSlot { size_bytes, read_only, flushes } = slot;
            promised.push(Export { name, description, size_bytes, read_only, flushes });
        }
        let server =
            DiskServer::start_waiting(listener, uid, promised).map_err(DiskError::Serve)?;
        let waiting = Self::of(Vec::new(), server, socket, folder);
        Ok((waiting, sockets))
    }

    /// What those of a QEMU that waited hold. → whether they are as it was told.
    pub(super) fn fill(&self, disks: Vec<Served>) -> bool {
        let Some(server) = &self.server else { return false };
        let named = disks.into_iter().enumerate();
        let named = named.map(|(index, served)| Served { export: late_name(index), ..served });
        let disks: Vec<Served> = named.collect();
        let filled = disks.iter().all(|served| server.fill(&served.export, served.export()));
        *self.disks() = disks;
        filled && server.is_filled()
    }

    fn of(disks: Vec<Served>, server: DiskServer, socket: Socket, folder: OwnedFd) -> Self {
        let (disks, undecided, offers) = (Mutex::new(disks), Mutex::default(), AtomicU64::new(0));
        let (server, socket) = (Some(server), Some(socket));
        Self { disks, undecided, offers, server, socket, folder }
    }

    fn disks(&self) -> MutexGuard<'_, Vec<Served>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn all(&self) -> Vec<Arc<Disk>> {
        self.disks().iter().map(|served| Arc::clone(&served.disk)).collect()
    }

    /// Where QEMU finds each, in the order of its drives.
    ///
    /// # Errors
    /// No fd is left.
    pub fn sockets(&self) -> Result<Vec<NbdSocket>, NbdSocketError> {
        self.disks().iter().map(|served| served.socket(&self.folder)).collect()
    }

    /// What was acknowledged is on the medium, for those disks that promise it. Blocking, for as
    /// long as the medium takes: to be done before a pause, so that little is left for it.
    ///
    /// # Errors
    /// The medium's.
    pub fn sync(&self) -> io::Result<()> {
        let durable = |served: &&Served| served.spec.durability == Durability::Medium;
        let disks = self.disks();
        let durable = disks.iter().filter(durable).map(|served| Arc::clone(&served.disk));
        let durable: Vec<Arc<Disk>> = durable.collect();
        drop(disks);
        durable.iter().try_for_each(|disk| disk.sync())
    }

    /// What all hold now, while the vCPUs stand still. Takes microseconds: makes no file.
    ///
    /// # Errors
    /// A disk has no layer to go on with.
    pub fn freeze(&self) -> Result<Vec<DiskContent>, LayerError> {
        self.disks().iter().map(Served::freeze).collect()
    }

    /// What QEMU is told of each.
    pub fn slots(&self) -> Vec<DiskSlot> {
        self.disks().iter().map(|served| served.spec.slot()).collect()
    }

    /// What QEMUs of clones are told of each, as they are now.
    pub fn clones_slots(&self) -> Vec<DiskSlot> {
        let slot = |served: &Served| served.clones_spec(served.disk.size_bytes()).slot();
        self.disks().iter().map(slot).collect()
    }

    /// A volume that keeps its VM from being forked: the disk's name, and the volume's.
    pub fn unforkable(&self) -> Option<(String, String)> {
        self.disks().iter().find_map(|Served { spec, .. }| match &spec.volume {
            Some(OfVolume { name, on_fork: OnFork::Refuse }) => {
                Some((spec.name.clone(), name.clone()))
            }
            _ => None,
        })
    }

    /// For people: each disk, and the bytes that were written to it since the last freeze.
    pub fn written(&self) -> Vec<(DiskSpec, u64)> {
        let disks = self.disks();
        disks.iter().map(|served| (served.spec.clone(), served.disk.layer_bytes())).collect()
    }

    /// What the machine has asked of each.
    pub fn counts(&self) -> Vec<DiskCounts> {
        let disks = self.disks();
        disks.iter().map(|served| served.disk.counts().since(&served.before)).collect()
    }

    /// Which quota a write to the disk of that name would have passed just now.
    pub fn refusal(&self, name: &str) -> Option<String> {
        let disks = self.disks();
        let served = disks.iter().find(|served| served.spec.name == name)?;
        served.lease.as_ref().map_or(&served.set, |lease| lease.set()).refusal()
    }

    /// Why a request of the disk of that name failed a moment ago, and at which page.
    pub fn problem(&self, name: &str) -> Option<String> {
        let disks = self.disks();
        let served = disks.iter().find(|served| served.spec.name == name)?;
        served.disk.problem(PROBLEM_FRESH)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.disks().len()
    }

    /// The disk of that ID, and its name.
    pub fn with_id(&self, id: ImageId) -> Option<(usize, String)> {
        self.find(|served| served.disk.id() == id)
    }

    /// The disk with that index gets larger. → the disk again, for its own place: QEMU sees the new
    /// size at its next connection. No freeze may come between. Blocking.
    ///
    /// # Errors
    /// It would be smaller, other VMs have it, or the medium fails. It has its old size.
    pub fn grow(&self, index: usize, size_bytes: u64) -> Result<NewlyServed, DiskError> {
        let found = self.disks().get(index).map(Served::again);
        let mut served = found.ok_or(DiskError::NoVm)?;
        if served.spec.is_shared() {
            return Err(DiskError::Shared);
        }
        if served.spec.durability == Durability::Medium {
            // Before requests wait for the growth: little is left for it to sync.
            served.disk.sync().map_err(DiskError::Serve)?;
        }
        grow(&served.disk, size_bytes)?;
        served.spec.size_bytes = size_bytes;
        if let Some(place) = self.disks().get_mut(index) {
            place.spec.size_bytes = size_bytes;
        }
        Ok(NewlyServed(served))
    }

    /// The empty disk of that name, or the first one; and its name.
    pub fn empty(&self, name: Option<&str>) -> Option<(usize, String)> {
        let wanted = |served: &Served| name.is_none_or(|name| served.spec.name == name);
        self.find(|served| served.spec.empty && wanted(served))
    }

    /// The disk that is a volume, and its name.
    pub fn of_volume(&self, volume: &str) -> Option<(usize, String)> {
        self.find(|served| served.volume_name() == Some(volume))
    }

    fn find(&self, wanted: impl Fn(&Served) -> bool) -> Option<(usize, String)> {
        let disks = self.disks();
        let (at, served) = disks.iter().enumerate().find(|(_, served)| wanted(served))?;
        Some((at, served.spec.name.clone()))
    }

    /// Serves another disk, for the place of the one with that index. QEMU is told next.
    ///
    /// # Errors
    /// No fd is left.
    pub fn offer(&self, index: usize, disk: NewlyServed) -> Result<Offer<'_>, NbdSocketError> {
        let NewlyServed(mut served) = disk;
        // Names of disks have no dot.
        let number = self.offers.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        served.export = format!("{}.{number}", served.spec.name);
        let socket = served.socket(&self.folder)?;
        if let Some(server) = &self.server {
            server.add(&served.export, served.export());
        }
        let earlier = self.disks().get(index).and_then(|served| served.late.clone());
        Ok(Offer { disks: self, index, number, socket, served, earlier })
    }

    /// Blocking, for as long as a request that is being carried out takes, but not longer than
    /// [`END_TIMEOUT`]. After that the disk is let go when the request has ended.
    fn end(&self, served: Served) {
        let Some(server) = &self.server else { return };
        if !server.remove(&served.export, END_TIMEOUT) {
            let disk = &served.spec.name;
            tracing::warn!(disk, "a request of a disk that was detached still waits");
        }
    }
}

/// What the server of a QEMU that waits calls a disk. Names of disks have no dot.
fn late_name(index: usize) -> String {
    format!("{index}.")
}

/// A disk that no server has yet.
#[derive(Debug)]
pub struct NewlyServed(pub(super) Served);

/// A disk that is to take the place of another.
#[derive(Debug)]
pub struct Offer<'a> {
    disks: &'a MachineDisks,
    index: usize,
    /// No other offer of the machine has it.
    pub number: u64,
    pub socket: NbdSocket,
    served: Served,
    /// Of the disk whose place it takes.
    pub earlier: Option<LateFd>,
}

impl Offer<'_> {
    pub fn size_bytes(&self) -> u64 {
        self.served.spec.size_bytes
    }

    /// QEMU has it, and has closed the other one, which ends. Blocking.
    pub fn accepted(self, late: LateFd) {
        let Self { disks, index, mut served, .. } = self;
        served.late = Some(late);
        let old = disks.disks().get_mut(index).map(|place| std::mem::replace(place, served));
        if let Some(old) = old {
            disks.end(old);
        }
    }

    /// QEMU does not say whether it has it: both are served until the VM ends.
    pub fn undecided(self) {
        let Self { disks, served, .. } = self;
        tracing::warn!(export = served.export, "QEMU may use a disk that it was given late");
        disks.undecided.lock().unwrap_or_else(PoisonError::into_inner).push(served);
    }

    /// QEMU has refused it. Blocking.
    pub fn withdrawn(self) {
        self.disks.end(self.served);
    }
}

/// Ending the service joins threads, and removing layers unlinks files: no worker of an async
/// runtime may wait for that.
impl Drop for MachineDisks {
    fn drop(&mut self) {
        let mut disks = std::mem::take(&mut *self.disks());
        disks.append(self.undecided.get_mut().unwrap_or_else(PoisonError::into_inner));
        let server = self.server.take();
        let socket = self.socket.take();
        let end = move || {
            drop(server);
            drop(socket);
            drop(disks);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(end)),
            Err(_no_runtime) => end(),
        }
    }
}

/// The folder of one socket; both are removed when it is dropped.
///
/// The folder is the daemon's own, so that QEMU's user can pass through it and make nothing there.
#[derive(Debug)]
struct Socket {
    folder: PathBuf,
}

impl Socket {
    /// The folder is also returned open. A path to the socket through it is short, whatever the
    /// state folder's is.
    fn make(folder: &Path, uid: u32) -> io::Result<(Self, OwnedFd, UnixListener)> {
        DirBuilder::new().mode(0o700).create(folder)?;
        let made = Self { folder: folder.to_owned() };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(folder, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/{DISK_SOCKET}", fd.as_raw_fd());
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        chown(&path, Some(uid), None)?;
        // Last: until now only we could pass through.
        fs::set_permissions(folder, Permissions::from_mode(0o711))?;
        Ok((made, fd, listener))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let socket = match fs::remove_file(self.folder.join(DISK_SOCKET)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        if let Err(error) = socket.and_then(|()| fs::remove_dir(&self.folder)) {
            tracing::warn!(path = %self.folder.display(), %error, "remove the socket of disks");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn own_uid() -> u32 {
        rustix::process::getuid().as_raw()
    }

    #[test]
    fn only_the_socket_belongs_to_its_user_and_both_are_removed() {
        let above = tempfile::tempdir().expect("a folder");
        // Longer than a socket's address may be.
        let folder = above.path().join("x".repeat(120));
        // As root, another user's; else the test can't give it away.
        let uid = if own_uid() == 0 { 65_534 } else { own_uid() };
        let (socket, fd, _listener) = Socket::make(&folder, uid).expect("made");
        let found = fs::metadata(&folder).expect("there");
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o711, own_uid()));
        let found = fs::symlink_metadata(folder.join(DISK_SOCKET)).expect("there");
        assert_eq!((found.mode() & 0o7777, found.uid()), (0o600, uid));
        let path = format!("/proc/self/fd/{}/{DISK_SOCKET}", fd.as_raw_fd());
        UnixStream::connect(path).expect("somebody listens");
        drop(socket);
        assert!(!folder.exists());
    }

    #[test]
    fn a_folder_with_something_else_is_left_alone() {
        let above = tempfile::tempdir().expect("a folder");
        let folder = above.path().join("0");
        let (socket, ..) = Socket::make(&folder, own_uid()).expect("made");
        fs::create_dir(folder.join("deep")).expect("made");
        drop(socket);
        assert!(folder.join("deep").exists(), "nothing is removed with what is in it");
    }

    #[test]
    fn a_folder_that_was_there_is_kept() {
        let above = tempfile::tempdir().expect("a folder");
        let folder = above.path().join("0");
        fs::create_dir(&folder).expect("made");
        assert!(Socket::make(&folder, own_uid()).is_err(), "another has it");
        assert!(folder.exists(), "and keeps it");
    }
}
