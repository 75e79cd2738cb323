//! vmTorrent's evaluation again (CoNEXT 2012, §4.4). VMs' images stream to them. How long do they
//! take, over what they take with the image in memory, against the number of hosts?
//!
//! Rows are the paper's: one server or peers (`cs`, `p2p`), by demand or with a profile (`d`, `p`).
//! Multicast is ours. Each has the simulation's figure and the model's.

use std::fmt::Write as _;
use std::rc::Rc;

use serde::Serialize;

use crate::report::Report;
use crate::scenario::{Link, Mode, Scenario, ScenarioError};
use crate::table::Row;
use crate::trace::Trace;
use crate::world::simulate;

/// A way for an image to come, as the paper calls it, and how it is simulated.
pub(crate) const WAYS: [(&str, Mode, bool); 6] = [
    ("cs_d", Mode::Unicast, false),
    ("cs_p", Mode::Unicast, true),
    ("p2p_d", Mode::Swarm, false),
    ("p2p_p", Mode::Swarm, true),
    ("multicast_d", Mode::Multicast, false),
    ("multicast_p", Mode::Multicast, true),
];

/// P⁻¹(A) / M⁻¹(A): the mean time of all VMs, over that of one that waits for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    /// `None`: it was not simulated, or VMs were stopped.
    pub simulated: Option<f64>,
    pub model: f64,
}

/// Of one number of hosts.
#[derive(Debug, Clone, Serialize)]
pub struct Evaluated {
    pub hosts: usize,
    pub link_mbit: u64,
    /// In the order of [`Evaluated::header`].
    pub ratios: Vec<Ratio>,
    /// Broken promises, with the way.
    pub violations: Vec<String>,
}

/// What is evaluated.
#[derive(Debug, Clone)]
pub struct Evaluation {
    pub trace: Rc<Trace>,
    /// Of the image.
    pub pages: u64,
    pub link: Link,
    pub seed: u64,
    /// With more hosts, there are only the model's figures.
    pub hosts_simulated_max: usize,
}

impl Evaluation {
    pub(crate) fn scenario(&self, mode: Mode, has_profile: bool, hosts: usize) -> Scenario {
        let mut scenario = Scenario::new(mode, self.pages, hosts, &self.trace);
        scenario.seed = self.seed;
        scenario.link = self.link;
        if has_profile {
            scenario.ahead = self.trace.working_set(self.pages);
        }
        scenario
    }

    /// All ways, for a number of hosts.
    ///
    /// # Errors
    /// The scenario makes no sense.
    pub fn of(&self, hosts: usize) -> Result<Evaluated, ScenarioError> {
        let own = self.trace.compute().as_secs_f64().max(f64::MIN_POSITIVE);
        let (mut ratios, mut violations) = (Vec::new(), Vec::new());
        for (way, mode, has_profile) in WAYS {
            let scenario = self.scenario(mode, has_profile, hosts);
            let model = Row::model(&scenario).as_secs_f64() / own;
            // One server's answers come too late then, and VMs are stopped.
            let is_too_slow = mode == Mode::Unicast && scenario.is_narrow();
            let simulated = match hosts <= self.hosts_simulated_max && !is_too_slow {
                true => Some(simulate(&scenario)?),
                false => None,
            };
            let broken = simulated.iter().flat_map(|report| &report.violations);
            violations.extend(broken.map(|what| format!("{way}: {what}")));
            let done = simulated.filter(Report::all_done);
            let mean = done.map(|report| report.mean_completion().as_secs_f64() / own);
            ratios.push(Ratio { simulated: mean, model });
        }
        let link_mbit = self.link.bytes_per_s / 125_000;
        Ok(Evaluated { hosts, link_mbit, ratios, violations })
    }
}

impl Evaluated {
    /// The line above rows. Each figure is that of the simulation, and that of the model behind it.
    pub fn header() -> String {
        let mut line = "hosts".to_owned();
        for (way, ..) in WAYS {
            let _ = write!(line, "  {way:>15}"); // to a string: can't fail
        }
        line
    }

    /// A line of text.
    pub fn line(&self) -> String {
        let mut line = format!("{:5}", self.hosts);
        for Ratio { simulated, model } in &self.ratios {
            let simulated = simulated.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            let _ = write!(line, "  {:>15}", format!("{simulated} ({model:.2})"));
        }
        for violation in &self.violations {
            let _ = write!(line, "\n    BROKEN: {violation}");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn peers_with_a_profile_scale_and_one_server_does_not() {
        let pages = 4096;
        let evaluation = Evaluation {
            trace: Rc::new(Trace::database(pages, Duration::from_secs(4))),
            pages,
            link: Link { bytes_per_s: 12_500_000, ..Link::default() },
            seed: 1,
            hosts_simulated_max: 16,
        };
        let [one, many] = [1, 16].map(|hosts| evaluation.of(hosts).expect("makes sense"));
        assert!(one.violations.is_empty() && many.violations.is_empty());
        let simulated = |of: &Evaluated, way: &str| {
            let at = WAYS.iter().position(|(name, ..)| *name == way).expect("a way");
            of.ratios[at].simulated.expect("simulated")
        };
        assert!(simulated(&one, "cs_p") < simulated(&one, "cs_d"));
        assert!(simulated(&many, "cs_d") > 4.0, "{}", many.line());
        assert!(simulated(&many, "p2p_p") < 1.3, "{}", many.line());
        assert!(simulated(&many, "p2p_p") < simulated(&many, "p2p_d"), "{}", many.line());
        assert!(many.line().starts_with("   16  "));
        assert_eq!(Evaluated::header().split_whitespace().count(), 1 + WAYS.len());
        let more = evaluation.of(17).expect("makes sense");
        assert!(more.ratios.iter().all(|ratio| ratio.simulated.is_none() && ratio.model >= 1.0));
    }
}
