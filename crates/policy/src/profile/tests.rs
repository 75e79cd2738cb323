use std::collections::BTreeSet;

use proptest::prelude::*;
use vmfork_image::{ImageId, PageTable, Source};

use super::*;
use crate::{Recorder, RecorderConfig};

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// Looks at the given times in ms, each with what was new then.
fn recording(pages: u64, looks: &[(u64, Vec<PageRange>)]) -> Recording {
    let table = PageTable::uniform(pages, Source::Image(ImageId::new(7).expect("not 0")));
    let config = RecorderConfig {
        pages_max: u64::MAX,
        time_max: Duration::MAX,
        quiet_pages_per_s: 0,
        ..RecorderConfig::default()
    };
    let mut recorder = Recorder::new(table, config);
    for (at, touched) in looks {
        recorder.observe(Duration::from_millis(*at), touched.iter().copied());
    }
    recorder.finish()
}

fn profile(pages: u64) -> Profile {
    Profile::new(pages, 16).expect("valid")
}

#[test]
fn a_cluster_is_touched_with_the_first_of_its_pages() {
    let mut profile = profile(100);
    profile.merge(&recording(
        100,
        &[(20, vec![range(17, 1), range(97, 3)]), (50, vec![range(0, 34)])],
    ));
    let clusters: Vec<_> = profile.clusters().collect();
    let cluster =
        |pages, ms| Cluster { pages, frequency: 1.0, first_access: Duration::from_millis(ms) };
    let expected = [
        cluster(range(0, 16), 50),
        cluster(range(16, 16), 20),
        cluster(range(32, 16), 50),
        cluster(range(96, 4), 20),
    ];
    assert_eq!(clusters, expected);
    assert_eq!((profile.len(), profile.runs()), (4, 1));
    // Pages of a larger image are left out.
    profile.merge(&recording(300, &[(20, vec![range(90, 200)])]));
    assert_eq!(profile.clusters().last().expect("some").pages, range(96, 4));
}

#[test]
fn neighbours_that_are_alike_are_shown_as_one() {
    let mut profile = profile(1000);
    let early = [range(320, 64), range(16, 16)];
    profile.merge(&recording(1000, &[(20, early.into()), (50, vec![range(384, 100)])]));
    let shown: Vec<_> = profile
        .stretches()
        .iter()
        .map(|cluster| (cluster.pages, cluster.first_access.as_millis()))
        .collect();
    assert_eq!(shown, [(range(16, 16), 20), (range(320, 64), 20), (range(384, 112), 50)]);
    profile.merge(&recording(1000, &[(20, vec![range(320, 16)])]));
    assert_eq!(profile.stretches().len(), 4, "what is touched more often stands apart");
}

#[test]
fn the_working_set_comes_by_time_and_is_cut_by_frequency() {
    let mut profile = profile(1000);
    let [often, early] = [range(320, 32), range(0, 16)];
    profile.merge(&recording(1000, &[(20, vec![early]), (500, vec![often])]));
    profile.merge(&recording(1000, &[(300, vec![often]), (400, vec![range(336, 32)])]));
    // 352 was touched in one run of two, at 400; 320 in both, at 400 on average; 0 in one, at 20.
    assert_eq!(profile.working_set(0.0, 1000), [range(0, 16), range(320, 48)]);
    assert_eq!(profile.working_set(0.6, 1000), [range(320, 32)]);
    assert_eq!(profile.working_set(0.0, 48), [range(320, 48)], "352 was touched in the later run");
    assert_eq!(profile.working_set(0.0, 40), [range(320, 32)], "whole clusters");
    assert_eq!(profile.working_set(1.1, 1000), []);
    assert_eq!(profile.working_set(0.0, 0), []);
}

#[test]
fn a_set_in_page_order_has_each_page_once() {
    let runs = [range(90, 10), range(0, 16), range(20, 0), range(16, 4), range(95, 15)];
    assert_eq!(sequential(&runs), [range(0, 20), range(90, 20)]);
    assert_eq!(sequential(&[range(0, 50), range(10, 5), range(30, 30)]), [range(0, 60)]);
    assert_eq!(sequential(&[]), []);
}

