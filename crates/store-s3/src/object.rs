//! One object as it is: its bytes by ranges, all of one version.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use object_store::{GetOptions, GetRange, ObjectStoreExt as _};
use tokio::runtime::Handle;
use vmfork_store::{BlobError, Failure};

use crate::location::Location;
use crate::settings::{OpenError, Settings};
use crate::store::S3;

/// What tells one content of an object from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    pub size_bytes: u64,
    pub etag: String,
    /// Of a bucket that keeps versions: the content can be read after it was replaced.
    pub version: Option<String>,
}

/// An object that is read in parts. Nothing is asked before the first call.
#[derive(Debug)]
pub struct RawObject(S3);

impl RawObject {
    /// # Errors
    /// The location names a bucket alone, or as [`S3::new`].
    pub fn new(
        location: &Location,
        settings: &Settings,
        runtime: Handle,
    ) -> Result<Self, OpenError> {
        if location.prefix.is_empty() {
            return Err(OpenError::NoKey { location: location.to_string() });
        }
        Ok(Self(S3::new(location, settings, runtime)?))
    }

    /// Where it is, for messages.
    pub fn describe(&self) -> &str {
        &self.0.place
    }

    /// What it holds now.
    ///
    /// # Errors
    /// It can't be reached, or the server has no name for its content.
    pub fn version(&self) -> Result<ObjectVersion, BlobError> {
        let S3 { objects, prefix, .. } = &self.0;
        let found = self.0.call("look at", prefix.as_ref(), 0, objects.head(prefix))?;
        let none = "the server gives no ETag, by which its content is known again";
        let none = || self.0.failed("look at", prefix.as_ref(), Failure::Other, none);
        let etag = found.e_tag.ok_or_else(none)?;
        Ok(ObjectVersion { size_bytes: found.size, etag, version: found.version })
    }

    /// Bytes of that version.
    ///
    /// # Errors
    /// It can't be reached, or the object has another content now.
    pub fn read(&self, of: &ObjectVersion, range: Range<u64>) -> Result<Bytes, BlobError> {
        let S3 { objects, prefix, .. } = &self.0;
        let (wanted, key) = (range.end - range.start, prefix.as_ref());
        let options = GetOptions {
            if_match: Some(of.etag.clone()),
            version: of.version.clone(),
            range: Some(GetRange::Bounded(range)),
            ..GetOptions::default()
        };
        let found = self.0.call("get", key, 0, objects.get_opts(prefix, options))?;
        // A server may not know `If-Match`.
        if found.meta.e_tag.as_ref() != Some(&of.etag) || found.meta.size != of.size_bytes {
            let text = "the server gave the bytes of another content";
            return Err(self.0.failed("get", key, Failure::Changed, text));
        }
        let mut pieces = found.into_stream();
        let bytes = self.0.call("get", key, wanted, async {
            let mut all = BytesMut::new();
            while let Some(piece) = pieces.next().await {
                all.extend_from_slice(&piece?);
                if all.len() as u64 > wanted {
                    break;
                }
            }
            Ok(all.freeze())
        })?;
        if bytes.len() as u64 == wanted {
            return Ok(bytes);
        }
        let text = format!("{} bytes came in place of {wanted}", bytes.len());
        Err(self.0.failed("get", key, Failure::Damaged, &text))
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use object_store::path::Path;

    use super::*;

    #[test]
    fn bytes_are_those_of_the_version_or_none() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build();
        let runtime = runtime.expect("threads");
        let (objects, at) = (InMemory::new(), Path::from("disks/base.raw"));
        let put = |objects: &dyn object_store::ObjectStore, bytes: &'static [u8]| {
            runtime.block_on(objects.put(&at, bytes.into())).expect("put");
        };
        put(&objects, b"0123456789");
        let object = RawObject(S3::of_objects(Box::new(objects), &at, runtime.handle().clone()));
        let version = object.version().expect("it is there");
        assert_eq!(version.size_bytes, 10);
        assert_eq!(&object.read(&version, 3..7).expect("read")[..], b"3456");
        let short = object.read(&version, 8..12).expect_err("it ends before");
        assert!(matches!(short, BlobError::Failed { .. }), "{short}");
        put(&*object.0.objects, b"ABCDEFGHIJ");
        let error = object.read(&version, 3..7).expect_err("it is another one");
        assert!(matches!(error, BlobError::Failed { why: Failure::Changed, .. }), "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("restore")));
        let newer = object.version().expect("it is there");
        assert_eq!(&object.read(&newer, 3..7).expect("read")[..], b"DEFG");
    }
}
