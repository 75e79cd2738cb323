//! The writable disks of this host's VMs: what they hold at first, and who serves them.
//!
//! ```text
//!   source ─► DiskContent ─► attach (boot) ─► MachineDisks ─► QEMU's NBD client
//!                  ▲  └────► fill (clone) ──────► ▲  │            ▲
//!                  └──────────── freeze ─────────────┘   wait ────┘
//! ```
//!
//! A QEMU that waits is connected to a server whose disks come when it becomes a clone.
//!
//! A disk that is a volume (`volumes`) is not made for the machine. It is lent to it.
//!
//! Promises: a machine's disks are served until they are dropped; then what only they have is gone.
//! A socket can be opened by the user of its QEMU alone. A freeze makes no file.
//!
//! Left to others: layers and the protocol (`vmfork-disk`), QEMU's drives (`vmfork-qemu`), when a
//! machine is frozen.

mod accounts;
mod base;
mod blank;
mod client;
mod health;
mod left;
mod objects;
mod qcow2;
mod scratch;
mod served;
mod stored;
mod volumes;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmfork_api::disk::DISK_BYTES_MIN;
use vmfork_api::{
    DiskFormat, DiskSource, Durability, ErrorCode, NewDisk, OnFork, Volume, VolumeRequest,
};
use vmfork_disk::{Base, Disk, DiskImage, DiskSet, DiskStore, ImageError, RawError, StoreOptions};
use vmfork_engine::SparseFile;
use vmfork_qemu::{DiskSlot, NbdSocket};

pub use self::blank::BlankError;
pub use self::health::DiskHealth;
pub use self::objects::ObjectBases;
use self::served::Served;
pub use self::served::{MachineDisks, NewlyServed, Offer};
pub use self::stored::{OnBase, StoredBases, StoredError};
use self::volumes::Volumes;
pub use self::volumes::{OfVolume, VolumeError, VolumeLease};
pub use vmfork_disk::layer::LayerError;

use vmfork_guest_image::qcow2::Qcow2Error;

use crate::error::DOCTOR;
use crate::metrics::Metrics;
use crate::quotas::{DiskBounds, User};

/// Free space that disks leave to the host.
pub const FLOOR_BYTES: u64 = 1 << 30;

/// Size of an empty disk.
const EMPTY_BYTES: u64 = 512;

/// A writable disk, as the guest and its owner know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// Unique in its VM.
    pub name: String,
    pub size_bytes: u64,
    #[serde(default)]
    pub durability: Durability,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<OfVolume>,
    /// A volume can take its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty: bool,
    /// It was a volume that VMs share, and is the stored content of that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

impl DiskSpec {
    /// What its server tells QEMU.
    pub fn slot(&self) -> DiskSlot {
        let (size_bytes, read_only) = (self.size_bytes, self.is_shared());
        let flushes = !read_only && self.durability == Durability::Medium;
        DiskSlot { size_bytes, read_only, flushes }
    }

    /// The guest can only read it. If it is a volume, other VMs may have it.
    pub fn is_shared(&self) -> bool {
        self.read_only || self.volume.as_ref().is_some_and(OfVolume::is_shared)
    }
}

/// What a disk holds at one instant.
#[derive(Debug, Clone)]
pub struct DiskContent {
    pub spec: DiskSpec,
    pub image: DiskImage,
    /// Counts what a disk that begins with it writes, and what all that descend from that write. A
    /// volume's own bytes count elsewhere: on the host.
    pub set: Arc<DiskSet>,
    /// It descends from a file of a client's, which others may change. Files of guest images are
    /// replaced, and those of blank disks have no name: what was opened stays as it is.
    pub on_clients_file: bool,
    /// Of a shared volume: it stays as it is until all clones have it, too.
    pub lease: Option<Arc<VolumeLease>>,
}

