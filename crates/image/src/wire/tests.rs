use proptest::prelude::*;

use super::*;

fn image(n: u64) -> ImageId {
    ImageId::new(n).expect("not 0")
}

fn source(n: u64) -> Source {
    ImageId::new(n).map_or(Source::Zero, Source::Image)
}

fn name_of(id: ImageId) -> ImageName {
    ImageName { host: id.get() % 3, image: id.get() }
}

fn id_of(name: ImageName) -> Option<ImageId> {
    ImageId::new(name.image)
}

/// Runs of lengths and owners one after the other, as a table.
fn table(runs: &[(u64, u64)]) -> PageTable {
    let mut start = 0;
    let changes: Vec<_> = runs
        .iter()
        .map(|(len, owner)| {
            let range = PageRange::new(PageIdx(start), *len).expect("small");
            start = range.end().0;
            (range, source(*owner))
        })
        .collect();
    PageTable::uniform(start, Source::Zero).derive(changes).expect("within")
}

fn refused(bytes: &[u8], limits: Limits) -> String {
    decode(bytes, limits).expect_err("no table").to_string()
}

/// A table of 10 pages: 4 of image 1 of host 2, 6 zero; byte by byte.
fn small() -> Vec<u8> {
    let mut bytes = b"VFPT\x01\x0a\x01".to_vec();
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([2, 4, 1, 6, 0]);
    bytes
}

#[test]
fn the_bytes_are_as_documented() {
    let bytes = encode(&table(&[(4, 1), (6, 0)]), |id| ImageName { host: 2, image: id.get() });
    assert_eq!(bytes, small());
    let homes = [None, None, Some(ImageName { host: 0xab, image: 1 })];
    let bytes = encode_homes(homes);
    let (host, image) = ([0xab, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]);
    let expected = [&b"VFBH\x01\x03\x01"[..], &host, &image, &[2, 2, 0, 1, 1]].concat();
    assert_eq!(bytes, expected);
    assert_eq!(homes[2].expect("one").to_string(), "00000000000000ab/1");
}

#[test]
fn a_table_of_a_gib_in_3000_runs_is_small() {
    // What a fork of a busy VM looks like: stretches of three generations and of zeros.
    let runs: Vec<_> = [0, 7, 8, 0, 9]
        .into_iter()
        .cycle()
        .zip(0..3000)
        .map(|(owner, i)| (80 + i % 15, owner))
        .collect();
    let table = table(&runs);
    assert!(table.pages() > 250_000 && table.runs(table.range()).count() == 3000);
    let bytes = encode(&table, name_of);
    assert!(bytes.len() < 10_000, "{} bytes", bytes.len());
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let limits = Limits::default();
    let with = |at: usize, byte: u8| {
        let mut bytes = small();
        bytes[at] = byte;
        refused(&bytes, limits)
    };
    assert_eq!(
        refused(&small()[..3], limits),
        "cut short: page table needs 4 bytes, 3 are left (at byte 0)"
    );
    assert_eq!(with(0, b'X'), "no page table: it does not begin with `VFPT` (at byte 0)");
    assert_eq!(with(4, 9), "page table of version 9, of which nothing is known here (at byte 4)");
    assert_eq!(with(5, 11), "the runs are 10 pages of 11 (at byte 28)");
    assert_eq!(with(6, 2), "2 names, and room for 1 at most follows (at byte 6)");
    assert_eq!(with(23, 3), "3 runs, and room for 2 at most follows (at byte 23)");
    assert_eq!(with(24, 0), "a run of 0 pages after 0, of 10 in all (at byte 24)");
    assert_eq!(with(26, 7), "a run of 7 pages after 4, of 10 in all (at byte 26)");
    assert_eq!(with(25, 2), "a run has name 2, where 0 of 1 were said (at byte 25)");
    assert_eq!(with(27, 1), "two runs that touch have name 1 (at byte 27)");
    let mut long = small();
    long.push(0);
    assert_eq!(refused(&long, limits), "1 bytes after the end of the page table (at byte 28)");
    assert_eq!(
        decode_homes(&small(), limits).expect_err("pages").to_string(),
        "no list of homes: it does not begin with `VFBH` (at byte 0)"
    );
}

#[test]
fn a_name_that_nothing_has_and_one_that_is_there_twice_are_refused() {
    let name = [1u8; 16];
    let unused = [&b"VFPT\x01\x01\x01"[..], &name, &[1, 1, 0]].concat();
    assert_eq!(refused(&unused, Limits::default()), "no run has name 1 (at byte 26)");
    let twice = [&b"VFPT\x01\x02\x02"[..], &name, &name, &[2, 1, 1, 1, 2]].concat();
    let expected = "names 1 and 2 are both 0101010101010101/101010101010101 (at byte 23)";
    assert_eq!(refused(&twice, Limits::default()), expected);
}

