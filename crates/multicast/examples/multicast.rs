//! Measures what a host sends to hosts that all bring its image, by multicast, over what one of
//! them needs.
//!
//! ```text
//! cargo run --release -p vmfork-multicast --example multicast [RECEIVERS] [MIB]
//! ```
//!
//! All hosts are in this process, over loopback, where each datagram is handed to all of them; the
//! image does not compress.

#![expect(clippy::print_stdout, reason = "a program for people")]

#[expect(dead_code, reason = "the tests use all of it")]
#[path = "../../transfer/tests/it/keys.rs"]
mod keys;

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, PageIdx, PageRange, PageSource as _};
use vmfork_multicast::{Groups, GroupsConfig, HeardPages, Listener, ListenerConfig};
use vmfork_transfer::{
    Holders, Invitation, PageService, Pages, Peer, PeerConfig, PeerLimits, PeerSource, Refusal,
    ServiceLimits, Urgency,
};

use crate::keys::{Cluster, name_of};

const UNIT: u64 = 16;
const IMAGE: ImageName = ImageName { host: 1, image: 1 };
/// As the engine does.
const FETCHERS: usize = 8;
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// The host that has the image. Its bytes are made up as they are read.
struct Origin {
    pages: u64,
    members: AtomicU64,
    groups: OnceLock<Groups>,
}

impl Pages for Origin {
    fn admit(&self, _: &[u8], _: SocketAddr) -> Result<u64, Refusal> {
        // Each has one connection for its invitation, which is its first.
        Ok(self.members.fetch_add(1, Ordering::Relaxed))
    }

    fn is_member(&self, _: u64) -> bool {
        true
    }

    fn read(
        &self,
        _: u64,
        _: ImageName,
        range: PageRange,
        _: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        let mut word = range.start().0 | 1;
        bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|chunk| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *chunk = word.to_le_bytes();
        });
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
        member: u64,
        image: ImageName,
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        self.own(member, image, range, each)
    }

    fn invite(&self, member: u64, image: ImageName) -> Result<Invitation, Refusal> {
        let none = || unreachable!("it is started before anybody asks");
        self.groups.get().unwrap_or_else(none).invite(member, image, self.pages)
    }
}

/// Which units are here, by how many of their pages are.
struct Cache(Mutex<Vec<bool>>);

impl Cache {
    fn put(&self, range: PageRange) -> u64 {
        let mut has = self.0.lock().expect("no panic");
        let mut new = 0;
        for page in range.pages() {
            let place = &mut has[usize::try_from(page.0).expect("small")];
            new += u64::from(!std::mem::replace(place, true));
        }
        new
    }

    fn has(&self, range: PageRange) -> bool {
        let has = self.0.lock().expect("no panic");
        range.pages().all(|page| has[usize::try_from(page.0).expect("small")])
    }
}

impl HeardPages for Cache {
    fn take(&self, range: PageRange, _: &[u8]) -> u64 {
        self.put(range)
    }

    fn lacks(&self) -> bool {
        self.0.lock().expect("no panic").contains(&false)
    }
}

struct Host {
    number: u64,
    cache: Arc<Cache>,
    group: Arc<Listener>,
    source: PeerSource,
}

fn host(cluster: &Cluster, number: u64, address: SocketAddr, pages: u64) -> std::io::Result<Host> {
    let config = PeerConfig {
        name: "origin".to_owned(),
        address,
        server_name: name_of(1),
        tls: cluster.host(number).client,
        compress: false,
    };
    let peer = Arc::new(Peer::new(config, PeerLimits::default()));
    let cache = Arc::new(Cache(Mutex::new(vec![false; usize::try_from(pages).unwrap_or(0)])));
    let heard = Arc::clone(&cache) as Arc<dyn HeardPages>;
    let config = ListenerConfig::default();
    let own_peer = Arc::clone(&peer);
    let group = Listener::start(IMAGE, pages, LOOPBACK, own_peer, heard, config, Arc::default())?;
    let group = Arc::new(group);
    let source = PeerSource::new(IMAGE, Arc::new(Holders::new([peer])));
    Ok(Host { number, cache, source: source.with_group(Arc::clone(&group)), group })
}

