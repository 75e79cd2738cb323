//! `vmfork top`: the VMs, most active first, until q.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use tokio::io::AsyncReadExt as _;
use tokio::time::sleep;
use vmfork_api::{HostInfo, Vm};

use super::ps;
use crate::client::{Client, Query};
use crate::config::{Endpoint, Global, TopConfig};
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, render_table};
use crate::start::reach;
use crate::terminal::Screen;

/// What lies between the two looks of the first frame: enough for a rate to mean something.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);

const KEYS_THAT_LEAVE: &[u8] = b"qQ\x03\x04\x1b";

/// One look at the host.
struct Sample {
    at: Instant,
    vms: Vec<Vm>,
    host: HostInfo,
    /// Processor time of each VM's QEMU so far, by VM id.
    cpu: HashMap<String, Duration>,
}

#[derive(Serialize)]
struct Frame {
    host: HostInfo,
    vms: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    vm: Vm,
    /// Processor time of its QEMU per second, in percent of one core; absent where it can't be
    /// seen.
    cpu_percent: Option<f64>,
    faults_per_s: f64,
}

pub(super) async fn run(global: &Global, config: TopConfig) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    let before = look(client).await?;
    sleep(FIRST_INTERVAL).await;
    let now = look(client).await?;
    let printer = &global.printer;
    let once = config.once || (!printer.json && !std::io::stdout().is_terminal());
    let screen =
        if once || printer.json { None } else { Screen::enter().context("set the terminal up")? };
    let frame = frame(&before, &now);
    match &screen {
        Some(_) => {}
        None if printer.json && once => {
            printer.with_schema(&frame)?;
            return Ok(Exit::Done);
        }
        None if printer.json => printer.document_line(&frame)?,
        None => {
            printer.data(&render(&frame))?;
            return Ok(Exit::Done);
        }
    }
    watch(client, &config, screen.as_ref(), now).await?;
    Ok(Exit::Done)
}

async fn watch(
    client: &Client<'_>,
    config: &TopConfig,
    screen: Option<&Screen>,
    mut before: Sample,
) -> anyhow::Result<()> {
    let printer = &client.global.printer;
    let leaving = leave_key(screen.is_some());
    tokio::pin!(leaving);
    loop {
        let next = async {
            sleep(config.interval).await;
            look(client).await
        };
        let now = tokio::select! {
            now = next => now?,
            () = &mut leaving => return Ok(()),
        };
        let frame = frame(&before, &now);
        match screen {
            Some(screen) => screen.draw(&render(&frame)).context("draw")?,
            None => printer.document_line(&frame)?,
        }
        before = now;
    }
}

/// Ends when a key is typed that leaves.
async fn leave_key(keys: bool) {
    if !keys {
        return std::future::pending().await;
    }
    let mut stdin = tokio::io::stdin();
    let mut buffer = [0; 64];
    while let Ok(len @ 1..) = stdin.read(&mut buffer).await {
        if buffer[..len].iter().any(|key| KEYS_THAT_LEAVE.contains(key)) {
            return;
        }
    }
}

async fn look(client: &Client<'_>) -> anyhow::Result<Sample> {
    let vms = ps::list(client, false).await?;
    let host = client.get(Query::new("/v1/host")).await?;
    let local = matches!(client.global.endpoint, Endpoint::Unix(_));
    let cpu = vms
        .iter()
        .filter(|_| local)
        .filter_map(|vm| Some((vm.id.clone(), cpu_time(vm.pid?)?)))
        .collect();
    Ok(Sample { at: Instant::now(), vms, host, cpu })
}

/// User and system time of a process so far.
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = stat_ticks(&stat)?;
    let per_s = rustix::param::clock_ticks_per_second();
    Some(Duration::from_millis(ticks.checked_mul(1000)?.checked_div(per_s)?))
}

/// `utime` and `stime`, the 14th and 15th field; the second may hold blanks and brackets.
fn stat_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let (utime, stime) = (fields.next()?, fields.next()?);
    utime.parse::<u64>().ok()?.checked_add(stime.parse().ok()?)
}

fn frame(before: &Sample, now: &Sample) -> Frame {
    let seconds = now.at.duration_since(before.at).as_secs_f64().max(0.001);
    let faults: HashMap<&str, u64> =
        before.vms.iter().map(|vm| (vm.id.as_str(), vm.faults)).collect();
    let mut vms: Vec<Row> = now
        .vms
        .iter()
        .map(|vm| {
            let cpu = now.cpu.get(&vm.id).zip(before.cpu.get(&vm.id));
            let old = faults.get(vm.id.as_str()).copied().unwrap_or(vm.faults);
            Row {
                vm: vm.clone(),
                cpu_percent: cpu.map(|(now, before)| {
                    now.saturating_sub(*before).as_secs_f64() / seconds * 100.0
                }),
                faults_per_s: per_second(vm.faults.saturating_sub(old), seconds),
            }
        })
        .collect();
    vms.sort_by(|a, b| {
        let cpu = |row: &Row| row.cpu_percent.unwrap_or_default();
        cpu(b).total_cmp(&cpu(a)).then_with(|| a.vm.name.cmp(&b.vm.name))
    });
    Frame { host: now.host.clone(), vms }
}

fn per_second(count: u64, seconds: f64) -> f64 {
    // Exact below 2^53, which no fault counter reaches.
    f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / seconds
}

fn render(frame: &Frame) -> String {
    let host = &frame.host;
    let mut text = format!(
        "{}, memory {} admissible of {}, virtual CPUs {} of {}, caches {}, pool {} of {} waiting\n\n",
        format::plural(u64::from(host.vms), "VM"),
        format::size(host.memory_admissible_bytes),
        format::size(host.memory_total_bytes),
        host.vcpus_admissible,
        host.vcpus_max,
        format::size(host.cache_bytes),
        host.pool.waiting,
        host.pool.target,
    );
    let rows = frame.vms.iter().map(|row| {
        vec![
            Field::Text(row.vm.name.clone()),
            Field::Text(row.vm.parent.clone().unwrap_or_else(|| "-".to_owned())),
            Field::State(row.vm.state),
            Field::Figure(
                row.cpu_percent.map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.0} %")),
            ),
            Field::Figure(format::size(row.vm.private_bytes)),
            Field::Figure(format::size(row.vm.shared_bytes)),
            Field::Figure(format!("{:.0}", row.faults_per_s)),
            Field::Figure(format::count(row.vm.faults)),
        ]
    });
    text.push_str(&render_table(
        &["VM", "PARENT", "STATE", "CPU", "PRIVATE", "SHARED", "FAULTS/S", "FAULTS"],
        rows.collect(),
        false,
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_past_any_process_name() {
        let stat = "42 (a) b (c)) S 1 42 42 0 -1 4194560 100 0 0 0 7 5 0 0 20 0 1 0 9 0 0";
        assert_eq!(stat_ticks(stat), Some(12));
        assert_eq!(stat_ticks("garbage"), None);
        assert!(cpu_time(std::process::id()).is_some());
    }
}
