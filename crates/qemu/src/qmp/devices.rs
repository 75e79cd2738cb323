//! Device state out of a stopped QEMU in one command, without a migration: a third of the time.
//!
//! `xen-save-devices-state` is always there, Xen or not. It writes all state that is not RAM on
//! QEMU's main thread, and is done when it answers. What it writes lacks the sections that a
//! migration begins with: machine, capabilities, the list of RAM blocks, ROMs. They do not change
//! while a VM runs. They come from an ordinary migration of the same VM or of one that it is a
//! clone of, and `migrate-incoming` loads both in one:
//!
//! ```text
//!   migrate                  │ header │ configuration │ ram, ROMs │ timer … devices │ end │
//!                            └─────────────── lead ───────────────┘
//!   xen-save-devices-state                          │ header │ timer … devices │ end │
//!                                                            └──────── rest ─────────┘
//! ```

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use serde_json::json;

use super::client::ANSWER_TIMEOUT;
use super::{Qmp, QmpError};

/// One is prepared at a time.
const FD_SET: u32 = 1;
/// `QEVM` and the version.
const HEADER_BYTES: usize = 8;
/// A full section (4), number 0, of a device named `timer` (5 bytes): the first device of each
/// stream.
const FIRST_DEVICE: &[u8] = b"\x04\0\0\0\0\x05timer";

/// A file that QEMU holds ready for [`Qmp::save_devices`].
#[derive(Debug)]
#[must_use = "QEMU holds the file until `end_devices`"]
pub struct PreparedDevices {
    _private: (),
}

impl Qmp {
    /// Hand QEMU the file that the devices will go to; before the pause. It is emptied when they
    /// do.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; or the file can't be opened for writing.
    pub async fn prepare_devices(&self, file: BorrowedFd<'_>) -> Result<PreparedDevices, QmpError> {
        // QEMU looks for an fd with the very mode that it would open the file with.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let write_only = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| {
            let desc = format!("open the file again: {}", io::Error::from(errno));
            QmpError::Migration { operation: "save", desc }
        })?;
        let set = json!({"fdset-id": FD_SET});
        // One that was prepared for a fork that came to nothing would be taken for this one.
        match self.execute("remove-fd", Some(set.clone()), ANSWER_TIMEOUT).await {
            Ok(_) | Err(QmpError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        self.execute_with_fd("add-fd", Some(set), write_only.as_fd(), ANSWER_TIMEOUT).await?;
        Ok(PreparedDevices { _private: () })
    }

    /// Write the devices of the stopped VM to the prepared file.
    ///
    /// # Errors
    /// As [`Qmp::execute`]. The VM can go on, unless QEMU is lost or does not answer.
    pub async fn save_devices(
        &self,
        _file: &PreparedDevices,
        timeout: Duration,
    ) -> Result<(), QmpError> {
        let _turn = self.migration_turn().lock().await;
        let path = format!("/dev/fdset/{FD_SET}");
        // `live` would end the disks' use, as before a move to another host.
        let arguments = json!({"filename": path, "live": false});
        self.execute("xen-save-devices-state", Some(arguments), timeout).await.map(drop)
    }

    /// Have QEMU close the prepared file, used or not.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn end_devices(&self, _file: PreparedDevices) -> Result<(), QmpError> {
        let set = json!({"fdset-id": FD_SET});
        self.execute("remove-fd", Some(set), ANSWER_TIMEOUT).await.map(drop)
    }
}

/// What a migration's stream begins with, up to the first device. `None`: it looks unlike what is
/// known.
pub fn lead(stream: &[u8]) -> Option<&[u8]> {
    let mut found = stream.windows(FIRST_DEVICE.len()).enumerate();
    let (at, _) = found.find(|(_, bytes)| *bytes == FIRST_DEVICE)?;
    // Among ROMs it could be by chance: then it is not told which one is meant.
    let is_only = !found.any(|(_, bytes)| bytes == FIRST_DEVICE);
    (is_only && stream.starts_with(b"QEVM")).then(|| &stream[..at])
}

/// What [`Qmp::save_devices`] wrote, without its header: to be put behind a [`lead`]. `None`: it
/// looks unlike what is known.
pub fn rest(devices: &[u8]) -> Option<&[u8]> {
    let rest = devices.get(HEADER_BYTES..)?;
    (devices.starts_with(b"QEVM") && rest.starts_with(FIRST_DEVICE)).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_make_a_stream() {
        let migration = [b"QEVM\0\0\0\x03ram".as_slice(), FIRST_DEVICE, b"old\0"].concat();
        let devices = [b"QEVM\0\0\0\x03".as_slice(), FIRST_DEVICE, b"new\0"].concat();
        let whole = [lead(&migration).expect("known"), rest(&devices).expect("known")].concat();
        assert_eq!(whole, [b"QEVM\0\0\0\x03ram".as_slice(), FIRST_DEVICE, b"new\0"].concat());
    }

    #[test]
    fn what_is_not_known_is_not_used() {
        let twice = [b"QEVM\0\0\0\x03".as_slice(), FIRST_DEVICE, FIRST_DEVICE].concat();
        for stream in [b"".as_slice(), b"QEVM\0\0\0\x03ram", &twice, FIRST_DEVICE] {
            assert_eq!(lead(stream), None);
        }
        let other = [b"QEVM\0\0\0\x03x".as_slice(), FIRST_DEVICE].concat();
        for devices in [b"".as_slice(), b"QEVM", &other, FIRST_DEVICE] {
            assert_eq!(rest(devices), None);
        }
    }
}
