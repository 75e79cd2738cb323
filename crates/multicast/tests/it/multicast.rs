//! Hosts that hear what one sends to all of them, over loopback.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, PageRange, PageSource as _};
use vmfork_multicast::{
    Groups, GroupsConfig, HeardPages, Listener, ListenerConfig, ListenerCounters,
};
use vmfork_policy::transfer::multicast::{ReceiverConfig, SenderConfig};
use vmfork_transfer::{
    Holders, Invitation, PageService, Pages, Peer, PeerConfig, PeerLimits, PeerSource, Refusal,
    ServiceLimits, Urgency, Wanted,
};

use crate::common::*;
use crate::keys::{Cluster, Host, name_of};

/// 4 MiB: less than a socket keeps. What is sent to a listener that gets no processor time is not
/// lost.
const WHOLE: u64 = 1024;
/// Longer than any test. What happens after it does not happen.
const NEVER: Duration = Duration::from_secs(600);
const UNIT: u64 = 16;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;
const FETCHERS: usize = 4;

/// The host that has the image.
struct Origin {
    members: Mutex<BTreeMap<Vec<u8>, u64>>,
    groups: OnceLock<Groups>,
    invitations: Mutex<Vec<Invitation>>,
    demanded: Mutex<BTreeSet<u64>>,
    /// What is read for the group waits here.
    gate: Gate,
    /// Of this page the group gets another than this host has, as if a host that hears it had sent
    /// that.
    lies_about: AtomicU64,
    /// It says nothing of what it has.
    is_silent: AtomicBool,
}

impl Pages for Origin {
    fn admit(&self, certificate: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        Ok(self.members.lock().expect("no panic")[certificate])
    }

    fn is_member(&self, _: u64) -> bool {
        true
    }

    fn read(
        &self,
        member: u64,
        _: ImageName,
        range: PageRange,
        _: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        if member == 0 {
            self.gate.pass();
        }
        for (page, bytes) in range.pages().zip(bytes.as_chunks_mut::<PAGE>().0) {
            fill(page, bytes);
            let is_lie = member == 0 && page.0 == self.lies_about.load(Ordering::Relaxed);
            bytes[9] ^= u8::from(is_lie);
        }
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
        if !self.is_silent.load(Ordering::Relaxed) {
            each(range);
        }
        Ok(())
    }

    fn invite(&self, member: u64, image: ImageName) -> Result<Invitation, Refusal> {
        let groups = self.groups.get().expect("started");
        let invitation = groups.invite(member, image, WHOLE)?;
        self.invitations.lock().expect("no panic").push(invitation.clone());
        Ok(invitation)
    }

    fn asked(&self, _: u64, _: ImageName, range: PageRange, urgency: Urgency) -> Option<Wanted> {
        if urgency == Urgency::Demand {
            let mut demanded = self.demanded.lock().expect("no panic");
            demanded.extend(range.pages().map(|page| page.0));
        }
        None
    }
}

struct Sending {
    cluster: Cluster,
    origin: Arc<Origin>,
    service: PageService,
}

impl Sending {
    fn new() -> Self {
        Self::with(GroupsConfig::default())
    }

    fn with(config: GroupsConfig) -> Self {
        let cluster = Cluster::new();
        let origin = Arc::new(Origin {
            members: Mutex::default(),
            groups: OnceLock::new(),
            invitations: Mutex::default(),
            demanded: Mutex::default(),
            gate: Gate::default(),
            lies_about: AtomicU64::new(u64::MAX),
            is_silent: AtomicBool::new(false),
        });
        let pages: Arc<dyn Pages> = Arc::clone(&origin) as Arc<dyn Pages>;
        let groups = Groups::start(SocketAddrV4::new(LOOPBACK, 0), config, Arc::clone(&pages));
        origin.groups.set(groups.expect("a socket")).expect("once");
        let listener = TcpListener::bind((LOOPBACK, 0)).expect("a port");
        let tls = cluster.host(100).server;
        let service = PageService::start(listener, tls, pages, ServiceLimits::default());
        Self { cluster, origin, service: service.expect("a service") }
    }

