//! Who may write how much: a quota for a set of disks, and a floor of free space on the host.
//!
//! ```text
//!   a family's disks ──► a user's ──► the host's      each set may have a quota
//! ```
//!
//! Promises: a write that would pass one of them fails as `StorageFull` before it changes anything.
//! Pages that a layer has already need no new space, so a full host still takes writes to them.
//!
//! Left to others: which disks are a set, and within which others it is.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vmfork_image::PAGE_BYTES;

use crate::counters::Counter;

/// Written at most between two looks at the free space. The floor should be several times as large.
const UNSEEN_BYTES_MAX: u64 = 16 << 20;
/// How long a look at the free space counts: others fill the host, too.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A write that was refused longer ago is no reason for what stands still now.
const REFUSAL_FRESH: Duration = Duration::from_secs(10);

/// The free space of a file system, which is to stay above a floor.
#[derive(Debug)]
pub(crate) struct Floor {
    folder: File,
    floor_bytes: u64,
    /// What may be written before the next look.
    left: AtomicU64,
    look: Mutex<Look>,
    pub(crate) looks: Counter,
    pub(crate) refused: Counter,
}

#[derive(Debug, Default)]
struct Look {
    at: Option<Instant>,
    /// The floor is nearer than the next look.
    tight: bool,
}

impl Floor {
    pub(crate) fn new(folder: File, floor_bytes: u64) -> Self {
        Self {
            folder,
            floor_bytes,
            left: AtomicU64::new(0),
            look: Mutex::default(),
            looks: Counter::default(),
            refused: Counter::default(),
        }
    }

    fn take_left(&self, bytes: u64) -> bool {
        let enough = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough).is_ok()
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        let mut look = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = look.at.is_some_and(|at| at.elapsed() < LOOK_EVERY);
        if fresh && self.take_left(bytes) {
            return Ok(());
        }
        if !(fresh && look.tight) {
            self.looks.add(1);
            let found = rustix::fs::fstatvfs(&self.folder)?;
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            let room = free.saturating_sub(self.floor_bytes);
            // A single write may be larger than what is looked at in one go.
            let unseen = UNSEEN_BYTES_MAX.max(bytes);
            *look = Look { at: Some(Instant::now()), tight: room < unseen };
            self.left.store(room.min(unseen), Ordering::Relaxed);
            if self.take_left(bytes) {
                return Ok(());
            }
        }
        self.refused.add(1);
        let text = format!("the host is to keep {} bytes free: free some space", self.floor_bytes);
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
    }
}

/// Disks that share a quota.
///
/// The pages that layers hold are counted, frozen layers too, as long as they exist. A layer counts
/// once, on the set of the disk that made it, however many disks and images show it. So what a
/// parent wrote before a fork counts once for the parent and all its clones. A clone is a disk of
/// the set that its [`DiskSpec`](crate::DiskSpec) names, and what it writes counts there. A page
/// that is written again after a freeze counts twice, as long as an image shows the old one.
///
/// A layer that several were merged into counts from when it has replaced them. While an older
/// image keeps some of those, these count too. After a restart, a layer counts on the set for which
/// it is opened first.
///
/// Not counted: what disks lie on, and maps, notes and tables.
///
/// A freeze needs nothing of a quota, and a merge neither.
///
/// What a set counts, those count that it is [within](DiskSet::within).
#[derive(Debug)]
pub struct DiskSet {
    /// For people.
    name: String,
    within: Option<Arc<Self>>,
    /// The largest number: no quota.
    quota_bytes: AtomicU64,
    used: AtomicU64,
    /// What is no layer of the set.
    others_bytes: AtomicU64,
    /// Of the last write that was refused: when, and by which quota. `None`: by none.
    refused: Mutex<Option<(Instant, String)>>,
}

impl DiskSet {
    /// `None`: no quota.
    pub fn new(quota_bytes: Option<u64>) -> Arc<Self> {
        Self::named("the disks' quota", quota_bytes, None)
    }

