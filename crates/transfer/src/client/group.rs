//! A group of hosts to which the pages of one image are sent.

use std::fmt::Debug;
use std::time::Duration;

use vmfork_image::PageRange;

use crate::proto::Urgency;

/// The group of one image, as a read sees it. Asked by several threads at a time.
pub trait PageGroup: Debug + Send + Sync {
    /// Whether pages are best asked for here, now.
    fn is_heard(&self) -> bool;

    /// How long a read should wait for pages that are requested here.
    fn wait(&self, urgency: Urgency) -> Duration;

    /// Pages into `out`, which is as long, if they come within `wait`. They are what the sender
    /// has. → whether they came.
    fn read(&self, urgency: Urgency, range: PageRange, out: &mut [u8], wait: Duration) -> bool;

    /// Pages have come another way, and need not be asked for here.
    fn filled(&self, range: PageRange);
}
