//! What a VM touches after a snapshot, and when.
//!
//! ```text
//!   start ──► look ──► observe(at, all that is touched) ──► look again at next_look() … until end()
//!                                  │
//!                                  └─► what was not touched before, at this time ──► Recording
//! ```
//!
//! The kernel tells which pages a view has mapped (`PAGEMAP_SCAN`), without a fault of the VM's
//! being taken for it and without its order. So the times are those of the looks: soon after each
//! other at first, where the order matters most.

use std::collections::VecDeque;
use std::time::Duration;

use vmfork_image::{PageRange, PageTable, Source};

use crate::page_set::PageSet;

/// When to look first; from then on every [`LOOK_EVERY`]. A look costs about 1 ms for each GiB that
/// is mapped.
const LOOKS: [Duration; 5] = [
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The time over which a VM must be quiet is cut into this many parts. So little is kept however
/// often the recorder is polled.
const QUIET_PARTS: u32 = 64;

/// When a recording is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecorderConfig {
    /// With fewer new pages per second than this …
    pub quiet_pages_per_s: u64,
    /// … over this time.
    pub quiet_for: Duration,
    /// Most pages of a recording. What a look finds beyond is left out.
    pub pages_max: u64,
    pub time_max: Duration,
}

impl Default for RecorderConfig {
    /// Twinkle's ten pages per second over a minute. 1 GiB, so that what is read ahead of a start
    /// has a bound, and ten minutes, since some VMs are never quiet.
    fn default() -> Self {
        Self {
            quiet_pages_per_s: 10,
            quiet_for: Duration::from_secs(60),
            pages_max: 262_144,
            time_max: Duration::from_secs(600),
        }
    }
}

/// Why a recording is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordingEnd {
    /// The VM touches hardly anything new.
    Quiet,
    /// There are as many pages as there may be.
    Pages,
    /// It took as long as it may.
    Time,
}

impl RecordingEnd {
    /// One word, for logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Pages => "pages",
            Self::Time => "time",
        }
    }
}

/// Records the working set of one VM: for each page, the first look that found it touched (Twinkle,
/// INFOCOM 2011, "working set").
///
/// Takes a bit for each page that was touched, and two words for each run of pages that were new at
/// the same look.
#[derive(Debug)]
pub struct Recorder {
    config: RecorderConfig,
    table: PageTable,
    touched: PageSet,
    recording: Recording,
    /// Times with the pages that there were by then: one from before the last `quiet_for`, and
    /// those within.
    history: VecDeque<(Duration, u64)>,
}

/// What a VM touched, by time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    steps: Vec<(Duration, Vec<PageRange>)>,
    pages: u64,
    until: Duration,
    end: Option<RecordingEnd>,
}

impl Recorder {
    /// `table`: of the image that the VM began from. Pages that are zero there don't count.
    pub fn new(table: PageTable, config: RecorderConfig) -> Self {
        Self {
            config,
            table,
            touched: PageSet::default(),
            recording: Recording::default(),
            history: VecDeque::from([(Duration::ZERO, 0)]),
        }
    }

    /// A look: at `at`, since the VM began to run, all these pages had been touched. Returns how
    /// many were not known. Nothing is taken on after the end.
    ///
    /// A look that is older than the last one counts as one at the same time.
    pub fn observe(&mut self, at: Duration, touched: impl IntoIterator<Item = PageRange>) -> u64 {
        if self.recording.end.is_some() {
            return 0;
        }
        let at = at.max(self.recording.until);
        self.recording.until = at;
        let mut room = self.config.pages_max.saturating_sub(self.recording.pages);
        let mut new: Vec<PageRange> = Vec::new();
        for range in touched {
            for (run, source) in self.table.runs(range) {
                if source == Source::Zero {
                    continue;
                }
                for run in self.touched.absent(run) {
                    let run = run.truncate(room);
                    room -= run.len();
                    match new.last_mut() {
                        Some(last) if last.end() == run.start() => {
                            *last = PageRange::between(last.start(), run.end());
                        }
                        _ if run.is_empty() => {}
                        _ => new.push(run),
                    }
                }
                self.touched.insert(run);
            }
        }
        let pages = new.iter().map(PageRange::len).sum();
        self.recording.pages += pages;
        match self.recording.steps.last_mut() {
            _ if new.is_empty() => {}
            Some((last, runs)) if *last == at => runs.extend(new),
            _ => self.recording.steps.push((at, new)),
        }
        self.recording.end = self.ends(at, room);
        pages
    }

