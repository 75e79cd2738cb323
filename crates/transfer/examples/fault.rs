//! Measures what a remote fault costs beyond the link's round trip.
//!
//! ```text
//! cargo run --release -p vmfork-transfer --example fault [READS [REST_US [SERVER CLIENT ADDRESS]]]
//! ```
//!
//! Reads of 1 and 16 pages, with TLS between members as in a cluster, from an image in memory whose
//! pages do not compress. First one reader, which rests before each read, then eight at a time
//! without a rest. For comparison the same bytes there and back over plain TCP. All over loopback,
//! or between two network namespaces (`ip netns`), of which the server's has that address.

#![expect(clippy::print_stdout, reason = "a program for people")]

#[expect(dead_code, reason = "the tests use all of it")]
#[path = "../tests/it/keys.rs"]
mod keys;

use std::error::Error;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, Timespec, move_into_link_name_space, nanosleep};
use vmfork_image::{ImageName, PageIdx, PageRange};
use vmfork_transfer::{
    PageService, Pages, Peer, PeerConfig, PeerLimits, Refusal, ServiceLimits, Urgency,
};

use crate::keys::{Cluster, name_of};

const PAGES: u32 = 1 << 14;
const IMAGE: ImageName = ImageName { host: 2, image: 1 };
const REQUEST_BYTES: usize = 32;
const PAGE: usize = 4096;
const READERS: usize = 8;

/// Where the two sides are.
struct Between {
    address: IpAddr,
    /// Server's and client's.
    namespaces: Option<(File, File)>,
}

impl Between {
    /// # Errors
    /// There are none such.
    fn new(arguments: &[String]) -> Result<Self, Box<dyn Error>> {
        let open = |name: &String| File::open(Path::new("/run/netns").join(name));
        Ok(match arguments {
            [] => Self { address: Ipv4Addr::LOCALHOST.into(), namespaces: None },
            [server, client, address] => {
                let namespaces = Some((open(server)?, open(client)?));
                Self { address: address.parse()?, namespaces }
            }
            _ => return Err("usage: fault [READS [REST_US [SERVER CLIENT ADDRESS]]]".into()),
        })
    }

    /// Listen on the server's side, and be on the client's from then on, with all threads that are
    /// begun.
    fn listen(&self) -> std::io::Result<TcpListener> {
        let enter = |namespace: &File| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        };
        if let Some((server, _)) = &self.namespaces {
            enter(server)?;
        }
        let listener = TcpListener::bind((self.address, 0))?;
        if let Some((_, client)) = &self.namespaces {
            enter(client)?;
        }
        Ok(listener)
    }
}

/// An image in memory.
struct Memory(Vec<u8>);

impl Pages for Memory {
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
        let from = usize::try_from(range.byte_offset()).unwrap_or(usize::MAX);
        bytes.copy_from_slice(&self.0[from..from + bytes.len()]);
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
        range: PageRange,
        each: &mut dyn FnMut(PageRange),
    ) -> Result<(), Refusal> {
        each(range);
        Ok(())
    }
}

/// Bytes that don't compress.
fn memory() -> Memory {
    let mut state = 1u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 16).to_le_bytes()
    };
    let words = (0..PAGES).flat_map(|_| 0..PAGE / 8);
    Memory(words.flat_map(|_| word()).collect())
}

/// A server that answers each request with this many bytes, over plain TCP.
fn plain(between: &Between, answer: usize) -> Result<SocketAddr, Box<dyn Error>> {
    let listener = between.listen()?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut tcp, _) = listener.accept()?;
        tcp.set_nodelay(true)?;
        let (mut request, answer) = ([0; REQUEST_BYTES], vec![7; answer]);
        loop {
            tcp.read_exact(&mut request)?;
            tcp.write_all(&answer)?;
        }
    });
    Ok(address)
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let us = |share: usize| times[(times.len() - 1) * share / 1000].as_secs_f64() * 1e6;
    println!("{what:<34} p50 {:7.1} µs   p99 {:7.1} µs", us(500), us(990));
}

fn time(reads: usize, rest_us: u32, mut read: impl FnMut(usize)) -> Vec<Duration> {
    let rest = Timespec { tv_sec: 0, tv_nsec: i64::from(rest_us) * 1000 };
    // The first make connections, and warm caches.
    (0..reads / 10).for_each(&mut read);
    let timed = |n| {
        if rest_us > 0 {
            let _interrupted = nanosleep(&rest);
        }
        let began = Instant::now();
        read(n);
        began.elapsed()
    };
    (0..reads).map(timed).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let reads = arguments.first().map_or(Ok(20_000), |text| text.parse())?;
    let rest_us = arguments.get(1).map_or(Ok(0), |text| text.parse())?;
    let between = Between::new(arguments.get(2..).unwrap_or_default())?;
    let cluster = Cluster::new();
    let (here, there) = (cluster.host(1), cluster.host(2));
    let listener = between.listen()?;
    let limits = ServiceLimits::default();
    let service = PageService::start(listener, there.server, Arc::new(memory()), limits)?;
    let config = PeerConfig {
        name: "there".to_owned(),
        address: service.address(),
        server_name: name_of(2),
        tls: here.client,
        compress: false,
    };
    let peer = Peer::new(config, PeerLimits::default());

    for pages in [1usize, 16] {
        let mut tcp = TcpStream::connect(plain(&between, pages * PAGE)?)?;
        tcp.set_nodelay(true)?;
        let mut bytes = vec![0; pages * PAGE];
        let times = time(reads, rest_us, |_| {
            tcp.write_all(&[0; REQUEST_BYTES]).expect("sent");
            tcp.read_exact(&mut bytes).expect("answered");
        });
        report(&format!("{pages:>2} pages' bytes, plain TCP"), times);

        let read_by = |reader: usize, reads: usize, rest_us| {
            let mut bytes = vec![0; pages * PAGE];
            time(reads, rest_us, |n| {
                let first = (n * 7919 + reader * 1000) as u64 % u64::from(PAGES - 16);
                let range = PageRange::new(PageIdx(first), pages as u64).expect("within");
                peer.read(IMAGE, range, Urgency::Demand, &mut bytes).expect("answered");
            })
        };
        report(&format!("{pages:>2} pages"), read_by(0, reads, rest_us));
        let (began, bytes_before) = (Instant::now(), peer.counters().raw_bytes.get());
        let times = std::thread::scope(|scope| {
            let readers: Vec<_> =
                (0..READERS).map(|r| scope.spawn(move || read_by(r, reads / READERS, 0))).collect();
            readers.into_iter().flat_map(|r| r.join().expect("no panic")).collect()
        });
        report(&format!("{pages:>2} pages, {READERS} readers"), times);
        let bytes = peer.counters().raw_bytes.get() - bytes_before;
        let rate = bytes as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
        println!("{:<34} {rate:.0} MiB/s", "");
    }
    Ok(())
}
