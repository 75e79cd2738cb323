//! The hosts that are known, so kept that the best of a thousand is found in microseconds.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::holders::{HoldersConfig, mixed};
use crate::transfer::HostId;
use crate::transfer::answer_times::AnswerTimes;

/// A host that can be asked, but for what it has.
#[derive(Debug, Clone, Default)]
pub(super) struct Holder {
    pub(super) origin: bool,
    pub(super) distance: u32,
    pub(super) in_flight: usize,
    pub(super) ahead_in_flight: usize,
    pub(super) times: AnswerTimes,
    /// In a row.
    pub(super) failures: u32,
    pub(super) avoid_until: Duration,
    /// The same for background reads.
    pub(super) avoid_ahead_until: Duration,
    /// It gave what is wrong: not asked any more.
    pub(super) barred: bool,
}

/// What [`Hosts::best`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Best {
    Host(HostId),
    /// Those that have it have too much to do …
    Full,
    /// … or some are left alone until then. `or_full`: others have too much to do.
    Avoided {
        until: Duration,
        or_full: bool,
    },
    NoHolder,
}

/// Holders by number, without gaps: what all are looked at for lies together, one after the other.
#[derive(Debug)]
pub(super) struct Hosts {
    config: HoldersConfig,
    numbers: BTreeMap<HostId, usize>,
    holders: Vec<Holder>,
    brief: Vec<Brief>,
    held: Held,
    /// The least mean of all that were measured.
    quickest_ns: Option<u64>,
}

/// What a holder is chosen by.
#[derive(Debug, Clone, Copy)]
struct Brief {
    host: HostId,
    /// A part of what decides between equals: another for each host and asker.
    lot: u64,
    /// What an answer takes on average; `u64::MAX`: not measured yet.
    mean_ns: u64,
    /// An answer waits for this many, itself included.
    in_line: u32,
    distance: u32,
    is_origin: bool,
    is_lost: bool,
    /// With demand, and with background reads.
    is_full: [bool; 2],
    /// For a while, that may be over.
    is_avoided: bool,
}

/// A flag for each piece and holder. Those of 64 pieces lie beside those that the next holder has
/// of the same.
#[derive(Debug)]
struct Held {
    words: Vec<u64>,
    /// There is room for this many holders.
    room: usize,
    /// For each holder.
    words_each: usize,
}

