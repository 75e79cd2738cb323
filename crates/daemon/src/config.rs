//! The daemon's settings: flags and environment ([`Flags`]), checked into a [`Config`].

mod slurm;

use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::EnvFilter;

pub use self::slurm::{AllocatorFlags, AllocatorKind};
use vmfork_api::disk::RootDevice;
use vmfork_host::config::QEMU_UIDS;
use vmfork_host::quotas::{self, QuotaError};
use vmfork_peers::{PageTransfer, TicketPlace};
use vmfork_rest::http::SOCKET_PATH_BYTES_MAX;

const STATE_DEFAULT: &str = "/var/lib/vmfork";
const SOCKET_DEFAULT: &str = "/run/vmfork/vmforkd.sock";
const QEMU_DEFAULT: &str = "qemu-system-x86_64";

/// The flags as given.
#[derive(Debug, Clone, Parser)]
#[command(name = "vmforkd", version, about = "Fork running virtual machines: the daemon of a host")]
pub struct Flags {
    /// State folder: images, snapshots, logs and the journal [default: /var/lib/vmfork]
    #[arg(long, value_name = "DIR", env = "VMFORK_STATE")]
    pub state: Option<PathBuf>,

    /// Unix socket of the REST API [default: vmforkd.sock in the --state folder, else
    /// /run/vmfork/vmforkd.sock]
    #[arg(long, value_name = "PATH", env = "VMFORK_SOCKET")]
    pub socket: Option<PathBuf>,

    /// Group that may use the socket besides its owner: name or number
    #[arg(long, value_name = "GROUP", env = "VMFORK_SOCKET_GROUP")]
    pub socket_group: Option<String>,

    /// Serve the REST API on TCP too, to clients that have the token
    #[arg(long, value_name = "IP:PORT", env = "VMFORK_LISTEN")]
    pub listen: Option<SocketAddr>,

    /// File that holds the token for --listen; must not be world-readable
    #[arg(long, value_name = "PATH", env = "VMFORK_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,

    /// Time for which the sockets of a daemon that died wait for the next one, in seconds; 0: they
    /// end with the daemon
    #[arg(long, value_name = "SECONDS", env = "VMFORK_HOLDER_LINGER_S", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub holder_linger_s: u32,

    /// QEMU processes kept ready for clones, per machine shape in use; 0: none
    #[arg(long, value_name = "N", env = "VMFORK_POOL", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub pool: u32,

