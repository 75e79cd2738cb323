//! Running Slurm's commands.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

use crate::allocate::{Boxed, CommandError};

/// Most bytes that a command may print: `scontrol show nodes` has 1 kB for each node.
const OUTPUT_BYTES_MAX: u64 = 64 << 20;

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

/// Who runs commands.
pub trait Commands: Send + Sync + fmt::Debug {
    /// Runs one to its end, which comes within `bound` or is an error.
    fn run(
        &self,
        program: &'static str,
        arguments: Vec<String>,
        bound: Duration,
    ) -> Boxed<'_, Result<Output, CommandError>>;
}

/// Those that are installed, found in `PATH`.
#[derive(Debug, Clone, Default)]
pub struct System {
    conf: Option<PathBuf>,
}

impl System {
    /// With this `SLURM_CONF`, or the daemon's own.
    pub fn new(conf: Option<PathBuf>) -> Self {
        Self { conf }
    }

    async fn run_to_end(
        &self,
        program: &'static str,
        arguments: Vec<String>,
    ) -> io::Result<Output> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            // Texts are looked at, so not translated.
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(conf) = &self.conf {
            command.env("SLURM_CONF", conf);
        }
        let mut child = command.spawn()?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (stdout, stderr) = tokio::try_join!(read(stdout), read(stderr))?;
        let status = child.wait().await?;
        Ok(Output { success: status.success(), stdout, stderr })
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        let mut from = from.take(OUTPUT_BYTES_MAX);
        from.read_to_end(&mut bytes).await?;
        if from.limit() == 0 {
            return Err(io::Error::other("it prints without end"));
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Commands for System {
    fn run(
        &self,
        program: &'static str,
        arguments: Vec<String>,
        bound: Duration,
    ) -> Boxed<'_, Result<Output, CommandError>> {
        Box::pin(async move {
            let run = tokio::time::timeout(bound, self.run_to_end(program, arguments)).await;
            let program = program.to_owned();
            match run {
                Err(_) => Err(CommandError::TimedOut { program, bound }),
                Ok(done) => done.map_err(|source| CommandError::Run { program, source }),
            }
        })
    }
}