    /// When to look next, since the VM began to run. `None` if the recording is over.
    pub fn next_look(&self) -> Option<Duration> {
        if self.recording.end.is_some() {
            return None;
        }
        let last = self.recording.until;
        let soon = LOOKS.into_iter().find(|look| *look > last);
        Some(soon.unwrap_or_else(|| last.saturating_add(LOOK_EVERY)).min(self.config.time_max))
    }

    /// Whether the recording is over, and why.
    pub fn end(&self) -> Option<RecordingEnd> {
        self.recording.end
    }

    /// What was recorded, whether it is over or not.
    pub fn finish(self) -> Recording {
        self.recording
    }

    fn ends(&mut self, at: Duration, room: u64) -> Option<RecordingEnd> {
        let RecorderConfig { quiet_pages_per_s, quiet_for, time_max, .. } = self.config;
        // The newest that is old enough stays at the front, to compare with.
        let is_old = |time: Duration| at - time >= quiet_for;
        while self.history.get(1).is_some_and(|(time, _)| is_old(*time)) {
            self.history.pop_front();
        }
        let base = self.history.front().copied().filter(|(time, _)| is_old(*time));
        let last = self.history.back().map_or(Duration::ZERO, |(time, _)| *time);
        if at - last >= quiet_for / QUIET_PARTS {
            self.history.push_back((at, self.recording.pages));
        }
        if room == 0 {
            return Some(RecordingEnd::Pages);
        }
        if let Some((time, pages)) = base {
            let new = u128::from(self.recording.pages - pages);
            let few = u128::from(quiet_pages_per_s) * (at - time).as_nanos();
            if new * Duration::from_secs(1).as_nanos() < few {
                return Some(RecordingEnd::Quiet);
            }
        }
        (at >= time_max).then_some(RecordingEnd::Time)
    }
}

