use proptest::prelude::*;

use super::*;

fn export() -> Export {
    Export {
        name: "root".to_owned(),
        description: String::new(),
        size_bytes: 1 << 30,
        read_only: false,
        flushes: true,
    }
}

fn option(number: u32, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).expect("short");
    let head = [&wire::IHAVEOPT.to_be_bytes()[..], &number.to_be_bytes(), &len.to_be_bytes()];
    [&head.concat()[..], content].concat()
}

fn text(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).expect("short").to_be_bytes()[..], text].concat()
}

/// What a client of these bytes gets, up to the step that ends its handshake.
fn talk(export: &Export, said: &[u8]) -> (Vec<u8>, Option<Result<Agreed, Flaw>>) {
    let (mut handshake, mut sent) = Handshake::begin(std::slice::from_ref(export));
    let mut rest = said;
    loop {
        let Some((front, after)) = rest.split_at_checked(handshake.needs()) else {
            return (sent, None);
        };
        rest = after;
        match handshake.take(front) {
            Ok(Step::More(reply)) => sent.extend(reply),
            Ok(Step::Begin(reply, chosen, agreed)) => {
                assert_eq!(chosen, export);
                sent.extend(reply);
                return (sent, Some(Ok(agreed)));
            }
            Ok(Step::End(reply)) => {
                sent.extend(reply);
                return (sent, None);
            }
            Err(flaw) => return (sent, Some(Err(flaw))),
        }
    }
}

fn client(options: &[Vec<u8>]) -> Vec<u8> {
    [&3_u32.to_be_bytes()[..], &options.concat()].concat()
}

fn go(name: &[u8]) -> Vec<u8> {
    option(option::GO, &[&text(name)[..], &[0, 0]].concat())
}

#[test]
fn a_client_as_qemus_gets_its_export_with_structured_replies_and_allocation() {
    let context = [&text(b"root")[..], &1_u32.to_be_bytes(), &text(ALLOCATION)].concat();
    let options = [
        option(option::STRUCTURED_REPLY, &[]),
        option(option::SET_META_CONTEXT, &context),
        go(b"root"),
    ];
    let (sent, agreed) = talk(&export(), &client(&options));
    assert_eq!(agreed, Some(Ok(Agreed { structured: true, allocation: true })));
    // The export's size is told, and its sizes of blocks.
    let told = [&0_u16.to_be_bytes()[..], &(1_u64 << 30).to_be_bytes()].concat();
    assert!(sent.windows(told.len()).any(|part| part == told));
    let best = [512_u32.to_be_bytes(), 4096_u32.to_be_bytes()].concat();
    assert!(sent.windows(8).any(|part| part == best));
}

#[test]
fn another_export_is_neither_given_nor_named() {
    let (sent, agreed) = talk(&export(), &client(&[go(b"other")]));
    assert_eq!(agreed, None, "it may try again");
    let refused = reply::ERR_UNKNOWN.to_be_bytes();
    assert!(sent.windows(4).any(|part| part == refused));
    assert!(!sent.windows(4).any(|part| part == b"root"));
    let by_name = client(&[option(option::EXPORT_NAME, b"other")]);
    assert!(matches!(talk(&export(), &by_name).1, Some(Err(Flaw::Export { .. }))));
    assert_eq!(talk(&export(), &client(&[go(b"")])).1, None, "an empty name is not its name");
}

#[test]
fn each_disk_of_a_vm_is_got_by_its_name_and_a_context_is_of_one_of_them() {
    let exports = [export(), Export { name: "data".to_owned(), size_bytes: 512, ..export() }];
    let context = [&text(b"root")[..], &1_u32.to_be_bytes(), &text(ALLOCATION)].concat();
    let context = option(option::SET_META_CONTEXT, &context);
    let begun = |name: &[u8]| {
        let structured = option(option::STRUCTURED_REPLY, &[]);
        let said = client(&[structured, context.clone(), option(option::LIST, &[]), go(name)]);
        let (mut handshake, mut sent) = Handshake::begin(&exports);
        let mut rest = &said[..];
        while let Some((front, after)) = rest.split_at_checked(handshake.needs()) {
            rest = after;
            match handshake.take(front).expect("no flaw") {
                Step::More(reply) => sent.extend(reply),
                Step::Begin(_, export, agreed) => {
                    return (sent, export.name.clone(), agreed.allocation);
                }
                Step::End(_) => break,
            }
        }
        panic!("it did not begin");
    };
    let (sent, name, allocation) = begun(b"data");
    assert_eq!((name.as_str(), allocation), ("data", false));
    for listed in [&text(b"root"), &text(b"data")] {
        assert!(sent.windows(8).any(|part| part == &listed[..]));
    }
    assert_eq!(begun(b"root").1, "root");
    assert!(begun(b"root").2);
}

