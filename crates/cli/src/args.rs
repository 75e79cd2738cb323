//! The command line as typed: names, shapes and help texts. Nothing is checked here that needs
//! more than one value or the environment; [`crate::config`] turns these into what commands run on.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

/// Fork running virtual machines.
#[derive(Debug, Parser)]
#[command(name = "vmfork", version, max_term_width = 100, arg_required_else_help = true)]
#[command(
    after_help = "Environment: VMFORK_SOCKET, VMFORK_STATE, VMFORK_HOST=tcp://HOST:PORT with \
                        VMFORK_TOKEN, NO_COLOR, VMFORK_NO_PROGRESS.\n\
                        Exit status: 0 done, 1 failed, 2 misuse; `exec` ends with the program's own."
)]
pub(crate) struct RawArgs {
    #[command(flatten)]
    pub(crate) global: RawGlobal,
    #[command(subcommand)]
    pub(crate) command: RawCommand,
}

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct RawGlobal {
    /// Print one JSON document instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// The daemon's unix socket
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// The daemon's state folder [default: /var/lib/vmfork]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Do not start a daemon if none answers
    #[arg(long, global = true)]
    pub(crate) no_start: bool,
    /// Say what is asked of the daemon
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// Print data and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawCommand {
    /// Start a VM from an image, or VMs from a stored snapshot
    Run(RawRun),
    /// Run a program in a VM
    Exec(RawExec),
    /// Copy a file or a folder into a VM or out of it
    Cp(RawCp),
    /// Fork a running VM into clones
    Fork(RawFork),
    /// List the VMs
    Ps(RawPs),
    /// Show the families of VMs
    Tree,
    /// Show everything about a VM
    Inspect(RawVm),
    /// Print what a VM's console and detached programs have printed
    Logs(RawLogs),
    /// Attach to a VM's serial console (Ctrl-] leaves)
    Console(RawVm),
    /// End VMs
    Kill(RawKill),
    /// Forget ended VMs
    Rm(RawRm),
    /// Watch the VMs' memory, faults and processor time
    Top(RawTop),
    /// Check what this host offers
    Doctor,
    /// Print the versions of vmfork and of the daemon
    Version,
    /// Build, list, import and remove guest images
    #[command(subcommand)]
    Image(RawImage),
    /// Keep VMs as stored snapshots, and look after those
    #[command(subcommand)]
    Snapshot(RawSnapshot),
    /// Join hosts that fork onto each other
    #[command(subcommand)]
    Cluster(RawCluster),
    /// Start, stop or look at the daemon
    #[command(subcommand)]
    Daemon(RawDaemon),
    /// Print a completion script for a shell
    Completion {
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawAccel {
    Kvm,
    Tcg,
}

#[derive(Debug, Args)]
pub(crate) struct RawRun {
    /// Name of a guest image (`vmfork image ls`) or of a snapshot (`vmfork snapshot ls`)
    pub(crate) name: String,
    /// NAME is an image's, even if there is a snapshot of that name
    #[arg(long, conflicts_with = "snapshot")]
    pub(crate) image: bool,
    /// NAME is a snapshot's, even if there is an image of that name
    #[arg(long)]
    pub(crate) snapshot: bool,
    /// Name of the VM [default: made from NAME]; of several, repeated or separated by commas
    #[arg(long = "name", value_name = "VM", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) names: Vec<String>,
    /// How long the VM may take until it is ready: 90s, 2m [default: 60s from a snapshot; 120s from
    /// an image, and 600s more for its first-boot command; 0 does not wait for that]
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// Guest memory: 512, 512M, 2G [default: 512M]
    #[arg(short, long, value_name = "SIZE", help_heading = OF_IMAGES)]
    pub(crate) memory: Option<String>,
    /// vCPUs [default: 1]
    #[arg(short, long, value_name = "N", help_heading = OF_IMAGES)]
    pub(crate) cpus: Option<u32>,
    /// Insist on an accelerator [default: KVM where it runs stock kernels, else TCG]
    #[arg(long, help_heading = OF_IMAGES)]
    pub(crate) accel: Option<RawAccel>,
    /// How many VMs [default: as many as names, or 1]
    #[arg(short = 'n', long = "count", value_name = "N", help_heading = OF_SNAPSHOTS)]
    pub(crate) count: Option<u32>,
    /// Start none if not all of them fit
    #[arg(long, help_heading = OF_SNAPSHOTS)]
    pub(crate) all_or_nothing: bool,
    /// Start although it was taken on another QEMU, machine or processor, where QEMU would try
    #[arg(long, help_heading = OF_SNAPSHOTS)]
    pub(crate) force: bool,
    /// Which pages come before the guest asks for them [default: all]
    #[arg(long, value_name = "WHICH", help_heading = OF_SNAPSHOTS)]
    pub(crate) prefetch: Option<RawPrefetch>,
    /// Bring in all other pages too, in the background, until the VM depends on the store no more; at
    /// most so many MiB per second, if given
    #[arg(long, value_name = "MIB_PER_S", num_args = 0..=1, help_heading = OF_SNAPSHOTS)]
    pub(crate) hydrate: Option<Option<u32>>,
}

const OF_IMAGES: &str = "Of images only";
const OF_SNAPSHOTS: &str = "Of snapshots only";
const OF_CLUSTERS: &str = "In a cluster";

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawPrefetch {
    /// None
    None,
    /// What the faults so far predict
    Demand,
    /// What earlier VMs of the snapshot touched first
    WorkingSet,
    /// Both
    All,
}

#[derive(Debug, Args)]
pub(crate) struct RawExec {
    /// Name or id of a VM
    pub(crate) vm: String,
    /// Pass standard input on to the program
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Run the program on a terminal (implies -i)
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// A user of the guest [default: root]
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Working folder in the guest
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Set a variable: KEY=VALUE, or KEY to pass on one of ours
    #[arg(short, long, value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) env: Vec<String>,
    /// Kill the program after so long: 500ms, 30s, 2m
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) argv: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RawCp {
    /// A path, VM:PATH, or - for standard input
    pub(crate) from: String,
    /// A path, VM:PATH, or - for standard output
    pub(crate) to: String,
}

#[derive(Debug, Args)]
pub(crate) struct RawFork {
    /// Name or id of a running VM
    pub(crate) vm: String,
    /// How many clones [default: as many as names, or 1]
    #[arg(short = 'n', long = "count", value_name = "N")]
    pub(crate) count: Option<u32>,
    /// Names of the clones, repeated or separated by commas [default: VM.1, VM.2 …]
    #[arg(long = "name", value_name = "NAME", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) names: Vec<String>,
    /// Start none if not all of them fit
    #[arg(long)]
    pub(crate) all_or_nothing: bool,
    /// Bound on the whole fork: 500ms, 30s, 2m [default: 60s]
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// Where in the cluster the clones go [default: spread]
    #[arg(long, value_name = "WHERE", help_heading = OF_CLUSTERS)]
    pub(crate) place: Option<RawPlace>,
    /// Only these hosts, by name or id, repeated or separated by commas [default: all]
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', action = ArgAction::Append, help_heading = OF_CLUSTERS)]
    pub(crate) hosts: Vec<String>,
    /// Bring clones on other hosts all of their memory, so fast, in MiB per second; then they don't need this host any more
    #[arg(long, value_name = "MIB", help_heading = OF_CLUSTERS)]
    pub(crate) hydrate: Option<u64>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawPlace {
    /// On the VM's host
    Here,
    /// As many on each host
    Spread,
    /// On as few hosts as they fit on, the VM's first
    Pack,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawCluster {
    /// Make a cluster of this host
    Init(RawAddress),
    /// Print a token by which one host can join
    Token {
        /// How long it is good: 10m, 3600s [default: 1 hour, at most 7 days]
        #[arg(long, value_name = "TIME")]
        ttl: Option<String>,
    },
    /// Become a member of the cluster that the token is of
    Join {
        /// What `vmfork cluster token` has printed on a member
        token: String,
        #[command(flatten)]
        address: RawAddress,
    },
    /// List the hosts
    Ls,
    /// Take a host out, this one if none is named
    Leave {
        /// Name or id
        host: Option<String>,
    },
    /// Give a host no more clones, this one if none is named
    Drain {
        /// Name or id
        host: Option<String>,
    },
    /// Take a host back into use that was drained
    Activate {
        /// Name or id
        host: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RawAddress {
    /// Where other hosts reach this one; pages are served at the next port
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) address: String,
    /// What others call this host [default: its host name]
    #[arg(long)]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RawPs {
    /// Show the ended ones too
    #[arg(short, long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawVm {
    /// Name or id of a VM
    pub(crate) vm: String,
}

#[derive(Debug, Args)]
pub(crate) struct RawLogs {
    /// Name or id of a VM
    pub(crate) vm: String,
    /// Go on until the VM ends
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawKill {
    /// Names or ids of VMs
    #[arg(required = true, value_name = "VM")]
    pub(crate) vms: Vec<String>,
    /// First ask the guest to power off, and wait so long: 500ms, 10s
    #[arg(long, value_name = "TIME")]
    pub(crate) grace: Option<String>,
    /// With all VMs that descend from them
    #[arg(long)]
    pub(crate) family: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawRm {
    /// Names or ids of VMs
    #[arg(required = true, value_name = "VM")]
    pub(crate) vms: Vec<String>,
    /// Kill those that still run
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawTop {
    /// Print one frame and end
    #[arg(long)]
    pub(crate) once: bool,
    /// Time between two frames: 500ms, 2s [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub(crate) interval: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawDaemon {
    /// Start the daemon, if none answers
    Start,
    /// End the daemon
    Stop {
        /// Even if VMs run
        #[arg(short, long)]
        force: bool,
    },
    /// End the daemon and start it anew, with the same flags; its clients wait meanwhile. VMs end
    /// with it
    Restart {
        /// Even if VMs run
        #[arg(short, long)]
        force: bool,
    },
    /// Say whether the daemon runs (exit status 1: it does not)
    Status,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawImage {
    /// Build an image from Debian's packages
    Build(RawImageBuild),
    /// List the images
    Ls,
    /// Remove images
    Rm {
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Take over a kernel, an initrd and a root file system of yours, or a disk that boots
    Import(RawImageImport),
}

#[derive(Debug, Args)]
pub(crate) struct RawImageBuild {
    /// The image's name [default: the spec's file name, or `default`]
    #[arg(value_name = "IMAGE")]
    pub(crate) name: Option<String>,
    /// A JSON file that says what goes in [default: the default image's]
    #[arg(long, value_name = "FILE")]
    pub(crate) spec: Option<PathBuf>,
    /// One more Debian package, repeated or separated by commas
    #[arg(long = "package", value_name = "NAME", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) packages: Vec<String>,
    /// One more file or folder of this host: FROM:TO, TO absolute in the guest
    #[arg(long = "file", value_name = "FROM:TO", action = ArgAction::Append)]
    pub(crate) files: Vec<String>,
    /// A shell command for the guest to run once after each boot
    #[arg(long, value_name = "COMMAND")]
    pub(crate) run: Option<String>,
    /// Where Debian is [default: as this host's apt has it]
    #[arg(long, value_name = "URL")]
    pub(crate) mirror: Option<String>,
    /// Build anew, from the archive as it is today
    #[arg(long)]
    pub(crate) refresh: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawImageImport {
    /// The image's name
    #[arg(value_name = "IMAGE")]
    pub(crate) name: String,
    /// bzImage or ELF
    #[arg(long, value_name = "FILE", required_unless_present = "boot_disk")]
    pub(crate) kernel: Option<PathBuf>,
    /// Instead of a kernel: a raw disk with a boot sector; its VMs have no agent
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["kernel", "initrd", "root", "cmdline", "agent"])]
    pub(crate) boot_disk: Option<PathBuf>,
    /// An initrd
    #[arg(long, value_name = "FILE", required_unless_present_any = ["root", "boot_disk"])]
    pub(crate) initrd: Option<PathBuf>,
    /// A raw file system, read-only to all VMs
    #[arg(long, value_name = "FILE")]
    pub(crate) root: Option<PathBuf>,
    /// The kernel's command line [default: serial console, root on the first disk]
    #[arg(long)]
    pub(crate) cmdline: Option<String>,
    /// The vmfork agent runs in it
    #[arg(long)]
    pub(crate) agent: bool,
    /// Memory of a VM for which nobody says: 512M, 2G [default: 512M]
    #[arg(short, long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Put it in place of an image of that name
    #[arg(long)]
    pub(crate) replace: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawSnapshot {
    /// Keep a running VM as a snapshot; it pauses as in a fork, and runs on
    Create(RawSnapshotCreate),
    /// List the snapshots
    Ls,
    /// Show everything about a snapshot
    Inspect(RawSnapshotName),
    /// Remove snapshots; one that is being written or pulled is given up
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
        /// With the snapshots that are deltas of them
        #[arg(long)]
        cascade: bool,
    },
    /// Read and check all that is here of a snapshot, and of what it depends on (exit status 1: it is damaged)
    Verify(RawSnapshotName),
    /// Make a delta whole, so that it depends on no other snapshot
    Flatten(RawSnapshotName),
    /// Write a snapshot, with what it depends on, to one file
    Export {
        snapshot: String,
        /// A path, or - for standard output
        file: String,
    },
    /// Store what was exported
    Import {
        /// A path, or - for standard input
        file: String,
        /// What to call the snapshot [default: as it was called]
        #[arg(long, value_name = "SNAPSHOT")]
        name: Option<String>,
    },
    /// Copy a snapshot, with what it depends on, to another store
    Push {
        snapshot: String,
        /// s3://BUCKET/PREFIX, or a folder of the daemon's host
        location: String,
    },
    /// Bring a snapshot from another store; it can be started before its pages are here
    Pull {
        snapshot: String,
        /// s3://BUCKET/PREFIX, or a folder of the daemon's host
        location: String,
        /// Until all of its pages are here
        #[arg(long)]
        wait: bool,
    },
    /// What is known of the pages that a snapshot's VMs touch first
    #[command(subcommand)]
    Profile(RawProfile),
}

#[derive(Debug, Args)]
pub(crate) struct RawSnapshotName {
    /// Name of a snapshot
    pub(crate) snapshot: String,
}

#[derive(Debug, Args)]
pub(crate) struct RawSnapshotCreate {
    /// Name or id of a running VM
    pub(crate) vm: String,
    /// The snapshot's name
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) name: String,
    /// Until it is stored, not only until the VM runs on; Ctrl-C then gives it up
    #[arg(long)]
    pub(crate) wait: bool,
    /// Store pages as they are
    #[arg(long)]
    pub(crate) no_compression: bool,
    /// Store all that is not zero, even if the VM was started from a snapshot
    #[arg(long)]
    pub(crate) full: bool,
    /// Store zero pages like any others, to measure what leaving them out is worth
    #[arg(long)]
    pub(crate) keep_zero_pages: bool,
    /// How long to record which pages the VM touches after it: 60, 60s, 2m; 0 does not [default:
    /// 300s]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) record: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawProfile {
    /// Show it
    Show(RawSnapshotName),
    /// Forget it
    Reset(RawSnapshotName),
}
