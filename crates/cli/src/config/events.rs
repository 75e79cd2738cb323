//! `vmfork events`, checked.

use vmfork_api::EventKind;

use super::{misuse, value};
use crate::args::RawEvents;
use crate::failure::Misuse;

#[derive(Debug)]
pub(crate) struct EventsConfig {
    /// The cursor to continue after; moves with each event.
    pub(crate) after: Option<String>,
    pub(crate) kinds: Vec<EventKind>,
    pub(crate) vm: Option<String>,
    pub(crate) follow: bool,
}

impl EventsConfig {
    pub(super) fn new(raw: RawEvents) -> Result<Self, Misuse> {
        let kind = |word: &String| match EventKind::of_word(word) {
            Some(kind) => Ok(kind),
            None => {
                let known: Vec<&str> = EventKind::ALL.into_iter().map(EventKind::word).collect();
                misuse(format!("--kind {word}: the kinds are {}", known.join(", ")))
            }
        };
        Ok(Self {
            after: raw.after,
            kinds: raw.kinds.iter().map(kind).collect::<Result<_, _>>()?,
            vm: raw.vm.map(|vm| value::name(vm, "VM's name")).transpose()?,
            follow: !raw.no_follow,
        })
    }

    /// The options by which another command continues.
    pub(crate) fn resume(&self) -> String {
        let after = self.after.iter().map(|after| format!(" --after {after}"));
        let kinds = self.kinds.iter().map(|kind| format!(" --kind {}", kind.word()));
        let vm = self.vm.iter().map(|vm| format!(" --vm {vm}"));
        after.chain(kinds).chain(vm).collect()
    }
}
