//! [`VolumeControl`] on the real host.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio::task::block_in_place;
use vmfork_api::{
    AttachRequest, DetachRequest, Disk, OnForkRequest, ResizeRequest, Volume, VolumeRequest,
    VolumeSource,
};

use super::Hub;
use super::boot_disks::{root_elsewhere, root_of};
use vmfork_control::{Answer, VolumeControl};
use vmfork_guest_image::RootElsewhere;
use vmfork_host::vm::now_unix_ms;
use vmfork_snapshots::guest_images::ROOT_DISK;

impl VolumeControl for Hub {
    fn volumes(&self) -> Answer<'_, Vec<Volume>> {
        async { Ok(block_in_place(|| self.core.disks.volumes())) }.boxed()
    }

    fn create_volume(&self, request: VolumeRequest) -> Answer<'_, Volume> {
        async move {
            let message = format!("create the volume `{}`", request.name);
            let core = &self.core;
            let source = match request.source {
                VolumeSource::Image { image } => match root_elsewhere(core, &image) {
                    Some(RootElsewhere::Stored(snapshot)) => {
                        VolumeSource::Snapshot { snapshot, disk: ROOT_DISK.to_owned() }
                    }
                    Some(RootElsewhere::Object(location)) => VolumeSource::Object { location },
                    None => VolumeSource::Image { image },
                },
                source => source,
            };
            let request = VolumeRequest { source, ..request };
            let root_of = |image: &str| root_of(core, image);
            let of_object = matches!(request.source, VolumeSource::Object { .. });
            let made = core.disks.create_volume(request, now_unix_ms(), root_of).await;
            if of_object {
                // The volume has a copy.
                let disks = Arc::clone(&core.disks);
                drop(tokio::task::spawn_blocking(move || disks.prune_objects()));
            }
            made.map_err(|error| error.to_body(message))
        }
        .boxed()
    }

    fn inspect_volume<'a>(&'a self, name: &'a str) -> Answer<'a, Volume> {
        async move {
            block_in_place(|| self.core.disks.volume(name))
                .map_err(|error| error.to_body(format!("inspect the volume `{name}`")))
        }
        .boxed()
    }

    fn remove_volume<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        async move {
            block_in_place(|| self.core.disks.remove_volume(name))
                .map_err(|error| error.to_body(format!("remove the volume `{name}`")))
        }
        .boxed()
    }

    fn set_on_fork<'a>(&'a self, name: &'a str, request: OnForkRequest) -> Answer<'a, Volume> {
        async move {
            block_in_place(|| self.core.disks.set_on_fork(name, request.on_fork))
                .map_err(|error| error.to_body(format!("change the volume `{name}`")))
        }
        .boxed()
    }

    fn attach_volume<'a>(&'a self, name: &'a str, request: AttachRequest) -> Answer<'a, Disk> {
        self.core.attach_volume(name.to_owned(), request).boxed()
    }

    fn detach_volume<'a>(&'a self, name: &'a str, request: DetachRequest) -> Answer<'a, Volume> {
        async move {
            self.core.detach_volume(name.to_owned(), request).await?;
            self.inspect_volume(name).await
        }
        .boxed()
    }

    fn resize_volume<'a>(&'a self, name: &'a str, request: ResizeRequest) -> Answer<'a, Volume> {
        async move {
            self.core.resize_volume(name, request.size_bytes).await?;
            self.inspect_volume(name).await
        }
        .boxed()
    }
}
