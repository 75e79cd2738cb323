//! What a member writes down.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vmfork_cluster::{Folder, FolderError, Roster, Tokens};

/// The folder of a membership while that lasts. One writes at a time, and what is newest by then:
/// no older book comes over a newer one. After the end nothing is written, so that a late answer
/// does not spoil the next membership's folder.
#[derive(Debug)]
pub(super) struct Records(Mutex<Option<Folder>>);

impl Records {
    pub(super) fn new(folder: Folder) -> Self {
        Self(Mutex::new(Some(folder)))
    }

    fn folder(&self) -> MutexGuard<'_, Option<Folder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Write down who is a member.
    ///
    /// # Errors
    /// It can't be written.
    pub(super) fn save_members(&self, roster: &Roster) -> Result<(), FolderError> {
        let folder = self.folder();
        let Some(folder) = &*folder else { return Ok(()) };
        folder.save_members(&roster.read(Clone::clone))
    }

    /// Write down what lets others in. The caller has them locked.
    ///
    /// # Errors
    /// It can't be written.
    pub(super) fn save_tokens(&self, tokens: &Tokens) -> Result<(), FolderError> {
        self.folder().as_ref().map_or(Ok(()), |folder| folder.save_tokens(tokens))
    }

    /// Nothing is written any more. The first to ask gets the folder.
    pub(super) fn close(&self) -> Option<Folder> {
        self.folder().take()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmfork_cluster::{Cluster, Now};

    use super::*;

    #[test]
    fn the_newest_book_is_the_one_that_is_written_down_and_none_after_the_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("cluster");
        let keys = Cluster::init("a", "10.0.0.1:7070").expect("good");
        let records = Records::new(Folder::create(&path, &keys).expect("made"));
        let roster = Roster::new(keys.members);
        let own = roster.read(|book| book.own());
        let now = Now { monotonic: Duration::ZERO, unix_s: 0 };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        roster.change(|book| {
                            book.drain(own, now).expect("a member");
                            book.activate(own, now).expect("a member");
                        });
                        records.save_members(&roster).expect("nobody is in the way");
                    }
                });
            }
        });
        let written = || Folder::open(&path).expect("good").expect("there").cluster.members;
        let newest = roster.read(Clone::clone).to_json();
        assert_eq!(written().to_json(), newest);
        assert!(records.close().is_some() && records.close().is_none());
        roster.change(|book| book.drain(own, now)).expect("a member");
        records.save_members(&roster).expect("nothing to do");
        assert_eq!(written().to_json(), newest, "nothing is written after the end");
    }
}
