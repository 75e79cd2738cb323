//! `/etc/vmfork/firstboot`: a command that the image's owner wants to run when a VM boots, with its
//! output on the console. The VM is not ready before it has ended. The agent reports its end to the
//! daemon, which holds forks back until then. If it failed, the daemon fails the VM's start.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::console::log;
use crate::exec::{Inheritance, PATH};
use crate::sys::ChildSetup;

/// Where images have it.
pub(crate) const PROGRAM: &str = "/etc/vmfork/firstboot";
/// A shell's word for "found, but could not be run".
const CANNOT_RUN: i32 = 126;

/// The command's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Firstboot {
    /// The image has none.
    #[default]
    None,
    Running {
        pid: i32,
    },
    Ended {
        exit_code: i32,
    },
}

impl Firstboot {
    /// Start `program`, if it is there and executable.
    pub(crate) fn start(program: &Path, inherit: Inheritance) -> Self {
        let Ok(metadata) = std::fs::metadata(program) else { return Self::None };
        if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
            return Self::None;
        }
        let setup = ChildSetup {
            terminal: false,
            reset_oom: inherit.reset_oom,
            file_limit: inherit.file_limit,
            ids: None,
            cwd: c"/".to_owned(),
        };
        let mut command = Command::new(program);
        command.env_clear().envs([("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")]);
        // Output and error: the agent's own, which are the console.
        command.stdin(Stdio::null());
        // SAFETY: `apply` only makes system calls; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(move || setup.apply()) };
        match command.spawn() {
            Ok(child) => Self::Running { pid: child.id().cast_signed() },
            Err(error) => {
                log!("{}: {error}", program.display());
                Self::Ended { exit_code: CANNOT_RUN }
            }
        }
    }

    /// A process has ended; whether it was this one.
    pub(crate) fn reaped(&mut self, pid: i32, exit_code: i32) -> bool {
        let was_this = *self == Self::Running { pid };
        if was_this {
            log!("the first-boot command ended with exit code {exit_code}");
            *self = Self::Ended { exit_code };
        }
        was_this
    }

    /// In the words of the protocol.
    pub(crate) fn to_host(self) -> Option<vmfork_agent_proto::Firstboot> {
        match self {
            Self::None => None,
            Self::Running { .. } => Some(vmfork_agent_proto::Firstboot::Running),
            Self::Ended { exit_code } => Some(vmfork_agent_proto::Firstboot::Ended { exit_code }),
        }
    }
}
