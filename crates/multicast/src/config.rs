//! Times and bounds of the side that hears.

use std::time::Duration;

use vmfork_policy::transfer::bounds::{HEAR_AHEAD, HEAR_DEMAND};
use vmfork_policy::transfer::multicast::{ReceiverConfig, TrustConfig};

/// Times and bounds of a `Listener`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerConfig {
    pub receiver: ReceiverConfig,
    /// Pages are requested here only while at least this many hosts listen: one alone is served
    /// sooner over a connection.
    pub listeners_min: u64,
    /// And only if the sender was heard within this.
    pub heard_within: Duration,
    /// How long a demand read waits here before another host is asked.
    pub demand_wait: Duration,
    /// The same for background reads.
    pub ahead_wait: Duration,
    /// For how long nothing is requested here after several reads failed.
    pub trust: TrustConfig,
    /// How often the listener reports to the sender that it listens.
    pub tell_every: Duration,
    /// While it has not been heard: this often.
    pub tell_unheard_every: Duration,
    /// Not heard for this time: a new invitation is requested. Also how long after one was refused.
    pub lost: Duration,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            receiver: ReceiverConfig {
                attempts_max: 12,
                // More than the sender's lockstep window, less than a VM waits.
                timeout_min: Duration::from_millis(30),
                ..ReceiverConfig::default()
            },
            listeners_min: 2,
            heard_within: Duration::from_millis(1500),
            demand_wait: HEAR_DEMAND,
            ahead_wait: HEAR_AHEAD,
            trust: TrustConfig::default(),
            tell_every: Duration::from_millis(500),
            tell_unheard_every: Duration::from_millis(50),
            lost: Duration::from_secs(3),
        }
    }
}
