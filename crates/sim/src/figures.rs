//! vmTorrent's figures 4 to 10 (CoNEXT 2012, §4.3 to 4.5), drawn for our loads.
//!
//! What the paper's text says in numbers is drawn beside them. Of figures 4 to 7 it has only
//! curves, so ours have none of the paper's beside them.

use std::time::Duration;

use crate::chart::{self, Chart, Curve, GREY, Scale};
use crate::evaluation::{Evaluation, WAYS};
use crate::report::{Report, SLICE};
use crate::scenario::{Link, Mode, Scenario, ScenarioError};
use crate::table::{modelled, playback};
use crate::world::simulate;

const MIB: f64 = (1 << 20) as f64;
const MBIT_BYTES_PER_S: u64 = 125_000;

/// What dashes mean.
const SIMULATED: (&str, &str) = ("simulated", "");
const MODEL: (&str, &str) = ("model", "6 4");
const PAPER: (&str, &str) = ("the paper", "1 2");

const DEMAND: (&str, &str) = ("demand", "#b3452c");
const PROFILE: (&str, &str) = ("profile", "#2c9a57");

/// Of each of [`WAYS`].
const WAY_COLOURS: [&str; 6] = ["#b3452c", "#d98a3d", "#8a4fb0", "#2c9a57", "#5b9bd5", "#2c6fb3"];

/// Figure 10's numbers of hosts. The paper's text says the rate in Mbit/s that each gets at most,
/// and after how many seconds.
const SWARMS: [(usize, &str, &str, (f64, f64)); 2] =
    [(16, "16 hosts", "#2c6fb3", (6.0, 80.0)), (100, "100 hosts", "#b3452c", (36.0, 60.0))];

/// A figure of the paper with our curves.
#[derive(Debug, Clone)]
pub struct Figure {
    /// Of its file, such as `figure-4`.
    pub name: &'static str,
    pub svg: String,
    /// A line for each curve.
    pub summary: Vec<String>,
    /// Broken promises of what was simulated for it.
    pub violations: Vec<String>,
}

/// What is drawn.
#[derive(Debug, Clone)]
pub struct Figures {
    /// With links of any speed: each figure has its own.
    pub evaluation: Evaluation,
    /// Of figures 8 and 9, and of 9 alone.
    pub hosts: Vec<usize>,
    pub more_hosts: Vec<usize>,
}

impl Figures {
    /// All figures.
    ///
    /// # Errors
    /// The scenario makes no sense.
    pub fn all(&self) -> Result<Vec<Figure>, ScenarioError> {
        let more: Vec<usize> = self.hosts.iter().chain(&self.more_hosts).copied().collect();
        Ok(vec![
            self.delay()?,
            self.playback()?,
            self.scalability("figure-8", 100, &self.hosts, &PAPER_8)?,
            self.scalability("figure-9", 1000, &more, &PAPER_9)?,
            self.efficiency()?,
        ])
    }

    fn at(&self, link_mbit: u64) -> Evaluation {
        let link = Link { bytes_per_s: link_mbit * MBIT_BYTES_PER_S, ..self.evaluation.link };
        Evaluation { link, ..self.evaluation.clone() }
    }

    /// One host, at 100 Mbit/s: how much later each access is than with the image in memory.
    fn delay(&self) -> Result<Figure, ScenarioError> {
        let mut drawn = Drawn::new("cumulative delay in seconds, by time in seconds");
        for (colour, has_profile) in [(DEMAND, false), (PROFILE, true)] {
            let scenario = self.at(100).scenario(Mode::Unicast, has_profile, 1);
            let cached = playback(&scenario).cached();
            let (policy, rate) = modelled(&scenario);
            let delay = |times: Vec<Duration>| -> Vec<(f64, f64)> {
                let both = times.into_iter().zip(&cached);
                let late = both.map(|(at, (own, _))| (at, at.saturating_sub(*own)));
                late.map(|(at, late)| (at.as_secs_f64(), late.as_secs_f64())).collect()
            };
            let report = drawn.simulated(&scenario)?;
            drawn.curve(colour, SIMULATED, delay(report.played));
            let modelled = playback(&scenario).curve(policy, rate);
            drawn.curve(colour, MODEL, delay(modelled.into_iter().map(|(at, _)| at).collect()));
        }
        Ok(drawn.figure("figure-4", Scale::Linear, Scale::Linear))
    }

