//! Stores at a location: a folder of this host, or an object store.

use std::path::Path;
use std::sync::Arc;

use tokio::runtime::Handle;
use vmfork_store::{Blobs, Folder, Store, StoreError};
use vmfork_store_s3::{Location, OpenError, S3, Settings};

use crate::error::SnapshotError;

/// What is wanted of another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// It must be there.
    Reading,
    /// It is made if need be.
    Writing,
}

/// The store at a location.
pub(super) fn store_at(
    location: &str,
    wanted: For,
    runtime: &Handle,
) -> Result<Store, SnapshotError> {
    if location.starts_with("s3://") {
        let location = location.parse::<Location>().map_err(OpenError::from)?;
        let s3 = S3::open(&location, &Settings::from_env()?, runtime.clone())?;
        return Ok(match wanted {
            For::Reading => Store::existing(Arc::new(s3))?,
            For::Writing => Store::new(Arc::new(s3))?,
        });
    }
    Ok(Store::folder(folder_at(location, wanted)?)?)
}

/// What the store at a location is kept in, for reading. A network is not asked for anything yet.
pub(super) fn blobs_at(location: &str, runtime: &Handle) -> Result<Arc<dyn Blobs>, SnapshotError> {
    if location.starts_with("s3://") {
        let location = location.parse::<Location>().map_err(OpenError::from)?;
        return Ok(Arc::new(S3::new(&location, &Settings::from_env()?, runtime.clone())?));
    }
    let folder = Folder::new(folder_at(location, For::Reading)?).map_err(StoreError::from)?;
    Ok(Arc::new(folder))
}

fn folder_at(location: &str, wanted: For) -> Result<&Path, SnapshotError> {
    if let Some((scheme, _)) = location.split_once("://") {
        return Err(SnapshotError::Location {
            location: location.to_owned(),
            why: format!("stores of `{scheme}` are not known"),
        });
    }
    let path = Path::new(location);
    if !path.is_absolute() {
        return Err(SnapshotError::Location {
            location: location.to_owned(),
            why: "a folder is named by its path from the root".to_owned(),
        });
    }
    if wanted == For::Reading && !path.is_dir() {
        return Err(SnapshotError::NoFolder { location: location.to_owned() });
    }
    Ok(path)
}
