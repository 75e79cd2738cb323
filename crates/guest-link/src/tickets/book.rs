use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rustix::io::Errno;
use vmfork_agent_proto::Worker;

use super::mailbox::Mailbox;

/// Tickets that one VM may hold at a time, discarded ones aside.
pub const TICKETS_MAX: usize = 256;

/// Clones that may be asked for with one ticket.
pub const COUNT_MAX: u32 = 4096;

/// How long a granted ticket waits for its `sf_clone` before its places are given back.
pub const LEASE: Duration = Duration::from_secs(60);

/// A VM that a ticket makes. Its workers are `vmid`, `vmid + 1`, …; `vmid` also names the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CloneSpec {
    pub vmid: u32,
    pub workers: u32,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub errno: Errno,
    pub message: String,
}

impl Refusal {
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        Self { errno, message: message.into() }
    }
}

/// The answer to a program's request.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer<M> {
    Ok { value: u64 },
    Ticket { ticket: u64, granted: u32 },
    Ended { workers: Vec<Worker> },
    Incoming { vmid: u32, message: M },
    Error(Refusal),
}

/// What is to be done. `R` is what answers a request: a responder, or a number in tests.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<R, M> {
    Answer(R, Answer<M>),
    /// Ask for places for this many VMs, and report the outcome by [`TicketBook::allocated`].
    Allocate {
        ticket: u64,
        vms: u32,
    },
    /// Give back the places of a ticket that made no VMs.
    Release {
        ticket: u64,
    },
    /// Fork the parent (each VM's place is now its own, and given back with it); report each VM by
    /// [`TicketBook::vm_running`] or [`TicketBook::vm_ended`], then all by [`TicketBook::cloned`],
    /// or that nothing was forked by [`TicketBook::clone_failed`].
    StartClones {
        ticket: u64,
        vms: Vec<CloneSpec>,
    },
    /// End this VM of the ticket: its workers are done, or were killed.
    KillVm {
        ticket: u64,
        vmid: u32,
    },
}

#[derive(Debug)]
enum State<R> {
    Allocating { reply: R },
    Granted { expires: Duration },
    Starting { reply: R },
    Cloned,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Life {
    Alive,
    Exited,
    Failed(String),
}

/// A VM of a ticket.
#[derive(Debug)]
struct Vm {
    ran: bool,
    /// Its end was asked for, or has happened.
    ended: bool,
    workers: Vec<Life>,
}

#[derive(Debug)]
struct Ticket<R, M> {
    state: State<R>,
    count: u32,
    granted: u32,
    hierarchical: bool,
    /// By the number of their first worker.
    vms: BTreeMap<u32, Vm>,
    mailbox: Mailbox<R, M>,
    joins: Vec<R>,
}

impl<R, M> Ticket<R, M> {
    fn life(&self, vmid: u32) -> Option<&Life> {
        let (first, vm) = self.vms.range(..=vmid).next_back()?;
        vm.workers.get(usize::try_from(vmid - first).ok()?)
    }

    fn all_ended(&self) -> bool {
        self.vms.values().flat_map(|vm| &vm.workers).all(|life| *life != Life::Alive)
    }

    fn report(&self) -> Vec<Worker> {
        let of_vm = |(first, vm): (&u32, &Vm)| {
            let numbered = (*first..).zip(&vm.workers);
            numbered
                .map(|(vmid, life)| {
                    let error = match life {
                        Life::Alive | Life::Exited => None,
                        Life::Failed(reason) => Some(reason.clone()),
                    };
                    Worker { vmid, error }
                })
                .collect::<Vec<_>>()
        };
        self.vms.iter().flat_map(of_vm).collect()
    }
}

/// The tickets of one VM.
#[derive(Debug)]
pub struct TicketBook<R, M> {
    /// The VM's vCPUs, and so the workers of a `hierarchical` clone.
    cpus: u32,
    tickets: BTreeMap<u64, Ticket<R, M>>,
    next: u64,
    parent_ended: bool,
}

impl<R, M> TicketBook<R, M> {
    /// The book of a VM that booted. `cpus` is at least 1.
    pub fn new(cpus: u32) -> Self {
        Self { cpus: cpus.max(1), tickets: BTreeMap::new(), next: 1, parent_ended: false }
    }

    /// The same, with `first` as the number of its first ticket. In a clone that is above all
    /// numbers of the VMs that it descends from, so a parent's ticket that a program in the clone
    /// still holds is `ESTALE` there and never another ticket.
    pub fn numbered_from(cpus: u32, first: u64) -> Self {
        Self { next: first.max(1), ..Self::new(cpus) }
    }

