//! The pool's decisions against a model of the world: items that start, fail, die and are claimed
//! in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::{HOLD_MAX, ItemId, Limits, Order, PoolState, RETRY_FIRST, RETRY_MAX, SHAPES_MAX};

const IDLE: Duration = Duration::from_secs(100);

fn limits(total_max: usize) -> Limits {
    Limits { total_max, starting_max: 2, idle_after: IDLE }
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Carry out all orders at once; the items that are discarded.
fn settle(pool: &mut PoolState<char>, now: Duration) -> Vec<ItemId> {
    let mut discarded = Vec::new();
    loop {
        let orders = pool.plan(now);
        if orders.is_empty() {
            return discarded;
        }
        for order in orders {
            match order {
                Order::Start(item, _) => assert!(pool.started(item), "just ordered"),
                Order::Discard(item) => discarded.push(item),
            }
        }
    }
}

fn waiting(pool: &PoolState<char>, shape: char) -> usize {
    let counts = pool.counts();
    counts.iter().find(|(key, _)| *key == shape).map_or(0, |(_, counts)| counts.waiting)
}

#[test]
fn two_are_started_at_a_time() {
    let mut pool = PoolState::new(limits(8));
    pool.want(&'a', 5, s(0));
    let orders = pool.plan(s(0));
    assert_eq!(orders.len(), 2);
    assert_eq!(pool.plan(s(0)), [], "given once");
    let Some(Order::Start(item, 'a')) = orders.first() else { panic!("{orders:?}") };
    assert!(pool.started(*item));
    assert_eq!(pool.plan(s(0)).len(), 1);
}

#[test]
fn what_is_claimed_is_replaced() {
    let mut pool = PoolState::new(limits(8));
    pool.want(&'a', 3, s(0));
    settle(&mut pool, s(0));
    assert!(pool.claim(&'a', s(1)).is_some());
    assert_eq!(waiting(&pool, 'a'), 2);
    settle(&mut pool, s(1));
    assert_eq!(waiting(&pool, 'a'), 3);
    assert_eq!(pool.claim(&'b', s(1)), None);
}

#[test]
fn a_shape_in_use_takes_places_from_one_that_is_not() {
    let mut pool = PoolState::new(limits(4));
    pool.want(&'a', 4, s(0));
    settle(&mut pool, s(0));
    pool.want(&'b', 3, s(1));
    assert_eq!(settle(&mut pool, s(1)).len(), 3);
    assert_eq!((waiting(&pool, 'a'), waiting(&pool, 'b')), (1, 3));
    pool.claim(&'a', s(2));
    settle(&mut pool, s(2));
    assert_eq!((waiting(&pool, 'a'), waiting(&pool, 'b')), (4, 0));
}

#[test]
fn a_shape_that_is_not_used_expires_and_is_forgotten() {
    let mut pool = PoolState::new(limits(4));
    pool.want(&'a', 2, s(0));
    settle(&mut pool, s(0));
    assert_eq!(pool.next_plan_at(s(0)), Some(IDLE));
    pool.claim(&'a', s(50));
    settle(&mut pool, s(50));
    assert_eq!(settle(&mut pool, s(149)), []);
    assert_eq!(settle(&mut pool, s(150)).len(), 2);
    assert_eq!((pool.counts(), pool.next_plan_at(s(150))), (vec![], None));
}

#[test]
fn held_it_starts_nothing_until_the_last_lets_go() {
    let mut pool = PoolState::new(limits(4));
    pool.hold();
    pool.want(&'a', 1, s(0));
    pool.hold();
    pool.release();
    assert_eq!(pool.plan(s(1)), []);
    assert_eq!(pool.next_plan_at(s(1)), Some(s(1) + HOLD_MAX));
    pool.release();
    assert_eq!(pool.plan(s(1)).len(), 1);
}

/// A guest that forks all the time keeps neither its own refill nor that of others from beginning.
#[test]
fn no_refill_is_put_off_for_longer_than_two_seconds_however_holds_follow_each_other() {
    let mut pool = PoolState::new(limits(8));
    pool.want(&'a', 4, s(0));
    settle(&mut pool, s(0));
    pool.want(&'b', 4, s(0));
    let mut begun = None;
    for n in 0..40 {
        let now = Duration::from_millis(155 * n);
        pool.hold();
        pool.claim(&'a', now);
        pool.claim(&'a', now);
        let orders = pool.plan(now);
        assert!(orders.is_empty() || now >= HOLD_MAX, "{now:?}");
        if orders.iter().any(|order| matches!(order, Order::Start(_, 'b'))) {
            begun.get_or_insert(now);
        }
        for order in orders {
            if let Order::Start(item, _) = order {
                assert!(pool.started(item));
            }
        }
        // There is no planning between one hold's end and the next one's begin.
        pool.release();
    }
    let begun = begun.expect("the other shape's turn comes");
    assert!(begun < HOLD_MAX + Duration::from_millis(310), "{begun:?}");
    assert_eq!(waiting(&pool, 'b'), 4);
}

#[test]
fn turned_off_it_starts_nothing_and_keeps_nothing() {
    let mut pool = PoolState::new(limits(4));
    pool.want(&'a', 2, s(0));
    settle(&mut pool, s(0));
    pool.set_limits(limits(0));
    assert_eq!(settle(&mut pool, s(0)).len(), 2);
    pool.want(&'a', 2, s(1));
    assert_eq!(pool.plan(s(1)), []);
    assert_eq!(pool.claim(&'a', s(1)), None);
}

#[test]
fn a_shape_that_fails_is_tried_ever_less_often() {
    let mut pool = PoolState::new(Limits { starting_max: 1, idle_after: s(100_000), ..limits(4) });
    pool.want(&'a', 1, s(0));
    let mut now = s(0);
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let orders = pool.plan(now);
        let [Order::Start(item, _)] = orders.as_slice() else { panic!("{orders:?}") };
        let pause = pool.failed(*item, now);
        assert_eq!(pool.plan(now + pause - Duration::from_millis(1)), []);
        assert_eq!(pool.next_plan_at(now), Some(now + pause));
        now += pause;
        pauses.push(pause);
    }
    assert_eq!(pauses.first(), Some(&RETRY_FIRST));
    assert_eq!(pauses.last(), Some(&RETRY_MAX));
    assert!(pauses.is_sorted());
}

