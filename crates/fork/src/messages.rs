//! Texts and refusals that the parts of a fork have in common.

use vmfork_api::ErrorBody;
use vmfork_host::vm::Vm;

use crate::error::Error;

/// What a fork does, for the text of its errors.
pub(crate) fn message(parent: &Vm) -> String {
    format!("fork `{}`", parent.name())
}

/// The part of one of several VMs that are started, for the text of its errors.
pub fn start_message(name: &str) -> String {
    format!("start VM `{name}`")
}

/// The client has gone, or the family was killed.
pub fn was_given_up(message: &str) -> ErrorBody {
    Error::GivenUp.to_body(message)
}

/// Another VM has the name.
pub fn name_taken(message: String, name: &str) -> ErrorBody {
    Error::NameTaken { name: name.to_owned() }.to_body(message)
}
