use proptest::prelude::*;

use super::*;

const SIZE: u64 = 1 << 30;

fn export(read_only: bool) -> Export {
    Export {
        name: "root".to_owned(),
        description: String::new(),
        size_bytes: SIZE,
        read_only,
        flushes: true,
    }
}

fn bytes(flags: u16, command: u16, offset_bytes: u64, len_bytes: u32) -> [u8; REQUEST_BYTES] {
    let head = [
        &0x2560_9513_u32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &7_u64.to_be_bytes(),
        &offset_bytes.to_be_bytes(),
        &len_bytes.to_be_bytes(),
    ];
    head.concat().try_into().expect("28 bytes")
}

fn decode(
    flags: u16,
    command: u16,
    offset_bytes: u64,
    len_bytes: u32,
) -> Result<Command, NbdError> {
    let agreed = Agreed { structured: true, allocation: true };
    let request =
        Request::decode(&bytes(flags, command, offset_bytes, len_bytes), &export(false), agreed);
    request.expect("a request").command
}

#[test]
fn what_lies_in_the_export_is_taken() {
    let span = Span { offset_bytes: SIZE - 4096, len_bytes: 4096 };
    let at = |flags, command| decode(flags, command, span.offset_bytes, span.len_bytes);
    assert_eq!(at(0, command::READ), Ok(Command::Read { span, whole: false }));
    assert_eq!(at(flag::DF, command::READ), Ok(Command::Read { span, whole: true }));
    assert_eq!(at(flag::FUA, command::WRITE), Ok(Command::Write { span, durable: true }));
    assert_eq!(at(0, command::TRIM), Ok(Command::Trim { span, durable: false }));
    let zeroes = Command::WriteZeroes { span, durable: false, may_punch: false };
    assert_eq!(at(flag::NO_HOLE, command::WRITE_ZEROES), Ok(zeroes));
    assert_eq!(
        at(flag::REQ_ONE, command::BLOCK_STATUS),
        Ok(Command::BlockStatus { span, one: true })
    );
    assert_eq!(decode(0, command::FLUSH, 0, 0), Ok(Command::Flush));
    assert_eq!(decode(0, command::DISC, 0, 0), Ok(Command::Disconnect));
}

#[test]
fn what_does_not_is_refused_with_the_protocols_error() {
    assert_eq!(decode(0, command::READ, SIZE, 512), Err(NbdError::Invalid));
    assert_eq!(decode(0, command::WRITE, SIZE - 512, 1024), Err(NbdError::NoSpace));
    assert_eq!(decode(0, command::READ, u64::MAX - 511, 512), Err(NbdError::Invalid));
    assert_eq!(decode(0, command::READ, 1, 512), Err(NbdError::Invalid));
    assert_eq!(decode(0, command::READ, 0, 0), Err(NbdError::Invalid));
    assert_eq!(decode(0, command::READ, 0, BLOCK_BYTES_MAX + 512), Err(NbdError::Invalid));
    assert_eq!(decode(0x8000, command::READ, 0, 512), Err(NbdError::Invalid));
    assert_eq!(decode(0, 99, 0, 512), Err(NbdError::Invalid));
    assert_eq!(decode(0, command::FLUSH, 512, 512), Err(NbdError::Invalid));
    let agreed = Agreed::default();
    let request =
        |export: &Export, command| Request::decode(&bytes(0, command, 0, 512), export, agreed);
    let of = |export: &Export, command| request(export, command).expect("a request");
    assert_eq!(of(&export(true), command::WRITE).command, Err(NbdError::Perm));
    assert_eq!(of(&export(true), command::WRITE).payload_bytes, 512, "it comes all the same");
    assert_eq!(of(&export(false), command::BLOCK_STATUS).command, Err(NbdError::Invalid));
}

