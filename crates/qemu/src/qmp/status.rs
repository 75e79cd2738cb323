//! The commands without migration, typed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::ANSWER_TIMEOUT;
use super::{Qmp, QmpError};

/// How long [`Qmp::cont`] waits for a migration's last steps; a few hundred µs are usual.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);
/// So often a refused `cont` is repeated at once, each 0.1 to 0.2 ms, before sleeping between.
const EAGER_ATTEMPTS: u32 = 16;

/// QEMU's run state. Names are QEMU's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    Running,
    Paused,
    /// Waits for `migrate-incoming`, or loads.
    InMigrate,
    FinishMigrate,
    /// State was saved: `cont` is possible; another `migrate` is not (QEMU 7.2).
    PostMigrate,
    Prelaunch,
    Shutdown,
    GuestPanicked,
    InternalError,
    IoError,
    /// One not listed here.
    Other(String),
}

impl RunState {
    fn parse(name: &str) -> Self {
        match name {
            "running" => Self::Running,
            "paused" => Self::Paused,
            "inmigrate" => Self::InMigrate,
            "finish-migrate" => Self::FinishMigrate,
            "postmigrate" => Self::PostMigrate,
            "prelaunch" => Self::Prelaunch,
            "shutdown" => Self::Shutdown,
            "guest-panicked" => Self::GuestPanicked,
            "internal-error" => Self::InternalError,
            "io-error" => Self::IoError,
            other => Self::Other(other.to_owned()),
        }
    }
}

/// Answer of `query-status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub running: bool,
    pub state: RunState,
}

impl Qmp {
    pub(super) async fn ask(
        &self,
        command: &str,
        arguments: Option<Value>,
    ) -> Result<Value, QmpError> {
        self.execute(command, arguments, ANSWER_TIMEOUT).await
    }

    /// Stop the vCPUs and drain block I/O.
    ///
    /// # Errors
    /// As [`Qmp::execute`], here and for all commands below.
    pub async fn stop(&self) -> Result<(), QmpError> {
        self.ask("stop", None).await.map(drop)
    }

    /// Let the vCPUs run. Right after a migration QEMU may refuse for a moment ("not finalized
    /// yet"); that is waited for, 5 s at most.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn cont(&self) -> Result<(), QmpError> {
        let began = Instant::now();
        let mut attempt = 0;
        loop {
            match self.ask("cont", None).await {
                Err(QmpError::Refused { desc, .. })
                    if desc.contains("finalized") && began.elapsed() < FINALIZE_TIMEOUT => {}
                other => return other.map(drop),
            }
            attempt += 1;
            back_off(attempt).await;
        }
    }

    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn query_status(&self) -> Result<Status, QmpError> {
        let answer = self.ask("query-status", None).await?;
        let state = answer.get("status").and_then(Value::as_str);
        let running = answer.get("running").and_then(Value::as_bool);
        match (running, state) {
            (Some(running), Some(state)) => Ok(Status { running, state: RunState::parse(state) }),
            _ => Err(not_understood("query-status", &answer)),
        }
    }

    /// Wait until a saved VM is in `postmigrate`, where block devices may be changed
    /// (`blockdev-snapshot`). [`Qmp::cont`] doesn't need it. There is no event for it: asked again
    /// until then, 5 s at most.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; `Timeout`.
    pub async fn wait_postmigrate(&self) -> Result<(), QmpError> {
        let began = Instant::now();
        let mut attempt = 0;
        while self.query_status().await?.state != RunState::PostMigrate {
            if began.elapsed() >= FINALIZE_TIMEOUT {
                let timeout_ms = FINALIZE_TIMEOUT.as_millis();
                return Err(QmpError::Timeout { command: "postmigrate".to_owned(), timeout_ms });
            }
            attempt += 1;
            back_off(attempt).await;
        }
        Ok(())
    }

    /// Press the power button: a guest that listens shuts down.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn system_powerdown(&self) -> Result<(), QmpError> {
        self.ask("system_powerdown", None).await.map(drop)
    }

    /// End QEMU. That it is gone before it has answered counts as done.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn quit(&self) -> Result<(), QmpError> {
        match self.ask("quit", None).await {
            Err(error) if error.is_lost() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Read where a QOM property stands, for tests and diagnosis.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn qom_get(&self, path: &str, property: &str) -> Result<Value, QmpError> {
        self.ask("qom-get", Some(json!({"path": path, "property": property}))).await
    }

    /// The guid that this QEMU's vmgenid device shows the guest.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn vm_generation_id(&self) -> Result<String, QmpError> {
        let answer = self.ask("query-vm-generation-id", None).await?;
        let guid = answer.get("guid").and_then(Value::as_str).map(str::to_owned);
        guid.ok_or_else(|| not_understood("query-vm-generation-id", &answer))
    }

    /// The host threads of the vCPUs, in order.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn vcpu_threads(&self) -> Result<Vec<i32>, QmpError> {
        let answer = self.ask("query-cpus-fast", None).await?;
        let thread = |cpu: &Value| i32::try_from(cpu.get("thread-id")?.as_i64()?).ok();
        let threads = answer.as_array().map(|cpus| cpus.iter().filter_map(thread).collect());
        threads.ok_or_else(|| not_understood("query-cpus-fast", &answer))
    }
}

pub(super) fn not_understood(command: &str, answer: &Value) -> QmpError {
    let answer = answer.to_string().chars().take(200).collect();
    QmpError::Answer { command: command.to_owned(), answer }
}

/// The timer of tokio has a grain of 1 ms, so the first attempts rely on the round trip itself.
async fn back_off(attempt: u32) {
    if attempt <= EAGER_ATTEMPTS {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(Duration::from_millis(u64::from((attempt - EAGER_ATTEMPTS).min(10))))
            .await;
    }
}