impl Hosts {
    pub(super) fn new(pieces: u64, config: HoldersConfig) -> Self {
        Self {
            config,
            numbers: BTreeMap::new(),
            holders: Vec::new(),
            brief: Vec::new(),
            held: Held::new(pieces),
            quickest_ns: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.holders.len()
    }

    pub(super) fn knows(&self, host: HostId) -> bool {
        self.numbers.contains_key(&host)
    }

    pub(super) fn get(&self, host: HostId) -> Option<&Holder> {
        self.holders.get(*self.numbers.get(&host)?)
    }

    /// Puts in one that is not known. It has nothing, or everything if it is an origin.
    pub(super) fn insert(&mut self, host: HostId, holder: Holder) {
        self.numbers.insert(host, self.holders.len());
        self.held.push(self.holders.len());
        self.brief.push(Brief::of(host, &holder, &self.config));
        self.holders.push(holder);
    }

    pub(super) fn remove(&mut self, host: HostId) {
        let Some(number) = self.numbers.remove(&host) else { return };
        let last = self.holders.len() - 1;
        self.held.swap_remove(number, last);
        self.holders.swap_remove(number);
        let gone = self.brief.swap_remove(number);
        if let Some(moved) = self.brief.get(number) {
            self.numbers.insert(moved.host, number);
        }
        self.was_measured(gone.mean_ns, u64::MAX);
    }

    /// Changes what is known of one. `None`: it is not known.
    pub(super) fn change<R>(
        &mut self,
        host: HostId,
        change: impl FnOnce(&mut Holder) -> R,
    ) -> Option<R> {
        let number = *self.numbers.get(&host)?;
        let (holder, brief) = (self.holders.get_mut(number)?, self.brief.get_mut(number)?);
        let result = change(holder);
        let before = brief.mean_ns;
        *brief = Brief { host, lot: brief.lot, ..Brief::of(host, holder, &self.config) };
        let after = brief.mean_ns;
        self.was_measured(before, after);
        Some(result)
    }

    fn was_measured(&mut self, before: u64, after: u64) {
        if before == after {
            return;
        }
        if self.quickest_ns.is_none_or(|quickest| after <= quickest) && after != u64::MAX {
            self.quickest_ns = Some(after);
        } else if self.quickest_ns == Some(before) {
            let all = self.brief.iter().map(|brief| brief.mean_ns);
            self.quickest_ns = all.min().filter(|mean| *mean != u64::MAX);
        }
    }

    /// Whether a holder has a piece. An origin has all that it has not been found to lack.
    pub(super) fn has(&self, host: HostId, piece: u64) -> bool {
        let number = self.numbers.get(&host).copied();
        number.is_some_and(|number| self.has_number(number, piece))
    }

    fn has_number(&self, number: usize, piece: u64) -> bool {
        let is_origin = self.brief.get(number).is_some_and(|brief| brief.is_origin);
        self.held.get(number, piece) != is_origin
    }

    /// It has a piece, or lacks it. → whether it had it.
    pub(super) fn set(&mut self, host: HostId, piece: u64, has: bool) -> bool {
        let Some(number) = self.numbers.get(&host).copied() else { return false };
        let had = self.has_number(number, piece);
        if had != has {
            self.held.flip(number, piece);
        }
        had
    }

    /// It has all these pieces. Tells `new` of each that it lacked.
    pub(super) fn set_all(
        &mut self,
        host: HostId,
        runs: impl Iterator<Item = Range<u64>>,
        mut new: impl FnMut(u64),
    ) {
        let Some(number) = self.numbers.get(&host).copied() else { return };
        let is_origin = self.brief.get(number).is_some_and(|brief| brief.is_origin);
        for pieces in runs {
            for first in (pieces.start / 64..pieces.end.div_ceil(64)).map(|word| word * 64) {
                let mask = u64::MAX << pieces.start.saturating_sub(first);
                let mask = mask & u64::MAX >> (first + 64).saturating_sub(pieces.end);
                let Some(word) = self.held.word(number, first) else { return };
                let mut lacked = mask & if is_origin { *word } else { !*word };
                *word ^= lacked;
                while lacked != 0 {
                    new(first + u64::from(lacked.trailing_zeros()));
                    lacked &= lacked - 1;
                }
            }
        }
    }

    /// The best holder of those that have all of `wanted`, are `among` (by host and whether it is
    /// an origin), and are not lost. The best is the one that is expected to answer first; of
    /// equals the nearest.
    pub(super) fn best(
        &self,
        wanted: Range<u64>,
        demand: bool,
        now: Duration,
        among: impl Fn(HostId, bool) -> bool,
    ) -> Best {
        if wanted.is_empty() {
            return Best::NoHolder;
        }
        // One that was never asked is thought to be as quick as the quickest: else it never would
        // be.
        let quickest_ns = self.quickest_ns.unwrap_or_else(|| nanos(self.config.answer_start));
        let (mut best, mut later) = (None::<((u32, u32, u64), HostId)>, Best::NoHolder);
        let bit = wanted.start % 64;
        let words = self.held.beside(wanted.start);
        for (number, (brief, word)) in self.brief.iter().zip(words).enumerate() {
            if (word >> bit & 1 == 1) == brief.is_origin
                || brief.is_lost
                || !among(brief.host, brief.is_origin)
                || !(wanted.start + 1..wanted.end).all(|piece| self.has_number(number, piece))
            {
                continue;
            }
            if brief.is_full[usize::from(!demand)] {
                later = later.or_full();
                continue;
            }
            if brief.is_avoided
                && let Some(until) = self.avoided_until(number, demand).filter(|until| *until > now)
            {
                later = later.or_avoided(until);
                continue;
            }
            // Our requests in flight there are answered one after the other.
            let mean_ns = if brief.mean_ns == u64::MAX { quickest_ns } else { brief.mean_ns };
            let expected_us = mean_ns.saturating_mul(brief.in_line.into()) / 1000;
            // Up to a factor of two, times are the same. Else all would take the host that was
            // quickest last, which then is not. For background reads, spreading over many hosts is
            // better than speed.
            let magnitude = expected_us.max(1).ilog2() / if demand { 1 } else { 3 };
            let nearness = (magnitude, brief.distance);
            if best.is_some_and(|((magnitude, distance, _), _)| nearness > (magnitude, distance)) {
                continue;
            }
            let key = (magnitude, brief.distance, mixed(brief.lot ^ wanted.start));
            if best.is_none_or(|(best, _)| key < best) {
                best = Some((key, brief.host));
            }
        }
        best.map_or(later, |(_, host)| Best::Host(host))
    }

    fn avoided_until(&self, number: usize, demand: bool) -> Option<Duration> {
        let holder = self.holders.get(number)?;
        Some(match demand {
            true => holder.avoid_until,
            false => holder.avoid_until.max(holder.avoid_ahead_until),
        })
    }

    /// The origins that are worth asking.
    pub(super) fn origins(&self) -> impl Iterator<Item = &Holder> {
        let worth = |brief: &Brief| brief.is_origin && !brief.is_lost;
        self.brief
            .iter()
            .zip(&self.holders)
            .filter(move |(brief, _)| worth(brief))
            .map(|(_, holder)| holder)
    }
}

impl Best {
    fn or_full(self) -> Self {
        match self {
            Self::Avoided { until, .. } => Self::Avoided { until, or_full: true },
            _ => Self::Full,
        }
    }

