//! Stored images of other hosts as files of a store: what the host's own store reads from.

use std::io::{Cursor, Read};
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;
use vmfork_api::ErrorBody;
use vmfork_store::{BlobError, Blobs, Failure, KeyOf, SnapshotId, is_origin};

use crate::cluster::Cluster;
use crate::error::{ClusterError, StoredError};
use crate::stored::{Images, Reader, Told};

/// How many chunks are fetched at a time.
const IN_FLIGHT: usize = 16;

impl Cluster {
    /// What other hosts get of stored images.
    pub fn set_images(&self, images: Arc<dyn Images>) {
        self.this.stored.set_here(images);
    }

    /// Which stored image of other hosts a name means, on `host` if one is named. Blocking; not in
    /// a task of the runtime.
    ///
    /// # Errors
    /// No host has one of that name, or several have different ones; this host is in no cluster.
    pub fn find_image(
        &self,
        runtime: &Handle,
        name: &str,
        host: Option<&str>,
    ) -> Result<Told, ErrorBody> {
        let message = format!("find image `{name}` in the cluster");
        let member = self.member().ok_or(StoredError::Cluster(ClusterError::NoMore));
        let found = member
            .and_then(|member| runtime.block_on(self.this.stored.find(&member.hosts, name, host)));
        found.map_err(|error| error.to_body(message))
    }

    /// The files of a stored image of other hosts.
    pub fn image_store(self: &Arc<Self>, runtime: &Handle, id: SnapshotId) -> Arc<dyn Blobs> {
        let cluster = Arc::downgrade(self);
        Arc::new(PeerStore {
            cluster,
            reader: self.this.stored.reader(id),
            runtime: runtime.clone(),
        })
    }
}

/// A stored image of other hosts, for reading.
#[derive(Debug)]
struct PeerStore {
    cluster: Weak<Cluster>,
    reader: Option<Reader>,
    runtime: Handle,
}

impl PeerStore {
    fn failed(
        &self,
        action: &'static str,
        key: &str,
        why: Failure,
        source: StoredError,
    ) -> BlobError {
        let (key, place) = (key.to_owned(), self.describe());
        BlobError::Failed { action, key, place, why, source: Box::new(source) }
    }

    fn read_only(&self, action: &'static str, key: &str) -> BlobError {
        self.failed(action, key, Failure::ReadOnly, StoredError::ReadOnly)
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, StoredError> {
        // Where its chunks are, is decided here.
        if is_origin(key) {
            return Ok(None);
        }
        let member = self.cluster.upgrade().and_then(|cluster| cluster.member());
        let hosts = &member.as_ref().ok_or(ClusterError::NoMore)?.hosts;
        let swarm = self.reader.as_ref().ok_or(ClusterError::Leaving)?.swarm();
        Ok(match KeyOf::parse(key) {
            Some(KeyOf::Chunk(hash)) => {
                let chunk = self.runtime.block_on(swarm.chunk(hosts, key, hash, false));
                Some(chunk.map_err(StoredError::Missing)?.into())
            }
            _ => {
                let file = self.runtime.block_on(swarm.file(hosts, key));
                file.map_err(|missing| StoredError::Missing(Arc::new(missing)))?.map(Vec::from)
            }
        })
    }
}

impl Blobs for PeerStore {
    fn describe(&self) -> String {
        "the cluster".to_owned()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        match self.try_get(key) {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(BlobError::NotFound { key: key.to_owned(), place: self.describe() }),
            // Another attempt finds the same damage.
            Err(error) if error.is_damage() => {
                Err(self.failed("get", key, Failure::Damaged, error))
            }
            Err(error) => Err(self.failed("get", key, Failure::Unreachable, error)),
        }
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        Ok(Box::new(Cursor::new(self.get(key)?)))
    }

    fn put(&self, key: &str, _: &[u8]) -> Result<(), BlobError> {
        Err(self.read_only("put", key))
    }

    fn put_for_good(&self, key: &str, _: &[u8]) -> Result<(), BlobError> {
        Err(self.read_only("put", key))
    }

    fn put_new(&self, key: &str, _: &[u8]) -> Result<bool, BlobError> {
        Err(self.read_only("put", key))
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        match self.get(key) {
            Ok(file) => Ok(Some(file.len() as u64)),
            Err(BlobError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        Err(self.read_only("list", prefix))
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        Err(self.read_only("delete", key))
    }

    fn sync(&self) -> Result<(), BlobError> {
        Ok(())
    }

    fn verifies_chunks(&self) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        IN_FLIGHT
    }
}
