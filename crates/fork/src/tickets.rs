//! The fork API of programs in guests, carried out: one task per VM owns the VM's [`TicketBook`],
//! feeds it what programs ask and what becomes of the clones, and does what it says.
//!
//! When the VM's agent is lost, no program in the VM can ask or be answered any more.
//! The book then closes as if the VM had ended.
//! Its workers' messages are still taken, until they and the VM have ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tokio::sync::mpsc;
use vmfork_agent_proto::TicketClone;
use vmfork_api::{ErrorBody, Labels};

pub use crate::origin::{Event, TicketOrigin};

use crate::forker::{Forker, TicketService};
use crate::forking::{Order, run};
use crate::messages::message;
use crate::origin::{Abroad, Places};
use crate::places::{Allotted, Placement};
use vmfork_guest_link::agent::{GuestRequest, MailRoom, Message, ROOM_BYTES, Responder};
use vmfork_guest_link::tickets::{Action, Answer, CloneSpec, Refusal, TicketBook};
use vmfork_host::admission::Loan;
use vmfork_host::vm::{End, Origin, Vm};

/// Bound on the fork behind an `sf_clone`.
const FORK_TIMEOUT: Duration = Duration::from_secs(120);
/// How often the log says of one VM why its tickets get less than they ask for.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Where a clone runs.
#[derive(Debug)]
enum Whereabouts {
    Here(Arc<Vm>),
    Away(Arc<dyn Abroad>),
}

type Book = TicketBook<Responder, Message>;

struct Desk {
    forker: Arc<Forker>,
    vm: Arc<Vm>,
    book: Book,
    events: mpsc::UnboundedSender<Event>,
    /// Set in a clone that a ticket made.
    origin: Option<Origin>,
    epoch: Instant,
    /// Of tickets that are granted and not used.
    places: std::collections::HashMap<u64, Places>,
    /// When the log said last that a ticket got less than it asked for.
    said_at: Option<Duration>,
    /// Clones by ticket and number.
    clones: std::collections::HashMap<(u64, u32), Whereabouts>,
    /// Where the messages in `book` lie.
    room: MailRoom,
}

/// A task per VM.
#[derive(Debug)]
pub struct Tickets;

impl TicketService for Tickets {
    fn serve(&self, forker: &Arc<Forker>, vm: &Arc<Vm>, requests: mpsc::Receiver<GuestRequest>) {
        start(Arc::clone(forker), Arc::clone(vm), vm.origin.clone(), requests);
    }
}

/// Serve the fork API of one VM until it ends. → where the events of its workers go.
pub fn start(
    forker: Arc<Forker>,
    vm: Arc<Vm>,
    origin: Option<Origin>,
    mut requests: mpsc::Receiver<GuestRequest>,
) -> mpsc::UnboundedSender<Event> {
    let (events, mut events_rx) = mpsc::unbounded_channel();
    let book = Book::numbered_from(vm.identity.spec().cpus, forker.core.first_ticket());
    let room = MailRoom::new(&forker.core.mail, ROOM_BYTES);
    let told = events.clone();
    let mut desk = Desk {
        forker,
        vm,
        book,
        events,
        origin,
        epoch: Instant::now(),
        places: std::collections::HashMap::new(),
        said_at: None,
        clones: std::collections::HashMap::new(),
        room,
    };
    tokio::spawn(async move {
        let mut linked = true;
        loop {
            let expiry = desk
                .book
                .next_expiry()
                .map_or(Duration::from_secs(3600), |at| at.saturating_sub(desk.epoch.elapsed()));
            tokio::select! {
                request = requests.recv(), if linked => match request {
                    Some(request) => desk.on_request(request),
                    None => {
                        linked = false;
                        desk.close();
                    }
                },
                Some(event) = events_rx.recv() => desk.on_event(event),
                () = tokio::time::sleep(expiry) => {
                    let actions = desk.book.expire(desk.epoch.elapsed());
                    desk.carry_out(actions);
                }
                _ = desk.vm.wait_end() => break,
            }
            desk.room.want(desk.book.wanted());
        }
        desk.close();
        // Workers that outlive their parent are answered, as the book says, until the last has
        // ended.
        while desk.book.has_workers() {
            let Some(event) = events_rx.recv().await else { break };
            desk.on_event(event);
        }
    });
    told
}

