use proptest::prelude::*;

use super::*;

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

/// Gaps, lengths and kinds, made into extents that a table may have.
fn extents_of(pieces: &[(u64, u64, bool)]) -> (u64, Vec<(PageRange, Extent)>) {
    let (mut end, mut extents) = (0, Vec::<(PageRange, Extent)>::new());
    for (gap, len, zero) in pieces {
        let kind = if *zero { Extent::Zero } else { Extent::Own };
        let touches =
            extents.last().is_some_and(|(r, k)| *k == kind && *gap == 0 && r.end().0 == end);
        let start = end + gap + u64::from(touches);
        extents.push((range(start, *len), kind));
        end = start + len;
    }
    (end, extents)
}

fn chunk_of(index: u64) -> (Hash, u64) {
    (blake3::hash(&index.to_le_bytes()), index * 3)
}

fn table(pieces: &[(u64, u64, bool)], after: u64, shift: u32) -> Table {
    let (end, extents) = extents_of(pieces);
    Table::new(end + after + 1, 1 << shift, extents, |index| Some(chunk_of(index))).expect("right")
}

fn pieces() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
    prop::collection::vec((0u64..200, 1u64..300, any::<bool>()), 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_table_reads_back(pieces in pieces(), after in 0u64..100, shift in 0u32..=9) {
        let table = table(&pieces, after, shift);
        let file = table.encode();
        let again = Table::decode(&file).expect("as written");
        prop_assert_eq!(&again, &table);
        prop_assert_eq!(again.encode(), file);
    }

    #[test]
    fn windows_are_those_that_have_own_pages(pieces in pieces(), shift in 0u32..=9) {
        let table = table(&pieces, 7, shift);
        let mut model = std::collections::BTreeMap::<u64, u64>::new();
        for (range, kind) in table.extents() {
            for page in range.pages().filter(|_| *kind == Extent::Own) {
                *model.entry(page.0 >> shift).or_default() += 1;
                prop_assert!(table.window_of(page).is_some());
            }
        }
        let found: Vec<_> = table.windows().iter().map(|w| (w.index, w.own_pages)).collect();
        prop_assert_eq!(&found, &model.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(window_count(table.extents(), 1 << shift), found.len() as u64);
        for window in table.windows() {
            let runs = table.own_runs(table.window_range(window.index));
            prop_assert_eq!(runs.map(|run| run.len()).sum::<u64>(), window.own_pages);
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>) {
        prop_assert!(Table::decode(&bytes).is_err());
        // Past the hash, which anybody can compute.
        let mut file = [&MAGIC[..], &[VERSION], &bytes].concat();
        file.extend_from_slice(blake3::hash(&file).as_bytes());
        if let Ok(table) = Table::decode(&file) {
            prop_assert_eq!(table.encode(), file);
        }
    }
}

#[test]
fn every_changed_bit_and_every_cut_is_noticed() {
    let file = table(&[(3, 100, false), (0, 20, true), (5, 1, false)], 9, 4).encode();
    for bit in 0..file.len() * 8 {
        let mut bad = file.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Table::decode(&bad).is_err(), "bit {bit}");
    }
    for bytes in 0..file.len() {
        assert!(Table::decode(&file[..bytes]).is_err(), "{bytes}");
    }
}

/// A file of these numbers, sealed as it should be.
fn sealed(numbers: &[u64]) -> Vec<u8> {
    let mut file = [&MAGIC[..], &[VERSION]].concat();
    numbers.iter().for_each(|n| put_varint(&mut file, *n));
    file.extend_from_slice(blake3::hash(&file).as_bytes());
    file
}

#[test]
fn a_few_bytes_that_promise_much_take_no_memory() {
    for (numbers, says) in [
        (&[1 << 50, 1, 1, 0, 1 << 51][..], "1125899906842624 windows have own pages, 0 chunks"),
        (&[100, 64, u64::MAX], "18446744073709551615 extents, 0 at most"),
        (&[100, 64, 1, 90, 40], "an extent of 20 pages, 90 after page 0, in an image of 100"),
        (&[u64::MAX, 64, 1, u64::MAX, u64::MAX], "an extent of"),
        (&[100, 3, 0], "windows of 3 pages"),
        (&[0, 4, 0], "an image of 0 pages"),
        (&[100, 64, 2, 0, 21, 0, 21], "extent 10+10 after 10"),
        (&[100, 64, 0, 0], "1 bytes after the end"),
    ] {
        let flaw = Table::decode(&sealed(numbers)).expect_err(says);
        assert!(flaw.what.contains(says), "{flaw}, not {says}");
    }
}

#[test]
fn a_few_bytes_do_not_make_an_image_of_any_size() {
    let table = |pages: u64| {
        let mut file = b"VFTB\x01".to_vec();
        put_varint(&mut file, pages);
        file.extend_from_slice(&[1, 0]);
        let hash = blake3::hash(&file);
        file.extend_from_slice(hash.as_bytes());
        Table::decode(&file)
    };
    assert_eq!(table(IMAGE_PAGES_MAX).map(|table| table.pages()), Ok(IMAGE_PAGES_MAX));
    let flaw = table(IMAGE_PAGES_MAX + 1).expect_err("refused");
    assert_eq!(flaw.what, "an image of 1073741825 pages");
}
