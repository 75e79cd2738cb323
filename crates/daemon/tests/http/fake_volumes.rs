//! The made-up host's volumes: any name but `nope` is one.

use futures_util::FutureExt;
use vmfork_api::{
    AttachRequest, DetachRequest, Disk, DiskActivity, ErrorBody, ErrorCode, Labels, OnFork,
    OnForkRequest, ResizeRequest, Volume, VolumeRequest,
};
use vmfork_control::{Answer, VolumeControl};

use crate::fake::Fake;

fn volume(name: &str, on_fork: OnFork) -> Volume {
    Volume {
        name: name.to_owned(),
        disk_id: "00000000000000aa".to_owned(),
        size_bytes: 1 << 30,
        data_bytes: 4096,
        on_fork,
        vms: Vec::new(),
        created_unix_ms: 1,
        labels: Labels::parse([&*format!("is={name}")]).expect("a label"),
        reason: None,
    }
}

impl Fake {
    fn about_volume(&self, call: String, name: &str, on_fork: OnFork) -> Result<Volume, ErrorBody> {
        self.note(call);
        if name == "nope" {
            return Err(ErrorBody::new(ErrorCode::NotFound, "no volume named `nope`"));
        }
        Ok(volume(name, on_fork))
    }
}

impl VolumeControl for Fake {
    fn volumes(&self) -> Answer<'_, Vec<Volume>> {
        async { Ok(vec![volume("db", OnFork::Fork)]) }.boxed()
    }

    fn create_volume(&self, request: VolumeRequest) -> Answer<'_, Volume> {
        let call = format!("create volume {} {:?}", request.name, request.source);
        let made = self.about_volume(call, &request.name, request.on_fork);
        async { made }.boxed()
    }

    fn inspect_volume<'a>(&'a self, name: &'a str) -> Answer<'a, Volume> {
        async move { self.about_volume(format!("inspect {name}"), name, OnFork::Fork) }.boxed()
    }

    fn remove_volume<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        let call = format!("remove volume {name}");
        async move { self.about_volume(call, name, OnFork::Fork).map(drop) }.boxed()
    }

    fn set_on_fork<'a>(&'a self, name: &'a str, request: OnForkRequest) -> Answer<'a, Volume> {
        async move { self.about_volume(format!("set {name}"), name, request.on_fork) }.boxed()
    }

    fn attach_volume<'a>(&'a self, name: &'a str, request: AttachRequest) -> Answer<'a, Disk> {
        let call = format!("attach {name} to {} {:?}", request.vm, request.disk);
        async move {
            let volume = self.about_volume(call, name, OnFork::Fork)?;
            Ok(Disk {
                name: request.disk.unwrap_or_else(|| "data".to_owned()),
                size_bytes: volume.size_bytes,
                written_bytes: 0,
                device: "/dev/vdb".to_owned(),
                volume: Some(volume.name),
                read_only: false,
                empty: false,
                activity: DiskActivity::default(),
                stalled_ms: None,
            })
        }
        .boxed()
    }

    fn detach_volume<'a>(&'a self, name: &'a str, request: DetachRequest) -> Answer<'a, Volume> {
        let call = format!("detach {name} from {} {}", request.vm, request.force);
        async move { self.about_volume(call, name, OnFork::Fork) }.boxed()
    }

    fn resize_volume<'a>(&'a self, name: &'a str, request: ResizeRequest) -> Answer<'a, Volume> {
        let ResizeRequest { size_bytes } = request;
        async move {
            let call = format!("resize volume {name} {size_bytes}");
            let volume = self.about_volume(call, name, OnFork::Fork)?;
            Ok(Volume { size_bytes, ..volume })
        }
        .boxed()
    }
}
