//! Which host has been sent what of each image, so that hosts that request the same are sent to
//! each other. Also keeps the sums that they compare it with.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use vmfork_image::{ImageName, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::swarm::{Serve, Spread, SpreadConfig};

use crate::lock;
use crate::sums::{Sum, Sums, UNKNOWN};

/// Spreads of at most this many images. For one more, the one that was requested longest ago is
/// forgotten.
const IMAGES_MAX: usize = 64;

/// Of all images.
#[derive(Debug, Default)]
pub(super) struct Spreads(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    images: HashMap<ImageName, Image>,
    asked: u64,
}

#[derive(Debug)]
struct Image {
    spread: Spread,
    sums: Sums,
    /// Grows with each question.
    asked: u64,
}

impl State {
    fn image(&mut self, name: ImageName, pages: u64) -> &mut Image {
        self.asked += 1;
        if self.images.len() >= IMAGES_MAX && !self.images.contains_key(&name) {
            let oldest = self.images.iter().min_by_key(|(_, image)| image.asked);
            if let Some(oldest) = oldest.map(|(name, _)| *name) {
                self.images.remove(&oldest);
            }
        }
        let spread = || Spread::new(pages, SpreadConfig::default());
        let begin = || Image { spread: spread(), sums: Sums::default(), asked: 0 };
        let image = self.images.entry(name).or_insert_with(begin);
        image.asked = self.asked;
        image
    }
}

impl Spreads {
    /// A host requests `range` of an image of this many pages. → which other host has it, or is
    /// about to. `insist`: it has been sent elsewhere and failed; `demand`: its VM waits;
    /// `may_name`: those that may be named.
    pub(super) fn elsewhere(
        &self,
        (image, pages): (ImageName, u64),
        from: u64,
        range: PageRange,
        (insist, demand): (bool, bool),
        may_name: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let mut state = lock(&self.0);
        let Image { spread, .. } = state.image(image, pages);
        loop {
            match spread.ask(HostId(from), range, insist, demand) {
                Serve::Here => return None,
                Serve::At(host) if may_name(host.0) => return Some(host.0),
                // One less each time.
                Serve::At(host) => spread.left(host),
            }
        }
    }

    /// A host was sent these pages.
    pub(super) fn served(&self, image: ImageName, to: u64, range: PageRange) {
        if let Some(image) = lock(&self.0).images.get_mut(&image) {
            image.spread.served(HostId(to), range);
        }
    }

    /// What is known of the sums of `range`.
    pub(super) fn sums(&self, image: ImageName, range: PageRange) -> Vec<Sum> {
        let state = lock(&self.0);
        let unknown = || range.pages().map(|_| UNKNOWN).collect();
        state.images.get(&image).map_or_else(unknown, |image| image.sums.get(range))
    }

    /// They are kept as long as it is known which host has what.
    pub(super) fn summed(&self, (image, pages): (ImageName, u64), range: PageRange, sums: &[Sum]) {
        lock(&self.0).image(image, pages).sums.put(range, sums);
    }

    /// A host has these images of others open, and no more.
    pub(super) fn heard(&self, host: u64, open: &BTreeSet<ImageName>) {
        for (_, image) in lock(&self.0).images.iter_mut().filter(|(name, _)| !open.contains(name)) {
            image.spread.left(HostId(host));
        }
    }

    /// Others than these are named no more. Of images that no host has, nothing is kept.
    pub(super) fn keep(&self, is_member: impl Fn(u64) -> bool) {
        lock(&self.0).images.retain(|_, Image { spread, .. }| {
            let gone: Vec<_> = spread.hosts().filter(|host| !is_member(host.0)).collect();
            gone.into_iter().for_each(|host| spread.left(host));
            spread.hosts().next().is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use vmfork_image::PageIdx;

    use super::*;

    fn image(number: u64) -> ImageName {
        ImageName { host: 1, image: number }
    }

    fn ask(spreads: &Spreads, number: u64, from: u64) -> Option<u64> {
        let range = PageRange::new(PageIdx(0), 16).expect("small");
        spreads.elsewhere((image(number), 16), from, range, (false, true), |_| true)
    }

    #[test]
    fn of_more_images_than_are_kept_the_one_asked_for_longest_ago_is_forgotten() {
        let spreads = Spreads::default();
        let most = IMAGES_MAX as u64;
        assert!((0..most).all(|number| ask(&spreads, number, 7).is_none()));
        assert_eq!(ask(&spreads, 0, 8), Some(7));
        assert_eq!(ask(&spreads, most, 7), None);
        assert_eq!((ask(&spreads, 0, 9), ask(&spreads, most, 8)), (Some(7), Some(7)));
        assert_eq!(ask(&spreads, 1, 8), None, "forgotten");
    }

    #[test]
    fn a_host_that_is_no_member_any_more_is_named_no_more_and_what_no_host_has_is_forgotten() {
        let spreads = Spreads::default();
        ask(&spreads, 1, 7);
        ask(&spreads, 1, 8);
        ask(&spreads, 2, 7);
        spreads.keep(|member| member != 7);
        assert_eq!(lock(&spreads.0).images.keys().copied().collect::<Vec<_>>(), [image(1)]);
        assert_eq!(ask(&spreads, 1, 9), Some(8));
        spreads.heard(8, &BTreeSet::from([image(1)]));
        spreads.heard(8, &BTreeSet::new());
        assert_eq!(ask(&spreads, 1, 10), Some(9));
    }
}
