//! What breaks, and what the others see then: a keeper, a QEMU, an engine, a freeze.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    Events, FakeVm, await_event, clone_of, engine, freeze, kill, needs_userfaultfd,
};
use vmfork_engine::{Engine, EngineEvent};
use vmfork_tap_proto::Role;

/// Large enough that the drain takes a while.
const PAGES: u64 = 65536;
const SECONDS: Duration = Duration::from_secs(20);

/// A VM that was frozen, and what its clones must read; `kill` has come before the end of the
/// drain.
fn frozen_and(kill: impl Fn(&mut FakeVm)) -> (FakeVm, Vec<u64>, Arc<Engine>, Events) {
    for _ in 0..20 {
        let mut parent = FakeVm::start(PAGES, Role::Boot);
        parent.ask(&format!("fill 0 {PAGES} 3"));
        let sums = parent.sums(PAGES - 1000, 1000);
        let (engine, events) = engine(&mut parent, 16);
        parent.memory().freeze(&engine).expect("freeze");
        assert!(engine.wait_sealed(SECONDS));
        kill(&mut parent);
        if !engine.is_drained() {
            return (parent, sums, engine, events);
        }
    }
    panic!("20 times the drain of 256 MiB was quicker than a signal");
}

fn is_lost(event: &EngineEvent) -> Option<String> {
    match event {
        EngineEvent::ViewLost { reason, .. } => Some(reason.clone()),
        _ => None,
    }
}

#[test]
fn the_keeper_outlives_its_vm_until_all_is_drained() {
    needs_userfaultfd!();
    let (parent, sums, engine, events) = frozen_and(|_| ());
    let mut child = clone_of(&engine);
    drop(parent); // QEMU, and with the last handle the keeper
    assert_eq!(child.sums(PAGES - 1000, 1000), sums);
    assert!(engine.wait_drained(SECONDS), "the frozen range keeps the keeper alive");
    assert!(child.sums(0, PAGES).iter().all(|sum| *sum != 0));
    assert!(events.lock().expect("lock").iter().all(|event| is_lost(event).is_none()));
}

#[test]
fn without_the_keeper_pages_are_read_through_qemu() {
    needs_userfaultfd!();
    let (_parent, sums, engine, events) = frozen_and(|vm| kill(vm.memory().keeper_pid()));
    let mut child = clone_of(&engine);
    assert_eq!(child.sums(PAGES - 1000, 1000), sums);
    assert!(engine.wait_drained(SECONDS));
    assert!(child.sums(0, PAGES).iter().all(|sum| *sum != 0));
    assert!(events.lock().expect("lock").iter().all(|event| is_lost(event).is_none()));
}

#[test]
fn without_both_a_clone_is_lost_by_name_and_what_was_drained_stays() {
    needs_userfaultfd!();
    let (_parent, _, engine, events) = frozen_and(|vm| {
        let (keeper, qemu) = (vm.memory().keeper_pid(), vm.pid());
        kill(keeper);
        kill(qemu);
    });
    let mut child = clone_of(&engine);
    let presence = engine.image().cache().presence();
    let last = vmfork_image::PageIdx(PAGES - 1);
    assert!(!presence.is_present(last));
    child.send(&format!("sum {} 1", PAGES - 1));
    let reason = await_event(&events, is_lost);
    let image = engine.image().id();
    assert!(
        reason.starts_with(&format!("page {} of image {image}: frozen at 0x", last)),
        "{reason}"
    );
    assert!(!engine.wait_drained(Duration::from_millis(50)));
    assert!(!engine.has_ended(), "the engine serves what there is");
    // A view is lost only when it asks for what is lost.
    let drained = presence.run(vmfork_image::PageRange::first(PAGES));
    if drained.1 {
        let mut other = clone_of(&engine);
        let count = drained.0.len().min(100);
        assert_ne!(other.sums(0, count)[0], 0);
    }
}

#[test]
fn who_attaches_learns_whether_the_keeper_is_gone_or_refuses() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(1024, Role::Boot);
    let engine = freeze(&mut parent, 16);
    let mut other = FakeVm::start(2048, Role::Wait);
    let error = other.memory().attach(&engine).expect_err("of another size");
    assert!(!error.is_lost(), "{error}");
    let mut waiting = FakeVm::start(1024, Role::Wait);
    kill(waiting.memory().keeper_pid());
    let error = waiting.memory().attach(&engine).expect_err("no keeper");
    assert!(error.is_lost(), "{error}");
}

#[test]
fn a_table_that_is_made_while_its_vm_dies_is_right_or_none() {
    needs_userfaultfd!();
    for round in 0..6 {
        let mut parent = FakeVm::start(PAGES, Role::Boot);
        parent.ask(&format!("fill 0 {PAGES} 3"));
        let (engine, _) = engine(&mut parent, 16);
        parent.memory().freeze(&engine).expect("freeze");
        let (keeper, qemu) = (parent.memory().keeper_pid(), parent.pid());
        std::thread::park_timeout(Duration::from_millis(4 * round));
        kill(keeper);
        kill(qemu);
        // Tearing 256 MiB down takes a while, in which there is less and less to find.
        if engine.wait_sealed(Duration::from_millis(500)) {
            let found = engine.image().counters().frozen_pages.get();
            assert_eq!(found, PAGES, "round {round}: pages are taken for zero");
        }
    }
}

