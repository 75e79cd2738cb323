//! Who gives an object's bytes.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use vmfork_store::BlobError;
use vmfork_store_s3::{ObjectVersion, RawObject};

/// One object.
pub(crate) trait Reader: Debug + Send + Sync {
    /// What it holds now. Blocking, with a bound.
    fn version(&self) -> Result<ObjectVersion, BlobError>;

    /// Bytes of that content. Blocking, with a bound.
    fn read(&self, of: &ObjectVersion, range: Range<u64>) -> Result<Bytes, BlobError>;
}

/// An object whose reader is made when the first byte is wanted: what is on the host can be read
/// without credentials.
pub(crate) struct Later {
    make: Box<dyn Fn() -> Result<Arc<dyn Reader>, BlobError> + Send + Sync>,
    made: OnceLock<Arc<dyn Reader>>,
}

impl Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("made", &self.made).finish_non_exhaustive()
    }
}

impl Later {
    pub(crate) fn new(
        make: impl Fn() -> Result<Arc<dyn Reader>, BlobError> + Send + Sync + 'static,
    ) -> Self {
        Self { make: Box::new(make), made: OnceLock::new() }
    }

    fn reader(&self) -> Result<&Arc<dyn Reader>, BlobError> {
        match self.made.get() {
            Some(made) => Ok(made),
            None => (self.make)().map(|made| self.made.get_or_init(|| made)),
        }
    }
}

impl Reader for Later {
    fn version(&self) -> Result<ObjectVersion, BlobError> {
        self.reader()?.version()
    }

    fn read(&self, of: &ObjectVersion, range: Range<u64>) -> Result<Bytes, BlobError> {
        self.reader()?.read(of, range)
    }
}

impl Reader for RawObject {
    fn version(&self) -> Result<ObjectVersion, BlobError> {
        RawObject::version(self)
    }

    fn read(&self, of: &ObjectVersion, range: Range<u64>) -> Result<Bytes, BlobError> {
        RawObject::read(self, of, range)
    }
}
