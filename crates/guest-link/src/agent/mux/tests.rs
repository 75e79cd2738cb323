//! The multiplexer against made-up guests: any order of events, no clock, no socket.

use std::collections::VecDeque;

use bytes::Bytes;
use proptest::prelude::*;
use vmfork_agent_proto::{
    Decoder, Frame, Kind, ToGuest, ToHost, WINDOW_BYTES, encode, encode_message,
};

use super::window::CREDIT_BYTES_MIN;
use super::{Event, Inheritance, MailLimits, Mux, REQUESTS_MAX, SENDS_MAX, UNREAD_BYTES_MAX};

fn exec() -> ToGuest {
    ToGuest::Exec { argv: vec!["x".into()], env: vec![], cwd: None, user: None, tty: None }
}

fn say(mux: &mut Mux, channel: u32, message: &ToHost) {
    mux.on_bytes(&encode_message(channel, message).expect("short")).expect("in order");
}

/// All that may leave now.
fn frames(mux: &mut Mux) -> Vec<Frame> {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    while let Some(bytes) = mux.next_frame() {
        decoder.push(&bytes);
        frames.push(decoder.next_frame().expect("well formed").expect("whole"));
    }
    frames
}

fn message(frame: &Frame) -> ToGuest {
    serde_json::from_slice(&frame.payload).expect("a message")
}

/// A program on channel 2 that runs.
fn with_program() -> Mux {
    let mut mux = Mux::new(MailLimits::default());
    assert_eq!(mux.open(&exec()), Ok(2));
    frames(&mut mux);
    say(&mut mux, 2, &ToHost::Started { pid: 1 });
    assert_eq!(mux.poll_event(), Some(Event::Started { channel: 2, pid: 1 }));
    mux
}

#[test]
fn a_cancelled_program_that_was_never_announced_is_never_mentioned() {
    let mut mux = Mux::new(MailLimits::default());
    let channel = mux.open(&exec()).expect("open");
    mux.push(channel, Bytes::from("in"), false);
    mux.cancel(channel);
    assert_eq!(frames(&mut mux), []);
}

#[test]
fn large_streams_take_turns() {
    let mut mux = with_program();
    assert_eq!(mux.open(&exec()), Ok(4));
    frames(&mut mux);
    for channel in [2, 4] {
        mux.push(channel, Bytes::from(vec![0; 100_000]), true);
    }
    let order: Vec<u32> = frames(&mut mux).iter().map(|frame| frame.channel).collect();
    assert_eq!(order, [2, 4, 2, 4, 2, 4, 2, 4]);
}

#[test]
fn a_prepare_overtakes_what_waits_and_a_continue_overtakes_the_next_prepare() {
    let mut mux = with_program();
    mux.push(2, Bytes::from("in"), false);
    mux.prepare(1).expect("open");
    assert_eq!(message(&frames(&mut mux)[0]), ToGuest::Prepare { fork: 1 });
    mux.release(1);
    mux.prepare(2).expect("open");
    let said = frames(&mut mux);
    assert_eq!(message(&said[0]), ToGuest::Continue { fork: 1 });
    assert_eq!(message(&said[1]), ToGuest::Prepare { fork: 2 });
    assert_eq!(said.len(), 2);
    mux.release(1);
    assert!(mux.next_frame().is_none(), "released by the wrong fork");
    say(&mut mux, 0, &ToHost::Prepared { fork: 1 });
    assert_eq!(mux.poll_event(), None, "prepared for the wrong fork");
    // Given up before it was said: the guest never learns of it.
    mux.release(2);
    frames(&mut mux);
    mux.prepare(3).expect("open");
    mux.release(3);
    assert_eq!(frames(&mut mux), []);
}

