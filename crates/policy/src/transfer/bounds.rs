//! Times and bounds of hosts that ask others for pages, and of hosts that answer: for the daemon's
//! threads and for their simulation.

use std::time::Duration;

/// Most threads that fetch pages into one image's cache: this many reads are in flight at a time.
pub const FETCHERS_MAX: usize = 20;
/// Most of those with background reads: if all of these hang, demand still finds a thread.
pub const FETCHERS_AHEAD_MAX: usize = 16;
/// From how many pieces of hydration a source that cares picks the next (vmTorrent's k).
pub const PICK_AMONG: usize = 300;

/// Each host brings a list that is most urgent first in an order of its own. In that order a piece
/// is at most this far from its place (4 MiB at 1 Gbit/s: 34 ms). vmTorrent picks among the k = 300
/// most urgent. Simulated, with 32, 64 and 128 the last clone is through at about the same time.
/// The larger the number, the more the parent's host sends and the later the most urgent pieces
/// come. With 16, hosts obstruct each other (docs/decisions/0019).
pub const URGENT_AMONG: u64 = 64;

/// Once more than this percentage of a segment's pages was requested, the rest of it comes from
/// another host, too. Stored images use Twinkle's 30. Here, 30 brings a third to a half more bytes
/// than clones of a first fork need, and saves no time (docs/decisions/0021).
pub const PREDICT_PERCENT: u64 = 60;

/// How long hosts that all failed are asked again: one that restarts, or a network that is mended,
/// is there within it.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How long a reader of pages waits for the list of what others hold.
pub const REFRESH_WAIT: Duration = Duration::from_secs(1);
/// Between two rounds through them at first; doubled each time …
pub const PAUSE_MIN: Duration = Duration::from_millis(50);
/// … up to this.
pub const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a background read waits for busy hosts: at least …
pub const LATER_MIN: Duration = Duration::from_millis(1);
/// … and at most.
pub const LATER_MAX: Duration = Duration::from_millis(50);
/// What a VM waits for others than the origin may take no longer to send; nor the origin its sums.
pub const DEMAND_WAIT: Duration = Duration::from_secs(1);
/// How long a demand read waits for pages that are sent to all: then another host is asked.
pub const HEAR_DEMAND: Duration = Duration::from_millis(50);
/// The same for a prefetch.
pub const HEAR_AHEAD: Duration = Duration::from_secs(10);
/// The longest time that an answer may take, from the request on.
pub const ANSWER: Duration = Duration::from_secs(5);
/// How long a host that gave no answer is asked only after others.
pub const AVOID: Duration = Duration::from_secs(5);

/// How long a redirected host waits there for pages that are in flight to it: where a VM waits …
pub const ARRIVAL: Duration = Duration::from_millis(500);
/// … and where none does.
pub const ARRIVAL_AHEAD: Duration = Duration::from_secs(1);
/// Between two looks whether pages have come: at first …
pub const ARRIVAL_PAUSE_MIN: Duration = Duration::from_micros(200);
/// … and at most.
pub const ARRIVAL_PAUSE_MAX: Duration = Duration::from_millis(5);
/// This many further polls for pages that are not in flight any more.
pub const LOOKS_AFTER: u32 = 4;
