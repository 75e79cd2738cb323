//! What becomes of a VM whose agent is lost.
//!
//! | the VM is | it |
//! |---|---|
//! | a ticket's clone | ends: its workers could not report any more, and their parent would wait forever |
//! | any other | continues; a request to its agent fails at once, because there is none |

use std::sync::Arc;

use tokio::sync::broadcast::Receiver;
use vmfork_qemu::qmp::Event;

use super::Core;
use crate::metrics::EndReason;
use crate::vm::{End, Vm};
use vmfork_guest_link::agent::{self, AgentLink};

/// Notice the end of a VM's agent. `events` are its QEMU's.
pub fn watch(core: &Arc<Core>, vm: &Arc<Vm>, link: AgentLink, events: Receiver<Event>) {
    let (weak, vm) = (Arc::downgrade(core), Arc::clone(vm));
    tokio::spawn(async move {
        let reason = tokio::select! {
            reason = agent::lost(&link, events, || vm.ready().is_some()) => reason,
            _ = vm.wait_end() => return,
        };
        drop(link);
        // If its QEMU has ended, that is the reason to be told.
        tokio::select! {
            () = tokio::time::sleep(agent::SETTLE) => {}
            _ = vm.wait_end() => return,
        }
        tracing::warn!(vm = vm.name(), %reason, "the guest's agent is lost");
        if let (Some(core), Some(_)) = (weak.upgrade(), &vm.origin) {
            core.end(&vm, End::failed(EndReason::Guest, format!("lost its agent: {reason}")));
        }
    });
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::sync::broadcast;
    use tokio::time::timeout;

    use super::*;
    use crate::testing::{Host, SOON, link};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn any_other_vm_outlives_its_agent() {
        let host = Host::start().await;
        let vm = host.vm("web", None);
        host.core.set_ready(&vm, None);
        let (link, mut guest, _requests) = link();
        let (_qemu, events) = broadcast::channel(4);
        watch(&host.core, &vm, link.clone(), events);
        guest.stream.write_all(&[0xff; 64]).await.expect("write");
        timeout(SOON, link.closed()).await.expect("the protocol is broken");
        tokio::time::sleep(4 * agent::SETTLE).await;
        assert!(vm.end_now().is_none());
    }
}