#[test]
fn what_goes_beyond_a_limit_is_refused() {
    let of = |pages_max, names_max, runs_max| Limits { pages_max, names_max, runs_max };
    assert!(decode(&small(), of(10, 1, 2)).is_ok());
    assert_eq!(refused(&small(), of(9, 1, 2)), "10 pages, at most 9 may be (at byte 5)");
    assert_eq!(refused(&small(), of(10, 0, 2)), "1 names, at most 0 may be (at byte 6)");
    assert_eq!(refused(&small(), of(10, 1, 1)), "2 runs, at most 1 may be (at byte 23)");
    // More pages than any image has, whatever the limits say.
    let bytes = encode_homes([None; 3]);
    assert!(decode_homes(&bytes, of(3 * BLOCK_PAGES - 1, 0, 1)).is_ok());
    let error = decode_homes(&bytes, of(2 * BLOCK_PAGES, 0, 1)).expect_err("three blocks");
    assert_eq!(error.to_string(), "3 blocks, at most 2 may be (at byte 5)");
    let mut huge = b"VFPT\x01".to_vec();
    crate::bytes::put_varint(&mut huge, u64::MAX);
    huge.extend([0, 1]);
    crate::bytes::put_varint(&mut huge, u64::MAX);
    huge.push(0);
    assert!(refused(&huge, of(u64::MAX, 1, 1)).contains("at most 4503599627370495 may be"));
}

#[test]
fn an_image_that_is_not_known_here_is_named() {
    let wire = decode(&small(), Limits::default()).expect("a table");
    let unknown = wire.to_table(|_| None).expect_err("none is known");
    assert_eq!(unknown, ImageName { host: 2, image: 1 });
}

#[test]
fn an_image_without_pages_has_a_table_too() {
    let bytes = encode(&PageTable::uniform(0, Source::Zero), name_of);
    let wire = decode(&bytes, Limits::default()).expect("a table");
    assert_eq!((wire.pages(), wire.runs().count()), (0, 0));
    assert_eq!(wire.to_table(id_of).expect("nothing to know").pages(), 0);
}

#[test]
fn two_images_of_one_name_are_one() {
    let bytes = encode(&table(&[(4, 1), (6, 2)]), |_| ImageName { host: 1, image: 1 });
    let wire = decode(&bytes, Limits::default()).expect("a table");
    assert_eq!(wire.runs().count(), 1);
    let table = wire.to_table(|_| Some(image(5))).expect("known");
    assert_eq!(table.owners().get(image(5)), 10);
}

proptest! {
    #[test]
    fn a_table_reads_back(runs in prop::collection::vec((1u64..1500, 0u64..6), 0..200)) {
        let table = table(&runs);
        let bytes = encode(&table, name_of);
        let wire = decode(&bytes, Limits::default()).expect("a table");
        prop_assert_eq!(wire.pages(), table.pages());
        let expected: Vec<_> = table
            .runs(table.range())
            .map(|(run, source)| (run, source.image().map(name_of)))
            .collect();
        prop_assert_eq!(wire.runs().collect::<Vec<_>>(), expected);
        prop_assert_eq!(&wire.to_table(id_of).expect("all known"), &table);
        prop_assert_eq!(encode(&wire.to_table(id_of).expect("all known"), name_of), bytes);
    }

    #[test]
    fn homes_read_back(homes in prop::collection::vec(prop::option::of(0u64..4), 0..300)) {
        let homes: Vec<_> = homes
            .into_iter()
            .map(|home| home.map(|image| ImageName { host: image % 2, image }))
            .collect();
        let wire = decode_homes(&encode_homes(homes.clone()), Limits::default()).expect("homes");
        prop_assert_eq!(wire.blocks(), homes.len() as u64);
        let mut read = Vec::new();
        for (first, blocks, home) in wire.runs() {
            prop_assert_eq!(first.0, read.len() as u64);
            read.extend((0..blocks).map(|_| home));
        }
        prop_assert_eq!(read, homes);
    }

    /// Whatever bytes say, nothing panics; and what is a table has no other encoding.
    #[test]
    fn bytes_that_are_a_table_are_its_only_encoding(
        runs in prop::collection::vec((1u64..300, 0u64..4), 0..20),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in 0usize..8,
    ) {
        let mut bytes = encode(&table(&runs), name_of);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len() - cut.saturating_sub(4));
        if let Ok(wire) = decode(&bytes, Limits::default()) {
            let all = wire.runs().map(|(run, _)| run.len()).sum::<u64>();
            prop_assert_eq!(all, wire.pages());
            let again = runs::encode(PAGES_MAGIC, wire.runs().map(|(run, name)| (run.len(), name)));
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
        let _ = decode(&bytes, Limits::default());
        let _ = decode_homes(&bytes, Limits::default());
        let _ = decode(&[&b"VFPT\x01"[..], &bytes].concat(), Limits::default());
    }
}
