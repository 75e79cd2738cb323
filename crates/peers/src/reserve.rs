//! Places for a ticket's clones on this and other hosts.
//!
//! ```text
//!   what the user's quota leaves ─► nodes that an engine holds ─► guest images ─► rounds of asks
//! ```
//!
//! Each host grants what it has ([`crate::tickets::Leases`]). What one refuses is asked of others,
//! until all is granted or none is left to ask.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use vmfork_api::ErrorBody;
use vmfork_cluster::allocate::{Ask, Held, HostView, Plan, Policy};
use vmfork_cluster::{HostId, Room};
use vmfork_fork::{Allotted, Reserved};
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::vm::{Identity, Vm};

use crate::client::WORD_WAIT;
use crate::error::{CallError, RemoteForkError, TicketError};
use crate::hosts::Hosts;
use crate::member::Member;
use crate::tickets::{LEASES, PlacesAsk, RELEASE};
use crate::transfer_estimate::TransferEstimate;

/// How long the guest image may take to come to hosts that lack it, before they are asked for
/// places.
const IMAGE_WAIT: Duration = Duration::from_secs(120);

/// For whom places are asked.
struct Asker<'a> {
    core: &'a Core,
    member: &'a Arc<Member>,
    /// The parent's.
    identity: &'a Identity,
    message: &'a str,
    /// What a clone takes.
    shape: Room,
    /// What has to come to each host.
    coming: TransferEstimate,
}

/// Places for `vms` clones of a VM on this and other hosts, laid out by `policy`: as many as there
/// are.
pub(crate) async fn reserve(
    core: &Core,
    member: &Arc<Member>,
    parent: &Vm,
    (vms, policy): (u32, Policy),
    message: &str,
) -> Allotted {
    let identity = &parent.identity;
    let shape = Room {
        memory_bytes: core.admission.clone_bytes(identity.spec().memory_bytes),
        vcpus: identity.spec().cpus,
    };
    let mut views = member.hosts.views(core);
    let coming = match parent.running_machine() {
        Ok(machine) => member.estimates.coming(&core.admission, identity, &machine, &mut views),
        Err(_) => TransferEstimate::default(),
    };
    let asker = Asker { core, member, identity, message, shape, coming };
    let refused = |error| Allotted { refused: Some(error), ..Allotted::default() };
    let (vms, over) = match asker.within_quota(vms).await {
        Ok((0, over)) => return Allotted { refused: over, ..Allotted::default() },
        Ok(within) => within,
        Err(error) => return refused(error),
    };
    let ask = Ask { count: vms, shape, family: identity.family.clone(), policy };
    let hold = match member.jobs.hold(&ask, &views).await {
        Ok(hold) => hold,
        Err(error) => return refused(RemoteForkError::from(error).to_body(message)),
    };
    let held = hold.as_ref().map(|hold| Arc::clone(&hold.held));
    let plan = asker.plan(&mut views, held.as_deref(), (vms, policy)).await;
    let mut allotted = Allotted { hold, refused: over, ..Allotted::default() };
    asker.ask_all(plan, &mut allotted).await;
    let short = held.map(|held| held.short.clone());
    if let Some(short) = short.filter(|short| !short.is_empty()) {
        let error = TicketError::Short { short };
        allotted.refused.get_or_insert_with(|| error.to_body(message));
    }
    allotted
}

impl Asker<'_> {
    /// How many of `vms` the user's quota leaves, and why not all.
    ///
    /// # Errors
    /// It can't be told now.
    async fn within_quota(&self, vms: u32) -> Result<(u32, Option<ErrorBody>), ErrorBody> {
        let left = self.core.quota_left(self.identity.user, (vms, self.shape), self.message);
        let left = left.await.map_err(|error| error.to_body(self.message))?;
        Ok(match left {
            None => (vms, None),
            Some(allowed) => (allowed.count, Some(allowed.few(vms).to_body(self.message))),
        })
    }

    /// How many go where. Places on hosts that can't have the guest image would be of no use, so
    /// they get it first.
    async fn plan(
        &self,
        views: &mut [HostView],
        held: Option<&Held>,
        (vms, policy): (u32, Policy),
    ) -> Plan {
        let own = self.member.hosts.id();
        let new = |views: &[_]| Plan::within(views, held, vms, self.shape, policy, Some(own));
        let (until, given_up) = (Instant::now() + IMAGE_WAIT, CancellationToken::new());
        let mut shares = new(views).next_asks();
        let images = &self.member.guest_images;
        while let Ok(true) = images.give(self.identity, &shares, views, (until, &given_up)).await {
            shares = new(views).next_asks();
        }
        new(views)
    }

    /// Ask until all is granted, or none is left to ask.
    async fn ask_all(&self, mut plan: Plan, allotted: &mut Allotted) {
        loop {
            let asks = plan.next_asks();
            if asks.is_empty() {
                return;
            }
            let own = self.member.hosts.id();
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                asks.into_iter().partition(|(host, _)| *host == own);
            let elsewhere = elsewhere.into_iter().map(|(host, count)| {
                let ask = self.ask_of(host, count);
                async move { (host, lease(&self.member.hosts, host, ask).await) }
            });
            for (_, count) in here {
                let ask = self.identity.ask(self.message, count, true);
                match self.core.admit(ask, false).await {
                    Ok(grant) => {
                        plan.on_granted(own, u32::try_from(grant.clones.len()).unwrap_or(0));
                        allotted.add_here(grant);
                    }
                    Err(error) => {
                        plan.on_refused(own);
                        allotted.refused = Some(error.to_body(self.message));
                    }
                }
            }
            for (host, answer) in join_all(elsewhere).await {
                match answer {
                    Ok(reserved) => {
                        plan.on_granted(host, reserved.count);
                        allotted.away.push(reserved);
                    }
                    Err(error) => {
                        plan.on_refused(host);
                        allotted.refused = Some(error.to_body(self.message));
                    }
                }
            }
        }
    }

    fn ask_of(&self, host: HostId, count: u32) -> PlacesAsk {
        let identity = self.identity;
        PlacesAsk {
            lease: self.member.next_order(),
            parent: identity.name.clone(),
            family: identity.family.clone(),
            user: identity.user,
            memory_bytes: identity.spec().memory_bytes,
            cpus: identity.spec().cpus,
            count,
            coming_bytes: self.coming.to(host),
        }
    }
}

/// Ask one host for places.
async fn lease(hosts: &Arc<Hosts>, host: HostId, ask: PlacesAsk) -> Result<Reserved, CallError> {
    let (lease, asked) = (ask.lease, ask.count);
    // From here on, so that it is given back if its answer is lost.
    let weak = Arc::downgrade(hosts);
    let mut reserved = Reserved::new(host, lease, move |host, lease| {
        if let Some(hosts) = weak.upgrade() {
            give_back(hosts, host, lease);
        }
    });
    let peer = hosts
        .peer_of(host)
        .map_err(|error| error.to_body("ask for places"))
        .map_err(|source| CallError::Refused { host: host.to_string(), source })?;
    let granted: u32 = peer.ask(LEASES, &ask, WORD_WAIT).await?;
    reserved.count = granted.min(asked);
    Ok(reserved)
}

/// Places there are not needed.
fn give_back(hosts: Arc<Hosts>, host: HostId, lease: u64) {
    tokio::spawn(async move {
        let Ok(peer) = hosts.peer_of(host) else { return };
        if let Err(error) = peer.ask::<u64, ()>(RELEASE, &lease, WORD_WAIT).await {
            tracing::debug!(host = peer.name, "it keeps them a while: {}", chain(&error));
        }
    });
}
