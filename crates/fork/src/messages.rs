//! Texts and refusals that the parts of a fork have in common.

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_host::vm::Vm;

/// What a fork does, for the text of its errors.
pub(crate) fn message(parent: &Vm) -> String {
    format!("fork `{}`", parent.name())
}

/// The part of one of several VMs that are started, for the text of its errors.
pub fn start_message(name: &str) -> String {
    format!("start VM `{name}`")
}

/// The VM can't be frozen yet.
pub(crate) fn not_yet(message: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: message.to_owned(),
        cause: Some("its guest has not come up yet".to_owned()),
        remedy: Some("wait until `vmfork ps` shows it running".to_owned()),
    }
}

/// The VM was paused for as long as its guest's fork could wait.
pub(crate) fn still_paused(parent: &Vm, message: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Timeout,
        message: message.to_owned(),
        cause: Some("the VM is paused".to_owned()),
        remedy: Some(format!("`vmfork resume {}` lets it continue", parent.name())),
    }
}

/// The client has gone, or the family was killed.
pub fn was_given_up(message: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message: message.to_owned(),
        cause: Some("it was given up: its client has gone, or its family was killed".to_owned()),
        remedy: None,
    }
}

/// Another VM has the name.
pub fn name_taken(message: String, name: &str) -> ErrorBody {
    ErrorBody {
        code: ErrorCode::Conflict,
        message,
        cause: Some(format!("there is a VM named `{name}` already")),
        remedy: Some(format!("choose another name, or `vmfork rm {name}`")),
    }
}
