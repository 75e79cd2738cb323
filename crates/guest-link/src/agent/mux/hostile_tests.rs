//! A guest that sends what it likes, whenever it likes: the books stay right, what it may make its
//! host hold stays bounded, and nothing leaves while it must not.

use bytes::Bytes;
use proptest::prelude::*;
use vmfork_agent_proto::{
    Decoder, FileInfo, Firstboot, ForkIdentity, Kind, PAYLOAD_BYTES_MAX, RequestError, TicketClone,
    ToGuest, ToHost, WINDOW_BYTES, encode, encode_message,
};

use super::{
    CHANNELS_MAX, Event, Hold, Inheritance, MailLimits, Mux, REQUESTS_MAX, Reply, Request, Role,
    SENDS_MAX, UNREAD_BYTES_MAX, Weight,
};

/// Less than a message's window, so that messages wait for their admission.
const LIMITS: MailLimits =
    MailLimits { undelivered_bytes_max: 100_000, message_bytes_max: 400_000 };

#[derive(Debug, Clone)]
enum Step {
    /// The guest's, in good form or not.
    Says(u32, ToHost),
    Streams(Kind, u32, usize, bool),
    /// May begin in the middle of a frame, and end there.
    Raw(Vec<u8>),
    // The host's:
    Open(u8),
    Push(u32, usize, bool),
    Cancel(u32),
    Reply(u32, usize),
    Prepare(u64),
    Release(u64),
    Identity(u64),
    /// What was announced is consumed, and what may leave leaves.
    Settle,
}

fn channel() -> impl Strategy<Value = u32> {
    prop_oneof![9 => 0u32..9, 1 => any::<u32>()]
}

fn error() -> RequestError {
    RequestError { errno: 5, message: "so it is".to_owned() }
}

fn said() -> impl Strategy<Value = ToHost> {
    let small = 0u32..4;
    prop_oneof![
        any::<u32>().prop_map(|cpus| ToHost::Hello {
            protocol: cpus % 3,
            agent_version: String::new(),
            kernel: "\u{0}".repeat(9),
            cpus,
            firstboot: Some(Firstboot::Running),
            pmem_root: true,
        }),
        any::<u64>().prop_map(|token| ToHost::Pong { token }),
        any::<u32>().prop_map(|pid| ToHost::Started { pid }),
        any::<i32>().prop_map(|exit_code| ToHost::Exited { exit_code, signal: None }),
        Just(ToHost::Failed(error())),
        (any::<u8>(), any::<u32>()).prop_map(|(kind, bytes)| ToHost::Credit {
            kind: kind % 8,
            bytes: if kind > 200 { bytes } else { bytes % 9 },
        }),
        any::<u64>().prop_map(|size_bytes| ToHost::File(FileInfo { mode: 0o644, size_bytes })),
        any::<u64>().prop_map(|bytes| ToHost::Written { bytes }),
        (0u64..3).prop_map(|fork| ToHost::Prepared { fork }),
        (0u64..3).prop_map(|fork| ToHost::Confirmed { fork }),
        (0u64..3).prop_map(|fork| ToHost::Refused { fork, message: "no".to_owned() }),
        any::<u32>().prop_map(|count| ToHost::RequestTicket { count, hierarchical: true }),
        any::<u64>().prop_map(|ticket| ToHost::Clone { ticket }),
        any::<u64>().prop_map(|ticket| ToHost::Join { ticket }),
        any::<u64>().prop_map(|ticket| ToHost::KillTicket { ticket }),
        small.clone().prop_map(|vmid| ToHost::ExitClone { vmid, error: None }),
        (small.clone(), prop_oneof![0u64..300_000, any::<u64>()])
            .prop_map(|(vmid, length_bytes)| ToHost::Send { vmid, length_bytes }),
        small.prop_map(|vmid| ToHost::Recv { ticket: 1, vmid: Some(vmid) }),
        Just(ToHost::Abandon),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![
        Just(Kind::Stdin),
        Just(Kind::Stdout),
        Just(Kind::Stderr),
        Just(Kind::File),
        Just(Kind::Data)
    ];
    prop_oneof![
        8 => (channel(), said()).prop_map(|(channel, said)| Step::Says(channel, said)),
        // What belongs there: else most runs would end at once.
        4 => (0u32..4, any::<u32>())
            .prop_map(|(place, pid)| Step::Says(2 * place + 2, ToHost::Started { pid })),
        8 => (1u32..3, 1u64..200_000).prop_map(|(vmid, length_bytes)| {
            Step::Says(2 * vmid + 1, ToHost::Send { vmid, length_bytes })
        }),
        8 => (kind, channel(), 0usize..=PAYLOAD_BYTES_MAX, any::<bool>())
            .prop_map(|(kind, channel, bytes, end)| Step::Streams(kind, channel, bytes, end)),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Step::Raw),
        4 => any::<u8>().prop_map(Step::Open),
        2 => (channel(), 0usize..200_000, any::<bool>())
            .prop_map(|(channel, bytes, end)| Step::Push(channel, bytes, end)),
        2 => channel().prop_map(Step::Cancel),
        4 => (channel(), 0usize..100_000).prop_map(|(channel, bytes)| Step::Reply(channel, bytes)),
        2 => (0u64..3).prop_map(Step::Prepare),
        2 => (0u64..3).prop_map(Step::Release),
        2 => (0u64..3).prop_map(Step::Identity),
        6 => Just(Step::Settle),
    ]
}

