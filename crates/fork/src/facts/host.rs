//! Whether this host is what a frozen VM needs, asked of the host itself.

use std::time::Instant;

use tokio::sync::oneshot;
use vmfork_guest_image::ImageFiles;
use vmfork_qemu::{DriveContent, Drives, QmpError, Shape, probe};

use super::Facts;
use crate::error::{Error, Unlike};
use vmfork_host::core::{Core, PendingMachine, open_image};
use vmfork_host::vm::DriveSpec;
use vmfork_host::vm::machine::Machine;

/// The machine type of a QEMU, with its version.
///
/// # Errors
/// It has gone.
pub async fn machine_type(machine: &Machine) -> Result<String, QmpError> {
    let answer = machine.qmp.qom_get("/machine", "type").await?;
    let name = answer.as_str().unwrap_or_default();
    Ok(name.strip_suffix("-machine").unwrap_or(name).to_owned())
}

/// Whether this host's QEMU and processor are those that it was taken on.
///
/// # Errors
/// It is not, or can't be told.
pub async fn check_qemu(core: &Core, facts: &Facts) -> Result<(), Error> {
    let binary = probe::find(Some(&core.config.qemu)).await.map_err(Error::NoQemu)?;
    Ok(facts.check_host(binary.version)?)
}

/// Whether this host's QEMUs are of the machine type that it was taken on. All of a shape are: the
/// first that can be asked tells it. Whether there is one at all is told by who takes it.
///
/// # Errors
/// It is another one: names both.
pub async fn check_machine(
    facts: &Facts,
    pending: &mut [PendingMachine],
    deadline: Instant,
) -> Result<(), Unlike> {
    for place in pending {
        let Ok(Ok(started)) = tokio::time::timeout_at(deadline.into(), &mut *place).await else {
            return Ok(());
        };
        let found = match &started {
            Ok((machine, _)) => machine_type(machine).await.ok(),
            Err(_) => None,
        };
        let (back_tx, back) = oneshot::channel();
        let _waits = back_tx.send(started);
        *place = back;
        if let Some(found) = found {
            return super::check_machine(&facts.machine, &found);
        }
    }
    Ok(())
}

/// The machine that it needs, and what its drives hold.
///
/// # Errors
/// The guest image is missing here, or another one; the VM has what can't be connected here.
pub fn shape_and_drives(core: &Core, facts: &Facts) -> Result<(Shape, Drives), Error> {
    facts.check_devices()?;
    let shape = facts.shape().map_err(Unlike::Shape)?;
    let files = facts.spec().drives.iter().map(|drive| {
        let DriveSpec::Root { .. } = drive else { return Ok(None) };
        let files = same_image_files(core, facts)?;
        facts.check_pmem(files.metadata.root_bytes())?;
        Ok(files.root.map(|root| DriveContent::ReadOnly(root.into())))
    });
    let files: Vec<_> = files.filter_map(Result::transpose).collect::<Result<_, Error>>()?;
    let drives = Drives::new(shape.guest, files).map_err(Error::Drives)?;
    Ok((shape, drives))
}

/// The image that its VM booted from, as it was then, if that is here; else, what has its name now.
///
/// # Errors
/// There is no image of that name here.
pub fn image_files(core: &Core, facts: &Facts) -> Result<ImageFiles, Error> {
    let (image, root) = (&facts.spec().image, facts.spec().root_blake3());
    let files = match root.map(|blake3| core.images.open_root(image, blake3)) {
        Some(Ok(Some(files))) => files,
        _ => open_image(core, image)?,
    };
    if root.is_some() && files.metadata.root_stored.is_some() {
        return Err(Unlike::RootStored { image: image.clone() }.into());
    }
    Ok(files)
}

/// The image that its VM booted from, with the same root disk, if it has one of an image.
///
/// # Errors
/// It is missing here, or another one.
pub fn same_image_files(core: &Core, facts: &Facts) -> Result<ImageFiles, Error> {
    let files = image_files(core, facts)?;
    if facts.spec().root_blake3().is_some() {
        facts.check_root(files.metadata.root_blake3())?;
    }
    Ok(files)
}
