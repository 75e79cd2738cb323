//! [`Control`] on the real host.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::sync::mpsc;
use vmfork_api::{
    DoctorReport, ErrorBody, ErrorCode, ExecRequest, ForkReply, ForkRequest, HostInfo, Image,
    ImageProfile, KillRequest, RunRequest, SCHEMA, TransferReply, TransferRequest, TreeNode,
    TtlReply, TtlRequest, Version, VmDetail,
};
use vmfork_guest_image::{Metadata, StoreError};
use vmfork_qemu::probe;

use super::error::ControlError;
use super::{Hub, boot, boot_disks, root_device};
use vmfork_control::{Answer, ConsoleSession, Control, Events, ExecSession, FileStream, Killed};
use vmfork_fork;
use vmfork_host::error::chain;
use vmfork_host::quotas::User;
use vmfork_host::vm::End;
use vmfork_peers::{end_everywhere, tell_lifetime};
use vmfork_snapshots::guest_images;

/// How long the agent may take to start a program, or to open a file.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a transfer into a guest may stand still.
const STALL: Duration = Duration::from_secs(60);

impl Hub {
    /// An image as it is listed.
    async fn image(&self, name: &str, what: &str) -> Result<Image, ErrorBody> {
        let found = self.images().await?.into_iter().find(|image| image.name == name);
        let gone = || ControlError::from(StoreError::NotFound { name: name.to_owned() });
        found.ok_or_else(|| gone().to_body(format!("{what} `{name}`")))
    }
}

impl Control for Hub {
    fn has_vm(&self, vm: &str) -> bool {
        self.core.registry.find("find", vm).is_ok() || self.core.state.is_lost(vm)
    }

