//! Slurm as the allocator: a ticket is a job that holds nodes.
//!
//! ```text
//!   hold:    scontrol show nodes ──► how many could be had
//!            salloc --no-shell   ──► job: fewer and fewer, until it is granted at once
//!            scontrol show job   ──► how many places on which nodes; then each host grants
//!   ended:   scontrol show job: TIMEOUT, CANCELLED, NODE_FAIL, …
//!   release: scancel
//! ```
//!
//! Slurm keeps the site's quotas, priorities and time limits, and other jobs off the nodes. Hosts
//! still grant by their own books, so that what Slurm does not know (memory that snapshots use) is
//! never promised twice. A node is the member of the cluster that has its `NodeName` as its name.
//! One clone is a task, or several clones are ([`Settings::clones_per_task`]): Slurm counts cores,
//! vmfork counts CPUs that mostly wait.
//!
//! Nothing runs in the job: `--no-shell` holds it until it is cancelled or its time is over. Jobs
//! of a daemon that died are known by their names.
//!
//! Left to others: when a job is not needed any more, and what happens to clones whose job ended.

mod commands;
mod parse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use crate::allocate::{AllocateError, Allocator, Ask, Boxed, Held, HostView, PLACES_MAX, Policy};
use crate::id::{HostId, hex, random};
use crate::room::Room;

use parse::Job;

pub use commands::{Commands, Output, System};

/// What errors call it.
const ENGINE: &str = "Slurm";
/// Most reasons that are told: who reads them wants to know what is wrong, not a list of all hosts.
const REASONS_MAX: usize = 8;
/// Most jobs that are asked for at a time; others wait for their turn. Programs in guests may ask
/// for many.
const ASKS_MAX: usize = 16;

/// What the site says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub partition: Option<String>,
    /// A feature that nodes with vmfork have.
    pub constraint: Option<String>,
    pub account: Option<String>,
    /// After which Slurm ends the job; the partition's if `None`.
    pub time_limit_min: Option<u32>,
    /// How long `salloc` may wait for resources before less is asked for. Schedulers look every few
    /// seconds.
    pub patience_s: u32,
    /// Clones for each task. A task has as many of Slurm's CPUs as a clone has virtual ones.
    pub clones_per_task: u32,
    /// Names of members for nodes whose `NodeName` is another.
    pub nodes: BTreeMap<String, String>,
    /// More arguments for `salloc`.
    pub extra: Vec<String>,
    /// `SLURM_CONF` for the commands.
    pub conf: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            partition: None,
            constraint: None,
            account: None,
            time_limit_min: None,
            patience_s: 5,
            clones_per_task: 1,
            nodes: BTreeMap::new(),
            extra: Vec::new(),
            conf: None,
        }
    }
}

/// The allocator.
#[derive(Debug, Clone)]
pub struct Slurm {
    own: HostId,
    commands: Arc<dyn Commands>,
    settings: Settings,
    asks: Arc<Semaphore>,
}

/// What a job has to have.
#[derive(Debug, Clone, Copy)]
struct Task {
    cpus: u32,
    memory_mib: u64,
}

impl Slurm {
    /// For the daemon of host `own`, whose jobs are named by it.
    pub fn new(own: HostId, settings: Settings) -> Self {
        let commands = Arc::new(System::new(settings.conf.clone()));
        Self::with_commands(own, settings, commands)
    }

    /// With other commands than the system's.
    pub fn with_commands(own: HostId, settings: Settings, commands: Arc<dyn Commands>) -> Self {
        Self { own, commands, settings, asks: Arc::new(Semaphore::new(ASKS_MAX)) }
    }

    fn name_prefix(&self) -> String {
        format!("vmfork-{}-", self.own)
    }

    fn clones_per_task(&self) -> u32 {
        self.settings.clones_per_task.max(1)
    }

    fn task(&self, shape: Room) -> Task {
        let bytes = shape.memory_bytes.saturating_mul(self.clones_per_task().into());
        Task { cpus: shape.vcpus.max(1), memory_mib: bytes.div_ceil(1 << 20).max(1) }
    }

    /// Runs a command that should succeed; what it printed.
    async fn run(
        &self,
        program: &'static str,
        arguments: Vec<String>,
    ) -> Result<Output, AllocateError> {
        self.commands
            .run(program, arguments, self.bound())
            .await
            .map_err(|source| AllocateError::Command { engine: ENGINE, source })
    }

    /// A controller that is busy or comes back takes seconds to answer.
    fn bound(&self) -> Duration {
        Duration::from_secs(30 + u64::from(self.settings.patience_s))
    }

    async fn run_well(
        &self,
        program: &'static str,
        arguments: Vec<String>,
    ) -> Result<String, AllocateError> {
        let output = self.run(program, arguments).await?;
        if output.success { Ok(output.stdout) } else { Err(failed(program, &output)) }
    }

