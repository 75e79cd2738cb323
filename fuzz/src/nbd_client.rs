//! What a server of disks says to our client.

use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};

use vmfork_nbd::{Answer, Client, Command, Connect, NbdError, Span};

const NAME: &str = "it";
const SPAN: Span = Span { offset_bytes: 4096, len_bytes: 1024 };

/// An answer has all bytes of a read, or at least one extent. Each request is answered once, and
/// nothing is asked for longer than the server speaks. If the first byte is 0, all that the server
/// says follows, else what it says after a greeting.
pub fn run(data: &[u8]) {
    let Some((how, said)) = data.split_first() else { return };
    let (ours, mut server) = UnixStream::pair().expect("a pair of sockets");
    let mut first = Some(ours);
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let connect: Connect = Box::new(move || first.take().ok_or_else(refused));
    // A client that has ended takes no more.
    let _taken = match how {
        0 => server.write_all(said).and_then(|()| server.shutdown(Shutdown::Write)),
        _ => server.write_all(&greeting()),
    };
    let Ok(client) = Client::start(connect, NAME) else {
        assert_eq!(*how, 0, "a good greeting is refused");
        return;
    };
    let (tell, told) = channel();
    let ask = |command, tell: Sender<_>| {
        let done = move |answer| tell.send(answer).expect("the fuzzer waits");
        client.ask(command, Vec::new(), Box::new(done));
    };
    ask(Command::Read { span: SPAN, whole: false }, tell.clone());
    ask(Command::BlockStatus { span: SPAN, one: false }, tell);
    if *how != 0 {
        let _taken = server.write_all(said).and_then(|()| server.shutdown(Shutdown::Write));
    }
    let answers: Vec<Result<Answer, NbdError>> = told.iter().collect();
    assert_eq!(answers.len(), 2);
    for answer in answers.into_iter().flatten() {
        let is_read = answer.bytes.len() == SPAN.len_bytes as usize && answer.extents.is_empty();
        assert!(is_read || answer.bytes.is_empty() && !answer.extents.is_empty(), "{answer:?}");
    }
}

fn option_reply(option: u32, kind: u32, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("short").to_be_bytes();
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, content].concat()
}

fn greeting() -> Vec<u8> {
    let context = [&1_u32.to_be_bytes()[..], b"base:allocation"].concat();
    let export = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &3_u16.to_be_bytes()].concat();
    [
        b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
        option_reply(8, 1, &[]),
        option_reply(10, 4, &context),
        option_reply(10, 1, &[]),
        option_reply(7, 3, &export),
        option_reply(7, 3, b"\0\x02a description"),
        option_reply(7, 1, &[]),
    ]
    .concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("short").to_be_bytes();
    let head = [&0x668e_33ef_u32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()];
    [&head.concat()[..], &cookie.to_be_bytes(), &len, content].concat()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let data = [&4096_u64.to_be_bytes()[..], &[7; 512]].concat();
    let hole = [&4608_u64.to_be_bytes()[..], &512_u32.to_be_bytes()].concat();
    let extents = [1_u32, 512, 0, 512, 3].map(u32::to_be_bytes).concat();
    let read = [chunk(0, 1, 0, &data), chunk(1, 2, 0, &hole)].concat();
    let status = chunk(1, 5, 1, &extents);
    let failed = chunk(1, (1 << 15) + 1, 0, &[0, 0, 0, 28, 0, 0]);
    let simple = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &[0; 8]].concat();
    let whole = |how: u8, said: &[&[u8]]| [&[how][..], &said.concat()].concat();
    vec![
        whole(0, &[&greeting()]),
        whole(1, &[&read, &status]),
        whole(1, &[&status, &failed]),
        whole(1, &[&simple, &read]),
    ]
}
