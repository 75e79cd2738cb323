use serde::{Deserialize, Serialize};

/// Size and type of a program's terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    pub rows: u16,
    pub cols: u16,
    pub term: String,
}

/// Why a request failed: an errno of Linux and a sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestError {
    pub errno: i32,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Permission bits.
    pub mode: u32,
    /// Size when it was opened.
    pub size_bytes: u64,
}

/// What a clone is to become. Applied in this order: random pool, clock, host name, machine id,
/// `/run/vmfork/vmid` and `/run/vmfork/identity.json`. Then it is confirmed. Only then does the
/// program that called `sf_clone` continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkIdentity {
    /// The number of `Prepare`.
    pub fork: u64,
    /// 1..m; with `hierarchical` the first worker's number.
    pub vmid: u32,
    /// The clone's name on its host; also its host name.
    pub name: String,
    /// 32 hex digits.
    pub machine_id: String,
    /// 64 bytes from the host's random pool, as hex. Credited in full.
    pub entropy: String,
    /// The host's CLOCK_REALTIME when this was sent, in ns. The agent steps its clock.
    pub realtime_ns: u64,
    /// Set when the fork was made by `sf_clone`.
    pub ticket: Option<TicketClone>,
}

/// The part of a clone's identity that belongs to its ticket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketClone {
    pub ticket: u64,
    /// How many workers this VM holds: 1, or up to its vCPUs with `hierarchical`. Their numbers are
    /// `vmid`, `vmid + 1`, …
    pub workers: u32,
    /// The channel on which `Clone` was asked. Another program may have asked for the same ticket,
    /// and been refused without having heard of it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<u32>,
}

/// One worker of a ticket, to the parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    pub vmid: u32,
    /// `None`: ended by `sf_exit`; else why it is gone ("killed", "QEMU died", …).
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageInfo {
    /// Who sent it.
    pub vmid: u32,
    pub length_bytes: u64,
}

/// What has become of the image's first-boot command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Firstboot {
    /// It runs: the guest is up, but not ready.
    Running,
    /// `exit_code` is 128 + signal where one ended it, 126 where it could not be started.
    Ended { exit_code: i32 },
}

/// From the daemon to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToGuest {
    /// The first message in a VM that boots; the answer is [`ToHost::Hello`]. Sent again once a
    /// second until answered.
    Hello {
        protocol: u32,
        name: String,
        machine_id: String,
        entropy: String,
        realtime_ns: u64,
    },
    /// Answered with [`ToHost::Pong`].
    Ping {
        token: u64,
    },

    /// Run a program on this channel → `Started` | `Failed`, streams, `Exited` (after both output
    /// streams have ended).
    Exec {
        argv: Vec<String>,
        env: Vec<(String, String)>,
        cwd: Option<String>,
        user: Option<String>,
        tty: Option<TerminalSize>,
    },
    /// To the program's process group (with a terminal: its foreground one).
    Signal {
        signal: i32,
    },
    Resize {
        rows: u16,
        cols: u16,
    },
    /// The daemon does not listen to this channel any more. The agent sends SIGHUP to the program,
    /// and SIGKILL after 2 s if it has not ended, or abandons the transfer. It sends nothing more
    /// on the channel.
    Cancel,
    /// The daemon has consumed this many bytes of a stream `kind` of this channel.
    Credit {
        kind: u8,
        bytes: u32,
    },

    /// → `File`, then a stream of kind `File`; or `Failed`.
    ReadFile {
        path: String,
    },
    /// Then a stream of kind `File` follows at once. → `Written` | `Failed`. Written beside the
    /// target and renamed over it at the end. A `path` that is a folder: `EISDIR`. Parent folders
    /// must exist.
    WriteFile {
        path: String,
        mode: u32,
    },

    /// See the crate's header.
    Prepare {
        fork: u64,
    },
    Continue {
        fork: u64,
    },
    Identity(ForkIdentity),

    // Answers to programs' requests, on the agent's channels.
    /// To `RequestTicket`.
    Ticket {
        ticket: u64,
        granted: u32,
    },
    /// To `Join` and `KillTicket`: all workers have ended.
    Ended {
        workers: Vec<Worker>,
    },
    /// To `Recv`: a stream of kind `Data` of that length follows.
    Incoming(MessageInfo),
    /// To a `Send` whose stream has ended and been stored, to `ExitClone`, to a `Clone` in the
    /// parent. The workers that did start are in `Ticket`'s state: see `sf_join`.
    Ok {
        value: u64,
    },
    /// To any request.
    Error(RequestError),

    /// Power the guest off in good order.
    Poweroff,
}

/// From the agent to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToHost {
    /// Also sent unasked, when the first-boot command ends that ran in an answer before.
    Hello {
        protocol: u32,
        agent_version: String,
        kernel: String,
        cpus: u32,
        /// `None`: the image has no such command.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        firstboot: Option<Firstboot>,
        /// The root is read from persistent memory. Agents of older images do not say.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pmem_root: bool,
    },
    Pong {
        token: u64,
    },

    Started {
        pid: u32,
    },
    /// `exit_code` is 128 + signal where one ended it.
    Exited {
        exit_code: i32,
        signal: Option<i32>,
    },
    Failed(RequestError),
    Credit {
        kind: u8,
        bytes: u32,
    },

    File(FileInfo),
    Written {
        bytes: u64,
    },

    Prepared {
        fork: u64,
    },
    Confirmed {
        fork: u64,
    },
    /// The clone could not take its identity; it must not be released.
    Refused {
        fork: u64,
        message: String,
    },

    // Programs' requests, each on a new channel of the agent's.
    /// `sf_request_ticket` → `Ticket` | `Error`.
    RequestTicket {
        count: u32,
        hierarchical: bool,
    },
    /// `sf_clone` → in the parent `Ok { value: workers started }` | `Error` after `Continue`; in a
    /// clone `Identity` is the answer.
    Clone {
        ticket: u64,
    },
    /// `sf_join` → `Ended` | `Error`.
    Join {
        ticket: u64,
    },
    /// `sf_kill` → `Ended` | `Error`.
    KillTicket {
        ticket: u64,
    },
    /// `sf_exit` in a clone, once per worker → `Ok`. `error` is set when the worker's process ended
    /// without `sf_exit`, or never began. When the last worker of the VM has exited, the VM is
    /// ended.
    ExitClone {
        vmid: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// `sf_send` in a clone: a stream of kind `Data` follows at once. → `Ok` | `Error`.
    Send {
        vmid: u32,
        length_bytes: u64,
    },
    /// `sf_recv` in the parent: the next message of worker `vmid`, or of any. Waits until there is
    /// one. → `Incoming` + stream | `Error` (`EPIPE`: that worker, or all, have ended and nothing
    /// is left).
    Recv {
        ticket: u64,
        vmid: Option<u32>,
    },
    /// The program that waited for a request's answer has gone.
    Abandon,
}
