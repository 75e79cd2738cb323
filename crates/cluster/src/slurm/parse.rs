//! What Slurm's commands print, read. Pure; tested on what Slurm 22.05 printed.

/// Most nodes that a list of hosts may name: Slurm's own bound for a job is about that.
const NODES_MAX: usize = 65_536;

/// What `scontrol` says of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    /// `RUNNING`, `TIMEOUT`, …
    pub(super) state: String,
    pub(super) reason: String,
    /// The nodes that it holds now.
    pub(super) nodes: Vec<Held>,
}

/// What a job holds on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) node: String,
    pub(super) cpus: u32,
}

/// What `scontrol` says of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// Whether it takes jobs, as far as its state tells.
    pub(super) is_up: bool,
    pub(super) cpus_free: u32,
    pub(super) memory_free_mib: u64,
    pub(super) partitions: Vec<String>,
}

/// Text that is not what Slurm should print.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ParseError {
    #[error("it does not say `{key}=`")]
    Missing { key: &'static str },
    #[error("`{text}` is no list of hosts")]
    HostList { text: String },
    #[error("`{text}` is no list of CPUs")]
    CpuList { text: String },
    #[error("`{key}={text}` is no number")]
    Number { key: &'static str, text: String },
}

/// The number in `salloc: Granted job allocation 17`.
pub(super) fn granted_job(stderr: &str) -> Option<u32> {
    let after = stderr.split("Granted job allocation ").nth(1)?;
    let digits = after.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// Whether `salloc` got nothing because there is not as much now, and less might be had.
pub(super) fn is_busy(stderr: &str) -> bool {
    [
        "Requested nodes are busy",
        "Requested node configuration is not available",
        "Connection timed out",
    ]
    .iter()
    .any(|text| stderr.contains(text))
}

/// Whether a command says that there is no such job, any more or ever.
pub(super) fn is_unknown_job(stderr: &str) -> bool {
    stderr.contains("Invalid job id specified")
}

/// Whether a job in this state holds its nodes.
pub(super) fn holds_nodes(state: &str) -> bool {
    matches!(state, "RUNNING" | "CONFIGURING" | "SUSPENDED" | "STOPPED" | "RESIZING" | "SIGNALING")
}

fn value<'a>(line: &'a str, key: &'static str) -> Result<&'a str, ParseError> {
    let mut words = line.split_ascii_whitespace();
    words
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        .ok_or(ParseError::Missing { key })
}

fn number(line: &str, key: &'static str) -> Result<u64, ParseError> {
    let text = value(line, key)?;
    text.parse().map_err(|_| ParseError::Number { key, text: crate::id::shortened(text) })
}

/// `scontrol --details --oneliner show job ID`.
pub(super) fn job(line: &str) -> Result<Job, ParseError> {
    let state = value(line, "JobState")?.to_owned();
    let reason = value(line, "Reason")?.to_owned();
    let mut nodes = Vec::new();
    let mut list: Option<&str> = None;
    for word in line.split_ascii_whitespace() {
        if let Some(text) = word.strip_prefix("Nodes=") {
            list = Some(text);
        } else if let (Some(text), Some(hosts)) = (word.strip_prefix("CPU_IDs="), list) {
            let cpus = cpu_count(text)?;
            let hosts = host_list(hosts)?;
            nodes.extend(hosts.into_iter().map(|node| Held { node, cpus }));
            list = None;
            if nodes.len() > NODES_MAX {
                return Err(ParseError::HostList { text: "too many hosts".to_owned() });
            }
        }
    }
    Ok(Job { state, reason, nodes })
}

/// `scontrol --oneliner show nodes`, a line for each.
pub(super) fn nodes(text: &str) -> Result<Vec<Node>, ParseError> {
    text.lines().filter(|line| !line.trim().is_empty()).map(node).collect()
}

fn node(line: &str) -> Result<Node, ParseError> {
    // `IDLE`, `MIXED+DRAIN`, `DOWN*`: the star is for a node that does not answer.
    let state = value(line, "State")?;
    let mut flags = state.split('+');
    let is_up = matches!(flags.next(), Some("IDLE" | "MIXED" | "ALLOCATED"))
        && flags.all(|flag| flag == "CLOUD" || flag == "DYNAMIC_NORM");
    let free =
        |all, used| Ok::<u64, ParseError>(number(line, all)?.saturating_sub(number(line, used)?));
    // A node in no partition does not name any.
    let partitions = value(line, "Partitions").unwrap_or_default();
    Ok(Node {
        name: value(line, "NodeName")?.to_owned(),
        is_up,
        cpus_free: u32::try_from(free("CPUTot", "CPUAlloc")?).unwrap_or(u32::MAX),
        memory_free_mib: free("RealMemory", "AllocMem")?,
        partitions: partitions.split(',').map(str::to_owned).collect(),
    })
}

/// How many CPUs are in `0-3,6`.
fn cpu_count(text: &str) -> Result<u32, ParseError> {
    let error = || ParseError::CpuList { text: crate::id::shortened(text) };
    let mut count: u32 = 0;
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
            return Err(error());
        };
        let here = last.checked_sub(first).and_then(|it| it.checked_add(1)).ok_or_else(error)?;
        count = count.checked_add(here).ok_or_else(error)?;
    }
    Ok(count)
}

/// The names in `h[1-3,5],rack[01-02]n7`. Names with several brackets, too.
pub(super) fn host_list(text: &str) -> Result<Vec<String>, ParseError> {
    let error = || ParseError::HostList { text: crate::id::shortened(text) };
    let mut names = Vec::new();
    for item in split_outside_brackets(text).ok_or_else(error)? {
        let mut expanded = vec![String::new()];
        let mut rest = item;
        while !rest.is_empty() {
            let (plain, after) = rest.split_once('[').unwrap_or((rest, ""));
            expanded.iter_mut().for_each(|name| name.push_str(plain));
            if plain.len() == rest.len() {
                break;
            }
            let (ranges, after) = after.split_once(']').ok_or_else(error)?;
            let numbers = numbers(ranges, expanded.len()).ok_or_else(error)?;
            expanded = expanded
                .iter()
                .flat_map(|name| numbers.iter().map(move |number| format!("{name}{number}")))
                .collect();
            rest = after;
        }
        names.extend(expanded);
        if names.len() > NODES_MAX {
            return Err(error());
        }
    }
    if names.iter().any(String::is_empty) { Err(error()) } else { Ok(names) }
}

/// Parts between commas that are in no brackets; `None` if brackets don't match.
fn split_outside_brackets(text: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    let (mut start, mut open) = (0, false);
    for (at, c) in text.char_indices() {
        match (c, open) {
            ('[', false) => open = true,
            (']', true) => open = false,
            ('[', true) | (']', false) => return None,
            (',', false) => {
                parts.push(text.get(start..at)?);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text.get(start..)?);
    if open { None } else { Some(parts) }
}

/// `01-03,7` as text, with its zeros. Not more than there may be if each is put to `names` names.
fn numbers(ranges: &str, names: usize) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for part in ranges.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let digits = |text: &str| {
            let plain =
                !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
            if plain { text.parse::<u32>().ok() } else { None }
        };
        let (from, to, width) = (digits(first)?, digits(last)?, first.len());
        let count = usize::try_from(to.checked_sub(from)?).ok()?.checked_add(1)?;
        if all.len().checked_add(count)?.checked_mul(names)? > NODES_MAX {
            return None;
        }
        all.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Some(all)
}
