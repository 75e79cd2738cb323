//! The bound of a VM in time, and how it travels between hosts.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What bounds a VM that begins. All that clones inherit of it is here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lifetime {
    /// Its own bound, counted from its start.
    pub own: Option<Duration>,
    /// The bound of its nearest ancestor that has one.
    pub inherited: Option<Setting>,
}

/// The bound of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The id of the VM that it was set for.
    pub of: String,
    /// Counts the changes: the highest is the newest. Only the VM's own host changes it.
    pub version: u64,
    /// When the VM ends, and what inherits from it; `None`: never.
    pub ends: Option<Instant>,
}

/// A [`Setting`] on its way to another host. Hosts' clocks differ, so it carries what is left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    of: String,
    version: u64,
    left_ms: Option<u64>,
}

/// A [`Lifetime`] on its way to another host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LifetimeTold {
    own_ms: Option<u64>,
    inherited: Option<Told>,
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Setting {
    /// As another host gets it at `now`.
    pub fn told(&self, now: Instant) -> Told {
        let left_ms = self.ends.map(|ends| millis(ends.saturating_duration_since(now)));
        Told { of: self.of.clone(), version: self.version, left_ms }
    }
}

impl Told {
    /// As it came at `now`. A time that no clock reaches is none.
    pub fn heard(self, now: Instant) -> Setting {
        let Self { of, version, left_ms } = self;
        let ends = left_ms.and_then(|left| now.checked_add(Duration::from_millis(left)));
        Setting { of, version, ends }
    }
}

impl Lifetime {
    /// As another host gets it at `now`.
    pub fn told(&self, now: Instant) -> LifetimeTold {
        let inherited = self.inherited.as_ref().map(|setting| setting.told(now));
        LifetimeTold { own_ms: self.own.map(millis), inherited }
    }
}

impl LifetimeTold {
    /// As it came at `now`.
    pub fn heard(self, now: Instant) -> Lifetime {
        let own = self.own_ms.map(Duration::from_millis);
        Lifetime { own, inherited: self.inherited.map(|told| told.heard(now)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_the_same_on_another_host_whatever_its_clock() {
        let (here, there) = (Instant::now(), Instant::now() + Duration::from_secs(5000));
        let setting = |ends| Setting { of: "web".to_owned(), version: 3, ends };
        let lifetime = Lifetime {
            own: Some(Duration::from_secs(7)),
            inherited: Some(setting(Some(here + Duration::from_secs(60)))),
        };
        let heard = lifetime.told(here + Duration::from_secs(10)).heard(there);
        assert_eq!(heard.own, lifetime.own);
        let inherited = heard.inherited.expect("sent");
        assert_eq!(inherited, setting(Some(there + Duration::from_secs(50))));
        assert_eq!(setting(None).told(here).heard(there), setting(None));
        let over = setting(Some(here)).told(here + Duration::from_secs(1)).heard(there);
        assert_eq!(over.ends, Some(there), "it is due at once");
    }
}
