use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_policy::transfer::multicast::{Request, SenderConfig};
use vmfork_transfer::proto::{Invitation, KEY_BYTES, Key, PAGE, Refusal, Urgency};
use vmfork_transfer::{Counter, Pages};

use super::counters::ListenerCounters;
use super::datagram::*;
use super::reads::{PENDING_PAGES_MAX, Read, Reads};
use super::seal::{Seal, Window};
use super::{Groups, GroupsConfig, ListenerConfig};

const IMAGE: ImageName = ImageName { host: 1, image: 2 };

fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A page of one kind: zero, small when compressed, in two parts then, or at random.
fn page(page: u64, kind: u8) -> [u8; PAGE] {
    let mut state = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()
    };
    let mut bytes = [0; PAGE];
    let random = match kind {
        0 => return bytes,
        1 => 16,
        2 => PART_BYTES + 500,
        _ => PAGE,
    };
    bytes.fill(7);
    bytes[..random].chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&word()[..chunk.len()]));
    bytes
}

/// What a listener does with datagrams, without sockets.
struct Ear {
    seal: Seal,
    window: Window,
    assembler: Assembler,
    pages: BTreeMap<u64, [u8; PAGE]>,
    dropped: u64,
}

impl Ear {
    fn new() -> Self {
        Self {
            seal: seal(),
            window: Window::new(0),
            assembler: Assembler::default(),
            pages: BTreeMap::new(),
            dropped: 0,
        }
    }

    fn hear(&mut self, datagram: &[u8]) {
        let mut datagram = datagram.to_vec();
        let head = datagram.first_chunk().and_then(Head::decode);
        let opened = head.filter(|head| head.from == From::Sender);
        let body = opened.and_then(|head| {
            let body = self.seal.open(&head, &mut datagram)?.to_vec();
            self.window.accept(head.counter).then_some(body)
        });
        let Some(body) = body else {
            self.dropped += 1;
            return;
        };
        for record in decode_records(&body).expect("the sender's") {
            match record {
                Record::Zeros(run) => {
                    self.pages.extend(run.pages().map(|page| (page.0, [0; PAGE])));
                }
                Record::Part { page, .. } if self.pages.contains_key(&page.0) => {}
                Record::Part { page, form, total, at, bytes } => {
                    let whole = self.assembler.add(page, form, total, at, bytes);
                    let whole = whole.expect("the sender's");
                    self.pages.extend(whole.map(|bytes| (page.0, *bytes)));
                }
                Record::Listeners(_) => {}
            }
        }
    }
}

fn seal() -> Seal {
    Seal::new(&Key([3; KEY_BYTES]), IMAGE).expect("a key")
}

/// The datagrams of one run of pages, from `counter` on.
fn datagrams(range: PageRange, kinds: &[u8], counter: &mut u64) -> Vec<Vec<u8>> {
    let bytes: Vec<u8> =
        range.pages().zip(kinds).flat_map(|(at, kind)| page(at.0, *kind)).collect();
    let bodies = Cutter::default().cut(range, &bytes);
    assert!(bodies.len() as u64 <= range.len() * PARTS_MAX);
    let sealed = bodies.iter().map(|body| {
        assert!(body.len() <= BODY_BYTES_MAX);
        let head = Head { from: From::Sender, session: 1, counter: *counter };
        *counter += 1;
        seal().seal(&head, body).expect("short")
    });
    sealed.collect()
}

