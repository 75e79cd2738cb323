//! The timer that ends VMs whose time is over, and what a VM's bound is to the API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_api::{ErrorBody, Ttl};

use super::Core;
use crate::error::Error;
use crate::lifetime::{OVER, Setting};
use crate::vm::{End, Vm, now_unix_ms};

/// How long the timer sleeps at most. Only a bound on the sleep: each change wakes it.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// End VMs when they are due, until the host ends.
pub(super) fn start(core: &Arc<Core>) {
    let (weak, lifetimes) = (Arc::downgrade(core), Arc::clone(&core.lifetimes));
    tokio::spawn(async move {
        loop {
            let (due, next) = lifetimes.look();
            let Some(core) = weak.upgrade() else { return };
            for id in due {
                match core.registry.find("end", &id) {
                    Ok(vm) => core.end(&vm, End::expired()),
                    Err(_unlisted) => lifetimes.ended(&id),
                }
                // It may have ended by itself just now.
                lifetimes.ended(&id);
            }
            drop(core);
            let latest = Instant::now() + SLEEP_MAX;
            let wake = next.map_or(latest, |next| next.min(latest));
            tokio::select! {
                () = lifetimes.changed() => {}
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    });
}

impl End {
    fn expired() -> Self {
        Self { kind: crate::metrics::EndReason::Expired, ..Self::exited(OVER) }
    }
}

impl Core {
    /// Bound a VM's life from now on; `None`: without bound.
    ///
    /// # Errors
    /// It has ended.
    pub fn set_ttl(&self, vm: &Vm, ttl: Option<Duration>) -> Result<Setting, ErrorBody> {
        let refused =
            || Error::Over(vm.ended()).to_body(format!("bound the life of `{}`", vm.name()));
        // Between a VM's end and its removal from the table, the table still has it.
        if vm.end_now().is_some() {
            return Err(refused());
        }
        let setting = self.lifetimes.set(&vm.identity.id, ttl).ok_or_else(refused)?;
        tracing::info!(vm = vm.name(), ?ttl, "its time to live was set");
        Ok(setting)
    }

    /// When a VM ends by itself, if it does.
    pub fn ttl(&self, vm: &Vm) -> Option<Ttl> {
        let Setting { of, ends, .. } = self.lifetimes.of(&vm.identity.id)?;
        let left = ends?.saturating_duration_since(Instant::now());
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let expires_unix_ms = now_unix_ms().saturating_add(left_ms);
        let inherited_from = (of != vm.identity.id).then_some(of);
        Some(Ttl { expires_unix_ms, left_ms, inherited_from })
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::{ErrorCode, VmState};

    use super::*;
    use crate::lifetime::Lifetime;
    use crate::metrics::EndReason;
    use crate::testing::{Host, SOON};
    use crate::vm::{Identity, test_identity};

    fn vm(host: &Host, name: &str, parent: Option<&Vm>, lifetime: Lifetime) -> Arc<Vm> {
        let identity = Identity { lifetime, ..test_identity(name, parent) };
        host.core.add_vm(identity, None, None).expect("a folder for it")
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_vm_and_what_inherits_its_bound_end_with_the_reason() {
        let host = Host::start().await;
        let core = &host.core;
        let web = vm(&host, "web", None, Lifetime::default());
        let inherits = || Lifetime { own: None, inherited: core.lifetimes.of(&web.identity.id) };
        let clone = vm(&host, "web.1", Some(&web), inherits());
        let other = vm(&host, "other", None, Lifetime::default());
        assert!(core.ttl(&clone).is_none());
        core.set_ttl(&web, Some(Duration::from_secs(3600))).expect("it lives");
        let ttl = core.ttl(&clone).expect("it inherits a later change");
        assert_eq!(ttl.inherited_from.as_deref(), Some("id-web"));
        assert!((3_590_000..=3_600_000).contains(&ttl.left_ms), "{ttl:?}");
        core.set_ttl(&web, Some(Duration::from_millis(20))).expect("it lives");
        for vm in [&web, &clone] {
            let end = tokio::time::timeout(SOON, vm.wait_end()).await.expect("in time");
            assert_eq!((end.reason.as_str(), end.kind), (OVER, EndReason::Expired));
            assert_eq!(end.state, VmState::Exited);
        }
        assert!(other.end_now().is_none());
        let error = core.set_ttl(&web, None).expect_err("it has ended");
        assert_eq!(error.code, ErrorCode::Conflict);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_clone_that_starts_after_its_parents_end_still_ends_in_time() {
        let host = Host::start().await;
        let core = &host.core;
        let own = Some(Duration::from_millis(30));
        let web = vm(&host, "web", None, Lifetime { own, inherited: None });
        let lifetime = Lifetime { own: None, inherited: core.lifetimes.of(&web.identity.id) };
        core.end(&web, End::killed("in this test"));
        let clone = vm(&host, "web.1", Some(&web), lifetime);
        let end = tokio::time::timeout(SOON, clone.wait_end()).await.expect("in time");
        assert_eq!(end.kind, EndReason::Expired);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_bound_of_a_vm_is_there_when_it_can_be_found_and_goes_with_it() {
        let host = Host::start().await;
        for number in 0..200 {
            let (name, core) = (format!("web-{number}"), Arc::clone(&host.core));
            let id = format!("id-{name}");
            let wanted = id.clone();
            let kill = tokio::task::spawn_blocking(move || {
                let vm = loop {
                    match core.registry.find("end", &wanted) {
                        Ok(vm) => break vm,
                        Err(_not_yet) => std::hint::spin_loop(),
                    }
                };
                let set = core.set_ttl(&vm, Some(Duration::from_secs(60)));
                core.end(&vm, End::killed("in this test"));
                set
            });
            let own = Some(Duration::from_secs(3600));
            vm(&host, &name, None, Lifetime { own, inherited: None });
            let set = tokio::time::timeout(SOON, kill).await.expect("in time").expect("no panic");
            set.expect("it lived");
            assert_eq!(host.core.lifetimes.of(&id), None, "{name}: nothing is kept of it");
        }
    }
}
