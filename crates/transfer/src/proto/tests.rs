use proptest::prelude::*;

use super::*;

fn request() -> Request {
    Request {
        image: ImageName { host: 0x1122_3344_5566_7788, image: 9 },
        range: PageRange::new(PageIdx(0x0a0b), 16).expect("small"),
        op: Op::Read,
        urgency: Urgency::Ahead,
        route: Route::Direct,
        may_compress: true,
        first: None,
        sequence: 0x0201,
    }
}

fn head() -> Head {
    Head { sequence: 0x0201, refusal: None, form: Form::Lz4, runs: 2, bytes: 77, server_us: 5 }
}

fn refused(bytes: [u8; HEAD_BYTES], request: &Request) -> String {
    Head::decode(&bytes, request).expect_err("no head").to_string()
}

#[test]
fn the_bytes_are_as_documented() {
    let expected = [
        [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11],
        [9, 0, 0, 0, 0, 0, 0, 0],
        [0x0b, 0x0a, 0, 0, 0, 0, 0, 0],
        [16, 0, 0, 0, 1, 3, 1, 2],
    ];
    assert_eq!(request().encode(), *expected.concat());
    let first = Request { first: Some(PageIdx(0x0a0d)), ..request() }.encode();
    assert_eq!(first[24..], [16, 0, 2, 0, 5, 3, 1, 2]);
    assert_eq!(head().encode(), [1, 2, 0, 1, 2, 0, 0, 0, 77, 0, 0, 0, 5, 0, 0, 0]);
    assert_eq!(Run::Zero(3).encode(), [3, 0x80]);
    assert_eq!(Run::Bytes(512).encode(), [0, 2]);
    assert_eq!(&PREAMBLE, b"VFPG\x04\0\0\0");
}

#[test]
fn a_request_that_makes_no_sense_is_refused() {
    let with = |at: usize, byte: u8| {
        let mut bytes = request().encode();
        bytes[at] = byte;
        Request::decode(&bytes).expect_err("no request").to_string()
    };
    assert_eq!(with(24, 0), "0 pages at a time; it must be 1 to 512");
    assert_eq!(with(25, 3), "784 pages at a time; it must be 1 to 512");
    assert_eq!(with(23, 0xff), "16 pages from 18374686479671626251, which no image has");
    assert_eq!(with(28, 6), "request 6, which is not known here");
    assert_eq!(with(29, 16), "flags 0x10, which are not known here");
    assert_eq!(with(29, 12), "flags 0xc, which are not known here", "two routes");
}

#[test]
fn another_protocol_and_another_version_are_refused() {
    assert_eq!(check_preamble(&PREAMBLE), Ok(()));
    let error = |bytes: &[u8; 8]| check_preamble(bytes).expect_err("another").to_string();
    assert_eq!(error(b"GET / HT"), "no client for pages: it begins with `GET `");
    assert_eq!(error(b"VFPG\x05\0\0\0"), "version 5 of the protocol; here is 4");
    assert_eq!(error(b"VFPG\x04\0\0\x07"), "something behind the version that should be 0");
}

#[test]
fn an_answer_to_something_else_is_refused() {
    let asked = request();
    let of = |head: Head| refused(head.encode(), &asked);
    let other = Head { sequence: 7, ..head() };
    assert_eq!(of(other), "an answer to request 7, and 513 was asked");
    let runs = Head { runs: 17, ..head() };
    assert_eq!(of(runs), "17 runs and 77 bytes in answer to 16 pages");
    let bytes = Head { bytes: 16 * 4096 + 1, ..head() };
    assert_eq!(of(bytes), "2 runs and 65537 bytes in answer to 16 pages");
    let long = Head { refusal: Some(RefusalKind::Busy), form: Form::Raw, runs: 0, ..head() };
    assert!(Head::decode(&long.encode(), &asked).is_ok());
    let long = Head { bytes: 513, ..long };
    assert_eq!(of(long), "0 runs and 513 bytes in answer to 16 pages");
    let plain = Request { may_compress: false, ..asked };
    let error = refused(head().encode(), &plain);
    assert_eq!(error, "something compressed, which was not asked for");
    for (at, what) in [(2, "status 99"), (3, "bytes of form 99"), (6, "something behind")] {
        let mut bytes = head().encode();
        bytes[at] = 99;
        let error = refused(bytes, &asked);
        assert!(error.starts_with(what), "{error}");
    }
}

