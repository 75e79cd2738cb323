//! [`SnapshotControl`] on the real host.

use std::time::Instant;

use futures_util::FutureExt;
use vmfork_api::{
    ProfileInfo, RemovedSnapshots, Snapshot, SnapshotDetail, SnapshotRequest, StartReply,
    StartRequest, TransferReply, TransferRequest, VerifyReply,
};

use super::{Hub, boot_stored};
use vmfork_control::{Answer, ByteStream, SnapshotControl};
use vmfork_host::quotas::User;
use vmfork_snapshots::{create, keep, start, transfer};

impl SnapshotControl for Hub {
    fn snapshots(&self) -> Answer<'_, Vec<Snapshot>> {
        async { tokio::task::block_in_place(|| self.library.snapshots.list(&self.core)) }.boxed()
    }

    fn create_snapshot(&self, request: SnapshotRequest) -> Answer<'_, Snapshot> {
        create::create(&self.library, request).boxed()
    }

    fn inspect_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, SnapshotDetail> {
        async { tokio::task::block_in_place(|| self.library.snapshots.detail(&self.core, name)) }
            .boxed()
    }

    fn remove_snapshot<'a>(&'a self, name: &'a str, cascade: bool) -> Answer<'a, RemovedSnapshots> {
        keep::remove(&self.library, name, cascade).boxed()
    }

    fn start_snapshot<'a>(
        &'a self,
        user: User,
        name: &'a str,
        request: StartRequest,
    ) -> Answer<'a, StartReply> {
        async move {
            let began = Instant::now();
            match tokio::task::block_in_place(|| self.library.disks_to_boot(name))? {
                None => start::start(&self.library, user, name, request).await,
                Some(stored) => {
                    boot_stored::start(self, user, name, request, (stored, began.elapsed())).await
                }
            }
        }
        .boxed()
    }

    fn verify_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, VerifyReply> {
        keep::verify(&self.library, name).boxed()
    }

    fn flatten_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, Snapshot> {
        keep::flatten(&self.library, name).boxed()
    }

    fn export_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, ByteStream> {
        async { transfer::export(&self.library, name) }.boxed()
    }

    fn import_snapshot(
        &self,
        name: Option<String>,
        content: ByteStream,
    ) -> Answer<'_, Vec<Snapshot>> {
        transfer::import(&self.library, name, content).boxed()
    }

    fn push_snapshot<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply> {
        transfer::push(&self.library, name, request).boxed()
    }

    fn pull_snapshot<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, Snapshot> {
        transfer::pull(&self.library, name, request).boxed()
    }

    fn snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ProfileInfo> {
        async { tokio::task::block_in_place(|| self.library.snapshots.profile_info(name)) }.boxed()
    }

    fn reset_snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        keep::reset_profile(&self.library, name).boxed()
    }
}
