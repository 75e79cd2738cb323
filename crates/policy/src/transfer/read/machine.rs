//! The loop of one read.

use std::time::Duration;

use super::{Action, Done, Event, FailedRead, Giver, Hosts, ReplyError, Request, Verdict};
use crate::transfer::bounds::{
    ANSWER, DEMAND_WAIT, LATER_MAX, LATER_MIN, PAUSE_MAX, PAUSE_MIN, REFRESH_WAIT,
};
use crate::transfer::read::sums_wait;
use crate::transfer::swarm::{Asked, Chosen, Failure, Route, Swarm};
use crate::transfer::{HostId, Urgency};

/// One read. See the [module](super).
#[derive(Debug)]
pub struct Read {
    request: Request,
    stage: Stage,
    /// Which hosts were named when the round began.
    version: u64,
    /// Hosts that were asked in this round, and why they gave no pages.
    tried: Vec<(HostId, ReplyError)>,
    /// Hosts that are not asked again.
    barred: Vec<HostId>,
    /// Other hosts have been asked what they hold, for this round.
    is_refreshed: bool,
    /// The patience was over when the last host was chosen: of the swarm, and of those with a part.
    is_late: [bool; 2],
    pause: Duration,
}

/// In which part of a round a host was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Via {
    /// The swarm says that it has the pages.
    Swarm,
    /// It was named with the image.
    Named,
    /// It has a part of the image, maybe this.
    Part,
}

/// What the read waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Hearing {
        until: Duration,
    },
    Asked {
        host: HostId,
        via: Via,
        believed: bool,
        route: Route,
        until: Duration,
    },
    Comparing {
        giver: HostId,
        via: Via,
        origin: Option<HostId>,
        until: Duration,
    },
    /// The pages cannot be compared, so that the origin has been asked for them.
    Undecided {
        giver: HostId,
        via: Via,
        origin: HostId,
        until: Duration,
    },
    /// Hosts that have the pages are busy.
    Later {
        until: Duration,
    },
    Refreshing {
        until: Duration,
    },
    Pausing {
        until: Duration,
    },
    Over,
}

impl Read {
    /// A read begins. → it, and what to do first.
    pub fn begin(request: Request, hosts: &mut impl Hosts, now: Duration) -> (Self, Action) {
        let mut read = Self {
            request,
            stage: Stage::Over,
            version: 0,
            tried: Vec::new(),
            barred: Vec::new(),
            is_refreshed: false,
            is_late: [false; 2],
            pause: PAUSE_MIN,
        };
        let action = match request.hear_until {
            Some(until) => {
                read.stage = Stage::Hearing { until };
                Action::Hear { until }
            }
            None => read.begin_round(hosts, now),
        };
        (read, action)
    }

    pub fn request(&self) -> &Request {
        &self.request
    }

    /// When [`Event::Tick`] makes a difference, if nothing happens before.
    pub fn until(&self) -> Duration {
        match self.stage {
            Stage::Hearing { until }
            | Stage::Asked { until, .. }
            | Stage::Comparing { until, .. }
            | Stage::Undecided { until, .. }
            | Stage::Later { until }
            | Stage::Refreshing { until }
            | Stage::Pausing { until } => until,
            Stage::Over => Duration::MAX,
        }
    }

    /// The host whose reply it waits for.
    pub fn asked(&self) -> Option<HostId> {
        match self.stage {
            Stage::Asked { host, .. } | Stage::Undecided { origin: host, .. } => Some(host),
            _ => None,
        }
    }

    /// Whether other hosts are being asked, for it, what they hold.
    pub fn is_refreshing(&self) -> bool {
        matches!(self.stage, Stage::Refreshing { .. })
    }