#[test]
fn requests_and_messages_are_bounded() {
    let mut mux = Mux::new_clone(MailLimits::default(), &Inheritance::default());
    mux.mail.workers = 1..3;
    for place in 0..REQUESTS_MAX + 10 {
        let channel = u32::try_from(2 * place + 1).expect("small");
        say(&mut mux, channel, &ToHost::Join { ticket: 1 });
    }
    let mut announced = 0;
    while let Some(event) = mux.poll_event() {
        assert!(matches!(event, Event::Request { .. }));
        announced += 1;
    }
    assert_eq!(announced, REQUESTS_MAX);
    assert_eq!(mux.queue.len(), 10);

    let mut mux = Mux::new_clone(MailLimits::default(), &Inheritance::default());
    mux.mail.workers = 1..3;
    for place in 0..SENDS_MAX + 10 {
        let channel = u32::try_from(2 * place + 1).expect("small");
        say(&mut mux, channel, &ToHost::Send { vmid: 1, length_bytes: 9 });
    }
    assert_eq!((mux.sends, mux.queue.len()), (SENDS_MAX, 10));
}

#[test]
fn a_guest_that_asks_and_does_not_read_is_given_up() {
    let mut mux = Mux::new_clone(MailLimits::default(), &Inheritance::default());
    let frame = encode(Kind::File, 0xffff_fff0, false, b"x").repeat(1000);
    let mut rounds = 0;
    while mux.on_bytes(&frame).is_ok() {
        rounds += 1;
        assert!(mux.answer_bytes <= UNREAD_BYTES_MAX, "{rounds} rounds");
        while mux.poll_event().is_some() {}
    }
    let mut mux = Mux::new(MailLimits::default());
    assert!(mux.wants_bytes());
    while mux.wants_bytes() {
        mux.on_bytes(&frame).expect("not yet");
    }
    frames(&mut mux);
    assert!(mux.wants_bytes());
}

#[test]
fn a_message_in_tiny_frames_is_kept_in_large_pieces() {
    let mut mux = Mux::new_clone(MailLimits::default(), &Inheritance::default());
    mux.mail.workers = 1..2;
    say(&mut mux, 1, &ToHost::Send { vmid: 1, length_bytes: 100_000 });
    for byte in 0..100_000u32 {
        let frame = encode(Kind::Data, 1, byte == 99_999, &[(byte % 7) as u8]);
        mux.on_bytes(&frame).expect("in its window");
    }
    let Some(Event::Request { request: super::Request::Send { pieces, .. }, .. }) =
        mux.poll_event()
    else {
        panic!("a message")
    };
    assert_eq!(pieces.len(), 2);
    assert_eq!(pieces.concat()[99_999], (99_999 % 7) as u8);
}

/// One step of a program that writes, its consumer, and its guest's port.
#[derive(Debug, Clone)]
enum Step {
    /// The program writes this many bytes, or fewer if its credit is smaller.
    Print(usize, bool),
    /// The consumer takes one piece.
    Take,
    /// The guest reads all that the host says.
    Hear,
    /// The host writes to the program.
    Feed(usize),
    /// The program reads all that came.
    Drain,
    Fork,
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (1usize..60_000, any::<bool>()).prop_map(|(n, err)| Step::Print(n, err)),
        4 => Just(Step::Take),
        4 => Just(Step::Hear),
        3 => (1usize..90_000).prop_map(Step::Feed),
        2 => Just(Step::Drain),
        1 => Just(Step::Fork),
        1 => Just(Step::Release),
    ];
    prop::collection::vec(step, 1..80)
}

#[derive(Default)]
struct Counts {
    sent: u64,
    received: u64,
    in_flight: u32,
}

/// Bytes whose values say where in their stream they belong.
fn numbered(from: u64, bytes: usize) -> Vec<u8> {
    (from..).take(bytes).map(|n| (n % 251) as u8).collect()
}

/// A program on channel 2, what its client has taken of it, and what it has read.
struct Link {
    mux: Mux,
    /// Of stdout and stderr.
    out: [Counts; 2],
    /// What the client has not taken.
    pieces: VecDeque<(Kind, Vec<u8>)>,
    fed: u64,
    heard: u64,
    undrained: u32,
    fork: u64,
    /// Whether the guest's port is held for a fork.
    held: bool,
}

