//! What answers a host's questions, as `vmfork_transfer`'s page service does it.

use std::time::Duration;

use vmfork_image::PageRange;
use vmfork_policy::transfer::HostId;
use vmfork_policy::transfer::bounds::{
    ARRIVAL, ARRIVAL_AHEAD, ARRIVAL_PAUSE_MAX, ARRIVAL_PAUSE_MIN, LOOKS_AFTER,
};
use vmfork_policy::transfer::swarm::{Route, Serve, Spread, SpreadConfig};

use crate::cache::Cache;
use crate::network::Refused;

/// A host asked for pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asking {
    pub(crate) from: usize,
    pub(crate) read: u64,
    pub(crate) pages: PageRange,
    pub(crate) demand: bool,
    pub(crate) route: Route,
}

/// After that time pages that are not in flight are given up: at first, when pauses double, and
/// later.
const GRACE_MIN: Duration = ARRIVAL_PAUSE_MIN.saturating_mul((1 << LOOKS_AFTER) - 1);
const GRACE_MAX: Duration = ARRIVAL_PAUSE_MAX.saturating_mul(LOOKS_AFTER);

/// They are in flight to here.
#[derive(Debug)]
struct Arrival {
    asking: Asking,
    began: Duration,
    /// Whether they still are is asked then.
    next: Duration,
    until: Duration,
}

#[derive(Debug)]
pub(crate) enum Reply {
    Pages,
    Refuse(Refused),
    /// If they come until then.
    Waits(Duration),
}

/// Of one host.
#[derive(Debug)]
pub(crate) struct Service {
    is_own: bool,
    spread: Option<Spread>,
    waiting: Vec<Arrival>,
}

impl Service {
    /// `is_own`: the image was frozen here. `names`: it names other hosts that have pages.
    pub(crate) fn new(pages: u64, is_own: bool, names: bool) -> Self {
        let spread = names.then(|| Spread::new(pages, SpreadConfig::default()));
        Self { is_own, spread, waiting: Vec::new() }
    }

    /// `cache`: what is here; nothing: everything.
    pub(crate) fn ask(&mut self, asking: Asking, cache: Option<&Cache>, now: Duration) -> Reply {
        let Asking { from, pages, demand, route, .. } = asking;
        if let Some(spread) = &mut self.spread {
            let is_here = route != Route::Direct || !self.is_own && demand;
            if let Serve::At(HostId(to)) = spread.ask(HostId(from as u64), pages, is_here, demand) {
                let (to, own) = (usize::try_from(to).unwrap_or(0), u64::from(self.is_own));
                return Reply::Refuse(Refused::Elsewhere { to, summed: own * pages.len() });
            }
        }
        if cache.is_none_or(|cache| cache.has_all(pages)) {
            return Reply::Pages;
        }
        if route != Route::Redirected {
            return Reply::Refuse(Refused::NotHere);
        }
        let until = now + if demand { ARRIVAL } else { ARRIVAL_AHEAD };
        let next = now + GRACE_MIN;
        self.waiting.push(Arrival { asking, began: now, next, until });
        Reply::Waits(next)
    }

    /// A host has been sent pages.
    pub(crate) fn served(&mut self, to: usize, pages: PageRange) {
        if let Some(spread) = &mut self.spread {
            spread.served(HostId(to as u64), pages);
        }
    }

    /// Pages came here. → which requests waited for them, and when it is seen that they are here.
    pub(crate) fn came(&mut self, cache: &Cache, now: Duration) -> Vec<(Asking, Duration)> {
        let mut seen = Vec::new();
        self.waiting.retain(|arrival| {
            let here = cache.has_all(arrival.asking.pages);
            if here {
                seen.push((arrival.asking, look_after(arrival.began, now)));
            }
            !here
        });
        seen
    }

    /// Which requests have waited for too long, or for what does not come; and when to look again.
    pub(crate) fn late(
        &mut self,
        is_coming: impl Fn(PageRange) -> bool,
        now: Duration,
    ) -> (Vec<Asking>, Option<Duration>) {
        let (mut late, mut again) = (Vec::new(), None);
        self.waiting.retain_mut(|arrival| {
            if arrival.next > now {
                return true;
            }
            if arrival.until <= now || !is_coming(arrival.asking.pages) {
                late.push(arrival.asking);
                return false;
            }
            arrival.next = arrival.until.min(now + GRACE_MAX);
            again = Some(again.map_or(arrival.next, |again: Duration| again.min(arrival.next)));
            true
        });
        (late, again)
    }
}

/// The first poll at `now` or later of a wait that began to poll at `began`.
fn look_after(began: Duration, now: Duration) -> Duration {
    let (mut at, mut pause) = (began, ARRIVAL_PAUSE_MIN);
    while at < now && pause < ARRIVAL_PAUSE_MAX {
        at += pause;
        pause = (pause * 2).min(ARRIVAL_PAUSE_MAX);
    }
    if at >= now {
        return at;
    }
    let looks = (now - at).as_nanos().div_ceil(ARRIVAL_PAUSE_MAX.as_nanos());
    at + ARRIVAL_PAUSE_MAX * u32::try_from(looks).unwrap_or(u32::MAX)
}