    /// One host, by links: what has been accessed, by time.
    fn playback(&self) -> Result<Figure, ScenarioError> {
        let mut drawn = Drawn::new("accessed in MiB, by time in seconds, at 100 and 1000 Mbit/s");
        let mib = |curve: Vec<(Duration, u64)>| -> Vec<(f64, f64)> {
            curve.into_iter().map(|(at, bytes)| (at.as_secs_f64(), bytes as f64 / MIB)).collect()
        };
        let ways = [
            ("demand, 100", "#b3452c", 100, false),
            ("profile, 100", "#d98a3d", 100, true),
            ("demand, 1000", "#2c6fb3", 1000, false),
            ("profile, 1000", "#2c9a57", 1000, true),
        ];
        for (name, colour, link_mbit, has_profile) in ways {
            let scenario = self.at(link_mbit).scenario(Mode::Unicast, has_profile, 1);
            let cached = playback(&scenario).cached();
            if drawn.curves.is_empty() {
                drawn.curve(("memory", GREY), MODEL, mib(cached.clone()));
            }
            let (policy, rate) = modelled(&scenario);
            drawn.curve((name, colour), MODEL, mib(playback(&scenario).curve(policy, rate)));
            let played = drawn.simulated(&scenario)?.played;
            let bytes = cached.into_iter().map(|(_, bytes)| bytes);
            drawn.curve((name, colour), SIMULATED, mib(played.into_iter().zip(bytes).collect()));
        }
        Ok(drawn.figure("figures-5-to-7", Scale::Linear, Scale::Linear))
    }

    /// Run time over that with the image in memory, by the number of hosts.
    fn scalability(
        &self,
        name: &'static str,
        link_mbit: u64,
        hosts: &[usize],
        paper: &[(&str, f64, f64, f64)],
    ) -> Result<Figure, ScenarioError> {
        let mut drawn = Drawn::new("run time over that in memory, by hosts");
        let evaluation = self.at(link_mbit);
        let mut evaluated = Vec::new();
        for hosts in hosts {
            let one = evaluation.of(*hosts)?;
            drawn.violations.extend(one.violations.iter().cloned());
            evaluated.push(one);
        }
        for (at, ((way, ..), colour)) in WAYS.into_iter().zip(WAY_COLOURS).enumerate() {
            let ratios = || evaluated.iter().map(|one| (one.hosts as f64, one.ratios[at]));
            let simulated = ratios().filter_map(|(hosts, of)| Some((hosts, of.simulated?)));
            drawn.curve((way, colour), SIMULATED, simulated.collect());
            drawn.curve((way, colour), MODEL, ratios().map(|(x, of)| (x, of.model)).collect());
            for (_, hosts, low, high) in paper.iter().filter(|(its, ..)| *its == way) {
                let mut points = vec![(*hosts, *low), (*hosts, *high)];
                points.dedup();
                drawn.curve((way, colour), PAPER, points);
            }
        }
        Ok(drawn.figure(name, Scale::Logarithmic, Scale::Logarithmic))
    }

    /// What each host of a swarm with a profile takes in, by time.
    fn efficiency(&self) -> Result<Figure, ScenarioError> {
        let mut drawn = Drawn::new("taken in by each host in Mbit/s, by time in seconds");
        for (hosts, name, colour, paper) in SWARMS {
            if hosts > self.evaluation.hosts_simulated_max {
                continue;
            }
            let scenario = self.at(100).scenario(Mode::Swarm, true, hosts);
            let slices = drawn.simulated(&scenario)?.received_bytes_by_slice;
            let to_mbit = 8.0 / 1e6 / SLICE.as_secs_f64() / hosts as f64;
            let middle = |at: u32| (SLICE * at + SLICE / 2).as_secs_f64();
            let points = (0..).zip(slices).map(|(at, bytes)| (middle(at), bytes as f64 * to_mbit));
            drawn.curve((name, colour), SIMULATED, points.collect());
            drawn.curve((name, colour), PAPER, vec![paper]);
        }
        Ok(drawn.figure("figure-10", Scale::Linear, Scale::Linear))
    }
}

/// §4.4.1: run times with 100 hosts, over that in memory. *p2p_d* takes 4 to 11 times as long as
/// *p2p_p*.
const PAPER_8: [(&str, f64, f64, f64); 3] =
    [("cs_d", 100.0, 40.0, 70.0), ("p2p_d", 100.0, 8.0, 33.0), ("p2p_p", 100.0, 2.0, 3.0)];

/// §4.4.2: what the paper extrapolates to.
const PAPER_9: [(&str, f64, f64, f64); 1] = [("p2p_p", 1024.0, 8.0, 8.0)];

/// A figure that is being made.
struct Drawn {
    title: &'static str,
    curves: Vec<Curve>,
    colours: Vec<(&'static str, &'static str)>,
    dashes: Vec<(&'static str, &'static str)>,
    violations: Vec<String>,
}