    fn version(&self) -> Answer<'_, Version> {
        async {
            let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
            let qemu = probe::find(Some(&self.core.config.qemu)).await;
            Ok(Version {
                schema: SCHEMA.to_owned(),
                vmforkd: env!("CARGO_PKG_VERSION").to_owned(),
                api: "v1".to_owned(),
                qemu: qemu.ok().map(|binary| binary.version.to_string()),
                kernel,
            })
        }
        .boxed()
    }

    fn doctor(&self) -> Answer<'_, DoctorReport> {
        async {
            let cgroup = vmfork_host::cgroup::Cgroups::detect();
            let cgroup = cgroup.map(drop).map_err(|error| chain(&error));
            let (config, admission) = (&self.core.config, &self.core.admission);
            let holder = self.holder.status().await;
            let disks = tokio::task::block_in_place(|| self.core.disks.health());
            let disks = disks.map_err(|error| chain(&error));
            Ok(crate::doctor::examine(config, admission, cgroup, disks, holder).await)
        }
        .boxed()
    }

    fn host(&self) -> Answer<'_, HostInfo> {
        async { Ok(self.core.host_info()) }.boxed()
    }

    fn images(&self) -> Answer<'_, Vec<Image>> {
        async {
            let listed = self.core.images.list().map_err(ControlError::from);
            let listed = listed.map_err(|error| error.to_body("list the images"))?;
            let live = self.core.registry.live();
            let shown = |metadata: &Metadata| {
                let mut image = metadata.to_api();
                let users = live.iter().filter(|vm| vm.identity.spec().image == image.name).count();
                image.vms = u32::try_from(users).unwrap_or(u32::MAX);
                let stored = metadata.root_stored.as_ref();
                image.remote = stored.and_then(|stored| self.library.origin_of(stored));
                image
            };
            Ok(tokio::task::block_in_place(|| listed.iter().map(shown).collect()))
        }
        .boxed()
    }

    fn push_image<'a>(
        &'a self,
        name: &'a str,
        request: TransferRequest,
    ) -> Answer<'a, TransferReply> {
        guest_images::push(&self.library, name, request).boxed()
    }

    fn pull_image<'a>(&'a self, name: &'a str, request: TransferRequest) -> Answer<'a, Image> {
        async move {
            let name = guest_images::pull(&self.library, name, request).await?;
            self.image(&name, "pull image").await
        }
        .boxed()
    }

    fn seed_image<'a>(&'a self, name: &'a str) -> Answer<'a, Image> {
        async move {
            guest_images::seed(&self.library, name).await?;
            self.image(name, "seed image").await
        }
        .boxed()
    }

    fn unseed_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        guest_images::unseed(&self.library, name).boxed()
    }

    fn image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ImageProfile> {
        async { tokio::task::block_in_place(|| self.library.image_profile(name)) }.boxed()
    }

    fn reset_image_profile<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        async { tokio::task::block_in_place(|| self.library.reset_image_profile(name)) }.boxed()
    }

    fn remove_image<'a>(&'a self, name: &'a str) -> Answer<'a, ()> {
        async move {
            let user =
                self.core.registry.live().into_iter().find(|vm| vm.identity.spec().image == name);
            let failed = |error: ControlError| error.to_body(format!("remove image `{name}`"));
            if let Some(vm) = user {
                return Err(failed(ControlError::ImageInUse { vm: vm.name().to_owned() }));
            }
            {
                let _turn = self.library.image_turn().await;
                let metadata = self.core.images.metadata(name).ok();
                // What may not go keeps all of it.
                if let Some(stored) = metadata.and_then(|metadata| metadata.root_stored) {
                    self.library.forget_image(&stored).await?;
                }
                self.core.images.remove(name).map_err(|error| failed(error.into()))?;
            }
            self.library.forget_unneeded().await;
            Ok(())
        }
        .boxed()
    }

    fn serve_image<'a>(
        &'a self,
        user: User,
        name: &'a str,
        writable: bool,
    ) -> Answer<'a, UnixStream> {
        async move {
            let message = || format!("serve image `{name}`");
            let root = || boot_disks::root_blake3(&self.core, name);
            let before = root().map_err(|error| error.to_body(message()))?;
            let content = boot_disks::root_content(&self.core, name).await;
            let mut content = content.map_err(|error| error.to_body(message()))?;
            if root().ok().as_ref() != Some(&before) {
                let body = ErrorBody::new(ErrorCode::Conflict, message());
                return Err(body.cause("the image was replaced just now").remedy("try again"));
            }
            // By this a client that comes back knows the content again.
            let known_by = match before.is_empty() {
                true => content.image.id().to_string(),
                false => before,
            };
            self.library.image_is_read(name);
            content.spec.read_only = !writable;
            self.core.disks.count_on(user, std::slice::from_mut(&mut content));
            let name = name.to_owned();
            self.on_disks(message(), move |disks| disks.serve_client(&name, &known_by, &content))
                .await
        }
        .boxed()
    }

    fn vms(&self, all: bool) -> Answer<'_, Vec<vmfork_api::Vm>> {
        async move {
            let registry = &self.core.registry;
            let vms = if all { registry.all() } else { registry.live() };
            Ok(tokio::task::block_in_place(|| {
                vms.iter().map(|vm| self.core.summary(vm, true)).collect()
            }))
        }
        .boxed()
    }

    fn tree(&self) -> Answer<'_, Vec<TreeNode>> {
        async { Ok(tokio::task::block_in_place(|| self.core.registry.tree())) }.boxed()
    }

    fn run(&self, user: User, request: RunRequest) -> Answer<'_, vmfork_api::Vm> {
        async move {
            let vm = boot::run(self, user, request).await?;
            Ok(self.core.summary(&vm, false))
        }
        .boxed()
    }

    fn inspect<'a>(&'a self, vm: &'a str) -> Answer<'a, VmDetail> {
        async move {
            let vm = self.core.registry.find("inspect", vm)?;
            let core = &self.core;
            let agent = vm.agent();
            let clones = core.registry.clones_of(&vm.identity.id);
            let machine = vm.machine();
            let (device, reason) = root_device::shown(vm.identity.spec(), agent.as_ref());
            Ok(VmDetail {
                schema: SCHEMA.to_owned(),
                vm: core.summary(&vm, true),
                memory: tokio::task::block_in_place(|| core.memory_info(&vm)),
                qemu_version: machine.as_ref().map_or_else(String::new, |m| m.version.to_string()),
                agent_version: agent.as_ref().map(|agent| agent.agent_version.clone()),
                guest_kernel: agent.as_ref().map(|agent| agent.kernel.clone()),
                clone_names: clones.iter().map(|clone| clone.name().to_owned()).collect(),
                accel_reason: vm.identity.spec().accel_reason.clone(),
                root_device: device,
                root_device_reason: reason,
                user: vm.identity.user.to_string(),
                job: vm.identity.job.as_ref().map(|job| job.id.clone()),
                keeper_pid: machine.map(|machine| machine.keeper_pid()),
                last_fork: vm.last_fork(),
                ttl: core.ttl(&vm),
                disks: core.disks_of(&vm),
            })
        }
        .boxed()
    }

    fn remove<'a>(&'a self, vm: &'a str, force: bool) -> Answer<'a, ()> {
        async move {
            let found = match self.core.registry.find("remove", vm) {
                Ok(found) => found,
                // One that an earlier daemon lost can be forgotten, too.
                Err(_) if self.core.state.forget_lost(vm) => return Ok(()),
                Err(error) => return Err(error),
            };
            if found.end_now().is_none() {
                if !force {
                    let running = ControlError::Running { vm: found.name().to_owned() };
                    return Err(running.to_body(format!("remove `{}`", found.name())));
                }
                self.core.end(&found, End::killed("removed"));
                self.core.disks.given_back(&[found.name()]).await;
            }
            self.core.registry.remove(&found.identity.id);
            self.core.forget_folder(&found.identity.id);
            Ok(())
        }
        .boxed()
    }

    fn kill<'a>(&'a self, vm: &'a str, request: KillRequest) -> Answer<'a, Killed> {
        async move {
            let vm = self.core.registry.find("kill", vm)?;
            let grace = Duration::from_millis(request.grace_ms);
            let mut missing = Vec::new();
            if request.family {
                let family = (vm.identity.id.as_str(), vm.name());
                missing =
                    end_everywhere(self.cluster.member().as_deref(), &self.core, family, grace)
                        .await?;
            } else {
                self.core.kill_all(&[Arc::clone(&vm)], grace).await;
            }
            Ok(Killed { vm: self.core.summary(&vm, false), missing })
        }
        .boxed()
    }

    fn fork<'a>(&'a self, vm: &'a str, request: ForkRequest) -> Answer<'a, ForkReply> {
        async move {
            let parent = self.core.registry.find("fork", vm)?;
            vmfork_fork::by_request(&self.forker, &parent, request).await
        }
        .boxed()
    }

    fn pause<'a>(&'a self, vm: &'a str) -> Answer<'a, vmfork_api::Vm> {
        async move {
            let vm = self.core.registry.find("pause", vm)?;
            vmfork_fork::pause(&self.core, &vm).await?;
            Ok(self.core.summary(&vm, false))
        }
        .boxed()
    }

    fn resume<'a>(&'a self, vm: &'a str) -> Answer<'a, vmfork_api::Vm> {
        async move {
            let vm = self.core.registry.find("resume", vm)?;
            vmfork_fork::resume(&self.core, &vm).await?;
            Ok(self.core.summary(&vm, false))
        }
        .boxed()
    }

    fn set_ttl<'a>(&'a self, vm: &'a str, request: TtlRequest) -> Answer<'a, TtlReply> {
        async move {
            let vm = self.core.registry.find("bound the life of", vm)?;
            let setting = self.core.set_ttl(&vm, request.ttl_ms.map(Duration::from_millis))?;
            if let Some(member) = self.cluster.member() {
                tell_lifetime(&member, &self.core.lifetimes, &setting);
            }
            let schema = SCHEMA.to_owned();
            Ok(TtlReply { schema, vm: vm.name().to_owned(), ttl: self.core.ttl(&vm) })
        }
        .boxed()
    }

    fn exec<'a>(&'a self, vm: &'a str, request: ExecRequest) -> Answer<'a, ExecSession> {
        async move {
            let vm = self.core.registry.find("run a program in", vm)?;
            let what = format!(
                "run `{}` in `{}`",
                request.argv.first().map_or("", String::as_str),
                vm.name()
            );
            vm.awake_link()?.exec(request, OPEN_TIMEOUT).await.map_err(|error| error.to_body(what))
        }
        .boxed()
    }

    fn read_file<'a>(&'a self, vm: &'a str, path: &'a str) -> Answer<'a, FileStream> {
        async move {
            let vm = self.core.registry.find("read a file of", vm)?;
            let what = format!("read `{path}` in `{}`", vm.name());
            vm.awake_link()?
                .read_file(path, OPEN_TIMEOUT)
                .await
                .map_err(|error| error.to_body(what))
        }
        .boxed()
    }

    fn write_file<'a>(
        &'a self,
        vm: &'a str,
        path: &'a str,
        mode: u32,
        content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
    ) -> Answer<'a, ()> {
        async move {
            let vm = self.core.registry.find("write a file of", vm)?;
            let what = format!("write `{path}` in `{}`", vm.name());
            let written = vm.awake_link()?.write_file(path, mode, content, STALL).await;
            written.map(drop).map_err(|error| error.to_body(what))
        }
        .boxed()
    }

    fn logs<'a>(&'a self, vm: &'a str, follow: bool) -> Answer<'a, mpsc::Receiver<Bytes>> {
        async move {
            let vm = self.core.registry.find("read the log of", vm)?;
            let read = vm.log.read(follow).map_err(ControlError::from);
            read.map_err(|error| error.to_body(format!("read the log of `{}`", vm.name())))
        }
        .boxed()
    }

    fn panic_engine<'a>(&'a self, vm: &'a str) -> Answer<'a, ()> {
        async move {
            let vm = self.core.registry.find("make the page engine panic of", vm)?;
            let engine = vm.running_machine()?.engine().ok_or_else(|| {
                let message = format!("make the page engine of `{}` panic", vm.name());
                ControlError::NeverForked { vm: vm.name().to_owned() }.to_body(message)
            })?;
            tracing::warn!(vm = vm.name(), image = %engine.image().id(), "its page engine is made to panic");
            engine.inject_panic();
            Ok(())
        }
        .boxed()
    }

    fn console<'a>(&'a self, vm: &'a str) -> Answer<'a, ConsoleSession> {
        async move {
            let vm = self.core.registry.find("look at the console of", vm)?;
            vm.running_machine()?;
            let console = vm.console().ok_or_else(|| {
                ControlError::Starting.to_body(format!("look at the console of `{}`", vm.name()))
            })?;
            Ok(console.attach())
        }
        .boxed()
    }

    fn events(&self) -> Arc<Events> {
        Arc::clone(&self.core.events)
    }
}
