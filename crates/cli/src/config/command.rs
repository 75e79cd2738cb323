//! Each command's options, checked.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::time::Duration;

use vmfork_api::{ExecRequest, ForkRequest, KillRequest, LabelFilter, TtlRequest, name_is_valid};

use super::{
    ClusterAction, DiskAction, EventsConfig, ImageAction, RunConfig, SnapshotAction, VolumeAction,
    cluster, misuse, run, value,
};
use crate::args::{
    RawCommand, RawCp, RawDaemon, RawExec, RawFork, RawGlobal, RawKill, RawPlace, RawTop, Shell,
};
use crate::failure::Misuse;

/// The daemon's own bound, where a request names none (see `vmfork-api`).
const FORK_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) enum Command {
    Run(RunConfig),
    Exec(ExecConfig),
    Cp(CpConfig),
    Fork(ForkConfig),
    Ps { all: bool, filters: Vec<LabelFilter> },
    Tree { filters: Vec<LabelFilter> },
    Inspect { vm: String },
    Logs { vm: String, follow: bool },
    Events(EventsConfig),
    Console { vm: String },
    Pause { vms: Vec<String> },
    Resume { vms: Vec<String> },
    Ttl { vm: String, request: TtlRequest },
    Kill(KillConfig),
    Rm(RmConfig),
    Top(TopConfig),
    Doctor,
    Version,
    Image(ImageAction),
    Disk(DiskAction),
    Snapshot(SnapshotAction),
    Volume(VolumeAction),
    Cluster(ClusterAction),
    Daemon(DaemonAction),
    Completion(Shell),
}

#[derive(Debug)]
pub(crate) struct ExecConfig {
    pub(crate) vm: String,
    pub(crate) request: ExecRequest,
    pub(crate) stdin: bool,
    pub(crate) tty: bool,
}

#[derive(Debug)]
pub(crate) struct CpConfig {
    pub(crate) from: Place,
    pub(crate) to: Place,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Standard input or output.
    Stream,
    Here(PathBuf),
    Guest {
        vm: String,
        path: String,
    },
}

#[derive(Debug)]
pub(crate) struct ForkConfig {
    pub(crate) vm: String,
    pub(crate) request: ForkRequest,
    pub(crate) bound: Duration,
}

#[derive(Debug)]
pub(crate) struct KillConfig {
    pub(crate) vms: Vec<String>,
    pub(crate) request: KillRequest,
}

#[derive(Debug)]
pub(crate) struct RmConfig {
    pub(crate) vms: Vec<String>,
    pub(crate) force: bool,
}

#[derive(Debug)]
pub(crate) struct TopConfig {
    pub(crate) once: bool,
    pub(crate) interval: Duration,
}

#[derive(Debug)]
pub(crate) enum DaemonAction {
    Start,
    Stop { force: bool },
    Restart { force: bool },
    Status,
}

impl Command {
    pub(crate) fn new(raw: RawCommand, global: &RawGlobal) -> Result<Self, Misuse> {
        Ok(match raw {
            RawCommand::Run(raw) => Self::Run(run::run(raw)?),
            RawCommand::Exec(raw) => Self::Exec(exec(raw, global.json)?),
            RawCommand::Cp(raw) => Self::Cp(cp(&raw)?),
            RawCommand::Fork(raw) => Self::Fork(fork(raw)?),
            RawCommand::Ps(raw) => {
                Self::Ps { all: raw.all, filters: value::filters(&raw.filters.labels)? }
            }
            RawCommand::Tree(raw) => Self::Tree { filters: value::filters(&raw.labels)? },
            RawCommand::Inspect(raw) => Self::Inspect { vm: vm(raw.vm)? },
            RawCommand::Logs(raw) => Self::Logs { vm: vm(raw.vm)?, follow: raw.follow },
            RawCommand::Events(raw) => Self::Events(EventsConfig::new(raw)?),
            RawCommand::Console(raw) => {
                if global.json {
                    return misuse("console: --json does not apply to a terminal; remove it");
                }
                Self::Console { vm: vm(raw.vm)? }
            }
            RawCommand::Pause(raw) => Self::Pause { vms: vms(raw.vms)? },
            RawCommand::Resume(raw) => Self::Resume { vms: vms(raw.vms)? },
            RawCommand::Ttl(raw) => {
                let ttl_ms = match raw.ttl.as_str() {
                    "none" => None,
                    text => Some(value::ttl(text, "TIME")?),
                };
                Self::Ttl { vm: vm(raw.vm)?, request: TtlRequest { ttl_ms } }
            }
            RawCommand::Kill(raw) => Self::Kill(kill(raw)?),
            RawCommand::Rm(raw) => Self::Rm(RmConfig { vms: vms(raw.vms)?, force: raw.force }),
            RawCommand::Top(raw) => Self::Top(top(&raw)?),
            RawCommand::Doctor => Self::Doctor,
            RawCommand::Version => Self::Version,
            RawCommand::Image(raw) => Self::Image(ImageAction::new(raw)?),
            RawCommand::Disk(raw) => Self::Disk(DiskAction::new(raw, global.json)?),
            RawCommand::Snapshot(raw) => Self::Snapshot(SnapshotAction::new(raw, global)?),
            RawCommand::Volume(raw) => Self::Volume(VolumeAction::new(raw)?),
            RawCommand::Cluster(raw) => Self::Cluster(cluster::action(raw)?),
            RawCommand::Daemon(raw) => Self::Daemon(match raw {
                RawDaemon::Start => DaemonAction::Start,
                RawDaemon::Stop { force } => DaemonAction::Stop { force },
                RawDaemon::Restart { force } => DaemonAction::Restart { force },
                RawDaemon::Status => DaemonAction::Status,
            }),
            RawCommand::Completion { shell } => Self::Completion(shell),
        })
    }
}

