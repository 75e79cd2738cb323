//! Where the parent runs: the clones of its ticket on another host, as the desk knows them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use tokio::sync::mpsc;
use vmfork_agent_proto::RequestError;
use vmfork_cluster::HostId;

use super::letter::{Item, LineId, Word};
use super::wire::{End, Lines, Wire};
use crate::hosts::Hosts;
use vmfork_fork::tickets::{Event, TicketOrigin};
use vmfork_guest_link::agent::{
    Asker, Counted, GuestRequest, HostShare, MailRoom, Message, Responder,
};

/// What an empty message costs.
const MESSAGE_OVERHEAD_BYTES: u64 = 256;

/// Clones of one ticket on one other host.
#[derive(Debug)]
pub(crate) struct Abroad {
    wire: Arc<Wire>,
    host: String,
    ticket: u64,
    parent: mpsc::UnboundedSender<Event>,
    room: MailRoom,
    /// Those that have not ended.
    open: Mutex<BTreeSet<u32>>,
}

impl Abroad {
    /// Clones `vms` of a ticket are about to be started by an order to another host. The ticket's
    /// desk is notified of them.
    pub(crate) fn open(
        (hosts, lines): (&Arc<Hosts>, &Lines),
        host: HostId,
        order: u64,
        origin: &TicketOrigin,
        vms: impl Iterator<Item = u32>,
    ) -> Arc<Self> {
        let id = LineId { parent: hosts.id().get(), order };
        let wire = Wire::new(Arc::downgrade(hosts), host, id);
        let name = hosts.peer_of(host).map_or_else(|_| host.to_string(), |peer| peer.name);
        let abroad = Self::new(&wire, name, origin, vms.collect());
        lines.start(&wire, Arc::clone(&abroad) as Arc<dyn End>);
        tokio::spawn(Arc::clone(&abroad).pass_on_wanted());
        abroad
    }

    pub(super) fn new(
        wire: &Arc<Wire>,
        host: String,
        origin: &TicketOrigin,
        vms: BTreeSet<u32>,
    ) -> Arc<Self> {
        let abroad = Arc::new(Self {
            wire: Arc::clone(wire),
            host,
            ticket: origin.ticket,
            parent: origin.parent.clone(),
            room: origin.room.clone(),
            open: Mutex::new(vms.clone()),
        });
        for vm in vms {
            let to = Arc::clone(&abroad) as Arc<dyn vmfork_fork::Abroad>;
            abroad.tell(Event::Sent { ticket: origin.ticket, vm, to });
        }
        abroad
    }

    /// The order to start the clones was answered: before it has come the other host knows of no
    /// ticket.
    pub(crate) fn ordered(&self) {
        self.wire.let_speak();
    }

    /// A clone has ended, or was not started.
    pub(crate) fn ended(&self, vm: u32, reason: String) {
        let was_last = {
            let mut open = self.vms();
            if !open.remove(&vm) {
                return;
            }
            open.is_empty()
        };
        self.tell(Event::Ended { ticket: self.ticket, vmid: vm, reason });
        if was_last {
            self.wire.close();
        }
    }

    fn vms(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Without a desk there is no parent, and the other host is to learn that.
    fn tell(&self, event: Event) {
        if self.parent.send(event).is_err() {
            self.wire.close();
        }
    }

    fn worker(&self, vm: u32, request: GuestRequest) {
        self.tell(Event::Worker { ticket: self.ticket, vm, request });
    }

    /// Have the other host let messages in that the parent waits for.
    async fn pass_on_wanted(self: Arc<Self>) {
        let mut changes = self.room.changes();
        let mut told = Vec::new();
        loop {
            let wanted = self.room.wanted(self.ticket);
            if wanted != told {
                self.wire.say(Word::Want { of: wanted.clone() });
                told = wanted;
            }
            tokio::select! {
                () = self.wire.closed() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }
}

impl vmfork_fork::Abroad for Abroad {
    fn kill(&self, vm: u32) {
        self.wire.say(Word::Kill { vm });
    }
}

impl End for Abroad {
    fn hear(&self, wire: &Arc<Wire>, item: Item) {
        let way = |ask| Box::new(Way { wire: Arc::clone(wire), ask }) as Box<dyn Asker>;
        match item.word {
            Word::Exit { ask, vm, vmid, error } => {
                let reply = Responder::to(way(ask));
                self.worker(vm, GuestRequest::ExitClone { vmid, error, reply });
            }
            Word::Send { ask, vm, vmid } => {
                let reply = Responder::to(way(ask));
                let bytes: u64 = item.body.iter().map(|piece| piece.len() as u64).sum();
                let share = self.room.host().hold(bytes.saturating_add(MESSAGE_OVERHEAD_BYTES));
                let Some(share) = share else {
                    let text = "the parent's host has no room for the message";
                    return reply.error(Errno::NOMEM, text);
                };
                let taken = Taken { wire: Arc::clone(wire), ask, _share: share };
                let message = Message::held(item.body, Box::new(taken));
                self.worker(vm, GuestRequest::Send { vmid, message, reply });
            }
            Word::Ended { vm, reason } => self.ended(vm, reason),
            // The other end's words.
            Word::Done { .. }
            | Word::Failed { .. }
            | Word::Taken { .. }
            | Word::Want { .. }
            | Word::Kill { .. } => {}
        }
    }

    fn lost(&self, why: &str) {
        let vms = self.vms().clone();
        for vm in vms {
            self.ended(vm, format!("its host `{}` is lost: {why}", self.host));
        }
    }
}

/// The way of an answer to a clone's program.
#[derive(Debug)]
struct Way {
    wire: Arc<Wire>,
    ask: u64,
}

impl Asker for Way {
    fn answered(&self, answer: Result<u64, RequestError>) {
        let ask = self.ask;
        self.wire.say(match answer {
            Ok(value) => Word::Done { ask, value },
            Err(error) => Word::Failed { ask, error },
        });
    }
}

/// A message that is kept here. Its host is notified when it was removed.
#[derive(Debug)]
struct Taken {
    wire: Arc<Wire>,
    ask: u64,
    _share: HostShare,
}

impl Counted for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        self.wire.say(Word::Taken { ask: self.ask });
    }
}
