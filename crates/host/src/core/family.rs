//! The end of VMs, and of all that descends from them.

use std::sync::Arc;
use std::time::Duration;

use vmfork_api::ErrorBody;

use super::Core;
use crate::error::Error;
use crate::vm::{End, Vm};

/// How often what is left of a family is looked for. Twice is the rule: once to end all, once to
/// find none.
const KILL_ROUNDS_MAX: u32 = 10;
/// How long a killed QEMU may take to be gone, or a fork that is given up.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Ask the guest to power off, and wait.
///
/// A guest whose vCPUs stand still cannot power off: it is not waited for.
async fn power_off(vm: &Arc<Vm>, grace: Duration) {
    if vm.pause.is_paused() {
        return;
    }
    let asked = match vm.link() {
        Ok(link) => link.poweroff().is_ok(),
        Err(_no_agent) => match vm.machine() {
            Some(machine) => machine.qmp.system_powerdown().await.is_ok(),
            None => false,
        },
    };
    if asked {
        let _off = tokio::time::timeout(grace, vm.wait_end()).await;
    }
}

impl Core {
    /// End VMs, and wait until their QEMUs are gone, and their volumes are given back.
    pub async fn kill_all(self: &Arc<Self>, victims: &[Arc<Vm>], grace: Duration) {
        if !grace.is_zero() {
            let all = victims.iter().map(|victim| power_off(victim, grace));
            futures_util::future::join_all(all).await;
        }
        let exits = victims.iter().filter_map(|victim| {
            let exit = victim.machine().map(|machine| machine.process.exit());
            self.end(victim, End::killed("killed on request"));
            exit
        });
        let exits: Vec<_> = exits.collect();
        let _gone = tokio::time::timeout(KILL_TIMEOUT, futures_util::future::join_all(exits)).await;
        let names: Vec<&str> = victims.iter().map(|victim| victim.name()).collect();
        self.disks.given_back(&names).await;
    }

    /// End a VM and all that descends from it on this host, also what is being forked from any of
    /// them meanwhile. → how many VMs and forks that were.
    ///
    /// # Errors
    /// A fork did not let go: what it had begun to start may be there still.
    pub async fn kill_family(
        self: &Arc<Self>,
        id: &str,
        name: &str,
        grace: Duration,
    ) -> Result<usize, ErrorBody> {
        let mut grace = Some(grace);
        let mut ended = 0;
        for _ in 0..KILL_ROUNDS_MAX {
            let family = self.registry.end_of_family(id);
            if family.vms.is_empty() && family.forks.is_empty() {
                return Ok(ended);
            }
            ended += family.vms.len() + family.forks.len();
            self.kill_all(&family.vms, grace.take().unwrap_or_default()).await;
            let over = family.forks.iter().map(|fork| fork.cancelled());
            let over = futures_util::future::join_all(over);
            if tokio::time::timeout(KILL_TIMEOUT, over).await.is_err() {
                break;
            }
        }
        Err(Error::ForkStays.to_body(format!("kill the family of `{name}`")))
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::testing::Host;
    use crate::vm::test_identity;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_fork_under_way_adds_to_a_family_ends_with_it() {
        let host = Host::start().await;
        let web = host.vm("web", None);
        let give_up = CancellationToken::new();
        let under_way = host.core.registry.fork_begins(web.identity.line(), give_up.clone());
        let (core, parent) = (Arc::clone(&host.core), Arc::clone(&web));
        let fork = tokio::spawn(async move {
            give_up.cancelled().await;
            // Too late to stop: one more clone is listed after the family's victims were.
            tokio::time::sleep(Duration::from_millis(20)).await;
            let clone = core.add_vm(test_identity("web.1", Some(&parent)), None, None);
            drop(under_way);
            clone.expect("a folder for it")
        });
        let other = host.vm("other", None);
        let ended = host.core.kill_family("id-web", "web", Duration::ZERO).await;
        assert_eq!(ended.expect("all ended"), 3, "two VMs and a fork");
        assert!(fork.await.expect("no panic").end_now().is_some());
        assert!(web.end_now().is_some());
        assert!(other.end_now().is_none());
    }
}
