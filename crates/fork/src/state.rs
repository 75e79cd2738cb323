//! The device state of a freeze: by QEMU's quick way where the lead of a migration's stream is
//! known, else by a migration. All freezes of one pause have that of the first.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use vmfork_qemu::qmp::{PreparedDevices, PreparedState, devices};

pub use crate::error::StateError;
use vmfork_host::vm::machine::{Lead, Machine};
use vmfork_host::vm::{DeviceState, Standstill};

/// How long QEMU may take to write 30 to 300 kB to memory.
const STATE_TIMEOUT: Duration = Duration::from_secs(20);
/// A state is a few hundred kB.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// Ready before the pause.
pub(super) struct Prepared {
    file: File,
    way: Way,
}

enum Way {
    Migration(PreparedState),
    Devices(PreparedDevices, Lead),
    /// An earlier freeze of this pause saved it.
    Kept(Option<Lead>),
}

/// `still`: what the VM is in, if it is paused.
///
/// # Errors
/// QEMU refuses, or the host is out of memory or fds.
pub(super) async fn prepare(
    machine: &Machine,
    still: Option<&Standstill>,
) -> Result<Prepared, StateError> {
    let saved = still.map(|still| still.saved.get()).transpose()?.flatten();
    if let Some(DeviceState { content, lead }) = saved {
        return Ok(Prepared { file: content.into(), way: Way::Kept(lead) });
    }
    let file = File::from(memory_file()?);
    if let Some(lead) = machine.lead() {
        match machine.qmp.prepare_devices(file.as_fd()).await {
            Ok(prepared) => return Ok(Prepared { file, way: Way::Devices(prepared, lead) }),
            Err(error) if error.is_lost() => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "device state goes by a migration");
                machine.set_lead(None);
            }
        }
    }
    let prepared = machine.qmp.prepare_state_fd(file.as_fd()).await?;
    Ok(Prepared { file, way: Way::Migration(prepared) })
}

/// Saved, with the VM stopped; [`Saved::complete`] does what need not be in the pause.
pub(super) struct Saved {
    file: File,
    by: By,
}

/// How it was saved.
enum By {
    Migration,
    Devices(PreparedDevices, Lead),
    Before(Option<Lead>),
}

impl Prepared {
    /// # Errors
    /// QEMU could not save it. The VM can go on.
    pub(super) async fn save(self, machine: &Machine) -> Result<Saved, StateError> {
        let Self { file, way } = self;
        match way {
            Way::Migration(prepared) => {
                machine.qmp.migrate(prepared, STATE_TIMEOUT).await?;
                Ok(Saved { file, by: By::Migration })
            }
            Way::Devices(prepared, lead) => {
                if let Err(error) = machine.qmp.save_devices(&prepared, STATE_TIMEOUT).await {
                    // The next one by a migration.
                    machine.set_lead(None);
                    return Err(error.into());
                }
                Ok(Saved { file, by: By::Devices(prepared, lead) })
            }
            Way::Kept(lead) => Ok(Saved { file, by: By::Before(lead) }),
        }
    }
}

impl Saved {
    /// → what clones load, and the lead for their own forks. Later freezes of the same pause
    /// (`still`) get the same.
    ///
    /// # Errors
    /// What QEMU wrote makes no sense, or the host is out of memory.
    pub(super) async fn complete(
        self,
        machine: &Machine,
        still: Option<&Standstill>,
    ) -> Result<DeviceState, StateError> {
        let done = match self.by {
            By::Before(lead) => DeviceState { content: self.file.into(), lead },
            By::Migration => {
                if !machine.has_lead() {
                    let lead = devices::lead(&content(&self.file)?).map(Lead::from);
                    machine.set_lead(lead);
                }
                DeviceState { content: self.file.into(), lead: machine.lead() }
            }
            By::Devices(prepared, lead) => {
                machine.qmp.end_devices(prepared).await?;
                let written = content(&self.file)?;
                let Some(rest) = devices::rest(&written) else {
                    machine.set_lead(None);
                    return Err(StateError::Form);
                };
                let whole = File::from(memory_file()?);
                whole.write_all_at(&lead, 0)?;
                whole.write_all_at(rest, lead.len() as u64)?;
                DeviceState { content: whole.into(), lead: Some(lead) }
            }
        };
        if let Some(still) = still {
            still.saved.keep(done.try_clone()?);
        }
        Ok(done)
    }
}

/// What the stream of a VM's device state begins with, if it is of a known form.
pub fn lead_of(state: &[u8]) -> Option<Lead> {
    devices::lead(state).map(Lead::from)
}

/// A device state, from memory.
///
/// # Errors
/// It is too large to be one.
pub fn read(state: &OwnedFd) -> Result<Vec<u8>, StateError> {
    content(&File::from(state.try_clone()?))
}

/// A device state, to memory, for QEMU to load.
///
/// # Errors
/// The host is out of memory or fds.
pub fn write(state: &[u8]) -> Result<OwnedFd, StateError> {
    let file = File::from(memory_file()?);
    file.write_all_at(state, 0)?;
    Ok(file.into())
}

fn content(file: &File) -> Result<Vec<u8>, StateError> {
    let bytes = file.metadata()?.len();
    if bytes > STATE_BYTES_MAX {
        return Err(StateError::Form);
    }
    let mut content = vec![0; usize::try_from(bytes).unwrap_or(0)];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

fn memory_file() -> Result<OwnedFd, std::io::Error> {
    Ok(rustix::fs::memfd_create("vmfork-state", MemfdFlags::CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use vmfork_host::testing::Host;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn later_freezes_of_a_pause_have_the_state_of_the_first_and_ask_qemu_nothing() {
        let host = Host::start().await;
        let machine = vmfork_host::testing::machine(&host.folder().join("fake")).await;
        let still = Standstill::default();
        let lead = Lead::from(b"QEVM".as_slice());
        machine.set_lead(Some(Lead::clone(&lead)));
        let first = Saved { file: write(b"first").expect("memory").into(), by: By::Migration };
        first.complete(&machine, Some(&still)).await.expect("saved");
        // From now on each question to QEMU fails.
        machine.process.kill();
        machine.process.exit().await;
        machine.set_lead(None);
        for _ in 0..2 {
            let prepared = prepare(&machine, Some(&still)).await.expect("kept");
            let saved = prepared.save(&machine).await.expect("kept");
            let done = saved.complete(&machine, Some(&still)).await.expect("kept");
            assert_eq!(read(&done.content).expect("readable"), b"first");
            assert_eq!(done.lead.as_ref(), Some(&lead));
        }
        assert!(prepare(&machine, Some(&Standstill::default())).await.is_err(), "another pause");
    }
}
