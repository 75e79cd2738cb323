//! Datagrams of pages and of requests for them, as they are after they were opened.

use vmfork_image::{PageIdx, PageRange};
use vmfork_multicast::datagram::{
    Asking, Assembler, BODY_BYTES_MAX, Cutter, Form, From, HEAD_BYTES, Head, PART_BYTES,
    PARTIAL_PAGES_MAX, REQUEST_PAGES_MAX, REQUESTS_MAX, Record, decode_records,
};
use vmfork_policy::transfer::multicast::Request;

/// Heads and requests have one encoding; parts make whole pages or none, and wait for each other in
/// bounded room.
pub fn run(data: &[u8]) {
    if let Some((bytes, body)) = data.split_first_chunk::<HEAD_BYTES>()
        && let Some(head) = Head::decode(bytes)
    {
        assert_eq!(head.encode(), *bytes);
        if let Ok(asking) = Asking::decode(body) {
            assert_eq!(asking.encode(), body);
            assert!(asking.requests.len() <= REQUESTS_MAX);
            let sane = |request: &Request| (1..=REQUEST_PAGES_MAX).contains(&request.pages.len());
            assert!(asking.requests.iter().all(sane));
        }
    }
    let mut assembler = Assembler::default();
    // Several datagrams, one after the other.
    for body in data.chunks(BODY_BYTES_MAX) {
        for record in decode_records(body).into_iter().flatten() {
            let mut again = Vec::new();
            record.encode_into(&mut again);
            assert!(again.len() <= body.len());
            match record {
                Record::Part { page, form, total, at, bytes } => {
                    let _page_or_not = assembler.add(page, form, total, at, bytes);
                    assert!(assembler.partial_pages() <= PARTIAL_PAGES_MAX);
                }
                Record::Zeros(run) => assert!(!run.is_empty()),
                Record::Listeners(_) => {}
            }
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let range = PageRange::new(PageIdx(9), 3).expect("small");
    let mut pages = vec![0; 3 * 4096];
    pages[4096..8192].fill(7);
    pages[8192..].iter_mut().zip((0..=250).cycle()).for_each(|(byte, n)| *byte = n);
    let head = Head { from: From::Listener(2), session: 3, counter: 4 };
    let request = Request { pages: range, demand: true, repeat: false };
    let asking = Asking { received: Some(5), requests: vec![request; 2] };
    let mut seeds = vec![[&head.encode()[..], &asking.encode()].concat()];
    seeds.extend(Cutter::default().cut(range, &pages));
    let mut told = Vec::new();
    Record::Listeners(3).encode_into(&mut told);
    seeds.push(told);
    let third = [6; 4096];
    let raw = |at: u16| {
        let from = usize::from(at);
        let (form, bytes) = (Form::Raw, &third[from..(from + PART_BYTES).min(4096)]);
        let mut body = Vec::new();
        Record::Part { page: PageIdx(1), form, total: 4096, at, bytes }.encode_into(&mut body);
        body
    };
    seeds.push([raw(0), raw(1366), raw(2732)].concat());
    seeds
}
