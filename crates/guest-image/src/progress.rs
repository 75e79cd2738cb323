//! The progress messages of a build, and their parser for the output of mmdebstrap and apt.

/// The steps of a build, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Read the archive's index.
    Index,
    /// Fetch packages.
    Download,
    /// Unpack and configure them.
    Install,
    /// Kernel, modules, initrd.
    Kernel,
    /// Agent, libraries and extra files into the tree.
    Assemble,
    /// Make the root file system.
    Filesystem,
    /// Write it down for good.
    Store,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 7] = [
        Self::Index,
        Self::Download,
        Self::Install,
        Self::Kernel,
        Self::Assemble,
        Self::Filesystem,
        Self::Store,
    ];

    /// For people, in the present participle.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Index => "reading the package index",
            Self::Download => "downloading packages",
            Self::Install => "installing packages",
            Self::Kernel => "unpacking the kernel",
            Self::Assemble => "adding agent and files",
            Self::Filesystem => "making the root file system",
            Self::Store => "storing",
        }
    }

    /// Share of a cold build's time that lies before this stage, in per cent. Measured: 26 s on two
    /// cores with a near mirror.
    #[must_use]
    pub fn percent_before(self) -> u8 {
        match self {
            Self::Index => 0,
            Self::Download => 10,
            Self::Install => 25,
            Self::Kernel => 85,
            Self::Assemble => 88,
            Self::Filesystem => 93,
            Self::Store => 97,
        }
    }
}

/// One progress message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// A stage began. Stages may be skipped (a warm cache) but never come twice or out of order.
    Stage(Stage),
    /// Within the stage: `done` of `total` (packages or files), and which.
    Step { done: u32, total: Option<u32>, what: String },
    /// Worth a line, such as "taken from the cache".
    Note(String),
}

/// Turns the lines of `mmdebstrap --verbose` into [`Progress`]. Unknown lines are passed over, so
/// another version of mmdebstrap costs detail, not the build.
#[derive(Debug, Default)]
pub(crate) struct OutputReader {
    stage: Option<Stage>,
    fetched: u32,
    to_fetch: Option<u32>,
    configured: u32,
    to_configure: u32,
}

impl OutputReader {
    pub(crate) fn line(&mut self, line: &str, progress: &mut dyn FnMut(Progress)) {
        if let Some(message) = line.strip_prefix("I: ") {
            let stage = if message.starts_with("running apt-get update") {
                Some(Stage::Index)
            } else if message.starts_with("downloading packages") {
                Some(Stage::Download)
            } else if message.starts_with("extracting") || message.starts_with("installing") {
                Some(Stage::Install)
            } else {
                None
            };
            if let Some(stage) = stage
                && self.stage.is_none_or(|now| now < stage)
            {
                self.stage = Some(stage);
                progress(Progress::Stage(stage));
            }
        } else if let Some(count) = newly_installed(line) {
            // The essential packages and the others are announced by two runs of apt.
            self.to_fetch = Some(self.to_fetch.unwrap_or(0).saturating_add(count));
        } else if let Some(rest) = line.strip_prefix("Get:") {
            if self.stage != Some(Stage::Index) {
                self.fetched = self.fetched.saturating_add(1);
                // "7 URL suite/main amd64 name amd64 version [1,234 kB]"
                let what = rest.split_ascii_whitespace().nth(4).unwrap_or("").to_owned();
                progress(Progress::Step { done: self.fetched, total: self.to_fetch, what });
            }
        } else if line.starts_with("Unpacking ") {
            self.to_configure = self.to_configure.saturating_add(1);
        } else if let Some(rest) = line.strip_prefix("Setting up ") {
            self.configured = self.configured.saturating_add(1);
            let what = rest.split_ascii_whitespace().next().unwrap_or("").to_owned();
            let total =
                Some(self.to_configure.max(self.configured).max(self.to_fetch.unwrap_or(0)));
            progress(Progress::Step { done: self.configured, total, what });
        }
    }
}

/// The figure of "0 upgraded, 82 newly installed, 0 to remove and 0 not upgraded.".
fn newly_installed(line: &str) -> Option<u32> {
    let (before, _) = line.split_once(" newly installed,")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_mmdebstrap_reads_as_stages_and_steps() {
        let mut reader = OutputReader::default();
        let mut seen = Vec::new();
        for line in [
            "I: automatically chosen mode: root",
            "I: running apt-get update...",
            "Get:1 http://mirror bookworm InRelease [151 kB]",
            "I: downloading packages with apt...",
            "0 upgraded, 2 newly installed, 0 to remove and 0 not upgraded.",
            "Get:1 http://mirror bookworm/main amd64 gcc-12-base amd64 12.2.0-14 [37.5 kB]",
            "I: extracting archives...",
            "I: installing essential packages...",
            "Unpacking gcc-12-base:amd64 (12.2.0-14) ...",
            "Setting up gcc-12-base:amd64 (12.2.0-14) ...",
            "an unknown line",
        ] {
            reader.line(line, &mut |p| seen.push(p));
        }
        let step = |done, total, what: &str| Progress::Step { done, total, what: what.into() };
        assert_eq!(
            seen,
            [
                Progress::Stage(Stage::Index),
                Progress::Stage(Stage::Download),
                step(1, Some(2), "gcc-12-base"),
                Progress::Stage(Stage::Install),
                step(1, Some(2), "gcc-12-base:amd64"),
            ]
        );
    }

    #[test]
    fn stages_are_listed_in_order_and_add_up() {
        assert!(Stage::ALL.is_sorted());
        assert!(Stage::ALL.map(Stage::percent_before).is_sorted());
    }
}