    /// How guests read their image's root, where `run` does not say [default: pmem if image and
    /// memory allow it]
    #[arg(long, value_name = "DEVICE", env = "VMFORK_ROOT_DEVICE",
          value_parser = root_device)]
    pub root_device: Option<RootDevice>,

    /// Pages that one fault loads into the cache, neighbours included
    #[arg(long, value_name = "N", env = "VMFORK_FILL_UNIT_PAGES", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub fill_unit_pages: u32,

    /// QEMU program that runs VMs [default: qemu-system-x86_64 in PATH]
    #[arg(long, value_name = "PATH", env = "VMFORK_QEMU")]
    pub qemu: Option<PathBuf>,

    /// First of 65,536 user and group ids for QEMU processes, one id per process
    #[arg(long, value_name = "UID", env = "VMFORK_QEMU_UID_BASE", default_value_t = 1_879_100_000)]
    pub qemu_uid_base: u32,

    /// Memory reserved for the rest of the host, in MiB
    #[arg(long, value_name = "MIB", env = "VMFORK_MEMORY_RESERVE_MIB", default_value_t = 512)]
    pub memory_reserve_mib: u64,

    /// Expected share of its memory that a clone writes, in percent; 100: never overcommit
    #[arg(long, value_name = "N", env = "VMFORK_CLONE_GROWTH_PERCENT", default_value_t = 10,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub clone_growth_percent: u8,

    /// How pages reach clones on other hosts
    #[arg(long, value_name = "FORM", env = "VMFORK_PAGE_TRANSFER", value_enum, default_value_t)]
    pub page_transfer: PageTransfer,

    /// Most VMs of a family that guests can reach by tickets; forks from outside may exceed it
    #[arg(long, value_name = "N", env = "VMFORK_FAMILY_VMS_MAX", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub family_vms_max: u32,

    /// Share of the host's VM memory that a family can reach by tickets, in percent
    #[arg(long, value_name = "N", env = "VMFORK_FAMILY_MEMORY_PERCENT", default_value_t = 75,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub family_memory_percent: u8,

    /// Share of the host's vCPUs that a family can reach by tickets, in percent
    #[arg(long, value_name = "N", env = "VMFORK_FAMILY_VCPUS_PERCENT", default_value_t = 75,
          value_parser = clap::value_parser!(u8).range(1..=100))]
    pub family_vcpus_percent: u8,

    /// Most vCPUs of all VMs per core of this host; 1: never overcommit
    #[arg(long, value_name = "N", env = "VMFORK_VCPUS_PER_CORE", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub vcpus_per_core: u32,

    /// Most bytes that all disks and volumes of this host may hold: 500G, 2T. In any case, 1 GiB
    /// of their file system stays free [default: no bound]
    #[arg(long, value_name = "SIZE", env = "VMFORK_DISK_QUOTA")]
    pub disk_quota: Option<String>,

    /// Placement in the cluster of clones that guests of this host fork by tickets
    #[arg(long, value_name = "HOW", env = "VMFORK_TICKET_PLACE", value_enum, default_value_t)]
    pub ticket_place: TicketPlace,

    /// Limits of a user over all hosts, and of its disks on this one:
    /// `USER=vms:N,memory:SIZE,cores:N,disk:SIZE`, each part optional. USER is a name, a number,
    /// `token` (clients over TCP) or `default` (all others). For several users, repeat it or
    /// separate them with `;`
    #[arg(long, value_name = "USER=LIMITS", env = "VMFORK_QUOTA", value_delimiter = ';')]
    pub quota: Vec<String>,

    #[command(flatten)]
    pub allocator: AllocatorFlags,

    /// Log level: error, warn, info, debug, trace, or filters like `info,vmfork_fork=debug`
    #[arg(long, value_name = "FILTER", env = "VMFORK_LOG", default_value = "info")]
    pub log_level: String,

    /// Serve `POST /v1/debug/vms/{vm}/engine-panic`, which makes the page engine of a VM's image
    /// panic; for tests
    #[arg(long, hide = true)]
    pub debug_faults: bool,

    /// Divide by N the waits after which a silent host of the cluster counts as gone, and what it
    /// had as lost; for tests
    #[arg(long, value_name = "N", hide = true, default_value = "1")]
    pub debug_pace: NonZeroU32,

    /// Folder of the shim, the guest agent and the holder [default: ../lib/vmfork, relative to
    /// vmforkd]
    #[arg(long, value_name = "DIR", env = "VMFORK_LIBDIR")]
    pub libdir: Option<PathBuf>,
}

/// The settings, checked. All paths are absolute.
#[derive(Debug, Clone)]
pub struct Config {
    pub host: vmfork_host::config::Config,
    pub peers: vmfork_peers::Settings,
    pub socket: PathBuf,
    pub socket_gid: Option<u32>,
    pub tcp: Option<Tcp>,
    /// How long a holder waits for the next daemon; zero: no holder.
    pub holder_linger: Duration,
    /// A valid filter for `tracing_subscriber::EnvFilter`.
    pub log_filter: String,
    /// Whether `/v1/debug` is served.
    pub debug_faults: bool,
}

#[derive(Debug, Clone)]
pub struct Tcp {
    pub address: SocketAddr,
    pub token_file: PathBuf,
}