impl Desk {
    /// No program in the VM asks or receives any more.
    fn close(&mut self) {
        let actions = self.book.parent_ended();
        self.carry_out(actions);
    }

    fn on_request(&mut self, request: GuestRequest) {
        let actions = match request {
            GuestRequest::RequestTicket { count, hierarchical, reply } => {
                self.book.request(reply, count, hierarchical)
            }
            GuestRequest::Clone { ticket, reply } => self.book.clone_vm(reply, ticket),
            GuestRequest::Join { ticket, reply } => self.book.join(reply, ticket),
            GuestRequest::KillTicket { ticket, reply } => self.book.kill(reply, ticket),
            GuestRequest::Recv { ticket, vmid, reply } => self.book.receive(reply, ticket, vmid),
            GuestRequest::Abandon { request } => {
                self.book.abandon(|reply| reply.id() == request);
                return;
            }
            request @ (GuestRequest::ExitClone { .. } | GuestRequest::Send { .. }) => {
                return self.pass_to_parent(request);
            }
        };
        self.carry_out(actions);
    }

    fn pass_to_parent(&self, request: GuestRequest) {
        let passed_on = match &self.origin {
            Some(origin) => origin.fate.asked(origin.ticket, self.vm.identity.vmid, request),
            None => Err(request),
        };
        // There is no desk above: the VM booted, was forked from outside, or its parent's desk has
        // closed.
        if let Err(request) = passed_on {
            let had_parent = self.origin.is_some();
            match request {
                GuestRequest::ExitClone { reply, .. } if had_parent => {
                    reply.ok(0);
                    self.forker.core.end(&self.vm, End::exited("sf_exit"));
                }
                GuestRequest::ExitClone { reply, .. } => {
                    reply.error(Errno::INVAL, "this VM is not a clone of a ticket");
                }
                GuestRequest::Send { reply, .. } if had_parent => {
                    reply.error(Errno::PIPE, "the parent has ended");
                }
                GuestRequest::Send { reply, .. } => {
                    reply.error(Errno::INVAL, "this VM is not a clone of a ticket");
                }
                _ => {}
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        let actions = match event {
            Event::Worker { ticket, vm, request } => match request {
                GuestRequest::ExitClone { vmid, error, reply } => {
                    self.book.exit(reply, ticket, vm, vmid, error)
                }
                GuestRequest::Send { vmid, message, reply } => {
                    self.book.send(reply, ticket, vm, vmid, message)
                }
                _ => return,
            },
            Event::Born { ticket, vm } => {
                self.clones.insert((ticket, vm.identity.vmid), Whereabouts::Here(vm));
                return;
            }
            Event::Sent { ticket, vm, to } => {
                self.clones.insert((ticket, vm), Whereabouts::Away(to));
                return;
            }
            Event::Allocated { ticket, allotted } => self.allotted(ticket, allotted),
            Event::Running { ticket, vmid } => self.book.vm_running(ticket, vmid),
            Event::Ended { ticket, vmid, reason } => {
                self.clones.remove(&(ticket, vmid));
                self.book.vm_ended(ticket, vmid, &reason)
            }
            Event::Forked { ticket, outcome: Ok(()), .. } => self.book.cloned(ticket),
            Event::Forked { ticket, outcome: Err(refusal), unused } => {
                // Without an sf_clone that waits, the ticket was killed meanwhile.
                if self.book.cloner(ticket).is_some() {
                    self.places.insert(ticket, unused);
                }
                self.book.clone_failed(ticket, refusal, self.epoch.elapsed())
            }
        };
        self.carry_out(actions);
    }

    fn carry_out(&mut self, actions: Vec<Action<Responder, Message>>) {
        for action in actions {
            match action {
                Action::Answer(reply, answer) => give(reply, answer),
                Action::Allocate { ticket, vms } => self.allocate(ticket, vms),
                Action::Release { ticket } => drop(self.places.remove(&ticket)),
                Action::StartClones { ticket, vms } => self.fork(ticket, vms),
                Action::KillVm { ticket, vmid } => match self.clones.get(&(ticket, vmid)) {
                    Some(Whereabouts::Here(vm)) => {
                        self.forker.core.end(vm, End::exited("its workers have ended"));
                    }
                    Some(Whereabouts::Away(abroad)) => abroad.kill(vmid),
                    None => {}
                },
            }
        }
    }

    /// Set places aside.
    fn allocate(&mut self, ticket: u64, vms: u32) {
        let message = message(&self.vm);
        let (forker, vm, events) =
            (Arc::clone(&self.forker), Arc::clone(&self.vm), self.events.clone());
        tokio::spawn(async move {
            let allotted = allot(&forker, &vm, vms, &message).await;
            let _desk_closed = events.send(Event::Allocated { ticket, allotted });
        });
    }

    fn allotted(&mut self, ticket: u64, allotted: Allotted) -> Vec<Action<Responder, Message>> {
        let places = allotted.places();
        let Allotted { here, away, hold, refused } = allotted;
        if let Some(error) = &refused {
            self.say(error);
        }
        let actions = self.book.allocated(ticket, Ok(places), self.epoch.elapsed());
        // Without an answer to give, no program waits for the ticket any more.
        if places > 0 && !actions.is_empty() {
            self.places.insert(ticket, Places { here, away: away.into(), hold });
        }
        actions
    }

    /// Why a ticket gets less than it asks for, in the log, however often a guest asks.
    fn say(&mut self, error: &ErrorBody) {
        let now = self.epoch.elapsed();
        if self.said_at.is_some_and(|at| now < at + SAY_EVERY) {
            return;
        }
        self.said_at = Some(now);
        tracing::info!(vm = self.vm.name(), reason = %error, "a ticket gets less than it asks for");
    }

    fn fork(&mut self, ticket: u64, vms: Vec<CloneSpec>) {
        let Places { here, away, hold } = self.places.remove(&ticket).unwrap_or_default();
        let memory = here.map(Loan::new);
        let channel = self.book.cloner(ticket).map(|reply| reply.id().0);
        let clones = vms
            .into_iter()
            .map(|spec| (spec.vmid, Some(TicketClone { ticket, workers: spec.workers, channel })))
            .collect();
        let room = self.room.clone();
        let origin = TicketOrigin { ticket, parent: self.events.clone(), room };
        let order = Order {
            clones,
            names: None,
            all_or_nothing: false,
            labels: Labels::default(),
            timeout: FORK_TIMEOUT,
            ttl: None,
            memory: memory.clone(),
            origin: Some(origin),
            placement: Placement {
                reserved: Arc::clone(&away),
                hold: hold.clone(),
                ..Placement::default()
            },
        };
        let (forker, vm, events) =
            (Arc::clone(&self.forker), Arc::clone(&self.vm), self.events.clone());
        tokio::spawn(async move {
            let outcome = match run(&forker, &vm, order).await {
                Ok(_each_was_reported) => Ok(()),
                Err(error) => Err(Refusal::new(Errno::AGAIN, error.cause.unwrap_or(error.message))),
            };
            let unused = Places { here: memory.and_then(|memory| memory.take()), away, hold };
            let _desk_closed = events.send(Event::Forked { ticket, outcome, unused });
        });
    }
}

/// Places for a ticket's clones: what there is here, or on other hosts, too.
pub async fn allot(forker: &Forker, vm: &Vm, vms: u32, message: &str) -> Allotted {
    let Forker { core, remote, .. } = forker;
    if let Some(allotted) = remote.reserve(core, vm, vms, message).await {
        return allotted;
    }
    match core.admit(vm.identity.ask(message, vms, true), false).await {
        Ok(mut grant) => {
            let refused = grant.refused.take();
            Allotted { here: Some(grant), refused, ..Allotted::default() }
        }
        Err(error) => Allotted { refused: Some(error.to_body(message)), ..Allotted::default() },
    }
}

fn give(reply: Responder, answer: Answer<Message>) {
    match answer {
        Answer::Ok { value } => reply.ok(value),
        Answer::Ticket { ticket, granted } => reply.ticket(ticket, granted),
        Answer::Ended { workers } => reply.ended(workers),
        Answer::Incoming { vmid, message } => reply.incoming(vmid, message),
        Answer::Error(Refusal { errno, message }) => reply.error(errno, message),
    }
}

#[cfg(test)]
mod tests;
