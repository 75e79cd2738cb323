//! Clones of a frozen VM of this host, on others: what each host is sent, and its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, VmState};
use vmfork_cluster::HostId;

use super::descriptor::{CloneOrder, Descriptor, Order, Parent};
use super::receive::GRACE;
use crate::arrivals::Arrival;
use crate::client::WORD_WAIT;
use crate::disks::spec_elsewhere;
use crate::error::{RemoteForkError, SendError, of_host};
use crate::hosts::Hosts;
use crate::images::{Images, Lender, Sending as Lent};
use crate::locate::Locate;
use vmfork_fork::Snapshot;
use vmfork_fork::facts::Facts;
use vmfork_host::error::chain;
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::{Metrics, Stage};
use vmfork_host::vm::{Identity, Job, WorkingSet};

/// How long finding what the VM had written may take: 1 ms per GiB where nothing is in the way.
const SEAL_TIMEOUT: Duration = Duration::from_secs(60);

/// On at most this many hosts of a fork, clones are watched ([`crate::touch_feedback`]).
const HOSTS_WATCHED: usize = 8;

/// The parts of a member that sending clones takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sender<'a> {
    pub hosts: &'a Arc<Hosts>,
    /// From which the VM's image is lent.
    pub images: &'a Arc<Images>,
    /// Learns where the clones are.
    pub locate: &'a Locate,
}

/// What one host is to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    pub host: HostId,
    /// By which the order is given up.
    pub number: u64,
    /// Places that are set aside there for it.
    pub lease: Option<u64>,
    pub clones: Vec<CloneOrder>,
}

/// The part of an order that all hosts receive.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    pub metrics: &'a Metrics,
    pub facts: Facts,
    pub parent: &'a Identity,
    pub snapshot: &'a Snapshot,
    pub working_set: &'a Arc<WorkingSet>,
    pub all_or_nothing: bool,
    pub deadline: Instant,
    pub hydrate_bytes_per_s: u64,
    pub given_up: &'a CancellationToken,
    /// The parent's ticket behind it.
    pub ticket: Option<u64>,
    pub books: u64,
    /// The engine's job that holds the clones.
    pub job: Option<Job>,
    pub lifetime: &'a Lifetime,
}

/// Have other hosts start clones, all at once. → what became of each. `answered` is called when a
/// host has answered, or was given up, also while others have not.
/// A host whose answer is lost, or arrives too late, is ordered to leave nothing.
pub(crate) async fn send(
    sender: Sender<'_>,
    what: Sending<'_>,
    shares: Vec<Share>,
    answered: &(dyn Fn(HostId) + Sync),
) -> Vec<CloneResult> {
    let began = Instant::now();
    let (descriptor, _lent) = match prepare(sender.images, &what) {
        Ok(prepared) => prepared,
        Err(error) => {
            let message = format!("fork `{}` onto other hosts", what.parent.name);
            let error = RemoteForkError::from(error).to_body(message);
            let clones = shares.into_iter().flat_map(|share| share.clones);
            return clones.map(|clone| failed(clone, error.clone(), None)).collect();
        }
    };
    what.metrics.observe_stage(Stage::Describe, began.elapsed());
    let sent = shares.into_iter().enumerate().map(|(at, share)| {
        let descriptor = Descriptor {
            order: Order {
                is_watched: at < HOSTS_WATCHED,
                number: share.number,
                lease: share.lease,
                clones: share.clones.clone(),
                ..descriptor.order.clone()
            },
            images: descriptor.images.clone(),
            disks: descriptor.disks.clone(),
            state: descriptor.state.clone(),
        };
        let (began, metrics, host) = (Instant::now(), what.metrics, share.host);
        let one = one(sender, share, descriptor, (what.deadline, what.given_up));
        one.inspect(move |_| {
            metrics.observe_stage(Stage::Away, began.elapsed());
            answered(host);
        })
    });
    join_all(sent).await.into_iter().flatten().collect()
}

/// All but whose clones each host starts; and what is held until it is sent.
fn prepare(own: &Arc<Images>, what: &Sending<'_>) -> Result<(Descriptor, Lent), SendError> {
    let engine = &what.snapshot.engine;
    let left = what.deadline.saturating_duration_since(Instant::now());
    if !tokio::task::block_in_place(|| engine.wait_sealed(left.min(SEAL_TIMEOUT))) {
        return Err(SendError::NotSealed);
    }
    let (arrival, working_set) =
        (what.snapshot.provenance.get::<Arrival>(), Arc::clone(what.working_set));
    let ahead = working_set.runs();
    let of = Lender::new(arrival, working_set);
    let contents = &what.snapshot.disks;
    // The tables of disks are derived in the background.
    let (images, disks, lent) =
        tokio::task::block_in_place(|| own.lend(Instant::now(), engine, contents, of))?;
    let state = vmfork_fork::state::read(&what.snapshot.state)?;
    let parent = what.parent;
    let order = Order {
        number: 0,
        ticket: what.ticket,
        lease: None,
        job: what.job.clone(),
        books: what.books,
        lifetime: what.lifetime.told(Instant::now()),
        facts: Facts {
            inherited: what.facts.inherited.with_disks(contents.iter().map(spec_elsewhere)),
            ..what.facts.clone()
        },
        parent: Parent {
            id: parent.id.clone(),
            name: parent.name.clone(),
            family: parent.family.clone(),
            user: parent.user,
            ancestors: parent.ancestors.to_vec(),
            snapshot: parent.snapshot.clone(),
        },
        clones: Vec::new(),
        all_or_nothing: what.all_or_nothing,
        timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        hydrate_bytes_per_s: what.hydrate_bytes_per_s,
        working_set: ahead.iter().map(|run| (run.start().0, run.len())).collect(),
        is_watched: false,
    };
    Ok((Descriptor { order, images, disks, state }, lent))
}

