//! Blobs as objects.

use std::error::Error as _;
use std::fmt;
use std::io::{self, Read};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use object_store::aws::AmazonS3Builder;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    RetryConfig,
};
use tokio::runtime::Handle;
use vmfork_store::{BlobError, Blobs, Failure, bytes_max};

use crate::location::Location;
use crate::settings::{OpenError, Settings};

/// How often something is tried again that could go better.
const RETRIES_MAX: usize = 3;
/// Between two attempts, at most.
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// What is larger is sent in parts, several at a time.
const PART_BYTES: usize = 8 << 20;
const PARTS_IN_FLIGHT: usize = 4;
/// Requests that are under way at a time: each is answered after 10 ms or more, and a core has
/// little to do meanwhile.
const IN_FLIGHT: usize = 16;
/// Slower than 1 MiB/s, and a transfer has failed, though it shows signs of life.
const BYTES_PER_S_MIN: u64 = 1 << 20;

/// A store's blobs below a prefix of a bucket.
pub struct S3 {
    pub(crate) objects: Box<dyn ObjectStore>,
    pub(crate) prefix: Path,
    runtime: Handle,
    pub(crate) place: String,
    /// Longest for a call that moves no more than a page of bytes.
    call_max: Duration,
    patience: Duration,
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3").field("place", &self.place).finish_non_exhaustive()
    }
}

impl S3 {
    /// Sets it up, and asks nothing of it yet. `runtime` must have worker threads of its own.
    ///
    /// # Errors
    /// It is not encrypted where that is not allowed, or the settings make no sense.
    pub fn new(
        location: &Location,
        settings: &Settings,
        runtime: Handle,
    ) -> Result<Self, OpenError> {
        settings.check()?;
        let client = ClientOptions::new()
            .with_allow_http(settings.allow_http)
            .with_connect_timeout(settings.patience)
            .with_read_timeout(settings.patience)
            // Of a whole transfer, which takes as long as it has bytes: bounded below, by those.
            .with_timeout_disabled();
        let attempts = u32::try_from(RETRIES_MAX + 1).unwrap_or(u32::MAX);
        let call_max = (settings.patience + BACKOFF_MAX) * attempts;
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&location.bucket)
            .with_region(&settings.region)
            .with_access_key_id(&settings.access_key_id)
            .with_secret_access_key(&settings.secret_access_key)
            .with_client_options(client)
            .with_retry(RetryConfig {
                max_retries: RETRIES_MAX,
                retry_timeout: call_max,
                backoff: BackoffConfig { max_backoff: BACKOFF_MAX, ..BackoffConfig::default() },
            });
        let mut place = location.to_string();
        if let Some(token) = &settings.session_token {
            builder = builder.with_token(token);
        }
        if let Some(endpoint) = &settings.endpoint {
            builder = builder.with_endpoint(endpoint).with_allow_http(settings.allow_http);
            place = format!("{place} at {endpoint}");
        }
        let setup = |e: String| OpenError::Settings { why: e };
        let objects = Box::new(builder.build().map_err(|e| setup(e.to_string()))?);
        let prefix = Path::parse(&location.prefix).map_err(|e| setup(e.to_string()))?;
        Ok(Self { objects, prefix, runtime, place, call_max, patience: settings.patience })
    }

    /// Sets it up and looks whether it can be reached.
    ///
    /// # Errors
    /// As [`S3::new`]; it can't be reached, the credentials are wrong, or there is no such bucket.
    pub fn open(
        location: &Location,
        settings: &Settings,
        runtime: Handle,
    ) -> Result<Self, OpenError> {
        let it = Self::new(location, settings, runtime)?;
        // Of what a bucket is missing only a listing's answer says so.
        let first = it.call("list", "", 0, async {
            it.objects.list(Some(&it.prefix)).next().await.transpose()
        });
        first.map_err(|error| match error {
            BlobError::NotFound { key, place } => BlobError::Failed {
                action: "list",
                key,
                place,
                why: Failure::NoPlace,
                source: "there is no such bucket".into(),
            },
            other => other,
        })?;
        Ok(it)
    }

    fn path(&self, key: &str) -> Result<Path, BlobError> {
        let bad = || BlobError::BadKey { key: key.to_owned() };
        let relative = Path::parse(key).map_err(|_| bad())?;
        // What is left after normalising must be what was asked for.
        if key.is_empty()
            || relative.as_ref() != key
            || key.split('/').any(|part| part.starts_with('.'))
        {
            return Err(bad());
        }
        Ok(self.prefix.parts().chain(relative.parts()).collect())
    }

    /// Waits for an answer, so long as moving `bytes` may take.
    pub(crate) fn call<T>(
        &self,
        action: &'static str,
        key: &str,
        bytes: u64,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, BlobError> {
        let most = self.call_max + Duration::from_secs(bytes / BYTES_PER_S_MIN);
        let answer = async { tokio::time::timeout(most, answer).await };
        match self.runtime.block_on(answer) {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.error(action, key, &error)),
            Err(_) => Err(self.failed(
                action,
                key,
                Failure::Unreachable,
                &format!("no answer within {} s", most.as_secs()),
            )),
        }
    }

    pub(crate) fn failed(
        &self,
        action: &'static str,
        key: &str,
        why: Failure,
        text: &str,
    ) -> BlobError {
        let (key, place) = (key.to_owned(), self.place.clone());
        BlobError::Failed { action, key, place, why, source: text.into() }
    }

    fn error(&self, action: &'static str, key: &str, error: &object_store::Error) -> BlobError {
        use object_store::Error;
        // The text has the whole chain in it, so it goes on as the only cause.
        let text = error.to_string();
        let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
        let why = match error {
            // A listing's errors are all generic: only the text tells them apart.
            _ if says(&["<Code>NoSuchBucket</Code>"]) => Failure::NoPlace,
            Error::NotFound { .. } => {
                return BlobError::NotFound { key: key.to_owned(), place: self.place.clone() };
            }
            Error::Precondition { .. } => Failure::Changed,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Failure::Denied,
            Error::Generic { .. } if is_unreachable(error) => Failure::Unreachable,
            Error::Generic { .. } if says(&["code: 401", "code: 403"]) => Failure::Denied,
            Error::Generic { .. } if says(&["code: 507", "<Code>QuotaExceeded"]) => Failure::Full,
            _ => Failure::Other,
        };
        self.failed(action, key, why, &text)
    }

    /// The bytes of an object, not yet read, and how many they are.
    fn start(
        &self,
        key: &str,
    ) -> Result<(BoxStream<'static, object_store::Result<Bytes>>, u64), BlobError> {
        let path = self.path(key)?;
        let found = self.call("get", key, 0, self.objects.get(&path))?;
        let bytes = found.meta.size;
        if bytes > bytes_max(key) {
            return Err(BlobError::TooLarge {
                key: key.to_owned(),
                place: self.place.clone(),
                bytes,
            });
        }
        Ok((found.into_stream(), bytes))
    }
}

