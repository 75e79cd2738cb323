//! Texts that the parts of a fork have in common.

use vmfork_host::vm::Vm;

/// What a fork does, for the text of its errors.
pub(crate) fn message(parent: &Vm) -> String {
    format!("fork `{}`", parent.name())
}

/// The part of one of several VMs that are started, for the text of its errors.
pub fn start_message(name: &str) -> String {
    format!("start VM `{name}`")
}
