//! `vmfork-holder`: keeps file descriptors while a daemon restarts. See the library.
//!
//! It starts nothing, writes no file but its socket, and has no thread but one. SIGTERM ends it as
//! SIGKILL does: the kernel closes what it keeps, and the next holder replaces the socket's file.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use vmfork_holder::serve;

/// Until the first daemon says its own, which it does at once.
const LINGER: Duration = Duration::from_secs(60);
const STATE_DEFAULT: &str = "/var/lib/vmfork";

const HELP: &str = "\
Keep file descriptors of vmforkd while it restarts

vmforkd starts it and tells it what to keep. A service manager may start it earlier.

Usage: vmfork-holder [--state DIR]

Options:
  --state DIR    State folder of the daemon [env: VMFORK_STATE] [default: /var/lib/vmfork]
  -V, --version  Print the version
  -h, --help     Print this help
";

enum Wanted {
    Help,
    Version,
    Serve(PathBuf),
}

/// Exit codes: 0 ended on request or for want of a daemon, 1 failed, 2 misuse.
fn main() -> ExitCode {
    let print = |text: &str| match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    };
    let state = match wanted(env::args_os().skip(1).collect()) {
        Err(message) => return fail(&message, 2),
        Ok(Wanted::Help) => return print(HELP),
        Ok(Wanted::Version) => {
            return print(concat!("vmfork-holder ", env!("CARGO_PKG_VERSION"), "\n"));
        }
        Ok(Wanted::Serve(state)) => state,
    };
    // Neither the end of our daemon's terminal nor Ctrl-C there is meant for us. A shell that
    // started us has done this already, which is the only error.
    let _ = rustix::process::setsid();
    match serve(&state, LINGER, ready) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let cause = std::error::Error::source(&error);
            let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
            fail(&format!("{error}{cause}"), 1)
        }
    }
}

fn wanted(args: Vec<OsString>) -> Result<Wanted, String> {
    let mut state = env::var_os("VMFORK_STATE");
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some("-h" | "--help") => return Ok(Wanted::Help),
            Some("-V" | "--version") => return Ok(Wanted::Version),
            Some("--state") => {
                state = Some(args.next().ok_or("--state needs a folder")?);
            }
            _ => return Err(format!("unknown argument {}, see --help", arg.display())),
        }
    }
    Ok(Wanted::Serve(state.unwrap_or_else(|| STATE_DEFAULT.into()).into()))
}

fn fail(message: &str, code: u8) -> ExitCode {
    eprintln!("vmfork-holder: {message}");
    ExitCode::from(code)
}

/// Tell the process that started us. Then let go of its output: a program that waits for the end of
/// the daemon's output shall not wait for ours.
fn ready() {
    let _ = io::stdout().write_all(b"ready\n").and_then(|()| io::stdout().flush());
    let notify = env::var_os("NOTIFY_SOCKET");
    if let Some(notify) = &notify {
        let address = match notify.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
            _ => SocketAddr::from_pathname(notify),
        };
        let _ =
            address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address));
    }
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
        // A service manager keeps our errors.
        if notify.is_none() {
            let _ = rustix::stdio::dup2_stderr(&null);
        }
    }
}
