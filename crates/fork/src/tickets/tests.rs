//! The desk of a VM whose guest a test plays; no QEMU, so that its forks fail.

use tokio::io::AsyncWriteExt;
use tokio::sync::broadcast;
use tokio::time::timeout;
use vmfork_agent_proto::{ToGuest, ToHost};

use super::*;
use crate::testing;
use vmfork_api::VmState;
use vmfork_guest_link::agent::MailRoom;
use vmfork_host::core::agents;
use vmfork_host::testing::{Guest, Host, SOON, link};

async fn ticket(guest: &mut Guest) -> u64 {
    guest.say(1, &ToHost::RequestTicket { count: 2, hierarchical: false }).await;
    match guest.hear().await {
        (1, ToGuest::Ticket { ticket, granted: 2 }) => ticket,
        other => panic!("{other:?}"),
    }
}

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_agent_is_lost_tickets_are_given_back_and_workers_still_heard() {
    let host = Host::start().await;
    let vm = host.vm("web", None);
    let free_bytes = host.core.admission.admissible_bytes();
    let (link, mut guest, requests) = link();
    let events = start(testing::forker(&host.core), Arc::clone(&vm), None, requests);
    let number = ticket(&mut guest).await;
    assert!(host.core.admission.admissible_bytes() < free_bytes);

    guest.stream.write_all(&[0xff; 64]).await.expect("write");
    timeout(SOON, link.closed()).await.expect("the protocol is broken");
    eventually("the memory is free", || host.core.admission.admissible_bytes() == free_bytes).await;

    let (_link, mut worker, mut asked) = self::link();
    worker.say(1, &ToHost::ExitClone { vmid: 1, error: None }).await;
    let request = timeout(SOON, asked.recv()).await.expect("in time").expect("asked");
    events.send(Event::Worker { ticket: number, vm: 1, request }).expect("the desk is open");
    assert_eq!(worker.hear().await, (1, ToGuest::Ok { value: 0 }));
    assert!(vm.end_now().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_whose_fork_came_to_nothing_has_its_memory_as_before() {
    let host = Host::start().await;
    let vm = host.vm("web", None);
    let (_link, mut guest, requests) = link();
    start(testing::forker(&host.core), vm, None, requests);
    let number = ticket(&mut guest).await;
    let left_bytes = host.core.admission.admissible_bytes();
    guest.say(3, &ToHost::Clone { ticket: number }).await;
    let (3, ToGuest::Error(error)) = guest.hear().await else { panic!("there is no QEMU") };
    assert_eq!(error.errno, Errno::AGAIN.raw_os_error());
    assert_eq!(host.core.admission.admissible_bytes(), left_bytes);
    // And it goes with the ticket.
    guest.say(5, &ToHost::KillTicket { ticket: number }).await;
    assert_eq!(guest.hear().await, (5, ToGuest::Ended { workers: Vec::new() }));
    eventually("the memory is free", || host.core.admission.admissible_bytes() > left_bytes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_agent_is_lost_ends_and_its_parent_is_told() {
    let host = Host::start().await;
    let (parent, mut told) = mpsc::unbounded_channel();
    let origin = TicketOrigin { ticket: 7, parent, room: MailRoom::default() };
    let vm = host.vm("web.1", Some(origin.into()));
    host.core.set_ready(&vm, None);
    let (link, mut guest, _requests) = link();
    let (_qemu, events) = broadcast::channel(4);
    agents::watch(&host.core, &vm, link, events);
    guest.stream.write_all(&[0xff; 64]).await.expect("write");
    let end = timeout(SOON, vm.wait_end()).await.expect("it ends");
    assert_eq!(end.state, VmState::Failed);
    assert!(
        end.reason.starts_with("lost its agent: the guest broke the agent protocol"),
        "{}",
        end.reason
    );
    let said = async {
        loop {
            if let Some(Event::Ended { ticket: 7, vmid: 1, .. }) = told.recv().await {
                break;
            }
        }
    };
    timeout(SOON, said).await.expect("the parent is told");
}
