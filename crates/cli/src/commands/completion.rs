//! `vmfork completion`: a script for the shell, made from the very definition of the flags.

use clap::CommandFactory as _;
use clap_complete::{Shell as Kind, generate};

use crate::args::{RawArgs, Shell};
use crate::config::Global;
use crate::failure::Exit;

pub(super) fn run(global: &Global, shell: Shell) -> anyhow::Result<Exit> {
    let kind = match shell {
        Shell::Bash => Kind::Bash,
        Shell::Zsh => Kind::Zsh,
        Shell::Fish => Kind::Fish,
    };
    let mut script = Vec::new();
    generate(kind, &mut RawArgs::command(), "vmfork", &mut script);
    global.printer.data(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}
