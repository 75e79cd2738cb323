//! Hosts that do whatever a host can do wrong: no read gets another's bytes, each ends once, and
//! nothing stays behind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vmfork_image::{AheadRead, PageIdx, PageRange, PageSource as _};
use vmfork_transfer::proto::{HEAD_BYTES, Op, Request};
use vmfork_transfer::{
    Holders, HostId, Peer, PeerLimits, PeerSource, ServiceLimits, Swarm, SwarmConfig, SwarmMember,
};

use crate::common::*;
use crate::swarm::{UNIT, WHOLE};

const TOGETHER: usize = 6;
const PIECES: u64 = 60;
const ORIGIN: u64 = 2;

/// A number less than `below`, as good as any other.
fn draw(state: &Mutex<u64>, below: u64) -> u64 {
    let mut state = state.lock().expect("no panic");
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % below
}

fn pages(range: PageRange) -> Vec<u8> {
    let mut bytes = buffer(range);
    let pages = range.pages().zip(bytes.as_chunks_mut::<PAGE>().0);
    pages.for_each(|(page, bytes)| fill(page, bytes));
    bytes
}

fn sums(range: PageRange) -> Vec<u8> {
    let sum = |page: &[u8; PAGE]| blake3::hash(page).as_bytes()[..16].to_vec();
    pages(range).as_chunks::<PAGE>().0.iter().flat_map(sum).collect()
}

/// The right answer: two, if one page is to come first.
pub(crate) fn right(request: &Request) -> Vec<u8> {
    let range = request.range;
    if let Some(first) = request.first {
        let others = [range.until_page(first), range.from_page(PageIdx(first.0 + 1))];
        let others: Vec<u8> = others.into_iter().flat_map(pages).collect();
        let answer = |bytes: &[u8]| {
            let (len, count) = (bytes.len(), bytes.len() / PAGE);
            let head = head(request.sequence, 0, 1, u32::try_from(len).expect("small"));
            [head, u16::try_from(count).expect("few").to_le_bytes().to_vec(), bytes.to_vec()]
                .concat()
        };
        return [answer(&pages(first.range())), answer(&others)].concat();
    }
    let (runs, bytes) = match request.op {
        Op::Read => (vec![u16::try_from(range.len()).expect("few")], pages(range)),
        Op::Held => (Vec::new(), vec![0xff; usize::try_from(range.len() / 8).expect("few")]),
        Op::Sums | Op::Invite => (Vec::new(), sums(range)),
    };
    let len = u32::try_from(bytes.len()).expect("small");
    let count = u16::try_from(runs.len()).expect("few");
    let runs: Vec<u8> = runs.iter().flat_map(|run| run.to_le_bytes()).collect();
    [head(request.sequence, 0, count, len), runs, bytes].concat()
}

fn refused(request: &Request, status: u8, bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).expect("short");
    [&head(request.sequence, status, 0, len), bytes].concat()
}

/// What host `number` answers: most of the time what it should.
fn any(request: &Request, number: u64, state: &Mutex<u64>) -> Option<Vec<u8>> {
    let mut answer = right(request);
    match (draw(state, 24), request.op) {
        (0, _) => return None,
        // Those of the next request follow. An origin is believed: it breaks off.
        (1, Op::Read) if number == ORIGIN => return None,
        (1, _) => answer.truncate(usize::try_from(draw(state, 60_000)).expect("few")),
        (2, _) => answer.extend([7; 40]),
        // In answer to another request.
        (3, _) => answer[0] ^= 1,
        // Busy, about to leave, no member, what makes no sense, failed, not here.
        (kind @ 4..=9, Op::Read) => {
            let status = [3, 4, 5, 6, 7, 8][usize::try_from(kind - 4).expect("few")];
            return Some(refused(request, status, b"no"));
        }
        (10..=15, Op::Read) if number == ORIGIN => {
            let to = [3_u64, 4, 1, 99][usize::try_from(draw(state, 4)).expect("few")];
            let sums = if draw(state, 2) == 0 { Vec::new() } else { sums(request.range) };
            return Some(refused(request, 9, &[&to.to_le_bytes()[..], &sums].concat()));
        }
        // Another page than it should be.
        (10, Op::Read) => {
            let at = match (request.first, draw(state, 2)) {
                (Some(_), 0) => HEAD_BYTES + 2 + PAGE - 1,
                _ => answer.len() - 1,
            };
            answer[at] ^= 1;
        }
        // The pages of the request before.
        (11, Op::Read) if request.range.start().0 >= UNIT => {
            let start = request.range.start().0 - UNIT;
            let before = range(start, request.range.len());
            answer = right(&Request { range: before, ..*request });
        }
        _ => {}
    }
    Some(answer)
}