    /// `sf_request_ticket`.
    pub fn request(&mut self, reply: R, count: u32, hierarchical: bool) -> Vec<Action<R, M>> {
        if count == 0 || count > COUNT_MAX {
            let text = format!("{count} clones asked for; 1 to {COUNT_MAX} can be");
            return vec![refuse(reply, Errno::INVAL, text)];
        }
        if self.tickets.len() >= TICKETS_MAX {
            let text = format!("this VM holds {TICKETS_MAX} tickets; join or kill one");
            return vec![refuse(reply, Errno::AGAIN, text)];
        }
        let number = self.next;
        self.next += 1;
        let ticket = Ticket {
            state: State::Allocating { reply },
            count,
            granted: 0,
            hierarchical,
            vms: BTreeMap::new(),
            mailbox: Mailbox::default(),
            joins: Vec::new(),
        };
        self.tickets.insert(number, ticket);
        let vms = if hierarchical { count.div_ceil(self.cpus) } else { count };
        vec![Action::Allocate { ticket: number, vms }]
    }

    /// The allocator's answer to `Allocate`: places for this many VMs (none is a refusal, too).
    pub fn allocated(
        &mut self,
        number: u64,
        places: Result<u32, Refusal>,
        now: Duration,
    ) -> Vec<Action<R, M>> {
        let cpus = self.cpus;
        let Some(ticket) = self.tickets.get_mut(&number) else { return Vec::new() };
        if !matches!(ticket.state, State::Allocating { .. }) {
            return Vec::new();
        }
        let places = places.and_then(|places| match places {
            0 => Err(Refusal::new(Errno::NOMEM, "there is no room for a clone")),
            places => Ok(places),
        });
        match places {
            Ok(places) => {
                let per_vm = if ticket.hierarchical { cpus } else { 1 };
                ticket.granted = ticket.count.min(places.saturating_mul(per_vm));
                let granted = ticket.granted;
                let state = State::Granted { expires: now.saturating_add(LEASE) };
                match std::mem::replace(&mut ticket.state, state) {
                    State::Allocating { reply } => {
                        vec![Action::Answer(reply, Answer::Ticket { ticket: number, granted })]
                    }
                    _ => Vec::new(),
                }
            }
            Err(refusal) => match self.tickets.remove(&number).map(|ticket| ticket.state) {
                Some(State::Allocating { reply }) => {
                    vec![Action::Answer(reply, Answer::Error(refusal))]
                }
                _ => Vec::new(),
            },
        }
    }

    /// When the next unused ticket expires, if one is.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.tickets
            .values()
            .filter_map(|ticket| match ticket.state {
                State::Granted { expires } => Some(expires),
                _ => None,
            })
            .min()
    }

    /// Discard the tickets that were not used in time.
    pub fn expire(&mut self, now: Duration) -> Vec<Action<R, M>> {
        let mut actions = Vec::new();
        self.tickets.retain(|number, ticket| {
            let expired = matches!(ticket.state, State::Granted { expires } if expires <= now);
            if expired {
                actions.push(Action::Release { ticket: *number });
            }
            !expired
        });
        actions
    }

    /// `sf_clone`. The answer follows [`TicketBook::cloned`].
    pub fn clone_vm(&mut self, reply: R, number: u64) -> Vec<Action<R, M>> {
        let cpus = self.cpus;
        let ticket = match self.find(number) {
            Ok(ticket) => ticket,
            Err(refusal) => return vec![Action::Answer(reply, Answer::Error(refusal))],
        };
        if !matches!(ticket.state, State::Granted { .. }) {
            let text = format!("ticket {number} has been cloned already");
            return vec![refuse(reply, Errno::INVAL, text)];
        }
        let per_vm = if ticket.hierarchical { cpus } else { 1 };
        let mut vms = Vec::new();
        let mut vmid = 1;
        while vmid <= ticket.granted {
            let workers = per_vm.min(ticket.granted - vmid + 1);
            vms.push(CloneSpec { vmid, workers });
            let lives = (0..workers).map(|_| Life::Alive).collect();
            ticket.vms.insert(vmid, Vm { ran: false, ended: false, workers: lives });
            vmid += workers;
        }
        ticket.state = State::Starting { reply };
        vec![Action::StartClones { ticket: number, vms }]
    }