    /// How many tasks all nodes together could take if there were no other requests, up to `most`;
    /// and the nodes that are of no use.
    async fn estimate(
        &self,
        task: Task,
        most: u32,
        views: &[HostView],
    ) -> Result<(u32, Vec<String>), AllocateError> {
        let arguments = strings(&["--oneliner", "show", "nodes"]);
        let text = self.run_well("scontrol", arguments).await?;
        let nodes =
            parse::nodes(&text).map_err(|error| unreadable("scontrol show nodes", &error))?;
        let (mut tasks, mut useless) = (0_u32, Vec::new());
        for node in nodes {
            let wanted = self.settings.partition.as_ref();
            if wanted.is_some_and(|it| !node.partitions.contains(it)) {
                continue;
            }
            let is_open = |view: &HostView| view.closed.is_none();
            if !self.member(&node.name, views).is_some_and(is_open) {
                useless.push(node.name);
                continue;
            }
            if !node.is_up {
                continue;
            }
            let by_memory = node.memory_free_mib / task.memory_mib;
            let here = u32::try_from(by_memory).unwrap_or(u32::MAX).min(node.cpus_free / task.cpus);
            tasks = tasks.saturating_add(here);
        }
        Ok((tasks.min(most), useless))
    }

    /// The member that a node is.
    fn member<'a>(&self, node: &str, views: &'a [HostView]) -> Option<&'a HostView> {
        let name = self.settings.nodes.get(node).map_or(node, String::as_str);
        views.iter().find(|view| view.name == name)
    }

    /// A name that only the job of this ask has.
    fn job_name(&self, ask: &Ask) -> Result<String, AllocateError> {
        // Names of families are ids; anything else is left out.
        let family: String =
            ask.family.chars().filter(char::is_ascii_alphanumeric).take(32).collect();
        Ok(format!("{}{family}-{}", self.name_prefix(), hex(&random::<16>()?)))
    }

    fn salloc_arguments(
        &self,
        name: &str,
        ask: &Ask,
        task: Task,
        tasks: u32,
        useless: &[String],
    ) -> Vec<String> {
        let Settings { partition, constraint, account, time_limit_min, patience_s, extra, .. } =
            &self.settings;
        let mut arguments = strings(&["--no-shell"]);
        arguments.push(format!("--job-name={name}"));
        arguments.push(format!("--immediate={patience_s}"));
        arguments.push(format!("--ntasks={tasks}"));
        if ask.policy == Policy::Spread {
            arguments.push("--spread-job".to_owned());
        }
        if !useless.is_empty() {
            arguments.push(format!("--exclude={}", useless.join(",")));
        }
        arguments.push(format!("--cpus-per-task={}", task.cpus));
        let per_cpu = task.memory_mib.div_ceil(task.cpus.into());
        arguments.push(format!("--mem-per-cpu={per_cpu}M"));
        let options = [("partition", partition), ("constraint", constraint), ("account", account)];
        for (option, value) in options {
            arguments.extend(value.iter().map(|value| format!("--{option}={value}")));
        }
        arguments.extend(time_limit_min.iter().map(|min| format!("--time={min}")));
        arguments.extend(extra.iter().cloned());
        arguments
    }

    /// A job of up to `most` tasks.
    async fn salloc(
        &self,
        ask: &Ask,
        task: Task,
        most: u32,
        views: &[HostView],
    ) -> Result<u32, AllocateError> {
        let name = self.job_name(ask)?;
        let (mut tasks, useless) = self.estimate(task, most, views).await?;
        let mut last = "no node of a host that takes clones has as much free".to_owned();
        // Halved each time: 17 times at most.
        while tasks > 0 {
            let arguments = self.salloc_arguments(&name, ask, task, tasks, &useless);
            let output = match self.run("salloc", arguments).await {
                Ok(output) => output,
                Err(error) => {
                    // It may have been granted all the same. The first error is the one to tell.
                    let _ = self.run("scancel", vec![format!("--name={name}")]).await;
                    return Err(error);
                }
            };
            if let Some(job) = parse::granted_job(&output.stderr) {
                if output.success {
                    return Ok(job);
                }
                // Granted, and then something went wrong.
                self.cancel(job).await?;
            }
            if output.success || !parse::is_busy(&output.stderr) {
                return Err(failed("salloc", &output));
            }
            last = last_line(&output.stderr);
            tasks /= 2;
        }
        let why = vec![format!("Slurm: {last}")];
        Err(AllocateError::NoRoom { asked: ask.count, shape: ask.shape, why })
    }

    async fn job(&self, job: u32) -> Result<Option<Job>, AllocateError> {
        let arguments = strings(&["--details", "--oneliner", "show", "job", &job.to_string()]);
        let output = self.run("scontrol", arguments).await?;
        if output.success {
            let job = parse::job(&output.stdout);
            return job.map(Some).map_err(|error| unreadable("scontrol show job", &error));
        }
        if parse::is_unknown_job(&output.stderr) {
            Ok(None)
        } else {
            Err(failed("scontrol", &output))
        }
    }

    async fn cancel(&self, job: u32) -> Result<(), AllocateError> {
        let output = self.run("scancel", vec![job.to_string()]).await?;
        if output.success || parse::is_unknown_job(&output.stderr) {
            Ok(())
        } else {
            Err(failed("scancel", &output))
        }
    }

    async fn grant(&self, ask: &Ask, views: &[HostView]) -> Result<Held, AllocateError> {
        let _turn = self.asks.acquire().await;
        let wanted = ask.count.clamp(1, PLACES_MAX);
        let task = self.task(ask.shape);
        let most = wanted.div_ceil(self.clones_per_task());
        let job = self.salloc(ask, task, most, views).await?;
        let held = self.held(ask, views, task, job).await;
        if held.is_err() {
            // The first error is the one to tell.
            let _ = self.cancel(job).await;
        }
        held
    }

    async fn held(
        &self,
        ask: &Ask,
        views: &[HostView],
        task: Task,
        job: u32,
    ) -> Result<Held, AllocateError> {
        let Some(held) = self.job(job).await? else {
            return Err(engine_error(format!("job {job} ended at once")));
        };
        let mut short = Vec::new();
        let mut places: BTreeMap<HostId, u32> = BTreeMap::new();
        for on in &held.nodes {
            let Some(view) = self.member(&on.node, views) else {
                short.push(format!("{}: Slurm gave this node, which is no member", on.node));
                continue;
            };
            match view.closed {
                Some(why) => short.push(format!("{}: {why}", view.name)),
                None => {
                    let clones = (on.cpus / task.cpus).saturating_mul(self.clones_per_task());
                    let has = places.entry(view.id).or_default();
                    *has = has.saturating_add(clones);
                }
            }
        }
        places.retain(|_, count| *count > 0);
        let has = places.values().copied().fold(0, u32::saturating_add);
        if has < ask.count {
            short.push(format!("Slurm gave room for {has}"));
        } else {
            short.clear();
        }
        shorten(&mut short);
        if places.is_empty() {
            return Err(AllocateError::NoRoom { asked: ask.count, shape: ask.shape, why: short });
        }
        Ok(Held { job: job.to_string(), places, short })
    }
}