#[test]
fn a_write_that_is_too_long_to_be_skipped_ends_the_connection() {
    let len = BLOCK_BYTES_MAX + 1;
    let flaw =
        Request::decode(&bytes(0, command::WRITE, 0, len), &export(false), Agreed::default());
    assert_eq!(flaw, Err(Flaw::WriteLength { len }));
    let flaw = Request::decode(&[0; REQUEST_BYTES], &export(false), Agreed::default());
    assert_eq!(flaw, Err(Flaw::RequestMagic));
}

fn read(structured: bool, whole: bool) -> Vec<u8> {
    let replies = Replies(Agreed { structured, allocation: false });
    let span = Span { offset_bytes: 8192, len_bytes: 3 * 512 };
    let extents = [(512, false), (512, true), (512, false)]
        .map(|(len_bytes, zero)| Extent { len_bytes, zero });
    let mut out = Out::default();
    // What was there before is never sent.
    out.space(1 << 14).fill(0xdd);
    out.gone(1 << 14);
    let sent = replies.read::<()>(&mut out, 7, (span, whole), &extents, |part, out| {
        let byte = u8::try_from((part.offset_bytes - 8192) / 512 + 1).expect("small");
        out.space(part.len_bytes as usize).fill(byte);
        Ok(())
    });
    sent.expect("read");
    out.leading_bytes().to_vec()
}

#[test]
fn a_read_is_answered_in_chunks_of_bytes_and_holes_or_in_one() {
    let simple = read(false, false);
    assert_eq!(simple.len(), 16 + 3 * 512);
    assert_eq!([simple[16], simple[16 + 512], simple[16 + 1024]], [1, 0, 3]);
    let whole = read(true, true);
    assert_eq!(whole.len(), 28 + 3 * 512);
    assert_eq!([whole[28], whole[28 + 512], whole[28 + 1024]], [1, 0, 3]);
    let parts = read(true, false);
    assert_eq!(parts.len(), 28 + 512 + 32 + 28 + 512);
    // The last chunk alone is marked.
    let flags = |at: usize| u16::from_be_bytes([parts[at + 4], parts[at + 5]]);
    assert_eq!([flags(0), flags(540), flags(572)], [0, 0, chunk::DONE]);
}

#[test]
fn an_error_has_the_form_of_what_it_answers() {
    let replies = Replies(Agreed { structured: true, allocation: true });
    let failed = |replies: Replies, error, reads| {
        let mut out = Out::default();
        replies.failed(&mut out, 7, error, reads);
        out.leading_bytes().to_vec()
    };
    assert_eq!(failed(replies, NbdError::Io, true).len(), 26);
    assert_eq!(failed(replies, NbdError::NoSpace, false), wire::simple_reply(28, 7));
    let old = Replies(Agreed::default());
    assert_eq!(failed(old, NbdError::Io, true), wire::simple_reply(5, 7));
}

proptest! {
    #[test]
    fn whatever_is_taken_lies_in_the_export(
        flags in 0_u16..40, command in 0_u16..10, offset in any::<u64>(), len in any::<u32>(),
        near in any::<bool>(),
    ) {
        let offset = if near { offset % (2 * SIZE) / 512 * 512 } else { offset };
        let bytes = bytes(flags, command, offset, len / 512 * 512);
        let agreed = Agreed { structured: true, allocation: true };
        let Ok(request) = Request::decode(&bytes, &export(false), agreed) else { return Ok(()) };
        prop_assert!(request.payload_bytes <= BLOCK_BYTES_MAX);
        let span = match request.command {
            Ok(Command::Read { span, .. } | Command::Write { span, .. }) => {
                prop_assert!(span.len_bytes <= BLOCK_BYTES_MAX);
                span
            }
            Ok(Command::Trim { span, .. } | Command::WriteZeroes { span, .. }
                | Command::BlockStatus { span, .. }) => span,
            _ => return Ok(()),
        };
        prop_assert!(span.len_bytes > 0 && span.end() <= SIZE);
    }
}
