//! Requests of a guest that its drives could not answer, and VMs that stop for them. No I/O.
//!
//! ```text
//!   BLOCK_IO_ERROR (action: stop), STOP ──► stalled ──cont: RESUME──► runs
//!                                              ▲                        │
//!                                              └────── fails again ─────┘
//! ```
//!
//! A VM stalls for a drive of kind [`DriveSlot::Disk`](crate::DriveSlot::Disk): the guest sees no
//! error, and the request is repeated when the VM is resumed. For other drives the guest gets the
//! error.

use super::wire::Event;

/// What a guest asked of a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOperation {
    Read,
    /// Discards and flushes, too.
    Write,
}

/// A guest's request that a drive could not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoError {
    /// The drive's index in the shape. `None`: QEMU names none of them.
    pub drive: Option<usize>,
    pub operation: IoOperation,
    /// The disk has no space left.
    pub no_space: bool,
    /// In QEMU's words; not for programs.
    pub reason: String,
    /// The VM stops. Otherwise the guest gets the error.
    pub stops: bool,
}

impl IoError {
    /// From a `BLOCK_IO_ERROR` event.
    pub fn of(event: &Event) -> Option<Self> {
        if event.name != "BLOCK_IO_ERROR" {
            return None;
        }
        let flag = |key| event.data.get(key).and_then(serde_json::Value::as_bool);
        let operation = match event.text("operation") {
            Some("read") => IoOperation::Read,
            _ => IoOperation::Write,
        };
        Some(Self {
            drive: event.text("node-name").and_then(drive_of),
            operation,
            no_space: flag("nospace").unwrap_or(false),
            reason: event.text("reason").unwrap_or("unknown").to_owned(),
            stops: event.text("action") == Some("stop"),
        })
    }
}

/// The drive whose node it is: `drive3` of a VM that has booted, `bound3` of a clone, `bound3.1` of
/// a disk that took another's place.
fn drive_of(node: &str) -> Option<usize> {
    let index = node.strip_prefix("drive").or_else(|| node.strip_prefix("bound"))?;
    index.split_once('.').map_or(index, |(index, _)| index).parse().ok()
}

/// What an event makes of a VM's stall. → whether it changes. The first error stands: others that
/// were in flight with it follow.
pub(super) fn update(stall: &mut Option<IoError>, event: &Event) -> bool {
    match event.name.as_str() {
        "RESUME" => stall.take().is_some(),
        _ if stall.is_some() => false,
        _ => {
            *stall = IoError::of(event).filter(|error| error.stops);
            stall.is_some()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(name: &str, data: serde_json::Value) -> Event {
        Event { name: name.to_owned(), data, time_us: 0 }
    }

    fn error(node: &str, action: &str) -> Event {
        let data = json!({
            "device": "", "node-name": node, "operation": "write", "action": action,
            "nospace": true, "reason": "No space left on device",
        });
        event("BLOCK_IO_ERROR", data)
    }

    #[test]
    fn an_error_names_its_drive() {
        let found = IoError::of(&error("bound3", "stop")).expect("one");
        assert_eq!((found.drive, found.operation), (Some(3), IoOperation::Write));
        assert!(found.no_space && found.stops);
        assert_eq!(found.reason, "No space left on device");
        assert_eq!(IoError::of(&error("drive0", "stop")).expect("one").drive, Some(0));
        assert_eq!(IoError::of(&error("bound2.17", "stop")).expect("one").drive, Some(2));
        for node in ["", "#block123", "bound", "boundless"] {
            assert_eq!(IoError::of(&error(node, "stop")).expect("one").drive, None, "{node}");
        }
    }

    #[test]
    fn what_a_later_qemu_leaves_out_is_unknown() {
        let found = IoError::of(&event("BLOCK_IO_ERROR", json!({"operation": "read"})));
        let found = found.expect("one");
        assert_eq!((found.drive, found.operation), (None, IoOperation::Read));
        assert!(!found.no_space && !found.stops);
        assert_eq!(IoError::of(&event("STOP", json!({}))), None);
    }

    #[test]
    fn a_vm_is_stalled_from_its_first_error_until_it_is_resumed() {
        let mut stall = None;
        assert!(!update(&mut stall, &event("STOP", json!(null))), "by its user");
        assert!(!update(&mut stall, &error("bound1", "report")), "the guest got it");
        assert!(update(&mut stall, &error("bound1", "stop")));
        assert!(!update(&mut stall, &event("STOP", json!(null))));
        assert!(!update(&mut stall, &error("bound2", "stop")), "the first one stands");
        assert_eq!(stall.as_ref().and_then(|stall| stall.drive), Some(1));
        assert!(update(&mut stall, &event("RESUME", json!(null))));
        assert_eq!(stall, None);
        assert!(update(&mut stall, &error("bound2", "stop")), "it fails again");
    }
}
