use proptest::prelude::*;

use super::*;

const PAGES: u64 = 300;

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn changes() -> impl Strategy<Value = Vec<(PageRange, PageState)>> {
    let state =
        prop_oneof![Just(PageState::Absent), Just(PageState::Written), Just(PageState::Zero)];
    let change = (0..PAGES, 1_u64..100, state)
        .prop_map(|(start, len, state)| (range(start, len.min(PAGES - start)), state));
    proptest::collection::vec(change, 0..30)
}

fn loaded(bytes: &[u8], pages: u64) -> Result<LayerMap, MapFlaw> {
    let map = LayerMap::new(pages);
    map.load(0, bytes).map(|()| map)
}

proptest! {
    /// Against a state for each page.
    #[test]
    fn it_has_of_each_page_what_was_set_last(changes in changes()) {
        let map = LayerMap::new(PAGES);
        let mut model = vec![PageState::Absent; 300];
        for (range, state) in changes {
            let (at, bytes) = map.bytes_with(range, state);
            let before = map.written(range);
            prop_assert_eq!(map.set(range, state), before);
            prop_assert_eq!(map.bytes(range), (at, bytes));
            for page in range.pages() {
                model[usize::try_from(page.0).expect("small")] = state;
            }
        }
        for (page, state) in (0..).zip(&model) {
            prop_assert_eq!(map.state(PageIdx(page)), *state);
        }
        let mut at = 0;
        for (run, state) in map.runs(range(0, PAGES)) {
            prop_assert!(run.start() == PageIdx(at) && !run.is_empty());
            prop_assert!(run.pages().all(|page| map.state(page) == state));
            at = run.end().0;
            prop_assert!(at == PAGES || map.state(PageIdx(at)) != state, "longer");
        }
        prop_assert_eq!(at, PAGES);
        let written = model.iter().filter(|state| **state == PageState::Written).count() as u64;
        prop_assert_eq!(map.count(PageState::Written), written);
        let zero = model.iter().filter(|state| **state == PageState::Zero).count() as u64;
        prop_assert_eq!(map.count(PageState::Zero), zero);
        prop_assert_eq!(map.count(PageState::Absent), PAGES - written - zero);
        let grown = map.grown(PAGES * 2);
        prop_assert_eq!(grown.count(PageState::Written), written);
        // What a file has is the whole.
        let mut file = map.bytes(range(0, PAGES)).1;
        file.resize(usize::try_from(LayerMap::byte_len(PAGES)).expect("small"), 0);
        let again = loaded(&file, PAGES).expect("a map");
        prop_assert_eq!(again.count(PageState::Written), written);
        prop_assert!((0..PAGES).all(|page| again.state(PageIdx(page)) == map.state(PageIdx(page))));
    }
}

#[test]
fn bits_that_no_layer_writes_are_refused() {
    let len = usize::try_from(LayerMap::byte_len(33)).expect("small");
    let flaw = |bytes: &[u8]| loaded(bytes, 33).expect_err("refused");
    assert_eq!(flaw(&[0; 24]), MapFlaw::Length { found: 24, pages: 33 });
    assert_eq!(flaw(&[0; 7]), MapFlaw::Length { found: 7, pages: 33 });
    let mut bytes = vec![0; len];
    bytes[2] = 0b1100;
    assert_eq!(flaw(&bytes), MapFlaw::State(PageIdx(9)));
    bytes[2] = 0;
    bytes[8] = 0b0100;
    assert_eq!(flaw(&bytes), MapFlaw::Beyond);
    bytes[8] = 0b01;
    assert_eq!(loaded(&bytes, 33).expect("a map").state(PageIdx(32)), PageState::Written);
}

#[test]
fn pages_beyond_the_layer_are_absent_and_stay_so() {
    let map = LayerMap::new(5);
    map.set(range(3, 40), PageState::Zero);
    assert_eq!(map.state(PageIdx(4)), PageState::Zero);
    assert_eq!(map.state(PageIdx(5)), PageState::Absent);
    assert_eq!(map.state(PageIdx(u64::MAX / 4096)), PageState::Absent);
}

#[test]
fn a_large_map_allocates_only_what_is_set_and_runs_skip_the_rest() {
    // A disk of 2 TiB.
    let pages = 1 << 29;
    let map = LayerMap::new(pages);
    let allocated = |map: &LayerMap| map.chunks.iter().filter(|c| c.get().is_some()).count();
    map.set(range(0, pages), PageState::Absent);
    assert_eq!(allocated(&map), 0);
    // Over the edge of two chunks.
    let some = range(CHUNK_PAGES * 1000 - 1, 2);
    assert_eq!((map.chunks_missing(some), map.set(some, PageState::Written)), (2, 0));
    assert_eq!((allocated(&map), map.chunks_missing(some)), (2, 0));
    let runs: Vec<_> = map.runs(range(0, pages)).collect();
    let (before, after) = (range(0, some.start().0), some.end().0);
    let after = range(after, pages - after);
    let (absent, written) = (PageState::Absent, PageState::Written);
    assert_eq!(runs, [(before, absent), (some, written), (after, absent)]);
    let again = LayerMap::new(pages);
    let at = (some.start().0 / CHUNK_PAGES) * CHUNK_BYTES;
    again.load(at, &vec![0; usize::try_from(CHUNK_BYTES).expect("small")]).expect("zeros");
    assert_eq!((allocated(&again), allocated(&map.grown(pages * 2))), (0, 2));
}
