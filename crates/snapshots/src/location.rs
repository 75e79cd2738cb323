//! Stores at a location: a folder of this host, an object store, or the stores of the hosts of this
//! host's cluster.
//!
//! ```text
//!   /srv/store          a folder
//!   s3://BUCKET/PREFIX  an object store
//!   cluster://[HOST]    images that hosts have, or that one has
//!   cluster:///ID       one of them, by the ID of what is stored: what a pulled image depends on
//! ```

use std::fmt::Debug;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;
use vmfork_api::ErrorBody;
use vmfork_store::{Blobs, Folder, SnapshotId, Store, StoreError};
use vmfork_store_s3::{Location, OpenError, S3, Settings};

use crate::error::SnapshotError;

const S3_SCHEME: &str = "s3://";
const CLUSTER_SCHEME: &str = "cluster://";

/// What is wanted of another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// It must be there.
    Reading,
    /// It is made if need be.
    Writing,
}

/// A stored guest image of other hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What their stores call it.
    pub name: String,
    pub id: SnapshotId,
}

/// The stored guest images of the other hosts of a cluster.
pub trait ClusterImages: Debug + Send + Sync {
    /// Which stored image a name means on a host, or on any. Blocking.
    ///
    /// # Errors
    /// None has it, or several mean different images.
    fn find(&self, name: &str, host: Option<&str>) -> Result<Found, ErrorBody>;

    /// The files of a stored image, for reading. Nothing is asked yet.
    fn blobs(&self, id: SnapshotId) -> Arc<dyn Blobs>;
}

/// Where stores are reached from.
#[derive(Debug)]
pub(super) struct Places {
    /// For stores that are reached over a network.
    runtime: Handle,
    cluster: OnceLock<Arc<dyn ClusterImages>>,
}

impl Places {
    pub(super) fn new(runtime: Handle) -> Self {
        Self { runtime, cluster: OnceLock::new() }
    }

    pub(super) fn set_cluster(&self, cluster: Arc<dyn ClusterImages>) {
        let _first = self.cluster.set(cluster);
    }

    /// The location at which a guest image is pulled, and its name there: in a cluster, those of
    /// the stored image that `name` means now. Blocking.
    ///
    /// # Errors
    /// It can't be told.
    pub(super) fn resolve(
        &self,
        name: &str,
        location: &str,
    ) -> Result<(String, String), SnapshotError> {
        let Some(host) = location.strip_prefix(CLUSTER_SCHEME) else {
            return Ok((name.to_owned(), location.to_owned()));
        };
        if host.contains('/') {
            return Err(wrong(location, "a host's name follows, or nothing"));
        }
        let host = Some(host).filter(|host| !host.is_empty());
        let found = self.cluster(location)?.find(name, host).map_err(SnapshotError::Cluster)?;
        Ok((found.name, format!("{CLUSTER_SCHEME}/{}", found.id)))
    }

    /// The store at a location.
    ///
    /// # Errors
    /// There is none, or it can't be reached.
    pub(super) fn store_at(&self, location: &str, wanted: For) -> Result<Store, SnapshotError> {
        if location.starts_with(CLUSTER_SCHEME) {
            return match wanted {
                For::Reading => Ok(Store::existing(self.blobs_at(location)?)?),
                For::Writing => {
                    Err(wrong(location, "hosts pull images: `vmfork image seed` offers one"))
                }
            };
        }
        if location.starts_with(S3_SCHEME) {
            let location = location.parse::<Location>().map_err(OpenError::from)?;
            let s3 = S3::open(&location, &Settings::from_env()?, self.runtime.clone())?;
            return Ok(match wanted {
                For::Reading => Store::existing(Arc::new(s3))?,
                For::Writing => Store::new(Arc::new(s3))?,
            });
        }
        Ok(Store::folder(folder_at(location, wanted)?)?)
    }

    /// What the store at a location is kept in, for reading. A network is not asked for anything
    /// yet.
    ///
    /// # Errors
    /// It is no location, or no folder.
    pub(super) fn blobs_at(&self, location: &str) -> Result<Arc<dyn Blobs>, SnapshotError> {
        if location.starts_with(S3_SCHEME) {
            let location = location.parse::<Location>().map_err(OpenError::from)?;
            return Ok(Arc::new(S3::new(&location, &Settings::from_env()?, self.runtime.clone())?));
        }
        if let Some(rest) = location.strip_prefix(CLUSTER_SCHEME) {
            let id = rest.strip_prefix('/').and_then(|id| id.parse().ok());
            let id = id.ok_or_else(|| wrong(location, "only images are pulled from a cluster"))?;
            return Ok(self.cluster(location)?.blobs(id));
        }
        let folder = Folder::new(folder_at(location, For::Reading)?).map_err(StoreError::from)?;
        Ok(Arc::new(folder))
    }

    fn cluster(&self, location: &str) -> Result<&Arc<dyn ClusterImages>, SnapshotError> {
        self.cluster.get().ok_or_else(|| wrong(location, "this host is in no cluster"))
    }
}

fn wrong(location: &str, why: &str) -> SnapshotError {
    SnapshotError::Location { location: location.to_owned(), why: why.to_owned() }
}

fn folder_at(location: &str, wanted: For) -> Result<&Path, SnapshotError> {
    if let Some((scheme, _)) = location.split_once("://") {
        return Err(wrong(location, &format!("stores of `{scheme}` are not known")));
    }
    let path = Path::new(location);
    if !path.is_absolute() {
        return Err(wrong(location, "a folder is named by its path from the root"));
    }
    if wanted == For::Reading && !path.is_dir() {
        return Err(SnapshotError::NoFolder { location: location.to_owned() });
    }
    Ok(path)
}
