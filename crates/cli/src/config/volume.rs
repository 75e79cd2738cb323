//! What `vmfork volume` is to do.

use vmfork_api::{
    AttachRequest, DetachRequest, DiskFormat, LabelFilter, OnFork, OnForkRequest, ResizeRequest,
    VolumeRequest, VolumeSource, disk,
};

use super::{misuse, value};
use crate::args::{RawOnFork, RawVolume, RawVolumeCreate};
use crate::failure::Misuse;

#[derive(Debug)]
pub(crate) enum VolumeAction {
    Create(VolumeRequest),
    Ls { filters: Vec<LabelFilter> },
    Inspect { name: String },
    Set { name: String, request: OnForkRequest },
    Attach { name: String, request: AttachRequest },
    Detach { name: String, request: DetachRequest },
    Resize { name: String, request: ResizeRequest },
    Rm { names: Vec<String> },
}

impl VolumeAction {
    pub(super) fn new(raw: RawVolume) -> Result<Self, Misuse> {
        Ok(match raw {
            RawVolume::Create(raw) => Self::Create(create(raw)?),
            RawVolume::Ls(raw) => Self::Ls { filters: value::filters(&raw.labels)? },
            RawVolume::Inspect(raw) => Self::Inspect { name: name(raw.volume)? },
            RawVolume::Set { volume, on_fork } => {
                let request = OnForkRequest { on_fork: policy(on_fork) };
                Self::Set { name: name(volume)?, request }
            }
            RawVolume::Attach { vm, volume, disk } => {
                if let Some(disk) = disk.as_ref().filter(|disk| !disk::disk_name_is_valid(disk)) {
                    let disk = crate::format::printable(disk);
                    return misuse(format!("--disk {disk}: that is no disk's name"));
                }
                let request = AttachRequest { vm: value::name(vm, "VM's name")?, disk };
                Self::Attach { name: name(volume)?, request }
            }
            RawVolume::Detach { vm, volume, force } => {
                let request = DetachRequest { vm: value::name(vm, "VM's name")?, force };
                Self::Detach { name: name(volume)?, request }
            }
            RawVolume::Resize { volume, size } => {
                let request = value::new_size("volume resize", &size)?;
                Self::Resize { name: name(volume)?, request }
            }
            RawVolume::Rm { volumes } => {
                Self::Rm { names: volumes.into_iter().map(name).collect::<Result<_, _>>()? }
            }
        })
    }
}

fn name(name: String) -> Result<String, Misuse> {
    value::name(name, "volume's name")
}

fn policy(raw: RawOnFork) -> OnFork {
    match raw {
        RawOnFork::Fork => OnFork::Fork,
        RawOnFork::ReadOnly => OnFork::ReadOnly,
        RawOnFork::Refuse => OnFork::Refuse,
    }
}

fn create(raw: RawVolumeCreate) -> Result<VolumeRequest, Misuse> {
    let source = match (raw.size, raw.from) {
        (Some(size), None) => {
            let Some(size_bytes) = disk::parse_size(&size) else {
                return misuse(format!("--size {size}: not a size; write it as 512M, 10G or 1T"));
            };
            VolumeSource::Blank { size_bytes }
        }
        (_, from) => source(&from.unwrap_or_default())?,
    };
    let request = VolumeRequest {
        name: name(raw.name)?,
        source,
        on_fork: policy(raw.on_fork),
        labels: value::labels(&raw.labels)?,
    };
    request.check().map_err(|error| Misuse(format!("volume create: {error}")))?;
    Ok(request)
}

/// `image:IMAGE`, `snapshot:SNAPSHOT/DISK`, `file:PATH`, `qcow2:PATH` or `s3://BUCKET/KEY`. A path
/// is of the folder that the command is called in.
fn source(text: &str) -> Result<VolumeSource, Misuse> {
    match text.split_once(':') {
        Some(("image", image)) => {
            Ok(VolumeSource::Image { image: value::name(image.to_owned(), "image's name")? })
        }
        Some(("file", path)) if !path.is_empty() => {
            Ok(VolumeSource::File { path: value::absolute(path), format: DiskFormat::Raw })
        }
        Some(("qcow2", path)) if !path.is_empty() => {
            Ok(VolumeSource::File { path: value::absolute(path), format: DiskFormat::Qcow2 })
        }
        Some(("s3", _)) => Ok(VolumeSource::Object { location: text.to_owned() }),
        Some(("snapshot", stored)) if let Some((snapshot, disk)) = stored.split_once('/') => {
            let snapshot = value::name(snapshot.to_owned(), "snapshot's name")?;
            Ok(VolumeSource::Snapshot { snapshot, disk: disk.to_owned() })
        }
        _ => misuse(format!(
            "--from {text}: write it as image:IMAGE, snapshot:SNAPSHOT/DISK, file:PATH, qcow2:PATH or s3://BUCKET/KEY"
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{RawArgs, RawCommand};

    fn parse(line: &str) -> Result<VolumeAction, String> {
        let words = ["vmfork", "volume"].into_iter().chain(line.split(' '));
        let raw = RawArgs::try_parse_from(words).map_err(|error| error.to_string())?;
        match raw.command {
            RawCommand::Volume(raw) => VolumeAction::new(raw).map_err(|error| error.to_string()),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn a_volume_has_a_size_or_a_content() {
        let source = |line: &str| match parse(line) {
            Ok(VolumeAction::Create(request)) => (request.source, request.on_fork),
            other => panic!("{other:?}"),
        };
        let blank = VolumeSource::Blank { size_bytes: 10 << 30 };
        assert_eq!(source("create db --size 10G"), (blank.clone(), OnFork::Fork));
        assert_eq!(source("create db --size 10G --on-fork refuse"), (blank, OnFork::Refuse));
        let (image, on_fork) = source("create db --from image:default --on-fork read-only");
        assert_eq!(image, VolumeSource::Image { image: "default".to_owned() });
        assert_eq!(on_fork, OnFork::ReadOnly);
        let (file, _) = source("create db --from file:/a:b");
        let of_format = |format| VolumeSource::File { path: "/a:b".to_owned(), format };
        assert_eq!(file, of_format(DiskFormat::Raw));
        assert_eq!(source("create db --from qcow2:/a:b").0, of_format(DiskFormat::Qcow2));
        let (stored, _) = source("create db --from snapshot:warm/data");
        let (snapshot, disk) = ("warm".to_owned(), "data".to_owned());
        assert_eq!(stored, VolumeSource::Snapshot { snapshot, disk });
        let location = "s3://bases/data.raw".to_owned();
        let (object, _) = source(&format!("create db --from {location}"));
        assert_eq!(object, VolumeSource::Object { location });
        let (relative, _) = source("create db --from file:db.raw");
        assert!(matches!(relative, VolumeSource::File { path, .. } if path.starts_with('/')));
    }

    #[test]
    fn what_is_no_volume_is_refused_before_the_daemon_is_asked() {
        for bad in [
            "create db",
            "create db --size 10G --from image:default",
            "create db --size ten",
            "create db --size 512K",
            "create ../db --size 1G",
            "create db --from tape:0",
            "create db --from file:",
            "create db --from image:../x",
            "create db --from s3://bases",
            "create db --size 1G --on-fork maybe",
            "rm",
            "rm ..",
            "inspect a/b",
            "set db",
            "attach web",
            "attach web ../db",
            "attach web db --disk A",
            "detach web",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