fn identity(fork: u64) -> ForkIdentity {
    ForkIdentity {
        fork,
        vmid: 1,
        name: "web.1".to_owned(),
        machine_id: "0".repeat(32),
        entropy: "0".repeat(128),
        realtime_ns: 1,
        ticket: Some(TicketClone { ticket: 1, workers: 2, channel: Some(1) }),
    }
}

fn opening(which: u8) -> ToGuest {
    match which % 3 {
        0 => {
            ToGuest::Exec { argv: vec!["x".into()], env: vec![], cwd: None, user: None, tty: None }
        }
        1 => ToGuest::ReadFile { path: "/x".to_owned() },
        _ => ToGuest::WriteFile { path: "/x".to_owned(), mode: 0o644 },
    }
}

/// Consume all events; what workers' messages were worth is given back.
fn consume(mux: &mut Mux) {
    while let Some(event) = mux.poll_event() {
        match event {
            Event::Data { channel, kind, bytes, .. } => mux.taken(channel, kind, bytes.len()),
            Event::Request { request: Request::Send { vmid, cost, pieces, .. }, .. } => {
                assert!(pieces.iter().map(Vec::len).sum::<usize>() as u64 <= cost);
                mux.mail_released(vmid, cost);
            }
            _ => {}
        }
    }
}

/// All that may leave now: well formed, and little where it must be silent.
fn let_leave(mux: &mut Mux) {
    let may_speak = matches!(mux.hold, Hold::Open) || mux.resume.is_some();
    let mut decoder = Decoder::new();
    let mut frames = 0;
    while let Some(bytes) = mux.next_frame() {
        decoder.push(&bytes);
        let frame = decoder.next_frame().expect("well formed").expect("whole");
        if frame.kind == Kind::Message {
            serde_json::from_slice::<ToGuest>(&frame.payload).expect("a message");
        }
        frames += 1;
    }
    assert!(may_speak || frames <= 1, "{frames} frames while a fork is under way");
}

fn check(mux: &Mux) {
    let answers = mux.queue.iter().filter(|queued| queued.weight == Weight::Answer);
    assert_eq!(mux.answer_bytes, answers.map(|queued| queued.frame.len()).sum::<usize>());
    assert!(mux.answer_bytes <= UNREAD_BYTES_MAX);
    let of_host = mux.channels.keys().filter(|channel| channel.is_multiple_of(2)).count();
    assert_eq!(mux.hosts_channels, of_host);
    assert!(of_host <= CHANNELS_MAX && mux.channels.len() - of_host <= REQUESTS_MAX);
    let mut sends = 0;
    for channel in mux.channels.values() {
        if let Role::Send(sending) = &channel.role {
            sends += 1;
            let held: usize = sending.pieces.iter().map(Vec::len).sum();
            let most = if sending.share.is_some() {
                LIMITS.message_bytes_max
            } else {
                WINDOW_BYTES.into()
            };
            assert!(held as u64 <= most, "{held} bytes of one message are held");
        }
    }
    assert_eq!(mux.sends, sends);
    assert!(sends <= SENDS_MAX);
}

/// Whether the link goes on.
fn take(mux: &mut Mux, step: Step) -> bool {
    let heard = match step {
        Step::Says(channel, said) => encode_message(channel, &said).expect("short"),
        Step::Streams(kind, channel, bytes, end) => encode(kind, channel, end, &vec![7; bytes]),
        Step::Raw(bytes) => bytes,
        Step::Open(which) => {
            let _refused_or_not = mux.open(&opening(which));
            return true;
        }
        Step::Push(channel, bytes, end) => {
            mux.push(channel, Bytes::from(vec![7; bytes]), end);
            return true;
        }
        Step::Cancel(channel) => {
            mux.cancel(channel);
            return true;
        }
        Step::Reply(channel, bytes) => {
            let pieces = vec![Bytes::from(vec![7; bytes])];
            mux.reply(channel, Reply::Incoming { vmid: 1, length_bytes: bytes as u64, pieces });
            return true;
        }
        Step::Prepare(fork) => {
            let _busy = mux.prepare(fork);
            return true;
        }
        Step::Release(fork) => {
            mux.release(fork);
            return true;
        }
        Step::Identity(fork) => {
            let _busy = mux.identity(&identity(fork));
            return true;
        }
        Step::Settle => {
            consume(mux);
            let_leave(mux);
            consume(mux);
            return true;
        }
    };
    mux.on_bytes(&heard).is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_hostile_guest_breaks_its_link_and_nothing_else(
        is_clone: bool,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut mux = if is_clone {
            let mut mux = Mux::new_clone(LIMITS, &Inheritance::default());
            mux.mail.workers = 1..3;
            mux
        } else {
            Mux::new(LIMITS)
        };
        for step in steps {
            if !take(&mut mux, step) {
                // The link is closed: what was announced is still consumed.
                consume(&mut mux);
                break;
            }
            check(&mux);
        }
    }

    /// Cut anywhere, it is the same to the host.
    #[test]
    fn where_reads_end_does_not_matter(
        steps in prop::collection::vec((channel(), said()), 1..12),
        cut in 1usize..50,
    ) {
        let bytes: Vec<u8> = steps
            .iter()
            .flat_map(|(channel, said)| encode_message(*channel, said).expect("short"))
            .collect();
        let (mut whole, mut cut_up) = (Mux::new(LIMITS), Mux::new(LIMITS));
        let at_once = whole.on_bytes(&bytes);
        let in_parts = bytes.chunks(cut).try_for_each(|part| cut_up.on_bytes(part));
        prop_assert_eq!(at_once, in_parts);
        loop {
            let (one, other) = (whole.poll_event(), cut_up.poll_event());
            prop_assert_eq!(&one, &other);
            if one.is_none() {
                break;
            }
        }
    }
}
