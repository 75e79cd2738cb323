//! What a VM has that has its machine: its console, the link to its agent, and who notices its end.

use std::io;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::forker::{Forker, REQUESTS_MAX};
use vmfork_guest_link::agent::{AgentLink, Inheritance, LinkOptions, MailLimits, MailRoom};
use vmfork_host::cgroup;
use vmfork_host::core::{agents, events};
use vmfork_host::vm::Vm;
use vmfork_host::vm::console::Console;
use vmfork_host::vm::machine::Machine;

/// Pieces of output that a log may lag behind before some are dropped.
const LOG_PIECES: usize = 256;

/// Console, agent link and the watch over the process, for a VM that has its machine. `inheritance`
/// in a clone.
pub fn start_channels(
    forker: &Arc<Forker>,
    vm: &Arc<Vm>,
    machine: &Arc<Machine>,
    inheritance: Option<&Inheritance>,
) -> io::Result<()> {
    let core = &forker.core;
    vm.with_lease(|lease| lease.used_by(machine.pid()));
    if let Some(cgroups) = &core.cgroups {
        let limit_bytes = cgroup::limit_bytes(vm.identity.spec().memory_bytes);
        let cgroup = cgroups.create(&vm.identity.id, limit_bytes)?;
        cgroup.add(machine.pid())?;
        vm.set_cgroup(cgroup, machine);
    }
    if let Some(serial) = machine.take_serial() {
        vm.set_console(Arc::new(Console::start(serial, Arc::clone(&vm.log))?));
    }
    if let Some(agent) = machine.take_agent().filter(|_| vm.identity.has_agent) {
        let stream = std::os::unix::net::UnixStream::from(agent);
        stream.set_nonblocking(true)?;
        let stream = tokio::net::UnixStream::from_std(stream)?;
        let (log_tx, mut log_rx) = mpsc::channel(LOG_PIECES);
        let (requests_tx, requests) = mpsc::channel(REQUESTS_MAX);
        // Only workers of a ticket send, and they send to where that is.
        let room = vm.origin.as_ref().map_or_else(MailRoom::default, |o| o.room.clone());
        let mail = MailLimits::default();
        let options = LinkOptions { log: log_tx, requests: requests_tx, mail, room };
        let link = match inheritance {
            Some(inheritance) => AgentLink::start_clone(stream, options, inheritance),
            None => AgentLink::start(stream, options),
        };
        agents::watch(core, vm, link.clone(), machine.qmp.events());
        vm.set_link(link);
        let log = Arc::clone(&vm.log);
        tokio::spawn(async move {
            while let Some(piece) = log_rx.recv().await {
                log.append(piece);
            }
        });
        forker.tickets.serve(forker, vm, requests);
    }
    events::watch(core, vm, machine);
    Ok(())
}
