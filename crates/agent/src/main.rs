//! The guest side of vmfork: one static program, one thread.
//!
//! | started as | it is |
//! |---|---|
//! | PID 1 where `/modules/order` is | the initrd: finds the root file system, goes there ([`initrd`]) |
//! | PID 1 elsewhere | init of the root, and the agent ([`root`], [`server`]) |
//! | `vmfork-agent beside-init` | the agent beside another init; the initrd starts it so |
//! | `vmfork-agent serve …` | the agent as a service, or in a test ([`options`]) |
//!
//! [`server`] owns the loop. [`port`] talks to the daemon, and [`exec`] and [`transfer`] carry out
//! its requests. [`local`] talks to programs that fork their VM. [`machine`] applies a clone's
//! identity.

mod cmdline;
mod connection;
mod console;
mod exec;
mod firstboot;
mod initrd;
mod leftovers;
mod local;
mod machine;
mod options;
mod pipe;
mod port;
mod root;
mod server;
mod sys;
mod transfer;
mod user;
mod wire;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::cmdline::Cmdline;
use crate::console::log;
use crate::options::{Command, Effects, Options, USAGE};
use crate::server::{Server, Stop};

/// What systemd takes for "power off": SIGRTMIN+4.
const SYSTEMD_POWEROFF: i32 = 34 + 4;

fn main() -> ExitCode {
    let args: Vec<String> =
        std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    if std::process::id() == 1 {
        return init();
    }
    if args.first().is_some_and(|arg| arg == "beside-init") {
        if let Some(order) = Cmdline::read().reporting_order {
            root::apply_reporting_order(order);
        }
        return serve(Options::in_guest());
    }
    match options::parse(&args) {
        Ok(Command::Help) => said(USAGE),
        Ok(Command::Version) => said(concat!("vmfork-agent ", env!("CARGO_PKG_VERSION"), "\n")),
        Ok(Command::Serve(options)) => serve(options),
        Err(error) => {
            log!("{error}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn said(text: &str) -> ExitCode {
    // A closed pipe is no failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

/// PID 1: it never returns, or the kernel panics.
fn init() -> ExitCode {
    if Path::new(initrd::MODULES).exists() {
        let Err(error) = initrd::run();
        if std::process::id() == 1 {
            log!("this VM can't start: {error}");
            root::stop(Stop::Poweroff);
        }
        log!("{error}");
        return ExitCode::FAILURE; // The child that was to be the agent.
    }
    root::set_up();
    let stop = match Server::new(Options::in_guest(), true) {
        Err(error) => {
            log!("this VM can't be served: {error}");
            Stop::Poweroff
        }
        Ok(mut server) => {
            server.run_firstboot(Path::new(firstboot::PROGRAM));
            server.run()
        }
    };
    root::stop(stop)
}

fn serve(options: Options) -> ExitCode {
    sys::ignore_no_signals();
    let (effects, firstboot) = (options.effects.clone(), options.firstboot.clone());
    let mut server = match Server::new(options, false) {
        Ok(server) => server,
        Err(error) => {
            log!("{error}");
            return ExitCode::FAILURE;
        }
    };
    if let Some(program) = firstboot {
        server.run_firstboot(&program);
    }
    let stop = server.run();
    if stop == Stop::Poweroff {
        let result = match effects {
            Effects::Real => sys::kill(1, SYSTEMD_POWEROFF),
            Effects::Dry(folder) => std::fs::write(folder.join("poweroff"), ""),
            Effects::Refused => Ok(()),
        };
        if let Err(error) = result {
            log!("power off: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
