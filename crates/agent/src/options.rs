//! The command line of the agent as a service.

use std::path::PathBuf;
use std::time::Duration;

use crate::port::PortPath;

/// Longer than a daemon takes to give a fork up.
const FORK_LIMIT: Duration = Duration::from_secs(30);

pub(crate) const USAGE: &str = "\
vmfork-agent: the guest side of vmfork

As PID 1 it needs no arguments: in an initrd it sets up the root file system, in a root file
system it serves.

usage: vmfork-agent serve [OPTION…]

  --port PATH           a character device or a listening unix socket, instead of the
                        virtio-serial port org.vmfork.agent.0
  --apply-identity      apply entropy, clock, host name and machine id although --port is given
  --dry-identity DIR    write them to files under DIR instead
  --run-dir DIR         where fork.sock, vmid and identity.json are; default /run/vmfork
  --fork-limit-ms N     how long a fork may take before the agent goes on; default 30000
  --firstboot PATH      run this program first; in a guest /etc/vmfork/firstboot is run
  --version             print the version
  --help                print this
";

/// What becomes of an identity that the daemon sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effects {
    /// It is applied to this machine.
    Real,
    /// It is written to files under this folder.
    Dry(PathBuf),
    /// It is refused.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) port: PortPath,
    pub(crate) effects: Effects,
    pub(crate) run_dir: PathBuf,
    /// How long a fork may take before the agent speaks again unasked.
    pub(crate) fork_limit: Duration,
    /// What is to be run before the VM is ready.
    pub(crate) firstboot: Option<PathBuf>,
}

impl Options {
    /// Those of the agent in its own guest.
    pub(crate) fn in_guest() -> Self {
        Self {
            port: PortPath::Virtio,
            effects: Effects::Real,
            run_dir: PathBuf::from("/run/vmfork"),
            fork_limit: FORK_LIMIT,
            firstboot: Some(PathBuf::from(crate::firstboot::PROGRAM)),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Serve(Options),
    Help,
    Version,
}

/// Read the arguments after the program's name.
///
/// # Errors
/// A sentence for the user.
pub(crate) fn parse(args: &[String]) -> Result<Command, String> {
    let mut args = args.iter();
    match args.next().map(String::as_str) {
        Some("serve") => {}
        Some("--help" | "-h") => return Ok(Command::Help),
        Some("--version" | "-V") => return Ok(Command::Version),
        Some(other) => return Err(format!("unknown command `{other}`")),
        None => return Err("no command; as PID 1 none is needed".to_owned()),
    }
    let (mut port, mut apply, mut dry, mut run_dir, mut firstboot) =
        (None, false, None, None, None);
    let mut fork_limit = FORK_LIMIT;
    while let Some(arg) = args.next() {
        let mut value = || args.next().map(PathBuf::from).ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--port" => port = Some(value()?),
            "--apply-identity" => apply = true,
            "--dry-identity" => dry = Some(value()?),
            "--run-dir" => run_dir = Some(value()?),
            "--fork-limit-ms" => {
                let limit = value()?;
                let ms = limit.to_str().and_then(|text| text.parse().ok());
                fork_limit = Duration::from_millis(ms.ok_or("--fork-limit-ms needs a number")?);
            }
            "--firstboot" => firstboot = Some(value()?),
            "--help" | "-h" => return Ok(Command::Help),
            other => return Err(format!("unknown option `{other}`")),
        }
    }
    let effects = match (dry, apply || port.is_none()) {
        (Some(_), _) if apply => {
            return Err("--apply-identity and --dry-identity exclude each other".to_owned());
        }
        (Some(folder), _) => Effects::Dry(folder),
        (None, true) => Effects::Real,
        (None, false) => Effects::Refused,
    };
    let guest = Options::in_guest();
    Ok(Command::Serve(Options {
        port: port.map_or(PortPath::Virtio, PortPath::Path),
        effects,
        run_dir: run_dir.unwrap_or(guest.run_dir),
        fork_limit,
        firstboot,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(&line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_port_of_ones_own_leaves_the_machine_alone_unless_told() {
        let effects = |line: &str| match parsed(line) {
            Ok(Command::Serve(options)) => options.effects,
            other => panic!("{other:?}"),
        };
        assert_eq!(effects("serve"), Effects::Real);
        assert_eq!(effects("serve --port /x"), Effects::Refused);
        assert_eq!(effects("serve --port /x --apply-identity"), Effects::Real);
        assert_eq!(effects("serve --dry-identity /d"), Effects::Dry("/d".into()));
    }

    #[test]
    fn what_it_does_not_know_is_named() {
        assert_eq!(parsed("serve --prot /x"), Err("unknown option `--prot`".into()));
        assert_eq!(parsed("serve --port"), Err("--port needs a value".into()));
    }
}