#[test]
fn one_that_is_no_longer_wanted_when_it_has_started_goes() {
    let mut pool = PoolState::new(limits(4));
    pool.want(&'a', 1, s(0));
    let orders = pool.plan(s(0));
    pool.want(&'a', 0, s(0));
    assert_eq!(pool.plan(s(0)), [], "it is still starting");
    let [Order::Start(item, _)] = orders.as_slice() else { panic!("{orders:?}") };
    assert!(pool.started(*item));
    assert_eq!(pool.plan(s(0)), [Order::Discard(*item)]);
    assert_eq!(pool.counts(), vec![]);
}

#[test]
fn shapes_are_remembered_up_to_a_bound() {
    let mut pool = PoolState::new(limits(4));
    for n in 0..2 * SHAPES_MAX {
        pool.want(&n, 1, s(0));
        pool.plan(s(0));
    }
    // Those that are starting can't be forgotten yet.
    assert!(pool.counts().len() <= SHAPES_MAX + 4, "{}", pool.counts().len());
}

#[derive(Debug, Clone)]
enum Step {
    Want(char, usize),
    Claim(char),
    StartEnds { which: usize, well: bool },
    Dies(usize),
    Pass(u64),
    Total(usize),
    Hold,
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    let shape = prop::sample::select(vec!['a', 'b', 'c']);
    prop_oneof![
        (shape.clone(), 0_usize..6).prop_map(|(shape, target)| Step::Want(shape, target)),
        shape.prop_map(Step::Claim),
        (any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(which, well)| Step::StartEnds { which, well }),
        any::<usize>().prop_map(Step::Dies),
        (0_u64..40).prop_map(Step::Pass),
        (0_usize..9).prop_map(Step::Total),
        Just(Step::Hold),
        Just(Step::Release),
    ]
}

