//! Hosts of a made-up cluster, with images whose pages are distinct.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustls::{ServerConnection, StreamOwned};
use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_transfer::proto::{HEAD_BYTES, PREAMBLE, REQUEST_BYTES, Request};
use vmfork_transfer::{
    Holders, PageService, Pages, Peer, PeerConfig, PeerLimits, PeerSource, Refusal, RefusalKind,
    ServiceLimits, Urgency,
};

use crate::keys::{Cluster, Host, name_of};

pub(crate) const PAGE: usize = 4096;
/// Of the image that every host has.
pub(crate) const PAGES: u64 = 5000;
pub(crate) const IMAGE: ImageName = ImageName { host: 0xabc, image: 0x1_0000_0007 };
/// No step of a test takes this long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn range(start: u64, len: u64) -> PageRange {
    PageRange::new(PageIdx(start), len).expect("small")
}

pub(crate) fn buffer(range: PageRange) -> Vec<u8> {
    vec![0xee; usize::try_from(range.byte_len()).expect("small")]
}

/// What a page holds: some zero, some the same all over, most like nothing else.
pub(crate) fn fill(page: PageIdx, bytes: &mut [u8]) {
    let mut word = page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    match page.0 % 7 {
        0 | 1 => bytes.fill(0),
        2 => bytes.as_chunks_mut::<8>().0.fill(word.to_le_bytes()),
        _ => bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|chunk| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(page.0 | 1);
            *chunk = word.to_le_bytes();
        }),
    }
}

/// Whether bytes are those of `range`.
#[track_caller]
pub(crate) fn check(range: PageRange, bytes: &[u8]) {
    let mut expected = [0; PAGE];
    for (page, found) in range.pages().zip(bytes.as_chunks::<PAGE>().0) {
        fill(page, &mut expected);
        assert!(*found == expected, "page {page} has other bytes");
    }
}

/// A gate that things wait at.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
    passed: AtomicUsize,
}

impl Gate {
    pub(crate) fn shut(&self) {
        self.state.lock().expect("no panic").0 = true;
    }

    pub(crate) fn open(&self) {
        self.state.lock().expect("no panic").0 = false;
        self.changed.notify_all();
    }

    /// Wait until it is open.
    pub(crate) fn pass(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.1 += 1;
        self.changed.notify_all();
        let (mut state, timeout) =
            self.changed.wait_timeout_while(state, LONG, |(shut, _)| *shut).expect("no panic");
        state.1 -= 1;
        assert!(!timeout.timed_out(), "the gate was never opened");
        self.passed.fetch_add(1, Ordering::Relaxed);
    }

    /// How many have gone through.
    pub(crate) fn passed(&self) -> usize {
        self.passed.load(Ordering::Relaxed)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().expect("no panic").1
    }

    /// Wait until this many wait.
    pub(crate) fn wait_for(&self, waiting: usize) {
        let state = self.state.lock().expect("no panic");
        let enough = self.changed.wait_timeout_while(state, LONG, |(_, n)| *n < waiting);
        assert!(!enough.expect("no panic").1.timed_out(), "{waiting} never waited");
    }
}

/// Until something is so.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < give_up, "not in time: {what}");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// The images of a host.
#[derive(Default)]
pub(crate) struct Images {
    members: Mutex<BTreeMap<Vec<u8>, u64>>,
    pub(crate) gone: Mutex<Vec<u64>>,
    /// Reads wait here.
    pub(crate) gate: Gate,
    /// Background reads wait here.
    pub(crate) ahead_gate: Gate,
    /// From this page on they are lost; at the one before, reading panics.
    pub(crate) lost_from: Mutex<Option<u64>>,
    /// It says that it has all pages.
    pub(crate) has_all: AtomicBool,
    /// Reads of several pages wait here, too.
    pub(crate) several_gate: Gate,
    /// This many of those find the pages not here.
    pub(crate) several_absent: AtomicUsize,
}

impl Pages for Images {
    fn admit(&self, certificate: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        let member = self.members.lock().expect("no panic").get(certificate).copied();
        member.ok_or_else(|| Refusal::new(RefusalKind::NotMember, "no member has this key"))
    }

    fn is_member(&self, member: u64) -> bool {
        !self.gone.lock().expect("no panic").contains(&member)
    }

    fn has(&self, _: ImageName, _: PageRange) -> bool {
        self.has_all.load(Ordering::Relaxed)
    }

    fn read(
        &self,
        _: u64,
        image: ImageName,
        range: PageRange,
        urgency: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        if range.len() > 1 {
            self.several_gate.pass();
            let less = |left: usize| left.checked_sub(1);
            if self.several_absent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
            {
                return Err(Refusal::new(RefusalKind::NotHere, "they have gone since"));
            }
        }
        if image != IMAGE || range.end().0 > PAGES {
            return Err(Refusal::new(RefusalKind::UnknownImage, format!("no image {image}")));
        }
        match urgency {
            Urgency::Demand => self.gate.pass(),
            Urgency::Ahead => self.ahead_gate.pass(),
        }
        let lost_from = *self.lost_from.lock().expect("no panic");
        if let Some(page) = lost_from.filter(|page| range.end().0 > *page) {
            let text = format!("page {page} went with its VM");
            return Err(Refusal::new(RefusalKind::PageLost, text));
        }
        assert!(lost_from != Some(range.end().0), "a bug in reading");
        for (page, bytes) in range.pages().zip(bytes.as_chunks_mut::<PAGE>().0) {
            fill(page, bytes);
        }
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

    fn held(
        &self,
        _: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        if image != IMAGE {
            return Err(Refusal::new(RefusalKind::UnknownImage, format!("no image {image}")));
        }
        // One of a hundred pages is missing.
        (0..PAGES / 100).for_each(|k| each(self::range(k * 100, 99).intersect(&range)));
        Ok(())
    }
}

/// A cluster of one client (host 1) and servers (hosts 2 and on).
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    pub(crate) client: Host,
}

