//! A bug on purpose: a fuzzer that does not find it finds nothing. `smoke.sh` runs it first.

/// # Panics
/// On `BUG!`, two bytes away from the seed.
pub fn run(data: &[u8]) {
    assert!(!data.starts_with(b"BUG!"), "planted");
}

pub fn seeds() -> Vec<Vec<u8>> {
    vec![b"bUG?".to_vec()]
}
