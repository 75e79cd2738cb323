//! What the VMs of this host tell readers of events.

use vmfork_api::{EventClone, ForkReply, Happening};
use vmfork_guest_link::agent::AgentInfo;

use super::Core;
use crate::vm::{End, Standstill, Step, Vm};

impl Core {
    /// A VM's agent has answered, or it has none and its start is over.
    pub fn set_ready(&self, vm: &Vm, agent: Option<AgentInfo>) {
        // In one: what a ready VM is asked to do is told later.
        vm.told.step(Step::Ready, || {
            let ready_ms = crate::metrics::ms(vm.set_ready(agent));
            self.events.tell(Happening::VmReady { vm: vm.identity.in_event(), ready_ms });
        });
    }

    /// A VM's vCPUs stand still because a client asked for it.
    pub fn pause_begins(&self, vm: &Vm, still: Standstill) {
        vm.told.between(|| {
            vm.pause.begin(still);
            self.events.tell(Happening::VmPaused { vm: vm.identity.in_event() });
        });
    }

    /// A VM's vCPUs run again because a client asked for it.
    pub fn pause_ends(&self, vm: &Vm) {
        vm.told.between(|| {
            vm.pause.end();
            self.events.tell(Happening::VmResumed { vm: vm.identity.in_event() });
        });
    }

    /// A fork is over, and this is its outcome.
    pub fn tell_forked(&self, parent: &Vm, reply: &ForkReply) {
        let clones = reply.clones.iter().filter(|clone| clone.error.is_none());
        let clones = clones.filter_map(|clone| {
            let (id, name, host) = (clone.id.clone()?, clone.name.clone(), clone.host.clone());
            Some(EventClone { id, name, host })
        });
        self.events.tell(Happening::VmForked {
            vm: parent.identity.in_event(),
            requested: reply.requested,
            granted: reply.granted,
            pause_ms: reply.pause_ms,
            clones: clones.collect(),
        });
    }

    /// A VM is listed. Called while the list is locked, so that its end comes later.
    pub(super) fn tell_started(&self, vm: &Vm) {
        vm.told.step(Step::Started, || {
            self.events.tell(Happening::VmStarted { vm: vm.identity.in_event() });
        });
    }

    /// A VM has ended.
    pub(super) fn tell_ended(&self, vm: &Vm, end: &End) {
        vm.told.step(Step::Ended, || {
            self.events.tell(Happening::VmEnded {
                vm: vm.identity.in_event(),
                state: end.state,
                reason: end.reason.clone(),
                end: end.kind.into(),
            });
        });
    }
}

/// A number that no other life of this daemon has.
///
/// # Panics
/// If the kernel has no random numbers, which Linux always has once it is up.
pub(super) fn epoch() -> u64 {
    let mut epoch = [0; 8];
    if let Err(error) = getrandom::fill(&mut epoch) {
        unreachable!("getrandom(2) of a few bytes: {error}");
    }
    u64::from_ne_bytes(epoch)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmfork_api::{EventKind, VmEnd, VmState};

    use super::*;
    use crate::metrics::EndReason;
    use crate::testing::Host;

    fn told(host: &Host) -> Vec<Happening> {
        let (events, mut all) = (&host.core.events, Vec::new());
        let mut after = events.start();
        loop {
            let page = events.read(after).expect("ours");
            let Some(last) = page.last() else { return all };
            after = last.at;
            all.extend(page.iter().map(|told| told.event.what.clone()));
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_vm_starts_gets_ready_and_ends_once() {
        let host = Host::start().await;
        let vm = host.vm("web", None);
        host.core.set_ready(&vm, None);
        host.core.end(&vm, End::failed(EndReason::OutOfMemory, "out of memory"));
        host.core.end(&vm, End::killed("killed on request"));
        host.core.set_ready(&vm, None);
        let told = told(&host);
        let kinds: Vec<_> = told.iter().map(Happening::kind).collect();
        assert_eq!(kinds, [EventKind::VmStarted, EventKind::VmReady, EventKind::VmEnded]);
        let Some(Happening::VmEnded { vm: of, state, reason, end }) = told.last() else {
            unreachable!("as was just compared")
        };
        assert_eq!((&of.id, &of.name), (&vm.identity.id, &vm.identity.name));
        assert_eq!((*state, *end), (VmState::Failed, VmEnd::OutOfMemory));
        assert_eq!(reason, "out of memory");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pauses_are_told_before_the_end_and_not_after_it() {
        let host = Host::start().await;
        let vm = host.vm("web", None);
        host.core.set_ready(&vm, None);
        host.core.pause_begins(&vm, Standstill::default());
        assert!(vm.pause.is_paused());
        host.core.pause_ends(&vm);
        assert!(!vm.pause.is_paused());
        host.core.pause_begins(&vm, Standstill::default());
        host.core.end(&vm, End::killed("killed on request"));
        host.core.pause_ends(&vm);
        host.core.pause_begins(&vm, Standstill::default());
        assert!(!vm.pause.is_paused(), "it has ended");
        use EventKind::{VmEnded, VmPaused, VmReady, VmResumed, VmStarted};
        let kinds: Vec<_> = told(&host).iter().map(Happening::kind).collect();
        assert_eq!(kinds, [VmStarted, VmReady, VmPaused, VmResumed, VmPaused, VmEnded]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn an_end_comes_after_its_start_whatever_else_goes_on() {
        let host = Arc::new(Host::start().await);
        for round in 0..200 {
            let name = format!("web.{round}");
            let ending = {
                let (host, name) = (Arc::clone(&host), name.clone());
                tokio::task::spawn_blocking(move || {
                    // As a kill of a VM that was listed this moment.
                    loop {
                        if let Ok(vm) = host.core.registry.find("kill", &name) {
                            return host.core.end(&vm, End::killed("killed on request"));
                        }
                    }
                })
            };
            let vm = host.vm(&name, None);
            host.core.set_ready(&vm, None);
            ending.await.expect("ended");
            let of_it =
                told(&host).into_iter().filter(|what| what.vm().is_some_and(|vm| vm.name == name));
            let kinds: Vec<_> = of_it.map(|what| what.kind()).collect();
            assert_eq!(kinds.first(), Some(&EventKind::VmStarted), "{kinds:?}");
            assert_eq!(kinds.last(), Some(&EventKind::VmEnded), "{kinds:?}");
            assert!(kinds.len() <= 3, "{kinds:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_client_that_sees_an_end_finds_it_among_the_events() {
        let host = Arc::new(Host::start().await);
        for round in 0..200 {
            let vm = host.vm(&format!("web.{round}"), None);
            let ending = {
                let (host, vm) = (Arc::clone(&host), Arc::clone(&vm));
                tokio::task::spawn_blocking(move || {
                    host.core.end(&vm, End::killed("killed on request"));
                })
            };
            while vm.end_now().is_none() {
                std::hint::spin_loop();
            }
            let last = told(&host).pop().expect("an event");
            assert_eq!(last.kind(), EventKind::VmEnded);
            assert_eq!(last.vm().map(|of| &of.id), Some(&vm.identity.id));
            ending.await.expect("ended");
        }
    }
}
