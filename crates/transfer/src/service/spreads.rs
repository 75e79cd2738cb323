//! Who has been sent what of each image, so that hosts that ask for the same are sent to each other; and the sums that they compare it with.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use vmfork_image::{ImageName, PageRange};
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::swarm::{Serve, Spread, SpreadConfig};

use crate::lock;
use crate::sums::{Sum, Sums, UNKNOWN};

/// Of most images at a time. Of one more it is not kept who has what: all of it is served here.
const IMAGES_MAX: usize = 64;

/// Of all images.
#[derive(Debug, Default)]
pub(super) struct Spreads(Mutex<HashMap<ImageName, Image>>);

#[derive(Debug)]
struct Image {
    spread: Spread,
    sums: Sums,
}

impl Spreads {
    /// A host asks for `range` of an image of so many pages. → who else has it, or is about to. `insist`: it has been sent elsewhere in vain; `demand`: its
    /// VM waits; `may_name`: those that may be named.
    pub(super) fn elsewhere(
        &self,
        (image, pages): (ImageName, u64),
        from: u64,
        range: PageRange,
        (insist, demand): (bool, bool),
        may_name: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let mut images = lock(&self.0);
        if images.len() >= IMAGES_MAX && !images.contains_key(&image) {
            return None;
        }
        let begin =
            || Image { spread: Spread::new(pages, SpreadConfig::default()), sums: Sums::default() };
        let Image { spread, .. } = images.entry(image).or_insert_with(begin);
        loop {
            match spread.ask(HostId(from), range, insist, demand) {
                Serve::Here => return None,
                Serve::At(host) if may_name(host.0) => return Some(host.0),
                // One less each time.
                Serve::At(host) => spread.left(host),
            }
        }
    }

    /// What is known of the sums of `range`.
    pub(super) fn sums(&self, image: ImageName, range: PageRange) -> Vec<Sum> {
        let images = lock(&self.0);
        let unknown = || range.pages().map(|_| UNKNOWN).collect();
        images.get(&image).map_or_else(unknown, |image| image.sums.get(range))
    }

    /// They are kept as long as it is known who has what.
    pub(super) fn summed(&self, image: ImageName, range: PageRange, sums: &[Sum]) {
        if let Some(image) = lock(&self.0).get_mut(&image) {
            image.sums.put(range, sums);
        }
    }

    /// A host has these images of others open, and no more.
    pub(super) fn heard(&self, host: u64, open: &BTreeSet<ImageName>) {
        lock(&self.0).retain(|image, Image { spread, .. }| {
            if !open.contains(image) {
                spread.left(HostId(host));
            }
            !spread.is_empty()
        });
    }
}
