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
                        Exit status: 0 success, 1 failure, 2 usage error; `exec`: that of the program."
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
    /// Unix socket of the daemon
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// State folder of the daemon [default: /var/lib/vmfork]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Do not start the daemon if it is not running
    #[arg(long, global = true)]
    pub(crate) no_start: bool,
    /// Print each request to the daemon
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// Print data and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawCommand {
    /// Start a VM from an image, or VMs from a snapshot
    Run(RawRun),
    /// Run a program in a VM
    Exec(RawExec),
    /// Copy a file or a folder to or from a VM
    Cp(RawCp),
    /// Fork a running VM into clones
    Fork(RawFork),
    /// List the VMs
    Ps(RawPs),
    /// Show each VM below its parent
    Tree(RawTree),
    /// Show everything about a VM
    Inspect(RawVm),
    /// Print the output of a VM's console and detached programs
    Logs(RawLogs),
    /// Print what happens on this host: VMs, snapshots, hosts of the cluster
    ///
    /// Reconnects by itself. A warning tells what was lost meanwhile.
    Events(RawEvents),
    /// Attach to a VM's serial console (Ctrl-] detaches)
    Console(RawVm),
    /// Pause VMs: their vCPUs stop until they are resumed
    Pause(RawVms),
    /// Let paused VMs continue
    Resume(RawVms),
    /// Change when a VM ends by itself
    Ttl(RawTtl),
    /// Stop VMs
    Kill(RawKill),
    /// Remove ended VMs from the list
    Rm(RawRm),
    /// Watch the memory, faults and CPU time of VMs
    Top(RawTop),
    /// Check that this host can run VMs
    Doctor,
    /// Print the versions of vmfork and the daemon
    Version,
    /// Build, list, import and remove guest images
    #[command(subcommand)]
    Image(RawImage),
    /// List, resize, export and remove disks
    #[command(subcommand)]
    Disk(RawDisk),
    /// Store VMs as snapshots, and manage snapshots
    #[command(subcommand)]
    Snapshot(RawSnapshot),
    /// Manage volumes: disks that outlive their VMs
    #[command(subcommand)]
    Volume(RawVolume),
    /// Manage a cluster of hosts
    #[command(subcommand)]
    Cluster(RawCluster),
    /// Start, stop or check the daemon
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

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawRoot {
    /// A disk of the VM's own, over the image's root
    Overlay,
    /// The guest's memory, over the image's root
    Tmpfs,
    /// The root itself: a disk of the VM's own, which begins with the image's
    Disk,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawRootDevice {
    /// Persistent memory, without a page cache in the guest: the VMs of a host share one copy
    Pmem,
    /// A block device, through the guest's page cache
    Block,
}

#[derive(Debug, Args)]
pub(crate) struct RawRun {
    /// Name of a guest image (`vmfork image ls`) or of a snapshot (`vmfork snapshot ls`)
    pub(crate) name: String,
    /// Label of the VMs, which their clones inherit; repeat it for several
    #[arg(long = "label", value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
    /// Treat NAME as an image, even if a snapshot has the same name
    #[arg(long, conflicts_with = "snapshot")]
    pub(crate) image: bool,
    /// Treat NAME as a snapshot, even if an image has the same name
    #[arg(long)]
    pub(crate) snapshot: bool,
    /// Name of the VM; for several, repeat it or separate names with commas [default: from NAME]
    #[arg(long = "name", value_name = "VM", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) names: Vec<String>,
    /// Timeout until the VM is ready: 90s, 2m [default: 60s for a snapshot; 120s for an image, plus
    /// 600s for its first-boot command; 0: do not wait]
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// End the VM, and the clones that inherit this bound, after this time: 30s, 15m, 2h, 1d
    /// [default: never]
    #[arg(long, value_name = "TIME")]
    pub(crate) ttl: Option<String>,
    /// Guest memory: 512, 512M, 2G [default: 512M]
    #[arg(short, long, value_name = "SIZE", help_heading = OF_IMAGES)]
    pub(crate) memory: Option<String>,
    /// Number of vCPUs [default: 1]
    #[arg(short, long, value_name = "N", help_heading = OF_IMAGES)]
    pub(crate) cpus: Option<u32>,
    /// Accelerator [default: KVM if it can run stock kernels, else TCG]
    #[arg(long, help_heading = OF_IMAGES)]
    pub(crate) accel: Option<RawAccel>,
    /// Disk: NAME=blank:SIZE (an empty ext4), NAME=image:IMAGE, NAME=file:PATH, NAME=qcow2:PATH,
    /// NAME=snapshot:SNAPSHOT/DISK, NAME=s3://BUCKET/KEY, NAME=volume:VOLUME or NAME=empty. Repeat
    /// it for up to 7, or 6 with `--root overlay`
    #[arg(long = "disk", value_name = "NAME=SOURCE", action = ArgAction::Append, help_heading = OF_IMAGES)]
    pub(crate) disks: Vec<String>,
    /// What takes the writes to the root file system [default: tmpfs]
    #[arg(long, value_name = "WHAT", help_heading = OF_IMAGES)]
    pub(crate) root: Option<RawRoot>,
    /// Size of that disk [default: 10G for an overlay, else the image's]
    #[arg(long, value_name = "SIZE", help_heading = OF_IMAGES)]
    pub(crate) root_size: Option<String>,
    /// How the guest reads the image's root [default: pmem if image and memory allow it]
    #[arg(long, value_name = "DEVICE", help_heading = OF_IMAGES)]
    pub(crate) root_device: Option<RawRootDevice>,
    /// Number of VMs [default: number of names, or 1]
    #[arg(short = 'n', long = "count", value_name = "N", help_heading = OF_SNAPSHOTS)]
    pub(crate) count: Option<u32>,
    /// Start no VM unless all fit
    #[arg(long, help_heading = OF_SNAPSHOTS)]
    pub(crate) all_or_nothing: bool,
    /// Start even if the snapshot comes from another QEMU version, machine type or processor
    #[arg(long, help_heading = OF_SNAPSHOTS)]
    pub(crate) force: bool,
    /// Pages to prefetch [default: all]
    #[arg(long, value_name = "WHICH", help_heading = OF_SNAPSHOTS)]
    pub(crate) prefetch: Option<RawPrefetch>,
    /// Load all remaining pages in the background, so that the VM no longer needs the store; limit
    /// in MiB per second [default: no limit]
    #[arg(long, value_name = "MIB_PER_S", num_args = 0..=1, help_heading = OF_SNAPSHOTS)]
    pub(crate) hydrate: Option<Option<u32>>,
}

const OF_IMAGES: &str = "For images only";
const OF_SNAPSHOTS: &str = "For snapshots only";
const OF_CLUSTERS: &str = "In a cluster";

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawPrefetch {
    /// No prefetch
    None,
    /// Pages that recent faults predict
    Demand,
    /// Pages that earlier VMs of the snapshot touched first
    WorkingSet,
    /// Both
    All,
}

#[derive(Debug, Args)]
pub(crate) struct RawExec {
    /// Name or id of a VM
    pub(crate) vm: String,
    /// Pass standard input to the program
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Run the program in a terminal (implies -i)
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// User in the guest [default: root]
    #[arg(short, long)]
    pub(crate) user: Option<String>,
    /// Working folder in the guest
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Set an environment variable: KEY=VALUE, or KEY to copy its value from here
    #[arg(short, long, value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) env: Vec<String>,
    /// Kill the program after this time: 500ms, 30s, 2m
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
    /// Number of clones [default: number of names, or 1]
    #[arg(short = 'n', long = "count", value_name = "N")]
    pub(crate) count: Option<u32>,
    /// Name of a clone; repeat it or separate names with commas [default: VM.1, VM.2 …]
    #[arg(long = "name", value_name = "NAME", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) names: Vec<String>,
    /// Label of the clones, besides the parent's; repeat it for several
    #[arg(long = "label", value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
    /// Start no clone unless all fit
    #[arg(long)]
    pub(crate) all_or_nothing: bool,
    /// Timeout of the whole fork: 500ms, 30s, 2m [default: 60s]
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// End each clone after this time: 30s, 15m, 2h, 1d [default: when the bound of VM ends it]
    #[arg(long, value_name = "TIME")]
    pub(crate) ttl: Option<String>,
    /// Placement of clones in the cluster [default: spread]
    #[arg(long, value_name = "WHERE", help_heading = OF_CLUSTERS)]
    pub(crate) place: Option<RawPlace>,
    /// Use only this host (name or id); repeat it or separate hosts with commas [default: all]
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', action = ArgAction::Append, help_heading = OF_CLUSTERS)]
    pub(crate) hosts: Vec<String>,
    /// Copy all memory to remote clones in the background, so that they no longer need this host;
    /// limit in MiB per second
    #[arg(long, value_name = "MIB", help_heading = OF_CLUSTERS)]
    pub(crate) hydrate: Option<u64>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawPlace {
    /// All on the parent's host
    Here,
    /// Evenly over the hosts
    Spread,
    /// On as few hosts as possible, the parent's host first
    Pack,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawCluster {
    /// Create a cluster with this host as its first member
    Init(RawAddress),
    /// Print a token that lets one host join
    Token {
        /// Lifetime of the token: 10m, 3600s; at most 7 days [default: 1 hour]
        #[arg(long, value_name = "TIME")]
        ttl: Option<String>,
    },
    /// Join a cluster
    Join {
        /// Token that `vmfork cluster token` printed on a member
        token: String,
        #[command(flatten)]
        address: RawAddress,
    },
    /// List the hosts
    Ls,
    /// Remove a host from the cluster
    Leave {
        /// Name or id of the host [default: this host]
        host: Option<String>,
    },
    /// Stop placing clones on a host
    Drain {
        /// Name or id of the host [default: this host]
        host: Option<String>,
    },
    /// Place clones on a drained host again
    Activate {
        /// Name or id of the host [default: this host]
        host: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RawAddress {
    /// Address of this host for the other hosts; the next port serves pages
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) address: String,
    /// Name of this host in the cluster, unique and easy to tell apart [default: its host name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RawPs {
    /// Include ended VMs
    #[arg(short, long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) filters: RawFilters,
}

#[derive(Debug, Args)]
pub(crate) struct RawTree {
    /// Show only VMs with this label, and those that they descend from; several must all match
    #[arg(long = "label", value_name = "KEY[=VALUE]", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RawFilters {
    /// Show only what has this label; several must all match
    #[arg(long = "label", value_name = "KEY[=VALUE]", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
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
    /// Follow the output until the VM ends
    #[arg(short, long)]
    pub(crate) follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawEvents {
    /// Continue after the event with this cursor (`cursor` in --json); 0: all that the daemon has
    /// [default: from now on; with --no-follow: 0]
    #[arg(long, value_name = "CURSOR")]
    pub(crate) after: Option<String>,
    /// Print only this kind, as vm.ended; repeat it or separate kinds with commas [default: all]
    #[arg(long = "kind", value_name = "KIND", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) kinds: Vec<String>,
    /// Print only events about this VM (name or id)
    #[arg(long, value_name = "VM")]
    pub(crate) vm: Option<String>,
    /// End after the events that have happened so far
    #[arg(long)]
    pub(crate) no_follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawVms {
    /// Names or ids of VMs
    #[arg(required = true, value_name = "VM")]
    pub(crate) vms: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RawTtl {
    /// Name or id of a VM
    pub(crate) vm: String,
    /// Time from now until the VM ends, with the clones that inherit its bound: 30s, 15m, 2h, 1d;
    /// none: never
    #[arg(value_name = "TIME")]
    pub(crate) ttl: String,
}

#[derive(Debug, Args)]
pub(crate) struct RawKill {
    /// Names or ids of VMs
    #[arg(required = true, value_name = "VM")]
    pub(crate) vms: Vec<String>,
    /// Ask the guest to power off first, and wait this long: 500ms, 10s
    #[arg(long, value_name = "TIME")]
    pub(crate) grace: Option<String>,
    /// Stop their descendants too
    #[arg(long)]
    pub(crate) family: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawRm {
    /// Names or ids of VMs
    #[arg(required = true, value_name = "VM")]
    pub(crate) vms: Vec<String>,
    /// Stop running VMs first
    #[arg(short, long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawTop {
    /// Print one frame and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Refresh interval: 500ms, 2s [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub(crate) interval: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawDaemon {
    /// Start the daemon if it is not running
    Start,
    /// Stop the daemon
    Stop {
        /// Stop it even if VMs are running
        #[arg(short, long)]
        force: bool,
    },
    /// Restart the daemon with the same flags; VMs end with it
    ///
    /// Clients wait until the new daemon answers.
    Restart {
        /// Restart it even if VMs are running
        #[arg(short, long)]
        force: bool,
    },
    /// Print whether the daemon is running (exit status 1: it is not)
    Status,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawImage {
    /// Build an image from Debian packages
    Build(RawImageBuild),
    /// List the images
    Ls,
    /// Remove images
    Rm {
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Import a kernel with an initrd or a root file system, or a bootable disk
    Import(RawImageImport),
    /// Copy an image to a store of snapshots
    Push {
        image: String,
        /// s3://BUCKET/PREFIX, or a folder on the daemon's host
        location: String,
    },
    /// Show an image's root to other programs: a file in a folder, an NBD socket, or both
    ///
    /// It lasts until Ctrl-C. Programs read what they need while the rest still arrives.
    Serve {
        image: String,
        /// An empty folder; the file in it is IMAGE.img. It takes the right to mount
        #[arg(value_name = "DIR", required_unless_present = "nbd")]
        folder: Option<PathBuf>,
        /// A unix socket to make; its export is IMAGE, or has an empty name
        #[arg(long, value_name = "SOCKET")]
        nbd: Option<PathBuf>,
        /// Programs can write to it; what they wrote is gone when this command ends
        #[arg(long)]
        writable: bool,
        /// All users of this host can use the file
        #[arg(long, requires = "folder")]
        allow_other: bool,
    },
    /// Let other hosts of the cluster pull an image from this one
    ///
    /// A compressed copy of it is kept in the host's store. Hosts that pull it get its parts from
    /// each other, too.
    Seed {
        image: String,
        /// No host pulls it from this one any more; the copy is removed
        #[arg(long)]
        stop: bool,
    },
    /// Show or delete what is known of how VMs use an image
    ///
    /// A host that pulls the image fetches first what its VMs read first. The label `workload` of a
    /// VM says which workload it runs.
    #[command(subcommand)]
    Profile(RawImageProfile),
    /// Copy an image from a store; VMs can boot before its root file system arrives
    Pull {
        image: String,
        /// s3://BUCKET/PREFIX, a folder on the daemon's host, or cluster://HOST; cluster:// is any
        /// host that seeds it
        #[arg(default_value = "cluster://")]
        location: String,
        /// Wait until all of it has arrived; the root is a file then
        #[arg(long)]
        wait: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawImageProfile {
    /// Show how much of it VMs of each workload read
    Show { image: String },
    /// Delete the record
    Reset { image: String },
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawDisk {
    /// List the disks of this host, also those that VMs of an earlier daemon left
    Ls,
    /// Show everything about a disk
    Inspect {
        /// VM/NAME, or an ID that `vmfork disk ls` prints
        disk: String,
    },
    /// Write all bytes of a disk to a raw file
    ///
    /// A disk of a running VM is as after a power cut. `vmfork exec VM sync` brings what the guest
    /// has cached to its disks first.
    Export {
        /// VM/NAME, or an ID that `vmfork disk ls` prints
        disk: String,
        /// A path, or - for standard output
        file: String,
    },
    /// Make the disk of a running VM larger
    ///
    /// The guest sees the new size at once. `resize2fs` in the guest grows its file system.
    Resize {
        /// VM/NAME, or an ID that `vmfork disk ls` prints
        disk: String,
        /// Its new size: 512M, 10G, 1T
        size: String,
    },
    /// Remove disks that no VM has
    Rm {
        /// VM/NAME, or an ID that `vmfork disk ls` prints
        #[arg(required = true, value_name = "DISK")]
        disks: Vec<String>,
    },
    /// Remove all disks that no VM has
    Prune,
}

#[derive(Debug, Args)]
pub(crate) struct RawImageBuild {
    /// Name of the image [default: file name of the spec, or `default`]
    #[arg(value_name = "IMAGE")]
    pub(crate) name: Option<String>,
    /// JSON file that describes the image [default: the built-in spec]
    #[arg(long, value_name = "FILE")]
    pub(crate) spec: Option<PathBuf>,
    /// Add a Debian package; repeat it or separate packages with commas
    #[arg(long = "package", value_name = "NAME", value_delimiter = ',', action = ArgAction::Append)]
    pub(crate) packages: Vec<String>,
    /// Add a file or folder: FROM on this host, TO an absolute path in the guest
    #[arg(long = "file", value_name = "FROM:TO", action = ArgAction::Append)]
    pub(crate) files: Vec<String>,
    /// Shell command that the guest runs once after each boot
    #[arg(long, value_name = "COMMAND")]
    pub(crate) run: Option<String>,
    /// Debian mirror [default: the apt sources of this host]
    #[arg(long, value_name = "URL")]
    pub(crate) mirror: Option<String>,
    /// Rebuild with the current packages of the archive
    #[arg(long)]
    pub(crate) refresh: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RawImageImport {
    /// Name of the image
    #[arg(value_name = "IMAGE")]
    pub(crate) name: String,
    /// Kernel: bzImage or ELF
    #[arg(long, value_name = "FILE", required_unless_present = "boot_disk")]
    pub(crate) kernel: Option<PathBuf>,
    /// Raw disk with a boot sector, instead of a kernel: a file or s3://BUCKET/KEY; its VMs have no
    /// agent
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["kernel", "initrd", "root", "cmdline", "agent"])]
    pub(crate) boot_disk: Option<PathBuf>,
    /// Initrd: a newc archive, compressed or not
    #[arg(long, value_name = "FILE", required_unless_present_any = ["root", "boot_disk"])]
    pub(crate) initrd: Option<PathBuf>,
    /// Root file system, raw: a file or s3://BUCKET/KEY; read-only in all VMs
    #[arg(long, value_name = "FILE")]
    pub(crate) root: Option<PathBuf>,
    /// Format of --root and --boot-disk; a qcow2 file is converted
    #[arg(long, default_value = "raw")]
    pub(crate) format: RawFormat,
    /// Kernel command line [default: serial console, root on the first disk]
    #[arg(long)]
    pub(crate) cmdline: Option<String>,
    /// The image runs the vmfork agent
    #[arg(long)]
    pub(crate) agent: bool,
    /// Default guest memory: 512M, 2G [default: 512M]
    #[arg(short, long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Replace an image of the same name
    #[arg(long)]
    pub(crate) replace: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RawFormat {
    Raw,
    Qcow2,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawSnapshot {
    /// Store a running VM as a snapshot; the VM pauses as in a fork, then continues
    Create(RawSnapshotCreate),
    /// List the snapshots
    Ls(RawFilters),
    /// Show everything about a snapshot
    Inspect(RawSnapshotName),
    /// Remove snapshots, and cancel those that are being written or pulled
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
        /// Remove the snapshots that depend on them too
        #[arg(long)]
        cascade: bool,
    },
    /// Check the local data of a snapshot and of those it depends on (exit status 1: damaged)
    Verify(RawSnapshotName),
    /// Make a snapshot independent of the snapshots it depends on
    Flatten(RawSnapshotName),
    /// Write a snapshot and those it depends on to one file
    Export {
        snapshot: String,
        /// A path, or - for standard output
        file: String,
    },
    /// Store an exported snapshot
    Import {
        /// A path, or - for standard input
        file: String,
        /// Name of the snapshot [default: its name when exported]
        #[arg(long, value_name = "SNAPSHOT")]
        name: Option<String>,
    },
    /// Copy a snapshot and those it depends on to another store
    Push {
        snapshot: String,
        /// s3://BUCKET/PREFIX, or a folder on the daemon's host
        location: String,
    },
    /// Copy a snapshot from another store; VMs can start before its pages arrive
    Pull {
        snapshot: String,
        /// s3://BUCKET/PREFIX, or a folder on the daemon's host
        location: String,
        /// Wait until all pages have arrived
        #[arg(long)]
        wait: bool,
    },
    /// Show or reset the pages that a snapshot's VMs touch first
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
    /// Name of the snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) name: String,
    /// Label of the snapshot, besides the VM's; repeat it for several
    #[arg(long = "label", value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
    /// Wait until the snapshot is stored; Ctrl-C then cancels it [default: until the VM continues]
    #[arg(long)]
    pub(crate) wait: bool,
    /// Store pages without compression
    #[arg(long)]
    pub(crate) no_compression: bool,
    /// Store all pages, even if the VM was started from a snapshot
    #[arg(long)]
    pub(crate) full: bool,
    /// Store the disks without the memory; VMs that start from the snapshot boot
    #[arg(long, conflicts_with_all = ["keep_zero_pages", "record"])]
    pub(crate) disk_only: bool,
    /// Store zero pages too, to measure what leaving them out saves
    #[arg(long)]
    pub(crate) keep_zero_pages: bool,
    /// Time to record the pages that the VM touches first: 60, 60s, 2m; 0: off [default: 300s]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) record: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawVolume {
    /// Create a volume
    Create(RawVolumeCreate),
    /// List the volumes
    Ls(RawFilters),
    /// Show everything about a volume
    Inspect(RawVolumeName),
    /// Change what a fork does with a volume that no VM has
    Set {
        /// Name of a volume
        volume: String,
        #[arg(long, value_name = "WHAT")]
        on_fork: RawOnFork,
    },
    /// Give a running VM a volume, in the place of a disk that was started as NAME=empty
    Attach {
        /// Name or id of a running VM
        vm: String,
        /// Name of a volume
        volume: String,
        /// Name of an empty disk of the VM [default: the first one]
        #[arg(long, value_name = "NAME")]
        disk: Option<String>,
    },
    /// Take a volume from a running VM whose guest has unmounted it
    Detach {
        /// Name or id of a running VM
        vm: String,
        /// Name of a volume
        volume: String,
        /// Take it even if the guest uses it, or does not say
        #[arg(long)]
        force: bool,
    },
    /// Make a volume larger, whether a running VM has it or none
    Resize {
        /// Name of a volume
        volume: String,
        /// Its new size: 512M, 10G, 1T
        size: String,
    },
    /// Remove volumes, with all that they hold
    Rm {
        #[arg(required = true, value_name = "VOLUME")]
        volumes: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RawVolumeName {
    /// Name of a volume
    pub(crate) volume: String,
}

#[derive(Debug, Args)]
pub(crate) struct RawVolumeCreate {
    /// Name of the volume
    #[arg(value_name = "VOLUME")]
    pub(crate) name: String,
    /// Size of an empty ext4 file system: 512M, 10G, 1T
    #[arg(long, value_name = "SIZE", conflicts_with = "from", required_unless_present = "from")]
    pub(crate) size: Option<String>,
    /// Copy of image:IMAGE (the root file system of a guest image), snapshot:SNAPSHOT/DISK,
    /// file:PATH (a raw file) or qcow2:PATH
    #[arg(long, value_name = "SOURCE")]
    pub(crate) from: Option<String>,
    /// What a fork does with the volume
    #[arg(long, value_name = "WHAT", default_value = "fork")]
    pub(crate) on_fork: RawOnFork,
    /// Label of the volume; repeat it for several
    #[arg(long = "label", value_name = "KEY=VALUE", action = ArgAction::Append)]
    pub(crate) labels: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum RawOnFork {
    /// Each clone gets a disk of its own with the volume's content
    Fork,
    /// No VM can write to it; clones share it
    ReadOnly,
    /// A VM that has the volume can't be forked
    Refuse,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RawProfile {
    /// Show the recorded pages
    Show(RawSnapshotName),
    /// Delete the record
    Reset(RawSnapshotName),
}
