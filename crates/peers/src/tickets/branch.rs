//! Where clones of another host's ticket run: what they have to say goes to their parent's host.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use tokio::sync::mpsc;
use vmfork_agent_proto::RequestError;
use vmfork_cluster::HostId;

use super::letter::{Item, LineId, Word};
use super::wire::{End, Lines, Wire};
use crate::hosts::Hosts;
use crate::remote_fork::Order;
use vmfork_fork::tickets::{Event, TicketOrigin};
use vmfork_guest_link::agent::{GuestRequest, Lease, MailRoom, ROOM_BYTES, Responder};
use vmfork_host::core::Core;
use vmfork_host::vm::{End as VmEnd, Vm};

pub(super) struct Branch {
    core: Arc<Core>,
    ticket: u64,
    room: MailRoom,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    asked: u64,
    /// What programs wait to be answered, by the number of what they asked.
    waiting: HashMap<u64, Asked>,
    /// What messages take of their workers' allowances and of the room, until the parent has them.
    held: HashMap<u64, Lease>,
    vms: HashMap<u32, Arc<Vm>>,
    /// Clones that have not ended.
    left: BTreeSet<u32>,
}

struct Asked {
    reply: Responder,
    /// `sf_exit`: of this clone.
    exits: Option<u32>,
}

/// The origin of clones that another host orders; `None`: they are of no ticket.
pub(crate) fn begin(
    (hosts, lines): (&Arc<Hosts>, &Lines),
    core: &Arc<Core>,
    from: HostId,
    order: &Order,
) -> Option<TicketOrigin> {
    let ticket = order.ticket?;
    let id = LineId { parent: from.get(), order: order.number };
    let wire = Wire::new(Arc::downgrade(hosts), from, id);
    let (branch, origin) =
        Branch::new(&wire, core, ticket, order.clones.iter().map(|clone| clone.vmid).collect());
    wire.let_speak();
    lines.start(&wire, branch);
    Some(origin)
}

impl Branch {
    /// → who the clones are of.
    pub(super) fn new(
        wire: &Arc<Wire>,
        core: &Arc<Core>,
        ticket: u64,
        left: BTreeSet<u32>,
    ) -> (Arc<Self>, TicketOrigin) {
        let room = MailRoom::new(&core.mail, ROOM_BYTES);
        let branch = Arc::new(Self {
            core: Arc::clone(core),
            ticket,
            room: room.clone(),
            state: Mutex::new(State { left, ..State::default() }),
        });
        let (parent, events) = mpsc::unbounded_channel();
        tokio::spawn(Arc::clone(&branch).listen(Arc::clone(wire), events));
        (branch, TicketOrigin { ticket, parent, room })
    }

    async fn listen(self: Arc<Self>, wire: Arc<Wire>, mut events: mpsc::UnboundedReceiver<Event>) {
        loop {
            tokio::select! {
                () = wire.closed() => break,
                event = events.recv() => match event {
                    Some(event) => self.on_event(event, &wire),
                    None => break,
                },
            }
        }
        // From now on, their desks answer requests with the end of the parent.
        events.close();
        while let Some(event) = events.recv().await {
            self.on_event(event, &wire);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_event(&self, event: Event, wire: &Wire) {
        let mut state = self.state();
        match event {
            Event::Born { vm, .. } => {
                state.vms.insert(vm.identity.vmid, vm);
            }
            Event::Worker { vm, request, .. } => {
                state.asked += 1;
                let ask = state.asked;
                let (item, asked) = match request {
                    GuestRequest::ExitClone { vmid, error, reply } => {
                        let item = Item::from(Word::Exit { ask, vm, vmid, error });
                        (item, Asked { reply, exits: Some(vm) })
                    }
                    GuestRequest::Send { vmid, message, reply } => {
                        let (body, lease) = message.into_parts();
                        state.held.extend(lease.map(|lease| (ask, lease)));
                        (
                            Item { word: Word::Send { ask, vm, vmid }, body },
                            Asked { reply, exits: None },
                        )
                    }
                    _ => return,
                };
                state.waiting.insert(ask, asked);
                wire.say(item);
                if wire.is_closed() {
                    self.orphan(state);
                }
            }
            Event::Ended { vmid, reason, .. } => {
                state.vms.remove(&vmid);
                wire.say(Word::Ended { vm: vmid, reason });
                if state.left.remove(&vmid) && state.left.is_empty() {
                    wire.finish();
                }
            }
            // The parent's host knows it by the answer to its order, or it is no clone's event.
            Event::Running { .. }
            | Event::Sent { .. }
            | Event::Allocated { .. }
            | Event::Forked { .. } => {}
        }
    }

    /// The parent is gone: as when it ends on the same host.
    fn orphan(&self, mut state: MutexGuard<'_, State>) {
        let (waiting, held) = (std::mem::take(&mut state.waiting), std::mem::take(&mut state.held));
        let exits: Vec<Arc<Vm>> =
            waiting.values().filter_map(|asked| state.vms.get(&asked.exits?).cloned()).collect();
        drop(state);
        drop(held);
        for asked in waiting.into_values() {
            match asked.exits {
                Some(_) => asked.reply.ok(0),
                None => asked.reply.error(Errno::PIPE, "the parent has ended"),
            }
        }
        for vm in exits {
            self.core.end(&vm, VmEnd::exited("sf_exit"));
        }
    }

    fn answer(&self, ask: u64, answer: Result<u64, RequestError>) {
        let Some(asked) = self.state().waiting.remove(&ask) else { return };
        match answer {
            Ok(value) => asked.reply.ok(value),
            Err(error) => asked.reply.error(Errno::from_raw_os_error(error.errno), error.message),
        }
    }
}

impl End for Branch {
    fn hear(&self, _wire: &Arc<Wire>, item: Item) {
        match item.word {
            Word::Done { ask, value } => self.answer(ask, Ok(value)),
            Word::Failed { ask, error } => self.answer(ask, Err(error)),
            Word::Taken { ask } => {
                let lease = self.state().held.remove(&ask);
                drop(lease);
            }
            Word::Want { of } => {
                self.room.want(of.into_iter().map(|of| (self.ticket, of)).collect());
            }
            Word::Kill { vm } => {
                let vm = self.state().vms.get(&vm).cloned();
                if let Some(vm) = vm {
                    self.core.end(&vm, VmEnd::exited("its workers have ended"));
                }
            }
            // The other end's words.
            Word::Exit { .. } | Word::Send { .. } | Word::Ended { .. } => {}
        }
    }

    fn lost(&self, _why: &str) {
        self.orphan(self.state());
    }
}