    /// The waiter for `sf_clone` of this ticket, which is being carried out.
    pub fn cloner(&self, number: u64) -> Option<&R> {
        match &self.tickets.get(&number)?.state {
            State::Starting { reply } => Some(reply),
            _ => None,
        }
    }

    /// The workers for whose messages the parent waits: the ticket and the worker, or any of the
    /// ticket.
    pub fn wanted(&self) -> BTreeSet<(u64, Option<u32>)> {
        let of_ticket = |(number, ticket): (&u64, &Ticket<R, M>)| {
            ticket.mailbox.wanted().map(|of| (*number, of)).collect::<Vec<_>>()
        };
        self.tickets.iter().flat_map(of_ticket).collect()
    }

    /// A clone has confirmed its identity and runs.
    pub fn vm_running(&mut self, number: u64, vmid: u32) -> Vec<Action<R, M>> {
        match self.tickets.get_mut(&number) {
            Some(ticket) => {
                if let Some(vm) = ticket.vms.get_mut(&vmid) {
                    vm.ran = true;
                }
                Vec::new()
            }
            // Killed while it started.
            None => vec![Action::KillVm { ticket: number, vmid }],
        }
    }

    /// A clone could not start, or is gone. Its workers that have not exited ended with `reason`.
    pub fn vm_ended(&mut self, number: u64, vmid: u32, reason: &str) -> Vec<Action<R, M>> {
        let Some(ticket) = self.tickets.get_mut(&number) else { return Vec::new() };
        let Some(vm) = ticket.vms.get_mut(&vmid) else { return Vec::new() };
        vm.ended = true;
        fail(vm, reason);
        self.workers_ended(number)
    }

    /// All clones of a ticket were reported. The program that called `sf_clone` goes on; if no
    /// worker runs or ever ran, it gets `EIO` and the ticket is discarded.
    pub fn cloned(&mut self, number: u64) -> Vec<Action<R, M>> {
        let Some(ticket) = self.tickets.get_mut(&number) else { return Vec::new() };
        if !matches!(ticket.state, State::Starting { .. }) {
            return Vec::new();
        }
        let State::Starting { reply } = std::mem::replace(&mut ticket.state, State::Cloned) else {
            return Vec::new();
        };
        for vm in ticket.vms.values_mut().filter(|vm| !vm.ran) {
            vm.ended = true;
            fail(vm, "it was not started");
        }
        let started: usize =
            ticket.vms.values().filter(|vm| vm.ran).map(|vm| vm.workers.len()).sum();
        if started > 0 {
            let mut actions = vec![Action::Answer(reply, Answer::Ok { value: started as u64 })];
            actions.append(&mut self.workers_ended(number));
            return actions;
        }
        let cause = ticket.report().into_iter().find_map(|worker| worker.error);
        let text = format!("no clone could be started: {}", cause.unwrap_or_default());
        let mut actions = vec![refuse(reply, Errno::IO, text)];
        actions.append(&mut self.workers_ended(number));
        self.tickets.remove(&number);
        actions
    }

    /// Nothing was forked: the ticket is as it was before `sf_clone`.
    pub fn clone_failed(
        &mut self,
        number: u64,
        refusal: Refusal,
        now: Duration,
    ) -> Vec<Action<R, M>> {
        let Some(ticket) = self.tickets.get_mut(&number) else { return Vec::new() };
        if !matches!(ticket.state, State::Starting { .. }) {
            return Vec::new();
        }
        ticket.vms.clear();
        let state = State::Granted { expires: now.saturating_add(LEASE) };
        let mut actions = Vec::new();
        if let State::Starting { reply } = std::mem::replace(&mut ticket.state, state) {
            actions.push(Action::Answer(reply, Answer::Error(refusal)));
        }
        for reply in ticket.joins.drain(..).chain(ticket.mailbox.take_hopeless(|_| true)) {
            let text = format!("ticket {number} has not been cloned");
            actions.push(refuse(reply, Errno::INVAL, text));
        }
        actions
    }