    fn or_avoided(self, at: Duration) -> Self {
        match self {
            Self::Avoided { until, or_full } => Self::Avoided { until: until.min(at), or_full },
            Self::Full => Self::Avoided { until: at, or_full: true },
            _ => Self::Avoided { until: at, or_full: false },
        }
    }
}

impl Brief {
    fn of(host: HostId, holder: &Holder, config: &HoldersConfig) -> Self {
        let ahead_max = match holder.origin {
            true => config.origin_ahead_in_flight_max,
            false => config.ahead_in_flight_max,
        };
        let is_full = holder.in_flight >= config.in_flight_max;
        Self {
            host,
            lot: mixed(host.0 ^ config.salt),
            mean_ns: holder.times.measured().map_or(u64::MAX, nanos),
            in_line: u32::try_from(holder.in_flight + 1).unwrap_or(u32::MAX),
            distance: holder.distance,
            is_origin: holder.origin,
            is_lost: holder.failures >= config.failures_max,
            is_full: [is_full, is_full || holder.ahead_in_flight >= ahead_max],
            is_avoided: !holder.avoid_until.max(holder.avoid_ahead_until).is_zero(),
        }
    }
}

impl Held {
    fn new(pieces: u64) -> Self {
        let words_each = usize::try_from(pieces.div_ceil(64)).unwrap_or(0);
        Self { words: Vec::new(), room: 0, words_each }
    }

    fn at(&self, number: usize, piece: u64) -> Option<usize> {
        let word = usize::try_from(piece / 64).ok().filter(|word| *word < self.words_each)?;
        (number < self.room).then(|| word * self.room + number)
    }

    fn word(&mut self, number: usize, piece: u64) -> Option<&mut u64> {
        let at = self.at(number, piece)?;
        self.words.get_mut(at)
    }

    /// The words of all holders with the flag of a piece.
    fn beside(&self, piece: u64) -> &[u64] {
        let all = self.at(0, piece).and_then(|at| self.words.get(at..at + self.room));
        all.unwrap_or_default()
    }

    fn get(&self, number: usize, piece: u64) -> bool {
        let word = self.at(number, piece).and_then(|at| self.words.get(at));
        word.is_some_and(|word| word >> (piece % 64) & 1 == 1)
    }

    fn flip(&mut self, number: usize, piece: u64) {
        if let Some(word) = self.word(number, piece) {
            *word ^= 1 << (piece % 64);
        }
    }

