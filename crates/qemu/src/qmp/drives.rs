//! What the drives of a QEMU hold. The files of one that waits are bound when a clone gets it. A
//! disk may take the place of another while the VM runs.
//!
//! ```text
//!   -device virtio-blk-pci,id=disk0 ──► drive0: null-co, a placeholder
//!                                   ╲
//!   add-fd, blockdev-add, qom-set    ──► bound0: the clone's own file
//! ```
//!
//! A file, or the folder of a disk's socket, comes as an fd over the control socket. So QEMU needs
//! no right to any path, and its user needs no right to the file.

use std::os::fd::{AsFd, BorrowedFd};

use serde_json::{Value, json};

use super::client::ANSWER_TIMEOUT;
use super::status::not_understood;
use super::{Qmp, QmpError};
use crate::drives::{DriveContent, Drives, NbdSocket};
use crate::shape::DRIVES_MAX;

/// Above the one of [`Qmp::prepare_devices`]; each drive has the next.
const FD_SET_FIRST: usize = 16;
/// Of disks that take the place of others: above those.
const LATE_FD_SET_FIRST: usize = FD_SET_FIRST + DRIVES_MAX as usize;

impl Qmp {
    /// Put the files among these into the drives of a QEMU that was started with
    /// [`Launch::wait`](crate::Launch::wait), before [`Qmp::load_state`]. They have to fit its
    /// shape. It has its disks already.
    ///
    /// # Errors
    /// As [`Qmp::execute`]. QEMU is of no use then.
    pub async fn bind_files(&self, drives: &Drives) -> Result<(), QmpError> {
        for (index, drive) in drives.iter().enumerate() {
            if let DriveContent::ReadOnly(file) = drive {
                self.bind_file(index, drive, file.as_fd()).await?;
            }
        }
        Ok(())
    }

    async fn bind_file(
        &self,
        index: usize,
        drive: &DriveContent,
        file: BorrowedFd<'_>,
    ) -> Result<(), QmpError> {
        let path = format!("/dev/fdset/{}", fd_set(index));
        let add_fd = self.add_fd_to(fd_set(index), file);
        let add_node = self.ask("blockdev-add", Some(drive.node(&node_name(index), &path)));
        // Sent together: QEMU carries them out in this order. Not so the next drive's: QEMU drops
        // an fd that it has not taken yet when another one comes.
        let (added, opened, bound) = tokio::join!(biased; add_fd, add_node, self.set_drive(index));
        added.and(opened).and(bound)
    }

    /// Put another disk behind a drive of kind [`DriveSlot::Disk`](crate::DriveSlot::Disk) while
    /// the VM runs, and tell the guest its size. What the guest asked of the old disk before is
    /// carried out there; QEMU has closed it afterwards. → what to give as `earlier` when the drive
    /// gets its next disk. `number`: one that the drive has not had yet.
    ///
    /// # Errors
    /// [`QmpError::Disk`] if the disk's server can't be reached for 5 s, in which QEMU answers no
    /// other command; or as [`Qmp::execute`]. And which disk the drive has then.
    pub async fn replace_disk(
        &self,
        index: usize,
        number: u64,
        disk: &NbdSocket,
        size_bytes: u64,
        earlier: Option<LateFd>,
    ) -> Result<LateFd, NotReplaced> {
        let (old, fd) = self.prepare_replacement(index, disk).await.map_err(NotReplaced::at_all)?;
        let new = format!("{}.{number}", node_name(index));
        if let Err(error) = self.replace(index, (&old, &new), &fd, disk, size_bytes).await {
            // What QEMU did not answer in time it may have done later: it answers in order.
            let has_old = self.drive(index).await.is_ok_and(|node| node == old);
            if has_old {
                let _given_up = self.remove_fd(&fd).await;
            }
            return Err(NotReplaced { error, has_old });
        }
        if let Err(error) = self.ask("blockdev-del", Some(json!({"node-name": old}))).await {
            tracing::warn!(node = old, %error, "QEMU keeps a disk open that no drive has");
        }
        if let Some(earlier) = earlier
            && let Err(error) = self.remove_fd(&earlier).await
        {
            tracing::debug!(%error, "QEMU keeps the folder of a disk open");
        }
        Ok(fd)
    }

