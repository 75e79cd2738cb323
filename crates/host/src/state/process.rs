//! Other processes, told apart from later ones with the same number.

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};

/// A process: its number, and when it began. Numbers come again, beginnings don't (within one boot
/// of the host).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`, in clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has the number `pid` now.
    ///
    /// # Errors
    /// If there is none.
    pub fn of(pid: u32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let start_ticks = start_ticks(&stat)
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat reads `{stat}`")))?;
        Ok(Self { pid, start_ticks })
    }

    /// A handle of this very process, or `None` if it is gone.
    fn open(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Asked only now that the handle is bound to the process that has the number.
        (Self::of(self.pid).ok()? == self).then_some(handle)
    }
}

/// The program's name is in parentheses and may hold anything, so count from the last one.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    // The next is field 3.
    fields.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// Kill those of `processes` that still are, and wait until they are gone, but no longer than
/// `wait`. Returns those that were killed; the second list did not end in time.
pub(super) fn kill_all(
    processes: &[ProcessId],
    wait: Duration,
) -> (Vec<ProcessId>, Vec<ProcessId>) {
    let mut waiting = Vec::new();
    for process in processes {
        let Some(handle) = process.open() else { continue };
        match pidfd_send_signal(&handle, Signal::KILL) {
            Ok(()) => waiting.push((*process, handle)),
            Err(error) => tracing::warn!(pid = process.pid, "kill a leftover process: {error}"),
        }
    }
    let deadline = Instant::now() + wait;
    let (mut killed, mut stuck) = (Vec::new(), Vec::new());
    for (process, handle) in waiting {
        let ended = ends_by(&handle, deadline);
        if ended { &mut killed } else { &mut stuck }.push(process);
    }
    (killed, stuck)
}

/// A process handle becomes readable when its process ends.
fn ends_by(handle: &OwnedFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(left) = Timespec::try_from(left) else { return false };
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return ended.is_ok_and(|ready| ready > 0),
        }
    }
}

/// All processes whose environment has exactly `entry` (`KEY=value`), as it was when they began.
pub(super) fn with_environment(entry: &[u8]) -> Vec<ProcessId> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let we = std::process::id();
    entries
        .flatten()
        .filter_map(|folder| folder.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != we && environment_has(*pid, entry))
        .filter_map(|pid| ProcessId::of(pid).ok())
        .collect()
}

fn environment_has(pid: u32, entry: &[u8]) -> bool {
    /// The kernel's own bound on arguments and environment is 2 MiB by default.
    const ENVIRONMENT_BYTES_MAX: u64 = 4 << 20;
    let mut environment = Vec::new();
    fs::File::open(format!("/proc/{pid}/environ"))
        .and_then(|file| file.take(ENVIRONMENT_BYTES_MAX).read_to_end(&mut environment))
        .is_ok_and(|_| environment.split(|byte| *byte == 0).any(|one| one == entry))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper(mark: &str) -> Child {
        let child = Command::new("sleep").arg("60").env("VMFORK_TEST_MARK", mark).spawn();
        let child = child.expect("sleep");
        // `vfork` returns when exec has let go of our memory, before the environment is in place.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !environment_has(child.id(), format!("VMFORK_TEST_MARK={mark}").as_bytes()) {
            assert!(Instant::now() < deadline, "sleep never began");
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn the_beginning_is_found_behind_any_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 2 3";
        assert_eq!(start_ticks(stat), Some(98_765));
        for bad in ["", "7 (x", "7 (x) S 1 2", "7 (x) S 1 7 7 0 -1 4 1 0 0 0 0 0 0 0 20 0 1 0 x"] {
            assert_eq!(start_ticks(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_the_process_that_was_meant_is_killed() {
        let (mut meant, mut later) = (sleeper("a"), sleeper("b"));
        let meant_id = ProcessId::of(meant.id()).expect("there");
        let mut namesake = ProcessId::of(later.id()).expect("there");
        namesake.start_ticks -= 1;
        let gone = ProcessId { pid: 4_000_000, start_ticks: 1 };
        let (killed, stuck) = kill_all(&[meant_id, namesake, gone], Duration::from_secs(10));
        assert_eq!((killed, stuck), (vec![meant_id], vec![]));
        assert!(!meant.wait().expect("wait").success());
        assert!(later.try_wait().expect("wait").is_none(), "the wrong process was killed");
        later.kill().expect("kill");
        later.wait().expect("wait");
    }

    #[test]
    fn marked_processes_are_found_by_the_whole_mark() {
        let mark = format!("{}/x", std::process::id());
        let (mut ours, mut other) = (sleeper(&mark), sleeper(&format!("{mark}y")));
        let found = with_environment(format!("VMFORK_TEST_MARK={mark}").as_bytes());
        assert_eq!(found.iter().map(|p| p.pid).collect::<Vec<_>>(), [ours.id()]);
        for child in [&mut ours, &mut other] {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
    }
}