impl Command {
    /// Time to undo partial work after an interrupt.
    pub(crate) fn unwind_bound(&self) -> Duration {
        match self {
            // A build's own processes end, and its folder goes.
            Self::Image(_) => Duration::from_secs(10),
            _ => Duration::ZERO,
        }
    }
}

fn vm(name: String) -> Result<String, Misuse> {
    value::name(name, "VM's name")
}

fn vms(names: Vec<String>) -> Result<Vec<String>, Misuse> {
    names.into_iter().map(vm).collect()
}

fn exec(raw: RawExec, json: bool) -> Result<ExecConfig, Misuse> {
    if json && raw.tty {
        return misuse(
            "exec: --json collects the output and needs no terminal; remove -t or --json",
        );
    }
    if raw.argv.first().is_none_or(String::is_empty) {
        return misuse("exec: the program name is empty");
    }
    let mut env = BTreeMap::new();
    for text in raw.env {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None => match env::var(&text) {
                Ok(value) => (text, value),
                Err(env::VarError::NotPresent) => continue,
                Err(env::VarError::NotUnicode(_)) => {
                    return misuse(format!(
                        "--env {text}: the value of the variable is not UTF-8; use KEY=VALUE"
                    ));
                }
            },
        };
        if key.is_empty() || key.contains('\0') || value.contains('\0') {
            return misuse("--env: empty name or NUL byte; write it as KEY=VALUE");
        }
        env.insert(key, value);
    }
    let timeout = raw.timeout.map(|text| value::time(&text, "--timeout")).transpose()?;
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        return misuse("--timeout 0: the program would be killed immediately; use a longer time");
    }
    Ok(ExecConfig {
        vm: vm(raw.vm)?,
        request: ExecRequest {
            argv: raw.argv,
            env,
            cwd: raw.workdir,
            user: raw.user,
            stdin_base64: None,
            timeout_ms: timeout.map(value::millis),
            tty: None,
        },
        stdin: raw.interactive || raw.tty,
        tty: raw.tty,
    })
}

fn cp(raw: &RawCp) -> Result<CpConfig, Misuse> {
    let (from, to) = (place(&raw.from)?, place(&raw.to)?);
    match (&from, &to) {
        (Place::Guest { .. }, Place::Guest { .. }) => misuse(
            "cp: one side must be local; from VM to VM use `vmfork cp A:PATH - | vmfork cp - B:PATH`",
        ),
        (Place::Guest { .. }, _) | (_, Place::Guest { .. }) => Ok(CpConfig { from, to }),
        _ => misuse("cp: one side must be in a VM; write it as VM:PATH"),
    }
}

/// `VM:PATH` if what stands before the first colon could name a VM; a local file of such a name
/// is reached by `./NAME`.
fn place(text: &str) -> Result<Place, Misuse> {
    if text == "-" {
        return Ok(Place::Stream);
    }
    match text.split_once(':') {
        Some((vm, path)) if name_is_valid(vm) => {
            if path.is_empty() {
                return misuse(format!("cp: {text}: the path is empty; write it as VM:PATH"));
            }
            Ok(Place::Guest { vm: vm.to_owned(), path: path.to_owned() })
        }
        _ if text.is_empty() => misuse("cp: a path is empty"),
        _ => Ok(Place::Here(PathBuf::from(text))),
    }
}

