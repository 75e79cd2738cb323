//! `vmfork-sim`: simulates page transfer and prints tables.

#![deny(unsafe_code)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use vmfork_sim::{
    Evaluated, Evaluation, Figures, Link, Mode, RECORDED, Row, Scenario, Trace, table,
};

/// Simulates how the pages of a VM that was forked come to many hosts.
#[derive(Debug, Parser)]
#[command(name = "vmfork-sim")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Completion time and bytes per host against the number of hosts, beside vmTorrent's model.
    Table(Table),
    /// vmTorrent's evaluation: run time over that with the image in memory, simulated and, in
    /// brackets, by its model.
    Vmtorrent(Vmtorrent),
    /// vmTorrent's figures 4 to 10 as drawings (SVG), simulated and by its model, with what the
    /// paper says in numbers.
    Figures(FiguresOptions),
}

/// What VMs do.
#[derive(Debug, Args)]
struct Load {
    /// Recorded from real clones: `scan` reads 256 MiB of its parent's, `python` starts a program,
    /// `idle` runs `true`. Of VMs that boot from an image: `boot`, `boot-python`. Made up:
    /// `database` reads the whole image in order. Else a file with lines `micros page[+pages] r|w`.
    #[arg(long, value_name = "NAME|FILE", default_value = "boot-python")]
    trace: String,
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    image: u64,
    /// What a VM computes in all, of `database`.
    #[arg(long, value_name = "MS", default_value_t = 60_000)]
    compute: u64,
    /// One way, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 100)]
    latency: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// With more hosts, only the model's figures.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    simulate_up_to: usize,
}

#[derive(Debug, Args)]
struct FiguresOptions {
    /// Folder for the drawings. It is made if it is absent.
    folder: PathBuf,
    /// Numbers of hosts in figures 8 and 9.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,100")]
    hosts: Vec<usize>,
    /// Numbers of hosts in figure 9 alone.
    #[arg(long, value_delimiter = ',', default_value = "256,1024")]
    more_hosts: Vec<usize>,
    #[command(flatten)]
    load: Load,
}

#[derive(Debug, Args)]
struct Vmtorrent {
    /// Numbers of hosts that run a VM, beside the server.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,100")]
    hosts: Vec<usize>,
    /// The links' speed, in Mbit/s.
    #[arg(long, value_name = "MBIT", default_value_t = 100)]
    link: u64,
    #[command(flatten)]
    load: Load,
    /// One JSON object for each number of hosts, in an array.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Table {
    /// Numbers of hosts with a clone, beside the parent's.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128")]
    hosts: Vec<usize>,
    /// How pages travel: unicast, multicast, swarm.
    #[arg(long, value_delimiter = ',', default_value = "unicast,multicast,swarm")]
    mode: Vec<Mode>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Recorded from real clones: `scan` reads 256 MiB of its parent's, `python` starts a program,
    /// `idle` runs `true`. Of VMs that boot from an image: `boot`, `boot-python`. Made up:
    /// `database` reads the whole image in order; `clone` a tenth of it, in a few zones. Else a
    /// file with lines `micros page[+pages] r|w`.
    #[arg(long, value_name = "NAME|FILE", default_value = "scan")]
    trace: String,
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    image: u64,
    /// What a clone computes in all, of `database` and `clone`.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    compute: u64,
    /// Fetch nothing ahead.
    #[arg(long)]
    demand: bool,
    /// The links' speed, in Mbit/s.
    #[arg(long, value_name = "MBIT", default_value_t = 1000)]
    link: u64,
    /// One way, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 100)]
    latency: u64,
    /// Of a million packets.
    #[arg(long, value_name = "N", default_value_t = 0)]
    loss: u32,
    /// Fetch everything in the background, in each host's own order.
    #[arg(long)]
    hydrate: bool,
    /// Clones begin at random within this time.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    start_within: u64,
    /// What is small waits in line behind what is large.
    #[arg(long)]
    one_line: bool,
    /// One JSON object for each row, in an array.
    #[arg(long)]
    json: bool,
    /// A drawing (SVG) in place of the table.
    #[arg(long, conflicts_with = "json")]
    svg: bool,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Table(options) => print_table(&options),
        Command::Vmtorrent(options) => print_evaluation(&options),
        Command::Figures(options) => draw_figures(&options),
    }
}

impl Load {
    fn evaluation(&self, link_mbit: u64) -> Result<Evaluation> {
        let pages = self.image.saturating_mul(256);
        let trace = trace(&self.trace, pages, Duration::from_millis(self.compute))?;
        let link = Link {
            bytes_per_s: link_mbit * 1_000_000 / 8,
            latency: Duration::from_micros(self.latency),
            ..Link::default()
        };
        let (seed, hosts_simulated_max) = (self.seed, self.simulate_up_to);
        Ok(Evaluation { trace: Rc::new(trace), pages, link, seed, hosts_simulated_max })
    }
}