/// What really exists.
#[derive(Debug, Default)]
struct World {
    starting: BTreeMap<ItemId, char>,
    waiting: BTreeMap<ItemId, char>,
    ever: BTreeSet<ItemId>,
}

impl World {
    /// What the pool orders is done, and must keep its bounds.
    fn carry_out(&mut self, orders: Vec<Order<char>>, limits: Limits) -> Result<(), TestCaseError> {
        let mut started = 0;
        for order in orders {
            match order {
                Order::Start(item, shape) => {
                    prop_assert!(self.ever.insert(item), "an id twice");
                    self.starting.insert(item, shape);
                    started += 1;
                }
                Order::Discard(item) => prop_assert!(self.waiting.remove(&item).is_some()),
            }
        }
        if started > 0 {
            prop_assert!(self.starting.len() <= 2);
            prop_assert!(self.starting.len() + self.waiting.len() <= limits.total_max);
        }
        Ok(())
    }
}

fn nth<K: Copy, V>(map: &BTreeMap<K, V>, n: usize) -> Option<K> {
    (!map.is_empty()).then(|| map.keys().nth(n % map.len()).copied()).flatten()
}

proptest! {
    /// In any order of events, bounds are kept when something starts. Only what exists is handed
    /// out or discarded, and nothing is forgotten while it exists. Left alone, the pool reaches its
    /// targets.
    #[test]
    fn whatever_happens_the_pool_keeps_its_bounds(steps in prop::collection::vec(step(), 1..120)) {
        let mut pool = PoolState::new(limits(5));
        let mut world = World::default();
        let mut now = s(0);
        let mut holds = 0_usize;
        for step in steps {
            match step {
                Step::Want(shape, target) => pool.want(&shape, target, now),
                Step::Claim(shape) => {
                    if let Some(item) = pool.claim(&shape, now) {
                        prop_assert_eq!(world.waiting.remove(&item), Some(shape));
                    } else {
                        prop_assert!(!world.waiting.values().any(|other| *other == shape));
                    }
                }
                Step::StartEnds { which, well } => {
                    let Some(item) = nth(&world.starting, which) else { continue };
                    let shape = world.starting.remove(&item).expect("chosen from it");
                    if !well {
                        pool.failed(item, now);
                    } else if pool.started(item) {
                        world.waiting.insert(item, shape);
                    }
                }
                Step::Dies(which) => {
                    let Some(item) = nth(&world.waiting, which) else { continue };
                    world.waiting.remove(&item);
                    pool.lost(item, now);
                }
                Step::Pass(seconds) => now += s(seconds),
                Step::Total(total) => pool.set_limits(limits(total)),
                Step::Hold => {
                    holds += 1;
                    pool.hold();
                }
                Step::Release if holds > 0 => {
                    holds -= 1;
                    pool.release();
                }
                Step::Release => {}
            }
            world.carry_out(pool.plan(now), pool.limits())?;
            prop_assert_eq!(
                pool.waiting().collect::<BTreeSet<_>>(),
                world.waiting.keys().copied().collect::<BTreeSet<_>>()
            );
        }

        // Left alone, with starts that succeed.
        for (item, shape) in std::mem::take(&mut world.starting) {
            if pool.started(item) {
                world.waiting.insert(item, shape);
            }
        }
        let first = pool.counts().last().map(|(shape, _)| *shape);
        pool.set_limits(Limits { idle_after: s(100_000), ..limits(5) });
        now += RETRY_MAX;
        // Those who hold it may go on: it must not matter.
        settle(&mut pool, now);
        now += HOLD_MAX;
        settle(&mut pool, now);
        let counts = pool.counts();
        let total: usize = counts.iter().map(|(_, c)| c.waiting).sum();
        let wanted: usize = counts.iter().map(|(_, c)| c.target).sum();
        prop_assert_eq!(total, wanted.min(5));
        if let Some(first) = first {
            let newest = counts.iter().find(|(shape, _)| *shape == first);
            prop_assert!(newest.is_none_or(|(_, c)| c.waiting == c.target.min(5)), "newest first");
        }
        for (_, c) in counts {
            prop_assert!(c.waiting <= c.target);
        }
    }
}
