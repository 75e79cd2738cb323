//! How many pages each image owns.

use crate::{ImageId, Source};

/// The images that a table names, each with the number of pages it owns there. Zero pages have
/// no owner. A sorted list: there are as many as live generations, and every derive copies it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    counts: Vec<(ImageId, u64)>,
}

impl Owners {
    /// How many pages `image` owns.
    pub fn get(&self, image: ImageId) -> u64 {
        self.place(image).map_or(0, |at| self.counts[at].1)
    }

    /// The images that own at least one page, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ImageId, u64)> + '_ {
        self.counts.iter().copied()
    }

    /// How many images own pages.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// How many pages are owned by any image.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|(_, pages)| pages).sum()
    }

    pub(super) fn add(&mut self, source: Source, pages: u64) {
        let Some(image) = source.image() else { return };
        if pages == 0 {
            return;
        }
        match self.place(image) {
            Ok(at) => self.counts[at].1 += pages,
            Err(at) => self.counts.insert(at, (image, pages)),
        }
    }

    /// The image must own that many.
    pub(super) fn take(&mut self, source: Source, pages: u64) {
        let Some(image) = source.image() else { return };
        if pages == 0 {
            return;
        }
        let at = self.place(image).unwrap_or_else(|_| unreachable!("{image} owns no page"));
        assert!(self.counts[at].1 >= pages, "{image} owns fewer than {pages} pages");
        self.counts[at].1 -= pages;
        if self.counts[at].1 == 0 {
            self.counts.remove(at);
        }
    }

    fn place(&self, image: ImageId) -> Result<usize, usize> {
        self.counts.binary_search_by_key(&image, |(image, _)| *image)
    }
}