    /// `sf_exit` of one worker, asked over the link of clone `vm`; `error` if its process ended
    /// without it. When the VM's last worker is gone, the VM is ended.
    pub fn exit(
        &mut self,
        reply: R,
        number: u64,
        vm: u32,
        vmid: u32,
        error: Option<String>,
    ) -> Vec<Action<R, M>> {
        let Some(ticket) = self.tickets.get_mut(&number) else {
            // The ticket was killed, and so is the VM, if it is not gone yet.
            let ended = Action::Answer(reply, Answer::Ok { value: 0 });
            return vec![ended, Action::KillVm { ticket: number, vmid: vm }];
        };
        let life = ticket.vms.get_mut(&vm).and_then(|vm_entry| {
            vm_entry.workers.get_mut(usize::try_from(vmid.checked_sub(vm)?).ok()?)
        });
        match life {
            Some(life) if *life == Life::Alive => {
                *life = error.map_or(Life::Exited, Life::Failed);
            }
            _ => {
                let text = format!("no worker {vmid} runs in this VM");
                return vec![refuse(reply, Errno::INVAL, text)];
            }
        }
        let mut actions = vec![Action::Answer(reply, Answer::Ok { value: 0 })];
        if let Some(vm_entry) = ticket.vms.get_mut(&vm)
            && !vm_entry.ended
            && vm_entry.workers.iter().all(|life| *life != Life::Alive)
        {
            vm_entry.ended = true;
            actions.push(Action::KillVm { ticket: number, vmid: vm });
        }
        actions.append(&mut self.workers_ended(number));
        actions
    }

    /// `sf_join`: answered when all workers have ended. Then the ticket is discarded, with those of
    /// their messages that were not received.
    pub fn join(&mut self, reply: R, number: u64) -> Vec<Action<R, M>> {
        match self.find_cloned(number) {
            Ok(ticket) => {
                ticket.joins.push(reply);
                self.workers_ended(number)
            }
            Err(refusal) => vec![Action::Answer(reply, Answer::Error(refusal))],
        }
    }

    /// `sf_kill`: end all clones now, answer all joins, discard the ticket.
    /// For a ticket that was not cloned, the places are given back.
    pub fn kill(&mut self, reply: R, number: u64) -> Vec<Action<R, M>> {
        let mut ticket = match self.find(number) {
            Ok(_) => match self.tickets.remove(&number) {
                Some(ticket) => ticket,
                None => return Vec::new(),
            },
            Err(refusal) => return vec![Action::Answer(reply, Answer::Error(refusal))],
        };
        let mut actions = Vec::new();
        for (vmid, vm) in &mut ticket.vms {
            fail(vm, "killed");
            if !std::mem::replace(&mut vm.ended, true) {
                actions.push(Action::KillVm { ticket: number, vmid: *vmid });
            }
        }
        let workers = ticket.report();
        match ticket.state {
            State::Starting { reply } => {
                let text = format!("ticket {number} was killed");
                actions.push(refuse(reply, Errno::CANCELED, text));
            }
            State::Granted { .. } => actions.push(Action::Release { ticket: number }),
            State::Allocating { .. } | State::Cloned => {}
        }
        for waiting in ticket.mailbox.take_hopeless(|_| true) {
            actions.push(drained(waiting, number));
        }
        for waiting in ticket.joins.into_iter().chain([reply]) {
            actions.push(Action::Answer(waiting, Answer::Ended { workers: workers.clone() }));
        }
        actions
    }

    /// `sf_send` of a worker, over the link of clone `vm`.
    pub fn send(
        &mut self,
        reply: R,
        number: u64,
        vm: u32,
        vmid: u32,
        message: M,
    ) -> Vec<Action<R, M>> {
        let orphaned = self.parent_ended;
        let Some(ticket) = self.tickets.get_mut(&number).filter(|_| !orphaned) else {
            return vec![refuse(reply, Errno::PIPE, "the parent does not receive any more")];
        };
        let here = ticket.vms.range(..=vmid).next_back().is_some_and(|(first, _)| *first == vm);
        match ticket.life(vmid) {
            Some(Life::Alive) if here => {}
            Some(_) if here => {
                return vec![refuse(reply, Errno::PIPE, format!("worker {vmid} has ended"))];
            }
            _ => {
                let text = format!("no worker {vmid} lives in this VM");
                return vec![refuse(reply, Errno::INVAL, text)];
            }
        }
        let mut actions = vec![Action::Answer(reply, Answer::Ok { value: 0 })];
        if let Some((receiver, message)) = ticket.mailbox.send(vmid, message) {
            actions.push(Action::Answer(receiver, Answer::Incoming { vmid, message }));
        }
        actions
    }

