//! The writable disks of this host's VMs: what they hold at first, and who serves them.
//!
//! ```text
//!   source ─► DiskContent ─► attach ─► MachineDisks ─► QEMU's NBD client
//!                  ▲                        │
//!                  └─────── freeze ─────────┘
//! ```
//!
//! A disk that is a volume (`volumes`) is not made for the machine. It is lent to it.
//!
//! Promises: a machine's disks are served until they are dropped; then what only they have is gone.
//! A socket can be opened by the user of its QEMU alone. A freeze makes no file.
//!
//! Left to others: layers and the protocol (`vmfork-disk`), QEMU's drives (`vmfork-qemu`), when a
//! machine is frozen.

mod base;
mod blank;
mod left;
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
use vmfork_api::{DiskSource, Durability, ErrorCode, NewDisk, OnFork, Volume, VolumeRequest};
use vmfork_disk::{Base, DiskImage, DiskSet, DiskStore, ImageError, RawError, StoreOptions};

pub use self::blank::BlankError;
use self::served::Served;
pub use self::served::{MachineDisks, NewlyServed, Offer};
pub use self::stored::{OnBase, StoredBases};
use self::volumes::Volumes;
pub use self::volumes::{OfVolume, VolumeError, VolumeLease};
pub use vmfork_disk::layer::LayerError;

use crate::error::DOCTOR;