/// A host that serves.
pub(crate) struct Server {
    pub(crate) images: Arc<Images>,
    pub(crate) service: PageService,
    number: u64,
}

impl World {
    pub(crate) fn new() -> Self {
        let cluster = Cluster::new();
        Self { client: cluster.host(1), cluster }
    }

    pub(crate) fn serve(&self, number: u64, limits: ServiceLimits) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        self.serve_on(listener, number, limits)
    }

    pub(crate) fn serve_on(
        &self,
        listener: TcpListener,
        number: u64,
        limits: ServiceLimits,
    ) -> Server {
        let images = Arc::new(Images::default());
        let client = self.client.certificate.to_vec();
        images.members.lock().expect("no panic").insert(client, 1);
        let tls = self.cluster.host(number).server;
        let pages = Arc::clone(&images);
        let service = PageService::start(listener, tls, pages, limits).expect("a service");
        Server { images, service, number }
    }

    pub(crate) fn peer_at(
        &self,
        number: u64,
        address: SocketAddr,
        limits: PeerLimits,
    ) -> Arc<Peer> {
        let config = PeerConfig {
            name: format!("host{number}"),
            address,
            server_name: name_of(number),
            tls: Arc::clone(&self.client.client),
            compress: true,
        };
        Arc::new(Peer::new(config, limits))
    }

    pub(crate) fn peer(&self, server: &Server, limits: PeerLimits) -> Arc<Peer> {
        self.peer_at(server.number, server.service.address(), limits)
    }

    /// A host that answers the first request of each connection with `answer` of it, and ends.
    pub(crate) fn fake(
        &self,
        number: u64,
        answer: impl Fn(&Request) -> Vec<u8> + Send + 'static,
    ) -> SocketAddr {
        self.fake_together(number, 1, move |requests| answer(&requests[0]))
    }

    /// A host that answers the first `count` requests of each connection when it has all of them,
    /// and ends.
    pub(crate) fn fake_together(
        &self,
        number: u64,
        count: usize,
        answer: impl Fn(&[Request]) -> Vec<u8> + Send + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let tls = self.cluster.host(number).server;
        // Ends with the test's process.
        std::thread::spawn(move || {
            for tcp in listener.incoming() {
                let tls = ServerConnection::new(Arc::clone(&tls)).expect("a configuration");
                let mut stream = StreamOwned::new(tls, tcp.expect("a connection"));
                let mut bytes = vec![0; PREAMBLE.len() + count * REQUEST_BYTES];
                if stream.read_exact(&mut bytes).is_err() {
                    continue;
                }
                let requests = bytes[PREAMBLE.len()..].as_chunks::<REQUEST_BYTES>().0.iter();
                let decode = |bytes| Request::decode(bytes).expect("a request");
                let answer = answer(&requests.map(decode).collect::<Vec<_>>());
                let _gone = stream.write_all(&answer).and_then(|()| stream.flush());
            }
        });
        address
    }

    /// A host that answers what it is asked, one request after the other, until `answer` has none.
    /// `answer` gets the number of the connection, and of the request on that.
    pub(crate) fn fake_in_turn(
        &self,
        number: u64,
        answer: impl Fn(&Request, usize, usize) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (tls, answer) = (self.cluster.host(number).server, Arc::new(answer));
        // Ends with the test's process.
        std::thread::spawn(move || {
            for (connection, tcp) in listener.incoming().enumerate() {
                let tls = ServerConnection::new(Arc::clone(&tls)).expect("a configuration");
                let mut stream = StreamOwned::new(tls, tcp.expect("a connection"));
                let answer = Arc::clone(&answer);
                std::thread::spawn(move || {
                    let mut bytes = [0; REQUEST_BYTES];
                    let mut requests = 0..;
                    let mut is_open = stream.read_exact(&mut [0; PREAMBLE.len()]).is_ok();
                    while is_open && stream.read_exact(&mut bytes).is_ok() {
                        let request = Request::decode(&bytes).expect("a request");
                        let Some(answer) =
                            requests.next().and_then(|at| answer(&request, connection, at))
                        else {
                            return;
                        };
                        is_open = stream.write_all(&answer).and_then(|()| stream.flush()).is_ok();
                    }
                });
            }
        });
        address
    }
}

/// The head of an answer, byte by byte.
pub(crate) fn head(sequence: u16, status: u8, runs: u16, bytes: u32) -> Vec<u8> {
    let mut head = vec![0; HEAD_BYTES];
    head[..2].copy_from_slice(&sequence.to_le_bytes());
    head[2] = status;
    head[4..6].copy_from_slice(&runs.to_le_bytes());
    head[8..12].copy_from_slice(&bytes.to_le_bytes());
    head
}

/// Short time-outs, for tests in which they pass.
pub(crate) fn hasty() -> PeerLimits {
    let short = Duration::from_secs(1);
    PeerLimits { answer: short, avoid: LONG, ..PeerLimits::default() }
}

/// The image, from hosts in this order; those that all fail are not asked again.
pub(crate) fn source(peers: impl IntoIterator<Item = Arc<Peer>>) -> PeerSource {
    PeerSource::new(IMAGE, Arc::new(Holders::new(peers))).with_patience(Duration::ZERO)
}

/// A socket to a service, and what it says until it ends.
pub(crate) fn end_of(mut tcp: TcpStream) -> usize {
    tcp.set_read_timeout(Some(LONG)).expect("a socket");
    let mut said = Vec::new();
    // A reset is an end, too.
    let _ = tcp.read_to_end(&mut said);
    said.len()
}