/// A disk that a VM can't have.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A file that a client named.
    #[error(transparent)]
    File(ImageError),
    #[error("`{}` does not answer within {} s", path.display(), after.as_secs())]
    Late { path: PathBuf, after: Duration },
    #[error("start a thread that opens a file")]
    Thread(#[source] io::Error),
    #[error("`{}` is empty", path.display())]
    Empty { path: PathBuf },
    #[error("`{}` has {bytes} bytes: a disk has 1 MiB to 2 TiB", path.display())]
    Range { path: PathBuf, bytes: u64 },
    #[error("`{}` has {bytes} bytes: a disk has a multiple of 512", path.display())]
    Size { path: PathBuf, bytes: u64 },
    #[error("`{}` has changed since a disk was made on it", path.display())]
    Changed { path: PathBuf },
    #[error("the guest image `{image}` has no root file system")]
    NoRoot { image: String },
    #[error(transparent)]
    Blank(#[from] BlankError),
    /// A disk of a snapshot.
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error("this host has no store of snapshots")]
    NoStore,
    #[error("there is no disk `{id}` on this host")]
    Unknown { id: String },
    #[error("a VM has it, or it is being exported")]
    InUse,
    #[error("it is a volume")]
    IsVolume,
    #[error("it has {now} bytes, which are more than {size_bytes}: a disk only grows")]
    Shrinks { size_bytes: u64, now: u64 },
    #[error("no VM has it")]
    NoVm,
    #[error("several VMs may read it, so it keeps its size")]
    Shared,
    #[error("it may be of a volume that can't be opened")]
    MayBeVolumes,
    #[error("what an earlier daemon left of a disk")]
    Left(#[source] vmfork_disk::StoreError),
    #[error("make the files of a disk")]
    Layer(#[source] vmfork_disk::StoreError),
    #[error("serve a disk")]
    Serve(#[source] io::Error),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("the folder of volumes")]
    Volumes(#[source] io::Error),
    /// A request was dropped that would have been answered.
    #[error("it was given up")]
    GivenUp,
    #[error("too many programs use disks of this host")]
    Clients,
    #[error("a folder for files of disks")]
    Scratch(#[source] io::Error),
    #[error("`{}` is named as a qcow2 file, and `file:` takes raw ones", path.display())]
    IsQcow2 { path: PathBuf },
    #[error("convert a qcow2 file")]
    Qcow2 {
        #[source]
        source: Box<Qcow2Error>,
        remedy: Option<String>,
    },
}

impl DiskError {
    /// What the API says about it.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::File(ImageError::Raw(RawError::File { source, .. }))
                if source.kind() == io::ErrorKind::NotFound =>
            {
                ErrorCode::NotFound
            }
            Self::File(ImageError::Raw(RawError::Kind { .. }))
            | Self::Empty { .. }
            | Self::Range { .. }
            | Self::Size { .. }
            | Self::IsQcow2 { .. }
            | Self::NoRoot { .. } => ErrorCode::BadRequest,
            Self::Changed { .. }
            | Self::InUse
            | Self::IsVolume
            | Self::MayBeVolumes
            | Self::Shrinks { .. }
            | Self::NoVm
            | Self::Shared => ErrorCode::Conflict,
            Self::Unknown { .. } => ErrorCode::NotFound,
            Self::Clients => ErrorCode::NoCapacity,
            Self::Qcow2 { source, .. } => match &**source {
                Qcow2Error::Other { .. }
                | Qcow2Error::Refused { .. }
                | Qcow2Error::Range { .. }
                | Qcow2Error::Unreadable { .. } => ErrorCode::BadRequest,
                Qcow2Error::Path(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    ErrorCode::BadRequest
                }
                Qcow2Error::Full { .. } => ErrorCode::NoCapacity,
                _ => ErrorCode::Host,
            },
            Self::Volume(error) => error.code(),
            Self::Stored(error) => error.code,
            Self::Image(_)
            | Self::NoStore
            | Self::Left(_)
            | Self::File(_)
            | Self::Late { .. }
            | Self::Thread(_)
            | Self::Blank(_)
            | Self::Layer(_)
            | Self::Serve(_)
            | Self::Volumes(_)
            | Self::Scratch(_)
            | Self::GivenUp => ErrorCode::Host,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Option<&str> {
        match self {
            Self::Image(ImageError::Raw(RawError::File { source, .. }))
            | Self::File(ImageError::Raw(RawError::File { source, .. }))
            | Self::Thread(source)
            | Self::Serve(source)
                if is_short(source) =>
            {
                Some("end VMs, or raise the daemon's limits of open files and threads")
            }
            Self::File(ImageError::Raw(_)) => Some("the path is one of the daemon's host"),
            Self::Image(_) | Self::File(_) | Self::Thread(_) => Some(DOCTOR),
            Self::Late { .. } => Some("is the file system that it is on there?"),
            Self::Empty { .. } => Some("for an empty file system use NAME=blank:SIZE"),
            Self::Range { bytes, .. } if *bytes < DISK_BYTES_MIN => {
                Some("`truncate -s 1M FILE` makes it large enough")
            }
            Self::Range { .. } | Self::NoRoot { .. } => None,
            Self::Size { .. } => Some("`truncate -s %4096 FILE` rounds it up"),
            Self::Changed { .. } => {
                Some("its VMs may read wrong bytes: end them, and start them from the new file")
            }
            Self::Unknown { .. } => Some("`vmfork disk ls` lists them"),
            Self::MayBeVolumes => Some("`vmfork volume ls` says which: repair or remove it first"),
            Self::IsVolume => Some("`vmfork volume rm` removes it"),
            Self::InUse => Some("end the VM: its disk goes with it"),
            Self::Left(vmfork_disk::StoreError::Unread { .. }) => {
                Some("try again; if its medium has failed for good, move that folder away")
            }
            Self::Shrinks { .. } => Some("copy the files to a smaller disk"),
            Self::NoVm => Some("`vmfork disk export` it: `truncate -s SIZE FILE` grows the file"),
            Self::Shared => Some("end the VMs that have it first"),
            Self::Left(_) => Some("`vmfork disk rm` removes what can't be read any more"),
            Self::Blank(BlankError::Run(_)) => Some("`apt-get install e2fsprogs`"),
            Self::IsQcow2 { .. } => {
                Some("use `qcow2:PATH`, which converts it; a raw file gets another name")
            }
            Self::Qcow2 { remedy, .. } => remedy.as_deref(),
            Self::Blank(_)
            | Self::Layer(_)
            | Self::Serve(_)
            | Self::Volumes(_)
            | Self::Scratch(_) => Some("is the disk of the state folder full?"),
            Self::Clients => Some("end an `image serve` of this host"),
            Self::Volume(error) => Some(error.remedy()),
            Self::Stored(error) => error.remedy.as_deref(),
            Self::GivenUp | Self::NoStore => None,
        }
    }
}

/// The process or the host has no fd or thread left.
fn is_short(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let short = [Errno::MFILE, Errno::NFILE, Errno::AGAIN];
    short.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The disks of one host.
#[derive(Debug)]
pub struct HostDisks {
    store: Arc<DiskStore>,
    /// Those of VMs, by ID.
    live: left::Live,
    volumes: Volumes,
    accounts: accounts::Accounts,
    blanks: blank::Blanks,
    converter: qcow2::Converter,
    clients: client::Clients,
    /// For what comes of other hosts' disks.
    arrived: scratch::Scratch,
    bases: base::Bases,
    stored: stored::Known,
    objects: objects::KnownObjects,
    /// Each QEMU's sockets are in a folder of its own here.
    sockets: PathBuf,
    next: AtomicU64,
}

impl HostDisks {
    /// Layers in `folder`, sockets in `sockets`. Both are there, and this daemon's alone.
    ///
    /// # Errors
    /// They can't be read or written.
    pub fn open(folder: &Path, sockets: PathBuf) -> Result<Self, DiskError> {
        let options = StoreOptions { floor_bytes: FLOOR_BYTES };
        let store = Arc::new(DiskStore::open(folder, options).map_err(DiskError::Layer)?);
        let accounts = accounts::Accounts::new();
        let of_volume = || accounts.of_host();
        let volumes = Volumes::open(folder.join("volumes"), &store, &of_volume);
        let (volumes, is_whole) = volumes.map_err(DiskError::Volumes)?;
        if is_whole {
            left::report(&store).map_err(DiskError::Layer)?;
        } else {
            tracing::error!("no layer of an earlier daemon is removed: it may be of a volume");
        }
        let blanks = blank::Blanks::open(folder.join("blank")).map_err(DiskError::Scratch)?;
        let converter = qcow2::Converter::open(folder.join("qcow2")).map_err(DiskError::Scratch)?;
        let arrived = folder.join("arrived");
        let arrived = scratch::Scratch::open(arrived).map_err(DiskError::Scratch)?;
        let next = AtomicU64::new(first_free(&sockets).map_err(DiskError::Serve)?);
        let bases = base::Bases::new(Arc::clone(&store));
        let (live, stored) = (left::Live::default(), stored::Known::default());
        Ok(Self {
            store,
            live,
            volumes,
            accounts,
            blanks,
            converter,
            clients: client::Clients::default(),
            arrived,
            bases,
            stored,
            objects: objects::KnownObjects::default(),
            sockets,
            next,
        })
    }

    /// An empty file without a name, for pages of another host's disk. It takes space for what has
    /// come, which counts on no quota.
    ///
    /// # Errors
    /// It can't be made.
    pub fn cache_file(&self, pages: u64) -> io::Result<SparseFile> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.arrived.folder().join(number.to_string());
        let file = SparseFile::create(&path, pages)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    }

    /// Whether the host has its floor of free space beside `bytes`. What comes `is_ahead` leaves as
    /// much again, for what VMs write.
    pub fn has_room(&self, bytes: u64, is_ahead: bool) -> bool {
        let reserve = if is_ahead { FLOOR_BYTES } else { 0 };
        self.arrived.free_bytes().is_ok_and(|free| free >= bytes.saturating_add(reserve))
    }

    /// With bounds for what all disks hold, and for those of each user.
    ///
    /// # Errors
    /// What earlier daemons left can't be counted.
    pub fn limited(
        mut self,
        host_bytes: Option<u64>,
        users: DiskBounds,
    ) -> Result<Self, DiskError> {
        self.accounts.bound(host_bytes, users);
        self.accounts.count_left(&self.store).map_err(DiskError::Left)?;
        Ok(self)
    }

    /// What a user's VM and its clones write counts on the user. What the VM itself writes to a
    /// volume does not.
    pub fn count_on(&self, user: User, contents: &mut [DiskContent]) {
        for content in contents {
            content.set = self.accounts.of_user(user);
        }
    }

    /// What the disks of a VM that boots hold. `root_of` knows the file of an image's root.
    ///
    /// # Errors
    /// [`DiskError`] of the first that can't be had.
    pub async fn contents<E: From<DiskError>>(
        &self,
        disks: &[NewDisk],
        root_of: impl Fn(&str) -> Result<PathBuf, E>,
    ) -> Result<Vec<DiskContent>, E> {
        let mut contents = Vec::with_capacity(disks.len());
        for disk in disks {
            contents.push(self.content(&disk.name, &disk.source, &root_of).await?);
        }
        Ok(contents)
    }

    /// From now on, what VMs have on their disks stays when they end: for the next daemon.
    pub fn keep_all(&self) {
        self.store.keep_all();
    }

    async fn content<E: From<DiskError>>(
        &self,
        name: &str,
        source: &DiskSource,
        root_of: impl Fn(&str) -> Result<PathBuf, E>,
    ) -> Result<DiskContent, E> {
        let image = match source {
            DiskSource::Blank { size_bytes } => self.blanks.get(*size_bytes, &self.bases).await?,
            DiskSource::Image { image } => self.bases.keep(root_of(image)?).await?,
            DiskSource::File { path, format: DiskFormat::Qcow2 } => {
                self.converter.get(path.into(), &self.bases).await?
            }
            DiskSource::File { path, format: DiskFormat::Raw } => {
                let opened = self.bases.open(path.into()).await;
                opened.map_err(|error| match error {
                    DiskError::Image(error) => DiskError::File(error),
                    error => error,
                })?
            }
            DiskSource::Volume { volume } => {
                let of = self.volumes.ready(volume).await.map_err(DiskError::Volume)?;
                return Ok(self.volume_content(name, &of).map_err(DiskError::Volume)?);
            }
            DiskSource::Snapshot { snapshot, disk } => self.stored.disk(snapshot, disk).await?,
            DiskSource::Object { location } => self.objects.disk(location).await?,
            DiskSource::Empty {} => return Ok(empty_content(name)?),
        };
        base::check_size(&image)?;
        let spec = DiskSpec {
            name: name.to_owned(),
            size_bytes: image.size_bytes(),
            durability: Durability::Host,
            volume: None,
            empty: false,
            read_only: false,
        };
        let on_clients_file = matches!(source, DiskSource::File { format: DiskFormat::Raw, .. });
        let set = self.accounts.of_host();
        Ok(DiskContent { spec, image, set, on_clients_file, lease: None })
    }

    /// What a machine's disk is that is a volume. It is taken when the machine is given its disks.
    fn volume_content(&self, name: &str, of: &OfVolume) -> Result<DiskContent, VolumeError> {
        let (disk, set) = (self.volumes.disk(&of.name)?, self.accounts.of_host());
        let spec = DiskSpec {
            name: name.to_owned(),
            size_bytes: disk.size_bytes(),
            durability: Durability::Medium,
            volume: Some(of.clone()),
            empty: false,
            read_only: false,
        };
        let image = disk.image();
        Ok(DiskContent { spec, image, set, on_clients_file: false, lease: None })
    }

    /// What a volume is, once a VM may have it. Waits for one that gives it back.
    ///
    /// # Errors
    /// A VM has it, or it can't be used.
    pub async fn volume_ready(&self, volume: &str) -> Result<OfVolume, VolumeError> {
        self.volumes.ready(volume).await
    }

    /// A volume for the place of an empty disk of that name, of a user's VM. Blocking.
    ///
    /// # Errors
    /// Another VM has it.
    pub fn serve_volume(
        &self,
        (user, vm): (User, &str),
        name: &str,
        of: &OfVolume,
    ) -> Result<NewlyServed, DiskError> {
        let mut content = self.volume_content(name, of)?;
        self.count_on(user, std::slice::from_mut(&mut content));
        Ok(NewlyServed(self.serve(vm, &content)?))
    }

    /// An empty disk for the place of a volume. Blocking.
    ///
    /// # Errors
    /// No room, or no fd is left.
    pub fn serve_empty(&self, vm: &str, name: &str) -> Result<NewlyServed, DiskError> {
        Ok(NewlyServed(self.serve(vm, &empty_content(name)?)?))
    }

    /// A VM gives a volume back soon, and goes on.
    pub fn volume_goes(&self, vm: &str, volume: &str) {
        self.volumes.goes(vm, volume);
    }

    fn serve(&self, vm: &str, content: &DiskContent) -> Result<Served, DiskError> {
        match &content.spec.volume {
            Some(of) => Ok(Served::volume(content, self.volumes.take(vm, of)?)),
            None => Served::create(content, vm, &self.store),
        }
    }

    /// A new volume; `now_unix_ms` is the time. If this future is dropped, there is none.
    ///
    /// # Errors
    /// As [`HostDisks::contents`]; or the name is taken, or there is no room.
    pub async fn create_volume<E: From<DiskError>>(
        self: &Arc<Self>,
        request: VolumeRequest,
        now_unix_ms: u64,
        root_of: impl Fn(&str) -> Result<PathBuf, E>,
    ) -> Result<Volume, E> {
        self.volumes.check_new(&request.name).map_err(DiskError::Volume)?;
        let source = DiskSource::from(request.source.clone());
        let content = self.content(&request.name, &source, root_of).await?;
        let (disks, given_up) = (Arc::clone(self), Arc::new(AtomicBool::new(false)));
        let _on_drop = SetOnDrop(Arc::clone(&given_up));
        let made = tokio::task::spawn_blocking(move || {
            let Self { store, volumes, accounts, .. } = &*disks;
            let content_of = (&content.image, accounts.of_host());
            let filled = volumes.fill(store, &request, now_unix_ms, content_of, &given_up)?;
            // What its owner has changed meanwhile was copied in part.
            check_base(&content)?;
            Ok::<_, DiskError>(filled.publish()?)
        });
        Ok(made.await.map_err(|_panicked| DiskError::GivenUp)??)
    }

    /// Have the metrics know what disks have done and hold.
    pub(crate) fn count(&self, metrics: &Metrics) {
        metrics.set_disks(&self.store.totals(), self.store.layer_bytes());
    }

    /// All volumes, by name. Blocking.
    pub fn volumes(&self) -> Vec<Volume> {
        self.volumes.list()
    }

    /// How many volumes there are.
    pub fn volume_count(&self) -> usize {
        self.volumes.count()
    }

    /// One volume. Blocking.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn volume(&self, name: &str) -> Result<Volume, VolumeError> {
        self.volumes.show(name)
    }

    /// What forks do with a volume.
    ///
    /// # Errors
    /// There is none of that name, or it can't be used.
    pub fn on_fork(&self, volume: &str) -> Result<OnFork, VolumeError> {
        self.volumes.on_fork(volume)
    }

    /// Removes a volume, and all that it holds. Blocking.
    ///
    /// # Errors
    /// A VM has it.
    pub fn remove_volume(&self, name: &str) -> Result<(), VolumeError> {
        self.volumes.remove(name)
    }

    /// What forks do with a volume from now on. Blocking.
    ///
    /// # Errors
    /// A VM has it.
    pub fn set_on_fork(&self, name: &str, on_fork: OnFork) -> Result<Volume, VolumeError> {
        self.volumes.set_on_fork(name, on_fork)
    }

    /// The volume of that disk gets larger, while no VM has it. What was written is on the medium
    /// then, and so is the new size. Blocking.
    ///
    /// # Errors
    /// A VM has it, or it would be smaller.
    pub fn grow_volume(&self, id: &str, size_bytes: u64) -> Result<(), DiskError> {
        let unknown = || DiskError::Unknown { id: id.to_owned() };
        let id = id.parse().map_err(|_no_id| unknown())?;
        self.volumes.grow(id, |disk| grow(disk, size_bytes)).ok_or_else(unknown)?
    }

    /// A VM of that name has ended: it gives its volumes back soon.
    pub fn vm_ends(&self, vm: &str) {
        self.volumes.vm_ends(vm);
    }

    /// Waits until those of these VMs that have ended have given their volumes back, with all that
    /// they wrote.
    pub async fn given_back(&self, vms: &[&str]) {
        self.volumes.given_back(|vm| vms.contains(&vm)).await;
    }

    /// The same, of all VMs.
    pub async fn all_given_back(&self) {
        self.volumes.given_back(|_| true).await;
    }

    /// Disks with these contents, for the QEMU of one user. `vm` is for the notes on their files.
    /// Blocking: makes files.
    ///
    /// # Errors
    /// No room, or no fd is left. A file that one of them is on has changed.
    pub fn attach(
        &self,
        vm: &str,
        uid: u32,
        contents: &[DiskContent],
    ) -> Result<Option<MachineDisks>, DiskError> {
        if contents.is_empty() {
            return Ok(None);
        }
        let disks = MachineDisks::start(self.served(vm, contents)?, uid, &self.new_folder())?;
        self.live.add(&disks.all());
        Ok(Some(disks))
    }

    /// The disks of a QEMU of one user that waits: it connects to them, and what they hold comes
    /// later. → also where it finds each. Blocking.
    ///
    /// # Errors
    /// No room, or no fd is left.
    pub fn wait(
        &self,
        uid: u32,
        slots: impl IntoIterator<Item = DiskSlot>,
    ) -> Result<Option<(MachineDisks, Vec<NbdSocket>)>, DiskError> {
        let mut slots = slots.into_iter().peekable();
        if slots.peek().is_none() {
            return Ok(None);
        }
        MachineDisks::wait(slots, uid, &self.new_folder()).map(Some)
    }

    /// A VM of that name gets a QEMU that waited, and these are its disks' contents. → whether they
    /// are as QEMU was told. Blocking: makes files.
    ///
    /// # Errors
    /// No room, or no fd is left. A file that one of them is on has changed.
    pub fn fill(
        &self,
        waiting: &MachineDisks,
        vm: &str,
        contents: &[DiskContent],
    ) -> Result<bool, DiskError> {
        let filled = waiting.fill(self.served(vm, contents)?);
        self.live.add(&waiting.all());
        Ok(filled)
    }

    fn new_folder(&self) -> PathBuf {
        self.sockets.join(self.next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    fn served(&self, vm: &str, contents: &[DiskContent]) -> Result<Vec<Served>, DiskError> {
        contents.iter().try_for_each(check_base)?;
        contents.iter().map(|content| self.serve(vm, content)).collect()
    }
}

/// Volumes stay, however the daemon ends.
impl Drop for HostDisks {
    fn drop(&mut self) {
        if self.volumes.count() > 0 {
            self.store.keep_all();
        }
    }
}

/// A disk gets larger; none gets smaller.
fn grow(disk: &Disk, size_bytes: u64) -> Result<(), DiskError> {
    disk.grow(size_bytes).map_err(|error| match error {
        LayerError::Size { size_bytes, now } => DiskError::Shrinks { size_bytes, now },
        error => DiskError::Layer(error.into()),
    })
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An empty disk: one sector of zeros, since QEMU's device needs something.
fn empty_content(name: &str) -> Result<DiskContent, DiskError> {
    let image = DiskImage::blank(EMPTY_BYTES)?;
    let spec = DiskSpec {
        name: name.to_owned(),
        size_bytes: EMPTY_BYTES,
        durability: Durability::Host,
        volume: None,
        empty: true,
        read_only: false,
    };
    Ok(DiskContent { spec, image, set: DiskSet::new(None), on_clients_file: false, lease: None })
}

/// Whether the file that it is on still has its bytes, as far as `stat` tells.
fn check_base(content: &DiskContent) -> Result<(), DiskError> {
    match content.image.base() {
        Base::Raw(_, file) if content.on_clients_file && !content.image.is_unchanged() => {
            Err(DiskError::Changed { path: file.path().to_owned() })
        }
        Base::Raw(..) | Base::Blank(_) | Base::Given(_) => Ok(()),
    }
}

/// The first number beyond those of folders that could not be removed.
fn first_free(sockets: &Path) -> io::Result<u64> {
    let entries = std::fs::read_dir(sockets)?.flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    Ok(numbers.max().map_or(0, |last| last.saturating_add(1)))
}

#[cfg(test)]
mod tests;
