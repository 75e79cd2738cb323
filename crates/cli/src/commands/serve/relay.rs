//! An NBD socket whose clients all get what one connection to the daemon has.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use vmfork_nbd::{Client, Command, Export, Exports, Extent, NbdError, Pulse, Span, Target, serve};

use crate::failure::HintExt as _;

/// Most clients at a time.
const CLIENTS_MAX: usize = 32;

/// A socket with a thread that accepts. When it is dropped, nothing is left of its file.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    /// Device and inode.
    file: (u64, u64),
}

impl Socket {
    /// Listen there. Clients get the image by its name, by an empty one, or by any that they list.
    ///
    /// # Errors
    /// There is something else, or the folder can't be written.
    pub(super) fn listen(path: &Path, image: &str, client: Arc<Client>) -> anyhow::Result<Self> {
        let listening = || format!("listen on {}", path.display());
        remove_stale(path);
        let listener = UnixListener::bind(path)
            .with_context(listening)
            .hint("name a file that is not there, in a folder that is")?;
        let file = fs::symlink_metadata(path).with_context(listening)?;
        let socket = Self { path: path.to_owned(), file: (file.dev(), file.ino()) };
        fs::set_permissions(path, Permissions::from_mode(0o600)).with_context(listening)?;
        let names = vec![image.to_owned(), String::new()];
        let all = Arc::new(All { names, client });
        std::thread::Builder::new()
            .name("nbd-accept".to_owned())
            .spawn(move || accept(&listener, &all))
            .with_context(listening)?;
        Ok(socket)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.file) {
            let _gone = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that no process listens on.
fn remove_stale(path: &Path) {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).is_err_and(|error| refused(&error)) {
        let _gone = fs::remove_file(path);
    }
}

/// Until the process ends.
fn accept(listener: &UnixListener, all: &Arc<All>) {
    let count = Arc::new(AtomicUsize::new(0));
    for socket in listener.incoming() {
        let Ok(socket) = socket else {
            // No descriptor is left: clients that end give some back.
            std::thread::park_timeout(std::time::Duration::from_millis(100));
            continue;
        };
        if count.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
            count.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (all, counted) = (Arc::clone(all), Arc::clone(&count));
        let named = std::thread::Builder::new().name("nbd-client".to_owned());
        let spawned = named.spawn(move || {
            if let Ok(pulse) = Pulse::new() {
                let _ended = serve(&socket, &*all, &pulse);
            }
            counted.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_err() {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The image, by all its names.
#[derive(Debug)]
struct All {
    names: Vec<String>,
    client: Arc<Client>,
}

impl Exports for All {
    fn list(&self) -> Vec<Export> {
        let named = |name: &String| Export { name: name.clone(), ..self.client.export().clone() };
        self.names.iter().map(named).collect()
    }

    fn claim(&self, _export: &Export) -> Option<Arc<dyn Target>> {
        Some(Arc::new(Relay(Arc::clone(&self.client))))
    }
}

/// What another server has.
#[derive(Debug)]
struct Relay(Arc<Client>);

impl Target for Relay {
    fn extents(&self, span: Span) -> Vec<Extent> {
        let all = || vec![Extent { len_bytes: u64::from(span.len_bytes), zero: false }];
        let command = Command::BlockStatus { span, one: false };
        // Bytes that are taken for data are read, and that tells what is wrong.
        match self.0.wait_for(command, Vec::new()) {
            Ok(told) => within(told.extents, span),
            Err(_) => all(),
        }
    }

    fn is_quick(&self, command: &Command) -> bool {
        matches!(command, Command::Disconnect)
    }

    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError> {
        self.0.read(span.offset_bytes, bytes)
    }

    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError> {
        self.0.wait_for(*command, bytes.to_vec()).map(drop)
    }
}

/// The same extents, which end where the span does: a server may tell less of it, or more.
fn within(extents: Vec<Extent>, span: Span) -> Vec<Extent> {
    let mut left = u64::from(span.len_bytes);
    let mut told = Vec::with_capacity(extents.len());
    for extent in extents {
        let len_bytes = extent.len_bytes.min(left);
        if len_bytes > 0 {
            told.push(Extent { len_bytes, ..extent });
        }
        left -= len_bytes;
    }
    if left > 0 {
        told.push(Extent { len_bytes: left, zero: false });
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_ends_where_the_span_does() {
        let span = Span { offset_bytes: 0, len_bytes: 1024 };
        let extent = |len_bytes, zero| Extent { len_bytes, zero };
        for (told, shown) in [
            (vec![], vec![extent(1024, false)]),
            (vec![extent(512, true)], vec![extent(512, true), extent(512, false)]),
            (
                vec![extent(512, false), extent(4096, true)],
                vec![extent(512, false), extent(512, true)],
            ),
            (vec![extent(1024, true), extent(512, false)], vec![extent(1024, true)]),
        ] {
            assert_eq!(within(told, span), shown);
        }
    }

    #[test]
    fn a_socket_takes_the_place_of_one_without_a_listener_and_of_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        drop(UnixListener::bind(&path).expect("a socket"));
        remove_stale(&path);
        assert!(!path.exists());
        let _listens = UnixListener::bind(&path).expect("a socket");
        remove_stale(&path);
        assert!(path.exists());
        let file = folder.path().join("file");
        fs::write(&file, "kept").expect("a file");
        remove_stale(&file);
        assert!(file.exists());
    }
}