/// By its name, or from a file.
fn trace(name: &str, pages: u64, compute: Duration) -> Result<Trace> {
    if let Some(recorded) = RECORDED.iter().find(|recorded| recorded.name == name) {
        return recorded.trace(pages).with_context(|| format!("the trace `{name}`"));
    }
    if name == "database" {
        return Ok(Trace::database(pages, compute));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("read the trace {name}"))?;
    Trace::parse(&text, pages).with_context(|| format!("trace {name}"))
}

/// Fails if promises were broken.
fn check(violations: usize) -> Result<()> {
    if violations > 0 {
        bail!("{violations} promises were broken; the rows say which");
    }
    Ok(())
}

fn draw_figures(options: &FiguresOptions) -> Result<()> {
    let folder: &Path = &options.folder;
    std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let evaluation = options.load.evaluation(100)?;
    let (hosts, more_hosts) = (options.hosts.clone(), options.more_hosts.clone());
    let mut out = std::io::stdout().lock();
    let mut broken = 0;
    for figure in (Figures { evaluation, hosts, more_hosts }).all()? {
        let file = folder.join(figure.name).with_extension("svg");
        std::fs::write(&file, &figure.svg).with_context(|| format!("write {}", file.display()))?;
        writeln!(out, "{}", file.display())?;
        for line in &figure.summary {
            writeln!(out, "    {line}")?;
        }
        for violation in &figure.violations {
            writeln!(out, "    BROKEN: {violation}")?;
        }
        broken += figure.violations.len();
    }
    check(broken)
}

fn print_evaluation(options: &Vmtorrent) -> Result<()> {
    let evaluation = options.load.evaluation(options.link)?;
    let mut out = std::io::stdout().lock();
    let mut all = Vec::new();
    if !options.json {
        writeln!(out, "{}", Evaluated::header())?;
    }
    for hosts in &options.hosts {
        let evaluated = evaluation.of(*hosts)?;
        if !options.json {
            writeln!(out, "{}", evaluated.line())?;
        }
        all.push(evaluated);
    }
    if options.json {
        serde_json::to_writer_pretty(&mut out, &all).context("write the figures")?;
        writeln!(out)?;
    }
    check(all.iter().map(|evaluated| evaluated.violations.len()).sum())
}

fn print_table(options: &Table) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let as_text = !options.json && !options.svg;
    if as_text {
        writeln!(out, "{}", Row::header())?;
    }
    let traces = Traces::read(options)?;
    let mut written = Ok(());
    let rows = table(
        &options.hosts,
        &options.mode,
        |mode, hosts| traces.scenario(options, mode, hosts),
        |row| {
            if as_text && written.is_ok() {
                written = writeln!(out, "{}", row.line());
            }
        },
    )?;
    written?;
    if options.json {
        serde_json::to_writer_pretty(&mut out, &rows).context("write the table")?;
        writeln!(out)?;
    }
    if options.svg {
        write!(out, "{}", vmfork_sim::svg(&rows))?;
    }
    check(rows.iter().map(|row| row.violations.len()).sum())
}

enum Traces {
    /// All clones do the same.
    Same(Rc<Trace>),
    /// Those of one family.
    Clones,
}

impl Traces {
    fn read(options: &Table) -> Result<Self> {
        let pages = pages(options);
        Ok(match options.trace.as_str() {
            "clone" => Self::Clones,
            name => Self::Same(Rc::new(trace(name, pages, compute(options))?)),
        })
    }

    fn scenario(&self, options: &Table, mode: Mode, hosts: usize) -> Scenario {
        let pages = pages(options);
        let clone = |number| {
            Rc::new(Trace::clone_like(pages, pages / 10, compute(options), options.seed, number))
        };
        let first = match self {
            Self::Same(trace) => Rc::clone(trace),
            // What an earlier clone touched: the working set that the others get ahead.
            Self::Clones => clone(0),
        };
        let mut scenario = Scenario::new(mode, pages, hosts, &first);
        if matches!(self, Self::Clones) {
            scenario.traces = (1..=hosts as u64).map(clone).collect();
        }
        if !options.demand {
            scenario.ahead = first.working_set(pages);
        }
        scenario.seed = options.seed;
        scenario.hydrates = options.hydrate;
        scenario.start_within = Duration::from_millis(options.start_within);
        scenario.link = Link {
            bytes_per_s: options.link * 1_000_000 / 8,
            latency: Duration::from_micros(options.latency),
            loss_per_million: options.loss,
            one_line: options.one_line,
            ..Link::default()
        };
        scenario
    }
}

fn pages(options: &Table) -> u64 {
    options.image.saturating_mul(256)
}

fn compute(options: &Table) -> Duration {
    Duration::from_millis(options.compute)
}
