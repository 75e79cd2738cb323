//! What can go wrong with stored snapshots, and what the API says about it.
//!
//! Each error is a value. Its wire form is made by [`SnapshotError::to_body`] alone, where an
//! operation ends and what was to be done is known.

use tokio::task::JoinError;
use vmfork_api::labels::LabelError;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_disk::ImageError;
use vmfork_engine::{EngineError, OpenError, PageLost};
use vmfork_guest_image::{ArrivalError, Remedy as _, StoreError as ImageStoreError};
use vmfork_host::disks::{DiskError, LayerError};
use vmfork_image::TableError;
use vmfork_qemu::QmpError;
use vmfork_store::{BlobError, Failure, Role, RoleError, StoreError};

use vmfork_fork::state::StateError;
use vmfork_fork::{Error as ForkError, Unlike};
use vmfork_host::error::{DOCTOR, Error as HostError, Refusal, chain};

const PLACE: &str =
    "name a folder of the daemon's host, s3://BUCKET/PREFIX, or for an image cluster://[HOST]";

/// Why an operation on stored snapshots failed. With its sources ([`chain`]) it is the cause that
/// a user reads.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("what the daemon wrote down of `{name}` can't be read")]
    Facts {
        name: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("`{name}` says {said} bytes of memory, its page table has {pages} pages")]
    Size { name: String, said: u64, pages: u64 },
    #[error("`{name}` has an image of role `{role}`, which its VM has no place for")]
    OtherImage { name: String, role: Role },
    #[error("`{name}` has no image of {bytes} bytes for its VM's disk `{disk}`")]
    NoDisk { name: String, disk: String, bytes: u64 },
    #[error(transparent)]
    GuestImage(#[from] GuestImageError),
    /// A client asks it of a snapshot of the disks alone.
    #[error("`{option}` is about the memory, which a snapshot of the disks alone does not have")]
    NeedsMemory { option: &'static str },
    /// That a client asked for.
    #[error("the snapshot `{name}` has no disk `{disk}`")]
    HasNoDisk { name: String, disk: String },
    /// As [`vmfork_host::disks::HostDisks::on_bases`] finds them.
    #[error("it is needed by {}", disk_list(disks))]
    DisksNeedIt { disks: Vec<String> },
    #[error("its image has no page table")]
    NoTable,
    #[error("it is a chain of no snapshots")]
    Empty,
    #[error("open its memory")]
    Image(#[from] OpenError),
    #[error("its disks")]
    Disk(#[from] ImageError),
    #[error("its disks")]
    DiskName(#[from] RoleError),
    #[error("its disks")]
    Table(#[source] TableError),
    #[error("its disks")]
    Layer(#[from] LayerError),
    #[error("its disks")]
    Disks(#[from] DiskError),
    #[error("serve its memory")]
    Engine(#[from] EngineError),
    #[error("its device state")]
    State(#[from] StateError),
    #[error("ask QEMU")]
    Qmp(#[from] QmpError),
    #[error("what its VM had written was not known within {seconds} s")]
    NotSealed { seconds: u64 },
    #[error(transparent)]
    Page(#[from] PageLost),
    #[error("send it")]
    Stream {
        #[source]
        source: std::io::Error,
    },
    #[error("`{location}` is no place of a store: {why}")]
    Location { location: String, why: String },
    #[error("there is no folder `{location}` on the daemon's host")]
    NoFolder { location: String },
    #[error("its profile")]
    Profile(#[source] vmfork_policy::ProfileError),
    #[error(transparent)]
    S3(#[from] vmfork_store_s3::OpenError),
    /// What other hosts say.
    #[error(transparent)]
    Cluster(ErrorBody),
    #[error("its VM has ended")]
    Ended,
    /// Of the VMs of this host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Of the VMs that are started from it.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// It can't be used yet.
    #[error("`{name}` is still being {participle}")]
    UnderWay { name: String, participle: &'static str },
    /// Another snapshot has the name.
    #[error("there is a snapshot named `{name}` already")]
    NameTaken { name: String },
    /// What is to be pulled is here by another name, and its own name is taken.
    #[error("that is here already, as `{here}`, and `{name}` is another one here")]
    HereAs { here: String, name: String },
    #[error("the pull was given up")]
    PullGivenUp,
    /// The task that did it has panicked, in a call that waits for it.
    #[error(transparent)]
    Panicked(#[from] JoinError),
    /// The task that did it has panicked, in the background.
    #[error("the daemon's own code failed; its log has more")]
    Broken,
}

/// Of guest images in a store.
#[derive(Debug, thiserror::Error)]
pub enum GuestImageError {
    #[error("`{name}` is a snapshot, and no guest image")]
    Snapshot { name: String },
    #[error("`{name}` is a guest image, and no snapshot")]
    Image { name: String },
    #[error("what is stored of the guest image `{name}` does not fit together: {why}")]
    Unfit { name: String, why: String },
    /// A snapshot can't be called so.
    #[error("the guest image `{name}` was pulled, and has the name in the store")]
    HasName { name: String },
    /// What is pulled can't be called so.
    #[error("the store has another image of the name `{name}`, as that of the image `{image}`")]
    OtherHere { name: String, image: String },
    #[error("the image `{name}` was replaced meanwhile")]
    Replaced { name: String },
    #[error("a copy of the image `{name}` is being stored already")]
    Seeding { name: String },
    #[error("the root of the image `{name}` is in the store, and hosts pull it from there")]
    Needed { name: String },
    #[error("the root of the image `{name}` is the object `{location}`, and is not copied")]
    RootObject { name: String, location: String },
    /// The folder of images.
    #[error(transparent)]
    Images(#[from] Box<ImageStoreError>),
    /// A file of an image is not what was stored, or can't be written.
    #[error(transparent)]
    Arrival(#[from] Box<ArrivalError>),
}

impl GuestImageError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Snapshot { .. }
            | Self::Image { .. }
            | Self::HasName { .. }
            | Self::OtherHere { .. }
            | Self::Replaced { .. }
            | Self::Seeding { .. }
            | Self::Needed { .. }
            | Self::RootObject { .. } => ErrorCode::Conflict,
            Self::Images(error) if matches!(**error, ImageStoreError::NotFound { .. }) => {
                ErrorCode::NotFound
            }
            Self::Arrival(error) if matches!(**error, ArrivalError::Names { .. }) => {
                ErrorCode::Conflict
            }
            Self::Unfit { .. } | Self::Images(_) | Self::Arrival(_) => ErrorCode::Host,
        }
    }

    fn remedy(&self) -> Option<String> {
        match self {
            Self::Snapshot { name } => Some(format!("`vmfork snapshot pull {name}` brings it")),
            Self::Image { name } => Some(format!("`vmfork image pull {name}` brings it")),
            Self::Unfit { .. } => Some("push it again from a host that has it".to_owned()),
            Self::HasName { .. } => Some("choose another name".to_owned()),
            Self::OtherHere { image, .. } => {
                Some(format!("remove that first: `vmfork image rm {image}`"))
            }
            Self::Replaced { .. } => Some("try again".to_owned()),
            Self::Seeding { name } => {
                Some(format!("wait, or end that: `vmfork image seed --stop {name}`"))
            }
            Self::RootObject { location, .. } => Some(format!(
                "each host reads the object itself: `vmfork image import NAME --root {location}` there"
            )),
            Self::Needed { name } => Some(format!("`vmfork image rm {name}` removes it")),
            Self::Images(error) => error.remedy(),
            Self::Arrival(error) => error.remedy(),
        }
    }
}

impl From<Box<ArrivalError>> for SnapshotError {
    fn from(error: Box<ArrivalError>) -> Self {
        Self::GuestImage(error.into())
    }
}

impl From<Refusal> for SnapshotError {
    fn from(why: Refusal) -> Self {
        Self::Host(why.into())
    }
}

impl From<LabelError> for SnapshotError {
    fn from(error: LabelError) -> Self {
        Self::Host(error.into())
    }
}

impl From<Unlike> for SnapshotError {
    fn from(error: Unlike) -> Self {
        Self::Fork(error.into())
    }
}

/// Whether another attempt may find the store there.
pub(super) fn is_away(error: &StoreError) -> bool {
    matches!(error, StoreError::Blob(BlobError::Failed { why: Failure::Unreachable, .. }))
}

impl SnapshotError {
    /// Whether it was given up, and nothing is wrong.
    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self, Self::Store(StoreError::Cancelled))
    }

    /// Whether another attempt may find the store there.
    pub(super) fn is_away(&self) -> bool {
        matches!(self, Self::Store(error) if is_away(error))
    }

    /// For the API. `message` says what was to be done: "start snapshot `warm`".
    pub(super) fn to_body(&self, message: impl Into<String>) -> ErrorBody {
        let (code, remedy) = match self {
            Self::Host(error) => return error.to_body(message),
            Self::Fork(error) => return error.to_body(message),
            Self::Cluster(error) => (error.code, error.remedy.clone()),
            Self::Store(error) => (store_code(error), error.remedy()),
            Self::S3(error @ vmfork_store_s3::OpenError::Location(_)) => {
                (ErrorCode::BadRequest, error.remedy())
            }
            Self::S3(error) => (ErrorCode::Host, error.remedy()),
            Self::Facts { name, .. } | Self::Size { name, .. } | Self::NoDisk { name, .. } => (
                ErrorCode::Conflict,
                Some(format!(
                    "it was made by another version of vmfork, or tampered with: `vmfork snapshot verify {name}`"
                )),
            ),
            Self::GuestImage(error) => (error.code(), error.remedy()),
            Self::NeedsMemory { option } => {
                (ErrorCode::BadRequest, Some(format!("leave out `{option}` or `disk_only`")))
            }
            Self::HasNoDisk { name, .. } => (
                ErrorCode::NotFound,
                Some(format!("`vmfork snapshot inspect {name}` shows what it has")),
            ),
            Self::OtherImage { .. } => (
                ErrorCode::Conflict,
                Some(
                    "start it with the version of vmfork that wrote it, or start another snapshot"
                        .to_owned(),
                ),
            ),
            Self::DisksNeedIt { .. } => (
                ErrorCode::Conflict,
                Some(
                    "end their VMs; `vmfork disk ls` lists what is left of disks, and `vmfork disk rm` removes it"
                        .to_owned(),
                ),
            ),
            Self::Disks(error) => (error.code(), error.remedy().map(str::to_owned)),
            Self::Empty | Self::Ended => (ErrorCode::Conflict, Some(DOCTOR.to_owned())),
            Self::Location { .. } => (ErrorCode::BadRequest, Some(PLACE.to_owned())),
            Self::NoFolder { .. } => (ErrorCode::NotFound, Some(PLACE.to_owned())),
            Self::UnderWay { name, .. } => (
                ErrorCode::Conflict,
                Some(format!(
                    "wait until `vmfork snapshot ls` shows `{name}` ready, or give it up: `vmfork snapshot rm {name}`"
                )),
            ),
            Self::NameTaken { name } => (
                ErrorCode::Conflict,
                Some(format!("choose another name, or `vmfork snapshot rm {name}`")),
            ),
            Self::HereAs { here, name } => (
                ErrorCode::Conflict,
                Some(format!("use `{here}`, or remove one: `vmfork snapshot rm {name}`")),
            ),
            Self::PullGivenUp => (
                ErrorCode::Conflict,
                Some("what is not here comes as it is needed; or pull it again".to_owned()),
            ),
            Self::Panicked(_) | Self::Broken => (ErrorCode::Internal, None),
            Self::Qmp(_) => (ErrorCode::Qemu, Some(DOCTOR.to_owned())),
            Self::Page(_) => (ErrorCode::PageLost, Some(DOCTOR.to_owned())),
            Self::Image(_)
            | Self::Engine(_)
            | Self::State(_)
            | Self::Stream { .. }
            | Self::Profile(_)
            | Self::Disk(_)
            | Self::DiskName(_)
            | Self::Table(_)
            | Self::Layer(_)
            | Self::NotSealed { .. }
            | Self::NoTable => (ErrorCode::Host, Some(DOCTOR.to_owned())),
        };
        ErrorBody { code, message: message.into(), cause: Some(chain(self)), remedy }
    }
}

/// The first of a few disks, and how many more there are.
fn disk_list(disks: &[String]) -> String {
    const SHOWN_MAX: usize = 5;
    let shown: Vec<_> = disks.iter().take(SHOWN_MAX).map(|disk| format!("`{disk}`")).collect();
    let shown = shown.join(", ");
    match disks.len() {
        0 => "disks of VMs that are being started".to_owned(),
        1 => format!("the disk {shown}"),
        count if count <= SHOWN_MAX => format!("the disks {shown}"),
        count => format!("the disks {shown} and {} more", count - SHOWN_MAX),
    }
}

/// The API's code for an error of the store.
fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::NotFound,
        StoreError::BadName { .. } | StoreError::BadDraft { .. } => ErrorCode::BadRequest,
        StoreError::Exists { .. }
        | StoreError::Busy { .. }
        | StoreError::Dependants { .. }
        | StoreError::UnknownDependants { .. }
        | StoreError::Changed { .. }
        | StoreError::Base { .. }
        | StoreError::DeepChain { .. }
        | StoreError::Incomplete { .. }
        | StoreError::NoImage { .. }
        | StoreError::Newer { .. }
        | StoreError::Cancelled => ErrorCode::Conflict,
        StoreError::Stream { .. } => ErrorCode::BadRequest,
        _ => ErrorCode::Host,
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