    /// Something has happened. → what to do now; `None`: the event changes nothing.
    pub fn on(&mut self, event: Event, hosts: &mut impl Hosts, now: Duration) -> Option<Action> {
        let is_due = event == Event::Tick && self.until() <= now;
        Some(match (self.stage, event) {
            (Stage::Hearing { .. }, Event::Heard) => self.done(Giver::Group),
            (Stage::Hearing { .. }, Event::NotHeard) => self.begin_round(hosts, now),
            (Stage::Hearing { .. }, Event::Tick) if is_due => self.begin_round(hosts, now),
            (Stage::Asked { host, via, believed, .. }, Event::Reply { from }) if from == host => {
                self.replied(host, via, believed, hosts, now)
            }
            (Stage::Asked { host, via, route, .. }, Event::Elsewhere { from, at })
                if from == host =>
            {
                match via == Via::Swarm && route == Route::Direct {
                    // Only the host that is asked first names another.
                    true => self.elsewhere(host, at, hosts, now),
                    false => self.failed(host, via, ReplyError::Lacks, hosts, now),
                }
            }
            (Stage::Asked { host, via, .. }, Event::Failed { from, why }) if from == host => {
                self.failed(host, via, why, hosts, now)
            }
            (Stage::Asked { host, via, .. }, Event::Tick) if is_due => {
                self.failed(host, via, ReplyError::Broken, hosts, now)
            }
            (Stage::Comparing { giver, via, origin, .. }, Event::Compared(verdict)) => {
                self.compared(giver, via, origin, verdict, hosts, now)
            }
            (Stage::Comparing { giver, via, origin, .. }, Event::Tick) if is_due => {
                self.compared(giver, via, origin, Verdict::Undecided, hosts, now)
            }
            (Stage::Undecided { origin, .. }, Event::Reply { from }) if from == origin => {
                if let Some(swarm) = hosts.swarm() {
                    swarm.answered(origin, self.request.pages, now);
                }
                self.done(Giver::Origin)
            }
            (
                Stage::Undecided { giver, via, origin, .. },
                Event::Failed { from, .. } | Event::Elsewhere { from, .. },
            ) if from == origin => self.failed(giver, via, ReplyError::Undecided, hosts, now),
            (Stage::Undecided { giver, via, .. }, Event::Tick) if is_due => {
                self.failed(giver, via, ReplyError::Undecided, hosts, now)
            }
            (Stage::Later { .. }, Event::Tick) if is_due => self.ask_in_swarm(hosts, now),
            (Stage::Refreshing { .. }, Event::Refreshed) => self.refreshed(hosts, now),
            (Stage::Refreshing { .. }, Event::Tick) if is_due => self.refreshed(hosts, now),
            (Stage::Pausing { .. }, Event::Tick)
                if is_due || hosts.named_version() != self.version =>
            {
                self.begin_round(hosts, now)
            }
            _ => return None,
        })
    }

    fn begin_round(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        self.tried.clear();
        self.is_late = [false; 2];
        self.version = hosts.named_version();
        self.ask_in_swarm(hosts, now)
    }

    /// Whether the patience was over before. It is looked at again from now on.
    fn was_late(&mut self, via: Via, now: Duration) -> bool {
        let is_late = &mut self.is_late[usize::from(via == Via::Part)];
        std::mem::replace(is_late, now >= self.request.give_up)
    }

    /// The best of the hosts that are known to have the pages.
    fn ask_in_swarm(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        let Request { pages, urgency, give_up, .. } = self.request;
        let is_over = self.was_late(Via::Swarm, now);
        let chosen = match hosts.swarm() {
            Some(swarm) if !is_over => swarm.choose(pages, urgency == Urgency::Demand, now),
            _ => Chosen::NoHolder,
        };
        match chosen {
            Chosen::Ask(asked) => self.ask_of_swarm(asked, now),
            Chosen::Later(wait) if urgency == Urgency::Ahead && now < give_up => {
                let until = now + wait.clamp(LATER_MIN, LATER_MAX);
                self.stage = Stage::Later { until };
                Action::Wait { until, version: None }
            }
            Chosen::Later(_) | Chosen::NoHolder => self.ask_named(hosts, now),
        }
    }

    fn ask_of_swarm(&mut self, asked: Asked, now: Duration) -> Action {
        let Asked { host, origin, route } = asked;
        let wait = if origin { ANSWER } else { self.wait_for_holder() };
        self.ask(host, Via::Swarm, origin, route, (wait, now))
    }

    /// How long a host other than the origin may take: on demand, the origin is better than a slow
    /// host.
    fn wait_for_holder(&self) -> Duration {
        match self.request.urgency {
            Urgency::Demand => DEMAND_WAIT,
            Urgency::Ahead => ANSWER,
        }
    }

    fn ask(
        &mut self,
        host: HostId,
        via: Via,
        believed: bool,
        route: Route,
        (within, now): (Duration, Duration),
    ) -> Action {
        self.stage = Stage::Asked { host, via, believed, route, until: now + within };
        Action::Ask { host, route, within, believed }
    }

    /// The next of the hosts that were named with the image, and then of those that have a part of
    /// it.
    fn ask_named(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        let next = hosts.named().into_iter().find(|host| self.may_ask(*host, hosts.swarm()));
        if let Some(host) = next {
            // Of a swarm, whether it is the origin is known only once it has replied.
            let has_swarm = hosts.swarm().is_some();
            let believed = !has_swarm && hosts.origin().is_none_or(|origin| origin == host);
            return self.ask(host, Via::Named, believed, Route::Insist, (ANSWER, now));
        }
        match self.is_refreshed {
            true => self.ask_for_part(hosts, now),
            false => self.end_round(hosts, now),
        }
    }

    /// Whether a host has not failed, in this round or for good.
    fn may_ask(&self, host: HostId, swarm: Option<&mut Swarm>) -> bool {
        !self.tried.iter().any(|(tried, _)| *tried == host)
            && !self.barred.contains(&host)
            && swarm.is_none_or(|swarm| !swarm.is_barred(host))
    }

    /// What hosts have is known by whole units. Of a unit that a later image changed in part, hosts
    /// that need only that image bring the rest, and never have the whole unit.
    fn ask_for_part(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        let is_over = self.was_late(Via::Part, now);
        let swarm = hosts.swarm().filter(|_| !is_over);
        let next = swarm.and_then(|swarm| swarm.with_some().find(|host| self.may_ask(*host, None)));
        match next {
            Some(host) => {
                let within = self.wait_for_holder();
                self.ask(host, Via::Part, false, Route::Insist, (within, now))
            }
            None => self.end_round(hosts, now),
        }
    }