/// What becomes of a datagram in flight.
#[derive(Debug, Clone)]
enum Fate {
    Comes,
    Lost,
    Late,
    Twice,
    /// A bit of it flips.
    Changed(prop::sample::Index, u8),
    Cut(prop::sample::Index),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Comes),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Late),
        1 => Just(Fate::Twice),
        1 => (any::<prop::sample::Index>(), 0..8u8).prop_map(|(at, bit)| Fate::Changed(at, bit)),
        1 => any::<prop::sample::Index>().prop_map(Fate::Cut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_happens_to_datagrams_pages_are_right_or_not_there_and_come_when_sent_again(
        kinds in prop::collection::vec(0..4u8, 1..24),
        fates in prop::collection::vec(fate(), 1..80),
    ) {
        let range = range(1000, kinds.len() as u64);
        let (mut ear, mut counter, mut late) = (Ear::new(), 0, Vec::new());
        let sent = datagrams(range, &kinds, &mut counter);
        let mut spoilt = 0;
        for (datagram, fate) in sent.iter().zip(fates.iter().cycle()) {
            match fate {
                Fate::Comes => ear.hear(datagram),
                Fate::Lost => {}
                Fate::Late => late.push(datagram),
                Fate::Twice => {
                    ear.hear(datagram);
                    ear.hear(datagram);
                    spoilt += 1;
                }
                Fate::Changed(at, bit) => {
                    let mut changed = datagram.clone();
                    changed[at.index(datagram.len())] ^= 1 << bit;
                    ear.hear(&changed);
                    spoilt += 1;
                }
                Fate::Cut(at) => {
                    ear.hear(&datagram[..at.index(datagram.len())]);
                    spoilt += 1;
                }
            }
        }
        late.iter().rev().for_each(|datagram| ear.hear(datagram));
        prop_assert_eq!(ear.dropped, spoilt);
        for (at, bytes) in &ear.pages {
            let kind = kinds[usize::try_from(at - 1000).expect("small")];
            prop_assert!(*bytes == page(*at, kind), "page {at}");
        }
        // The sender repeats what is asked for again, under new counters.
        datagrams(range, &kinds, &mut counter).iter().for_each(|datagram| ear.hear(datagram));
        prop_assert_eq!(ear.pages.len(), kinds.len());
        prop_assert_eq!(ear.assembler.partial_pages(), 0);
    }

    #[test]
    fn bytes_of_any_kind_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
        for record in decode_records(&body).into_iter().flatten() {
            let mut again = Vec::new();
            record.encode_into(&mut again);
            prop_assert!(body.windows(again.len()).any(|part| part == again));
        }
        if let Ok(asking) = Asking::decode(&body) {
            prop_assert_eq!(asking.encode(), body);
        }
    }

    #[test]
    fn what_is_asked_for_is_what_was_written(
        received in prop::option::of(0..u64::MAX),
        asked in prop::collection::vec((0..1u64 << 30, 1..512u64, any::<bool>(), any::<bool>()), 0..REQUESTS_MAX),
    ) {
        let request = |(start, len, demand, repeat)| Request { pages: range(start, len), demand, repeat };
        let asking = Asking { received, requests: asked.into_iter().map(request).collect() };
        let body = asking.encode();
        prop_assert!(body.len() <= BODY_BYTES_MAX);
        prop_assert_eq!(Asking::decode(&body), Ok(asking));
    }
}

