//! What a clone touches, and when.

use std::collections::BTreeSet;
use std::time::Duration;

use vmfork_image::{PAGES_MAX, PageIdx, PageRange};
use vmfork_policy::transfer::Demanded;
use vmfork_policy::transfer::swarm::UNIT_PAGES;

use crate::model::Playback;
use crate::random::Random;

/// Most lines of a trace that is read: 1 GiB touched page by page, 64 times over.
const LINES_MAX: usize = 1 << 24;

/// Computes for a while, then touches pages, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub compute: Duration,
    pub pages: PageRange,
    /// Writes to them. A page has to come before part of it can be written, so this changes nothing
    /// here.
    pub write: bool,
}

/// Steps, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    steps: Vec<Step>,
}

/// A trace of a real VM, as `python3 -m bench.traces` recorded it. It is of a clone's memory of
/// 1 GiB, or of the image that a VM booted from.
#[derive(Debug, Clone, Copy)]
pub struct Recorded {
    pub name: &'static str,
    text: &'static str,
}

/// Clones: one that hardly does anything, one that starts a program, and one that reads 256 MiB of
/// its parent's (SnowFlock's BLAST, figure 4c). VMs that boot: one that does nothing else, and one
/// that starts a program.
pub const RECORDED: [Recorded; 5] = [
    Recorded { name: "boot", text: include_str!("../traces/boot.trace") },
    Recorded { name: "boot-python", text: include_str!("../traces/boot-python.trace") },
    Recorded { name: "idle", text: include_str!("../traces/idle.trace") },
    Recorded { name: "python", text: include_str!("../traces/python.trace") },
    Recorded { name: "scan", text: include_str!("../traces/scan.trace") },
];

impl Recorded {
    /// # Errors
    /// If an image of `pages` pages is smaller than the VM's memory, where it was touched.
    pub fn trace(&self, pages: u64) -> Result<Trace, TraceError> {
        Trace::parse(self.text, pages)
    }
}

/// A text that is no trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    #[error("line {line}: `{text}` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`")]
    Line { line: usize, text: String },
    #[error(
        "line {line}: {micros} us is earlier than the line before, {before} us; lines are in order of time"
    )]
    Backwards { line: usize, micros: u64, before: u64 },
    #[error("line {line}: page {page} is not in the image, which has {pages}")]
    NoSuchPage { line: usize, page: u64, pages: u64 },
    #[error("more than {LINES_MAX} lines")]
    TooLong,
}

impl Trace {
    /// Reads one touch per line, `micros page[+pages] r|w`:
    /// - microseconds since the start of a VM that did not have to wait for pages;
    /// - the number of the page, or of the first page and the count of pages touched one after the
    ///   other;
    /// - whether they were read or written.
    ///
    /// In order of time. Empty lines and what follows a `#` are left out. Touches of consecutive
    /// pages at one time are one step.
    ///
    /// # Errors
    /// If a line is something else, goes back in time, or names a page that an image of `pages`
    /// pages does not have.
    pub fn parse(text: &str, pages: u64) -> Result<Self, TraceError> {
        let mut steps: Vec<Step> = Vec::new();
        let mut before = 0;
        for (line, whole) in (1..).zip(text.lines()) {
            if line > LINES_MAX {
                return Err(TraceError::TooLong);
            }
            let text = whole.split('#').next().unwrap_or("").trim();
            if text.is_empty() {
                continue;
            }
            let Some((micros, run, write)) = fields(text) else {
                return Err(TraceError::Line { line, text: text.chars().take(80).collect() });
            };
            if micros < before {
                return Err(TraceError::Backwards { line, micros, before });
            }
            let image = PageRange::first(pages.min(PAGES_MAX));
            if let Some(page) = run.pages().find(|page| !image.contains(*page)) {
                return Err(TraceError::NoSuchPage { line, page: page.0, pages });
            }
            match steps.last_mut() {
                Some(last)
                    if micros == before
                        && last.write == write
                        && last.pages.end() == run.start() =>
                {
                    last.pages = PageRange::between(last.pages.start(), run.end());
                }
                _ => {
                    let compute = Duration::from_micros(micros - before);
                    steps.push(Step { compute, pages: run, write });
                }
            }
            before = micros;
        }
        Ok(Self { steps })
    }

