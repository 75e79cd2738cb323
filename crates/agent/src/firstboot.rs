//! `/etc/vmfork/firstboot`: a command that the image's owner wants to run when a VM boots. It runs
//! beside everything else, with its output on the console.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::console::log;
use crate::exec::{Inheritance, PATH};
use crate::sys::ChildSetup;

const PROGRAM: &str = "/etc/vmfork/firstboot";

/// Start it, if it is there and executable. Returns its process id.
pub(crate) fn start(inherit: Inheritance) -> Option<i32> {
    let metadata = std::fs::metadata(PROGRAM).ok()?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return None;
    }
    let setup = ChildSetup {
        terminal: false,
        reset_oom: inherit.reset_oom,
        file_limit: inherit.file_limit,
        ids: None,
        cwd: c"/".to_owned(),
    };
    let mut command = Command::new(PROGRAM);
    command.env_clear().envs([("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")]);
    // Output and error: the agent's own, which are the console.
    command.stdin(Stdio::null());
    // SAFETY: `apply` only makes system calls; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(move || setup.apply()) };
    match command.spawn() {
        Ok(child) => i32::try_from(child.id()).ok(),
        Err(error) => {
            log!("{PROGRAM}: {error}");
            None
        }
    }
}
