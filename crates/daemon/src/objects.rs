//! Objects of an object store as what disks of this host begin with.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::runtime::Handle;
use vmfork_api::ErrorCode;
use vmfork_disk::DiskImage;
use vmfork_host::disks::{FLOOR_BYTES, HostDisks, ObjectBases, StoredError};
use vmfork_host::error::chain;
use vmfork_image::ImageId;
use vmfork_objects::{ObjectError, Objects};
use vmfork_store::BlobError;
use vmfork_store_s3::OpenError;

/// Has the host's disks know the objects of a state folder, and removes what none of them needs.
/// Must be called within a tokio runtime.
///
/// # Errors
/// Their folder can't be made.
pub(crate) fn know(disks: &HostDisks, state: &Path) -> anyhow::Result<()> {
    // What is fetched leaves as much again for what VMs write.
    let objects = Objects::new(&state.join("objects"), 2 * FLOOR_BYTES, Handle::current());
    let objects = objects.context("open what was fetched of objects")?;
    disks.know_objects(Arc::new(HostObjects(objects)));
    disks.prune_objects();
    Ok(())
}

/// Those of one state folder.
#[derive(Debug)]
struct HostObjects(Objects);

impl ObjectBases for HostObjects {
    fn image(&self, id: ImageId) -> Option<DiskImage> {
        self.0.image(id)
    }

    fn disk(&self, location: &str) -> Result<DiskImage, StoredError> {
        self.0.disk(location).map_err(|error| {
            let code = match &error {
                ObjectError::Location(_)
                | ObjectError::Open(OpenError::NoKey { .. })
                | ObjectError::Size { .. } => ErrorCode::BadRequest,
                ObjectError::Blob(BlobError::NotFound { .. }) => ErrorCode::NotFound,
                _ => ErrorCode::Host,
            };
            StoredError { code, cause: chain(&error), remedy: error.remedy() }
        })
    }

    fn prune(&self, is_needed: &dyn Fn(ImageId) -> bool) {
        self.0.prune(is_needed);
    }
}