#[test]
fn a_userfaultfd_that_was_tampered_with_costs_its_own_vm_alone() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(1024, Role::Boot);
    // Zeros always fault, however far the drain has come.
    parent.ask("fill 0 1023 3");
    let (engine, events) = engine(&mut parent, 16);
    parent.memory().freeze(&engine).expect("freeze");
    let (mut bad, mut good) = (clone_of(&engine), clone_of(&engine));
    assert_eq!(bad.ask("block-userfaultfd"), "ok");
    bad.send("sum 1023 1");
    let reason = await_event(&events, is_lost);
    assert!(reason.contains("tampered"), "{reason}");
    assert!(good.sums(0, 1023).iter().all(|sum| *sum != 0));
    drop(bad);
    assert!(parent.sums(0, 1023).iter().all(|sum| *sum != 0));
}

#[test]
fn a_dead_engine_costs_its_own_views_and_no_others() {
    needs_userfaultfd!();
    let (mut parent, sums, first, events) = frozen_and(|_| ());
    let mut child = clone_of(&first);
    child.ask("fill 5 10 9");
    let (second, other_events) = engine(&mut child, 16);
    child.memory().freeze(&second).expect("freeze");
    let mut grandchild = clone_of(&second);
    first.inject_panic();
    let reason = await_event(&events, |event| match event {
        EngineEvent::Died { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert_eq!(reason, "injected");
    assert!(!first.is_drained());
    assert!(first.has_ended());
    assert!(!first.wait_drained(SECONDS), "returns at once");
    // Pages that the dead engine never drained are still where the freeze left them.
    assert_eq!(grandchild.sums(PAGES - 1000, 1000), sums);
    assert!(grandchild.sums(0, PAGES).iter().all(|sum| *sum != 0));
    assert!(other_events.lock().expect("lock").iter().all(|event| is_lost(event).is_none()));
    // The dead engine's own view can't be frozen any more, and says so at once.
    let next = Engine::prepare(
        vmfork_image::ImageId::new(1 << 40).expect("not 0"),
        PAGES,
        None,
        &vmfork_engine::EngineOptions::default(),
        Arc::new(|_| ()),
    )
    .expect("engine");
    let error = parent.memory().freeze(&Arc::new(next)).expect_err("no engine");
    assert!(error.is_fatal());
    assert_eq!(
        error.to_string(),
        format!("image {}: its page engine has ended", first.image().id())
    );
}

#[test]
fn a_freeze_that_fails_half_way_leaves_ram_as_it_was() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(8192, Role::Boot);
    parent.ask("fill 0 6000 3");
    let before = parent.sums(0, 8192);
    // Of a VM that booted.
    let (failing, _) = engine(&mut parent, 16);
    parent.memory().inject_freeze_failure();
    let error = parent.memory().freeze(&failing).expect_err("an fd that can't be mapped");
    assert!(!error.is_fatal(), "{error}");
    assert_eq!(parent.sums(0, 8192), before);
    // Of a view, with parts of other caches, zeros, and pages that were never touched.
    let first = freeze(&mut parent, 16);
    assert!(first.wait_drained(SECONDS));
    parent.ask("fill 3000 5 4");
    let _second = freeze(&mut parent, 16);
    parent.sums(0, 1);
    parent.sums(8000, 1);
    parent.ask("fill 1200 30 5");
    let (failing, _) = engine(&mut parent, 16);
    parent.memory().inject_freeze_failure();
    let error = parent.memory().freeze(&failing).expect_err("an fd that can't be mapped");
    assert!(!error.is_fatal(), "{error}");
    let mut expected = before;
    expected[3000..3005].copy_from_slice(&parent.sums(3000, 5));
    expected[1200..1230].copy_from_slice(&parent.sums(1200, 30));
    assert_ne!(expected[1200], 0);
    assert_eq!(parent.sums(0, 8192), expected);
    // And the next attempt is as if nothing had been.
    let third = freeze(&mut parent, 16);
    assert_eq!(clone_of(&third).sums(0, 8192), expected);
    assert_eq!(parent.sums(0, 8192), expected);
}

#[test]
fn an_image_of_another_size_is_refused_before_anything_moves() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4096, Role::Boot);
    parent.ask("fill 0 100 3");
    let before = parent.sums(0, 4096);
    let mut larger = FakeVm::start(8192, Role::Boot);
    let (engine, _) = engine(&mut larger, 16);
    let error = parent.memory().freeze(&engine).expect_err("another size");
    assert!(!error.is_fatal());
    assert!(error.to_string().ends_with("has 8192 pages, the VM 4096"), "{error}");
    assert_eq!(parent.sums(0, 4096), before);
}
