//! The content of the drives of a QEMU that waits, bound when a clone gets it.
//!
//! ```text
//!   -device virtio-blk-pci,id=disk0 ──► drive0: null-co, a placeholder
//!                                   ╲
//!   add-fd, blockdev-add, qom-set    ──► bound0: the clone's own file or disk
//! ```
//!
//! A file, or the folder of a disk's socket, comes as an fd over the control socket. So QEMU needs
//! no right to any path, and its user needs no right to the file.

use std::os::fd::BorrowedFd;

use serde_json::{Value, json};

use super::client::ANSWER_TIMEOUT;
use super::status::not_understood;
use super::{Qmp, QmpError};
use crate::drives::{DriveContent, Drives, NbdSocket};

/// Above the one of [`Qmp::prepare_devices`]; each drive has the next.
const FD_SET_FIRST: usize = 16;

impl Qmp {
    /// Put content into the drives of a QEMU that was started with
    /// [`Launch::wait`](crate::Launch::wait), before [`Qmp::load_state`]. They have to fit its
    /// shape. The sizes are those of the files and exports.
    ///
    /// QEMU connects to the server of a disk here, so it has to run. QEMU tries for 5 s per disk.
    /// It answers no other command meanwhile.
    ///
    /// # Errors
    /// [`QmpError::Disk`] if a disk's server can't be reached, or as [`Qmp::execute`]. QEMU is of
    /// no use then.
    pub async fn bind_drives(&self, drives: &Drives) -> Result<(), QmpError> {
        for (index, drive) in drives.iter().enumerate() {
            match drive {
                DriveContent::ReadOnly(_) => self.bind_file(index, drive).await?,
                DriveContent::Disk(disk) => self.bind_disk(index, drive, disk).await?,
            }
        }
        Ok(())
    }

    async fn bind_file(&self, index: usize, drive: &DriveContent) -> Result<(), QmpError> {
        let path = format!("/dev/fdset/{}", fd_set(index));
        let add_fd = self.add_fd(index, drive.fd());
        let add_node = self.ask("blockdev-add", Some(drive.node(&node_name(index), &path)));
        // Sent together: QEMU carries them out in this order. Not so the next drive's: QEMU drops
        // an fd that it has not taken yet when another one comes.
        let (added, opened, bound) = tokio::join!(biased; add_fd, add_node, self.set_drive(index));
        added.and(opened).and(bound)
    }

    async fn bind_disk(
        &self,
        index: usize,
        drive: &DriveContent,
        disk: &NbdSocket,
    ) -> Result<(), QmpError> {
        // The node names the number that the folder has in QEMU, which only the answer tells.
        let added = self.add_fd(index, drive.fd()).await?;
        let number = added.get("fd").and_then(Value::as_u64);
        let number = number.ok_or_else(|| not_understood("add-fd", &added))?;
        let path = format!("/proc/self/fd/{number}");
        let add_node = self.ask("blockdev-add", Some(drive.node(&node_name(index), &path)));
        let (opened, bound) = tokio::join!(biased; add_node, self.set_drive(index));
        match opened {
            Err(QmpError::Refused { desc, .. }) => Err(QmpError::Disk {
                index,
                socket: disk.socket().to_owned(),
                export: disk.export().to_owned(),
                desc,
            }),
            opened => opened.map(drop).and(bound),
        }
    }

    async fn add_fd(&self, index: usize, fd: BorrowedFd<'_>) -> Result<Value, QmpError> {
        let set = json!({"fdset-id": fd_set(index)});
        self.execute_with_fd("add-fd", Some(set), fd, ANSWER_TIMEOUT).await
    }

    async fn set_drive(&self, index: usize) -> Result<(), QmpError> {
        let drive = json!({
            "path": format!("/machine/peripheral/disk{index}"),
            "property": "drive",
            "value": node_name(index),
        });
        self.ask("qom-set", Some(drive)).await.map(drop)
    }
}

fn fd_set(index: usize) -> usize {
    FD_SET_FIRST.saturating_add(index)
}

fn node_name(index: usize) -> String {
    format!("bound{index}")
}
