use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn id(number: u64) -> ImageId {
    ImageId::new(number + 1).expect("not 0")
}

/// A layer as it was made: all of it shows.
fn new(number: u64, pages: u64) -> Named {
    Named { id: id(number), ours: true, written: pages, shown: pages }
}

fn planned(layers: &[Named]) -> Vec<Vec<ImageId>> {
    plan(layers, MergeLimits::default())
}

/// What is left after a plan was carried out, and pages copied.
fn carry_out(layers: &mut Vec<Named>, next: &mut u64) -> u64 {
    let mut copied = 0;
    for group in planned(layers) {
        let of = |layer: &&Named| group.contains(&layer.id);
        let shown = layers.iter().filter(of).map(|layer| layer.shown).sum();
        layers.retain(|layer| !group.contains(&layer.id));
        layers.push(new(*next, shown));
        *next += 1;
        copied += shown;
    }
    copied
}

proptest! {
    /// Layers of any size: few are left, each is in one set at most, and a second plan is empty.
    #[test]
    fn few_are_left_and_a_plan_needs_no_other(
        layers in proptest::collection::vec((0_u64..1 << 20, 0_u64..1 << 20, any::<bool>()), 0..400),
    ) {
        let mut layers: Vec<Named> = (0..)
            .zip(layers)
            .map(|(number, (one, two, ours))| Named {
                id: id(number),
                ours,
                written: one.max(two),
                // None is named without a page.
                shown: one.min(two).max(1),
            })
            .collect();
        let mut seen: BTreeMap<ImageId, usize> = BTreeMap::new();
        for id in planned(&layers).into_iter().flatten() {
            *seen.entry(id).or_default() += 1;
        }
        prop_assert!(seen.values().all(|count| *count == 1));
        carry_out(&mut layers, &mut 1000);
        prop_assert!(layers.iter().filter(|layer| layer.ours).count() <= LAYERS_MAX);
        prop_assert!(layers.len() <= LAYERS_IN_ALL_MAX);
        let (shown, written) = layers
            .iter()
            .filter(|layer| layer.ours)
            .fold((0, 0), |(shown, written), layer| (shown + layer.shown, written + layer.written));
        prop_assert!(written - shown <= shown + WASTE_MIN, "{written} pages for {shown}");
        prop_assert_eq!(planned(&layers), Vec::<Vec<ImageId>>::new());
    }

    /// Each freeze adds a layer, large ones too: what is copied stays in proportion.
    #[test]
    fn a_page_is_copied_once_for_each_doubling_at_most(
        sizes in proptest::collection::vec(prop_oneof![9 => 1_u64..300, 1 => 1_u64..1 << 20], 1..1500),
    ) {
        let (mut layers, mut next) = (Vec::new(), 1 << 30);
        let (mut copied, mut written) = (0, 0);
        for (number, pages) in (0..).zip(sizes) {
            layers.push(new(number, pages));
            written += pages;
            copied += carry_out(&mut layers, &mut next);
            prop_assert!(layers.len() <= LAYERS_MAX);
        }
        let doublings = u64::from(written.max(1).ilog2()) + 1;
        prop_assert!(copied <= written * doublings, "{copied} copied of {written}");
    }
}

#[test]
fn equal_layers_are_copied_a_few_times_in_ten_thousand_freezes() {
    let (mut layers, mut next, mut copied) = (Vec::new(), 1 << 30, 0);
    // One that is much larger than all others is left alone.
    layers.push(new(1 << 20, 1 << 28));
    for number in 0..10_000 {
        layers.push(new(number, 256));
        copied += carry_out(&mut layers, &mut next);
    }
    assert!((256 * 10_000..5 * 256 * 10_000).contains(&copied), "{copied} pages");
}

#[test]
fn waste_is_written_again_only_if_it_is_more_than_what_shows() {
    let half = |number, written, shown| Named { written, ..new(number, shown) };
    let waste = WASTE_MIN * 4;
    assert_eq!(planned(&[half(1, waste, 100), new(2, waste)]), Vec::<Vec<ImageId>>::new());
    assert_eq!(planned(&[half(1, waste, 100), new(2, 100)]), [[id(1)]]);
    let clones = Named { ours: false, ..half(1, waste, 100) };
    assert_eq!(planned(&[clones, new(2, 100)]), Vec::<Vec<ImageId>>::new(), "others need it");
}

#[test]
fn layers_of_relatives_are_shared_for_longer() {
    let theirs = |number| Named { ours: false, ..new(number, 256) };
    let mut layers: Vec<Named> = (0..256).map(theirs).collect();
    assert_eq!(planned(&layers), Vec::<Vec<ImageId>>::new());
    layers.push(theirs(256));
    assert_eq!(planned(&layers).concat().len(), 257);
}