#[test]
fn old_habits_fade_and_are_forgotten() {
    let mut profile = profile(1000);
    let [old, new] =
        [recording(1000, &[(20, vec![range(0, 1)])]), recording(1000, &[(90, vec![range(50, 1)])])];
    for _ in 0..4 {
        profile.merge(&old);
    }
    let frequencies =
        |profile: &Profile| profile.clusters().map(|cluster| cluster.frequency).collect::<Vec<_>>();
    assert_eq!(frequencies(&profile), [1.0]);
    for _ in 0..4 {
        profile.merge(&new);
    }
    let [first, second] = frequencies(&profile)[..] else { panic!("two clusters") };
    assert!(first < 0.5 && second > 0.5, "{first} {second}");
    assert!((first + second - 1.0).abs() < 0.01, "{first} {second}");
    for _ in 0..500 {
        profile.merge(&old);
    }
    assert_eq!(frequencies(&profile), [1.0]);
    profile.merge(&new);
    let once = (1..100).find(|_| {
        profile.merge(&old);
        frequencies(&profile).len() == 1
    });
    assert_eq!(once, Some(22));
    let forgotten_after = (1..100).find(|_| {
        profile.merge(&new);
        frequencies(&profile).len() == 1
    });
    assert_eq!(forgotten_after, Some(64));
}

/// As large as a cluster can be in bytes: late, and with clusters left out in between.
fn large(pages: u64, touched: impl Iterator<Item = u64>) -> Profile {
    let mut profile = profile(pages);
    let touched = touched.map(|index| range(index * 16, 1)).collect();
    profile.merge(&recording(pages, &[(u64::from(TIME_MS_MAX), touched)]));
    profile
}

#[test]
fn a_profile_of_4_gib_takes_less_than_512_kb() {
    const PAGES: u64 = 1 << 20;
    for touched in [2, 1] {
        let profile = large(PAGES, (0..PAGES / 16).step_by(touched));
        assert_eq!(profile.len(), 65_536 / touched);
        let bytes = profile.encode();
        assert!(bytes.len() < 512_000 / touched, "{} bytes", bytes.len());
        assert_eq!(Profile::decode(&bytes), Ok(profile));
    }
}

#[test]
fn what_is_no_profile_is_refused_with_what_and_where() {
    let good = large(1000, [3, 4].into_iter()).encode();
    let error = |bytes: &[u8]| Profile::decode(bytes).expect_err("refused").to_string();
    // A change, with the checksum made right again.
    let with = |at: usize, new: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        codec::seal(&mut bytes);
        error(&bytes)
    };
    assert_eq!(good.len(), 36 + 2 * 7 + 4);
    assert_eq!(
        error(b""),
        "profile is cut off: it ends at byte 0, within the magic number at byte 0"
    );
    assert_eq!(
        error(b"GIF89a\n\n---"),
        "not a profile: it begins with [47, 49, 46, 38, 39, 61, 0a, 0a] and not with \
         [56, 4d, 46, 50, 52, 4f, 46, 00]"
    );
    assert_eq!(
        with(8, &[2]),
        "profile of version 2, and only version 1 is known here: reset it, or read it with the vmfork that wrote it"
    );
    assert_eq!(
        with(12, &[17]),
        "profile in clusters of 17 pages; it must be a power of two from 1 to 512"
    );
    assert_eq!(
        with(22, &[0xff, 0xff]),
        "profile of an image of 18446462598732841960 pages; none has more than 4503599627370495"
    );
    assert_eq!(
        with(24, &[0]),
        "profile is damaged at byte 41: a score is 2048, which does not go with the number of runs"
    );
    assert_eq!(
        with(28, &[64]),
        "profile is damaged at byte 28: the number of clusters is 64, which is more than the image has"
    );
    assert_eq!(
        with(36, &[63]),
        "profile is damaged at byte 36: the number of clusters left out is 63, which leads beyond the image"
    );
    assert_eq!(
        with(37, &[0x80, 0x80, 0x80, 0x80, 0x01]),
        "profile is damaged at byte 37: a first access is 268435456, which is more than three days of ms"
    );
    assert_eq!(
        with(37, &[0x80, 0x80, 0x80, 0x00]),
        "profile is damaged at byte 37: a first access is 0, which is written longer than needed"
    );
    assert_eq!(
        error(&good[..45]),
        "profile is cut off: it ends at byte 45, within a first access at byte 45"
    );
    assert_eq!(
        error(&[&good[..], &[1, 2]].concat()),
        "profile is damaged: 2 bytes too many at byte 54"
    );
    let mut flipped = good.clone();
    flipped[16] ^= 1;
    assert!(error(&flipped).starts_with("profile is damaged: its checksum is "));
    let forever = [&good[..36], &[0xff; 20][..]].concat();
    assert_eq!(
        error(&forever),
        "profile is damaged at byte 36: the number of clusters left out is 9223372036854775807, which goes on, and has \
         more than 64 bits already"
    );
    // What is promised is not believed: no memory is taken for 2⁴⁰ clusters.
    let mut promising = Profile::new(PAGES_MAX, 1).expect("valid").encode();
    promising[28..36].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert!(error(&promising).contains("cut off"));
}

