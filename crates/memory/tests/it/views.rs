//! The shim, the keeper and the engine against a model, on fake VMs: what each VM reads is what a
//! `Vec` of pages says, whatever was frozen, cloned, dropped and drained in between.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{FakeVm, PAGE_BYTES, clone_of, freeze, needs_userfaultfd};
use vmfork_engine::{Engine, ViewCounters};
use vmfork_tap_proto::Role;

#[test]
fn a_clone_reads_what_the_parent_had_at_the_freeze() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4096, Role::Boot);
    parent.ask("fill 100 1000 7");
    let before = parent.sums(0, 4096);
    let snapshot = freeze(&mut parent, 16);
    parent.ask("fill 0 2000 8");
    let mut child = clone_of(&snapshot);
    assert_eq!(child.sums(0, 4096), before);
    child.ask("fill 500 10 9");
    let mut sibling = clone_of(&snapshot);
    assert_eq!(sibling.sums(0, 4096), before);
    assert!(snapshot.wait_drained(Duration::from_secs(10)));
    let mut late = clone_of(&snapshot);
    assert_eq!(late.sums(0, 4096), before);
}

#[test]
fn a_page_is_fetched_once_however_many_read_it() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4096, Role::Boot);
    parent.ask("fill 0 4096 3");
    let snapshot = freeze(&mut parent, 1);
    let mut clones: Vec<_> = (0..3).map(|_| clone_of(&snapshot)).collect();
    for clone in &mut clones {
        clone.send("threads 0 4096 4");
    }
    for clone in &mut clones {
        assert_eq!(clone.receive(), "ok");
    }
    let counters = &snapshot.image().counters();
    // The engine counts a page after it is in the cache, where all clones read it.
    assert!(snapshot.wait_drained(Duration::from_secs(10)));
    let filled = counters.demand_bytes.get() + counters.drained_bytes.get();
    assert_eq!(filled, 4096 * PAGE_BYTES);
}

#[test]
fn what_was_given_back_reads_as_zero_in_the_vm_and_in_its_clones() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(4096, Role::Boot);
    parent.ask("fill 0 4096 3");
    let first = freeze(&mut parent, 16);
    assert_eq!(parent.ask("drop 512 1024"), "ok");
    assert_eq!(parent.ask("drop 2050 10"), "ok");
    let sums = parent.sums(0, 4096);
    assert!(sums[512..1536].iter().all(|sum| *sum == 0), "zeros after a drop");
    assert!(sums[2050..2060].iter().all(|sum| *sum == 0), "zeros after a small drop");
    assert!(sums[..512].iter().all(|sum| *sum != 0));
    let second = freeze(&mut parent, 16);
    assert_eq!(clone_of(&second).sums(0, 4096), sums);
    let mut elder = clone_of(&first);
    assert!(elder.sums(0, 4096).iter().all(|sum| *sum != 0), "the drop was the parent's alone");
}

#[test]
fn a_read_into_missing_pages_fetches_nothing_and_survives_mapping() {
    needs_userfaultfd!();
    let file = std::env::temp_dir().join(format!("vmfork-test-{}", std::process::id()));
    std::fs::write(&file, vec![0x5a; 512 * 4096]).expect("write");
    let mut parent = FakeVm::start(8192, Role::Boot);
    parent.ask("fill 0 8192 3");
    let first = freeze(&mut parent, 16);
    assert!(first.wait_drained(Duration::from_secs(10)));
    let second = freeze(&mut parent, 16);
    assert!(second.wait_sealed(Duration::from_secs(10)));
    // Pages in the middle of a block that the engine would map from the first image's cache.
    let faulted = faults(&mut parent);
    assert_eq!(parent.ask(&format!("pread 1030 100 {}", file.display())), "ok");
    assert_eq!(faults(&mut parent), faulted);
    let counters = second.image().counters();
    assert_eq!(counters.demand_bytes.get(), 0);
    let sums = parent.sums(0, 8192);
    assert!(
        sums[1030..1130].windows(2).all(|pair| pair[0] == pair[1]),
        "the file's bytes are there"
    );
    assert_ne!(sums[1029], sums[1030]);
    let third = freeze(&mut parent, 16);
    assert_eq!(clone_of(&third).sums(0, 8192), sums);
    std::fs::remove_file(&file).expect("remove");
}

/// Faults that the engine has answered, whether it had to fetch or not.
fn faults(vm: &mut FakeVm) -> u64 {
    let counters = vm.memory().counters();
    let ViewCounters { zero, fetch, present, mapped } = &**counters;
    [zero, fetch, present, mapped].into_iter().map(|counter| counter.get()).sum()
}

/// A parent whose pages are missing, and the image that they are in.
fn with_missing_pages() -> (FakeVm, Arc<Engine>) {
    let mut parent = FakeVm::start(8192, Role::Boot);
    parent.ask("fill 0 8192 3");
    let first = freeze(&mut parent, 16);
    assert!(first.wait_drained(Duration::from_secs(10)));
    let second = freeze(&mut parent, 16);
    assert!(second.wait_sealed(Duration::from_secs(10)));
    (parent, second)
}