    fn groups(&self) -> &Groups {
        self.origin.groups.get().expect("started")
    }

    /// Pages that were sent, to all and to one alone.
    fn sent(&self) -> (u64, u64) {
        (self.groups().counters().pages.get(), self.service.counters().pages.get())
    }

    fn hearing(&self, number: u64) -> Hearing {
        self.hearing_counted(number, Arc::default())
    }

    fn hearing_counted(&self, number: u64, counters: Arc<ListenerCounters>) -> Hearing {
        self.hearing_with(number, ListenerConfig::default(), counters)
    }

    fn hearing_with(
        &self,
        number: u64,
        listener: ListenerConfig,
        counters: Arc<ListenerCounters>,
    ) -> Hearing {
        let Host { client, certificate, .. } = self.cluster.host(number);
        self.origin.members.lock().expect("no panic").insert(certificate.to_vec(), number);
        let config = PeerConfig {
            name: "origin".to_owned(),
            address: self.service.address(),
            server_name: name_of(100),
            tls: client,
            compress: true,
        };
        let peer = Arc::new(Peer::new(config, PeerLimits::default()));
        let cache = Arc::new(Cache::default());
        let heard = Arc::clone(&cache) as Arc<dyn HeardPages>;
        // Some tests have one listener.
        let config = ListenerConfig { listeners_min: 1, ..listener };
        let own_peer = Arc::clone(&peer);
        let group = Listener::start(IMAGE, WHOLE, LOOPBACK, own_peer, heard, config, counters);
        let group = Arc::new(group.expect("a thread"));
        let source = PeerSource::new(IMAGE, Arc::new(Holders::new([peer])));
        Hearing { number, cache, source: source.with_group(Arc::clone(&group)), group }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.groups().stop();
    }
}

#[derive(Default)]
struct Cache(Mutex<BTreeSet<u64>>);

impl Cache {
    fn has(&self, range: PageRange) -> bool {
        let has = self.0.lock().expect("no panic");
        range.pages().all(|page| has.contains(&page.0))
    }

    fn put(&self, range: PageRange) {
        self.0.lock().expect("no panic").extend(range.pages().map(|page| page.0));
    }
}

impl HeardPages for Cache {
    fn take(&self, range: PageRange, bytes: &[u8]) -> u64 {
        check(range, bytes);
        self.put(range);
        range.len()
    }

    fn lacks(&self) -> bool {
        self.0.lock().expect("no panic").len() as u64 != WHOLE
    }
}

struct Hearing {
    number: u64,
    cache: Arc<Cache>,
    source: PeerSource,
    group: Arc<Listener>,
}

impl Hearing {
    fn wait_heard(&self) {
        wait_until("the group is heard", || self.group.is_heard());
    }