    /// All hosts failed.
    fn end_round(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        let left = self.request.give_up.saturating_sub(now);
        if hosts.swarm().is_some() && !self.is_refreshed {
            // A host may have the pages of which that is not known yet.
            let until = now + left.min(REFRESH_WAIT);
            self.stage = Stage::Refreshing { until };
            return Action::Refresh { until };
        }
        let may_pass = self.tried.iter().any(|(_, why)| why.is_passing());
        let has_changed = hosts.named_version() != self.version;
        if left.is_zero() || !(may_pass || has_changed) {
            self.stage = Stage::Over;
            let Request { image, pages, .. } = self.request;
            let tried = std::mem::take(&mut self.tried);
            return Action::GiveUp(FailedRead { image, pages, tried });
        }
        self.is_refreshed = false;
        let until = now + self.pause.min(left);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        if has_changed {
            return self.begin_round(hosts, now);
        }
        self.stage = Stage::Pausing { until };
        Action::Wait { until, version: Some(self.version) }
    }

    fn refreshed(&mut self, hosts: &mut impl Hosts, now: Duration) -> Action {
        self.is_refreshed = true;
        self.begin_round(hosts, now)
    }

    /// A host gave the pages.
    fn replied(
        &mut self,
        host: HostId,
        via: Via,
        believed: bool,
        hosts: &mut impl Hosts,
        now: Duration,
    ) -> Action {
        let Request { pages, urgency, .. } = self.request;
        let (is_origin, origin) = match hosts.swarm() {
            Some(swarm) => {
                let is_origin = match via {
                    Via::Named => swarm.gave(host),
                    Via::Swarm | Via::Part => {
                        swarm.answered(host, pages, now);
                        believed
                    }
                };
                (is_origin, swarm.origin())
            }
            None => match hosts.origin() {
                Some(origin) => (origin == host, Some(origin)),
                None => return self.done(Giver::Named),
            },
        };
        if is_origin {
            return self.done(Giver::Origin);
        }
        let within = sums_wait(urgency);
        self.stage = Stage::Comparing { giver: host, via, origin, until: now + within };
        Action::Compare { giver: host, origin, within }
    }

    fn compared(
        &mut self,
        giver: HostId,
        via: Via,
        origin: Option<HostId>,
        verdict: Verdict,
        hosts: &mut impl Hosts,
        now: Duration,
    ) -> Action {
        match verdict {
            Verdict::Right => self.done(Giver::Holder),
            Verdict::Wrong => self.failed(giver, via, ReplyError::Forged, hosts, now),
            Verdict::Believed => self.done(Giver::Believed),
            Verdict::Undecided if origin.is_none() => self.done(Giver::Believed),
            Verdict::Undecided => match hosts.swarm().and_then(|swarm| swarm.origin()) {
                Some(origin) => {
                    self.stage = Stage::Undecided { giver, via, origin, until: now + ANSWER };
                    let route = Route::Insist;
                    Action::Ask { host: origin, route, within: ANSWER, believed: true }
                }
                None => self.failed(giver, via, ReplyError::Undecided, hosts, now),
            },
        }
    }

    /// A host said that the pages are at host `at`.
    fn elsewhere(
        &mut self,
        host: HostId,
        at: HostId,
        hosts: &mut impl Hosts,
        now: Duration,
    ) -> Action {
        let (pages, is_avoided) = (self.request.pages, hosts.is_avoided(at));
        let swarm = hosts.swarm();
        match swarm.and_then(|swarm| swarm.redirected(host, pages, (at, is_avoided), now)) {
            Some(asked) => self.ask_of_swarm(asked, now),
            None => self.ask_in_swarm(hosts, now),
        }
    }

    /// A host gave no pages, or none that can be used.
    fn failed(
        &mut self,
        host: HostId,
        via: Via,
        why: ReplyError,
        hosts: &mut impl Hosts,
        now: Duration,
    ) -> Action {
        self.tried.push((host, why));
        if why == ReplyError::Forged {
            self.barred.push(host);
        }
        if let (Some(swarm), Some(failure)) = (hosts.swarm(), why.for_swarm())
            && (via != Via::Named || failure == Failure::Forged)
        {
            swarm.failed(host, self.request.pages, failure, now);
        }
        match via {
            Via::Swarm => self.ask_in_swarm(hosts, now),
            Via::Named => self.ask_named(hosts, now),
            // Nor can be compared what the next one gives.
            Via::Part if why == ReplyError::Undecided => self.end_round(hosts, now),
            Via::Part => self.ask_for_part(hosts, now),
        }
    }

    fn done(&mut self, giver: Giver) -> Action {
        self.stage = Stage::Over;
        Action::Done(Done { giver, resourced: !self.tried.is_empty() })
    }
}
