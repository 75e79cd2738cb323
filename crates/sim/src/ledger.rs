//! Are the promises kept?

use vmfork_image::{PageIdx, PageRange};
use vmfork_policy::Presence as _;

use crate::cache::Cache;

/// More violations than this say nothing new.
const VIOLATIONS_MAX: usize = 20;

/// What came to each host, by what the wire says and not the state machines.
#[derive(Debug)]
pub(crate) struct Ledger {
    hosts: Vec<Entry>,
    /// Pages that were sent to the group, and those that were sent more than once.
    sent: Cache,
    resent: Cache,
    pub(crate) arrived_pages: u64,
    pub(crate) duplicate_pages: u64,
    pub(crate) given_up_pages: u64,
    pub(crate) violations: Vec<String>,
}

#[derive(Debug)]
struct Entry {
    arrived: Cache,
    /// May come twice: a waiter gave up, and asked again.
    excused: Cache,
}

impl Ledger {
    pub(crate) fn new(pages: u64, hosts: usize) -> Self {
        let entry = |_| Entry { arrived: Cache::new(pages), excused: Cache::new(pages) };
        Self {
            hosts: (0..=hosts).map(entry).collect(),
            sent: Cache::new(pages),
            resent: Cache::new(pages),
            arrived_pages: 0,
            duplicate_pages: 0,
            given_up_pages: 0,
            violations: Vec::new(),
        }
    }

    pub(crate) fn violated(&mut self, what: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(what);
        }
    }

    /// A host stopped waiting for an answer.
    pub(crate) fn gave_up(&mut self, host: usize, pages: PageRange) {
        self.hosts[host].excused.insert(pages);
        self.given_up_pages += pages.len();
    }

    pub(crate) fn sent_to_group(&mut self, pages: PageRange) {
        if self.sent.insert(pages) < pages.len() {
            self.resent.insert(pages);
        }
    }

    /// Pages are in at a host. `copied`: the network has made two of one.
    pub(crate) fn arrived(&mut self, host: usize, pages: PageRange, copied: bool) {
        let entry = &self.hosts[host];
        self.arrived_pages += pages.len();
        if entry.arrived.next_absent(pages) == Some(pages) {
            entry.arrived.insert(pages);
            return;
        }
        let excused = |page: &PageIdx| {
            copied || entry.excused.is_present(*page) || self.resent.is_present(*page)
        };
        let twice = |page: &PageIdx| entry.arrived.is_present(*page);
        let without = pages.pages().find(|page| twice(page) && !excused(page));
        self.duplicate_pages += pages.len() - entry.arrived.insert(pages);
        if let Some(page) = without {
            self.violated(format!(
                "promise 4: page {page} came to host {host} twice, and no host had asked again"
            ));
        }
    }

    /// What a host holds must have come to it.
    pub(crate) fn holds(&mut self, host: usize, pages: u64, cache: &Cache) {
        let arrived = &self.hosts[host].arrived;
        let made_up = PageRange::first(pages)
            .pages()
            .find(|page| cache.is_present(*page) && !arrived.is_present(*page));
        if let Some(page) = made_up {
            self.violated(format!("host {host} holds page {page}, which never came to it"));
        }
    }
}
