//! Fuzzing without nightly, libFuzzer or coverage ([`vmfork_fuzz::random`]).
//!
//! ```text
//! random run TARGET SECONDS [SEED]    mutate seeds; exit 1 at the first failure, input kept
//! random replay TARGET FILE...        run inputs that were kept
//! random seeds DIR                    write each target's seeds to DIR/TARGET/
//! random targets                      their names
//! ```

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use vmfork_fuzz::{TARGETS, Target};

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
    let limit = Duration::from_secs(number(seconds)?);
    match vmfork_fuzz::random::run(target, limit, number(seed)?) {
        Ok(inputs) => {
            eprintln!("{name}: {inputs} inputs, no failure");
            Ok(())
        }
        Err(input) => Err(keep(name, &input)),
    }
}

/// Keeps an input that failed; returns what to tell.
fn keep(name: &str, input: &[u8]) -> String {
    let folder = Path::new("artifacts").join(name);
    let file = folder.join("random-failure");
    match fs::create_dir_all(&folder).and_then(|()| fs::write(&file, input)) {
        Ok(()) => format!("{name} failed; the input is in {}", file.display()),
        Err(error) => format!("{name} failed on {input:x?} (not kept: {error})"),
    }
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
