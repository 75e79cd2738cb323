//! Stored images between this host's store and those of other hosts: what each knows the other by.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use tokio::runtime::Handle;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_host::error::chain;
use vmfork_peers::{Cluster, StoredImages, Told, Wanted};
use vmfork_snapshots::guest_images::{Known, StoredHere};
use vmfork_snapshots::{ClusterImages, Found, Library};
use vmfork_store::{BlobError, Blobs, SnapshotId, VerifiedChunk};

/// The other hosts, for this host's store.
#[derive(Debug)]
struct Others {
    cluster: Arc<Cluster>,
    runtime: Handle,
}

/// This host's store, for the other hosts.
#[derive(Debug)]
struct Here(Weak<Library>);

/// Let the store of this host and those of others have images of each other. On a tokio runtime.
pub(super) fn connect(library: &Arc<Library>, cluster: &Arc<Cluster>) {
    let others = Others { cluster: Arc::clone(cluster), runtime: Handle::current() };
    library.snapshots.set_cluster(Arc::new(others));
    cluster.set_images(Arc::new(Here(Arc::downgrade(library))));
}

impl ClusterImages for Others {
    fn find(&self, name: &str, host: Option<&str>) -> Result<Found, ErrorBody> {
        let Told { name, id, .. } = self.cluster.find_image(&self.runtime, name, host)?;
        Ok(Found { name, id })
    }

    fn blobs(&self, id: SnapshotId) -> Arc<dyn Blobs> {
        self.cluster.image_store(&self.runtime, id)
    }
}

impl StoredImages for Here {
    fn find(&self, wanted: &Wanted) -> Option<Told> {
        let known = match wanted {
            Wanted::Name(name) => Known::Name(name),
            Wanted::Id(id) => Known::Id(*id),
        };
        let StoredHere { found, is_whole, runs } = self.0.upgrade()?.stored_image(known)?;
        Some(Told { name: found.name, id: found.id, is_whole, runs })
    }

    fn give(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let ends = || BlobError::NotFound { key: key.to_owned(), place: "the daemon".to_owned() };
        self.0.upgrade().ok_or_else(ends)?.give(key)
    }

    fn keep(&self, chunk: &VerifiedChunk<Bytes>) -> Result<(), ErrorBody> {
        let Some(library) = self.0.upgrade() else { return Ok(()) };
        library
            .keep_chunk(chunk)
            .map_err(|error| ErrorBody::new(ErrorCode::Host, "keep a chunk").cause(chain(&error)))
    }
}
