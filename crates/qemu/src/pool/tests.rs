//! The driver with things that are no QEMUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::state::HOLD_MAX;
use super::{Limits, Origin, Pool, Pooled, Starting};

#[derive(Debug, Default)]
struct World {
    alive: AtomicUsize,
    started: AtomicUsize,
    broken: AtomicBool,
}

#[derive(Debug)]
struct Thing {
    world: Arc<World>,
    shape: u8,
    dead: Arc<AtomicBool>,
}

impl Drop for Thing {
    fn drop(&mut self) {
        self.world.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Pooled for Thing {
    fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::SeqCst)
    }
}

fn pool(world: &Arc<World>, total_max: usize) -> Pool<u8, Thing, &'static str> {
    let world = world.clone();
    let limits = Limits { total_max, ..Limits::default() };
    Pool::new(limits, move |shape| -> Starting<Thing, &'static str> {
        let world = world.clone();
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            if world.broken.load(Ordering::SeqCst) {
                return Err("broken");
            }
            world.alive.fetch_add(1, Ordering::SeqCst);
            world.started.fetch_add(1, Ordering::SeqCst);
            Ok(Thing { world, shape, dead: Arc::default() })
        })
    })
}

async fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("waited too long until {what}");
}

fn waiting(pool: &Pool<u8, Thing, &'static str>) -> usize {
    pool.counts().iter().map(|(_, counts)| counts.waiting).sum()
}

#[tokio::test]
async fn it_fills_hands_out_refills_and_leaves_nothing() {
    let world = Arc::new(World::default());
    let pool = pool(&world, 4);
    assert!(pool.claim(&1).is_none());
    pool.want(&1, 3);
    until("three wait", || waiting(&pool) == 3).await;
    let one = pool.claim(&1).expect("three wait");
    assert_eq!(one.shape, 1);
    until("it is replaced", || waiting(&pool) == 3).await;
    assert_eq!(world.alive.load(Ordering::SeqCst), 4);
    drop((one, pool));
    until("all are gone", || world.alive.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn while_it_is_held_nothing_is_started_but_not_for_ever() {
    let world = Arc::new(World::default());
    let pool = pool(&world, 4);
    pool.want(&1, 2);
    until("two wait", || waiting(&pool) == 2).await;
    let hold = pool.hold();
    let _one = pool.claim(&1).expect("two wait");
    tokio::time::sleep(HOLD_MAX / 2).await;
    assert_eq!(waiting(&pool), 1);
    drop(hold);
    until("it is replaced", || waiting(&pool) == 2).await;
    // Holds that follow each other without a gap.
    let mut hold = pool.hold();
    let _two = pool.claim(&1).expect("two wait");
    for _ in 0..5 {
        tokio::time::sleep(HOLD_MAX / 4).await;
        hold = pool.hold();
    }
    until("it is replaced all the same", || waiting(&pool) == 2).await;
    drop(hold);
}

#[tokio::test]
async fn without_a_pool_one_is_started_by_the_same_path() {
    let world = Arc::new(World::default());
    let pool = pool(&world, 0);
    pool.want(&1, 3);
    let (_one, origin) = pool.take(&1).await.expect("started");
    assert_eq!(origin, Origin::StartedNow);
    assert_eq!(world.started.load(Ordering::SeqCst), 1, "nothing besides");
    world.broken.store(true, Ordering::SeqCst);
    assert_eq!(pool.take(&1).await.expect_err("broken"), "broken");
}

#[tokio::test]
async fn the_dead_are_not_handed_out() {
    let world = Arc::new(World::default());
    let pool = pool(&world, 2);
    pool.want(&1, 2);
    until("two wait", || waiting(&pool) == 2).await;
    for item in pool.shared.inner().items.values() {
        item.dead.store(true, Ordering::SeqCst);
    }
    assert!(pool.claim(&1).is_none());
    until("they are replaced", || waiting(&pool) == 2).await;
    assert_eq!(pool.take(&1).await.expect("alive").1, Origin::Pooled);
}

#[tokio::test]
async fn the_dead_are_noticed_unclaimed() {
    let world = Arc::new(World::default());
    let pool = pool(&world, 1);
    pool.want(&1, 1);
    until("one waits", || waiting(&pool) == 1).await;
    for item in pool.shared.inner().items.values() {
        item.dead.store(true, Ordering::SeqCst);
    }
    until("another was started", || world.started.load(Ordering::SeqCst) == 2).await;
}

#[tokio::test]
async fn a_starter_that_panics_is_a_start_that_failed() {
    let limits = Limits { total_max: 1, ..Limits::default() };
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = calls.clone();
    let world = Arc::new(World::default());
    let pool: Pool<u8, Thing, &'static str> = Pool::new(limits, move |shape| {
        let (world, first) = (world.clone(), seen.fetch_add(1, Ordering::SeqCst) == 0);
        Box::pin(async move {
            assert!(!first, "this panic is part of the test");
            world.alive.fetch_add(1, Ordering::SeqCst);
            Ok(Thing { world, shape, dead: Arc::default() })
        })
    });
    pool.want(&1, 1);
    until("it was tried again", || waiting(&pool) == 1).await;
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}
