//! `vmfork volume`: disks that outlive their VMs.

use std::time::Duration;

use serde::Serialize;
use vmfork_api::{
    AttachRequest, DetachRequest, Disk, LabelFilter, OnFork, OnForkRequest, ResizeRequest, Volume,
    VolumeRequest,
};

use super::inspect::section;
use super::ps::labelled;
use super::{for_each, kill};
use crate::client::{Query, WHOLE};
use crate::config::{Global, VolumeAction};
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, Level};
use crate::start::reach;

/// How long a disk may take to be attached, detached or resized: a fork in progress, slow media.
pub(super) const USE: Duration = Duration::from_secs(150);

#[derive(Serialize)]
struct Volumes {
    volumes: Vec<Volume>,
}

pub(super) async fn run(global: &Global, action: VolumeAction) -> anyhow::Result<Exit> {
    match action {
        VolumeAction::Create(request) => create(global, request).await,
        VolumeAction::Ls { filters } => list(global, &filters).await,
        VolumeAction::Inspect { name } => inspect(global, &name).await,
        VolumeAction::Set { name, request } => set(global, &name, &request).await,
        VolumeAction::Attach { name, request } => attach(global, &name, &request).await,
        VolumeAction::Detach { name, request } => detach(global, &name, &request).await,
        VolumeAction::Resize { name, request } => resize(global, &name, request).await,
        VolumeAction::Rm { names } => remove(global, names).await,
    }
}

fn route(name: &str, path: &str) -> Query {
    Query::new(format!("/v1/volumes/{name}{path}"))
}

async fn create(global: &Global, request: VolumeRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let printer = &global.printer;
    let spinner = printer.spinner(format!("Creating `{}`", request.name));
    let volume: Volume = client.post(Query::new("/v1/volumes"), &request, WHOLE).await?;
    spinner.finish_and_clear();
    if printer.json {
        printer.with_schema(&volume)?;
    } else {
        printer.line(&volume.name)?;
        printer.note(&format!("`{}` is ready ({})", volume.name, size(&volume)));
    }
    Ok(Exit::Done)
}

fn size(volume: &Volume) -> String {
    let (size, data) = (format::size(volume.size_bytes), format::size(volume.data_bytes));
    format!("{size}, {data} of it used")
}

fn word(on_fork: OnFork) -> &'static str {
    match on_fork {
        OnFork::Fork => "fork",
        OnFork::ReadOnly => "read-only",
        OnFork::Refuse => "refuse",
    }
}

/// The VMs that have it, or `-`.
fn vms(volume: &Volume) -> String {
    if volume.vms.is_empty() { "-".to_owned() } else { volume.vms.join(" ") }
}

async fn list(global: &Global, filters: &[LabelFilter]) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let volumes: Vec<Volume> = client.get(labelled(Query::new("/v1/volumes"), filters)).await?;
    let printer = &global.printer;
    if printer.json {
        printer.with_schema(&Volumes { volumes })?;
    } else if printer.level == Level::Quiet {
        let names = volumes.iter().map(|volume| format!("{}\n", volume.name));
        printer.data(&names.collect::<String>())?;
    } else {
        let row = |volume: &Volume| {
            vec![
                Field::Text(volume.name.clone()),
                Field::Figure(format::size(volume.size_bytes)),
                Field::Figure(format::size(volume.data_bytes)),
                Field::Text(word(volume.on_fork).to_owned()),
                Field::Text(vms(volume)),
                Field::Figure(format::age_since(volume.created_unix_ms)),
            ]
        };
        let head = ["NAME", "SIZE", "USED", "ON FORK", "VM", "AGE"];
        printer.table(&head, volumes.iter().map(row).collect())?;
        for volume in &volumes {
            if let Some(reason) = &volume.reason {
                printer.note(&format!("`{}`: {}", volume.name, format::printable(reason)));
            }
        }
    }
    Ok(Exit::Done)
}

async fn inspect(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let volume: Volume = client.get(route(name, "")).await?;
    if global.printer.json {
        global.printer.with_schema(&volume)?;
    } else {
        global.printer.data(&render(&volume))?;
    }
    Ok(Exit::Done)
}

