//! Device state out of one QEMU and into another, without RAM (`x-ignore-shared`).
//!
//! Out, with the pause marked: everything that can come before it does.
//!
//! ```text
//!   prepare_state_fd ─► stop ┃─► (freeze RAM) ─► migrate ─► MIGRATION completed ─► cont ┃
//! ```
//!
//! In: `load_state` on a QEMU that waits (`-incoming defer`), then `cont`, since the state was
//! saved stopped.
//!
//! To an fd, never to `exec:`: with `exec:` the event comes before the data is written.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};

use super::client::ANSWER_TIMEOUT;
use super::{Qmp, QmpError};

/// The fd's name inside QEMU. One byte, since each costs.
const FD_NAME: &str = "s";
const FD_URI: &str = "fd:s";
/// How long a QEMU that failed without a reason may take to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A state fd that QEMU holds ready for [`Qmp::migrate`].
#[derive(Debug)]
#[must_use = "QEMU holds the fd until `migrate` or `discard_state_fd`"]
pub struct PreparedState {
    _private: (),
}

impl Qmp {
    /// Leave shared RAM out of the state, and send `MIGRATION` events. Once, after connecting.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn set_migration_capabilities(&self) -> Result<(), QmpError> {
        let on = |name| json!({"capability": name, "state": true});
        let capabilities = json!({"capabilities": [on("x-ignore-shared"), on("events")]});
        self.ask("migrate-set-capabilities", Some(capabilities)).await.map(drop)
    }

    /// Announce no network card after a state was loaded. By default a clone would send frames for
    /// half a second, with the MAC of its command line and for its parent's address.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn announce_nothing(&self) -> Result<(), QmpError> {
        let none = json!({"announce-rounds": 0});
        self.ask("migrate-set-parameters", Some(none)).await.map(drop)
    }

    /// Hand QEMU the file that the state will go to; before the pause. QEMU writes from the fd's
    /// offset on. An fd prepared earlier and not used is replaced.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn prepare_state_fd(&self, fd: BorrowedFd<'_>) -> Result<PreparedState, QmpError> {
        let name = json!({"fdname": FD_NAME});
        self.execute_with_fd("getfd", Some(name), fd, ANSWER_TIMEOUT).await?;
        Ok(PreparedState { _private: () })
    }

    /// Take a prepared fd back, when the fork is off.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn discard_state_fd(&self, _state: PreparedState) -> Result<(), QmpError> {
        self.ask("closefd", Some(json!({"fdname": FD_NAME}))).await.map(drop)
    }

    /// Write the state of the stopped VM to the prepared fd, and wait until it is there.
    ///
    /// Run it where it isn't dropped half-way: a migration continues without its caller. On QEMU
    /// 7.2 there has to be a [`Qmp::cont`] between two of these. If it takes longer than `timeout`
    /// it is cancelled, so that the VM can continue.
    ///
    /// # Errors
    /// [`QmpError::Migration`] with QEMU's words, or as [`Qmp::execute`].
    pub async fn migrate(&self, _state: PreparedState, timeout: Duration) -> Result<(), QmpError> {
        let _turn = self.migration_turn().lock().await;
        self.forget_migration();
        self.ask("migrate", Some(json!({"uri": FD_URI}))).await?;
        match self.migration_end(timeout).await {
            Ok(end) if end == "completed" => Ok(()),
            Ok(end) => Err(self.why("save", &end).await),
            Err(error) => {
                if !error.is_lost() {
                    self.ask("migrate_cancel", None).await?;
                    // It ends by an event too; the error to tell is the timeout.
                    let _ = self.migration_end(ANSWER_TIMEOUT).await;
                }
                Err(error)
            }
        }
    }

    /// [`Qmp::prepare_state_fd`] and [`Qmp::migrate`], for whom the pause doesn't matter.
    ///
    /// # Errors
    /// As these.
    pub async fn save_state(&self, fd: BorrowedFd<'_>, timeout: Duration) -> Result<(), QmpError> {
        let state = self.prepare_state_fd(fd).await?;
        self.migrate(state, timeout).await
    }

    /// Load a state into a QEMU that was started with [`Launch::wait`](crate::Launch::wait). The VM
    /// is stopped afterwards. QEMU reads from the fd's offset on: give each its own open file, as
    /// by [`reopen_from_start`].
    ///
    /// # Errors
    /// [`QmpError::Migration`]; or [`QmpError::Lost`], since QEMU ends itself when a state doesn't
    /// fit: it says why on stderr, see [`Qemu::explain`](crate::Qemu::explain).
    pub async fn load_state(&self, fd: BorrowedFd<'_>, timeout: Duration) -> Result<(), QmpError> {
        let _turn = self.migration_turn().lock().await;
        let name = json!({"fdname": FD_NAME});
        self.execute_with_fd("getfd", Some(name), fd, ANSWER_TIMEOUT).await?;
        self.forget_migration();
        self.ask("migrate-incoming", Some(json!({"uri": FD_URI}))).await?;
        match self.migration_end(timeout).await? {
            end if end == "completed" => Ok(()),
            end => Err(self.why("load", &end).await),
        }
    }

    async fn why(&self, operation: &'static str, end: &str) -> QmpError {
        let info = match self.ask("query-migrate", None).await {
            Ok(info) => info,
            Err(error) if error.is_lost() => return error,
            Err(_) => Value::Null,
        };
        if let Some(desc) = info.get("error-desc").and_then(Value::as_str) {
            return QmpError::Migration { operation, desc: desc.to_owned() };
        }
        // It tells stderr and ends itself, right after the event.
        match tokio::time::timeout(EXIT_TIMEOUT, self.closed()).await {
            Ok(reason) => QmpError::Lost { reason },
            Err(_) => {
                let desc = format!("the migration has {end}, QEMU gives no reason");
                QmpError::Migration { operation, desc }
            }
        }
    }
}

/// Open a state file again for reading: own offset, at the start.
///
/// # Errors
/// If `/proc` is missing or the process has no fd left.
pub fn reopen_from_start(state: impl AsFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", state.as_fd().as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}
