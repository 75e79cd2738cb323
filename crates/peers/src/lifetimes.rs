//! A change of a VM's bound in time, on its way to the hosts that may have clones that inherit it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use vmfork_cluster::{HostId, Membership};

use super::client::WORD_WAIT;
use super::context::Context;
use super::hosts::{Hosts, There};
use super::member::Member;
use super::server::Arrived;
use vmfork_fork::Departure;
use vmfork_host::error::chain;
use vmfork_host::lifetime::{Lifetimes, Setting, Told};
use vmfork_rest::http::ApiError;

/// Where a host hears of bounds.
pub(super) const LIFETIMES: &str = "/cluster/v1/lifetimes";
/// How long a change is repeated, and how often, until each host confirms it.
const TELL_FOR: Duration = Duration::from_secs(600);
const TELL_EVERY: Duration = Duration::from_secs(2);

/// Hear of a bound. It concerns the VMs here that descend from its VM, if there are any.
pub(super) async fn hear(
    Arrived(arrived): Arrived,
    State(context): State<Context>,
    Json(told): Json<Told>,
) -> Result<Json<()>, ApiError> {
    let (_, core) =
        context.parts().map_err(|error| error.to_body("hear of a VM's time to live"))?;
    core.lifetimes.hear(told.heard(arrived));
    Ok(Json(()))
}

/// Tell all other hosts of a bound, in the background. A host that is silent for longer than this
/// is repeated ends its clones by the bound that it knows.
pub fn tell_lifetime(member: &Member, lifetimes: &Arc<Lifetimes>, setting: &Setting) {
    let There { alive, suspect, gone } = member.hosts.there();
    let hosts = || Arc::clone(&member.hosts);
    for entry in alive.into_iter().chain(suspect).chain(gone) {
        tokio::spawn(tell(hosts(), Arc::clone(lifetimes), entry.id, setting.clone()));
    }
}

/// Tell a host that has answered a fork's order if the bound of the parent has changed since the
/// fork took it. The news may have come to that host before the order did.
pub(super) fn tell_if_changed(hosts: &Arc<Hosts>, fork: &Departure<'_>, host: HostId) {
    let newest = fork.bounds.bound();
    if let Some(newest) = newest.filter(|it| fork.lifetime.inherited.as_ref() != Some(it)) {
        let (hosts, known) = (Arc::clone(hosts), Arc::clone(&fork.core.lifetimes));
        tokio::spawn(tell(hosts, known, host, newest));
    }
}

/// It keeps of the membership only who is a member: all else ends with it.
async fn tell(hosts: Arc<Hosts>, known: Arc<Lifetimes>, host: HostId, setting: Setting) {
    let until = Instant::now() + TELL_FOR;
    while Instant::now() < until {
        if hosts.roster.read(Membership::has_left) {
            return;
        }
        let Ok(peer) = hosts.peer_of(host) else { return };
        // What is left is less with each try.
        let told = setting.told(Instant::now());
        match peer.ask::<Told, ()>(LIFETIMES, &told, WORD_WAIT).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(host = peer.name, vm = setting.of, "{}", chain(&error)),
        }
        tokio::time::sleep(TELL_EVERY).await;
        if known.is_outdated(&setting) {
            return;
        }
    }
    tracing::warn!(%host, vm = setting.of, "not told of a change of its time to live");
}