    /// All of an image from its first page to its last, with this much computing in all. It is a
    /// database that is in the parent's page cache, and that each clone searches (SnowFlock's
    /// BLAST, figure 4c).
    pub fn database(pages: u64, compute: Duration) -> Self {
        const RUN_PAGES: u64 = 16;
        let runs = pages.div_ceil(RUN_PAGES);
        let each = compute / u32::try_from(runs.max(1)).unwrap_or(u32::MAX);
        let runs = (0..runs).map(|run| {
            PageRange::first(pages).from_page(PageIdx(run * RUN_PAGES)).truncate(RUN_PAGES)
        });
        Self { steps: runs.map(|pages| Step { compute: each, pages, write: false }).collect() }
    }

    /// What a clone touches that runs a program of its parent's. It touches a few zones of the
    /// image, the same for all clones of a `family`, in an order of each clone's own. Of each zone
    /// it touches nearly all (93 % of what was touched before is touched again), and a little that
    /// is no other's. About `touched` pages, with so much computing in all.
    pub fn clone_like(
        pages: u64,
        touched: u64,
        compute: Duration,
        family: u64,
        clone: u64,
    ) -> Self {
        let touched = touched.min(pages);
        let mut family = Random::new(family);
        let mut random =
            Random::new(family.fork().below(u64::MAX) ^ clone.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut runs: Vec<(PageRange, bool)> = Vec::new();
        let mut sum = 0;
        // Zones of 64 KiB to 4 MiB, in runs of up to 32 pages.
        while sum < touched * 93 / 100 {
            let zone_pages = 16 << family.below(7);
            let start = family.below(pages);
            let zone = PageRange::first(pages).from_page(PageIdx(start)).truncate(zone_pages);
            let mut rest = zone;
            while !rest.is_empty() {
                let run = rest.truncate(1 + family.below(32));
                rest = rest.from_page(run.end());
                sum += run.len();
                let write = family.below(4) == 0;
                if random.below(100) < 93 {
                    runs.push((run, write));
                }
            }
        }
        for _ in 0..touched.div_ceil(100) {
            let start = PageIdx(random.below(pages));
            runs.push((
                PageRange::first(pages).from_page(start).truncate(1 + random.below(14)),
                true,
            ));
        }
        // Neighbours in time are neighbours in place, but for every ninth or so.
        let len = runs.len();
        for at in 0..len {
            if random.below(9) == 0 {
                let other = random.index(len);
                runs.swap(at, other);
            }
        }
        let each = compute / u32::try_from(len.max(1)).unwrap_or(u32::MAX);
        Self {
            steps: runs
                .into_iter()
                .map(|(pages, write)| Step { compute: each, pages, write })
                .collect(),
        }
    }

    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// How long it takes if it need not wait for pages.
    pub fn compute(&self) -> Duration {
        self.steps.iter().map(|step| step.compute).sum()
    }

    /// What the parent's host knows of it afterwards, and sends along with the next fork: the units
    /// that were requested, in the order of their first requests.
    pub fn working_set(&self, pages: u64) -> Vec<PageRange> {
        let image = PageRange::first(pages);
        let mut demanded = Demanded::new(pages);
        for step in &self.steps {
            let units = step.pages.start().0 / UNIT_PAGES..step.pages.end().0.div_ceil(UNIT_PAGES);
            let unit = |unit: u64| image.from_page(PageIdx(unit * UNIT_PAGES)).truncate(UNIT_PAGES);
            units.map(unit).for_each(|unit| demanded.record(unit));
        }
        demanded.runs().to_vec()
    }

    /// What it accesses, and when, in aligned windows of `unit_pages`, each when it is touched
    /// first. `bytes` makes bytes of a number of pages.
    pub fn playback(&self, unit_pages: u64, pages: u64, bytes: impl Fn(u64) -> u64) -> Playback {
        let (unit_pages, mut units) = (unit_pages.max(1), BTreeSet::new());
        let step = |step: &Step| {
            let touched =
                step.pages.start().0 / unit_pages..step.pages.end().0.div_ceil(unit_pages);
            let new = touched.filter(|unit| units.insert(*unit));
            let len = |unit: u64| unit_pages.min(pages.saturating_sub(unit * unit_pages));
            (step.compute, bytes(new.map(len).sum()))
        };
        Playback::new(self.steps.iter().map(step).collect())
    }
}

fn fields(text: &str) -> Option<(u64, PageRange, bool)> {
    let mut words = text.split_ascii_whitespace();
    let micros = words.next()?.parse().ok()?;
    let run = words.next()?;
    let (page, pages) = run.split_once('+').unwrap_or((run, "1"));
    let run = PageRange::new(PageIdx(page.parse().ok()?), pages.parse().ok()?).ok()?;
    let write = match words.next()? {
        "r" => false,
        "w" => true,
        _ => return None,
    };
    (words.next().is_none() && !run.is_empty()).then_some((micros, run, write))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    #[test]
    fn a_trace_is_read_and_neighbours_become_one_step() {
        let text =
            "# recorded on a Tuesday\n0 7 r\n0 8 r\n\n1500 9 r # later\n1500 10 w\n1500 3+4 w\n";
        let trace = Trace::parse(text, 11).expect("valid");
        let step = |us, pages, write| Step { compute: Duration::from_micros(us), pages, write };
        assert_eq!(
            trace.steps(),
            [
                step(0, range(7, 2), false),
                step(1500, range(9, 1), false),
                step(0, range(10, 1), true),
                step(0, range(3, 4), true)
            ]
        );
        assert_eq!(
            (trace.compute(), trace.playback(8, 11, |pages| pages).bytes()),
            (Duration::from_micros(1500), 11)
        );
        let text = "0 40 r\n0 17+2 r\n9 41 w\n10 3 r\n11 47+2 r";
        let trace = Trace::parse(text, 50).expect("valid");
        assert_eq!(
            trace.working_set(50),
            [range(32, 16), range(16, 16), range(0, 16), range(48, 2)]
        );
    }

    #[test]
    fn what_is_no_trace_is_refused_with_the_line() {
        for (text, message) in [
            (
                "0 1 r\nx 1 r",
                "line 2: `x 1 r` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`",
            ),
            ("0 1", "line 1: `0 1` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`"),
            (
                "0 1 r 5",
                "line 1: `0 1 r 5` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`",
            ),
            (
                "0 1+0 r",
                "line 1: `0 1+0 r` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`",
            ),
            ("0 90+20 r", "line 1: page 100 is not in the image, which has 100"),
            (
                "0 -1 r",
                "line 1: `0 -1 r` is not `micros page[+pages] r|w`, such as `1500 4711+16 r`",
            ),
            (
                "9 1 r\n8 1 r",
                "line 2: 8 us is earlier than the line before, 9 us; lines are in order of time",
            ),
            ("0 100 r", "line 1: page 100 is not in the image, which has 100"),
        ] {
            assert_eq!(Trace::parse(text, 100).expect_err("invalid").to_string(), message);
        }
    }

    #[test]
    fn clones_of_a_family_touch_nearly_the_same() {
        let [a, b, c] = [(1, 1), (1, 2), (2, 1)].map(|(family, clone)| {
            let trace = Trace::clone_like(65_536, 4096, Duration::from_secs(1), family, clone);
            assert!((800..=1000).contains(&trace.compute().as_millis()));
            trace.steps().iter().flat_map(|step| step.pages.pages()).collect::<BTreeSet<_>>()
        });
        assert!((3000..6000).contains(&a.len()), "{}", a.len());
        let common = |other: &BTreeSet<PageIdx>| a.intersection(other).count() * 100 / a.len();
        assert!(common(&b) > 75 && common(&c) < 40, "{} {}", common(&b), common(&c));
    }
}
