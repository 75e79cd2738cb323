use std::collections::BTreeMap;

use super::*;
use crate::admission::{ForkAsk, Lease};
use crate::testing::Host;

const USER: User = User::Uid(1000);

fn ask(user: User, count: u32) -> ForkAsk<'static> {
    ForkAsk {
        message: "fork `web`",
        family: "f",
        user,
        ram_bytes: 64 << 20,
        cpus: 1,
        count,
        by_guest: false,
        allowed: None,
    }
}

async fn host() -> Host {
    let four = Amount { vms: 4, ..Amount::ALL };
    let users = BTreeMap::from([(USER.to_string(), four)]);
    Host::with(|config| config.quotas = Bounds { users, ..Bounds::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn however_many_ask_at_once_a_user_gets_no_more_than_the_quota() {
    let host = host().await;
    let asks = (0..8).map(|_| {
        let core = Arc::clone(&host.core);
        tokio::spawn(async move { core.admit(ask(USER, 3), false).await })
    });
    let mut clones: Vec<Lease> = Vec::new();
    for answer in futures_util::future::join_all(asks).await {
        clones.extend(answer.expect("no panic").map(|grant| grant.clones).unwrap_or_default());
    }
    assert_eq!(clones.len(), 4);
    let error = host.core.admit(ask(USER, 1), false).await.expect_err("all is taken");
    assert!(error.to_string().contains("user 1000 has 4 of 4 VMs"), "{error}");
    let remedy = error.to_body("fork `web`").remedy;
    assert!(remedy.is_some_and(|remedy| remedy.contains("--quota")));
    let others = host.core.admit(ask(User::Token, 9), true).await.expect("no quota");
    assert_eq!(others.clones.len(), 9);
    drop(clones.split_off(1));
    let again = host.core.admit(ask(USER, 9), false).await.expect("three ended");
    assert_eq!(again.clones.len(), 3);
    host.core.admit(ask(USER, 1), true).await.expect_err("all is taken again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_asked_for_is_not_told_as_if_it_stood() {
    let host = host().await;
    let (quotas, admission) = (&host.core.quotas, &host.core.admission);
    let _grant = host.core.admit(ask(USER, 2), false).await.expect("fits");
    let told = |tally: &Tally| (tally.users["1000"].vms, tally.asking.contains("1000"));
    let before = quotas.tally(admission);
    assert_eq!(told(&before), (2, false));
    let shape = Room { memory_bytes: 1, vcpus: 1 };
    let turn = host.core.turn(USER, (1, shape), "m").await.expect("counted");
    assert_eq!(turn.allowed().map(|it| (it.count, it.has.vms)), Some((1, 2)));
    let meanwhile = quotas.tally(admission);
    assert_eq!(told(&meanwhile), (2, true));
    drop(turn);
    let after = quotas.tally(admission);
    assert_eq!(told(&after), (2, false));
    assert!(before.number < meanwhile.number && meanwhile.number < after.number);
}