    /// `sf_recv`: the oldest message of worker `of`, or of any; waits for one. `EPIPE` when none
    /// can come any more.
    pub fn receive(&mut self, reply: R, number: u64, of: Option<u32>) -> Vec<Action<R, M>> {
        let ticket = match self.find_cloned(number) {
            Ok(ticket) => ticket,
            Err(refusal) => return vec![Action::Answer(reply, Answer::Error(refusal))],
        };
        if let Some(vmid) = of
            && ticket.life(vmid).is_none()
        {
            let text = format!("ticket {number} has no worker {vmid}");
            return vec![refuse(reply, Errno::INVAL, text)];
        }
        if let Some((vmid, message)) = ticket.mailbox.receive(of) {
            return vec![Action::Answer(reply, Answer::Incoming { vmid, message })];
        }
        ticket.mailbox.wait(of, reply);
        self.workers_ended(number)
    }

    /// These answers are not waited for any more. Only requests that wait in the book are asked
    /// about.
    pub fn abandon(&mut self, mut gone: impl FnMut(&R) -> bool) {
        for ticket in self.tickets.values_mut() {
            ticket.joins.retain(|reply| !gone(reply));
            ticket.mailbox.abandon(&mut gone);
        }
    }

    /// The VM whose book this is has ended, or no program in it can be answered any more. See the
    /// module's header.
    pub fn parent_ended(&mut self) -> Vec<Action<R, M>> {
        self.parent_ended = true;
        let mut actions = Vec::new();
        self.tickets.retain(|number, ticket| {
            ticket.mailbox = Mailbox::default();
            ticket.joins.clear();
            if matches!(ticket.state, State::Granted { .. }) {
                actions.push(Action::Release { ticket: *number });
            }
            matches!(ticket.state, State::Starting { .. } | State::Cloned)
        });
        actions
    }

    /// Whether any worker of this book's tickets has not ended. A book whose parent has ended can
    /// be dropped when not.
    pub fn has_workers(&self) -> bool {
        self.tickets.values().any(|ticket| !ticket.all_ended())
    }

    /// Some workers have ended: answer the receivers that cannot succeed any more, and the joins
    /// that waited for that.
    fn workers_ended(&mut self, number: u64) -> Vec<Action<R, M>> {
        let Some(mut ticket) = self.tickets.remove(&number) else { return Vec::new() };
        let all_ended = ticket.all_ended();
        let mut mailbox = std::mem::take(&mut ticket.mailbox);
        // A receiver that still waits here found no message that it may have.
        let hopeless = mailbox.take_hopeless(|of| match of {
            None => all_ended,
            Some(vmid) => ticket.life(vmid) != Some(&Life::Alive),
        });
        ticket.mailbox = mailbox;
        let mut actions: Vec<_> =
            hopeless.into_iter().map(|reply| drained(reply, number)).collect();
        // The outcome is reported to none before the program that cloned has its answer.
        let settled = all_ended && matches!(ticket.state, State::Cloned);
        if settled && !ticket.joins.is_empty() {
            let workers = ticket.report();
            for reply in ticket.joins {
                actions.push(Action::Answer(reply, Answer::Ended { workers: workers.clone() }));
            }
        } else {
            self.tickets.insert(number, ticket);
        }
        actions
    }

    fn find(&mut self, number: u64) -> Result<&mut Ticket<R, M>, Refusal> {
        let issued = number != 0 && number < self.next;
        match self.tickets.get_mut(&number) {
            Some(ticket) if !matches!(ticket.state, State::Allocating { .. }) => Ok(ticket),
            None if issued => {
                Err(Refusal::new(Errno::STALE, format!("ticket {number} has been discarded")))
            }
            _ => Err(Refusal::new(Errno::INVAL, format!("no ticket {number} of this VM"))),
        }
    }

    fn find_cloned(&mut self, number: u64) -> Result<&mut Ticket<R, M>, Refusal> {
        let ticket = self.find(number)?;
        match ticket.state {
            State::Starting { .. } | State::Cloned => Ok(ticket),
            _ => Err(Refusal::new(Errno::INVAL, format!("ticket {number} has not been cloned"))),
        }
    }
}

fn fail(vm: &mut Vm, reason: &str) {
    for life in &mut vm.workers {
        if *life == Life::Alive {
            *life = Life::Failed(reason.to_owned());
        }
    }
}

fn refuse<R, M>(reply: R, errno: Errno, message: impl Into<String>) -> Action<R, M> {
    Action::Answer(reply, Answer::Error(Refusal::new(errno, message)))
}

fn drained<R, M>(reply: R, number: u64) -> Action<R, M> {
    let text = format!("ticket {number}: the worker has ended and nothing of it is left");
    refuse(reply, Errno::PIPE, text)
}
