//! Measures how much of an image its origin sends to hosts that all bring it, one by one from the
//! origin and as a swarm. Also measures how long a demand read takes meanwhile.
//!
//! ```text
//! cargo run --release -p vmfork-transfer --example swarm [RECEIVERS]
//! ```
//!
//! All hosts are in this process, over loopback, with TLS between them; the image is 64 MiB that do
//! not compress.

#![expect(clippy::print_stdout, reason = "a program for people")]

#[expect(dead_code, reason = "the tests use all of it")]
#[path = "../tests/it/keys.rs"]
mod keys;

use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmfork_image::{ImageName, NextAhead, PageIdx, PageRange, PageSource as _};
use vmfork_transfer::{
    Holders, HostId, PageService, Pages, Peer, PeerConfig, PeerLimits, PeerSource, Refusal,
    RefusalKind, ServiceLimits, Swarm, SwarmConfig, SwarmMember, Urgency,
};

use crate::keys::{Cluster, Host, name_of};

const PAGES: u64 = 1 << 14;
const UNIT: u64 = 16;
const IMAGE: ImageName = ImageName { host: 1, image: 1 };
const FETCHERS: usize = 8;
const PAGE: usize = 4096;

/// Which units of the image are here. Its bytes are made up as they are read.
struct Cache(Mutex<Vec<bool>>);

impl Pages for Cache {
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
        range: PageRange,
        _: Urgency,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        let unit = usize::try_from(range.start().0 / UNIT).unwrap_or(usize::MAX);
        if self.0.lock().expect("no panic").get(unit) != Some(&true) {
            return Err(Refusal::new(RefusalKind::PageLost, "not here"));
        }
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
        _: u64,
        _: ImageName,
        _: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        let here = self.0.lock().expect("no panic");
        (0..).zip(here.iter()).filter(|(_, here)| **here).for_each(|(at, _)| each(unit(at)));
        Ok(())
    }
}

struct Node {
    number: u64,
    keys: Host,
    cache: Arc<Cache>,
    service: PageService,
}

fn unit(at: u64) -> PageRange {
    PageRange::new(PageIdx(at * UNIT), UNIT).expect("within")
}

fn node(cluster: &Cluster, number: u64) -> Result<Node, Box<dyn Error>> {
    let keys = cluster.host(number);
    let units = usize::try_from(PAGES / UNIT)?;
    let cache = Arc::new(Cache(Mutex::new(vec![number == 1; units])));
    let (listener, pages) = (TcpListener::bind("127.0.0.1:0")?, Arc::clone(&cache));
    let limits = ServiceLimits::default();
    let service = PageService::start(listener, Arc::clone(&keys.server), pages, limits)?;
    Ok(Node { number, keys, cache, service })
}

fn peer(from: &Node, to: &Node) -> Arc<Peer> {
    let config = PeerConfig {
        name: format!("host{}", to.number),
        address: to.service.address(),
        server_name: name_of(to.number),
        tls: Arc::clone(&from.keys.client),
        compress: false,
    };
    Arc::new(Peer::new(config, PeerLimits::default()))
}

fn source(own: &Node, nodes: &[Node], in_swarm: bool) -> PeerSource {
    let source = PeerSource::new(IMAGE, Arc::new(Holders::new([peer(own, &nodes[0])])));
    if !in_swarm {
        return source;
    }
    let others = nodes.iter().filter(|other| other.number != own.number);
    let swarm = Swarm::new(IMAGE, PAGES, HostId(own.number), SwarmConfig::default());
    swarm.set_members(others.map(|other| SwarmMember {
        id: HostId(other.number),
        peer: peer(own, other),
        origin: other.number == 1,
    }));
    source.with_swarm(Arc::new(swarm))
}

/// Bring all of it. Each hundredth unit is a demand read. → how long those took.
fn bring(node: &Node, source: &PeerSource) -> Vec<Duration> {
    let mut left: Vec<_> = (0..PAGES / UNIT).map(unit).collect();
    if let Some(order) = source.order() {
        left.sort_by_key(|piece| order.place(*piece));
    }
    let (left, times) = (Mutex::new(left), Mutex::new(Vec::new()));
    let fetch = || {
        let mut bytes = vec![0; PAGE * usize::try_from(UNIT).unwrap_or(0)];
        loop {
            let piece = {
                let mut left = left.lock().expect("no panic");
                let next = source.order().map(|order| order.next(&left[..left.len().min(300)]));
                match next.unwrap_or(NextAhead::Piece(0)) {
                    _ if left.is_empty() => return,
                    NextAhead::Piece(at) => Ok(left.remove(at)),
                    NextAhead::Later(wait) => Err(wait),
                }
            };
            match piece {
                Err(wait) => std::thread::park_timeout(wait),
                Ok(piece) => {
                    let began = Instant::now();
                    if (piece.start().0 / UNIT).is_multiple_of(100) {
                        source.read(piece, &mut bytes).expect("pages");
                        times.lock().expect("no panic").push(began.elapsed());
                    } else {
                        source.read_ahead(piece, &mut bytes).expect("pages");
                    }
                    let at = usize::try_from(piece.start().0 / UNIT).unwrap_or(0);
                    node.cache.0.lock().expect("no panic")[at] = true;
                }
            }
        }
    };
    std::thread::scope(|scope| (0..FETCHERS).for_each(|_| drop(scope.spawn(fetch))));
    times.into_inner().expect("no panic")
}

fn main() -> Result<(), Box<dyn Error>> {
    let most: u64 = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    let mut receivers = 1;
    while receivers <= most {
        for (what, in_swarm) in [("unicast", false), ("swarm", true)] {
            let cluster = Cluster::new();
            let nodes = (1..=receivers + 1).map(|number| node(&cluster, number));
            let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
            let began = Instant::now();
            let mut times: Vec<_> = std::thread::scope(|scope| {
                let nodes = &nodes;
                let each = |own| scope.spawn(move || bring(own, &source(own, nodes, in_swarm)));
                let running: Vec<_> = nodes[1..].iter().map(each).collect();
                running.into_iter().flat_map(|one| one.join().expect("no panic")).collect()
            });
            let took = began.elapsed();
            times.sort_unstable();
            let sent = nodes[0].service.counters().pages.get() as f64 / PAGES as f64;
            let median = times.get(times.len() / 2).copied().unwrap_or_default();
            println!(
                "{receivers:>2} receivers, {what:<8} the origin sent {sent:4.2} × the image in {:5.2} s; a fault took {:6.0} µs",
                took.as_secs_f64(),
                median.as_secs_f64() * 1e6
            );
        }
        receivers *= 2;
    }
    Ok(())
}
