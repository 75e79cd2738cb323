//! Both ends of a line, with a guest that a test plays; the test carries the letters.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use rustix::io::Errno;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_agent_proto::{RequestError, ToGuest, ToHost};
use vmfork_cluster::HostId;

use super::abroad::Abroad;
use super::branch::Branch;
use super::letter::LineId;
use super::wire::{End, Lines, Wire};
use vmfork_fork::Abroad as _;
use vmfork_fork::tickets::{Event, TicketOrigin};
use vmfork_guest_link::agent::{Asker, Counted, GuestRequest, MailRoom, Message, Responder};
use vmfork_host::testing::{Guest, Host, SOON, link};
use vmfork_host::vm::Vm;

const TICKET: u64 = 7;

/// A clone, number 1 of its ticket, on another host than its parent.
struct Both {
    _host: Host,
    vm: Arc<Vm>,
    worker: Guest,
    asked: mpsc::Receiver<GuestRequest>,
    _link: vmfork_guest_link::agent::AgentLink,
    origin: TicketOrigin,
    there: (Arc<Wire>, Arc<Branch>),
    here: (Arc<Wire>, Arc<Abroad>),
    desk: mpsc::UnboundedReceiver<Event>,
}

impl Both {
    async fn start() -> Self {
        let host = Host::start().await;
        let [parents, others] = [1, 2].map(|id| HostId::new(id).expect("not 0"));
        let id = LineId { parent: parents.get(), order: 3 };
        let wire = |peer| Wire::new(Weak::new(), peer, id);
        let (there, here) = (wire(parents), wire(others));
        let (branch, origin) = Branch::new(&there, &host.core, TICKET, [1].into());
        let (parent, mut desk) = mpsc::unbounded_channel();
        let at_home = TicketOrigin { ticket: TICKET, parent, room: MailRoom::default() };
        let abroad = Abroad::new(&here, "h1".to_owned(), &at_home, [1].into());
        assert!(matches!(desk.recv().await, Some(Event::Sent { ticket: TICKET, vm: 1, .. })));
        let vm = host.vm("web.1", Some(origin.clone().into()));
        let (link, worker, asked) = link();
        Self {
            _host: host,
            vm,
            worker,
            asked,
            _link: link,
            origin,
            there: (there, branch),
            here: (here, abroad),
            desk,
        }
    }

    /// The clone's program asks, and its desk passes it on.
    async fn ask(&mut self, channel: u32, message: &ToHost) {
        self.worker.say(channel, message).await;
        let request = timeout(SOON, self.asked.recv()).await.expect("in time").expect("asked");
        self.pass_on(request);
    }

    fn pass_on(&self, request: GuestRequest) {
        let event = Event::Worker { ticket: TICKET, vm: 1, request };
        self.origin.parent.send(event).expect("the branch hears");
    }

    /// Carry letters until the desk hears something, each twice; the receipt of the first is lost.
    async fn desk(&mut self) -> Event {
        let next = async {
            loop {
                let ((from, _), (to, abroad)) = (&self.there, &self.here);
                to.on_letter(from.letter(), &**abroad);
                from.on_receipt(to.on_letter(from.letter(), &**abroad));
                if let Ok(event) = self.desk.try_recv() {
                    return event;
                }
                tokio::task::yield_now().await;
            }
        };
        timeout(SOON, next).await.expect("in time")
    }

    fn answer(&self) {
        let ((to, branch), (from, _)) = (&self.there, &self.here);
        to.on_letter(from.letter(), &**branch);
        from.on_receipt(to.on_letter(from.letter(), &**branch));
    }
}