async fn one(
    sender: Sender<'_>,
    share: Share,
    descriptor: Descriptor,
    (deadline, given_up): (Instant, &CancellationToken),
) -> Vec<CloneResult> {
    let Share { host, number, clones, .. } = share;
    let message = format!("start clones of `{}` there", descriptor.order.parent.name);
    let peer = match sender.hosts.peer_of(host).map_err(|error| error.to_body(message.as_str())) {
        Ok(peer) => peer,
        Err(error) => {
            return clones.into_iter().map(|it| failed(it, error.clone(), None)).collect();
        }
    };
    let wait = deadline.saturating_duration_since(Instant::now()) + GRACE;
    let outcome = async {
        let body = descriptor.encode().map_err(SendError::Encode)?;
        let answer = tokio::select! {
            answer = peer.post(CLONES, "application/octet-stream", body.into(), wait) => answer,
            () = given_up.cancelled() => {
                sender.hosts.give_up(host, number);
                return Err(RemoteForkError::GivenUp);
            }
        };
        let results = match answer {
            Ok(answer) => told(&answer, &clones).map_err(RemoteForkError::from),
            Err(error) => Err(error.into()),
        };
        results.inspect_err(|_| {
            // Whatever it said: a part may have been started.
            sender.hosts.give_up(host, number);
        })
    };
    match outcome.await {
        Ok(results) => results
            .into_iter()
            .map(|result| {
                if let Some(id) = &result.id {
                    sender.locate.saw(id, host);
                }
                let error = result.error.map(|error| of_host(&peer.name, error));
                CloneResult { host: Some(peer.name.clone()), error, ..result }
            })
            .collect(),
        Err(error) => {
            let (error, host) = (error.to_body(message), Some(peer.name));
            clones.into_iter().map(|it| failed(it, error.clone(), host.clone())).collect()
        }
    }
}

/// What a host answers of these clones.
fn told(answer: &[u8], clones: &[CloneOrder]) -> Result<Vec<CloneResult>, SendError> {
    let results: Vec<CloneResult> = serde_json::from_slice(answer).map_err(SendError::Answer)?;
    let are_they = are_of(&results, clones);
    are_they.then_some(results).ok_or(SendError::OtherClones)
}

/// Whether the results name each of these clones once, and no other.
fn are_of(results: &[CloneResult], clones: &[CloneOrder]) -> bool {
    let mut told: Vec<u32> = results.iter().map(|result| result.vmid).collect();
    let mut asked: Vec<u32> = clones.iter().map(|clone| clone.vmid).collect();
    told.sort_unstable();
    asked.sort_unstable();
    told == asked
}

/// Where clones are started.
pub(crate) const CLONES: &str = "/cluster/v1/clones";
/// Where an order is given up.
pub(crate) const GIVE_UP: &str = "/cluster/v1/clones/give-up";
/// How long the order to give up is repeated, and how often, until the host confirms it.
const GIVE_UP_FOR: Duration = Duration::from_secs(600);
const GIVE_UP_EVERY: Duration = Duration::from_secs(2);

impl Hosts {
    /// Have a host end what an order started there, and start no more of it: as soon as it can be
    /// reached.
    pub(crate) fn give_up(self: &Arc<Self>, host: HostId, number: u64) -> JoinHandle<()> {
        let hosts = Arc::clone(self);
        tokio::spawn(async move {
            let until = Instant::now() + GIVE_UP_FOR;
            while Instant::now() < until {
                let Ok(peer) = hosts.peer_of(host) else { return };
                match peer.ask::<u64, ()>(GIVE_UP, &number, WORD_WAIT).await {
                    Ok(()) => return,
                    Err(error) => tracing::debug!(host = peer.name, number, "{}", chain(&error)),
                }
                tokio::time::sleep(GIVE_UP_EVERY).await;
            }
            tracing::warn!(%host, number, "not told that an order was given up: its VMs may go on");
        })
    }
}

fn failed(clone: CloneOrder, error: ErrorBody, host: Option<String>) -> CloneResult {
    CloneResult {
        id: None,
        vmid: clone.vmid,
        name: clone.name,
        state: VmState::Failed,
        running_ms: None,
        ready_ms: None,
        pooled: false,
        host,
        error: Some(error),
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::ErrorCode;

    use super::*;

    #[test]
    fn a_host_tells_of_the_clones_that_it_was_to_start() {
        let order = |vmid| CloneOrder { name: format!("web.{vmid}"), vmid, ticket: None };
        let clones = [order(3), order(1)];
        let error = ErrorBody::new(ErrorCode::Host, "m");
        let told = |vmids: &[u32]| {
            let results = vmids.iter().map(|vmid| failed(order(*vmid), error.clone(), None));
            are_of(&results.collect::<Vec<_>>(), &clones)
        };
        assert!(told(&[1, 3]));
        for others in [&[1][..], &[1, 2], &[1, 3, 3], &[]] {
            assert!(!told(others), "{others:?}");
        }
    }
}
