//! Packets between the daemon and the keeper beside a QEMU.

use vmfork_tap_proto::{Op, REPLY_BYTES, REQUEST_BYTES, Reply, Request};

/// Any bytes of the right length are a packet that says just these bytes, and an op is known only
/// by its own number.
pub fn run(data: &[u8]) {
    for bytes in data.as_chunks::<REQUEST_BYTES>().0 {
        let request = Request::from_bytes(bytes);
        assert_eq!(&request.to_bytes(), bytes);
        if let Some(op) = Op::from_u32(request.op) {
            assert_eq!(op as u32, request.op);
        }
    }
    for bytes in data.as_chunks::<REPLY_BYTES>().0 {
        assert_eq!(&Reply::from_bytes(bytes).to_bytes(), bytes);
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let requests = (0..9).map(|op| Request { op, sequence: op, args: [1, 2, 3, u64::MAX] });
    let reply = Reply { errno: 16, sequence: 3, values: [1, 2, 3, 4, 5, u64::MAX] };
    requests.map(|request| request.to_bytes().to_vec()).chain([reply.to_bytes().to_vec()]).collect()
}