    /// A set with its own quota, whose bytes count on `within`, too. `name` is for people, as in
    /// "1 of 1 bytes of NAME are used".
    pub fn named(
        name: impl Into<String>,
        quota_bytes: Option<u64>,
        within: Option<Arc<Self>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            within,
            quota_bytes: AtomicU64::new(quota_bytes.unwrap_or(u64::MAX)),
            used: AtomicU64::new(0),
            others_bytes: AtomicU64::new(0),
            refused: Mutex::default(),
        })
    }

    /// A set without a quota of its own, whose bytes count on `other`, too.
    pub fn within(other: &Arc<Self>) -> Arc<Self> {
        Self::named("the disks' quota", None, Some(Arc::clone(other)))
    }

    /// Whether what it counts counts on `other`, too.
    pub fn is_within(&self, other: &Self) -> bool {
        let mut sets = self.and_above();
        sets.any(|set| std::ptr::eq(set, other))
    }

    /// It, and those that it is within.
    fn and_above(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |set| set.within.as_deref())
    }

    /// Counts bytes that are in no layer of the set, in the place of what was said before.
    pub fn set_others_bytes(&self, bytes: u64) {
        self.others_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Which quota a write to a disk of this set would have passed just now.
    pub fn refusal(&self) -> Option<String> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = refused.as_ref().filter(|(at, _)| at.elapsed() < REFUSAL_FRESH);
        fresh.map(|(_, text)| text.clone())
    }

    fn refuse(&self, by: Option<String>) {
        let refused = by.map(|text| (Instant::now(), text));
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = refused;
    }

    /// What its layers may hold, in bytes. `None`: no quota.
    pub fn quota_bytes(&self) -> Option<u64> {
        Some(self.quota_bytes.load(Ordering::Relaxed)).filter(|quota| *quota < u64::MAX)
    }

    /// Another quota, for all writes that begin from now on. One below what is used removes
    /// nothing: writes to new pages fail as `StorageFull` until enough is given back.
    pub fn set_quota_bytes(&self, quota_bytes: Option<u64>) {
        self.quota_bytes.store(quota_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// What is counted, in bytes. May be more than the quota.
    pub fn used_bytes(&self) -> u64 {
        let (used, others) = (&self.used, &self.others_bytes);
        used.load(Ordering::Relaxed).saturating_add(others.load(Ordering::Relaxed))
    }

    /// On this set and those that it is within, or on none.
    ///
    /// # Errors
    /// Which quota that would pass.
    fn take(&self, bytes: u64) -> Result<(), String> {
        for set in self.and_above() {
            if let Err(text) = set.take_here(bytes) {
                let before = self.and_above().take_while(|below| !std::ptr::eq(*below, set));
                before.for_each(|below| below.give_here(bytes));
                return Err(text);
            }
        }
        Ok(())
    }

    fn take_here(&self, bytes: u64) -> Result<(), String> {
        let quota = self.quota_bytes.load(Ordering::Relaxed);
        let may = quota.saturating_sub(self.others_bytes.load(Ordering::Relaxed));
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= may);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map(drop).map_err(|_used| {
            format!("{} of {quota} bytes of {} are used", self.used_bytes(), self.name)
        })
    }

    /// Whatever the quotas are.
    fn add(&self, bytes: u64) {
        for set in self.and_above() {
            set.used.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    fn give(&self, bytes: u64) {
        self.and_above().for_each(|set| set.give_here(bytes));
    }

    fn give_here(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What one layer holds, on the account of its set.
#[derive(Debug)]
pub(crate) struct Charge {
    set: Arc<DiskSet>,
    floor: Arc<Floor>,
    pages: AtomicU64,
}

impl Charge {
    /// Of a layer that holds `pages`, which are counted whatever the quota is.
    pub(crate) fn new(set: Arc<DiskSet>, floor: Arc<Floor>, pages: u64) -> Self {
        set.add(pages * PAGE_BYTES);
        Self { set, floor, pages: AtomicU64::new(pages) }
    }

    pub(crate) fn set(&self) -> &Arc<DiskSet> {
        &self.set
    }

    /// # Errors
    /// `StorageFull`: nothing is taken.
    pub(crate) fn take(&self, pages: u64) -> io::Result<()> {
        if pages == 0 {
            return Ok(());
        }
        if let Err(text) = self.set.take(pages * PAGE_BYTES) {
            self.set.refuse(Some(text.clone()));
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        if let Err(error) = self.floor.take(pages * PAGE_BYTES) {
            self.set.give(pages * PAGE_BYTES);
            self.set.refuse(None);
            return Err(error);
        }
        self.pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Looks whether the floor leaves room for `bytes` that are not pages, and counts them there.
    ///
    /// # Errors
    /// `StorageFull`.
    pub(crate) fn room(&self, bytes: u64) -> io::Result<()> {
        if bytes == 0 { Ok(()) } else { self.floor.take(bytes) }
    }

    /// Counts pages whatever the quota is.
    pub(crate) fn add(&self, pages: u64) {
        self.set.add(pages * PAGE_BYTES);
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    pub(crate) fn give(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
        self.set.give(pages * PAGE_BYTES);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set.give(*self.pages.get_mut() * PAGE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floor(bytes: u64) -> Arc<Floor> {
        let folder = File::open("/").expect("a folder");
        Arc::new(Floor::new(folder, bytes))
    }

    #[test]
    fn a_quota_counts_what_layers_hold_until_they_end() {
        let set = DiskSet::new(Some(10 * PAGE_BYTES));
        let (one, two) = (
            Charge::new(Arc::clone(&set), floor(0), 2),
            Charge::new(Arc::clone(&set), floor(0), 0),
        );
        two.take(8).expect("it fits");
        let full = one.take(1).expect_err("full");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert_eq!(full.to_string(), "40960 of 40960 bytes of the disks' quota are used");
        two.give(1);
        one.take(1).expect("it fits");
        drop(two);
        assert_eq!(set.used_bytes(), 3 * PAGE_BYTES);
    }

    #[test]
    fn a_quota_holds_for_the_next_write_and_one_below_what_is_used_removes_nothing() {
        let set = DiskSet::new(None);
        assert_eq!(set.quota_bytes(), None);
        let charge = Charge::new(Arc::clone(&set), floor(0), 0);
        charge.take(10).expect("no quota");
        set.set_quota_bytes(Some(5 * PAGE_BYTES));
        assert_eq!((set.quota_bytes(), set.used_bytes()), (Some(20480), 40960));
        charge.take(1).expect_err("full");
        charge.give(5);
        charge.take(1).expect_err("full");
        charge.give(1);
        charge.take(1).expect("it fits");
        set.set_quota_bytes(Some(6 * PAGE_BYTES));
        charge.take(1).expect("it fits");
        charge.take(1).expect_err("full");
        set.set_quota_bytes(None);
        charge.take(1).expect("no quota");
    }

    #[test]
    fn a_set_within_others_needs_room_in_all_of_them() {
        let host = DiskSet::named("the host's disk quota", Some(20 * PAGE_BYTES), None);
        let user =
            |name: &str| DiskSet::named(name, Some(12 * PAGE_BYTES), Some(Arc::clone(&host)));
        let (ann, bob) = (user("ann's disk quota"), user("bob's disk quota"));
        let charge = |of: &Arc<DiskSet>| {
            let set = DiskSet::within(of);
            (Charge::new(Arc::clone(&set), floor(0), 0), set)
        };
        let ((one, set), (two, other)) = (charge(&ann), charge(&bob));
        assert!(set.is_within(&ann) && set.is_within(&host) && !set.is_within(&bob));
        one.take(12).expect("it fits");
        assert_eq!(one.take(1).expect_err("full").kind(), io::ErrorKind::StorageFull);
        let by = |set: &DiskSet| set.refusal().unwrap_or_default();
        assert_eq!(by(&set), "49152 of 49152 bytes of ann's disk quota are used");
        assert_eq!(other.refusal(), None, "that is another family's");
        two.take(8).expect("it fits");
        two.take(1).expect_err("the host is full");
        assert_eq!(by(&other), "81920 of 81920 bytes of the host's disk quota are used");
        let used = |set: &DiskSet| set.used_bytes() / PAGE_BYTES;
        assert_eq!((used(&set), used(&bob), used(&host)), (12, 8, 20), "a refusal takes nothing");
        // What is no layer of a set fills it as well.
        one.give(4);
        host.set_others_bytes(3 * PAGE_BYTES);
        two.take(2).expect_err("the host is full");
        two.take(1).expect("it fits");
        host.set_others_bytes(0);
        two.take(3).expect("it fits");
        drop((one, two));
        assert_eq!((used(&ann), used(&bob), used(&host)), (0, 0, 0));
        // A floor is no quota.
        let tight = Charge::new(Arc::clone(&set), floor(u64::MAX), 0);
        tight.take(1).expect_err("full");
        assert_eq!(set.refusal(), None);
    }

    #[test]
    fn a_floor_is_looked_at_once_for_many_writes_and_a_refusal_takes_nothing() {
        let set = DiskSet::new(None);
        let roomy = floor(0);
        let charge = Charge::new(Arc::clone(&set), Arc::clone(&roomy), 0);
        (0..100).for_each(|_| charge.take(1).expect("it fits"));
        assert!(roomy.looks.get() < 50, "{} looks", roomy.looks.get());
        let charge = Charge::new(Arc::clone(&set), floor(u64::MAX), 0);
        assert_eq!(charge.take(1).expect_err("full").kind(), io::ErrorKind::StorageFull);
        assert_eq!(set.used_bytes(), 100 * PAGE_BYTES);
    }
}
