//! The made-up host's disks and stored snapshots: any name but `nope` is one.

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::sync::mpsc;
use vmfork_api::{
    Accel, DiskState, ErrorBody, ErrorCode, HostDisk, Labels, ProfileInfo, Progress,
    RemovedSnapshots, ResizeRequest, SCHEMA, Snapshot, SnapshotDetail, SnapshotRequest,
    SnapshotState, StartReply, StartRequest, TransferReply, TransferRequest, VerifyReply,
};
use vmfork_control::{Answer, ByteStream, DiskControl, DiskStream, SnapshotControl};
use vmfork_host::quotas::User;

use crate::fake::Fake;

fn exists(name: &str) -> Result<(), ErrorBody> {
    if name == "nope" {
        return Err(ErrorBody::new(ErrorCode::NotFound, "no snapshot named `nope`"));
    }
    Ok(())
}

fn snapshot(name: &str) -> Snapshot {
    Snapshot {
        name: name.to_owned(),
        id: Some("0".repeat(32)),
        state: SnapshotState::Ready,
        reason: None,
        created_unix_ms: 1,
        image: "debian".to_owned(),
        memory_mib: 512,
        disk_only: false,
        disk_bytes: 0,
        cpus: 1,
        accel: Accel::Tcg,
        base: None,
        own_bytes: 4096,
        stored_bytes: 100,
        shared_bytes: 0,
        progress: Progress::default(),
        vms: 0,
        remote: None,
        labels: Labels::parse([&*format!("is={name}")]).expect("a label"),
    }
}

impl Fake {
    fn about(&self, call: String, name: &str) -> Result<Snapshot, ErrorBody> {
        self.note(call);
        exists(name)?;
        Ok(snapshot(name))
    }
}

impl DiskControl for Fake {
    fn disks(&self) -> Answer<'_, Vec<HostDisk>> {
        async { Ok(vec![disk("d15c")]) }.boxed()
    }

    fn inspect_disk<'a>(&'a self, id: &'a str) -> Answer<'a, HostDisk> {
        async move { Ok(disk(id)) }.boxed()
    }

    fn export_disk<'a>(&'a self, id: &'a str) -> Answer<'a, DiskStream> {
        self.note(format!("export disk {id}"));
        async move {
            let (to, content) = mpsc::channel(1);
            let _room = to.try_send(Ok(Bytes::from_static(b"content")));
            Ok(DiskStream { size_bytes: 7, content })
        }
        .boxed()
    }

    fn remove_disk<'a>(&'a self, id: &'a str) -> Answer<'a, ()> {
        self.note(format!("remove disk {id}"));
        async move { Ok(()) }.boxed()
    }

    fn resize_disk<'a>(&'a self, id: &'a str, request: ResizeRequest) -> Answer<'a, HostDisk> {
        let ResizeRequest { size_bytes } = request;
        self.note(format!("resize disk {id} {size_bytes}"));
        async move { Ok(HostDisk { size_bytes, ..disk(id) }) }.boxed()
    }
}

fn disk(id: &str) -> HostDisk {
    HostDisk {
        id: id.to_owned(),
        name: "data".to_owned(),
        vm: "web".to_owned(),
        state: DiskState::Left,
        size_bytes: 1 << 20,
        written_bytes: 4096,
        reason: None,
    }
}