fn recordings(pages: u64) -> impl Strategy<Value = Vec<Recording>> {
    let looks = prop::collection::vec(
        (0..5000u64, prop::collection::vec((0..pages, 0..50u64), 0..8)),
        0..5,
    );
    let runs = prop::collection::vec(looks, 0..12);
    runs.prop_map(move |runs| {
        let of = |looks: Vec<(u64, Vec<(u64, u64)>)>| {
            let looks: Vec<_> = looks
                .into_iter()
                .map(|(at, runs)| {
                    (at, runs.into_iter().map(|(start, len)| range(start, len)).collect())
                })
                .collect();
            recording(pages, &looks)
        };
        runs.into_iter().map(of).collect()
    })
}

proptest! {
    #[test]
    fn a_profile_is_the_fading_average_of_its_runs(runs in recordings(700), min in 0..101u32) {
        let mut profile = profile(700);
        // By cluster: touched weight, and weighted time.
        let mut model: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
        let mut whole = 0.0;
        for run in &runs {
            profile.merge(run);
            let mut first = BTreeMap::new();
            for (at, pages) in run.steps() {
                for page in pages.iter().flat_map(PageRange::pages) {
                    first.entry(page.0 / 16).or_insert(at.as_secs_f64() * 1000.0);
                }
            }
            whole = whole * 15.0 / 16.0 + 1.0;
            for (weight, time) in model.values_mut() {
                *weight *= 15.0 / 16.0;
                *time *= 15.0 / 16.0;
            }
            for (index, ms) in first {
                let (weight, time) = model.entry(index).or_default();
                *weight += 1.0;
                *time += ms;
            }
        }
        prop_assert_eq!(profile.len(), model.len());
        prop_assert_eq!(profile.runs() as usize, runs.len());
        for (cluster, (index, (weight, time))) in profile.clusters().zip(&model) {
            prop_assert_eq!(cluster.pages, range(index * 16, 16).intersect(&PageRange::first(700)));
            prop_assert!((cluster.frequency - weight / whole).abs() < 0.01);
            let ms = cluster.first_access.as_secs_f64() * 1000.0;
            prop_assert!((ms - time / weight).abs() < 20.0, "{} {}", ms, time / weight);
        }
        // The set, once by time and once in order, has the pages of the frequent clusters.
        let min = f64::from(min) / 100.0;
        let set = profile.working_set(min, u64::MAX);
        let pages: BTreeSet<_> = set.iter().flat_map(PageRange::pages).collect();
        let frequent = profile.clusters().filter(|cluster| cluster.frequency >= min);
        prop_assert_eq!(&pages, &frequent.flat_map(|cluster| cluster.pages.pages()).collect());
        prop_assert_eq!(pages.len() as u64, set.iter().map(PageRange::len).sum::<u64>());
        let first_access = |run: &PageRange| {
            let cluster = profile.clusters().find(|cluster| cluster.pages.start() == run.start());
            cluster.expect("runs begin with clusters").first_access
        };
        prop_assert!(set.iter().map(first_access).is_sorted());
        let in_order = sequential(&set);
        prop_assert_eq!(in_order.iter().flat_map(PageRange::pages).collect::<Vec<_>>(), Vec::from_iter(pages));
        prop_assert!(in_order.windows(2).all(|pair| pair[0].end() < pair[1].start()));
    }

    #[test]
    fn what_was_encoded_is_decoded(runs in recordings(700), cluster_log2 in 0..10u32) {
        let mut profile = Profile::new(700, 1 << cluster_log2).expect("valid");
        runs.iter().for_each(|run| profile.merge(run));
        let bytes = profile.encode();
        prop_assert_eq!(Profile::decode(&bytes), Ok(profile));
    }

    #[test]
    fn no_flipped_bit_and_no_cut_goes_unnoticed(
        runs in recordings(700),
        bit in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut profile = profile(700);
        runs.iter().for_each(|run| profile.merge(run));
        let bytes = profile.encode();
        let mut flipped = bytes.clone();
        let bit = bit.index(bytes.len() * 8);
        flipped[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Profile::decode(&flipped).is_err());
        prop_assert!(Profile::decode(&bytes[..cut.index(bytes.len())]).is_err());
    }

    /// Any bytes behind a good head, with a good checksum: refused, or the one form of what they
    /// say.
    #[test]
    fn bytes_are_refused_or_mean_one_profile(
        head in any::<bool>(),
        (runs, count) in (0..200u32, 0..9u64),
        body in prop::collection::vec(prop_oneof![any::<u8>(), 0..8u8], 0..60),
    ) {
        let mut bytes = Vec::new();
        if head {
            bytes = profile(700).encode();
            bytes.truncate(24);
            bytes.extend(runs.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        bytes.extend(body);
        bytes.extend([0; 4]);
        codec::seal(&mut bytes);
        if let Ok(profile) = Profile::decode(&bytes) {
            prop_assert_eq!(profile.encode(), bytes);
        }
    }
}