/// What one host brings of all pieces by three threads, of which one has VMs that wait.
fn bring(seed: u64) {
    let world = World::new();
    let state = Arc::new(Mutex::new(seed));
    let is_over = Arc::new(AtomicBool::new(false));
    let members = [ORIGIN, 3, 4].map(|number| {
        let (state, is_over) = (Arc::clone(&state), Arc::clone(&is_over));
        let address = world.fake_in_turn(number, move |request, _, _| {
            match is_over.load(Ordering::Relaxed) {
                true => Some(right(request)),
                false => any(request, number, &state),
            }
        });
        let (answer, avoid) = (Duration::from_millis(200), Duration::from_millis(20));
        let limits = PeerLimits { answer, avoid, ..PeerLimits::default() };
        let peer = world.peer_at(number, address, limits);
        SwarmMember { id: HostId(number), peer, origin: number == ORIGIN }
    });
    let server = world.serve(5, ServiceLimits::default());
    let good = world.peer(&server, PeerLimits::default());
    let peers: Vec<Arc<Peer>> = members.iter().map(|member| Arc::clone(&member.peer)).collect();
    let swarm = Arc::new(Swarm::new(IMAGE, WHOLE, HostId(1), SwarmConfig::default()));
    swarm.set_members(members);
    let source = PeerSource::new(IMAGE, Arc::new(Holders::new([good])));
    let source = source.with_swarm(Arc::clone(&swarm)).with_patience(LONG);
    let left: Mutex<Vec<_>> = Mutex::new((0..PIECES).map(|at| range(at * UNIT, UNIT)).collect());
    let bring_ahead = || {
        loop {
            let pieces: Vec<_> = {
                let mut left = left.lock().expect("no panic");
                let from = left.len().saturating_sub(TOGETHER);
                left.drain(from..).collect()
            };
            if pieces.is_empty() {
                return;
            }
            let mut bytes: Vec<_> = pieces.iter().map(|piece| buffer(*piece)).collect();
            let reads = pieces.iter().zip(&mut bytes);
            let mut reads: Vec<_> =
                reads.map(|(range, bytes)| AheadRead { range: *range, bytes }).collect();
            let mut times = vec![0; pieces.len()];
            source.read_ahead_all(&mut reads, &mut |at, came| {
                times[at] += 1;
                check(pieces[at], came.expect("from the one that is good"));
            });
            assert!(times.iter().all(|times| *times == 1), "{times:?}");
        }
    };
    std::thread::scope(|scope| {
        let ahead = [(); 2].map(|()| scope.spawn(bring_ahead));
        while !ahead.iter().all(|thread| thread.is_finished()) {
            let piece = range(draw(&state, PIECES) * UNIT, UNIT);
            let page = PageIdx(piece.start().0 + draw(&state, UNIT));
            let mut bytes = buffer(piece);
            let mut came = |bytes: &[u8]| check(page.range(), bytes);
            let outcome = source.read_first(piece, page, &mut bytes, &mut came);
            outcome.expect("from the one that is good");
            check(piece, &bytes);
        }
    });
    is_over.store(true, Ordering::Relaxed);
    assert!(!swarm.is_under_way(range(0, WHOLE)), "all has come");
    wait_until("no peer is asked any more", || peers.iter().all(|peer| peer.connections().1 == 0));
}

#[test]
fn whatever_hosts_answer_each_read_gets_its_own_bytes_once() {
    (1..=3).for_each(bring);
}
