//! The disks of this host, as [`DiskControl`].

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use vmfork_api::{ErrorBody, ErrorCode, HostDisk, ResizeRequest};
use vmfork_control::{Answer, DiskControl, DiskStream};
use vmfork_host::disks::{DiskContent, DiskError, HostDisks};
use vmfork_host::error::chain;

use super::Hub;

/// Pieces between a disk and a client: 4 MiB.
const PIECES_MAX: usize = 4;
/// How long a client may take no piece.
const IDLE_MAX: Duration = Duration::from_secs(60);

impl DiskControl for Hub {
    fn disks(&self) -> Answer<'_, Vec<HostDisk>> {
        self.on_disks("list the disks".to_owned(), HostDisks::list).boxed()
    }

    fn inspect_disk<'a>(&'a self, id: &'a str) -> Answer<'a, HostDisk> {
        let of = id.to_owned();
        self.on_disks(format!("inspect disk {id}"), move |disks| disks.find(&of)).boxed()
    }

    fn export_disk<'a>(&'a self, id: &'a str) -> Answer<'a, DiskStream> {
        async move {
            let (message, of) = (format!("export disk {id}"), id.to_owned());
            let content =
                self.on_disks(message.clone(), move |disks| disks.content_of(&of)).await?;
            let size_bytes = content.spec.size_bytes;
            let (to, stream) = mpsc::channel(PIECES_MAX + 1);
            let runtime = Handle::current();
            tokio::task::spawn_blocking(move || send(&content, to, &runtime, message));
            Ok(DiskStream { size_bytes, content: stream })
        }
        .boxed()
    }

    fn remove_disk<'a>(&'a self, id: &'a str) -> Answer<'a, ()> {
        let of = id.to_owned();
        self.on_disks(format!("remove disk {id}"), move |disks| disks.remove(&of)).boxed()
    }

    fn resize_disk<'a>(&'a self, id: &'a str, request: ResizeRequest) -> Answer<'a, HostDisk> {
        async move {
            self.core.resize_disk(id.to_owned(), request.size_bytes).await?;
            self.inspect_disk(id).await
        }
        .boxed()
    }
}

impl Hub {
    /// On a thread that may wait for files.
    pub(super) async fn on_disks<T: Send + 'static>(
        &self,
        message: String,
        what: impl FnOnce(&HostDisks) -> Result<T, DiskError> + Send + 'static,
    ) -> Result<T, ErrorBody> {
        let disks = Arc::clone(&self.core.disks);
        let done = tokio::task::spawn_blocking(move || what(&disks)).await;
        let done = done.map_err(|_panicked| ErrorBody::new(ErrorCode::Internal, &message))?;
        done.map_err(|error| {
            let body = ErrorBody::new(error.code(), message).cause(chain(&error));
            match error.remedy() {
                Some(remedy) => body.remedy(remedy),
                None => body,
            }
        })
    }
}

/// All of it to a client, or until that does not take it.
fn send(
    content: &DiskContent,
    to: mpsc::Sender<Result<Bytes, ErrorBody>>,
    runtime: &Handle,
    message: String,
) {
    // Room for it is there whatever the client takes.
    let last = to.clone().try_reserve_owned();
    let sent = content.read_all(|piece| {
        let given = runtime.block_on(tokio::time::timeout(IDLE_MAX, to.send(Ok(piece))));
        match given {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_gone)) => Err(io::Error::other("the client has gone")),
            Err(_late) => {
                let text = format!("the client has taken no byte for {IDLE_MAX:?}");
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        }
    });
    if let (Err(error), Ok(last)) = (sent, last) {
        last.send(Err(ErrorBody::new(ErrorCode::Host, message).cause(error)));
    }
}