/// The number of a job of ours.
fn number(job: &str) -> Result<u32, AllocateError> {
    job.parse().map_err(|_| engine_error(format!("`{}` is no job", crate::id::shortened(job))))
}

fn shorten(reasons: &mut Vec<String>) {
    let more = reasons.len().saturating_sub(REASONS_MAX);
    if more > 0 {
        reasons.truncate(REASONS_MAX);
        reasons.push(format!("and {more} more"));
    }
}

impl Allocator for Slurm {
    fn hold<'a>(
        &'a self,
        ask: &'a Ask,
        views: &'a [HostView],
    ) -> Boxed<'a, Result<Option<Held>, AllocateError>> {
        Box::pin(async move {
            // By itself, so that a job that is granted to somebody who has gone away is given back.
            let (done, granted) = oneshot::channel();
            let (it, ask, views) = (self.clone(), ask.clone(), views.to_vec());
            tokio::spawn(async move {
                let granted = it.grant(&ask, &views).await;
                if let Err(Ok(held)) = done.send(granted) {
                    // If Slurm can't be reached, the next life of the daemon finds it.
                    let _ = it.release(&held.job).await;
                }
            });
            let ended = |_| Err(engine_error("the task that asks was stopped".to_owned()));
            granted.await.unwrap_or_else(ended).map(Some)
        })
    }

    fn release<'a>(&'a self, job: &'a str) -> Boxed<'a, Result<(), AllocateError>> {
        Box::pin(async move { self.cancel(number(job)?).await })
    }

    fn ended<'a>(&'a self, job: &'a str) -> Boxed<'a, Result<Option<String>, AllocateError>> {
        Box::pin(async move {
            Ok(match self.job(number(job)?).await? {
                // One that waits was left by a daemon that died while it asked: it may still get
                // its nodes.
                Some(it) if parse::holds_nodes(&it.state) || it.state == "PENDING" => None,
                Some(it) if it.reason == "None" => {
                    Some(format!("Slurm ended job {job}: {}", it.state))
                }
                Some(it) => Some(format!("Slurm ended job {job}: {} ({})", it.state, it.reason)),
                None => Some(format!("Slurm has no job {job} any more")),
            })
        })
    }

    fn jobs(&self) -> Boxed<'_, Result<BTreeSet<String>, AllocateError>> {
        Box::pin(async move {
            let text = self.run_well("squeue", strings(&["--noheader", "--format=%i %j"])).await?;
            let prefix = self.name_prefix();
            let ours = text.lines().filter_map(|line| {
                let (id, name) = line.trim().split_once(' ')?;
                name.starts_with(&prefix).then(|| id.to_owned())
            });
            Ok(ours.collect())
        })
    }
}

fn engine_error(what: String) -> AllocateError {
    AllocateError::Engine { engine: ENGINE, what }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|it| (*it).to_owned()).collect()
}

fn last_line(text: &str) -> String {
    crate::id::shortened(text.trim_end().lines().last().unwrap_or("it said nothing"))
}

fn failed(program: &str, output: &Output) -> AllocateError {
    engine_error(format!("`{program}` failed: {}", last_line(&output.stderr)))
}

fn unreadable(command: &str, error: &parse::ParseError) -> AllocateError {
    engine_error(format!("what `{command}` printed can't be read: {error}"))
}