/// Whether the cause is that no server answered, or not for long enough.
fn is_unreachable(error: &object_store::Error) -> bool {
    let mut cause = error.source();
    while let Some(at) = cause {
        if let Some(http) = at.downcast_ref::<HttpError>() {
            return matches!(
                http.kind(),
                HttpErrorKind::Connect
                    | HttpErrorKind::Timeout
                    | HttpErrorKind::Request
                    | HttpErrorKind::Interrupted
            );
        }
        cause = at.source();
    }
    false
}

/// An object that is read as it comes.
struct Streaming {
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    rest: Bytes,
    /// Still to come, besides `rest`.
    left_bytes: u64,
    runtime: Handle,
    /// For a piece.
    most: Duration,
}

impl Read for Streaming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && self.left_bytes > 0 && !into.is_empty() {
            let next = async { tokio::time::timeout(self.most, self.stream.next()).await };
            let piece = match self.runtime.block_on(next) {
                Ok(Some(piece)) => piece.map_err(io::Error::other)?,
                Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(_) => return Err(io::ErrorKind::TimedOut.into()),
            };
            self.left_bytes = self.left_bytes.saturating_sub(piece.len() as u64);
            self.rest = piece;
        }
        let bytes = into.len().min(self.rest.len());
        into[..bytes].copy_from_slice(&self.rest.split_to(bytes));
        Ok(bytes)
    }
}