/// Free space that disks leave to the host.
const FLOOR_BYTES: u64 = 1 << 30;

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
    /// Counts what all disks that descend from one hold.
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
    #[error("there is no disk `{id}` on this host")]
    Unknown { id: String },
    #[error("a VM has it, or it is being exported")]
    InUse,
    #[error("it is a volume")]
    IsVolume,
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
            | Self::NoRoot { .. } => ErrorCode::BadRequest,
            Self::Changed { .. } | Self::InUse | Self::IsVolume | Self::MayBeVolumes => {
                ErrorCode::Conflict
            }
            Self::Unknown { .. } => ErrorCode::NotFound,
            Self::Volume(error) => error.code(),
            Self::Image(_)
            | Self::Left(_)
            | Self::File(_)
            | Self::Late { .. }
            | Self::Thread(_)
            | Self::Blank(_)
            | Self::Layer(_)
            | Self::Serve(_)
            | Self::Volumes(_)
            | Self::GivenUp => ErrorCode::Host,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> Option<&'static str> {
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
            Self::Left(_) => Some("`vmfork disk rm` removes what can't be read any more"),
            Self::Blank(BlankError::Run(_)) => Some("`apt-get install e2fsprogs`"),
            Self::Blank(_) | Self::Layer(_) | Self::Serve(_) | Self::Volumes(_) => {
                Some("is the disk of the state folder full?")
            }
            Self::Volume(error) => Some(error.remedy()),
            Self::GivenUp => None,
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
    blanks: blank::Blanks,
    bases: base::Bases,
    stored: stored::Known,
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
        let (volumes, is_whole) =
            Volumes::open(folder.join("volumes"), &store).map_err(DiskError::Volumes)?;
        if is_whole {
            left::report(&store).map_err(DiskError::Layer)?;
        } else {
            tracing::error!("no layer of an earlier daemon is removed: it may be of a volume");
        }
        let blanks = blank::Blanks::open(folder.join("blank"))?;
        let next = AtomicU64::new(first_free(&sockets).map_err(DiskError::Serve)?);
        let bases = base::Bases::new(Arc::clone(&store));
        let (live, stored) = (left::Live::default(), stored::Known::default());
        Ok(Self { store, live, volumes, blanks, bases, stored, sockets, next })
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
            DiskSource::File { path } => {
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
        let on_clients_file = matches!(source, DiskSource::File { .. });
        Ok(DiskContent { spec, image, set: DiskSet::new(None), on_clients_file, lease: None })
    }

    /// What a machine's disk is that is a volume. It is taken when the machine is given its disks.
    fn volume_content(&self, name: &str, of: &OfVolume) -> Result<DiskContent, VolumeError> {
        let (disk, set) = self.volumes.disk(&of.name)?;
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

    /// A volume for the place of an empty disk of that name. Blocking.
    ///
    /// # Errors
    /// Another VM has it.
    pub fn serve_volume(
        &self,
        vm: &str,
        name: &str,
        of: &OfVolume,
    ) -> Result<NewlyServed, DiskError> {
        Ok(NewlyServed(self.serve(vm, &self.volume_content(name, of)?)?))
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
            let Self { store, volumes, .. } = &*disks;
            let made = volumes.create(store, &request, now_unix_ms, &content.image, &given_up)?;
            // What its owner has changed meanwhile was copied in part.
            check_base(&content).inspect_err(|_| {
                if let Err(error) = volumes.remove(&request.name) {
                    tracing::warn!(volume = request.name, %error, "remove a volume half-way");
                }
            })?;
            Ok::<_, DiskError>(made)
        });
        Ok(made.await.map_err(|_panicked| DiskError::GivenUp)??)
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

    /// A VM of that name has ended: it gives its volumes back soon.
    pub fn vm_ends(&self, vm: &str) {
        self.volumes.vm_ends(vm);
    }

    /// Waits until VMs that have ended have given their volumes back, with all that they wrote.
    pub async fn given_back(&self) {
        self.volumes.given_back().await;
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
        contents.iter().try_for_each(check_base)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let folder = self.sockets.join(number.to_string());
        let disks = contents.iter().map(|content| self.serve(vm, content));
        let disks = disks.collect::<Result<_, DiskError>>()?;
        let disks = MachineDisks::start(disks, uid, &folder)?;
        self.live.add(&disks.all());
        Ok(Some(disks))
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
mod tests {
    use std::fs::{self, File};

    use super::*;

    struct Setup {
        folder: tempfile::TempDir,
        disks: Arc<HostDisks>,
    }

    fn setup() -> Setup {
        let folder = tempfile::tempdir().expect("a folder");
        let sockets = folder.path().join("sockets");
        fs::create_dir(&sockets).expect("made");
        // What an earlier daemon could not remove.
        fs::create_dir(sockets.join("7")).expect("made");
        let disks = HostDisks::open(&folder.path().join("disks"), sockets).expect("room");
        Setup { folder, disks: Arc::new(disks) }
    }

    impl Setup {
        /// A disk on a file of that size.
        async fn of_size(&self, bytes: u64) -> Result<Vec<DiskContent>, DiskError> {
            let path = self.folder.path().join("base");
            File::create(&path).expect("made").set_len(bytes).expect("sized");
            self.of_file(&path).await
        }

        async fn of_file(&self, path: &Path) -> Result<Vec<DiskContent>, DiskError> {
            let disk = format!("data=file:{}", path.display()).parse().expect("a disk");
            self.disks.contents(&[disk], |_| -> Result<PathBuf, DiskError> { panic!() }).await
        }
    }

    #[tokio::test]
    async fn files_that_are_no_disks_are_refused_with_what_to_do() {
        let setup = setup();
        let (min, max) = (DISK_BYTES_MIN, 2_u64 << 40);
        for (bytes, cause, remedy) in [
            (0, "is empty", "NAME=blank:SIZE"),
            (512, "has 512 bytes: a disk has 1 MiB to 2 TiB", "truncate -s 1M"),
            (min + 1, "a multiple of 512", "truncate -s %4096"),
            (max + 4096, "1 MiB to 2 TiB", ""),
        ] {
            let error = setup.of_size(bytes).await.expect_err("refused");
            assert!(error.to_string().contains(cause), "{error}");
            assert!(error.remedy().unwrap_or_default().contains(remedy), "{error}");
            assert_eq!(error.code(), ErrorCode::BadRequest);
        }
        let there = setup.of_size(min + 512).await.expect("a disk");
        assert_eq!(there.first().expect("one").spec.size_bytes, min + 512);
        let missing = setup.of_file(Path::new("/nonexistent/disk")).await.expect_err("refused");
        assert_eq!(missing.code(), ErrorCode::NotFound);
        assert_eq!(missing.remedy(), Some("the path is one of the daemon's host"));
    }

    #[test]
    fn what_the_host_lacks_is_not_taken_for_a_wrong_path() {
        let source = || io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let file = ImageError::Raw(RawError::File { path: "/x".into(), source: source() });
        for error in [DiskError::File(file), DiskError::Serve(source())] {
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("open files")), "{error}");
        }
    }

    #[tokio::test]
    async fn a_base_that_has_changed_is_refused_and_leftovers_are_in_no_ones_way() {
        let setup = setup();
        let uid = rustix::process::getuid().as_raw();
        let contents = setup.of_size(DISK_BYTES_MIN).await.expect("a disk");
        let first = setup.disks.attach("web", uid, &contents).expect("served");
        assert!(setup.folder.path().join("sockets/8").exists());
        let file = File::options().write(true).open(setup.folder.path().join("base"));
        file.expect("there").set_len(DISK_BYTES_MIN + 4096).expect("longer");
        let refused = setup.disks.attach("web-1", uid, &contents).expect_err("refused");
        assert!(matches!(refused, DiskError::Changed { .. }), "{refused}");
        let frozen = first.expect("disks").freeze().expect("frozen");
        let refused = setup.disks.attach("web-2", uid, &frozen).expect_err("refused, too");
        assert!(matches!(refused, DiskError::Changed { .. }), "{refused}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_machine_has_a_volume_until_it_is_dropped() {
        let setup = setup();
        let (disks, uid) = (&setup.disks, rustix::process::getuid().as_raw());
        let root_of = |_: &str| -> Result<PathBuf, DiskError> { panic!("no image is named") };
        let source = vmfork_api::VolumeSource::Blank { size_bytes: DISK_BYTES_MIN };
        let (on_fork, labels) = (OnFork::Fork, vmfork_api::Labels::default());
        let request = VolumeRequest { name: "db".to_owned(), source, on_fork, labels };
        let made = disks.create_volume(request.clone(), 7, root_of).await.expect("room");
        assert_eq!((made.size_bytes, made.created_unix_ms), (DISK_BYTES_MIN, 7));
        let twice = disks.create_volume(request, 7, root_of).await.expect_err("taken");
        assert_eq!(twice.code(), ErrorCode::Conflict);
        let wanted = ["data=volume:db", "late=empty"].map(|disk| disk.parse().expect("a disk"));
        let contents = disks.contents(&wanted, root_of).await.expect("free");
        let machine = disks.attach("web", uid, &contents).expect("served").expect("disks");
        assert_eq!(disks.volume("db").expect("there").vms, ["web"]);
        let [(data, _), (late, _)] = machine.written().try_into().expect("two");
        assert_eq!((data.durability, late.durability), (Durability::Medium, Durability::Host));
        assert_eq!(machine.of_volume("db"), Some((0, "data".to_owned())));
        assert_eq!(machine.empty(None), Some((1, "late".to_owned())));
        let refused = disks.attach("other", uid, &contents).expect_err("one VM has it");
        assert_eq!(refused.to_string(), "VM `web` has the volume `db`");

        let [of_clone, late] = machine.freeze().expect("frozen").try_into().expect("two");
        assert_eq!((of_clone.spec.volume.as_ref(), of_clone.spec.empty), (None, false));
        assert_eq!(of_clone.spec.durability, Durability::Host);
        assert!(late.spec.empty, "a clone may attach to it");
        let clone = disks.attach("web.1", uid, &[of_clone, late]).expect("served");
        assert_eq!(disks.volume("db").expect("there").vms, ["web"]);
        disks.vm_ends("web");
        drop(machine);
        disks.given_back().await;
        assert_eq!(disks.volume("db").expect("there").vms, [""; 0]);
        disks.remove_volume("db").expect("free");
        assert!(clone.is_some_and(|clone| clone.freeze().is_ok()), "it has what it needs");
    }

    #[tokio::test]
    async fn other_files_may_be_replaced_and_need_no_name() {
        let setup = setup();
        let uid = rustix::process::getuid().as_raw();
        let root = setup.folder.path().join("root.img");
        File::create(&root).expect("made").set_len(DISK_BYTES_MIN).expect("sized");
        let disks = ["a=blank:1M", "b=image:default"].map(|disk| disk.parse().expect("a disk"));
        let root_of = |_: &str| Ok::<_, DiskError>(root.clone());
        let contents = setup.disks.contents(&disks, root_of).await.expect("made");
        fs::remove_file(&root).expect("replaced, in part");
        assert!(setup.disks.attach("web", uid, &contents).expect("served").is_some());
    }
}
