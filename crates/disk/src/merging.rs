//! Which frozen layers are copied into one.
//!
//! A parent that is frozen on and on leaves a layer each time. Fewer and fewer of its pages show.
//! Layers of about the same size are merged when there are too many. Layers that show less than
//! half of what they hold are written again when that wastes too much.
//!
//! Promises: after a plan, a table names at most [`LAYERS_MAX`] layers that its disk has made
//! before, and at most [`LAYERS_IN_ALL_MAX`] of all disks. Because of the number of layers, a page
//! is copied at most once for each doubling of the layer that has it. Because of waste, a page is
//! copied at most once for each page that became waste.
//!
//! Left to others: copying ([`crate::DiskStore`]). No I/O.

use vmfork_image::ImageId;

/// Frozen layers that a disk has made and that its newest image names. Each has two open files.
pub(crate) const LAYERS_MAX: usize = 32;
/// Those of relatives, too. Clones share what their parent wrote, so theirs are left alone for
/// longer: each clone would make a copy of its own.
pub(crate) const LAYERS_IN_ALL_MAX: usize = 256;
/// Pages of waste that are not worth a copy: 16 MiB.
const WASTE_MIN: u64 = 4096;

/// From when on layers are merged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergeLimits {
    pub(crate) own: usize,
    pub(crate) in_all: usize,
    pub(crate) waste_pages: u64,
}

impl Default for MergeLimits {
    fn default() -> Self {
        Self { own: LAYERS_MAX, in_all: LAYERS_IN_ALL_MAX, waste_pages: WASTE_MIN }
    }
}

/// A layer below an image, as the image's table has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) id: ImageId,
    /// The image's own disk has made it.
    pub(crate) ours: bool,
    /// Pages that it holds.
    pub(crate) written: u64,
    /// Those that the table shows.
    pub(crate) shown: u64,
}

/// Layers that become one.
#[derive(Debug, Default)]
struct Group {
    ids: Vec<ImageId>,
    ours: bool,
    shown: u64,
    wasteful: bool,
}

/// The sets of layers to copy, each into one new layer.
pub(crate) fn plan(layers: &[Named], limits: MergeLimits) -> Vec<Vec<ImageId>> {
    let ours = || layers.iter().filter(|layer| layer.ours);
    let waste = |layer: &Named| layer.written.saturating_sub(layer.shown);
    let shown: u64 = ours().map(|layer| layer.shown).sum();
    let too_much = ours().map(waste).sum::<u64>() > shown.saturating_add(limits.waste_pages);
    let mut wasteful = Group { ours: true, wasteful: true, ..Group::default() };
    let mut groups = Vec::new();
    for layer in layers {
        if too_much && layer.ours && waste(layer) > layer.shown {
            wasteful.ids.push(layer.id);
            wasteful.shown += layer.shown;
        } else {
            let Named { id, ours, shown, .. } = *layer;
            groups.push(Group { ids: vec![id], ours, shown, wasteful: false });
        }
    }
    if !wasteful.ids.is_empty() {
        groups.push(wasteful);
    }
    // What is joined is the disk's own from then on, so these come first.
    join(&mut groups, limits.in_all, |_| true);
    join(&mut groups, limits.own, |group| group.ours);
    let copied = groups.into_iter().filter(|group| group.wasteful || group.ids.len() > 1);
    copied.map(|group| group.ids).collect()
}

/// Joins groups of one size class, until at most `max` are left of those that `of` chooses. There
/// are fewer classes than that, so one of them has two groups or more.
fn join(groups: &mut Vec<Group>, max: usize, of: impl Fn(&Group) -> bool) {
    // Sizes of one class differ by less than two times. So what is joined is of a higher class.
    let class = |group: &Group| group.shown.max(1).ilog2();
    while groups.iter().filter(|group| of(group)).count() > max {
        let mut counts = [0_usize; 64];
        for group in groups.iter().filter(|group| of(group)) {
            if let Some(count) = counts.get_mut(class(group) as usize) {
                *count += 1;
            }
        }
        let most = counts.iter().copied().max().unwrap_or(0);
        let fullest = counts.iter().position(|count| *count == most).unwrap_or(0);
        if most < 2 {
            return;
        }
        let (joined, rest): (Vec<_>, Vec<_>) = std::mem::take(groups)
            .into_iter()
            .partition(|group| of(group) && class(group) as usize == fullest);
        *groups = rest;
        let mut one = Group { ours: true, ..Group::default() };
        for group in joined {
            one.ids.extend(group.ids);
            one.shown += group.shown;
            one.wasteful |= group.wasteful;
        }
        groups.push(one);
    }
}

#[cfg(test)]
#[path = "merging_tests.rs"]
mod tests;