    /// Room for one more, which is number `number`.
    fn push(&mut self, number: usize) {
        if number < self.room {
            return;
        }
        let room = (number + 1).max(self.room * 2);
        let mut words = vec![0; room * self.words_each];
        for (new, old) in words.chunks_mut(room).zip(self.words.chunks(self.room.max(1))) {
            new[..old.len()].copy_from_slice(old);
        }
        (self.words, self.room) = (words, room);
    }

    /// The host that was `last` is `number` from now on.
    fn swap_remove(&mut self, number: usize, last: usize) {
        for all in self.words.chunks_mut(self.room.max(1)) {
            all.swap(number, last);
            all[last] = 0;
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PIECES: u64 = 150;

    /// A list, and a look at each: what [`Hosts::best`] is to say.
    #[derive(Default)]
    struct Listed {
        hosts: BTreeMap<HostId, (Holder, BTreeSet<u64>)>,
    }

    impl Listed {
        fn best(
            &self,
            wanted: Range<u64>,
            demand: bool,
            now: Duration,
            config: &HoldersConfig,
            among: impl Fn(HostId, bool) -> bool,
        ) -> Best {
            let measured = self.hosts.values().filter_map(|(holder, _)| holder.times.measured());
            let quickest = measured.min().unwrap_or(config.answer_start);
            let mut best: Option<((u32, u32, u64), HostId)> = None;
            let (mut any_full, mut avoided) = (false, None::<Duration>);
            for (host, (holder, pieces)) in &self.hosts {
                if holder.failures >= config.failures_max
                    || !among(*host, holder.origin)
                    || wanted.is_empty()
                    || !wanted.clone().all(|piece| pieces.contains(&piece))
                {
                    continue;
                }
                let ahead_max = match holder.origin {
                    true => config.origin_ahead_in_flight_max,
                    false => config.ahead_in_flight_max,
                };
                let full = holder.in_flight >= config.in_flight_max
                    || !demand && holder.ahead_in_flight >= ahead_max;
                let until = match demand {
                    true => holder.avoid_until,
                    false => holder.avoid_until.max(holder.avoid_ahead_until),
                };
                if full {
                    any_full = true;
                } else if until > now {
                    avoided = Some(avoided.map_or(until, |avoided| avoided.min(until)));
                } else {
                    let in_line = u32::try_from(holder.in_flight + 1).expect("few");
                    let expected =
                        holder.times.measured().unwrap_or(quickest).saturating_mul(in_line);
                    let magnitude =
                        expected.as_micros().max(1).ilog2() / if demand { 1 } else { 3 };
                    let lot = mixed(mixed(host.0 ^ config.salt) ^ wanted.start);
                    let key = (magnitude, holder.distance, lot);
                    if best.is_none_or(|(best, _)| key < best) {
                        best = Some((key, *host));
                    }
                }
            }
            match (best, avoided) {
                (Some((_, host)), _) => Best::Host(host),
                (None, Some(until)) => Best::Avoided { until, or_full: any_full },
                (None, None) if any_full => Best::Full,
                (None, None) => Best::NoHolder,
            }
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Join { host: u64, origin: bool, distance: u32 },
        Leave { host: u64 },
        Has { host: u64, pieces: Range<u64> },
        Lacks { host: u64, piece: u64 },
        Sample { host: u64, us: u64 },
        Flights { host: u64, in_flight: usize, ahead: usize },
        Avoid { host: u64, until: u64, ahead_until: u64, failures: u32 },
    }

    fn step() -> impl Strategy<Value = Step> {
        let host = 0..9u64;
        let pieces = (0..PIECES, 0..PIECES).prop_map(|(a, b)| a.min(b)..a.max(b));
        prop_oneof![
            3 => (host.clone(), any::<bool>(), 0..3u32).prop_map(|(host, origin, distance)| Step::Join { host, origin, distance }),
            1 => host.clone().prop_map(|host| Step::Leave { host }),
            4 => (host.clone(), pieces).prop_map(|(host, pieces)| Step::Has { host, pieces }),
            1 => (host.clone(), 0..PIECES).prop_map(|(host, piece)| Step::Lacks { host, piece }),
            2 => (host.clone(), 1..100_000u64).prop_map(|(host, us)| Step::Sample { host, us }),
            2 => (host.clone(), 0..4usize, 0..3usize).prop_map(|(host, in_flight, ahead)| Step::Flights { host, in_flight, ahead }),
            1 => (host, 0..20u64, 0..20u64, 0..8u32)
                .prop_map(|(host, until, ahead_until, failures)| Step::Avoid { host, until, ahead_until, failures }),
        ]
    }

    /// The same to both.
    fn take(step: &Step, hosts: &mut Hosts, listed: &mut Listed) {
        let mut change = |host: u64, change: &dyn Fn(&mut Holder)| {
            hosts.change(HostId(host), change);
            if let Some((holder, _)) = listed.hosts.get_mut(&HostId(host)) {
                change(holder);
            }
        };
        match step.clone() {
            Step::Join { host, origin, distance } => {
                let host = HostId(host);
                if !hosts.knows(host) {
                    let holder = Holder { origin, distance, ..Holder::default() };
                    hosts.insert(host, holder.clone());
                    let pieces = if origin { 0..PIECES } else { 0..0 };
                    listed.hosts.insert(host, (holder, pieces.collect()));
                }
            }
            Step::Leave { host } => {
                hosts.remove(HostId(host));
                listed.hosts.remove(&HostId(host));
            }
            Step::Has { host, pieces } => {
                let mut new = Vec::new();
                hosts.set_all(HostId(host), [pieces.clone()].into_iter(), |piece| new.push(piece));
                if let Some((_, has)) = listed.hosts.get_mut(&HostId(host)) {
                    let expected: Vec<_> = pieces.filter(|piece| has.insert(*piece)).collect();
                    assert_eq!(new, expected);
                }
            }
            Step::Lacks { host, piece } => {
                let had = hosts.set(HostId(host), piece, false);
                let listed = listed.hosts.get_mut(&HostId(host));
                assert_eq!(had, listed.is_some_and(|(_, has)| has.remove(&piece)));
            }
            Step::Sample { host, us } => {
                change(host, &|holder| holder.times.sample(Duration::from_micros(us)));
            }
            Step::Flights { host, in_flight, ahead } => change(host, &|holder| {
                (holder.in_flight, holder.ahead_in_flight) = (in_flight, ahead);
            }),
            Step::Avoid { host, until, ahead_until, failures } => change(host, &|holder| {
                holder.avoid_until = Duration::from_millis(until);
                holder.avoid_ahead_until = Duration::from_millis(ahead_until);
                holder.failures = failures;
            }),
        }
    }

    proptest! {
        #[test]
        fn the_best_is_who_a_look_at_each_finds(
            steps in prop::collection::vec(step(), 1..60),
            salt in any::<u64>(),
            questions in prop::collection::vec((0..PIECES, 0..3u64, any::<bool>(), 0..25u64, 0..4u8), 1..20),
        ) {
            let config = HoldersConfig {
                salt,
                in_flight_max: 3,
                ahead_in_flight_max: 2,
                origin_ahead_in_flight_max: 1,
                ..HoldersConfig::default()
            };
            let (mut hosts, mut listed) = (Hosts::new(PIECES, config), Listed::default());
            for step in &steps {
                take(step, &mut hosts, &mut listed);
                for (start, len, demand, ms, among) in &questions {
                    let among = |host: HostId, origin: bool| match among {
                        0 => true,
                        1 => origin,
                        2 => !origin,
                        _ => host.0.is_multiple_of(2),
                    };
                    let (wanted, now) = (*start..(start + len).min(PIECES), Duration::from_millis(*ms));
                    let expected = listed.best(wanted.clone(), *demand, now, &config, among);
                    prop_assert_eq!(hosts.best(wanted, *demand, now, among), expected);
                    for (host, (_, has)) in &listed.hosts {
                        prop_assert_eq!(hosts.has(*host, *start), has.contains(start));
                    }
                }
            }
            prop_assert_eq!(hosts.len(), listed.hosts.len());
        }
    }
}
