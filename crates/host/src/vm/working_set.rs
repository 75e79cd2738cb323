//! What clones of a VM on other hosts waited for, or touched where that is known. The VM's next
//! fork sends it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vmfork_image::PageRange;
use vmfork_policy::transfer::Demanded;

/// 512 MiB: at most this much is sent to a host where no VM asked for it.
const PAGES_MAX: u64 = 131_072;

/// Of one VM.
#[derive(Debug)]
pub struct WorkingSet(Mutex<Demanded>);

impl Default for WorkingSet {
    fn default() -> Self {
        Self(Mutex::new(Demanded::new(PAGES_MAX)))
    }
}

impl WorkingSet {
    fn demanded(&self) -> MutexGuard<'_, Demanded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A VM waits for these.
    pub fn record(&self, range: PageRange) {
        self.demanded().record(range);
    }

    /// A clone has touched these and no others.
    pub fn refine(&self, touched: &[PageRange]) {
        self.demanded().refine(touched);
    }

    /// All that a VM waited for, in the order of the first requests.
    pub fn runs(&self) -> Vec<PageRange> {
        self.demanded().ahead()
    }
}