#[test]
fn the_bytes_are_as_documented() {
    let head = Head { from: From::Listener(0x0102), session: 3, counter: 4 };
    let expected = [*b"VFMC\x01\x02\x02\x01", [3, 0, 0, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]];
    assert_eq!(head.encode(), *expected.concat());
    assert_eq!(Head::decode(&head.encode()), Some(head));
    let mut body = Vec::new();
    let part = Record::Part { page: PageIdx(5), form: Form::Lz4, total: 3, at: 0, bytes: b"abc" };
    part.encode_into(&mut body);
    Record::Zeros(range(6, 7)).encode_into(&mut body);
    Record::Listeners(8).encode_into(&mut body);
    let expected = [
        &[5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 0, 0, 3, 0][..],
        b"abc",
        &[6, 0, 0, 0, 0, 0, 0, 0, 2, 0, 7, 0, 0, 0, 0, 0],
        &[8, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
    ];
    assert_eq!(body, expected.concat());
    let records = [part, Record::Zeros(range(6, 7)), Record::Listeners(8)];
    assert_eq!(decode_records(&body), Ok(records.to_vec()));
}

#[test]
fn few_datagrams_are_enough_for_zeros_and_what_gets_small() {
    let count = |kinds: &[u8]| datagrams(range(0, kinds.len() as u64), kinds, &mut 0).len();
    assert_eq!(count(&[0; 400]), 1);
    assert_eq!(count(&[1; 16]), 1);
    assert_eq!(count(&[2; 4]), 8);
    assert_eq!(count(&[3; 4]), 12);
}

#[test]
fn parts_that_never_find_each_other_take_no_more_room_than_they_may() {
    let mut assembler = Assembler::default();
    for page in 0..3 * PARTIAL_PAGES_MAX as u64 {
        let part = assembler.add(PageIdx(page), Form::Raw, 4096, 0, &[1; PART_BYTES]);
        assert_eq!(part, Ok(None));
        assert!(assembler.partial_pages() <= PARTIAL_PAGES_MAX);
    }
}

#[test]
fn a_page_that_is_sent_in_another_form_begins_anew() {
    let mut assembler = Assembler::default();
    let packed = lz4_flex::block::compress(&page(9, 2));
    assert!((PART_BYTES + 1..=2 * PART_BYTES).contains(&packed.len()));
    let total = u16::try_from(packed.len()).expect("less than a page");
    let raw = page(9, 2);
    let part = |at: usize| &raw[at * PART_BYTES..((at + 1) * PART_BYTES).min(PAGE)];
    let at = |part: usize| u16::try_from(part * PART_BYTES).expect("small");
    for (form, total, at, bytes) in [
        (Form::Raw, 4096, at(0), part(0)),
        (Form::Lz4, total, at(0), &packed[..PART_BYTES]),
        (Form::Raw, 4096, at(1), part(1)),
        (Form::Raw, 4096, at(2), part(2)),
    ] {
        assert_eq!(assembler.add(PageIdx(9), form, total, at, bytes), Ok(None));
    }
    let whole = assembler.add(PageIdx(9), Form::Raw, 4096, 0, part(0)).expect("a page");
    assert!(whole.is_some_and(|bytes| *bytes == raw));
}

fn heard(config: ListenerConfig) -> Reads {
    let mut reads = Reads::new(config);
    reads.heard(ms(0));
    reads.listeners(config.listeners_min);
    reads
}

fn come(reads: &mut Reads, pages: PageRange, now: Duration) -> bool {
    pages.pages().fold(false, |any, at| reads.page(at, Box::new(page(at.0, 3)), now) | any)
}

#[test]
fn nothing_is_read_from_a_group_that_is_not_heard_or_that_too_few_hear() {
    let config = ListenerConfig { listeners_min: 3, ..ListenerConfig::default() };
    let mut reads = Reads::new(config);
    reads.listeners(3);
    assert_eq!(reads.begin(range(0, 4), true, ms(0)), None, "never heard");
    reads.heard(ms(0));
    reads.listeners(2);
    assert_eq!(reads.begin(range(0, 4), true, ms(1)), None, "two listen");
    reads.listeners(3);
    assert!(reads.begin(range(0, 4), true, ms(1)).is_some());
    assert_eq!(reads.begin(range(8, 4), true, ms(1501)), None, "not heard of late");
}

#[test]
fn a_read_gets_its_pages_and_the_cache_all_others() {
    let mut reads = heard(ListenerConfig::default());
    let read = reads.begin(range(4, 4), true, ms(0)).expect("heard");
    let (asking, failed) = reads.asking(ms(0));
    assert_eq!(asking.len(), 1);
    assert_eq!(asking[0].requests, [Request { pages: range(4, 4), demand: true, repeat: false }]);
    assert!(!failed);
    assert!(!come(&mut reads, range(0, 6), ms(1)), "a part of it");
    assert_eq!(reads.look(read), Read::Waits);
    let runs: Vec<_> = reads.batch(ms(10)).into_iter().map(|(run, _)| run).collect();
    assert_eq!(runs, [range(0, 4)], "what is waited for goes to the cache by the read");
    reads.taken(range(0, 4));
    assert!(come(&mut reads, range(6, 2), ms(11)), "all of it");
    let bytes: Vec<u8> = (4..8).flat_map(|at| page(at, 3)).collect();
    assert!(reads.look(read) == Read::Done(bytes));
    assert_eq!(reads.pending(), 0);
    assert!(reads.batch(ms(100)).is_empty());
    assert_eq!(reads.begin(range(0, 2), true, ms(12)), None, "it is in the cache");
}

#[test]
fn what_a_read_waits_for_comes_also_while_the_cache_is_behind() {
    let mut reads = heard(ListenerConfig::default());
    assert!(!come(&mut reads, range(1000, PENDING_PAGES_MAX as u64 + 1), ms(1)));
    assert_eq!(reads.pending(), PENDING_PAGES_MAX);
    let read = reads.begin(range(0, 4), true, ms(2)).expect("heard");
    assert!(come(&mut reads, range(0, 4), ms(3)), "somebody waits for it");
    assert!(matches!(reads.look(read), Read::Done(_)));
    assert!(
        !reads.has(PageIdx(1000 + PENDING_PAGES_MAX as u64), false, ms(4)),
        "to be asked for again"
    );
    let counters = ListenerCounters::default();
    reads.count(&counters);
    reads.count(&counters);
    assert_eq!(counters.pages.get(), PENDING_PAGES_MAX as u64 + 4);
    assert_eq!(counters.no_room_pages.get(), 1);
}

#[test]
fn what_came_for_a_read_that_went_elsewhere_is_for_the_cache() {
    let mut reads = heard(ListenerConfig::default());
    let read = reads.begin(range(0, 4), false, ms(0)).expect("heard");
    assert!(!come(&mut reads, range(0, 3), ms(1)));
    assert!(reads.batch(ms(50)).is_empty());
    reads.give_up(read, false, ms(60));
    reads.filled(range(0, 4));
    let runs: Vec<_> = reads.batch(ms(60)).into_iter().map(|(run, _)| run).collect();
    assert_eq!(runs, [range(0, 3)]);
    assert!(reads.asking(ms(1000)).0.iter().all(|asking| asking.requests.is_empty()));
}

#[test]
fn after_several_reads_in_vain_the_group_is_left_alone_for_a_while() {
    let mut reads = heard(ListenerConfig::default());
    for start in [0, 10, 20] {
        let read = reads.begin(range(start, 4), true, ms(start)).expect("trusted still");
        reads.give_up(read, true, ms(start + 5));
    }
    reads.heard(ms(100));
    assert_eq!(reads.begin(range(40, 4), true, ms(100)), None);
    for start in (200..264).step_by(4) {
        let read = reads.begin(range(start, 4), false, ms(100)).expect("no read waits for these");
        reads.give_up(read, false, ms(100));
    }
    assert_eq!(reads.begin(range(300, 4), false, ms(100)), None);
    reads.heard(ms(1030));
    assert!(reads.begin(range(40, 4), true, ms(1030)).is_some());
}

#[test]
fn a_read_that_is_never_answered_fails_after_a_bounded_number_of_requests() {
    let mut reads = heard(ListenerConfig::default());
    let read = reads.begin(range(0, 4), false, ms(0)).expect("heard");
    let (mut asked, mut failed_at) = (0, None);
    for at in 0..60_000 {
        reads.heard(ms(at));
        let (asking, failed) = reads.asking(ms(at));
        asked += asking.iter().map(|asking| asking.requests.len()).sum::<usize>();
        if failed {
            failed_at = Some(at);
            break;
        }
    }
    assert_eq!(asked, 12);
    assert!(failed_at.is_some_and(|at| at < 10_000), "{failed_at:?}");
    assert_eq!(reads.look(read), Read::Failed);
}

#[test]
fn reads_that_wait_fail_once_the_sender_is_not_heard_any_more() {
    let mut reads = heard(ListenerConfig::default());
    let read = reads.begin(range(0, 4), false, ms(0)).expect("heard");
    assert!(!reads.asking(ms(1499)).1);
    assert!(reads.asking(ms(1500)).1, "not heard for long");
    assert_eq!(reads.look(read), Read::Failed);
    assert!(!reads.asking(ms(1501)).1, "none is left");
}

#[test]
fn a_read_does_not_wait_for_what_has_come_another_way() {
    let mut reads = heard(ListenerConfig::default());
    let ahead = reads.begin(range(0, 16), false, ms(0)).expect("heard");
    let other = reads.begin(range(16, 16), false, ms(0)).expect("heard");
    assert!(!come(&mut reads, range(0, 4), ms(1)));
    assert!(!reads.filled(range(0, 4)), "they are here");
    assert_eq!(reads.look(ahead), Read::Waits);
    assert!(reads.filled(range(3, 2)), "no host asks for 4 any more");
    assert_eq!(reads.look(ahead), Read::Failed);
    assert_eq!(reads.look(other), Read::Waits);
    let kept: Vec<_> = reads.batch(ms(20)).into_iter().map(|(run, _)| run).collect();
    assert_eq!(kept, [range(0, 4)], "what came for it");
}

/// A host that has pages of zeros.
struct Zeros;

impl Pages for Zeros {
    fn admit(&self, _: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        Ok(1)
    }

    fn is_member(&self, _: u64) -> bool {
        true
    }

    fn read(
        &self,
        _: u64,
        _: ImageName,
        _: PageRange,
        _: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        bytes.fill(0);
        Ok(())
    }

    fn held(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        each(range);
        Ok(())
    }

    fn own(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        each(range);
        Ok(())
    }
}

fn ask(start: u64, len: u64) -> Request {
    Request { pages: range(start, len), demand: true, repeat: false }
}

/// A listener says so, and asks for pages.
fn say(
    socket: &UdpSocket,
    groups: &Groups,
    invitation: &Invitation,
    counter: u64,
    requests: Vec<Request>,
) {
    let from = From::Listener(invitation.listener);
    let head = Head { from, session: invitation.session, counter };
    let seal = Seal::new(&invitation.own_key, IMAGE).expect("a key");
    let asking = Asking { received: None, requests };
    let datagram = seal.seal(&head, &asking.encode()).expect("short");
    socket.send_to(&datagram, groups.address()).expect("sent");
}

fn wait_for(counter: &Counter, count: u64) {
    let end = Instant::now() + ms(5000);
    while counter.get() < count && Instant::now() < end {
        std::thread::park_timeout(ms(10));
    }
}

#[test]
fn who_was_silent_for_long_is_answered_while_the_group_is_there() {
    let config = GroupsConfig { alone: ms(300), ..GroupsConfig::default() };
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    let groups = Groups::start(address, config, Arc::new(Zeros)).expect("a socket");
    let invitations = [1, 2].map(|member| groups.invite(member, IMAGE, 64).expect("room"));
    let socket = UdpSocket::bind(address).expect("a port");
    let [silent, other] = &invitations;
    for counter in 0..20 {
        say(&socket, &groups, other, counter, Vec::new());
        std::thread::park_timeout(ms(50));
    }
    say(&socket, &groups, silent, 0, vec![ask(0, 16)]);
    wait_for(&groups.counters().pages, 16);
    assert_eq!((groups.counters().pages.get(), groups.counters().dropped.get()), (16, 0));
}

#[test]
fn what_groups_have_sent_is_counted_over_all_of_them_and_longer_than_they_are_there() {
    let sender = SenderConfig { lockstep: ms(0), ..SenderConfig::default() };
    let config = GroupsConfig { sender, ..GroupsConfig::default() };
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    let groups = Groups::start(address, config, Arc::new(Zeros)).expect("a socket");
    let socket = UdpSocket::bind(address).expect("a port");
    let counters = groups.counters();
    let first = groups.invite(1, IMAGE, 64).expect("room");
    // The second finds it queued.
    say(&socket, &groups, &first, 0, vec![ask(0, 16), ask(0, 16)]);
    wait_for(&counters.pages, 16);
    say(&socket, &groups, &first, 1, vec![Request { repeat: true, ..ask(0, 8) }]);
    wait_for(&counters.pages, 24);
    let asked = || (counters.requests.get(), counters.requested_pages.get());
    let again = || (counters.repeated_pages.get(), counters.lost_pages.get());
    assert_eq!((asked(), again()), ((3, 40), (8, 8)));
    let sent = || (counters.pages.get(), counters.resent_pages.get());
    assert_eq!((sent(), counters.lockstep_pages.get()), ((24, 8), 16));
    groups.keep(|_| false);
    let second = groups.invite(1, IMAGE, 64).expect("room");
    assert_ne!(first.session, second.session);
    say(&socket, &groups, &second, 0, vec![ask(0, 16)]);
    wait_for(&counters.pages, 40);
    assert_eq!((asked(), again(), sent()), ((4, 56), (8, 8), (40, 8)));
}

#[test]
fn no_two_who_listen_have_one_number() {
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    let groups = Groups::start(address, GroupsConfig::default(), Arc::new(Zeros));
    let groups = groups.expect("a socket");
    let first = groups.invite(1, IMAGE, 64).expect("room");
    let mut numbers = (0..70_000).map(|_| groups.invite(2, IMAGE, 64).expect("room").listener);
    assert!(numbers.all(|number| number != first.listener));
}
