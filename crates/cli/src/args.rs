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
    /// Start a VM from an image
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
    /// Name of a guest image (`vmfork image ls`)
    pub(crate) image: String,
    /// Name of the VM [default: made from the image's]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Guest memory: 512, 512M, 2G [default: 512M]
    #[arg(short, long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// vCPUs [default: 1]
    #[arg(short, long, value_name = "N")]
    pub(crate) cpus: Option<u32>,
    /// Insist on an accelerator [default: KVM where it runs stock kernels, else TCG]
    #[arg(long)]
    pub(crate) accel: Option<RawAccel>,
    /// How long the guest may take until it is ready: 90s, 2m; 0 does not wait [default: 120s, and
    /// 600s more for the image's first-boot command]
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
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
