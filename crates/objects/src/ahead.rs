//! Threads that fetch what is likely read next.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;

/// Units that are fetched at a time, over all objects.
const THREADS: usize = 4;
/// Units that wait for a thread. More are not fetched ahead.
const WAITING_MAX: usize = 32;

type Work = Box<dyn FnOnce() + Send>;

/// The threads end when this is dropped.
pub(crate) struct Ahead(SyncSender<Work>);

impl fmt::Debug for Ahead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ahead").finish_non_exhaustive()
    }
}

impl Ahead {
    /// # Errors
    /// No thread starts.
    pub(crate) fn start() -> io::Result<Self> {
        let (send, works) = sync_channel(WAITING_MAX);
        let works = Arc::new(Mutex::new(works));
        for _ in 0..THREADS {
            let works = Arc::clone(&works);
            let named = std::thread::Builder::new().name("object-ahead".to_owned());
            named.spawn(move || run(&works))?;
        }
        Ok(Self(send))
    }

    /// Have it done, if a thread is soon free. → whether it may be.
    pub(crate) fn put(&self, work: Work) -> bool {
        self.0.try_send(work).is_ok()
    }
}

fn run(works: &Mutex<Receiver<Work>>) {
    loop {
        let next = works.lock().recv();
        let Ok(work) = next else { return };
        // A panic is this unit's alone.
        let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    }
}