#[test]
fn runs_are_as_many_pages_as_were_asked_for() {
    let bytes = [Run::Zero(3), Run::Bytes(13)].map(Run::encode).concat();
    assert_eq!(decode_runs(&bytes, 16), Ok(vec![Run::Zero(3), Run::Bytes(13)]));
    let error = |pages| decode_runs(&bytes, pages).expect_err("other").to_string();
    assert_eq!(error(15), "runs of 16 pages in answer to 15");
    assert_eq!(error(17), "runs of 16 pages in answer to 17");
    let empty = [Run::Zero(16), Run::Bytes(0)].map(Run::encode).concat();
    assert_eq!(decode_runs(&empty, 16).expect_err("empty").to_string(), "a run of no pages");
}

#[test]
fn a_refusal_is_short_and_visible() {
    let refusal = Refusal::new(RefusalKind::Busy, "a\nb\x1b[31mc");
    assert_eq!(refusal.to_string(), "ab[31mc (busy)");
    let long = Refusal::new(RefusalKind::Busy, "é".repeat(1000));
    assert_eq!(long.text().len(), REFUSAL_BYTES_MAX);
}

#[test]
fn who_is_sent_elsewhere_hears_where_and_what_is_there_or_only_where() {
    let kind = RefusalKind::Elsewhere;
    for sums in [vec![], vec![[7; SUM_BYTES], [9; SUM_BYTES]]] {
        let sent = Refusal::at(Elsewhere { host: 0x0102_0304_0506_0708, sums });
        let bytes = sent.encode();
        assert_eq!(bytes[0], 8, "little endian");
        assert_eq!(Refusal::decode(kind, &bytes, 2), Ok(sent));
    }
    let error = |bytes: usize| Refusal::decode(kind, &[1; 100][..bytes], 2).expect_err("wrong");
    assert_eq!(error(7).to_string(), "a host's id of 7 bytes");
    for bytes in [9, 8 + SUM_BYTES, 8 + 2 * SUM_BYTES + 1, 8 + 3 * SUM_BYTES] {
        assert_eq!(error(bytes).to_string(), format!("{} bytes of sums of 2 pages", bytes - 8));
    }
    let longest = u32::try_from(8 + 16 * SUM_BYTES).expect("small");
    let head = |bytes| Head { refusal: Some(kind), form: Form::Raw, runs: 0, bytes, ..head() };
    assert!(Head::decode(&head(longest).encode(), &request()).is_ok());
    assert!(Head::decode(&head(longest + 1).encode(), &request()).is_err());
}

#[test]
fn kinds_have_a_place_and_a_status_each() {
    for (place, kind) in RefusalKind::ALL.into_iter().enumerate() {
        assert_eq!(kind.place(), place);
        let head = Head { refusal: Some(kind), form: Form::Raw, runs: 0, ..head() };
        assert_eq!(
            Head::decode(&head.encode(), &request()).map(|head| head.refusal),
            Ok(Some(kind))
        );
    }
}

#[test]
fn one_page_answers_for_the_one_that_is_first_and_all_may_be_refused() {
    let request = Request { first: Some(PageIdx(0x0a0c)), ..request() };
    let two = Head { runs: 1, bytes: 4097, form: Form::Raw, ..head() };
    assert_eq!(refused(two.encode(), &request), "1 runs and 4097 bytes in answer to 16 pages");
    let sums = 8 + 16 * 16;
    let elsewhere = Some(RefusalKind::Elsewhere);
    let named = Head { refusal: elsewhere, runs: 0, bytes: sums, form: Form::Raw, ..head() };
    assert_eq!(Head::decode(&named.encode(), &request), Ok(named));
    for (pages, place) in [(1u8, 0u8), (16, 16), (16, 200)] {
        let mut bytes = request.encode();
        (bytes[24], bytes[26]) = (pages, place);
        let error = Request::decode(&bytes).expect_err("no such page").to_string();
        assert_eq!(error, format!("page {place} first, of {pages}"));
    }
}