impl SnapshotControl for Fake {
    fn snapshots(&self) -> Answer<'_, Vec<Snapshot>> {
        async { Ok(vec![snapshot("warm")]) }.boxed()
    }

    fn create_snapshot(&self, request: SnapshotRequest) -> Answer<'_, Snapshot> {
        let (vm, name) = (&request.vm, &request.name);
        let made = self.about(format!("create {vm} {name} {:?}", request.compression), name);
        async { made }.boxed()
    }

    fn inspect_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, SnapshotDetail> {
        async move {
            exists(name)?;
            Ok(SnapshotDetail {
                schema: SCHEMA.to_owned(),
                snapshot: snapshot(name),
                qemu_version: "7.2.22".to_owned(),
                machine: "pc-i440fx-7.2".to_owned(),
                cpu: "made up".to_owned(),
                guest_kernel: None,
                pause_ms: 3.0,
                compression: vmfork_api::Compression::Zstd,
                chunk_pages: 64,
                own_pages: 1,
                zero_pages: 0,
                images: vec![],
                dependants: vec![],
                vm_names: vec![],
                profile: ProfileInfo::default(),
            })
        }
        .boxed()
    }

    fn remove_snapshot<'a>(&'a self, name: &'a str, cascade: bool) -> Answer<'a, RemovedSnapshots> {
        let removed = self.about(format!("remove snapshot {name} {cascade}"), name);
        async { Ok(RemovedSnapshots { names: vec![removed?.name], freed_bytes: 100 }) }.boxed()
    }

    fn start_snapshot<'a>(
        &'a self,
        _user: User,
        name: &'a str,
        request: StartRequest,
    ) -> Answer<'a, StartReply> {
        let (count, prefetch) = (request.count, request.prefetch);
        let found = self.about(format!("start {name} {count} {prefetch:?}"), name);
        async move {
            Ok(StartReply {
                schema: SCHEMA.to_owned(),
                snapshot: found?.name,
                requested: count,
                granted: count,
                began_unix_ms: 1,
                open_ms: 1.0,
                total_ms: 2.0,
                vms: vec![],
            })
        }
        .boxed()
    }

    fn verify_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, VerifyReply> {
        let found = self.about(format!("verify {name}"), name);
        async {
            let (schema, snapshot) = (SCHEMA.to_owned(), found?.name);
            Ok(VerifyReply {
                schema,
                snapshot,
                chunks: 1,
                chunks_elsewhere: 0,
                read_bytes: 100,
                damage: vec![],
            })
        }
        .boxed()
    }

    fn flatten_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, Snapshot> {
        let found = self.about(format!("flatten {name}"), name);
        async { found }.boxed()
    }

    /// `broken` ends half-way.
    fn export_snapshot<'a>(&'a self, name: &'a str) -> Answer<'a, ByteStream> {
        let found = self.about(format!("export {name}"), name);
        async {
            let name = found?.name;
            let (out_tx, out) = mpsc::channel(4);
            tokio::spawn(async move {
                let _sent = out_tx.send(Ok(Bytes::from_static(b"all of it"))).await;
                if name == "broken" {
                    let error = ErrorBody::new(ErrorCode::Host, "the disk is gone");
                    let _sent = out_tx.send(Err(error)).await;
                }
            });
            Ok(out)
        }
        .boxed()
    }

    fn import_snapshot(
        &self,
        name: Option<String>,
        mut content: ByteStream,
    ) -> Answer<'_, Vec<Snapshot>> {
        async move {
            let mut bytes = 0;
            while let Some(piece) = content.recv().await {
                bytes += piece?.len();
            }
            let name = name.unwrap_or_else(|| "warm".to_owned());
            Ok(vec![self.about(format!("import {name} {bytes}"), &name)?])
        }
        .boxed()
    }

    fn push_snapshot<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply> {
        let found = self.about(format!("push {name} {}", request.location), name);
        async {
            let (schema, names) = (SCHEMA.to_owned(), vec![found?.name]);
            Ok(TransferReply { schema, names, sent_bytes: 100, total_ms: 1.0 })
        }
        .boxed()
    }

    fn pull_snapshot<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, Snapshot> {
        let found = self.about(format!("pull {name} {}", request.location), name);
        async { found }.boxed()
    }

    fn snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ProfileInfo> {
        let found = self.about(format!("profile {name}"), name);
        async { found.map(|_| ProfileInfo { runs: 3, ..ProfileInfo::default() }) }.boxed()
    }

    fn reset_snapshot_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        let found = self.about(format!("reset {name}"), name);
        async { found.map(drop) }.boxed()
    }
}