/// Bring all that is not there, in an order of its own. → how long each read took.
fn bring(host: &Host, pages: u64) -> Vec<Duration> {
    let mut units: Vec<u64> = (0..pages / UNIT).collect();
    units.sort_by_key(|unit| (unit + host.number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
    let (left, times) = (Mutex::new(units), Mutex::new(Vec::new()));
    let fetch = || {
        let mut bytes = vec![0; 4096 * usize::try_from(UNIT).unwrap_or(0)];
        while let Some(unit) = { left.lock().expect("no panic").pop() } {
            let range = PageRange::new(PageIdx(unit * UNIT), UNIT).expect("within");
            if host.cache.has(range) {
                continue;
            }
            let began = Instant::now();
            host.source.read_ahead(range, &mut bytes).expect("pages");
            times.lock().expect("no panic").push(began.elapsed());
            host.cache.put(range);
        }
    };
    std::thread::scope(|scope| (0..FETCHERS).for_each(|_| drop(scope.spawn(fetch))));
    times.into_inner().expect("no panic")
}

fn main() -> Result<(), Box<dyn Error>> {
    let number = |nth, default: u64| std::env::args().nth(nth).map_or(Ok(default), |t| t.parse());
    let (receivers, pages) = (number(1, 8)?, number(2, 64)? * 256);
    let cluster = Cluster::new();
    let origin = Origin { pages, members: AtomicU64::new(1), groups: OnceLock::new() };
    let origin = Arc::new(origin);
    let served = Arc::clone(&origin) as Arc<dyn Pages>;
    let at = SocketAddrV4::new(LOOPBACK, 0);
    let groups = Groups::start(at, GroupsConfig::default(), Arc::clone(&served))?;
    let groups = origin.groups.get_or_init(|| groups);
    let listener = TcpListener::bind((LOOPBACK, 0))?;
    let (tls, limits) = (cluster.host(1).server, ServiceLimits::default());
    let service = PageService::start(listener, tls, served, limits)?;
    let address = service.address();
    let hosts = (2..receivers + 2).map(|number| host(&cluster, number, address, pages));
    let hosts = hosts.collect::<Result<Vec<_>, _>>()?;
    while !hosts.iter().all(|host| host.group.is_heard()) {
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let began = Instant::now();
    let mut times: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> =
            hosts.iter().map(|host| scope.spawn(move || bring(host, pages))).collect();
        running.into_iter().flat_map(|one| one.join().expect("no panic")).collect()
    });
    let took = began.elapsed().as_secs_f64();
    times.sort_unstable();
    let (to_all, to_one) = (groups.counters(), service.counters());
    let need = pages as f64;
    let asked: u64 = times.len() as u64 * UNIT;
    println!(
        "{receivers} receivers: {:4.2} × the image to all, {:4.2} × to one alone, in {took:5.2} s ({:.0} MB/s heard by each)",
        to_all.pages.get() as f64 / need,
        to_one.pages.get() as f64 / need,
        need * 4096.0 / took / 1e6,
    );
    println!(
        "{:5.3} × its bytes in datagrams, with UDP's, IP's and Ethernet's heads; {:4.2} × the image asked for in all; a read took {:.1} ms, 99 of 100 less than {:.1} ms",
        (to_all.bytes.get() + 42 * to_all.datagrams.get()) as f64 / (need * 4096.0),
        asked as f64 / need,
        times.get(times.len() / 2).copied().unwrap_or_default().as_secs_f64() * 1e3,
        times.get(times.len() * 99 / 100).copied().unwrap_or_default().as_secs_f64() * 1e3,
    );
    let lost = hosts.iter().map(|host| host.group.counters().in_vain.get()).sum::<u64>();
    println!(
        "{lost} reads went to the host alone; {} datagrams were not sent",
        to_all.unsent.get()
    );
    groups.stop();
    Ok(())
}
