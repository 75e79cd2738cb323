//! What goes to the hosts that are to start clones.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::body::Bytes;
use axum::routing::post;
use axum::{Json, Router};
use tokio::net::TcpListener;
use tokio::sync::{Barrier, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, VmState};
use vmfork_cluster::{Folder, HostId, Roster, Tls};
use vmfork_engine::{Engine, EngineOptions, HostImage};
use vmfork_image::{Origin, PageRange, PageSource};
use vmfork_qemu::Drives;

use super::super::error::CallError;
use super::super::member::Member;
use super::super::remote_fork::send::{CLONES, Sender, Sending, Share, send};
use super::super::remote_fork::{CloneOrder, Descriptor};
use super::super::server::{self, Bounds, Port, Routes};
use super::{One, cluster};
use vmfork_fork::facts::Facts;
use vmfork_fork::{OnRun, Snapshot};
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::Metrics;
use vmfork_host::testing::SOON;
use vmfork_host::vm::{Identity, Provenance, WorkingSet, test_identity};

/// In place of a host's daemon: takes descriptors, and answers none before as many have come as
/// `all` waits for.
struct StandIn {
    got: Arc<Mutex<Vec<Descriptor>>>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl StandIn {
    async fn of(host: &One, all: Arc<Barrier>) -> Self {
        host.stop().await;
        let opened = Folder::open(&host.cluster().folder).expect("readable").expect("a member");
        let of = opened.cluster;
        let tls = Tls::new(of.identity, &of.authority, Roster::new(of.members)).expect("certified");
        let listener = TcpListener::bind(&host.address).await.expect("its port is free");
        let got = Arc::new(Mutex::new(Vec::new()));
        let take = {
            let got = Arc::clone(&got);
            async move |body: Bytes| {
                let descriptor = Descriptor::decode(&body).expect("whole");
                let clones = descriptor.order.clones.clone();
                got.lock().expect("not poisoned").push(descriptor);
                all.wait().await;
                Json(clones.into_iter().map(started).collect::<Vec<_>>())
            }
        };
        let routes =
            Routes { members: Router::new().route(CLONES, post(take)), newcomers: Router::new() };
        let port =
            Port { tls: Arc::new(tls), routes, callers: Arc::default(), bounds: Bounds::default() };
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(server::serve(listener, port, stopped));
        Self { got, stop, serving }
    }

    /// What it got.
    async fn end(self) -> Vec<Descriptor> {
        self.stop.send_replace(true);
        timeout(SOON, self.serving).await.expect("in time").expect("no panic");
        std::mem::take(&mut *self.got.lock().expect("not poisoned"))
    }
}

fn started(clone: CloneOrder) -> CloneResult {
    CloneResult {
        id: Some(format!("id-{}", clone.name)),
        vmid: clone.vmid,
        name: clone.name,
        state: VmState::Running,
        running_ms: None,
        ready_ms: None,
        pooled: false,
        host: None,
        error: None,
    }
}

/// What an order is made of.
struct Parts {
    metrics: Metrics,
    parent: Identity,
    snapshot: Snapshot,
    working_set: Arc<WorkingSet>,
    given_up: CancellationToken,
    lifetime: Lifetime,
}

impl Parts {
    fn of(host: &One) -> Self {
        Self {
            metrics: Metrics::new(),
            parent: test_identity("web", None),
            snapshot: snapshot(host),
            working_set: Arc::default(),
            given_up: CancellationToken::new(),
            lifetime: Lifetime::default(),
        }
    }

    fn sending(&self) -> Sending<'_> {
        let Self { metrics, parent, snapshot, working_set, given_up, lifetime } = self;
        Sending {
            metrics,
            facts: Facts::of_a_test(2 << 20),
            parent,
            snapshot,
            working_set,
            all_or_nothing: false,
            deadline: Instant::now() + SOON,
            hydrate_bytes_per_s: 0,
            given_up,
            ticket: None,
            books: 0,
            job: None,
            lifetime,
        }
    }
}

/// A source of pages that are never asked for.
#[derive(Debug)]
struct NoPages;

