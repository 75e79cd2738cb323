//! Completion and bytes against the number of hosts, beside the model.

use std::fmt::Write as _;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;
use vmfork_policy::transfer::swarm::UNIT_PAGES;

use crate::model::{Distribution, Network, Playback, Policy, SERVICE};
use crate::report::Report;
use crate::scenario::{Mode, Scenario, ScenarioError, wire_bytes};
use crate::world::simulate;

/// What came of one number of hosts in one mode. Times in milliseconds, bytes on the wire.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub hosts: usize,
    pub mode: String,
    pub ahead: bool,
    /// When the last clone was through, when they were on average, and what vmTorrent's model says.
    pub completion_ms: u64,
    pub mean_ms: u64,
    pub model_ms: u64,
    /// What each clone takes if it never waits.
    pub compute_ms: u64,
    /// What the parent's host sent, also over what one host takes in: 1 is the least there can be.
    pub origin_sent_bytes: u64,
    pub origin_sent_over_one: f64,
    /// What a host with a clone has to get, by the model: what the clone touches, in whole units,
    /// or all that is hydrated.
    pub need_bytes: u64,
    /// Of the hosts with a clone, on average.
    pub received_bytes: u64,
    pub peer_sent_bytes: u64,
    /// Faults that found the page absent, per clone.
    pub waits: u64,
    /// Pages that came twice, per host; after something was lost, or looked lost.
    pub duplicate_pages: u64,
    /// Multicast: pages asked for, over those sent; sent again; and asked for again.
    pub requested_over_served: Option<f64>,
    pub resent_pages: Option<u64>,
    pub repeated_pages: Option<u64>,
    pub stopped: usize,
    pub violations: Vec<String>,
    pub events: u64,
}

/// Simulates `scenario` for each number of hosts: `make` gives it.
///
/// # Errors
/// If a scenario makes no sense.
pub fn table(
    hosts: &[usize],
    modes: &[Mode],
    make: impl Fn(Mode, usize) -> Scenario,
    mut each: impl FnMut(&Row),
) -> Result<Vec<Row>, ScenarioError> {
    let mut rows = Vec::new();
    for hosts in hosts {
        for mode in modes {
            let scenario = make(*mode, *hosts);
            let row = Row::new(&scenario, &simulate(&scenario)?);
            each(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

impl Row {
    fn new(scenario: &Scenario, report: &Report) -> Self {
        let hosts = scenario.traces.len();
        let ahead = !scenario.ahead.is_empty() || scenario.hydrates;
        let playback = playback(scenario);
        let received_bytes = report.mean_received_bytes();
        let origin_sent_bytes = report.sent_bytes.first().copied().unwrap_or(0);
        let sent = report.multicast;
        Self {
            hosts,
            mode: scenario.mode.to_string(),
            ahead,
            completion_ms: millis(report.completion()),
            mean_ms: millis(report.mean_completion()),
            model_ms: millis(Self::model(scenario)),
            compute_ms: millis(playback.own()),
            origin_sent_bytes,
            origin_sent_over_one: ratio(origin_sent_bytes, received_bytes),
            need_bytes: if scenario.hydrates {
                wire_bytes(scenario.pages)
            } else {
                playback.bytes()
            },
            received_bytes,
            peer_sent_bytes: report.mean_peer_sent_bytes(),
            waits: report.waits / (hosts as u64).max(1),
            duplicate_pages: report.duplicate_pages / (hosts as u64).max(1),
            requested_over_served: sent.map(|sent| ratio(sent.requested, sent.served)),
            resent_pages: sent.map(|sent| sent.resent),
            repeated_pages: sent.map(|sent| sent.repeats),
            stopped: report.outcomes.len()
                - report.outcomes.iter().filter(|outcome| is_done(outcome)).count(),
            violations: report.violations.clone(),
            events: report.events,
        }
    }

    /// When a clone is through, by vmTorrent's model.
    pub(crate) fn model(scenario: &Scenario) -> Duration {
        let (policy, rate) = modelled(scenario);
        playback(scenario).through(policy, rate)
    }

    /// The line above rows.
    pub fn header() -> &'static str {
        "hosts  mode       done/s  model/s  origin sent/MiB  over one  host sent/MiB  host got/MiB  waits/clone  asked/sent  twice"
    }

    /// A line of text.
    pub fn line(&self) -> String {
        let mut line = format!(
            "{:5}  {:9}  {:6}  {:7}  {:15}  {:8.2}  {:13}  {:12}  {:11}",
            self.hosts,
            self.mode,
            seconds(self.completion_ms),
            seconds(self.model_ms),
            self.origin_sent_bytes >> 20,
            self.origin_sent_over_one,
            self.peer_sent_bytes >> 20,
            self.received_bytes >> 20,
            self.waits,
        );
        let requested =
            self.requested_over_served.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let _ = write!(line, "  {requested:>10}  {:5}", self.duplicate_pages); // to a string: can't fail
        if self.stopped > 0 {
            let _ = write!(line, "  {} clones ended early", self.stopped);
        }
        for violation in &self.violations {
            let _ = write!(line, "\n    BROKEN: {violation}");
        }
        line
    }
}

fn is_done(outcome: &crate::Outcome) -> bool {
    matches!(outcome, crate::Outcome::Done { .. })
}

/// What the clones of a scenario access, as if each had the first one's trace.
pub(crate) fn playback(scenario: &Scenario) -> Playback {
    let none = Rc::default();
    let trace = scenario.traces.first().unwrap_or(&none);
    trace.playback(UNIT_PAGES, scenario.pages, wire_bytes)
}

/// What the model takes a scenario for: a policy, and an effective rate in bytes per second.
pub(crate) fn modelled(scenario: &Scenario) -> (Policy, f64) {
    let ahead = !scenario.ahead.is_empty() || scenario.hydrates;
    let policy = if ahead { Policy::Profile } else { Policy::Demand };
    (policy, network(scenario).rate(distribution(scenario.mode), policy))
}

fn network(scenario: &Scenario) -> Network {
    Network {
        hosts: scenario.traces.len() as u64,
        bytes_per_s: scenario.link.bytes_per_s,
        piece_bytes: wire_bytes(UNIT_PAGES),
        round_trip: scenario.link.latency * 2,
        service: SERVICE,
    }
}

fn distribution(mode: Mode) -> Distribution {
    match mode {
        Mode::Unicast => Distribution::Central,
        Mode::Multicast => Distribution::Multicast,
        Mode::Swarm => Distribution::Peers,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn seconds(ms: u64) -> String {
    format!("{}.{:02}", ms / 1000, ms % 1000 / 10)
}

fn ratio(a: u64, b: u64) -> f64 {
    a as f64 / (b as f64).max(1.0)
}