#[test]
fn a_bitmap_beyond_what_was_asked_is_refused() {
    let range = PageRange::new(PageIdx(5), 10).expect("small");
    assert_eq!(
        decode_held(&[1, 0, 0], range).expect_err("long").to_string(),
        "a bitmap of 3 bytes for 10 pages"
    );
    let error = decode_held(&[0, 0b100], range).expect_err("an eleventh");
    assert_eq!(error.to_string(), "a bitmap with more pages than it was asked for");
}

proptest! {
    #[test]
    fn a_request_reads_back(
        (host, image) in any::<(u64, u64)>(),
        (first, pages) in (0u64..1 << 40, 1u64..=512),
        (ahead, may_compress, held) in any::<(bool, bool, bool)>(),
        (route, place, sequence) in (0usize..3, prop::option::of(0u64..512), any::<u16>()),
    ) {
        let place = place.filter(|place| *place < pages && pages > 1 && !held);
        let request = Request {
            image: ImageName { host, image },
            range: PageRange::new(PageIdx(first), pages).expect("small"),
            op: if held { Op::Held } else { Op::Read },
            urgency: if ahead { Urgency::Ahead } else { Urgency::Demand },
            route: [Route::Direct, Route::Insist, Route::Redirected][route],
            may_compress,
            first: place.map(|place| PageIdx(first + place)),
            sequence,
        };
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn bytes_that_are_a_request_are_its_only_encoding(bytes: [u8; REQUEST_BYTES], op in 0u8..6) {
        let mut bytes = bytes;
        (bytes[23], bytes[25], bytes[27]) = (0, bytes[25] & 1, 0);
        bytes[26] &= if op == 5 { 15 } else { 0 };
        (bytes[28], bytes[29]) = (op, bytes[29] & 7);
        if let Ok(request) = Request::decode(&bytes) {
            prop_assert_eq!(request.encode(), bytes);
        }
    }

    #[test]
    fn bytes_that_are_a_head_are_its_only_encoding(bytes: [u8; HEAD_BYTES], kind in 0u8..9) {
        let mut bytes = bytes;
        (bytes[0], bytes[1], bytes[2], bytes[6], bytes[7]) = (1, 2, kind, 0, 0);
        (bytes[3], bytes[5], bytes[10], bytes[11]) = (bytes[3] & 1, 0, 0, 0);
        if let Ok(head) = Head::decode(&bytes, &request()) {
            prop_assert_eq!(head.encode(), bytes);
        }
    }

    #[test]
    fn what_is_held_reads_back(held in prop::collection::vec(any::<bool>(), 1..300), first in 0u64..5000) {
        let range = PageRange::new(PageIdx(first), held.len() as u64).expect("small");
        let mut bitmap = vec![0; held.len().div_ceil(8)];
        for (page, _) in range.pages().zip(&held).filter(|(_, held)| **held) {
            set_held(&mut bitmap, range, page.range());
        }
        let runs = decode_held(&bitmap, range).expect("a bitmap");
        prop_assert!(runs.windows(2).all(|two| two[0].end() < two[1].start()));
        for (page, held) in range.pages().zip(&held) {
            prop_assert_eq!(runs.iter().any(|run| run.contains(page)), *held);
        }
        let mut by_runs = vec![0; bitmap.len()];
        runs.into_iter().for_each(|run| set_held(&mut by_runs, range, run));
        prop_assert_eq!(by_runs, bitmap);
    }

    #[test]
    fn of_a_run_only_what_was_asked_for_is_held((first, pages) in (0u64..100, 1u64..200), (from, len) in (0u64..400, 0u64..400)) {
        let range = PageRange::new(PageIdx(first), pages).expect("small");
        let run = PageRange::new(PageIdx(from), len).expect("small");
        let mut bitmap = vec![0; usize::try_from(pages.div_ceil(8)).expect("small")];
        set_held(&mut bitmap, range, run);
        let held = decode_held(&bitmap, range).expect("no more than asked for");
        let both = range.intersect(&run);
        prop_assert_eq!(held, if both.is_empty() { vec![] } else { vec![both] });
    }
}