/// A setting that is refused. The text names the flag.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "--listen {address} needs --token-file: without a token, any client that reaches the port is root"
    )]
    ListenWithoutToken { address: SocketAddr },
    #[error("--token-file without --listen: the unix socket uses no token; add --listen")]
    TokenWithoutListen,
    #[error(
        "--socket {path}: the path has {bytes} bytes, and at most {SOCKET_PATH_BYTES_MAX} are allowed; \
         choose a shorter one"
    )]
    SocketTooLong { path: PathBuf, bytes: usize },
    #[error("--socket-group {group}: /etc/group has no such group; use its name or number")]
    NoGroup { group: String },
    #[error("--socket-group {group}: cannot read /etc/group")]
    Groups {
        group: String,
        #[source]
        source: io::Error,
    },
    #[error("--qemu-uid-base {base}: must be 1000 to {}", UID_BASE_MAX)]
    UidBase { base: u32 },
    #[error(
        "--ticket-place here: with --allocator slurm, Slurm chooses the hosts of a ticket's job; use \
         `spread` or `pack`"
    )]
    TicketsWithoutJobs,
    #[error("--memory-reserve-mib {mib}: larger than any host's memory; use a smaller value")]
    Reserve { mib: u64 },
    #[error("--log-level {filter}: not a valid filter; use a level such as `info`")]
    LogFilter {
        filter: String,
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    #[error("--slurm-node {text}: write it as NODE=HOST, once per node")]
    SlurmNode { text: String },
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("--disk-quota {text}: not a size; write it as 512M, 100G or 2T")]
    DiskQuota { text: String },
    #[error("cannot find the working folder, to which paths are relative")]
    WorkingFolder(#[source] io::Error),
    #[error("cannot find the path of vmforkd; set --libdir")]
    Executable(#[source] io::Error),
}

/// User ids above 2³¹ are trouble in too many programs.
const UID_BASE_MAX: u32 = (1 << 31) - QEMU_UIDS;

impl Flags {
    /// # Errors
    /// A value is out of range, or contradicts another.
    pub fn check(self) -> Result<Config, ConfigError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(ConfigError::WorkingFolder);
        let state = absolute(self.state.as_deref().unwrap_or(Path::new(STATE_DEFAULT)))?;
        let socket = match (self.socket, self.state) {
            (Some(socket), _) => absolute(&socket)?,
            (None, Some(_)) => state.join("vmforkd.sock"),
            (None, None) => PathBuf::from(SOCKET_DEFAULT),
        };
        let bytes = socket.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            return Err(ConfigError::SocketTooLong { path: socket, bytes });
        }
        let tcp = match (self.listen, self.token_file) {
            (Some(address), Some(file)) => Some(Tcp { address, token_file: absolute(&file)? }),
            (Some(address), None) => return Err(ConfigError::ListenWithoutToken { address }),
            (None, Some(_)) => return Err(ConfigError::TokenWithoutListen),
            (None, None) => None,
        };
        if !(1000..=UID_BASE_MAX).contains(&self.qemu_uid_base) {
            return Err(ConfigError::UidBase { base: self.qemu_uid_base });
        }
        let slurm = self.allocator.check()?;
        if slurm.is_some() && self.ticket_place == TicketPlace::Here {
            return Err(ConfigError::TicketsWithoutJobs);
        }
        let memory_reserve_bytes = self
            .memory_reserve_mib
            .checked_mul(1 << 20)
            .ok_or(ConfigError::Reserve { mib: self.memory_reserve_mib })?;
        let disk_quota_bytes = match self.disk_quota {
            Some(text) => Some(quotas::size(&text).ok_or(ConfigError::DiskQuota { text })?),
            None => None,
        };
        if let Err(source) = EnvFilter::try_new(&self.log_level) {
            return Err(ConfigError::LogFilter { filter: self.log_level, source });
        }
        let libdir = match self.libdir {
            Some(libdir) => absolute(&libdir)?,
            None => libdir_beside(&std::env::current_exe().map_err(ConfigError::Executable)?),
        };
        let qemu = self.qemu.unwrap_or_else(|| PathBuf::from(QEMU_DEFAULT));
        let (bounds, disk_bounds) = quotas::bounds(&self.quota)?;
        let host = vmfork_host::config::Config {
            state,
            libdir,
            pool: self.pool,
            root_device: self.root_device,
            fill_unit_pages: self.fill_unit_pages,
            qemu: find_program(&qemu, std::env::var_os("PATH").as_deref()).unwrap_or(qemu),
            qemu_uid_base: self.qemu_uid_base,
            memory_reserve_bytes,
            clone_growth_percent: self.clone_growth_percent,
            family_vms_max: self.family_vms_max,
            family_memory_percent: self.family_memory_percent,
            family_vcpus_percent: self.family_vcpus_percent,
            vcpus_per_core: self.vcpus_per_core,
            quotas: bounds,
            disk_quota_bytes,
            disk_bounds,
        };
        let peers = vmfork_peers::Settings {
            page_transfer: self.page_transfer,
            ticket_place: self.ticket_place,
            slurm,
            pace: vmfork_peers::Pace::new(self.debug_pace),
        };
        Ok(Config {
            host,
            peers,
            socket,
            socket_gid: self.socket_group.map(|group| group_id(&group)).transpose()?,
            tcp,
            holder_linger: Duration::from_secs(self.holder_linger_s.into()),
            log_filter: self.log_level,
            debug_faults: self.debug_faults,
        })
    }
}

