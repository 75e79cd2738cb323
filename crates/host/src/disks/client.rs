//! Disks that programs of the host read and write, beside VMs.
//!
//! ```text
//!   content ─► Served ─► a thread that speaks NBD ◄──socket──► one client
//! ```
//!
//! Promises: a client has what it asked for until it closes its socket. What it wrote goes then,
//! unless it wrote to a volume. Clients are bounded by [`CLIENTS_MAX`].

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmfork_disk::DiskExport;
use vmfork_nbd::{Export, Exports, Pulse, ServeError, Target, serve};

use super::{DiskContent, DiskError, HostDisks, check_base};

/// Most clients at a time. Each has some threads and descriptors.
const CLIENTS_MAX: usize = 64;
/// What the notes on a client's layer say of its VM.
const NO_VM: &str = "(a client)";

/// How many clients there are.
#[derive(Debug, Default)]
pub(super) struct Clients(Arc<AtomicUsize>);

impl Clients {
    fn enter(&self) -> Option<Place> {
        let more = |count: usize| (count < CLIENTS_MAX).then_some(count + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Place(Arc::clone(&self.0)))
    }
}

/// One of them.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl HostDisks {
    /// Serve the content to one client: the export `name`, by NBD. → the client's end of the
    /// socket. By `description` it knows the content again. What it writes goes to a layer of its
    /// own, or to the volume. Blocking: makes files.
    ///
    /// # Errors
    /// There are too many clients, a VM has the volume, or there is no room.
    pub fn serve_client(
        &self,
        name: &str,
        description: &str,
        content: &DiskContent,
    ) -> Result<UnixStream, DiskError> {
        let place = self.clients.enter().ok_or(DiskError::Clients)?;
        check_base(content)?;
        let served = self.serve(NO_VM, content)?;
        self.live.add(&[Arc::clone(served.disk())]);
        let (client, ours) = UnixStream::pair().map_err(DiskError::Serve)?;
        let pulse = Pulse::new().map_err(DiskError::Serve)?;
        let (name, description) = (name.to_owned(), description.to_owned());
        let export = One { name, description, export: Arc::new(served.export().copied()) };
        let named = std::thread::Builder::new().name("disk-client".to_owned());
        let work = move || {
            if let Err(error) = serve(&ours, &export, &pulse) {
                told(&export.name, &error);
            }
            // What it wrote to a volume is on the medium before another may have it.
            drop((export, served));
            drop((ours, place));
        };
        named.spawn(work).map_err(DiskError::Thread)?;
        Ok(client)
    }
}

fn told(name: &str, error: &ServeError) {
    match error {
        ServeError::Socket(error) if error.kind() != io::ErrorKind::Other => {
            tracing::debug!(name, %error, "a client of a disk went");
        }
        error => tracing::warn!(name, %error, "the connection of a client of a disk ended"),
    }
}

/// The one export of a client.
#[derive(Debug)]
struct One {
    name: String,
    description: String,
    export: Arc<DiskExport>,
}

impl Exports for One {
    fn list(&self) -> Vec<Export> {
        let description = self.description.clone();
        vec![Export { description, ..self.export.described(self.name.as_str()) }]
    }

    fn claim(&self, _export: &Export) -> Option<Arc<dyn Target>> {
        Some(Arc::<DiskExport>::clone(&self.export))
    }
}