impl Link {
    fn new() -> Self {
        Self {
            mux: with_program(),
            out: [Counts::default(), Counts::default()],
            pieces: VecDeque::new(),
            fed: 0,
            heard: 0,
            undrained: 0,
            fork: 0,
            held: false,
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Print(bytes, err) if !self.held => self.print(bytes, err),
            Step::Take => {
                if let Some((kind, bytes)) = self.pieces.pop_front() {
                    self.mux.taken(2, kind, bytes.len());
                }
            }
            Step::Feed(bytes) => {
                self.mux.push(2, Bytes::from(numbered(self.fed, bytes)), false);
                self.fed += bytes as u64;
            }
            Step::Drain if !self.held => {
                if self.undrained > 0 {
                    let credit = ToHost::Credit { kind: Kind::Stdin as u8, bytes: self.undrained };
                    say(&mut self.mux, 2, &credit);
                }
                self.undrained = 0;
            }
            Step::Fork if !self.held => self.hold()?,
            Step::Release if self.held => {
                self.mux.release(self.fork);
                self.held = false;
            }
            Step::Hear => self.hear()?,
            _ => {}
        }
        Ok(())
    }

    fn print(&mut self, bytes: usize, err: bool) {
        let side = &mut self.out[usize::from(err)];
        let room = (WINDOW_BYTES - side.in_flight) as usize;
        let bytes = bytes.min(room);
        let kind = if err { Kind::Stderr } else { Kind::Stdout };
        let payload = numbered(side.sent, bytes);
        side.sent += bytes as u64;
        side.in_flight += u32::try_from(bytes).expect("small");
        self.mux.on_bytes(&encode(kind, 2, false, &payload)).expect("within the window");
    }

    fn hold(&mut self) -> Result<(), TestCaseError> {
        self.fork += 1;
        let fork = self.fork;
        self.mux.prepare(fork).expect("none is under way");
        let said = frames(&mut self.mux);
        let last = said.last().expect("prepare");
        prop_assert_eq!(message(last), ToGuest::Prepare { fork });
        for frame in &said[..said.len() - 1] {
            prop_assert_eq!(message(frame), ToGuest::Continue { fork: fork - 1 });
        }
        say(&mut self.mux, 0, &ToHost::Prepared { fork });
        self.held = true;
        Ok(())
    }

    fn hear(&mut self) -> Result<(), TestCaseError> {
        let said = frames(&mut self.mux);
        prop_assert!(!self.held || said.is_empty());
        for frame in said {
            match frame.kind {
                Kind::Stdin => {
                    let bytes = frame.payload.len();
                    prop_assert_eq!(&frame.payload, &numbered(self.heard, bytes));
                    self.heard += bytes as u64;
                    self.undrained += u32::try_from(bytes).expect("small");
                    prop_assert!(self.undrained <= WINDOW_BYTES);
                }
                Kind::Message => {
                    if let ToGuest::Credit { kind, bytes } = message(&frame) {
                        let side = &mut self.out[usize::from(kind == Kind::Stderr as u8)];
                        prop_assert!(bytes <= side.in_flight);
                        side.in_flight -= bytes;
                    }
                }
                _ => prop_assert!(false, "{:?}", frame),
            }
        }
        Ok(())
    }