impl Recording {
    /// Looks that found new pages, in order of time, each with those pages; no page is in two.
    pub fn steps(&self) -> impl Iterator<Item = (Duration, &[PageRange])> + '_ {
        self.steps.iter().map(|(at, runs)| (*at, runs.as_slice()))
    }

    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The last look.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// Why it was over; `None` if it was finished before.
    pub fn end(&self) -> Option<RecordingEnd> {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use vmfork_image::{ImageId, PageIdx};

    use super::*;

    fn range(start: u64, len: u64) -> PageRange {
        PageRange::new(PageIdx(start), len).expect("small")
    }

    fn table(pages: u64) -> PageTable {
        PageTable::uniform(pages, Source::Image(ImageId::new(7).expect("not 0")))
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Polls, at the times given, a VM that has touched `touched(at)` pages from page 0 on.
    fn record(config: RecorderConfig, touched: impl Fn(Duration) -> u64) -> Recording {
        let mut recorder = Recorder::new(table(1 << 20), config);
        let mut looks = 0;
        while let Some(at) = recorder.next_look() {
            looks += 1;
            assert!(looks < 1000, "it does not end");
            recorder.observe(at, [range(0, touched(at))]);
        }
        recorder.finish()
    }

    #[test]
    fn looks_are_soon_at_first_and_go_on_from_a_late_one() {
        let mut recorder = Recorder::new(table(100), RecorderConfig::default());
        let mut looks = Vec::new();
        for _ in 0..7 {
            let at = recorder.next_look().expect("not over");
            recorder.observe(at, []);
            looks.push(at);
        }
        assert_eq!(looks, [ms(20), ms(50), ms(100), ms(200), ms(500), ms(1500), ms(2500)]);
        recorder.observe(ms(9000), []);
        assert_eq!(recorder.next_look(), Some(ms(10_000)));
        // A look that was overtaken changes no time.
        recorder.observe(ms(3000), []);
        assert_eq!(recorder.next_look(), Some(ms(10_000)));
    }

    #[test]
    fn a_page_has_the_time_of_the_first_look_that_found_it() {
        let zeros = table(100).derive([(range(8, 4), Source::Zero)]).expect("within");
        let mut recorder = Recorder::new(zeros, RecorderConfig::default());
        assert_eq!(recorder.observe(ms(20), [range(4, 2), range(6, 6)]), 4);
        assert_eq!(recorder.observe(ms(50), [range(4, 8)]), 0);
        assert_eq!(recorder.observe(ms(50), [range(2, 20), range(90, 50)]), 22);
        assert_eq!(recorder.observe(ms(50), [range(0, 1)]), 1);
        let recording = recorder.finish();
        let steps: Vec<_> = recording.steps().map(|(at, runs)| (at, runs.to_vec())).collect();
        let second = vec![range(2, 2), range(12, 10), range(90, 10), range(0, 1)];
        assert_eq!(steps, [(ms(20), vec![range(4, 4)]), (ms(50), second)]);
        assert_eq!((recording.pages(), recording.until(), recording.end()), (27, ms(50), None));
    }

    #[test]
    fn it_is_over_when_hardly_anything_is_new_for_a_minute() {
        // A burst of 50000 pages, then 9 pages a second.
        let recording = record(RecorderConfig::default(), |at| match at.as_secs() {
            0 => 100,
            secs => 50_000 + 9 * secs,
        });
        assert_eq!(recording.end(), Some(RecordingEnd::Quiet));
        assert_eq!(recording.until().as_secs(), 61, "the burst is in the second look's second");
        // 10 a second are not hardly anything.
        let ten = |at: Duration| u64::try_from(at.as_millis() / 100).expect("small");
        let recording = record(RecorderConfig::default(), ten);
        assert_eq!((recording.end(), recording.until().as_secs()), (Some(RecordingEnd::Time), 600));
        // Nothing at all.
        let recording = record(RecorderConfig::default(), |_| 0);
        assert_eq!((recording.end(), recording.until().as_secs()), (Some(RecordingEnd::Quiet), 60));
    }

    #[test]
    fn it_is_over_at_the_limits() {
        let config = RecorderConfig { pages_max: 500, ..RecorderConfig::default() };
        let recording = record(config, |at| at.as_secs() * 200);
        assert_eq!((recording.end(), recording.pages()), (Some(RecordingEnd::Pages), 500));
        let config = RecorderConfig { time_max: ms(90_700), ..RecorderConfig::default() };
        let recording = record(config, |at| at.as_secs() * 200);
        assert_eq!((recording.end(), recording.until()), (Some(RecordingEnd::Time), ms(90_700)));
        let mut recorder = Recorder::new(table(10), RecorderConfig { pages_max: 3, ..config });
        recorder.observe(ms(1), [range(0, 2), range(4, 6)]);
        assert_eq!((recorder.end(), recorder.next_look()), (Some(RecordingEnd::Pages), None));
        assert_eq!(recorder.observe(ms(2), [range(0, 10)]), 0);
        assert_eq!(recorder.finish().pages(), 3);
    }

    #[test]
    fn little_is_kept_however_often_somebody_looks() {
        let mut recorder = Recorder::new(table(1 << 20), RecorderConfig::default());
        for at in (0..100_000).step_by(20) {
            recorder.observe(ms(at), [range(0, at)]);
            assert!(recorder.history.len() <= 67, "{} kept", recorder.history.len());
        }
        assert_eq!(recorder.end(), None);
    }

    proptest! {
        #[test]
        fn what_is_recorded_is_what_was_found_first(
            zeros in prop::collection::vec((0..280u64, 1..40u64), 0..6),
            looks in prop::collection::vec(
                (0..400u64, prop::collection::vec((0..320u64, 0..60u64), 0..6)), 0..12,
            ),
            pages_max in prop_oneof![Just(1000u64), 0..200u64],
        ) {
            let zeros = zeros.into_iter().map(|(start, len)| (range(start, len).intersect(&PageRange::first(300)), Source::Zero));
            let table = table(300).derive(zeros).expect("within");
            let is_zero = |page: PageIdx| table.get(page).is_none_or(|source| source == Source::Zero);
            let config = RecorderConfig { pages_max, ..RecorderConfig::default() };
            let mut recorder = Recorder::new(table.clone(), config);
            let mut first = BTreeMap::new();
            let mut last = 0;
            for (at, touched) in looks {
                last = at.max(last);
                let over = recorder.end().is_some();
                recorder.observe(ms(at), touched.iter().map(|(start, len)| range(*start, *len)));
                let pages = touched.iter().flat_map(|(start, len)| range(*start, *len).pages());
                for page in pages.filter(|page| !over && !is_zero(*page)) {
                    if (first.len() as u64) < pages_max {
                        first.entry(page).or_insert(ms(last));
                    }
                }
                prop_assert_eq!(recorder.end().is_some(), over || first.len() as u64 == pages_max);
                prop_assert_eq!(recorder.next_look().is_none(), recorder.end().is_some());
            }
            let recording = recorder.finish();
            let mut recorded = BTreeMap::new();
            for (at, runs) in recording.steps() {
                for page in runs.iter().flat_map(PageRange::pages) {
                    prop_assert_eq!(recorded.insert(page, at), None);
                }
            }
            prop_assert_eq!(recording.pages(), recorded.len() as u64);
            prop_assert!(recording.steps().map(|(at, _)| at).is_sorted_by(|a, b| a < b));
            prop_assert_eq!(recorded, first);
        }
    }
}