/// `/usr/bin/vmforkd` → `/usr/lib/vmfork`.
fn libdir_beside(executable: &Path) -> PathBuf {
    let bin = executable.parent().unwrap_or(Path::new("/"));
    bin.parent().unwrap_or(bin).join("lib/vmfork")
}

/// As a shell would: a name with a slash is a path, any other is looked for in `path`.
pub(crate) fn find_program(name: &Path, path: Option<&OsStr>) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let runs = |file: &Path| {
        file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    if name.as_os_str().as_bytes().contains(&b'/') {
        return std::path::absolute(name).ok().filter(|file| runs(file));
    }
    std::env::split_paths(path?).map(|folder| folder.join(name)).find(|file| runs(file))
}

fn group_id(group: &str) -> Result<u32, ConfigError> {
    if let Ok(gid) = group.parse() {
        return Ok(gid);
    }
    let groups = std::fs::read_to_string("/etc/group")
        .map_err(|source| ConfigError::Groups { group: group.to_owned(), source })?;
    find_group(&groups, group).ok_or_else(|| ConfigError::NoGroup { group: group.to_owned() })
}

/// `groups` is what group(5) describes: `name:password:gid:members`, a line each.
fn find_group(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn root_device(text: &str) -> Result<RootDevice, String> {
    match text {
        "pmem" => Ok(RootDevice::Pmem),
        "block" => Ok(RootDevice::Block),
        _ => Err("use pmem or block".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::builder::Resettable;
    use clap::{CommandFactory, FromArgMatches};

    use super::*;

    fn config(flags: &[&str]) -> Result<Config, ConfigError> {
        // Ignore the environment of the test run: `mk/env.sh` sets some of these variables.
        let command = Flags::command().mut_args(|arg| arg.env(Resettable::Reset));
        let matches = command.try_get_matches_from([&["vmforkd"], flags].concat());
        let flags = Flags::from_arg_matches(&matches.expect("flags that parse"));
        flags.expect("all flags").check()
    }

    fn refusal(flags: &[&str]) -> String {
        config(flags).expect_err("a refusal").to_string()
    }

    #[test]
    fn a_ticket_that_is_a_job_can_not_stay_here() {
        assert!(config(&["--ticket-place", "here"]).is_ok());
        assert_eq!(
            refusal(&["--allocator", "slurm", "--ticket-place", "here"]),
            "--ticket-place here: with --allocator slurm, Slurm chooses the hosts of a ticket's job; use \
         `spread` or `pack`"
        );
    }

    #[test]
    fn slurm_is_asked_only_if_it_is_named() {
        let config = |more: &[&str]| config(&[&["--slurm-node", "n1=h1"], more].concat());
        assert!(config(&[]).expect("no use, no harm").peers.slurm.is_none());
        let flags = ["--allocator", "slurm", "--slurm-partition=p", "--slurm-clones-per-task=2"];
        let slurm = config(&flags).expect("flags").peers.slurm.expect("named");
        assert_eq!((slurm.partition.as_deref(), slurm.clones_per_task), (Some("p"), 2));
        assert_eq!(slurm.nodes.get("n1").map(String::as_str), Some("h1"));
        for bad in ["n2", "=h2", "n2=", "n1=h2"] {
            let error = config(&["--slurm-node", bad]).expect_err(bad).to_string();
            assert!(error.starts_with(&format!("--slurm-node {bad}: ")), "{error}");
        }
    }

    #[test]
    fn quotas_are_read_from_several_flags() {
        let read = config(&["--quota", "7=vms:2", "--quota", "default=cores:4;8=memory:1G"]);
        let quotas = read.expect("well-formed").host.quotas;
        assert_eq!((quotas.of("7").vms, quotas.of("9").room.vcpus), (2, 4));
        assert_eq!(quotas.of("8").room.memory_bytes, 1 << 30);
        let of_disks = config(&["--disk-quota", "2T", "--quota", "default=disk:10G"]);
        let host = of_disks.expect("well-formed").host;
        assert_eq!(host.disk_quota_bytes, Some(2 << 40));
        assert_eq!(host.disk_bounds.default_bytes, Some(10 << 30));
        assert_eq!(
            refusal(&["--disk-quota", "10"]),
            "--disk-quota 10: not a size; write it as 512M, 100G or 2T"
        );
        assert_eq!(
            refusal(&["--quota", "7"]),
            "--quota 7: it has the form USER=vms:N,memory:SIZE,cores:N,disk:SIZE"
        );
    }

    #[test]
    fn the_defaults_are_a_whole_configuration() {
        let config = config(&[]).expect("defaults");
        assert_eq!(config.host.state, Path::new("/var/lib/vmfork"));
        assert_eq!(config.socket, Path::new("/run/vmfork/vmforkd.sock"));
        assert_eq!((config.host.pool, config.host.fill_unit_pages), (4, 16));
        assert!(config.tcp.is_none() && config.socket_gid.is_none());
        assert!(config.host.libdir.ends_with("lib/vmfork"));
    }

    #[test]
    fn the_socket_goes_with_the_state() {
        assert_eq!(config(&["--state", "/x"]).expect("ok").socket, Path::new("/x/vmforkd.sock"));
        let both = config(&["--state", "/x", "--socket", "/y"]).expect("ok");
        assert_eq!(both.socket, Path::new("/y"));
        let relative = config(&["--state", "x"]).expect("ok");
        assert!(relative.host.state.is_absolute() && relative.host.state.ends_with("x"));
    }

    #[test]
    fn a_port_is_served_with_a_token_only() {
        assert_eq!(
            refusal(&["--listen", "127.0.0.1:7070"]),
            "--listen 127.0.0.1:7070 needs --token-file: without a token, any client that reaches the port is root"
        );
        assert!(refusal(&["--token-file", "/t"]).starts_with("--token-file without --listen"));
        let config = config(&["--listen", "127.0.0.1:7070", "--token-file", "/t"]).expect("ok");
        assert_eq!(config.tcp.expect("tcp").address.port(), 7070);
    }

    #[test]
    fn values_that_cannot_be_are_refused_by_name() {
        let long = format!("/{}", "x".repeat(100));
        for flags in [
            &["--socket", &*long][..],
            &["--socket-group", "no:such:group"],
            &["--qemu-uid-base", "0"],
            &["--qemu-uid-base", "4000000000"],
            &["--memory-reserve-mib", "99999999999999999"],
            &["--log-level", "=[loud"],
        ] {
            assert!(refusal(flags).starts_with(flags[0]), "{flags:?}: {}", refusal(flags));
        }
        for flags in [
            ["--pool", "1025"],
            ["--fill-unit-pages", "0"],
            ["--fill-unit-pages", "513"],
            ["--clone-growth-percent", "101"],
            ["--family-memory-percent", "0"],
            ["--family-vcpus-percent", "101"],
            ["--vcpus-per-core", "0"],
            ["--ticket-place", "elsewhere"],
            ["--listen", "localhost"],
        ] {
            assert!(Flags::try_parse_from(["vmforkd", flags[0], flags[1]]).is_err(), "{flags:?}");
        }
    }

    #[test]
    fn groups_are_found_by_name_and_number() {
        let groups = "root:x:0:\nkvm:x:105:a,b\nbad:x\nkvmx:x:7:\n";
        assert_eq!(find_group(groups, "kvm"), Some(105));
        assert_eq!(find_group(groups, "bad"), None);
        assert_eq!(find_group(groups, "kv"), None);
        assert_eq!(group_id("42").ok(), Some(42));
    }

    #[test]
    fn programs_are_found_like_a_shell_does() {
        let found = find_program(Path::new("sh"), Some(OsStr::new("/nowhere:/bin:/usr/bin")));
        assert_eq!(found, Some(PathBuf::from("/bin/sh")));
        assert_eq!(find_program(Path::new("/bin/sh"), None), Some(PathBuf::from("/bin/sh")));
        assert_eq!(find_program(Path::new("/etc/passwd"), None), None);
        assert_eq!(find_program(Path::new("no-such"), Some(OsStr::new("/bin"))), None);
    }
}