impl Drawn {
    fn new(title: &'static str) -> Self {
        let (curves, colours, dashes, violations) = Default::default();
        Self { title, curves, colours, dashes, violations }
    }

    fn simulated(&mut self, scenario: &Scenario) -> Result<Report, ScenarioError> {
        let report = simulate(scenario)?;
        self.violations.extend(report.violations.iter().cloned());
        Ok(report)
    }

    fn curve(
        &mut self,
        colour: (&'static str, &'static str),
        dashes: (&'static str, &'static str),
        points: Vec<(f64, f64)>,
    ) {
        if points.is_empty() {
            return;
        }
        self.curves.push(Curve { colour: colour.1, dashes: dashes.1, points });
        for (all, one) in [(&mut self.colours, colour), (&mut self.dashes, dashes)] {
            if !all.contains(&one) {
                all.push(one);
            }
        }
    }

    fn figure(self, name: &'static str, x: Scale, y: Scale) -> Figure {
        let Self { title, curves, colours, dashes, violations } = self;
        let chart = Chart { title: title.to_owned(), x, y, curves, colours, dashes };
        let summary = chart.summary();
        Figure { name, svg: chart::svg(&[chart]), summary, violations }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::chart::words_apart;
    use crate::trace::Trace;

    fn figures() -> Figures {
        let pages = 4096;
        let evaluation = Evaluation {
            trace: Rc::new(Trace::database(pages, Duration::from_secs(2))),
            pages,
            link: Link::default(),
            seed: 1,
            hosts_simulated_max: 16,
        };
        Figures { evaluation, hosts: vec![1, 4, 100], more_hosts: vec![1024] }
    }

    /// The numbers of the line of a curve: the highest value, where, the last one, where.
    fn numbers(figure: &Figure, of: &str) -> [f64; 4] {
        let line = figure.summary.iter().find(|line| line.contains(of));
        let line = line.unwrap_or_else(|| panic!("{of}: {:?}", figure.summary));
        let words = line.rsplit(": ").next().expect("numbers").split([' ', ',']);
        let numbers: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
        numbers.try_into().expect("four numbers")
    }

    #[test]
    fn each_figure_shows_what_the_paper_saw() {
        let all = figures().all().expect("makes sense");
        let names: Vec<_> = all.iter().map(|figure| figure.name).collect();
        assert_eq!(names, ["figure-4", "figures-5-to-7", "figure-8", "figure-9", "figure-10"]);
        for figure in &all {
            assert!(figure.violations.is_empty(), "{:?}", figure.violations);
            assert!(!figure.svg.contains("NaN") && !figure.svg.contains("inf"));
            words_apart(&figure.svg, 1);
        }
        // 16 MiB take 1.4 s of the link, and the VM computes for 2 s.
        let [_, _, demand, _] = numbers(&all[0], "demand, simulated");
        let [_, _, profile, _] = numbers(&all[0], "profile, simulated");
        assert!(profile < 0.2 && demand > 0.5, "{profile} {demand}");
        // All curves of playback end with all bytes, the sooner the less it waits.
        let ends = ["memory", "profile, 1000, simulated", "demand, 100, simulated"];
        let ends = ends.map(|name| numbers(&all[1], name));
        assert!(ends.iter().all(|end| (end[2] - ends[0][2]).abs() < 0.01), "{ends:?}");
        assert!(ends[0][3] <= ends[1][3] && ends[1][3] < ends[2][3], "{ends:?}");
        // The paper's numbers are there, and the model's where nothing is simulated.
        assert!((numbers(&all[2], "cs_d, the paper")[0] - 70.0).abs() < 0.01);
        assert!((numbers(&all[2], "p2p_p, model")[3] - 100.0).abs() < 0.01);
        assert!((numbers(&all[2], "p2p_p, simulated")[3] - 4.0).abs() < 0.01);
        assert!((numbers(&all[3], "p2p_p, the paper")[3] - 1024.0).abs() < 0.01);
        // No host takes in more than its link carries, and 16 nearly use theirs.
        let [most, ..] = numbers(&all[4], "16 hosts, simulated");
        assert!((50.0..=100.5).contains(&most), "{most}");
        assert!(!all[4].svg.contains("100 hosts"));
    }

    #[test]
    fn all_that_hosts_take_in_is_in_a_slice() {
        let figures = figures();
        let scenario = figures.at(100).scenario(Mode::Swarm, true, 4);
        let report = simulate(&scenario).expect("makes sense");
        let received: u64 = report.received_bytes.iter().skip(1).sum();
        assert_eq!(report.received_bytes_by_slice.iter().sum::<u64>(), received);
        assert_eq!(report.played.len(), scenario.traces[0].steps().len());
        assert!(report.played.is_sorted());
    }
}
