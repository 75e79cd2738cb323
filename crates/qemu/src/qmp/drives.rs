//! The content of the drives of a QEMU that waits, bound when a clone gets it.
//!
//! ```text
//!   -device virtio-blk-pci,id=disk0 ──► drive0: null-co, a placeholder
//!                                   ╲
//!   add-fd, blockdev-add, qom-set    ──► bound0: the clone's own file
//! ```
//!
//! The file comes as an fd over the control socket. So QEMU needs no right to any path, and its
//! user needs no right to the file.

use serde_json::{Value, json};

use super::client::ANSWER_TIMEOUT;
use super::{Qmp, QmpError};
use crate::drives::Drives;

/// Above the one of [`Qmp::prepare_devices`]; each drive has the next.
const FD_SET_FIRST: usize = 16;

impl Qmp {
    /// Put content into the drives of a QEMU that was started with
    /// [`Launch::wait`](crate::Launch::wait), before [`Qmp::load_state`]. They have to fit its
    /// shape. The sizes are those of the files.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; QEMU is of no use then.
    pub async fn bind_drives(&self, drives: &Drives) -> Result<(), QmpError> {
        for (index, file) in drives.files().enumerate() {
            let set = FD_SET_FIRST.saturating_add(index);
            let add_fd = json!({"fdset-id": set});
            let add_fd = self.execute_with_fd("add-fd", Some(add_fd), file, ANSWER_TIMEOUT);
            let add_node = self.ask("blockdev-add", Some(node(index, set)));
            let drive = json!({
                "path": format!("/machine/peripheral/disk{index}"),
                "property": "drive",
                "value": format!("bound{index}"),
            });
            let set_drive = self.ask("qom-set", Some(drive));
            // Sent together: QEMU carries them out in this order. Not so the next drive's: QEMU
            // drops an fd that it has not taken yet when another one comes.
            let (added, opened, bound) = tokio::join!(biased; add_fd, add_node, set_drive);
            added.and(opened).and(bound)?;
        }
        Ok(())
    }
}

/// A read-only file, as a QEMU that boots has it.
fn node(index: usize, set: usize) -> Value {
    json!({
        "driver": "file",
        "node-name": format!("bound{index}"),
        "filename": format!("/dev/fdset/{set}"),
        "read-only": true,
        "locking": "off",
    })
}
