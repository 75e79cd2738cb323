//! How long the steps take, printed; `cargo test -p vmfork-qemu --test latency -- --ignored
//! --nocapture`.

mod support;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use support::{Bare, Counter, SOON, memfd, millis, spread};
use vmfork_qemu::Accel;
use vmfork_qemu::qmp::reopen_from_start;

const ROUNDS: usize = 40;

/// Rounds of stop, save, cont on one parent, and of start, load, cont on fresh clones.
async fn measure(accel: Accel) {
    let Some(bare) = Bare::new(64 << 20, accel).await else { return };
    eprintln!("QEMU {} {accel}, as {:?}", bare.binary.version, support::unprivileged());
    let parent = bare.start(true).await;
    let mut counter = Counter::new(&parent);
    assert!(counter.next().is_some(), "the guest counts");

    let [mut stop, mut save, mut cont, mut pause] = [const { Vec::new() }; 4];
    let mut state = memfd();
    for _ in 0..ROUNDS {
        state = memfd();
        let prepared = parent.qmp.prepare_state_fd(state.as_fd()).await.expect("getfd");
        let began = Instant::now();
        parent.qmp.stop().await.expect("stop");
        stop.push(millis(began));
        let step = Instant::now();
        parent.qmp.migrate(prepared, SOON).await.expect("saved");
        save.push(millis(step));
        let step = Instant::now();
        parent.qmp.cont().await.expect("cont");
        cont.push(millis(step));
        pause.push(millis(began));
        counter.forget();
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let size = rustix::fs::fstat(&state).expect("open").st_size;
    // The RAM is shared: what the clones begin with has to be of its last instant.
    parent.qmp.stop().await.expect("stop");
    state = memfd();
    parent.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    let steps = [("stop", stop), ("save", save), ("cont", cont), ("pause", pause)];
    for (name, samples) in steps {
        eprintln!("  {name:8} {}", spread(samples));
    }
    eprintln!("  state    {size} bytes");

    let [mut start, mut bind, mut load, mut run] = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS / 2 {
        let began = Instant::now();
        let clone = bare.start(false).await;
        start.push(millis(began));
        let began = Instant::now();
        clone.qmp.bind_files(&bare.drives).await.expect("bound");
        bind.push(millis(began));
        let file = reopen_from_start(&state).expect("open");
        let began = Instant::now();
        clone.qmp.load_state(file.as_fd(), SOON).await.expect("loaded");
        load.push(millis(began));
        let began = Instant::now();
        clone.qmp.cont().await.expect("cont");
        run.push(millis(began));
        // One after the other: they share their RAM, and go on where the last one was stopped.
        assert!(Counter::new(&clone).next().is_some(), "it runs");
        clone.qmp.stop().await.expect("stop");
        state = memfd();
        clone.qmp.save_state(state.as_fd(), SOON).await.expect("saved");
    }
    for (name, samples) in [("start", start), ("bind", bind), ("load", load), ("cont", run)] {
        eprintln!("  {name:8} {}", spread(samples));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn steps_under_tcg() {
    measure(Accel::Tcg).await;
}

/// Starting must not grow with the daemon's memory, as a plain fork would: 28 ms at 512 MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn what_starting_costs_the_daemon() {
    let Some(bare) = Bare::new(64 << 20, Accel::Tcg).await else { return };
    // As a daemon with 512 MiB of its own memory.
    let ballast = vec![1_u8; 512 << 20];
    let mut start = Vec::new();
    for _ in 0..10 {
        let began = Instant::now();
        drop(bare.start(false).await);
        start.push(millis(began));
    }
    eprintln!("start beside {} MiB: {}", ballast.len() >> 20, spread(start));
}
