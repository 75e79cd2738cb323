//! Programs of the guest's own that answer a question by their exit code.

use std::time::Duration;

use tokio::time::timeout_at;
use vmfork_api::ExecRequest;
use vmfork_control::ExecOutput;
use vmfork_guest_link::agent::LinkError;

use super::Vm;
use crate::error::VmError;

/// Why there is no exit code.
#[derive(Debug, thiserror::Error)]
pub enum NotRun {
    /// Its VM can't run anything now.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The agent does not start it.
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("`{program}` did not end within {} s in the guest", limit.as_secs())]
    Late { program: String, limit: Duration },
    #[error("the guest's agent disconnected while `{program}` ran")]
    Lost { program: String },
}

impl Vm {
    /// Run a program in the guest, as root. → its exit code; its output is dropped. `limit` is for
    /// all of it.
    ///
    /// # Errors
    /// There is no agent that could run it now, or the program does not end in time. Then it is
    /// hung up.
    pub async fn exit_code(&self, argv: &[&str], limit: Duration) -> Result<i32, NotRun> {
        let deadline = tokio::time::Instant::now() + limit;
        let program = || argv.first().copied().unwrap_or_default().to_owned();
        let words = argv.iter().map(|&word| word.to_owned()).collect();
        let request = ExecRequest { argv: words, ..ExecRequest::default() };
        let mut session = self.awake_link()?.exec(request, limit).await?;
        let ends = timeout_at(deadline, async {
            while let Some(output) = session.output.recv().await {
                if let ExecOutput::Exited { exit_code, .. } = output {
                    return Some(exit_code);
                }
            }
            None
        });
        let ended = ends.await.map_err(|_elapsed| NotRun::Late { program: program(), limit })?;
        ended.ok_or_else(|| NotRun::Lost { program: program() })
    }
}