    /// What the program wrote reaches its client, once and in order.
    fn receive(&mut self) -> Result<(), TestCaseError> {
        while let Some(event) = self.mux.poll_event() {
            if let Event::Data { kind, bytes, .. } = event {
                let side = &mut self.out[usize::from(kind == Kind::Stderr)];
                prop_assert_eq!(&bytes, &numbered(side.received, bytes.len()));
                side.received += bytes.len() as u64;
                self.pieces.push_back((kind, bytes));
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the order: bytes arrive once and in order, neither side overruns a window, and a
    /// held side sends nothing.
    /// In the end neither side is stuck.
    #[test]
    fn streams_and_forks_in_any_order(steps in steps()) {
        let mut link = Link::new();
        let all = steps.into_iter().chain([Step::Release]).chain(
            std::iter::repeat_n([Step::Hear, Step::Drain, Step::Take, Step::Take], 200).flatten(),
        );
        for step in all {
            link.step(step)?;
            link.receive()?;
        }
        prop_assert_eq!(link.heard, link.fed);
        for side in link.out {
            prop_assert_eq!(side.received, side.sent);
            prop_assert!(side.in_flight < CREDIT_BYTES_MIN);
        }
    }

    /// Any bytes, and any well-formed frames of any sense: an error or not, never a panic.
    #[test]
    fn no_guest_makes_it_panic(
        frames_in in prop::collection::vec((0usize..20, 0u32..12, any::<bool>(), 0usize..70_000), 0..60),
        raw in prop::collection::vec(any::<u8>(), 0..100),
        ops in prop::collection::vec((0u8..8, 0u32..12), 0..60),
    ) {
        let mut mux = Mux::new(MailLimits { undelivered_bytes_max: 1000, message_bytes_max: 5000 });
        mux.mail.workers = 1..4;
        let mut ops = ops.into_iter();
        for (sort, channel, end, n) in frames_in {
            if let Some((op, on)) = ops.next() {
                let kinds = [Kind::Stdout, Kind::Stderr, Kind::File, Kind::Data];
                match op {
                    0 => drop(mux.open(&exec())),
                    1 => drop(mux.open(&ToGuest::ReadFile { path: "/x".into() })),
                    2 => drop(mux.open(&ToGuest::WriteFile { path: "/x".into(), mode: 0 })),
                    3 => mux.cancel(on),
                    4 => mux.reply(on, super::Reply::Incoming {
                        vmid: on, length_bytes: 3, pieces: vec![Bytes::from("abc")],
                    }),
                    5 => mux.push(on, Bytes::from(vec![0; n]), end),
                    6 => { drop(mux.prepare(u64::from(on))); mux.release(u64::from(on) / 2); }
                    _ => mux.taken(on, kinds[n % 4], 0),
                }
            }
            if n % 3 == 0 { while mux.next_frame().is_some() {} }
            let n32 = u32::try_from(n).expect("small");
            let error = vmfork_agent_proto::RequestError { errno: 5, message: "x".into() };
            let info = vmfork_agent_proto::FileInfo { mode: 0, size_bytes: n as u64 };
            let message = match sort {
                0 => Some(ToHost::Pong { token: 1 }),
                1 => Some(ToHost::Started { pid: n32 }),
                2 => Some(ToHost::Exited { exit_code: 0, signal: None }),
                3 => Some(ToHost::Failed(error)),
                4 => Some(ToHost::Credit { kind: u8::try_from(n % 8).expect("small"), bytes: n32 }),
                5 => Some(ToHost::File(info)),
                6 => Some(ToHost::Written { bytes: 1 }),
                7 => Some(ToHost::Prepared { fork: u64::from(channel) }),
                8 => Some(ToHost::Send { vmid: n32 % 5, length_bytes: n as u64 % 6000 }),
                9 => Some(ToHost::Recv { ticket: 1, vmid: None }),
                10 => Some(ToHost::Abandon),
                11 => Some(ToHost::Confirmed { fork: 1 }),
                _ => None,
            };
            let bytes = match message {
                Some(message) => encode_message(channel, &message).expect("short"),
                None => {
                    let kinds = [Kind::Stdin, Kind::Stdout, Kind::Stderr, Kind::File, Kind::Data];
                    encode(kinds[sort % 5], channel, end, &vec![0; n.min(64 * 1024)])
                }
            };
            // A link would be closed at the first error; what follows must still not panic.
            let _ = mux.on_bytes(&bytes);
            while mux.poll_event().is_some() {}
        }
        let _ = mux.on_bytes(&raw);
        while mux.next_frame().is_some() {}
    }
}
