//! A list, from its first run to its last.

use vmfork_image::{PageRange, PageTable};

use super::{Background, Priority, Proposal};

/// Brings in the pages of a list in its order, once: a working set, a
/// [`Profile`](crate::Profile)'s, or all that is missing. A help, not a promise: what fails is left
/// to demand, or to another list.
#[derive(Debug)]
pub struct Listed {
    name: &'static str,
    priority: Priority,
    runs: std::vec::IntoIter<PageRange>,
    pages_max: u64,
}

impl Listed {
    /// `runs` may overlap each other and name pages that the image does not have: those are left
    /// out. `pages_max`: most pages of one fetch, at least 1.
    pub fn new(
        name: &'static str,
        priority: Priority,
        runs: Vec<PageRange>,
        pages_max: u64,
    ) -> Self {
        Self { name, priority, runs: runs.into_iter(), pages_max: pages_max.max(1) }
    }
}

impl Background for Listed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn priority(&self) -> Priority {
        self.priority
    }

    fn propose(&mut self, _: &PageTable) -> Option<Proposal> {
        let pages_max = self.pages_max;
        self.runs.next().map(|range| Proposal { range, pages_max })
    }

    fn is_done(&self) -> bool {
        self.runs.as_slice().is_empty()
    }
}
