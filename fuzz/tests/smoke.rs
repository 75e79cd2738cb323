//! Every target for a moment: it runs, and what was found once stays mended.
//!
//! `VMFORK_FUZZ_SECONDS` gives each target more time, `VMFORK_TEST_SEED` other inputs.

use std::sync::Mutex;
use std::time::Duration;

use vmfork_fuzz::{TARGETS, Target, random};

/// Targets that run at the same time.
const THREADS: usize = 2;
const SECONDS_DEFAULT: u64 = 2;
/// The planted bug is found within some thousand inputs, which take less than a second.
const PLANTED: Duration = Duration::from_secs(60);

fn variable(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number"))
    })
}

#[test]
fn a_planted_bug_is_found() {
    let planted = TARGETS.iter().find(|target| target.name == "planted").expect("listed");
    assert!(random::run(planted, PLANTED, 1).is_err(), "the fuzzer finds nothing");
}

#[test]
fn every_target_withstands_mutations_of_its_seeds() {
    let limit = Duration::from_secs(variable("VMFORK_FUZZ_SECONDS", SECONDS_DEFAULT));
    let seed = variable("VMFORK_TEST_SEED", 1);
    let todo: Mutex<Vec<&Target>> =
        Mutex::new(TARGETS.iter().filter(|target| target.name != "planted").collect());
    let failures = Mutex::new(Vec::new());
    let next = || todo.lock().expect("no panic holds it").pop();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(target) = next() {
                    match random::run(target, limit, seed) {
                        Ok(inputs) => assert!(inputs > 0, "{} ran on no input", target.name),
                        Err(input) => {
                            let text =
                                format!("{} with VMFORK_TEST_SEED={seed}: {input:x?}", target.name);
                            failures.lock().expect("no panic holds it").push(text);
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("threads have ended");
    assert!(failures.is_empty(), "failed on these inputs: {failures:#?}");
}
