//! What readers of events were told of a VM: each step once, and in order.

use std::sync::{Mutex, PoisonError};

use vmfork_api::{EventVm, VmEnd};

use super::Identity;
use crate::metrics::EndReason;

/// The steps of a VM's life, in order. One may be left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    #[default]
    Nothing,
    Started,
    Ready,
    Ended,
}

/// How far readers know.
#[derive(Debug, Default)]
pub(crate) struct ToldOf(Mutex<Step>);

impl ToldOf {
    /// Calls `tell` if this step, and none after it, was told yet. No other step is told meanwhile.
    pub(crate) fn step(&self, step: Step, tell: impl FnOnce()) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if step > *last {
            *last = step;
            tell();
        }
    }

    /// Calls `tell` if readers know that it is ready, and not that it has ended. No step is told
    /// meanwhile. May be called any number of times.
    pub(crate) fn between(&self, tell: impl FnOnce()) {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *last == Step::Ready {
            tell();
        }
    }
}

impl Identity {
    /// What events show of it.
    pub fn in_event(&self) -> EventVm {
        EventVm {
            id: self.id.clone(),
            name: self.name.clone(),
            family: self.family.clone(),
            parent: self.parent.as_ref().map(|(id, _)| id.clone()),
            snapshot: self.snapshot.clone(),
        }
    }
}

impl From<EndReason> for VmEnd {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Exited => Self::Exited,
            EndReason::Killed => Self::Killed,
            EndReason::Expired => Self::Expired,
            EndReason::QemuDied => Self::QemuDied,
            EndReason::PageLost => Self::PageLost,
            EndReason::Guest => Self::Guest,
            EndReason::OutOfMemory => Self::OutOfMemory,
            EndReason::Fault => Self::Fault,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_told_once_and_none_before_it_afterwards() {
        let (told, steps) = (ToldOf::default(), Mutex::new(Vec::new()));
        let tell = |step| told.step(step, || steps.lock().expect("lock").push(step));
        for step in [Step::Started, Step::Started, Step::Ended, Step::Ready, Step::Ended] {
            tell(step);
        }
        assert_eq!(*steps.lock().expect("lock"), [Step::Started, Step::Ended]);
    }

    #[test]
    fn what_is_told_in_between_comes_after_the_ready_and_before_the_end() {
        let (told, mut times) = (ToldOf::default(), 0);
        for (step, expected) in [(Step::Started, 0), (Step::Ready, 2), (Step::Ended, 2)] {
            told.step(step, || ());
            told.between(|| times += 1);
            told.between(|| times += 1);
            assert_eq!(times, expected, "{step:?}");
        }
    }
}