/// Whatever the pieces in which bytes come: no page is fetched to be overwritten.
#[test]
fn a_receive_into_missing_pages_fetches_nothing() {
    needs_userfaultfd!();
    for piece in [100, PAGE_BYTES, 37_001, 1 << 20] {
        let (mut parent, image) = with_missing_pages();
        let faulted = faults(&mut parent);
        // More parts than one call takes, which end in the middle of blocks.
        let bytes = 2000 * PAGE_BYTES;
        assert_eq!(parent.ask(&format!("recv 1030 2000 {bytes} {piece}")), "ok");
        assert_eq!(image.image().counters().demand_bytes.get(), 0, "by {piece} bytes");
        assert_eq!(faults(&mut parent), faulted, "by {piece} bytes");
        let sums = parent.sums(0, 8192);
        let received = &sums[1030..3030];
        assert!(received.windows(2).all(|pair| pair[0] == pair[1]), "the bytes are there");
        assert_ne!(sums[1029], sums[1030]);
        assert_ne!(sums[3030], sums[1030]);
        let third = freeze(&mut parent, 16);
        assert_eq!(clone_of(&third).sums(0, 8192), sums);
    }
}

/// A socket that has less than was asked for changes no page beyond.
#[test]
fn a_short_receive_leaves_the_other_pages_as_they_are() {
    needs_userfaultfd!();
    let (mut parent, image) = with_missing_pages();
    let whole = clone_of(&image).sums(0, 8192);
    let bytes = 20 * PAGE_BYTES + 100;
    assert_eq!(parent.ask(&format!("recv 1030 600 {bytes} 5000")), "ok");
    let sums = parent.sums(0, 8192);
    assert_eq!(sums[..1030], whole[..1030]);
    assert_eq!(sums[1051..], whole[1051..], "not reached");
    assert!(sums[1030..1051].iter().zip(&whole[1030..]).all(|(now, then)| now != then));
}

/// A datagram is received as a whole.
#[test]
fn a_datagram_is_not_cut() {
    needs_userfaultfd!();
    let (mut parent, _image) = with_missing_pages();
    let bytes = 20 * PAGE_BYTES;
    assert_eq!(parent.ask("recv-datagram 1030 20"), format!("{bytes} of {bytes}"));
    let sums = parent.sums(1030, 21);
    assert!(sums[..20].windows(2).all(|pair| pair[0] == pair[1]), "the bytes are there");
    assert_ne!(sums[20], sums[19]);
}

#[test]
fn generations_share_what_was_not_written() {
    needs_userfaultfd!();
    let mut parent = FakeVm::start(16384, Role::Boot);
    parent.ask("fill 0 8192 3");
    let mut snapshots = vec![freeze(&mut parent, 16)];
    for round in 0..5u64 {
        assert!(snapshots.last().expect("some").wait_drained(Duration::from_secs(10)));
        parent.ask(&format!("fill {} 64 {}", 1000 + round * 100, 50 + round));
        let expected = parent.sums(0, 16384);
        let next = freeze(&mut parent, 16);
        assert_eq!(clone_of(&next).sums(0, 16384), expected, "round {round}");
        assert_eq!(parent.sums(0, 16384), expected, "round {round}");
        snapshots.push(next);
    }
    let first = snapshots[0].image().cache().resident_bytes();
    let rest: u64 = snapshots[1..].iter().map(|s| s.image().cache().resident_bytes()).sum();
    assert_eq!(first, 8192 * 4096);
    // 320 pages were written, in 3 blocks of which all was read; a copy of the whole each time
    // would be 160 MiB.
    assert!(rest < 24 << 20, "later generations take {rest} bytes");
}

#[test]
fn random_families_agree_with_a_model() {
    needs_userfaultfd!();
    let seed: u64 =
        std::env::var("VMFORK_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .expect("after 1970")
                .subsec_nanos()
                .into()
        });
    eprintln!("VMFORK_TEST_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move |below: u64| -> u64 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    const PAGES: u64 = 4096;
    let mut freed_bytes = 0;
    for unit in [1, 16, 512] {
        let mut vms: Vec<(FakeVm, Vec<u64>)> = Vec::new();
        let mut root = FakeVm::start(PAGES, Role::Boot);
        root.ask(&format!("fill 300 2000 {}", random(1000)));
        let model = root.sums(0, PAGES);
        vms.push((root, model));
        for step in 0..60 {
            let which = usize::try_from(random(vms.len() as u64)).expect("small");
            let (vm, model) = &mut vms[which];
            let first = random(PAGES);
            let count = 1 + random((PAGES - first).min(900));
            let range = usize::try_from(first).expect("small")
                ..usize::try_from(first + count).expect("small");
            match random(8) {
                0 | 1 => {
                    vm.ask(&format!("fill {first} {count} {}", step + 1));
                    let sums = vm.sums(first, count);
                    model[range].copy_from_slice(&sums);
                }
                2 => {
                    vm.ask(&format!("drop {first} {count}"));
                    model[range].fill(0);
                }
                3 => {
                    let sums = vm.sums(first, count);
                    assert_eq!(sums, model[range], "seed {seed} unit {unit} step {step}");
                }
                4 | 5 => {
                    let snapshot = freeze(vm, unit);
                    if random(2) == 0 {
                        assert!(snapshot.wait_drained(Duration::from_secs(20)), "drained");
                    }
                    let model = model.clone();
                    if vms.len() < 6 {
                        let child = clone_of(&snapshot);
                        vms.push((child, model));
                    }
                }
                _ if vms.len() > 3 => {
                    vms.swap_remove(which);
                }
                _ => {
                    let engine = |(vm, _): &mut (FakeVm, _)| vm.memory().engine().cloned();
                    let live: Vec<_> = vms.iter_mut().filter_map(engine).collect();
                    freed_bytes += vmfork_engine::collect_garbage(&live);
                }
            }
        }
        for (vm, model) in &mut vms {
            assert_eq!(&vm.sums(0, PAGES), model, "seed {seed} unit {unit} at the end");
        }
    }
    eprintln!("garbage: {freed_bytes} bytes");
}
