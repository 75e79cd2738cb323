//! What ends with a membership.

use vmfork_api::ClusterHostRequest;

use super::super::lifetimes::tell_lifetime;
use super::{cluster, silence, until};
use vmfork_control::ClusterControl;
use vmfork_host::lifetime::Setting;

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