fn fork(raw: RawFork) -> Result<ForkConfig, Misuse> {
    let (count, names) = value::several(raw.count, raw.names, "clone")?;
    let timeout = raw.timeout.map(|text| value::time(&text, "--timeout")).transpose()?;
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        return misuse("--timeout 0: no clone can be ready in time; use a longer time");
    }
    Ok(ForkConfig {
        vm: vm(raw.vm)?,
        request: ForkRequest {
            count,
            names,
            all_or_nothing: raw.all_or_nothing,
            timeout_ms: timeout.map(value::millis),
            place: raw.place.map(|place| match place {
                RawPlace::Here => vmfork_api::Place::Here,
                RawPlace::Spread => vmfork_api::Place::Spread,
                RawPlace::Pack => vmfork_api::Place::Pack,
            }),
            hosts: (!raw.hosts.is_empty()).then_some(raw.hosts),
            hydrate_mib_per_s: raw.hydrate,
            labels: value::labels(&raw.labels)?,
            ttl_ms: raw.ttl.map(|text| value::ttl(&text, "--ttl")).transpose()?,
        },
        bound: timeout.unwrap_or(FORK_TIMEOUT_DEFAULT),
    })
}

fn kill(raw: RawKill) -> Result<KillConfig, Misuse> {
    let grace = raw.grace.map(|text| value::time(&text, "--grace")).transpose()?;
    let grace_ms = value::millis(grace.unwrap_or_default());
    Ok(KillConfig { vms: vms(raw.vms)?, request: KillRequest { grace_ms, family: raw.family } })
}

fn top(raw: &RawTop) -> Result<TopConfig, Misuse> {
    let interval = match &raw.interval {
        None => Duration::from_secs(1),
        Some(text) => value::time(text, "--interval")?,
    };
    if interval < Duration::from_millis(100) {
        return misuse("--interval: shorter than 100ms; use 100ms or more");
    }
    Ok(TopConfig { once: raw.once, interval })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::RawArgs;

    fn parse(line: &str) -> Result<Command, String> {
        let raw = RawArgs::try_parse_from(line.split(' ')).map_err(|error| error.to_string())?;
        Command::new(raw.command, &raw.global).map_err(|error| error.to_string())
    }

    #[test]
    fn the_flag_definitions_are_consistent() {
        <RawArgs as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn places_are_told_apart_by_what_stands_before_the_colon() {
        let guest =
            |vm: &str, path: &str| Place::Guest { vm: vm.to_owned(), path: path.to_owned() };
        assert_eq!(place("web:/etc/x:y").unwrap(), guest("web", "/etc/x:y"));
        assert_eq!(place("./web:x").unwrap(), Place::Here("./web:x".into()));
        assert_eq!(place("/a/b:c").unwrap(), Place::Here("/a/b:c".into()));
        assert_eq!(place("-").unwrap(), Place::Stream);
        assert!(place("web:").is_err());
        assert!(parse("vmfork cp a b").is_err());
        assert!(parse("vmfork cp a:/x b:/y").is_err());
    }

    #[test]
    fn names_of_clones_must_be_as_many_as_clones_and_differ() {
        let Ok(Command::Fork(fork)) = parse("vmfork fork web --name a,b --name c") else {
            panic!("three names are three clones")
        };
        assert_eq!(fork.request.count, 3);
        for bad in [
            "vmfork fork web -n 2 --name a",
            "vmfork fork web --name a,a",
            "vmfork fork web -n 0",
            "vmfork fork web -n 1025",
            "vmfork fork web --name ../x",
            "vmfork fork web --timeout 0",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_programs_own_flags_stay_with_the_program() {
        let Ok(Command::Exec(exec)) = parse("vmfork exec web -i -e A=1 -- sh -c -i --json") else {
            panic!("a plain exec")
        };
        assert_eq!(exec.request.argv, ["sh", "-c", "-i", "--json"]);
        assert!(exec.stdin && !exec.tty);
        let Ok(Command::Exec(exec)) = parse("vmfork exec web ls -l -t") else { panic!("no --") };
        assert_eq!(exec.request.argv, ["ls", "-l", "-t"]);
        assert!(!exec.tty);
    }

    #[test]
    fn bad_names_are_refused_before_the_daemon_is_asked() {
        for bad in ["vmfork run ../x", "vmfork inspect a/b", "vmfork kill ok .."] {
            assert!(parse(bad).unwrap_err().contains("is not a valid"), "{bad}");
        }
    }
}
