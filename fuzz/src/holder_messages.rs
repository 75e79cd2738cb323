//! Messages between a daemon and the holder of its file descriptors.

use vmfork_holder::proto::{MESSAGE_BYTES_MAX, Refusal, Reply, Request};
use vmfork_holder::{Kind, Name, PeerId, Table};

/// Bytes that are understood are the only ones that say this; and whatever is asked, the table
/// answers with a message.
pub fn run(data: &[u8]) {
    let mut table = Table::new(0, 1000);
    let owner = PeerId(0);
    table.request(owner, Request::Hello { linger_ms: 1000 }, None);
    for (bytes, fd) in messages(data) {
        if let Some(reply) = Reply::parse(bytes)
            && reply != Reply::Refused(Refusal::Version)
        {
            assert_eq!(reply.to_bytes(), bytes);
        }
        let Ok(request) = Request::parse(bytes) else { continue };
        assert_eq!(request.to_bytes(), bytes);
        let (reply, _) = table.request(owner, request, fd);
        let said = reply.to_bytes();
        assert!(said.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(Reply::parse(&said), Some(reply));
        if table.has_ended() {
            return;
        }
    }
}

/// Cut in packets: two bytes of length, whose highest bit says that an fd comes along, and as many
/// bytes.
fn messages(mut data: &[u8]) -> impl Iterator<Item = (&[u8], Option<u16>)> {
    std::iter::from_fn(move || {
        let (head, rest) = data.split_first_chunk::<2>()?;
        let head = u16::from_le_bytes(*head);
        let length = usize::from(head & 0x7fff);
        let (bytes, rest) = rest.split_at(rest.len().min(length));
        data = rest;
        Some((bytes, (head & 0x8000 != 0).then_some(head)))
    })
}

pub fn seeds() -> Vec<Vec<u8>> {
    let name = |text: &str| Name::new(text).expect("a name");
    let requests = [
        Request::Put { name: name("api.unix"), kind: Kind::LISTENER, note: b"1 2 /x".to_vec() },
        Request::Put { name: name("b"), kind: Kind(9), note: Vec::new() },
        Request::Get { name: name("b") },
        Request::List { after: None },
        Request::List { after: Some(name("api.unix")) },
        Request::Drop { name: name("b") },
        Request::Hello { linger_ms: 1 },
        Request::End,
    ];
    let refused = Reply::Refused(Refusal::Full);
    let entry = Reply::Entry { generation: 2, name: name("b"), kind: Kind(1), note: vec![0] };
    let replies = [Reply::Done, Reply::Welcome { generation: 1 }, entry, refused];
    let packet = |bytes: &[u8], fd: bool| {
        let length = u16::try_from(bytes.len()).expect("short") | if fd { 0x8000 } else { 0 };
        [&length.to_le_bytes()[..], bytes].concat()
    };
    let asked = requests
        .iter()
        .map(|request| packet(&request.to_bytes(), matches!(request, Request::Put { .. })));
    let said = replies.iter().map(|reply| packet(&reply.to_bytes(), false));
    let all: Vec<u8> = asked.clone().flatten().collect();
    asked.chain(said).chain([all]).collect()
}