impl PageSource for NoPages {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, _: PageRange, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

fn snapshot(host: &One) -> Snapshot {
    let image = HostImage::stored(host.host.core.next_image(), 512, [], None, Arc::new(NoPages));
    let options = EngineOptions::default();
    let engine = Engine::serve(image.expect("opened"), &options, Arc::new(|_| ()));
    Snapshot {
        state: vmfork_fork::state::write(b"devices").expect("memory"),
        lead: None,
        engine: Arc::new(engine.expect("an engine")),
        drives: Drives::default(),
        disks: Vec::new(),
        inheritance: None,
        fork: 1,
        lease: None,
        provenance: Provenance::default(),
        on_run: OnRun::default(),
        is_watched: false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_descriptor_of_another_version_is_refused_with_what_tells_the_versions() {
    let hosts = cluster(2).await;
    let member = hosts[0].cluster().member().expect("a member");
    let peer = member.hosts.peer_of(hosts[1].id().expect("a member")).expect("a peer");
    let former = b"VFDESC02\0\0\0\0".as_slice();
    let answer = peer.post(CLONES, "application/octet-stream", former.into(), SOON).await;
    let CallError::Refused { source: refused, .. } = answer.expect_err("of another version") else {
        panic!("it does not answer");
    };
    assert!(refused.cause.expect("a cause").contains("of this version"));
    assert!(refused.remedy.expect("a remedy").contains("`vmfork version`"));
    for host in &hosts {
        host.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hosts_answer_is_told_while_another_has_not_answered() {
    let hosts = cluster(3).await;
    let member = hosts[0].cluster().member().expect("a member");
    let ids: Vec<HostId> = hosts[1..].iter().filter_map(One::id).collect();
    let slow = Arc::new(Barrier::new(2));
    let others = [
        StandIn::of(&hosts[1], Arc::new(Barrier::new(1))).await,
        StandIn::of(&hosts[2], Arc::clone(&slow)).await,
    ];
    let shares = ids.iter().zip(1..).map(|(host, vmid)| Share {
        host: *host,
        number: member.next_order(),
        lease: None,
        clones: vec![CloneOrder { name: format!("web.{vmid}"), vmid, ticket: None }],
    });
    let Member { hosts: known, images, locate, .. } = &*member;
    let sender = Sender { hosts: known, images, locate };
    let told = Mutex::new(Vec::new());
    let answered = |host| {
        told.lock().expect("not poisoned").push(host);
        // The slow one answers only now.
        let slow = Arc::clone(&slow);
        tokio::spawn(async move { slow.wait().await });
    };
    let parts = Parts::of(&hosts[0]);
    let results = timeout(SOON, send(sender, parts.sending(), shares.collect(), &answered)).await;
    let results = results.expect("the first answer is told at once");
    assert!(results.iter().all(|result| result.error.is_none()), "{results:?}");
    assert_eq!(told.into_inner().expect("not poisoned"), ids);
    for other in others {
        other.end().await;
    }
    hosts[0].stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_descriptor_goes_to_each_host_once_and_to_none_after_anothers_answer() {
    let hosts = cluster(3).await;
    let member = hosts[0].cluster().member().expect("a member");
    let ids: Vec<HostId> = hosts[1..].iter().filter_map(One::id).collect();
    let all = Arc::new(Barrier::new(2));
    let mut others = Vec::new();
    for host in &hosts[1..] {
        others.push(StandIn::of(host, Arc::clone(&all)).await);
    }
    let clone = |vmid| CloneOrder { name: format!("web.{vmid}"), vmid, ticket: None };
    let clones = [vec![clone(1), clone(2), clone(3)], vec![clone(4)]];
    let shares = ids.iter().zip(&clones).map(|(host, clones)| Share {
        host: *host,
        number: member.next_order(),
        lease: None,
        clones: clones.clone(),
    });
    let parts = Parts::of(&hosts[0]);
    let Member { hosts: known, images, locate, .. } = &*member;
    let sender = Sender { hosts: known, images, locate };
    let results = timeout(SOON, send(sender, parts.sending(), shares.collect(), &|_| ())).await;
    let results = results.expect("no host waits until another has answered");
    let told: Vec<_> = results.iter().map(|it| (it.vmid, it.host.as_deref(), &it.error)).collect();
    let (h1, h2) = (Some("h1"), Some("h2"));
    assert_eq!(told, [(1, h1, &None), (2, h1, &None), (3, h1, &None), (4, h2, &None)]);
    for (other, clones) in others.into_iter().zip(clones) {
        let got = other.end().await;
        assert_eq!(got.len(), 1, "{got:?}");
        assert_eq!((&got[0].order.clones, &*got[0].state), (&clones, b"devices".as_slice()));
    }
    hosts[0].stop().await;
}
