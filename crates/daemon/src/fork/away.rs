//! The part of a fork that goes to other hosts of the cluster.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, ErrorCode, Place};
use vmfork_cluster::allocate::{HostView, Plan, Policy};
use vmfork_cluster::{HostId, Room};

use super::brood::{self, Wanted};
use super::snapshot::Snapshot;
use crate::cluster::{CloneOrder, Member, Sending, Share, send};
use crate::facts::{Facts, Frozen, host};
use crate::hub::{Core, chain};
use crate::vm::Vm;
use crate::vm::machine::Machine;

/// Where clones may go.
#[derive(Debug, Clone, Default)]
pub(crate) struct Placement {
    /// Default: spread in a cluster, else here.
    pub(crate) place: Option<Place>,
    pub(crate) hosts: Option<Vec<String>>,
    /// How fast other hosts get all of the memory; 0: as it is asked for.
    pub(crate) hydrate_bytes_per_s: u64,
}

/// Who starts how many, decided before the pause.
#[derive(Debug)]
pub(super) struct Away {
    member: Arc<Member>,
    /// How many stay here.
    pub(super) here: u32,
    shares: Vec<(HostId, u32)>,
    machine_type: String,
    hydrate_bytes_per_s: u64,
    /// Names that VMs of other hosts have.
    pub(super) taken: HashSet<String>,
}

/// Decide what goes elsewhere; `None`: nothing does.
///
/// # Errors
/// Hosts are named that there are not, or not all fit and all are insisted on.
pub(super) async fn plan(
    core: &Core,
    parent: &Vm,
    machine: &Machine,
    ask: (&Placement, u32, bool),
    message: &str,
) -> Result<Option<Away>, ErrorBody> {
    let (placement, count, all_or_nothing) = ask;
    let Some(member) = core.cluster.member() else {
        let wants_more = matches!(placement.place, Some(Place::Spread | Place::Pack));
        return match wants_more || placement.hosts.is_some() {
            true => Err(ErrorBody::new(ErrorCode::Conflict, message)
                .cause("this host is in no cluster")
                .remedy("`vmfork cluster init` makes one, `vmfork cluster join` joins one")),
            false => Ok(None),
        };
    };
    let policy = match placement.place {
        Some(Place::Here) => return Ok(None),
        Some(Place::Pack) => Policy::Pack,
        Some(Place::Spread) | None => Policy::Spread,
    };
    let mut views = member.views(core);
    if let Some(hosts) = &placement.hosts {
        let wanted = member.find_all(hosts, message)?;
        views.retain(|view| wanted.contains(&view.id));
    }
    let shape = Room {
        memory_bytes: core.admission.clone_bytes(parent.identity.memory_bytes),
        vcpus: parent.identity.cpus,
    };
    let shares = shares(&views, count, shape, policy, member.id());
    let placed: u32 = shares.iter().map(|(_, share)| share).sum();
    if placed < count && all_or_nothing {
        return Err(ErrorBody::new(ErrorCode::NoCapacity, message)
            .cause(format!("{placed} of {count} clones fit on the hosts of the cluster"))
            .remedy("`vmfork cluster ls` shows what hosts have left"));
    }
    let here_takes = shares.iter().find(|(id, _)| *id == member.id()).map_or(0, |(_, n)| *n);
    // What fits nowhere is refused here, with the figures.
    let here = here_takes + (count - placed.min(count));
    let shares: Vec<_> = shares.into_iter().filter(|(id, _)| *id != member.id()).collect();
    if shares.is_empty() {
        return Ok(None);
    }
    let failed = |error: &dyn std::error::Error| {
        ErrorBody::new(ErrorCode::Qemu, message).cause(chain(error))
    };
    let machine_type = host::machine_type(machine).await.map_err(|error| failed(&error))?;
    let taken = member.names_elsewhere().await;
    let hydrate_bytes_per_s = placement.hydrate_bytes_per_s;
    Ok(Some(Away { member, here, shares, machine_type, hydrate_bytes_per_s, taken }))
}

fn shares(
    views: &[HostView],
    count: u32,
    shape: Room,
    policy: Policy,
    near: HostId,
) -> Vec<(HostId, u32)> {
    Plan::new(views, count, shape, policy, Some(near)).next_asks()
}

/// What goes away of a fork.
pub(super) struct Departure<'a> {
    pub(super) parent: &'a Vm,
    pub(super) machine: &'a Machine,
    pub(super) snapshot: &'a Snapshot,
    pub(super) pause_ms: f64,
    pub(super) all_or_nothing: bool,
    pub(super) deadline: Instant,
    pub(super) given_up: &'a CancellationToken,
}

impl Away {
    /// Have the clones started that go elsewhere. → what became of each.
    pub(super) async fn start(&self, what: Departure<'_>, wanted: Vec<Wanted>) -> Vec<CloneResult> {
        let Departure { parent, machine, snapshot, .. } = what;
        let frozen = Frozen {
            machine_type: self.machine_type.clone(),
            inheritance: snapshot.inheritance.clone(),
            fork: snapshot.fork,
            pause_ms: what.pause_ms,
        };
        let mut results = Vec::new();
        let mut kept = Vec::new();
        for Wanted { name, is_kept, vmid, ticket } in wanted {
            match is_kept {
                true => kept.push(CloneOrder { name, vmid, ticket }),
                false => {
                    let error = super::name_taken(super::start_message(&name), &name);
                    results.push(brood::failed(vmid, name, error));
                }
            }
        }
        let mut kept = kept.into_iter();
        let shares = self.shares.iter().map(|(host, share)| Share {
            host: *host,
            clones: kept.by_ref().take(*share as usize).collect(),
        });
        let mut shares: Vec<Share> = shares.collect();
        shares.retain(|share| !share.clones.is_empty());
        let sending = Sending {
            facts: Facts::of(&parent.identity, machine, parent.agent(), frozen),
            parent: &parent.identity,
            snapshot,
            all_or_nothing: what.all_or_nothing,
            deadline: what.deadline,
            hydrate_bytes_per_s: self.hydrate_bytes_per_s,
        };
        let names: Vec<(u32, String)> = shares
            .iter()
            .flat_map(|share| share.clones.iter().map(|clone| (clone.vmid, clone.name.clone())))
            .collect();
        tokio::select! {
            started = send(&self.member, sending, shares) => results.extend(started),
            // The hosts notice that nobody waits.
            () = what.given_up.cancelled() => {
                let error = super::was_given_up(&super::message(parent));
                let given_up = names.into_iter().map(|(vmid, name)| {
                    brood::failed(vmid, name, error.clone())
                });
                results.extend(given_up);
            }
        }
        results
    }

    /// End those that were started.
    pub(super) async fn end(&self, results: &[CloneResult]) {
        let started = results.iter().filter(|result| result.error.is_none());
        let ids = started.filter_map(|result| result.id.as_deref());
        join_all(ids.map(|id| self.member.kill(id))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_is_spread_over_all_that_take_clones() {
        let shape = Room { memory_bytes: 100, vcpus: 1 };
        let id = |id| HostId::new(id).expect("not 0");
        let view = |number, closed| HostView {
            id: id(number),
            name: format!("h{number}"),
            closed,
            free: Room { memory_bytes: 10_000, vcpus: 64 },
            has_family: false,
        };
        let views = [view(1, None), view(2, None), view(3, Some("it drains"))];
        let spread = shares(&views, 8, shape, Policy::Spread, id(1));
        assert_eq!(spread, [(id(1), 4), (id(2), 4)]);
        assert_eq!(shares(&views, 8, shape, Policy::Pack, id(2)), [(id(2), 8)]);
    }
}
