//! What ends with a membership.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_api::ClusterHostRequest;

use super::super::lifetimes::tell_lifetime;
use super::super::tickets::Abroad;
use super::{cluster, silence, until};
use vmfork_control::ClusterControl;
use vmfork_fork::tickets::{Event, TicketOrigin};
use vmfork_guest_link::agent::MailRoom;
use vmfork_host::lifetime::Setting;
use vmfork_host::testing::SOON;

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_that_is_still_to_be_told_does_not_keep_a_membership() {
    let hosts = cluster(2).await;
    let _silent = silence(&hosts[1]).await;
    let member = hosts[0].cluster().member().expect("a member");
    let (rest, known) = (Arc::downgrade(&member), Arc::downgrade(&member.hosts));
    let setting = Setting { of: "web".to_owned(), version: 1, ends: None };
    tell_lifetime(&member, &hosts[0].host.core.lifetimes, &setting);
    drop(member);
    let leave = hosts[0].operations.leave_cluster(ClusterHostRequest::default());
    leave.await.expect("left");
    until("its images and leases are freed", || rest.strong_count() == 0).await;
    until("the old cluster is not called any more", || known.strong_count() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leave_ends_the_lines_of_tickets_at_once() {
    let hosts = cluster(2).await;
    let member = hosts[0].cluster().member().expect("a member");
    let (parent, mut desk) = mpsc::unbounded_channel();
    let origin = TicketOrigin { ticket: 7, parent, room: MailRoom::default() };
    let to = hosts[1].id().expect("a member");
    let _abroad = Abroad::open((&member.hosts, &member.lines), to, 1, &origin, std::iter::once(1));
    // Such as an order that is still to be given up.
    let _task = Arc::clone(&member.hosts);
    drop(member);
    let leave = hosts[0].operations.leave_cluster(ClusterHostRequest::default());
    leave.await.expect("left");
    let ended = async {
        loop {
            if let Event::Ended { vmid, reason, .. } = desk.recv().await.expect("a desk") {
                return (vmid, reason);
            }
        }
    };
    let (vmid, reason) = timeout(SOON, ended).await.expect("not after a silence");
    assert_eq!((vmid, reason.as_str()), (1, "its host `h1` is lost: this host left the cluster"));
    hosts[1].stop().await;
}
