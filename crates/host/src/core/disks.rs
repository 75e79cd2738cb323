//! The root disks in use, by what the pool knows of them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use vmfork_qemu::DiskId;

/// Finds the disk of a shape. Only the machines that have it hold it open.
/// The file of an image that was replaced is removed with the last of them.
#[derive(Debug, Default)]
pub struct Disks {
    open: Mutex<HashMap<DiskId, Weak<OwnedFd>>>,
}

impl Disks {
    /// Let others find this disk, as long as someone holds what is returned: the one that is open
    /// already, if any.
    pub fn share(&self, id: DiskId, disk: OwnedFd) -> Arc<OwnedFd> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, disk| disk.strong_count() > 0);
        if let Some(there) = open.get(&id).and_then(Weak::upgrade) {
            return there;
        }
        let disk = Arc::new(disk);
        open.insert(id, Arc::downgrade(&disk));
        disk
    }

    /// `None`: all who had it have ended.
    pub fn get(&self, id: DiskId) -> Option<Arc<OwnedFd>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).get(&id)?.upgrade()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn a_disk_is_let_go_by_the_last_who_has_it() {
        let disks = Disks::default();
        // Of a pipe one can tell whether its other end is open.
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let hung_up = || {
            let mut fds = [PollFd::new(&reader, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).expect("poll");
            fds[0].revents().contains(PollFlags::HUP)
        };
        let id = DiskId::of(&writer).expect("open");
        let booted = disks.share(id, writer);
        let waiting = disks.get(id).expect("in use");
        drop(booted);
        assert!(!hung_up());
        drop(waiting);
        assert!(hung_up(), "no machine has it, and the file is still open");
        assert!(disks.get(id).is_none());
        // The next one leaves no trace of it.
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"root").and_then(|()| file.seek(SeekFrom::Start(0))).expect("written");
        let id = DiskId::of(&file).expect("open");
        let disk = disks.share(id, file.into());
        let again = disk.try_clone().expect("fds left");
        assert!(Arc::ptr_eq(&disk, &disks.share(id, again)), "one fd is enough");
        assert_eq!(disks.open.lock().expect("whole").len(), 1);
    }
}
