//! Clones of a VM of this host, on others: which host gets how many, and what a frozen VM sends them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use vmfork_api::{CloneResult, ErrorBody, ErrorCode, VmState};
use vmfork_cluster::HostId;

use super::descriptor::{CloneOrder, Descriptor, Order, Parent};
use super::member::Member;
use super::receive::GRACE;
use crate::facts::Facts;
use crate::fork::{self, Snapshot};
use crate::hub::chain;
use crate::vm::Identity;

/// How long finding what the VM had written may take: 1 ms per GiB where nothing is in the way.
const SEAL_TIMEOUT: Duration = Duration::from_secs(60);

/// What one host is to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) host: HostId,
    pub(crate) clones: Vec<CloneOrder>,
}

/// What all hosts are told.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    pub(crate) facts: Facts,
    pub(crate) parent: &'a Identity,
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) all_or_nothing: bool,
    pub(crate) deadline: Instant,
    pub(crate) hydrate_bytes_per_s: u64,
}

/// Have other hosts start clones, all at once. → what became of each.
pub(crate) async fn send(
    member: &Arc<Member>,
    what: Sending<'_>,
    shares: Vec<Share>,
) -> Vec<CloneResult> {
    let descriptor = match prepare(member, &what) {
        Ok(descriptor) => descriptor,
        Err(error) => {
            let clones = shares.into_iter().flat_map(|share| share.clones);
            return clones.map(|clone| failed(clone, error.clone(), None)).collect();
        }
    };
    let sent = shares.into_iter().map(|share| {
        let descriptor = Descriptor {
            order: Order { clones: share.clones.clone(), ..descriptor.order.clone() },
            images: descriptor.images.clone(),
            state: descriptor.state.clone(),
        };
        one(member, share, descriptor, what.deadline)
    });
    join_all(sent).await.into_iter().flatten().collect()
}

/// All but whose clones each host starts.
fn prepare(member: &Member, what: &Sending<'_>) -> Result<Descriptor, ErrorBody> {
    let message = format!("fork `{}` onto other hosts", what.parent.name);
    let fail = |cause: String| {
        ErrorBody::new(ErrorCode::Host, message.clone())
            .cause(cause)
            .remedy("the daemon's log has more")
    };
    let engine = &what.snapshot.engine;
    let left = what.deadline.saturating_duration_since(Instant::now());
    if !tokio::task::block_in_place(|| engine.wait_sealed(left.min(SEAL_TIMEOUT))) {
        return Err(fail("what it had written is not known in time".to_owned()));
    }
    let images = member.images.lend(Instant::now(), engine).map_err(|error| fail(chain(&error)))?;
    let state = fork::state::read(&what.snapshot.state).map_err(|error| fail(chain(&error)))?;
    let parent = what.parent;
    let order = Order {
        facts: what.facts.clone(),
        parent: Parent {
            id: parent.id.clone(),
            name: parent.name.clone(),
            family: parent.family.clone(),
            ancestors: parent.ancestors.to_vec(),
            snapshot: parent.snapshot.clone(),
        },
        clones: Vec::new(),
        all_or_nothing: what.all_or_nothing,
        timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        hydrate_bytes_per_s: what.hydrate_bytes_per_s,
    };
    Ok(Descriptor { order, images, state })
}

async fn one(
    member: &Member,
    share: Share,
    descriptor: Descriptor,
    deadline: Instant,
) -> Vec<CloneResult> {
    let Share { host, clones } = share;
    let message = format!("start clones of `{}` there", descriptor.order.parent.name);
    let peer = match member.peer_of(host, &message) {
        Ok(peer) => peer,
        Err(error) => {
            return clones.into_iter().map(|it| failed(it, error.clone(), None)).collect();
        }
    };
    let wait = deadline.saturating_duration_since(Instant::now()) + GRACE;
    let outcome = async {
        let body = descriptor.encode().map_err(|error| {
            ErrorBody::new(ErrorCode::Internal, message.clone()).cause(chain(&error))
        })?;
        let answer = peer.post(CLONES, "application/octet-stream", body.into(), wait).await;
        let answer = answer.map_err(|error| error.to_body(message.clone()))?;
        serde_json::from_slice::<Vec<CloneResult>>(&answer)
            .map_err(|error| ErrorBody::new(ErrorCode::Host, message.clone()).cause(error))
    };
    match outcome.await {
        Ok(results) => results
            .into_iter()
            .map(|result| {
                if let Some(id) = &result.id {
                    member.saw(id, host);
                    member.saw(&result.name, host);
                }
                CloneResult { host: Some(peer.name.clone()), ..result }
            })
            .collect(),
        Err(error) => {
            let host = Some(peer.name);
            clones.into_iter().map(|it| failed(it, error.clone(), host.clone())).collect()
        }
    }
}

/// Where clones are started.
pub(super) const CLONES: &str = "/cluster/v1/clones";

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
