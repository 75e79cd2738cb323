//! What VMs touch that begin from one snapshot, over many starts.
//!
//! ```text
//!   Recording ──merge──► Profile ──working_set──► runs by urgency ──► Listed
//!                        ▲     │                        └──sequential──► one read in page order
//!                 decode │     ▼ encode
//!                        bytes
//! ```
//!
//! After vmTorrent (CoNEXT 2012, "profiles"): for each *cluster* of pages the average time of its
//! first access, and in how many of the starts it was touched. Unlike there, starts count the less
//! the more have followed. So what a service no longer does is forgotten.

mod codec;
mod image;

use std::collections::BTreeMap;
use std::time::Duration;

use vmfork_image::{BLOCK_PAGES, PAGES_MAX, PageIdx, PageRange};

pub use self::codec::ProfileError;
pub use self::image::ImageProfiles;
use crate::Recording;

/// What one start counts when it is merged. Those before it are worth [`KEPT`] of what they were.
const ONE: u32 = 2048;

/// 15/16: after 11 starts, one counts half.
const KEPT: (u32, u32) = (15, 16);

/// What no score exceeds: ONE / (1 - KEPT).
const SCORE_MAX: u32 = 16 * ONE;

/// A cluster is forgotten when its frequency falls below one in this many.
const FORGOTTEN: u32 = 64;

/// First accesses later than this count as at this time: three days.
const TIME_MS_MAX: u32 = (1 << 28) - 1;

/// How often, and when, VMs touch each cluster of an image's pages.
///
/// A start's part in a frequency fades: one that was merged *n* starts ago counts (15/16)ⁿ. The
/// frequency of a cluster is the sum over the starts that touched it, over the sum over all. With a
/// few starts this is the plain frequency, and with many it is that of the last 16 or so. A cluster
/// that VMs stop touching is forgotten after 22 starts if it was touched once, after 64 if always.
/// First accesses are averaged with the same weights, over the starts that touched the cluster.
///
/// Takes 16 bytes for each cluster that is touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Of the image.
    pages: u64,
    cluster_pages: u64,
    runs: u32,
    /// What a cluster's score would be that all runs have touched.
    whole: u32,
    /// In order, each index once.
    touched: Vec<Touched>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Touched {
    /// Which cluster: its first page over `cluster_pages`.
    index: u64,
    /// 1 to `whole`.
    score: u32,
    /// At most [`TIME_MS_MAX`].
    first_ms: u32,
}

/// What a profile says of one cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cluster {
    pub pages: PageRange,
    /// In which part of the starts it was touched: above 0, at most 1.
    pub frequency: f64,
    /// On average, since the start.
    pub first_access: Duration,
}

impl Profile {
    /// One without any runs, of an image of `pages` pages. `cluster_pages`: a power of two, 1 to
    /// 512; 16 goes with fill units of 64 KiB.
    ///
    /// # Errors
    /// If the sizes make no sense.
    pub fn new(pages: u64, cluster_pages: u64) -> Result<Self, ProfileError> {
        if pages > PAGES_MAX {
            return Err(ProfileError::Pages { pages });
        }
        if !cluster_pages.is_power_of_two() || cluster_pages > BLOCK_PAGES {
            return Err(ProfileError::Cluster { cluster_pages });
        }
        Ok(Self { pages, cluster_pages, runs: 0, whole: 0, touched: Vec::new() })
    }

    /// Adds what one VM touched. A cluster is touched if any of its pages is, and when the first of
    /// them is. Pages that the image does not have are left out.
    ///
    /// A recording that was cut short makes what the VM did not come to look unused: leave it out.
    pub fn merge(&mut self, recording: &Recording) {
        let mut first_ms = BTreeMap::new();
        for (at, runs) in recording.steps() {
            let ms = u32::try_from(at.as_millis()).unwrap_or(u32::MAX).min(TIME_MS_MAX);
            for run in runs {
                let run = run.intersect(&PageRange::first(self.pages));
                let Some(last) = run.len().checked_sub(1) else { continue };
                let (start, last) = (run.start().0, run.start().0 + last);
                for index in start / self.cluster_pages..=last / self.cluster_pages {
                    first_ms.entry(index).or_insert(ms); // steps are in order of time
                }
            }
        }
        self.runs = self.runs.saturating_add(1);
        self.whole = faded(self.whole) + ONE;
        for touched in &mut self.touched {
            touched.score = faded(touched.score);
            if let Some(ms) = first_ms.remove(&touched.index) {
                touched.first_ms = average((touched.first_ms, touched.score), (ms, ONE));
                touched.score += ONE;
            }
        }
        let whole = self.whole;
        self.touched.retain(|touched| touched.score * FORGOTTEN >= whole);
        let new = first_ms.into_iter();
        self.touched.extend(new.map(|(index, first_ms)| Touched { index, score: ONE, first_ms }));
        self.touched.sort_unstable_by_key(|touched| touched.index);
    }

