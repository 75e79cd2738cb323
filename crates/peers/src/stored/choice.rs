//! Which host a chunk is asked of.
//!
//! Each chunk has a host of its own among those that pull the image: the one of highest random
//! weight. The source is Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
//! 1998. All hosts ask that one first, and it brings the chunk from one that has all of it. So a
//! chunk leaves the hosts with the whole image about once, and each other host sends its part of
//! the image to all. When hosts come or go, only the chunks of those move.

use blake3::Hash;
use vmfork_cluster::HostId;

/// A host that has an image, or pulls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) host: HostId,
    pub(super) is_whole: bool,
    /// How many runs its profiles were learnt from.
    pub(super) runs: u32,
}

/// How a host is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// For what it has, or what it brings from a host with the whole image.
    Relay(HostId),
    /// For what it has.
    Here(HostId),
}

impl Ask {
    pub(super) fn host(self) -> HostId {
        match self {
            Self::Relay(host) | Self::Here(host) => host,
        }
    }
}

/// Of a host for a chunk.
fn weight(chunk: &Hash, host: HostId) -> u64 {
    let (word, _) = chunk.as_bytes().split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
    // The finalizer of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    // generators", 2014.
    let mut mixed = u64::from_le_bytes(*word) ^ host.get().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Whom `own` asks for a chunk, one after the other. With `relays`, it was asked for it itself:
/// of two hosts neither waits for the other.
pub(super) fn order(chunk: &Hash, own: HostId, holders: &[Holder], relays: bool) -> Vec<Ask> {
    let mut ranked: Vec<_> = holders.to_vec();
    ranked.sort_by_key(|holder| std::cmp::Reverse((weight(chunk, holder.host), holder.host)));
    let first = ranked.iter().find(|holder| !holder.is_whole).map(|holder| holder.host);
    let relay = first.filter(|first| *first != own && !relays).map(Ask::Relay);
    let others = || ranked.iter().filter(|holder| holder.host != own);
    let whole = others().filter(|holder| holder.is_whole);
    let partial = others().filter(|holder| !holder.is_whole);
    let here = whole.chain(partial).map(|holder| Ask::Here(holder.host));
    relay.into_iter().chain(here).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn host(number: u64) -> HostId {
        HostId::new(number).expect("a host")
    }

    fn holders(count: u64, whole: u64) -> Vec<Holder> {
        let holder =
            |number| Holder { host: host(number * 7919), is_whole: number <= whole, runs: 0 };
        (1..=count).map(holder).collect()
    }

    fn chunks(count: u32) -> impl Iterator<Item = Hash> {
        (0..count).map(|number| blake3::hash(&number.to_le_bytes()))
    }

    #[test]
    fn all_hosts_ask_the_same_one_first_and_chunks_are_spread_evenly() {
        let holders = holders(9, 1);
        let mut firsts = HashMap::<HostId, u32>::new();
        for chunk in chunks(4000) {
            let pulling = holders.iter().filter(|holder| !holder.is_whole);
            let asked = pulling.map(|own| order(&chunk, own.host, &holders, false)[0]);
            let (relays, direct): (Vec<_>, Vec<_>) =
                asked.partition(|ask| matches!(ask, Ask::Relay(_)));
            assert!(relays.len() == 7 && relays.iter().all(|ask| *ask == relays[0]));
            assert_eq!(direct, [Ask::Here(holders[0].host)], "the chunk's own host");
            *firsts.entry(relays[0].host()).or_default() += 1;
        }
        assert_eq!(firsts.len(), 8);
        assert!(firsts.values().all(|count| (400..600).contains(count)), "{firsts:?}");
    }

    #[test]
    fn who_relays_asks_hosts_with_all_of_it_before_others_and_never_to_relay() {
        let holders = holders(5, 2);
        for chunk in chunks(100) {
            for own in &holders {
                let asked = order(&chunk, own.host, &holders, true);
                assert!(asked.iter().all(|ask| matches!(ask, Ask::Here(_))));
                let is_whole = |ask: &Ask| {
                    holders.iter().any(|holder| holder.host == ask.host() && holder.is_whole)
                };
                assert!(asked.is_sorted_by_key(|ask| !is_whole(ask)));
                let mut hosts: Vec<_> = asked.iter().map(|ask| ask.host()).collect();
                hosts.sort();
                hosts.dedup();
                assert_eq!(hosts.len(), 4, "each other one, once");
            }
        }
    }

    #[test]
    fn when_a_host_goes_only_its_chunks_move() {
        let all = holders(6, 1);
        let (gone, rest) = all.split_last().expect("some");
        let own = host(1);
        for chunk in chunks(500) {
            let before = order(&chunk, own, &all, false)[0];
            let after = order(&chunk, own, rest, false)[0];
            assert!(before == after || before.host() == gone.host);
        }
        assert_eq!(order(&blake3::hash(b"x"), own, &[], false), []);
    }
}