fn render(volume: &Volume) -> String {
    let mut fields = vec![
        ("name", volume.name.clone()),
        ("disk", volume.disk_id.clone()),
        ("size", size(volume)),
        ("on fork", word(volume.on_fork).to_owned()),
        ("vm", vms(volume)),
        ("age", format::age_since(volume.created_unix_ms)),
    ];
    if !volume.labels.is_empty() {
        fields.push(("labels", volume.labels.to_string()));
    }
    if let Some(reason) = &volume.reason {
        fields.push(("can't be used", reason.clone()));
    }
    for (_, value) in &mut fields {
        *value = format::printable(value);
    }
    section("", &fields)
}

async fn set(global: &Global, name: &str, request: &OnForkRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let volume: Volume = client.put(route(name, "/on-fork"), request).await?;
    if global.printer.json {
        global.printer.with_schema(&volume)?;
    } else {
        let what = match volume.on_fork {
            OnFork::Fork => "each clone of a VM gets a disk with its content",
            OnFork::ReadOnly => "no VM can write to it, and clones share it",
            OnFork::Refuse => "a VM that has it can't be forked",
        };
        global.printer.note(&format!("`{name}`: {what}"));
    }
    Ok(Exit::Done)
}

async fn attach(global: &Global, name: &str, request: &AttachRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let disk: Disk = client.post(route(name, "/attach"), request, USE).await?;
    if global.printer.json {
        global.printer.with_schema(&disk)?;
    } else {
        // For `mount $(vmfork volume attach VM VOLUME)` in the guest.
        global.printer.line(&disk.device)?;
        let (device, size) = (&disk.device, format::size(disk.size_bytes));
        global.printer.note(&format!("`{name}` is {device} of `{}` ({size})", request.vm));
    }
    Ok(Exit::Done)
}

async fn detach(global: &Global, name: &str, request: &DetachRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let volume: Volume = client.post(route(name, "/detach"), request, USE).await?;
    if global.printer.json {
        global.printer.with_schema(&volume)?;
    } else {
        global.printer.note(&format!("Detached `{name}` from `{}`", request.vm));
    }
    Ok(Exit::Done)
}

async fn resize(global: &Global, name: &str, request: ResizeRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let volume: Volume = client.post(route(name, "/resize"), &request, USE).await?;
    if global.printer.json {
        global.printer.with_schema(&volume)?;
    } else {
        let (size, after) = (format::size(volume.size_bytes), "`resize2fs` in the guest");
        global.printer.note(&format!("`{name}` has {size} now; {after} grows its file system"));
    }
    Ok(Exit::Done)
}

async fn remove(global: &Global, names: Vec<String>) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    let answers = for_each(names, |name| async move { client.delete(route(&name, "")).await });
    let answers = answers.await.into_iter();
    kill::report(global, "Removed", answers.map(|(name, answer)| (name, answer.map(|()| None))))
}

#[cfg(test)]
mod tests {
    use vmfork_api::Labels;

    use super::*;

    #[test]
    fn a_volume_is_shown_with_who_has_it_and_why_it_can_not_be_used() {
        let mut volume = Volume {
            name: "db".to_owned(),
            disk_id: "ab".to_owned(),
            size_bytes: 10 << 30,
            data_bytes: 5 << 20,
            on_fork: OnFork::ReadOnly,
            vms: vec!["web".to_owned(), "web.1".to_owned()],
            created_unix_ms: 0,
            labels: Labels::default(),
            reason: None,
        };
        let text = render(&volume);
        assert!(text.contains("10 GiB, 5 MiB of it used") && text.contains("web web.1"), "{text}");
        assert!(text.contains("read-only") && !text.contains("labels"), "{text}");
        volume.vms.clear();
        volume.reason = Some("its map\n is short".to_owned());
        let text = render(&volume);
        assert!(text.contains("vm             -\n"), "{text}");
        assert_eq!(text.lines().count(), 7, "{text}");
    }
}