    /// Fetch all that is not there, each in an order of its own.
    fn bring(&self) {
        let mut units: Vec<u64> = (0..WHOLE / UNIT).collect();
        units.sort_by_key(|unit| (unit + self.number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
        let left = Mutex::new(units);
        let fetch = || {
            let mut bytes = buffer(range(0, UNIT));
            while let Some(unit) = { left.lock().expect("no panic").pop() } {
                let unit = range(unit * UNIT, UNIT);
                if !self.cache.has(unit) {
                    self.source.read_ahead(unit, &mut bytes).expect("pages");
                    check(unit, &bytes);
                    self.cache.put(unit);
                }
            }
        };
        std::thread::scope(|scope| (0..FETCHERS).for_each(|_| drop(scope.spawn(fetch))));
    }
}

/// No clock decides here. On a machine under load, hosts that are late ask again, and pages are
/// sent again: that is right, and not the subject.
#[test]
fn what_eight_hosts_need_is_sent_about_once() {
    let groups = GroupsConfig::default();
    let sender = SenderConfig { lockstep: NEVER, ..groups.sender };
    let sending = Sending::with(GroupsConfig { sender, silent: NEVER, ..groups });
    let listener = ListenerConfig::default();
    let receiver = ReceiverConfig { timeout_min: NEVER, ..listener.receiver };
    let listener = ListenerConfig {
        receiver,
        heard_within: NEVER,
        ahead_wait: Duration::from_secs(60),
        lost: NEVER,
        ..listener
    };
    let hear = |number| sending.hearing_with(number, listener, Arc::default());
    let hosts: Vec<_> = (1..=8).map(hear).collect();
    hosts.iter().for_each(Hearing::wait_heard);
    std::thread::scope(|scope| {
        hosts.iter().for_each(|host| drop(scope.spawn(|| host.bring())));
    });
    assert!(hosts.iter().all(|host| !host.cache.lacks()));
    let (to_all, to_one) = sending.sent();
    assert!(to_all + to_one <= WHOLE * 6 / 5, "{to_all} to all, {to_one} to one");
    assert!(to_all >= WHOLE * 9 / 10, "{to_all} to all: what was measured here?");
}

#[test]
fn a_host_that_asked_for_nothing_has_what_another_asked_for() {
    let sending = Sending::new();
    let (asks, hears) = (sending.hearing(1), sending.hearing(2));
    [&asks, &hears].into_iter().for_each(Hearing::wait_heard);
    let wanted = range(160, UNIT);
    let mut bytes = buffer(wanted);
    asks.source.read(wanted, &mut bytes).expect("pages");
    check(wanted, &bytes);
    assert_eq!(asks.source.counters().group_pages.get(), UNIT);
    wait_until("it comes to the other, too", || hears.cache.has(wanted));
    assert_eq!(sending.sent(), (UNIT, 0));
    let demanded = sending.origin.demanded.lock().expect("no panic").clone();
    assert_eq!(demanded, wanted.pages().map(|page| page.0).collect());
}

#[test]
fn who_waits_for_a_page_that_does_not_come_in_time_asks_alone() {
    let sending = Sending::new();
    let host = sending.hearing(1);
    host.wait_heard();
    sending.origin.gate.shut();
    let began = Instant::now();
    let mut bytes = buffer(range(0, UNIT));
    for unit in 0..4 {
        host.source.read(range(unit * UNIT, UNIT), &mut bytes).expect("pages");
        check(range(unit * UNIT, UNIT), &bytes);
    }
    let took = began.elapsed();
    sending.origin.gate.open();
    // Counted after the client has it.
    wait_until("all were sent to it alone", || sending.sent().1 == 4 * UNIT);
    // Three waits, and then the group is not asked any more; many times that on a machine under
    // load.
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(host.group.counters().in_vain.get(), 3);
}

#[test]
fn what_does_not_come_is_asked_for_again_and_all_that_is_counted() {
    let sending = Sending::new();
    let host = sending.hearing(1);
    host.wait_heard();
    let (sent, heard) = (sending.groups().counters(), host.group.counters());
    sending.origin.gate.shut();
    let mut bytes = buffer(range(0, UNIT));
    std::thread::scope(|scope| {
        let read = scope.spawn(|| host.source.read_ahead(range(0, UNIT), &mut bytes));
        wait_until("it is asked again", || sent.lost_pages.get() >= UNIT);
        sending.origin.gate.open();
        read.join().expect("no panic").expect("pages");
    });
    check(range(0, UNIT), &bytes);
    // Pages that were requested again while they were being read are sent again, for nothing.
    wait_until("it comes twice", || heard.known_pages.get() >= UNIT);
    let done = || sent.pages.get() + sent.lockstep_pages.get();
    wait_until("all requests are done with", || sent.requested_pages.get() == done());
    assert_eq!(sent.requested_pages.get(), UNIT + sent.repeated_pages.get());
    assert!(sent.lost_pages.get() <= sent.repeated_pages.get());
    assert_eq!(sent.pages.get(), UNIT + sent.resent_pages.get());
    assert!(heard.repeated_pages.get() >= sent.repeated_pages.get());
    assert_eq!(heard.requested_pages.get(), UNIT + heard.repeated_pages.get());
    assert_eq!(heard.pages.get(), UNIT + heard.known_pages.get());
    assert_eq!((heard.read_pages.get(), heard.in_vain.get()), (UNIT, 0));
}

#[test]
fn what_was_heard_is_counted_over_all_images_and_longer_than_they_are_there() {
    let sending = Sending::new();
    let counters = Arc::<ListenerCounters>::default();
    for round in 1..=2 {
        let host = sending.hearing_counted(1, Arc::clone(&counters));
        host.wait_heard();
        host.source.read_ahead(range(0, UNIT), &mut buffer(range(0, UNIT))).expect("pages");
        wait_until("it was counted", || counters.pages.get() >= round * UNIT);
        drop(host);
        assert_eq!(counters.read_pages.get(), round * UNIT);
        assert!(counters.requested_pages.get() >= round * UNIT);
    }
}

#[test]
fn forged_replayed_and_cut_datagrams_change_nothing() {
    let sending = Sending::new();
    let (asks, hears) = (sending.hearing(1), sending.hearing(2));
    [&asks, &hears].into_iter().for_each(Hearing::wait_heard);
    let group = sending.origin.invitations.lock().expect("no panic")[0].group;
    // Any host in the network hears what is sent, and can send itself.
    let stranger = stranger_of(group);
    let mut bytes = buffer(range(0, UNIT));
    asks.source.read(range(0, UNIT), &mut bytes).expect("pages");
    let (mut heard, mut datagram) = (Vec::new(), [0; 2048]);
    stranger.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
    while let Ok(len) = stranger.recv(&mut datagram) {
        heard.push(datagram[..len].to_vec());
    }
    assert!(heard.len() > 10, "{} datagrams", heard.len());
    let secret = &bytes[3 * PAGE..3 * PAGE + 64];
    let shows = |datagram: &Vec<u8>| datagram.windows(64).any(|part| part == secret);
    assert!(!heard.iter().any(shows), "pages are readable on the way");
    let counters = hears.group.counters();
    let (forged, replayed) = (counters.forged.get(), counters.replayed.get());
    let send = |bytes: &[u8]| {
        stranger.send_to(bytes, group).expect("sent");
    };
    for datagram in &heard {
        send(datagram);
        let mut changed = datagram.clone();
        // Another page, if only that were all.
        changed[24] ^= 1;
        send(&changed);
        // Another counter: one that has not been.
        changed = datagram.clone();
        changed[20] = 1;
        send(&changed);
        send(&datagram[..datagram.len() - 1]);
        send(&datagram[..20]);
    }
    let all = heard.len() as u64;
    wait_until("all were dropped", || {
        counters.forged.get() >= forged + 4 * all && counters.replayed.get() >= replayed + all
    });
    assert_eq!(counters.forged.get(), forged + 4 * all);
    assert_eq!(counters.wrong.get(), 0);
    assert_eq!(*hears.cache.0.lock().expect("no panic"), (0..UNIT).collect());
    // And every host hears now.
    asks.source.read(range(UNIT, UNIT), &mut bytes).expect("pages");
    wait_until("it comes to the other, too", || hears.cache.has(range(UNIT, UNIT)));
}

/// Each host that hears a group has its key.
#[test]
fn no_host_uses_what_a_member_forges() {
    let sending = Sending::new();
    let (asks, hears) = (sending.hearing(1), sending.hearing(2));
    [&asks, &hears].into_iter().for_each(Hearing::wait_heard);
    for (at, urgency) in [(0, Urgency::Demand), (1, Urgency::Ahead)] {
        sending.origin.lies_about.store(at * UNIT + 5, Ordering::Relaxed);
        let wanted = range(at * UNIT, UNIT);
        let mut bytes = buffer(wanted);
        asks.source.read_for(urgency, wanted, &mut bytes).expect("from the origin itself");
        check(wanted, &bytes);
        wait_until("the other has heard it", || {
            hears.group.counters().false_pages.get() == (at + 1) * UNIT
        });
    }
    assert_eq!(asks.group.counters().false_pages.get(), 2 * UNIT);
    assert_eq!(asks.source.counters().group_pages.get(), 0);
    // What is right is used.
    let wanted = range(2 * UNIT, UNIT);
    asks.source.read(wanted, &mut buffer(wanted)).expect("pages");
    wait_until("it comes to the other, too", || hears.cache.has(wanted));
    assert_eq!(asks.source.counters().group_pages.get(), UNIT);
    assert_eq!(*hears.cache.0.lock().expect("no panic"), (2 * UNIT..3 * UNIT).collect());
}

#[test]
fn no_host_uses_pages_that_the_sender_does_not_confirm() {
    let sending = Sending::new();
    let (asks, hears) = (sending.hearing(1), sending.hearing(2));
    [&asks, &hears].into_iter().for_each(Hearing::wait_heard);
    sending.origin.is_silent.store(true, Ordering::Relaxed);
    let wanted = range(0, UNIT);
    let mut bytes = buffer(wanted);
    asks.source.read(wanted, &mut bytes).expect("from the origin itself");
    check(wanted, &bytes);
    let undecided = || hears.group.counters().undecided_pages.get();
    wait_until("the other has heard it", || undecided() == UNIT);
    assert_eq!(asks.source.counters().group_pages.get(), 0);
    assert!(hears.cache.0.lock().expect("no panic").is_empty());
}

/// A socket of a program that has no key.
fn stranger_of(group: SocketAddrV4) -> UdpSocket {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).expect("a fd");
    sockopt::set_socket_reuseaddr(&socket, true).expect("a socket");
    rustix::net::bind(&socket, &group).expect("the group");
    let socket = UdpSocket::from(socket);
    socket.join_multicast_v4(group.ip(), &LOOPBACK).expect("joined");
    sockopt::set_ip_multicast_if(&socket, &LOOPBACK).expect("an interface");
    socket
}

#[test]
fn requests_that_are_no_listeners_are_dropped() {
    let sending = Sending::new();
    let host = sending.hearing(1);
    host.wait_heard();
    let stranger = UdpSocket::bind((LOOPBACK, 0)).expect("a port");
    let before = sending.groups().counters().dropped.get();
    let mut head = *b"VFMC\x01\x02\x01\0................";
    for session in 0..100u8 {
        head[8] = session;
        stranger
            .send_to(&[&head[..], &[0; 64]].concat(), sending.groups().address())
            .expect("sent");
    }
    wait_until("all are dropped", || sending.groups().counters().dropped.get() == before + 100);
    assert_eq!(sending.sent(), (0, 0));
}

#[test]
fn a_group_of_which_a_member_left_goes_on_as_another() {
    let sending = Sending::new();
    let (stays, leaves) = (sending.hearing(1), sending.hearing(2));
    [&stays, &leaves].into_iter().for_each(Hearing::wait_heard);
    drop(leaves);
    sending.groups().keep(|member| member != 2);
    wait_until("it is invited again", || {
        sending.origin.invitations.lock().expect("no panic").len() >= 3
    });
    stays.wait_heard();
    let mut bytes = buffer(range(0, UNIT));
    stays.source.read(range(0, UNIT), &mut bytes).expect("pages");
    check(range(0, UNIT), &bytes);
}

#[test]
fn without_a_sender_to_all_each_host_asks_alone() {
    let sending = Sending::new();
    let host = sending.hearing(1);
    host.wait_heard();
    sending.groups().stop();
    let mut bytes = buffer(range(0, UNIT));
    for unit in 0..20 {
        host.source.read(range(unit * UNIT, UNIT), &mut bytes).expect("pages");
        check(range(unit * UNIT, UNIT), &bytes);
    }
    wait_until("they were sent to it alone", || sending.sent().1 >= 16 * UNIT);
}
