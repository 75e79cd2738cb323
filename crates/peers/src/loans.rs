//! Snapshots that other hosts' VMs were started from, and for how long this host keeps them:
//! decisions without I/O.
//!
//! A host that sends a fork's descriptor *lends* the snapshot: it keeps an engine of the snapshot's
//! image, which keeps all pages that the image's table names. Each heartbeat of a host tells the
//! snapshots of others that VMs there came of (see [`super::arrivals`]). A loan lasts while it is
//! sent, for [`FRESH`] after that, and while anybody tells of it; a host that is silent is taken at
//! its last word for [`SILENCE`], so that a partition that heals costs nothing.
//!
//! What a loan keeps includes the arrival that the snapshot itself came of.
//! So an older snapshot is kept as long as a younger one that has pages of it, and never the other
//! way round.
//! No two hosts can keep each other's forever.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use vmfork_image::ImageName;

/// A loan is kept for so long after it was sent, whatever anybody says: no heartbeat may have come
/// since.
const FRESH: Duration = Duration::from_secs(60);
/// How long the last word of a host that says nothing counts.
const SILENCE: Duration = Duration::from_secs(600);

/// What is lent, by the snapshot's image, each with what keeps it alive.
#[derive(Debug)]
pub(crate) struct Loans<K> {
    loans: BTreeMap<ImageName, Loan<K>>,
    told: BTreeMap<u64, Told>,
}

#[derive(Debug)]
struct Loan<K> {
    keeps: K,
    /// The snapshot's, and all that it names.
    images: BTreeSet<ImageName>,
    /// How often it is being sent.
    sendings: u32,
    sent: Instant,
}

/// What a host has said last.
#[derive(Debug)]
struct Told {
    at: Instant,
    snapshots: BTreeSet<ImageName>,
}

impl<K> Default for Loans<K> {
    fn default() -> Self {
        Self { loans: BTreeMap::new(), told: BTreeMap::new() }
    }
}

impl<K> Loans<K> {
    /// Keep `keeps` for the snapshot `name`, with all of `images`, at least until it was
    /// [`Loans::sent`]. → what it replaces.
    pub(crate) fn lend(
        &mut self,
        now: Instant,
        name: ImageName,
        images: BTreeSet<ImageName>,
        keeps: K,
    ) -> Option<K> {
        let sendings = self.loans.get(&name).map_or(0, |loan| loan.sendings);
        let loan = Loan { keeps, images, sendings: sendings.saturating_add(1), sent: now };
        self.loans.insert(name, loan).map(|replaced| replaced.keeps)
    }

    /// It has arrived where it was sent to, or never will.
    pub(crate) fn sent(&mut self, now: Instant, name: ImageName) {
        if let Some(loan) = self.loans.get_mut(&name) {
            loan.sendings = loan.sendings.saturating_sub(1);
            loan.sent = now;
        }
    }

    /// A host has said which snapshots VMs there came of.
    pub(crate) fn heard(&mut self, now: Instant, host: u64, snapshots: BTreeSet<ImageName>) {
        self.told.insert(host, Told { at: now, snapshots });
    }

    /// Removes and returns the loans that no borrower needs any more. Reports of hosts that are not
    /// members any more do not count.
    pub(crate) fn expire(&mut self, now: Instant, is_member: impl Fn(u64) -> bool) -> Vec<K> {
        let counts = |host: u64, told: &Told| {
            is_member(host) && now.saturating_duration_since(told.at) < SILENCE
        };
        self.told.retain(|host, told| counts(*host, told));
        let told = &self.told;
        let is_over = |name: &ImageName, loan: &Loan<K>| {
            loan.sendings == 0
                && now.saturating_duration_since(loan.sent) >= FRESH
                && !told.values().any(|told| told.snapshots.contains(name))
        };
        let over: Vec<ImageName> = self
            .loans
            .iter()
            .filter(|(name, loan)| is_over(name, loan))
            .map(|(name, _)| *name)
            .collect();
        over.iter().filter_map(|name| self.loans.remove(name)).map(|loan| loan.keeps).collect()
    }

    /// What keeps a snapshot that is lent by this name.
    pub(crate) fn lent(&self, snapshot: ImageName) -> Option<&K> {
        self.loans.get(&snapshot).map(|loan| &loan.keeps)
    }

    /// What keeps an image that is lent.
    pub(crate) fn find(&self, image: ImageName) -> Option<&K> {
        self.all_of(image).next()
    }

    /// All that keep it.
    pub(crate) fn all_of(&self, image: ImageName) -> impl Iterator<Item = &K> {
        let loans = self.loans.values().filter(move |loan| loan.images.contains(&image));
        loans.map(|loan| &loan.keeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(image: u64) -> ImageName {
        ImageName { host: 1, image }
    }

    fn names(images: &[u64]) -> BTreeSet<ImageName> {
        images.iter().copied().map(name).collect()
    }

    /// One that has been sent.
    fn lent(
        loans: &mut Loans<&'static str>,
        now: Instant,
        image: u64,
        images: &[u64],
        keeps: &'static str,
    ) {
        loans.lend(now, name(image), names(images), keeps);
        loans.sent(now, name(image));
    }

    #[test]
    fn a_loan_lasts_while_vms_of_its_snapshot_are_told_of() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        lent(&mut loans, at(0), 2, &[1, 2], "snapshot");
        assert!(loans.expire(at(59), |_| true).is_empty(), "a heartbeat may be under way");
        loans.heard(at(59), 7, names(&[2]));
        assert!(loans.expire(at(100), |_| true).is_empty(), "told of");
        assert_eq!(loans.find(name(1)), Some(&"snapshot"));
        loans.heard(at(100), 7, names(&[1]));
        assert_eq!(
            loans.expire(at(101), |_| true),
            ["snapshot"],
            "VMs of an ancestor keep that alone"
        );
        assert!(loans.find(name(1)).is_none());
    }

    #[test]
    fn a_silent_host_is_taken_at_its_last_word_for_a_while() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        lent(&mut loans, at(0), 1, &[1], "snapshot");
        loans.heard(at(60), 8, names(&[1]));
        assert!(loans.expire(at(659), |_| true).is_empty(), "it may come back");
        assert_eq!(loans.expire(at(660), |_| true), ["snapshot"]);
    }

    #[test]
    fn who_is_no_member_any_more_holds_nothing() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        lent(&mut loans, began, 1, &[1], "snapshot");
        loans.heard(began, 7, names(&[1]));
        assert!(loans.expire(began + FRESH, |_| true).is_empty());
        assert_eq!(loans.expire(began + FRESH, |host| host != 7).len(), 1);
    }

    #[test]
    fn what_is_being_sent_is_kept_however_long_that_takes() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(loans.lend(at(0), name(1), names(&[1]), "first").is_none());
        assert_eq!(loans.lend(at(1), name(1), names(&[1]), "second"), Some("first"));
        loans.sent(at(2), name(1));
        assert!(loans.expire(at(3600), |_| true).is_empty(), "to another host");
        loans.sent(at(3600), name(1));
        assert!(loans.expire(at(3659), |_| true).is_empty());
        assert_eq!(loans.expire(at(3660), |_| true), ["second"]);
    }
}