    /// Forget all but the most frequent clusters, of those the earliest.
    pub(crate) fn keep_most_frequent(&mut self, clusters_max: usize) {
        if self.touched.len() > clusters_max {
            self.touched.sort_unstable_by_key(|it| (u32::MAX - it.score, it.first_ms, it.index));
            self.touched.truncate(clusters_max);
            self.touched.sort_unstable_by_key(|it| it.index);
        }
    }

    /// What to fetch in which order: the pages that at least `min_frequency` of the starts touch
    /// (0 to 1), by the average time of their first access. At most `pages_max` pages, the
    /// most frequent and of those the earliest. Runs are of whole clusters: pages that are zero are
    /// among them.
    pub fn working_set(&self, min_frequency: f64, pages_max: u64) -> Vec<PageRange> {
        let frequent = |touched: &&Touched| self.frequency(touched) >= min_frequency;
        let mut chosen: Vec<_> = self.touched.iter().filter(frequent).copied().collect();
        chosen.sort_unstable_by_key(|touched| {
            (u32::MAX - touched.score, touched.first_ms, touched.index)
        });
        let mut room = pages_max;
        chosen.retain(|touched| {
            let len = self.cluster(touched.index).len();
            let fits = len <= room;
            room = if fits { room - len } else { 0 };
            fits
        });
        chosen.sort_unstable_by_key(|touched| (touched.first_ms, touched.index));
        let mut runs = Vec::new();
        for touched in chosen {
            push(&mut runs, self.cluster(touched.index));
        }
        runs
    }

    /// How many clusters are known to be touched.
    pub fn len(&self) -> usize {
        self.touched.len()
    }

    pub fn is_empty(&self) -> bool {
        self.touched.is_empty()
    }

    /// How many recordings were merged.
    pub fn runs(&self) -> u32 {
        self.runs
    }

    /// How many pages the image has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages of a cluster; the image's last one may be cut short.
    pub fn cluster_pages(&self) -> u64 {
        self.cluster_pages
    }

    /// What is known, in order of pages.
    pub fn clusters(&self) -> impl ExactSizeIterator<Item = Cluster> + '_ {
        self.touched.iter().map(|touched| Cluster {
            pages: self.cluster(touched.index),
            frequency: self.frequency(touched),
            first_access: Duration::from_millis(u64::from(touched.first_ms)),
        })
    }

    /// The same for people: by first access, neighbours that are alike in one.
    pub fn stretches(&self) -> Vec<Cluster> {
        let mut clusters: Vec<_> = self.clusters().collect();
        clusters.sort_by_key(|cluster| (cluster.first_access, cluster.pages.start()));
        clusters.dedup_by(|next, before| {
            let alike = next.first_access == before.first_access
                && next.frequency.to_bits() == before.frequency.to_bits()
                && next.pages.start() == before.pages.end();
            if alike {
                before.pages = PageRange::between(before.pages.start(), next.pages.end());
            }
            alike
        });
        clusters
    }

    fn frequency(&self, touched: &Touched) -> f64 {
        f64::from(touched.score) / f64::from(self.whole)
    }

    fn cluster(&self, index: u64) -> PageRange {
        let start = PageIdx(index * self.cluster_pages);
        PageRange::first(self.pages).from_page(start).truncate(self.cluster_pages)
    }
}

/// The same pages in page order and in runs as long as possible, each page once: to read them in
/// one go.
pub fn sequential(runs: &[PageRange]) -> Vec<PageRange> {
    let mut sorted: Vec<_> = runs.iter().copied().filter(|run| !run.is_empty()).collect();
    sorted.sort_unstable_by_key(PageRange::start);
    let mut merged = Vec::new();
    for run in sorted {
        push(&mut merged, run);
    }
    merged
}

/// Appends `run`, to the last one if it begins in it or right behind it.
fn push(runs: &mut Vec<PageRange>, run: PageRange) {
    match runs.last_mut() {
        Some(last) if last.start() <= run.start() && run.start() <= last.end() => {
            *last = PageRange::between(last.start(), last.end().max(run.end()));
        }
        _ => runs.push(run),
    }
}

/// A score after another start.
fn faded(score: u32) -> u32 {
    score * KEPT.0 / KEPT.1
}

/// The value of [`Profile::whole`] after this many runs.
fn whole(runs: u32) -> u32 {
    let mut whole = 0;
    for _ in 0..runs {
        let next = faded(whole) + ONE;
        if next == whole {
            break; // after about 150, it stays
        }
        whole = next;
    }
    whole
}

/// The average of two times with their weights.
fn average(a: (u32, u32), b: (u32, u32)) -> u32 {
    let [(a_ms, a_weight), (b_ms, b_weight)] = [a, b].map(|(ms, w)| (u64::from(ms), u64::from(w)));
    let weight = a_weight + b_weight;
    let ms = (a_ms * a_weight + b_ms * b_weight + weight / 2) / weight.max(1);
    u32::try_from(ms).unwrap_or(TIME_MS_MAX)
}

#[cfg(test)]
mod tests;
