//! Inputs without coverage: seeds, mutated at random, the same for the same number.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::Target;

/// Longest input that is tried, in bytes.
const INPUT_BYTES_MAX: usize = 4096;

/// Runs a target for `limit`: on its seeds, then on mutations of them that follow from `seed`.
/// Returns the number of mutations.
///
/// # Errors
/// The first input on which the target panics.
pub fn run(target: &Target, limit: Duration, seed: u64) -> Result<u64, Vec<u8>> {
    let seeds = (target.seeds)();
    let mut random = Random(seed.wrapping_mul(2).wrapping_add(1));
    let begin = Instant::now();
    let mut inputs = 0;
    for input in &seeds {
        try_one(target, input)?;
    }
    while begin.elapsed() < limit {
        // Reading the clock each time would take longer than most inputs do.
        for _ in 0..100 {
            try_one(target, &mutate(&seeds, &mut random))?;
            inputs += 1;
        }
    }
    Ok(inputs)
}

fn try_one(target: &Target, input: &[u8]) -> Result<(), Vec<u8>> {
    catch_unwind(AssertUnwindSafe(|| (target.run)(input))).map_err(|_| input.to_vec())
}

/// splitmix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `n`, which must not be 0.
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// A seed with a few changes; now and then bytes out of nothing.
fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    if random.below(50) == 0 {
        return (0..random.below(200)).map(|_| random.byte()).collect();
    }
    let mut input = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        match random.below(7) {
            0 => input.truncate(at),
            1 => input.insert(at, random.byte()),
            2 => input.extend_from_slice(&seeds[random.below(seeds.len())]),
            3 if at < input.len() => drop(input.remove(at)),
            4 if at < input.len() => input[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            5 if at < input.len() => input[at] = random.byte(),
            _ if at < input.len() => input[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}
