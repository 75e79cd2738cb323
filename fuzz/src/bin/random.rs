//! Fuzzing without nightly, libFuzzer or coverage: seeds, mutated at random, the same every time.
//!
//! ```text
//! random run TARGET SECONDS [SEED]    mutate seeds; exit 1 at the first failure, input kept
//! random replay TARGET FILE...        run inputs that were kept
//! random seeds DIR                    write each target's seeds to DIR/TARGET/
//! random targets                      their names
//! ```

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use vmfork_fuzz::{TARGETS, Target};

/// Longest input that is tried, in bytes.
const INPUT_BYTES_MAX: usize = 4096;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["run", target, seconds] => run(target, seconds, "1"),
        ["run", target, seconds, seed] => run(target, seconds, seed),
        ["replay", target, files @ ..] => replay(target, files),
        ["seeds", dir] => write_seeds(Path::new(dir)),
        ["targets"] => {
            TARGETS.iter().for_each(|target| println!("{}", target.name));
            Ok(())
        }
        _ => {
            eprintln!(
                "usage: random run TARGET SECONDS [SEED] | replay TARGET FILE... | seeds DIR | targets"
            );
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn find(name: &str) -> Result<&'static Target, String> {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.ok_or_else(|| format!("no target named `{name}`; `random targets` lists them"))
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

fn run(name: &str, seconds: &str, seed: &str) -> Result<(), String> {
    let target = find(name)?;
    let seeds = (target.seeds)();
    let mut random = Random(number(seed)?.wrapping_mul(2).wrapping_add(1));
    let (begin, limit) = (Instant::now(), Duration::from_secs(number(seconds)?));
    let mut inputs = 0u64;
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
    eprintln!("{name}: {inputs} inputs, no failure");
    Ok(())
}

fn try_one(target: &Target, input: &[u8]) -> Result<(), String> {
    if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_ok() {
        return Ok(());
    }
    let folder = Path::new("artifacts").join(target.name);
    let file = folder.join("random-failure");
    let kept = fs::create_dir_all(&folder).and_then(|()| fs::write(&file, input));
    Err(match kept {
        Ok(()) => format!("{} failed; the input is in {}", target.name, file.display()),
        Err(error) => format!("{} failed on {input:x?} (not kept: {error})", target.name),
    })
}

fn replay(name: &str, files: &[&str]) -> Result<(), String> {
    let target = find(name)?;
    for file in files {
        let input = fs::read(file).map_err(|error| format!("read {file}: {error}"))?;
        (target.run)(&input);
        eprintln!("{name}: {file} passes");
    }
    Ok(())
}

fn write_seeds(dir: &Path) -> Result<(), String> {
    for target in &TARGETS {
        let folder = dir.join(target.name);
        fs::create_dir_all(&folder).map_err(|e| format!("make {}: {e}", folder.display()))?;
        for (i, seed) in (target.seeds)().iter().enumerate() {
            let file = folder.join(format!("seed-{i}"));
            fs::write(&file, seed).map_err(|e| format!("write {}: {e}", file.display()))?;
        }
    }
    Ok(())
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