/// A message's allowance, and the waiter for its answer: reports when it is given back, or
/// answered.
#[derive(Debug)]
struct Told(mpsc::UnboundedSender<&'static str>);

impl Counted for Told {}

impl Asker for Told {
    fn answered(&self, answer: Result<u64, RequestError>) {
        let told = if answer == Ok(0) { "sent" } else { "refused" };
        let _over = self.0.send(told);
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _over = self.0.send("dropped");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_counts_against_its_worker_until_the_parent_has_it() {
    let mut both = Both::start().await;
    let ((allowance, mut given_back), (waits, mut answered)) =
        (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    let pieces = vec![Bytes::from_static(b"hello "), Bytes::from_static(b"parent")];
    let message = Message::held(pieces, Box::new(Told(allowance)));
    let reply = Responder::to(Box::new(Told(waits)));
    both.pass_on(GuestRequest::Send { vmid: 1, message, reply });
    let Event::Worker { request: GuestRequest::Send { vmid: 1, message, reply }, .. } =
        both.desk().await
    else {
        panic!("no message")
    };
    assert_eq!(message.pieces().concat(), b"hello parent");
    reply.ok(0);
    both.answer();
    assert_eq!(answered.recv().await, Some("sent"));
    given_back.try_recv().expect_err("the parent has not received it");
    drop(message);
    both.answer();
    assert_eq!(given_back.recv().await, Some("dropped"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_clone_asks_is_asked_on_its_parents_host_once_and_answered() {
    let mut both = Both::start().await;
    both.ask(1, &ToHost::ExitClone { vmid: 1, error: None }).await;
    let Event::Worker { ticket: TICKET, vm: 1, request } = both.desk().await else {
        panic!("no worker's")
    };
    let GuestRequest::ExitClone { vmid: 1, error: None, reply } = request else {
        panic!("{request:?}")
    };
    reply.ok(0);
    both.here.1.kill(1);
    both.answer();
    assert_eq!(both.worker.hear().await, (1, ToGuest::Ok { value: 0 }));
    timeout(SOON, both.vm.wait_end()).await.expect("it was to end");
    let event = both.desk().await;
    assert!(matches!(&event, Event::Ended { ticket: TICKET, vmid: 1, .. }), "{event:?}");
    assert!(both.here.0.is_closed(), "nothing more can come");
    assert!(both.desk.try_recv().is_err(), "each thing once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_parents_host_drops_is_answered_with_an_error() {
    let mut both = Both::start().await;
    both.ask(5, &ToHost::ExitClone { vmid: 1, error: None }).await;
    drop(both.desk().await);
    both.answer();
    let (5, ToGuest::Error(error)) = both.worker.hear().await else { panic!("it was dropped") };
    assert_eq!(error.errno, Errno::IO.raw_os_error());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_other_host_is_lost_both_sides_go_on_without() {
    let mut both = Both::start().await;
    both.ask(1, &ToHost::ExitClone { vmid: 1, error: None }).await;
    // Its letter does not arrive.
    both.here.0.close();
    both.here.1.lost("silent");
    let event = both.desk.recv().await.expect("the desk is told");
    let Event::Ended { vmid: 1, reason, .. } = event else { panic!("{event:?}") };
    assert_eq!(reason, "its host `h1` is lost: silent");
    both.there.0.close();
    both.there.1.lost("silent");
    assert_eq!(both.worker.hear().await, (1, ToGuest::Ok { value: 0 }));
    timeout(SOON, both.vm.wait_end()).await.expect("sf_exit ends it as ever");
    let closed = async {
        while both.origin.parent.send(Event::Running { ticket: TICKET, vmid: 1 }).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, closed).await.expect("clones' desks notice that nobody is above");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_is_told_nothing_of_a_ticket_before_it_has_the_order() {
    for answers in [true, false] {
        let mut both = Both::start().await;
        let (wire, abroad) = (&both.here.0, &both.here.1);
        let lines = Lines::default();
        lines.start(wire, Arc::clone(abroad) as Arc<dyn End>);
        // There is no member that could post it: an attempt ends the line.
        abroad.kill(1);
        let early = timeout(Duration::from_millis(200), both.desk.recv()).await;
        assert!(early.is_err(), "{early:?}");
        match answers {
            true => abroad.ordered(),
            false => drop(wire.on_letter(both.there.0.letter(), &**abroad)),
        }
        let event = timeout(SOON, both.desk.recv()).await.expect("it speaks");
        assert!(matches!(&event, Some(Event::Ended { vmid: 1, .. })), "{event:?}");
    }
}