    /// The node that the drive has, and the fd of the next one's folder.
    async fn prepare_replacement(
        &self,
        index: usize,
        disk: &NbdSocket,
    ) -> Result<(String, LateFd), QmpError> {
        let old = self.drive(index).await?;
        let added = self.add_fd_to(LATE_FD_SET_FIRST.saturating_add(index), disk.folder()).await?;
        let fd = added.get("fd").and_then(Value::as_u64);
        let fd = fd.ok_or_else(|| not_understood("add-fd", &added))?;
        Ok((old, LateFd { index, fd }))
    }

    async fn replace(
        &self,
        index: usize,
        (old, new): (&str, &str),
        fd: &LateFd,
        disk: &NbdSocket,
        size_bytes: u64,
    ) -> Result<(), QmpError> {
        let path = format!("/proc/self/fd/{}", fd.fd);
        let delete_new = || self.ask("blockdev-del", Some(json!({"node-name": new})));
        if let Err(error) = self.ask("blockdev-add", Some(disk.node(new, &path))).await {
            if !matches!(error, QmpError::Refused { .. }) {
                let _closed = delete_new().await;
            }
            return Err(unreachable_disk(index, disk, error));
        }
        let mut told = self.point_drive(index, new).await;
        if told.is_err() && self.drive(index).await? == new {
            // Only its answer was late.
            told = Ok(());
        }
        if told.is_ok() {
            // To its own size: this is how the device is told that it changed.
            let resize = json!({"node-name": new, "size": size_bytes});
            told = self.ask("block_resize", Some(resize)).await.map(drop);
            if told.is_err() {
                let _back = self.point_drive(index, old).await;
            }
        }
        if told.is_err() {
            let _closed = delete_new().await;
        }
        told
    }

    /// The node behind a drive.
    async fn drive(&self, index: usize) -> Result<String, QmpError> {
        let drive = json!({"path": device(index), "property": "drive"});
        let found = self.ask("qom-get", Some(drive)).await?;
        let node = found.as_str().map(ToOwned::to_owned);
        node.ok_or_else(|| not_understood("qom-get", &found))
    }

    async fn add_fd_to(&self, set: usize, fd: BorrowedFd<'_>) -> Result<Value, QmpError> {
        let set = json!({"fdset-id": set});
        self.execute_with_fd("add-fd", Some(set), fd, ANSWER_TIMEOUT).await
    }

    async fn remove_fd(&self, fd: &LateFd) -> Result<(), QmpError> {
        let set = LATE_FD_SET_FIRST.saturating_add(fd.index);
        self.ask("remove-fd", Some(json!({"fdset-id": set, "fd": fd.fd}))).await.map(drop)
    }

    async fn set_drive(&self, index: usize) -> Result<(), QmpError> {
        self.point_drive(index, &node_name(index)).await
    }

    async fn point_drive(&self, index: usize, node: &str) -> Result<(), QmpError> {
        let drive = json!({"path": device(index), "property": "drive", "value": node});
        self.ask("qom-set", Some(drive)).await.map(drop)
    }
}

/// The folder of a disk's socket, as QEMU has it open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LateFd {
    index: usize,
    fd: u64,
}

/// A drive did not get another disk.
#[derive(Debug)]
pub struct NotReplaced {
    pub error: QmpError,
    /// Whether the drive has the disk that it had. Otherwise it has the new one, or QEMU does not
    /// say which, and may use either from now on.
    pub has_old: bool,
}

impl NotReplaced {
    fn at_all(error: QmpError) -> Self {
        Self { error, has_old: true }
    }
}

/// A node of a disk that QEMU refuses: it does not reach its server.
fn unreachable_disk(index: usize, disk: &NbdSocket, error: QmpError) -> QmpError {
    match error {
        QmpError::Refused { desc, .. } => QmpError::Disk {
            index,
            socket: disk.socket().to_owned(),
            export: disk.export().to_owned(),
            desc,
        },
        error => error,
    }
}

fn device(index: usize) -> String {
    format!("/machine/peripheral/disk{index}")
}

fn fd_set(index: usize) -> usize {
    FD_SET_FIRST.saturating_add(index)
}

fn node_name(index: usize) -> String {
    format!("bound{index}")
}