impl Blobs for S3 {
    fn describe(&self) -> String {
        self.place.clone()
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, BlobError> {
        let (mut stream, bytes) = self.start(key)?;
        // Grows as bytes come, whatever the server has said.
        self.call("get", key, bytes, async {
            let mut all = Vec::new();
            while let Some(piece) = stream.next().await {
                all.extend_from_slice(&piece?);
                if all.len() as u64 > bytes {
                    break; // More than it has said: what is wrong with it, who reads it tells.
                }
            }
            Ok(all)
        })
    }

    fn reader(&self, key: &str) -> Result<Box<dyn Read + Send>, BlobError> {
        let (stream, left_bytes) = self.start(key)?;
        let (runtime, most) = (self.runtime.clone(), self.patience + BACKOFF_MAX);
        Ok(Box::new(Streaming { stream, rest: Bytes::new(), left_bytes, runtime, most }))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        let path = self.path(key)?;
        let len = bytes.len() as u64;
        if bytes.len() <= PART_BYTES {
            let payload = Bytes::copy_from_slice(bytes).into();
            return self.call("put", key, len, self.objects.put(&path, payload)).map(drop);
        }
        let mut upload = self.call("put", key, 0, self.objects.put_multipart(&path))?;
        let put = self.call("put", key, len, async {
            let parts = stream::iter(bytes.chunks(PART_BYTES))
                .map(|part| upload.put_part(Bytes::copy_from_slice(part).into()));
            let mut sent = parts.buffer_unordered(PARTS_IN_FLIGHT);
            while let Some(part) = sent.next().await {
                part?;
            }
            drop(sent);
            upload.complete().await.map(drop)
        });
        if put.is_err() {
            // Or the server keeps the parts, and has them paid for. If it doesn't hear this either,
            // a rule of the bucket has to (docs/format.md).
            let _left = self.call("put", key, 0, upload.abort());
        }
        put
    }

    /// Each PUT is.
    fn put_for_good(&self, key: &str, bytes: &[u8]) -> Result<(), BlobError> {
        self.put(key, bytes)
    }

    fn put_new(&self, key: &str, bytes: &[u8]) -> Result<bool, BlobError> {
        let path = self.path(key)?;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let payload = Bytes::copy_from_slice(bytes).into();
        let put = async {
            match self.objects.put_opts(&path, payload, options).await {
                Ok(_) => Ok(true),
                Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        };
        if self.call("put", key, bytes.len() as u64, put)? {
            return Ok(true);
        }
        // An attempt whose answer was lost may have put it there, and been told so by the next one.
        Ok(self.get(key)? == bytes)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, BlobError> {
        let path = self.path(key)?;
        match self.call("look at", key, 0, self.objects.head(&path)) {
            Ok(found) => Ok(Some(found.size)),
            Err(BlobError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, BlobError> {
        let below = match prefix.strip_suffix('/') {
            Some(folder) => self.path(folder)?,
            None if prefix.is_empty() => self.prefix.clone(),
            None => return Err(BlobError::BadKey { key: prefix.to_owned() }),
        };
        let mut keys = Vec::new();
        let mut objects = self.objects.list(Some(&below));
        // A thousand keys an answer: the bound is for each.
        while let Some(object) =
            self.call("list", prefix, 0, async { objects.next().await.transpose() })?
        {
            if let Some(parts) = object.location.prefix_match(&self.prefix) {
                let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
                keys.push(parts.join("/"));
            }
        }
        Ok(keys)
    }

    fn delete(&self, key: &str) -> Result<(), BlobError> {
        let path = self.path(key)?;
        match self.call("delete", key, 0, self.objects.delete(&path)) {
            Ok(()) | Err(BlobError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn in_flight(&self) -> usize {
        IN_FLIGHT
    }

    /// Each PUT is durable when it has been answered.
    fn sync(&self) -> Result<(), BlobError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    impl S3 {
        /// Of another kind.
        pub(crate) fn of_objects(
            objects: Box<dyn ObjectStore>,
            prefix: &Path,
            runtime: Handle,
        ) -> Self {
            let (prefix, place) = (prefix.clone(), "memory".to_owned());
            let most = Duration::from_secs(20);
            Self { objects, prefix, runtime, place, call_max: most, patience: most }
        }
    }

    /// Blobs in objects in memory, below `prefix`, and the threads that serve them.
    fn blobs(prefix: &str) -> (S3, tokio::runtime::Runtime) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build();
        let runtime = runtime.expect("threads");
        let prefix = Path::parse(prefix).expect("a path");
        let objects = Box::new(InMemory::new());
        (S3::of_objects(objects, &prefix, runtime.handle().clone()), runtime)
    }

    #[test]
    fn objects_are_blobs_below_a_prefix() {
        let (blobs, _runtime) = blobs("some/where");
        assert!(blobs.get("a/b").expect_err("nothing").is_not_found());
        blobs.put("a/b", b"one").expect("put");
        blobs.put("a/b", b"two!").expect("put");
        assert_eq!(blobs.get("a/b").expect("there"), b"two!");
        assert_eq!(blobs.size("a/b").expect("told"), Some(4));
        assert!(!blobs.put_new("a/b", b"three").expect("told"));
        assert!(blobs.put_new("a/d", b"").expect("put"));
        let mut keys = blobs.list("").expect("listed");
        keys.sort();
        assert_eq!(keys, ["a/b", "a/d"]);
        blobs.delete("a/b").expect("deleted");
        blobs.delete("a/b").expect("again");
        assert_eq!(blobs.list("a/").expect("listed"), ["a/d"]);
        for key in ["../x", "a//b", "/a", "a/.hidden", ""] {
            assert!(matches!(blobs.get(key), Err(BlobError::BadKey { .. })), "{key}");
        }
    }

    #[test]
    fn a_large_blob_goes_in_parts_and_comes_back_whole() {
        let (blobs, _runtime) = blobs("");
        let bytes: Vec<u8> = (0..20_000_001u32).map(|i| (i >> 7).to_le_bytes()[0]).collect();
        blobs.put("large", &bytes).expect("put");
        assert!(blobs.get("large").expect("there") == bytes);
        let mut read = Vec::new();
        blobs.reader("large").expect("there").read_to_end(&mut read).expect("reads");
        assert!(read == bytes);
    }
}
