//! Images that other hosts still need, and for how long this one keeps them: decisions without I/O.
//!
//! A host that sends a fork's descriptor *lends* its images: it keeps an engine of the snapshot's image, which keeps all pages
//! that the image's table names. Each heartbeat of a host says which images it *holds*, those that some VM there may still need
//! pages of, whoever it got them from. A loan lasts while anybody holds one of its images; a host that is silent is taken at
//! its last word for [`SILENCE`], so that a partition that heals costs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use vmfork_image::ImageName;

/// A loan is kept for so long whatever anybody says: its descriptor may still be under way.
const FRESH: Duration = Duration::from_secs(60);
/// How long the last word of a host that says nothing counts.
const SILENCE: Duration = Duration::from_secs(600);

/// What is lent, each with what keeps it alive.
#[derive(Debug)]
pub(crate) struct Loans<K> {
    next: u64,
    loans: BTreeMap<u64, Loan<K>>,
    held: BTreeMap<u64, Held>,
}

#[derive(Debug)]
struct Loan<K> {
    keeps: K,
    images: BTreeSet<ImageName>,
    made: Instant,
}

/// What a host has said last.
#[derive(Debug)]
struct Held {
    at: Instant,
    images: BTreeSet<ImageName>,
}

impl<K> Default for Loans<K> {
    fn default() -> Self {
        Self { next: 0, loans: BTreeMap::new(), held: BTreeMap::new() }
    }
}

impl<K> Loans<K> {
    /// Keep `keeps` while somebody holds one of `images`. One that is lent already begins anew. → those that it replaces.
    pub(crate) fn lend(&mut self, now: Instant, images: BTreeSet<ImageName>, keeps: K) -> Vec<K> {
        let same = self.loans.iter().filter(|(_, loan)| loan.images == images);
        let same: Vec<u64> = same.map(|(number, _)| *number).collect();
        let replaced = same.iter().filter_map(|number| self.loans.remove(number));
        let replaced = replaced.map(|loan| loan.keeps).collect();
        self.loans.insert(self.next, Loan { keeps, images, made: now });
        self.next += 1;
        replaced
    }

    /// A host has said what it holds.
    pub(crate) fn heard(&mut self, now: Instant, host: u64, images: BTreeSet<ImageName>) {
        self.held.insert(host, Held { at: now, images });
    }

    /// What nobody needs any more. What a host holds that is no member any more does not count.
    pub(crate) fn expire(&mut self, now: Instant, is_member: impl Fn(u64) -> bool) -> Vec<K> {
        let counts = |host: u64, held: &Held| {
            is_member(host) && now.saturating_duration_since(held.at) < SILENCE
        };
        self.held.retain(|host, held| counts(*host, held));
        let held: BTreeSet<ImageName> =
            self.held.values().flat_map(|held| held.images.iter().copied()).collect();
        let over = |loan: &Loan<K>| {
            now.saturating_duration_since(loan.made) >= FRESH && loan.images.is_disjoint(&held)
        };
        let over: Vec<u64> =
            self.loans.iter().filter(|(_, loan)| over(loan)).map(|(number, _)| *number).collect();
        over.iter().filter_map(|number| self.loans.remove(number)).map(|loan| loan.keeps).collect()
    }

    /// What keeps an image that is lent.
    pub(crate) fn find(&self, image: ImageName) -> Option<&K> {
        self.loans.values().find(|loan| loan.images.contains(&image)).map(|loan| &loan.keeps)
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

    #[test]
    fn a_loan_lasts_while_anybody_holds_one_of_its_images() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        loans.lend(at(0), names(&[1, 2]), "snapshot");
        assert!(loans.expire(at(59), |_| true).is_empty(), "its descriptor may be under way");
        loans.heard(at(60), 7, names(&[1, 9]));
        loans.heard(at(60), 8, names(&[2]));
        loans.heard(at(70), 7, names(&[]));
        assert!(loans.expire(at(100), |_| true).is_empty(), "an ancestor is held by another");
        assert_eq!(loans.find(name(2)), Some(&"snapshot"));
        assert!(loans.expire(at(659), |_| true).is_empty(), "it is silent, and may come back");
        assert_eq!(loans.expire(at(660), |_| true), ["snapshot"]);
        assert!(loans.find(name(2)).is_none());
    }

    #[test]
    fn who_is_no_member_any_more_holds_nothing() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        loans.lend(began, names(&[1]), ());
        loans.heard(began, 7, names(&[1]));
        assert!(loans.expire(began + FRESH, |_| true).is_empty());
        assert_eq!(loans.expire(began + FRESH, |host| host != 7).len(), 1);
    }

    #[test]
    fn what_is_lent_again_is_one_loan() {
        let (mut loans, began) = (Loans::default(), Instant::now());
        assert!(loans.lend(began, names(&[1]), "first").is_empty());
        assert_eq!(loans.lend(began + FRESH, names(&[1]), "second"), ["first"]);
        assert!(loans.expire(began + FRESH, |_| true).is_empty(), "it began anew");
        assert_eq!(loans.expire(began + 2 * FRESH, |_| true), ["second"]);
    }
}
