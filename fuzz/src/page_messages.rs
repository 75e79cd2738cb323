//! What goes over a connection between two hosts, either way.

use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_transfer::proto::{
    self, HEAD_BYTES, Head, Op, PREAMBLE, ProtoError, REQUEST_BYTES, Refusal, Request, Route, Run,
    Urgency,
};
use vmfork_transfer::{Scratch, receive};

const PAGE: usize = 4096;
const PAGES: u64 = 5;

/// Requests have one encoding; an answer is read as far as it says, and makes all the pages or
/// none.
pub fn run(data: &[u8]) {
    if let Some((preamble, rest)) = data.split_first_chunk::<{ PREAMBLE.len() }>()
        && proto::check_preamble(preamble).is_ok()
        && let Some(bytes) = rest.first_chunk::<REQUEST_BYTES>()
        && let Ok(request) = Request::decode(bytes)
    {
        assert_eq!(request.encode(), *bytes);
        assert!(!request.range.is_empty() && request.range.len() <= proto::HELD_PAGES_MAX);
    }
    for op in [Op::Read, Op::Held, Op::Invite, Op::Sums] {
        answer(op, None, data);
    }
    answer(Op::Read, Some(PageIdx(11)), data);
}

fn answer(op: Op, first: Option<PageIdx>, data: &[u8]) {
    let request = Request {
        image: ImageName { host: 1, image: 2 },
        range: PageRange::new(PageIdx(9), PAGES).expect("small"),
        op,
        urgency: Urgency::Demand,
        route: Route::Direct,
        may_compress: true,
        first,
        sequence: 0,
    };
    let Some((head, rest)) = data.split_first_chunk::<HEAD_BYTES>() else { return };
    let Ok(head) = Head::decode(head, &request) else { return };
    match (head.refusal, op) {
        (Some(kind), _) => {
            assert!(head.bytes <= 512 && head.runs == 0);
            if let Ok(refusal) = Refusal::decode(kind, rest, PAGES) {
                assert!(refusal.kind == kind && refusal.text().len() <= 512);
            }
        }
        (None, Op::Held) => {
            let held = proto::decode_held(rest, request.range).unwrap_or_default();
            assert!(held.iter().all(|run| request.range.covers(run)));
        }
        (None, Op::Read) if first.is_some() => {
            assert!(head.runs <= 1 && head.bytes <= 4096);
        }
        (None, Op::Read) => pages(&head, rest),
        (None, Op::Invite) => assert!(head.bytes <= 96),
        (None, Op::Sums) => assert!(u64::from(head.bytes) <= 16 * PAGES),
    }
}

fn pages(head: &Head, mut rest: &[u8]) {
    let mut out = vec![0xee; PAGE * 5];
    let came = receive(head, &mut out, &mut Scratch::default(), |part| {
        let Some((front, after)) = rest.split_at_checked(part.len()) else {
            return Err(Cut::Short);
        };
        part.copy_from_slice(front);
        rest = after;
        Ok(())
    });
    let Ok(runs) = came else { return };
    assert_eq!(runs.iter().map(|run| u64::from(run.pages())).sum::<u64>(), PAGES);
    let mut at = 0;
    for run in runs {
        let end = at + usize::from(run.pages()) * PAGE;
        assert!(matches!(run, Run::Bytes(_)) || out[at..end].iter().all(|byte| *byte == 0));
        at = end;
    }
}

enum Cut {
    Short,
    Wrong,
}

impl From<ProtoError> for Cut {
    fn from(_: ProtoError) -> Self {
        Self::Wrong
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let range = PageRange::new(PageIdx(9), PAGES).expect("small");
    let image = ImageName { host: 1, image: 2 };
    let (urgency, route, may_compress) = (Urgency::Ahead, Route::Direct, true);
    let request = Request {
        image,
        range,
        op: Op::Read,
        urgency,
        route,
        may_compress,
        first: None,
        sequence: 0,
    };
    // Five pages, of which the last is there: as it is, and as an lz4 block of one byte 4096 times.
    let lz4 = [&[0x1f, 7, 1, 0][..], &[0xff; 15], &[0xf6, 0x50, 7, 7, 7, 7, 7]].concat();
    let len = u8::try_from(lz4.len()).expect("short");
    let runs = [4, 0x80, 1, 0];
    vec![
        [&PREAMBLE[..], &request.encode()].concat(),
        [&PREAMBLE[..], &Request { first: Some(PageIdx(11)), ..request }.encode()].concat(),
        [&[0, 0, 0, 0, 2, 0, 0, 0, 0, 16, 0, 0, 9, 0, 0, 0][..], &runs, &[7; PAGE]].concat(),
        [&[0, 0, 0, 1, 2, 0, 0, 0, len, 0, 0, 0, 9, 0, 0, 0][..], &runs, &lz4].concat(),
        [&[0, 0, 4, 0, 0, 0, 0, 0, 4, 0, 0, 0, 9, 0, 0, 0][..], b"gone"].concat(),
        vec![0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0b10110],
    ]
}
