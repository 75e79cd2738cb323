//! Hosts of one cluster, all in this process, on addresses of the loopback.

mod descriptors;
mod leave;
mod stored;

use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tempfile::TempDir;
use tokio::time::sleep;
use vmfork_api::{ClusterHostRequest, ClusterInitRequest, ClusterJoinRequest, ClusterTokenRequest};
use vmfork_cluster::allocate::Policy;
use vmfork_cluster::{Folder, HostId};

use super::reserve::reserve;
use super::{Cluster, Operations, Settings, TicketPlace};
use vmfork_control::ClusterControl;
use vmfork_fork::tickets::{Tickets, allot};
use vmfork_fork::{Allotted, Forker, Remote};
use vmfork_host::admission::BootAsk;
use vmfork_host::config::Config;
use vmfork_host::core::Keeper;
use vmfork_host::quotas::User;
use vmfork_host::testing::{Host, SOON};

static ADDRESSES: AtomicU16 = AtomicU16::new(1);

/// A host that is in no cluster yet.
struct One {
    host: Host,
    cluster: Arc<Cluster>,
    forker: Arc<Forker>,
    operations: Operations,
    address: String,
    _keys: TempDir,
}

impl One {
    async fn with(place: TicketPlace, set: impl FnOnce(&mut Config)) -> Self {
        let own = ADDRESSES.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        // Tests of other processes have others.
        let process = std::process::id().to_be_bytes()[3];
        let address = format!("127.{}.{}.{}:7072", process | 1, own[0], own[1]);
        let folder = tempfile::tempdir().expect("folder");
        let settings = Settings { ticket_place: place, ..Settings::default() };
        let cluster = Arc::new(Cluster::new(folder.path().join("cluster"), settings));
        let keeper = Arc::clone(&cluster) as Arc<dyn Keeper>;
        let host = Host::kept_by(keeper, cluster.epoch(), set).await;
        let remote = Arc::clone(&cluster) as Arc<dyn Remote>;
        let forker =
            Arc::new(Forker { core: Arc::clone(&host.core), remote, tickets: Arc::new(Tickets) });
        cluster.set_forker(&forker);
        let operations = Operations::new(&cluster);
        Self { host, cluster, forker, operations, address, _keys: folder }
    }

    fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    fn id(&self) -> Option<HostId> {
        self.cluster().member().map(|member| member.hosts.id)
    }

    fn is_in_none(&self) -> bool {
        self.id().is_none() && !Folder::is_used(&self.cluster().folder)
    }

    fn knows(&self, id: HostId) -> bool {
        let member = self.cluster().member().expect("a member");
        member.hosts.roster.read(|book| book.member(id).is_some())
    }

    async fn stop(&self) {
        self.cluster().stop().await;
    }
}

/// A cluster of `count` members.
async fn cluster(count: usize) -> Vec<One> {
    cluster_with(count, TicketPlace::default(), |_| ()).await
}