#[test]
fn the_old_form_tells_size_and_flags_alone() {
    let (sent, agreed) = talk(&export(), &client(&[option(option::EXPORT_NAME, b"root")]));
    assert_eq!(agreed, Some(Ok(Agreed::default())));
    assert_eq!(sent.len(), 18 + 10);
    // A client that does not know better gets zeros after it.
    let old = [&1_u32.to_be_bytes()[..], &option(option::EXPORT_NAME, b"root")].concat();
    assert_eq!(talk(&export(), &old).0.len(), 18 + 10 + 124);
}

#[test]
fn a_read_only_export_offers_nothing_that_writes() {
    let export = Export { read_only: true, ..export() };
    assert_eq!(export.flags(), can::HAS_FLAGS | can::READ_ONLY);
}

#[test]
fn a_flush_that_would_do_nothing_is_not_offered() {
    let offered = |flushes| Export { flushes, ..export() }.flags() & (can::FLUSH | can::FUA);
    assert_eq!((offered(true), offered(false)), (can::FLUSH | can::FUA, 0));
}

#[test]
fn a_context_wants_structured_replies_first_and_a_later_choice_stands() {
    let ask = |queries: &[&[u8]]| {
        let count = u32::try_from(queries.len()).expect("few").to_be_bytes();
        let queries: Vec<u8> = queries.iter().flat_map(|query| text(query)).collect();
        option(option::SET_META_CONTEXT, &[&text(b"root")[..], &count, &queries].concat())
    };
    let agreed = |options: &[Vec<u8>]| talk(&export(), &client(options)).1.expect("begun");
    let structured = option(option::STRUCTURED_REPLY, &[]);
    assert_eq!(agreed(&[ask(&[ALLOCATION]), go(b"root")]), Ok(Agreed::default()));
    let none = Agreed { structured: true, allocation: false };
    assert_eq!(agreed(&[structured.clone(), ask(&[ALLOCATION]), ask(&[]), go(b"root")]), Ok(none));
    assert_eq!(agreed(&[structured, ask(&[b"qemu:dirty-bitmap:x"]), go(b"root")]), Ok(none));
}

#[test]
fn what_breaks_the_protocol_ends_the_connection() {
    let flaw = |said: &[u8]| talk(&export(), said).1;
    assert_eq!(flaw(&8_u32.to_be_bytes()), Some(Err(Flaw::Flags { flags: 8 })));
    let long = OPTION_BYTES_MAX + 1;
    let head = [&3_u32.to_be_bytes()[..], &wire::IHAVEOPT.to_be_bytes(), &[0; 4]].concat();
    let said = [&head[..], &long.to_be_bytes()].concat();
    assert_eq!(flaw(&said), Some(Err(Flaw::OptionLength { len: long })));
    let many: Vec<_> = (0..=OPTIONS_MAX).map(|_| option(99, &[])).collect();
    assert_eq!(flaw(&client(&many)), Some(Err(Flaw::Options)));
    let magic = [&3_u32.to_be_bytes()[..], &[7; 16]].concat();
    assert!(matches!(flaw(&magic), Some(Err(Flaw::OptionMagic { .. }))));
}

proptest! {
    #[test]
    fn any_bytes_end_or_go_on_within_the_bound(
        flags in prop_oneof![Just(3_u32), any::<u32>()],
        options in proptest::collection::vec(
            (0_u32..12, proptest::collection::vec(any::<u8>(), 0..40)), 0..12,
        ),
        cut in 0_usize..600,
    ) {
        let options: Vec<u8> =
            options.iter().flat_map(|(number, content)| option(*number, content)).collect();
        let mut said = [&flags.to_be_bytes()[..], &options].concat();
        said.truncate(cut.max(4));
        let export = export();
        let (handshake, _) = Handshake::begin(std::slice::from_ref(&export));
        prop_assert!(handshake.needs() <= OPTION_BYTES_MAX as usize);
        let (sent, _) = talk(&export, &said);
        // Replies are bounded by what was said.
        prop_assert!(sent.len() <= 18 + 256 * (said.len() + 1));
    }
}
