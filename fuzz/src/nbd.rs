//! What QEMU says to the server of its disks.

use vmfork_nbd::{
    Agreed, BLOCK_BYTES_MAX, Command, Export, Extent, Handshake, NbdError, OPTION_BYTES_MAX, Out,
    REQUEST_BYTES, Replies, Request, Span, Step,
};

fn exports() -> [Export; 2] {
    let export = |name: &str, size_bytes, read_only: bool| {
        let (name, description) = (name.to_owned(), format!("what {name} holds"));
        Export { name, description, size_bytes, read_only, flushes: !read_only }
    };
    [export("root", 1 << 30, false), export("data", 4096 + 512, true)]
}

/// Whatever is said, little is kept of it. What is taken lies in the export that was asked for by
/// its name. Each reply is as long as it says. If the first byte is 0, a handshake follows, else
/// requests.
pub fn run(data: &[u8]) {
    let exports = exports();
    let Some((how, mut rest)) = data.split_first() else { return };
    if *how != 0 {
        let agreed = Agreed { structured: how & 1 != 0, allocation: how & 2 != 0 };
        let export = &exports[usize::from(how >> 2 & 1)];
        return requests(rest, export, agreed);
    }
    let (mut handshake, mut sent) = Handshake::begin(&exports);
    loop {
        let needs = handshake.needs();
        assert!(needs <= OPTION_BYTES_MAX as usize);
        let Some((front, after)) = rest.split_at_checked(needs) else { return };
        rest = after;
        match handshake.take(front) {
            Ok(Step::More(reply)) => sent.extend(reply),
            Ok(Step::Begin(reply, export, agreed)) => {
                assert!(data.windows(4).any(|part| part == export.name.as_bytes()));
                assert!(!agreed.allocation || agreed.structured);
                assert!(reply.len() <= 256);
                return requests(rest, export, agreed);
            }
            Ok(Step::End(_)) | Err(_) => return,
        }
        assert!(sent.len() <= 1000 + 20 * data.len(), "{} bytes", sent.len());
    }
}

fn requests(mut rest: &[u8], export: &Export, agreed: Agreed) {
    while let Some((head, after)) = rest.split_first_chunk::<REQUEST_BYTES>() {
        let Ok(request) = Request::decode(head, export, agreed) else { return };
        assert!(request.payload_bytes <= BLOCK_BYTES_MAX);
        rest = after.get(request.payload_bytes as usize..).unwrap_or_default();
        reply(&request, export, agreed);
    }
}

fn reply(request: &Request, export: &Export, agreed: Agreed) {
    let (cookie, replies) = (request.cookie, Replies(agreed));
    let mut out = Out::default();
    let within = |span: Span| {
        assert!(span.len_bytes > 0 && span.end() <= export.size_bytes);
        let aligned = |bytes: u64| bytes.is_multiple_of(512);
        assert!(aligned(span.offset_bytes) && aligned(u64::from(span.len_bytes)));
    };
    match request.command {
        Ok(Command::Read { span, whole }) => {
            within(span);
            assert!(span.len_bytes <= BLOCK_BYTES_MAX);
            let half = u64::from(span.len_bytes / 2);
            let rest = u64::from(span.len_bytes) - half;
            let extents =
                [(half, true), (rest, false)].map(|(len_bytes, zero)| Extent { len_bytes, zero });
            let extents: Vec<_> =
                extents.into_iter().filter(|extent| extent.len_bytes > 0).collect();
            let mut filled = 0;
            let fill = |part: Span, out: &mut Out| {
                filled += out.space(part.len_bytes as usize).len();
                Ok::<_, ()>(())
            };
            replies.read(&mut out, cookie, (span, whole), &extents, fill).expect("it is filled");
            assert_eq!(filled as u64, rest);
            assert!(out.leading_bytes().len() as u64 >= rest);
            assert!(out.leading_bytes().len() <= span.len_bytes as usize + 64);
        }
        Ok(Command::Write { span, .. }) => {
            within(span);
            assert!(!export.read_only && request.payload_bytes == span.len_bytes);
            Replies::done(&mut out, cookie);
            assert_eq!(out.leading_bytes()[8..], cookie.to_be_bytes());
        }
        Ok(Command::Trim { span, .. } | Command::WriteZeroes { span, .. }) => {
            within(span);
            assert!(!export.read_only);
        }
        Ok(Command::BlockStatus { span, .. }) => {
            within(span);
            assert!(agreed.allocation);
            let extent = Extent { len_bytes: u64::from(span.len_bytes), zero: true };
            Replies::status(&mut out, cookie, &vec![extent; 10_000]);
            assert!(out.leading_bytes().len() <= 24 + 8 * 8192);
        }
        Ok(Command::Flush | Command::Disconnect) => {}
        Err(error) => {
            assert_ne!(error, NbdError::Io);
            replies.failed(&mut out, cookie, error, false);
            assert_eq!(out.leading_bytes().len(), 16);
        }
    }
}

fn option(number: u32, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("short").to_be_bytes();
    [b"IHAVEOPT", &number.to_be_bytes()[..], &len, content].concat()
}

fn text(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).expect("short").to_be_bytes()[..], text].concat()
}

fn request(flags: u16, command: u16, (offset, len): (u64, u32), payload: &[u8]) -> Vec<u8> {
    [
        &0x2560_9513_u32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &9_u64.to_be_bytes(),
        &offset.to_be_bytes(),
        &len.to_be_bytes(),
        payload,
    ]
    .concat()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let all = [
        request(0, 0, (4096, 512), &[]),
        request(1, 1, (0, 512), &[7; 512]),
        request(0, 3, (0, 0), &[]),
        request(0, 4, (0, 1 << 29), &[]),
        request(2, 6, (512, 4096), &[]),
        request(8, 7, (0, 1 << 20), &[]),
        request(0, 2, (0, 0), &[]),
    ]
    .concat();
    let context = [&text(b"root")[..], &1_u32.to_be_bytes(), &text(b"base:allocation")].concat();
    let go = [&text(b"root")[..], &1_u16.to_be_bytes(), &3_u16.to_be_bytes()].concat();
    let flags = 3_u32.to_be_bytes().to_vec();
    let (structured, list) = (option(8, &[]), option(3, &[]));
    let qemu = [flags.clone(), structured, option(10, &context), option(7, &go), all.clone()];
    let old = [flags, list, option(1, b"data"), all.clone()];
    vec![
        [&[0][..], &qemu.concat()].concat(),
        [&[0][..], &old.concat()].concat(),
        [&[3][..], &all].concat(),
        [&[6][..], &all].concat(),
    ]
}