/// The same with settings of the test's own.
async fn cluster_with(count: usize, place: TicketPlace, set: impl Fn(&mut Config)) -> Vec<One> {
    let mut hosts: Vec<One> = Vec::new();
    for number in 0..count {
        let host = One::with(place, &set).await;
        let (address, name) = (host.address.clone(), Some(format!("h{number}")));
        match hosts.first() {
            None => host.operations.init_cluster(ClusterInitRequest { address, name }).await,
            Some(first) => {
                let token = first.operations.cluster_token(ClusterTokenRequest::default()).await;
                let token = token.expect("a token").token;
                host.operations.join_cluster(ClusterJoinRequest { token, address, name }).await
            }
        }
        .expect("a member");
        hosts.push(host);
    }
    let ids: Vec<HostId> = hosts.iter().filter_map(One::id).collect();
    for host in &hosts {
        until("all know all", || ids.iter().all(|id| host.knows(*id))).await;
    }
    hosts
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < give_up, "not in time: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Stop a host's daemon; its address takes connections, and answers nothing.
async fn silence(host: &One) -> StdListener {
    host.stop().await;
    StdListener::bind(&host.address).expect("its port is free")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_removed_is_told_and_is_in_no_cluster_then() {
    let hosts = cluster(3).await;
    let id = hosts[1].id().expect("a member");
    let connections = hosts[0].cluster().life().expect("a member").callers.end_of(id);
    let h1 = ClusterHostRequest { host: Some("h1".to_owned()) };
    let left = hosts[0].operations.leave_cluster(h1).await.expect("removed");
    assert_eq!(left.hosts.len(), 2);
    until("it is in none", || hosts[1].is_in_none()).await;
    until("its connections have ended", || connections.is_cancelled()).await;
    until("the third one knows", || !hosts[2].knows(id)).await;
    // One that can't be told is removed all the same.
    let _silent = silence(&hosts[2]).await;
    let h2 = ClusterHostRequest { host: Some("h2".to_owned()) };
    let left = hosts[0].operations.leave_cluster(h2).await.expect("removed");
    assert_eq!(left.hosts.len(), 1);
    hosts[0].stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_hosts_do_not_keep_others_from_hearing_who_leaves_and_a_leave_ends_whoever_waits() {
    let mut hosts = cluster(4).await;
    let leaves = hosts.remove(0);
    let own = leaves.id().expect("a member");
    // Of those that are due, lower ids come first.
    hosts.sort_by_key(One::id);
    let hears = hosts.pop().expect("three");
    // It would hear in answer to its own heartbeat.
    hears.cluster().life().expect("a member").beat_no_more();
    let mut silent = Vec::new();
    for host in &hosts {
        silent.push(silence(host).await);
    }
    let began = Instant::now();
    let leave = leaves.operations.leave_cluster(ClusterHostRequest::default());
    assert!(leave.now_or_never().is_none(), "it takes a while; its caller has gone");
    until("it is told", || !hears.knows(own)).await;
    assert!(began.elapsed() < Duration::from_millis(1900), "{:?}", began.elapsed());
    until("it is in none", || leaves.is_in_none()).await;
    hears.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_membership_begins_when_it_can_and_can_be_left_until_then() {
    let host = cluster(1).await.remove(0);
    let id = host.id();
    let again = || {
        let again = Cluster::new(host.cluster().folder.clone(), Settings::default());
        again.set_forker(&host.forker);
        Arc::new(again)
    };
    let in_the_way = silence(&host).await;
    let daemon = again();
    daemon.begin_every(Duration::from_millis(20)).await;
    let error = Operations::new(&daemon).cluster().await.expect_err("the port is taken");
    let cause = error.cause.expect("a cause");
    assert!(cause.starts_with(&format!("listen for other hosts on {}", host.address)), "{cause}");
    assert!(error.remedy.expect("a remedy").contains("cluster leave"));
    drop(in_the_way);
    until("it is a member again", || daemon.member().map(|member| member.hosts.id) == id).await;
    Operations::new(&daemon).cluster().await.expect("a member");
    daemon.stop().await;

    let _in_the_way = silence(&host).await;
    let daemon = again();
    daemon.begin_every(Duration::from_millis(20)).await;
    let left =
        Operations::new(&daemon).leave_cluster(ClusterHostRequest::default()).await.expect("left");
    let note = left.note.expect("a note");
    assert!(note.contains("not told") && note.contains("leave h0"), "{note}");
    assert!(host.is_in_none());
    assert!(Operations::new(&daemon).cluster().await.expect("in none").hosts.is_empty());
}

/// Wait until the first host knows what all have left.
async fn take_clones(hosts: &[One]) {
    let member = hosts[0].cluster().member().expect("a member");
    let have_room = || {
        let views = member.hosts.views(&hosts[0].host.core);
        views.iter().all(|view| view.closed.is_none() && view.free.memory_bytes > 0)
    };
    until("all take clones", have_room).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn places_for_an_order_that_is_not_sent_are_given_back_at_once() {
    let hosts = cluster(2).await;
    let (core, there) = (&hosts[0].host.core, &hosts[1].host.core.admission);
    let member = hosts[0].cluster().member().expect("a member");
    take_clones(&hosts).await;
    let all = there.admissible_bytes();
    let vm = hosts[0].host.vm("web", None);
    let allotted = reserve(core, &member, &vm, (4, Policy::Spread), "fork").await;
    assert_eq!((allotted.away.len(), allotted.away[0].count), (1, 2), "{:?}", allotted.refused);
    assert!(there.admissible_bytes() < all);
    let _for_an_order = allotted.away[0].number;
    drop(allotted);
    until("they are given back", || there.admissible_bytes() == all).await;
    for host in &hosts {
        host.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_tells_what_virtual_cpus_are_left_and_the_next_gets_what_it_has_not() {
    let hosts = cluster_with(2, TicketPlace::default(), |config| config.vcpus_per_core = 1).await;
    let member = hosts[0].cluster().member().expect("a member");
    let there = &hosts[1].host.core.admission;
    let left = |id| {
        let views = member.hosts.views(&hosts[0].host.core);
        views.iter().find(|view| Some(view.id) == id).map(|view| view.free.vcpus)
    };
    until("what it has is known", || left(hosts[1].id()) == Some(4)).await;
    let ask = BootAsk { name: "db", family: "g", user: User::Uid(0), ram_bytes: 64 << 20, cpus: 3 };
    let booted = there.boot(ask).expect("fits");
    until("what it has left is known", || left(hosts[1].id()) == Some(1)).await;
    let vm = hosts[0].host.vm("web", None);
    let core = &hosts[0].host.core;
    let allotted = reserve(core, &member, &vm, (8, Policy::Spread), "fork").await;
    assert_eq!((allotted.places(), allotted.away[0].count, left(hosts[0].id())), (5, 1, Some(0)));
    assert_eq!(there.vcpus(), 4);
    // The asker knows of what has ended there only later, and of its own at once.
    drop(booted);
    until("it has told that", || left(hosts[1].id()) == Some(3)).await;
    let more = reserve(core, &member, &vm, (8, Policy::Pack), "fork").await;
    assert_eq!((more.places(), more.away[0].count), (3, 3), "{:?}", more.refused);
    drop((allotted, more));
    until("they are given back", || there.vcpus() == 0).await;
    assert_eq!(left(hosts[0].id()), Some(4));
    for host in &hosts {
        host.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tickets_clones_are_put_where_its_host_is_set_to() {
    for (place, here, away) in [
        (TicketPlace::Spread, 2, vec![2]),
        (TicketPlace::Pack, 4, vec![]),
        (TicketPlace::Here, 4, vec![]),
    ] {
        let hosts = cluster_with(2, place, |config| config.vcpus_per_core = 2).await;
        take_clones(&hosts).await;
        let (forker, vm) = (&hosts[0].forker, hosts[0].host.vm("web", None));
        let counts = |allotted: &Allotted| {
            let here = allotted.here.as_ref().map_or(0, |grant| grant.clones.len());
            (here, allotted.away.iter().map(|it| it.count).collect::<Vec<_>>())
        };
        let few = allot(forker, &vm, 4, "fork").await;
        assert_eq!(counts(&few), (here, away), "{place:?}");
        // Beyond what the host has: 8 virtual CPUs.
        let rest = allot(forker, &vm, 6, "fork").await;
        let elsewhere = if place == TicketPlace::Pack { vec![2] } else { vec![] };
        match place {
            TicketPlace::Spread => assert_eq!(rest.places(), 6),
            _ => assert_eq!(counts(&rest), (4, elsewhere), "{place:?}"),
        }
        drop((few, rest));
        let this = ClusterHostRequest { host: None };
        hosts[0].operations.drain_cluster_host(this, true).await.expect("it drains");
        assert_eq!(counts(&allot(forker, &vm, 1, "fork").await).0, 0, "{place:?}: it drains");
        for host in &hosts {
            host.stop().await;
        }
    }
}
