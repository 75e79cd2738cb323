//! The agent at work: one thread, one `poll`, every request of the daemon.
//!
//! ```text
//!            Prepare                  Prepared written
//!   Serving ─────────► Quiescing ─────────────────────► Quiet
//!      ▲                   │ 30 s                         │ Continue, Identity, 30 s
//!      └───────────────────┴──────────────────────────────┘
//! ```
//!
//! From `Prepare` on no program is read and no file transfer continues, so what waits for the port
//! is short. `Prepared` goes out behind it, then nothing at all. In a clone `Identity` is applied,
//! the inherited channels are cut from the parent's daemon side, and `Confirmed` is written. Only
//! then does the program that called `sf_clone` get its answer.
//!
//! Promises: the loop never blocks on a program, a file of odd kind or the host. What a peer may
//! make it hold is bounded. Bad frames cost the connection, not the agent.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{WaitOptions, wait};
use vmfork_agent_proto::{
    ForkIdentity, Frame, Kind, PROTOCOL_VERSION, RequestError, ToGuest, ToHost,
};

use crate::console::log;
use crate::exec::{Ended, Exec, Inheritance, Part, Spec};
use crate::firstboot::Firstboot;
use crate::leftovers::Leftovers;
use crate::local::Local;
use crate::machine::{Basics, Machine};
use crate::options::Options;
use crate::pipe::Overrun;
use crate::port::{Lost, Port};
use crate::sys;
use crate::transfer::{Incoming, Outgoing};

/// Most channels that the daemon may have open.
const CHANNELS_MAX: usize = 1024;
/// Open files that [`CHANNELS_MAX`] channels and the connections may need.
const FILES_MAX: u64 = 8192;

/// A fork that is under way.
#[derive(Debug)]
struct Quiesce {
    fork: u64,
    until: Instant,
}

/// Why the agent stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The daemon asked, or the signals of `poweroff(8)` to PID 1.
    Poweroff,
    Reboot,
    /// SIGTERM to a service.
    Terminated,
}

/// Something that `poll` found ready.
#[derive(Debug, Clone, Copy)]
enum Token {
    Port,
    Signals,
    Listener,
    Exec(u32, Part),
    Local(u64),
    Leftover(u64),
}

#[derive(Debug)]
pub(crate) struct Server {
    is_init: bool,
    machine: Machine,
    port: Port,
    signals: OwnedFd,
    local: Local,
    inherit: Inheritance,
    execs: BTreeMap<u32, Exec>,
    outgoing: BTreeMap<u32, Outgoing>,
    incoming: BTreeMap<u32, Incoming>,
    leftovers: Leftovers,
    quiesce: Option<Quiesce>,
    fork_limit: Duration,
    /// The daemon has been connected since the last [`Server::disconnected`].
    has_session: bool,
    /// The daemon has had an answer to its `Hello`.
    has_greeted: bool,
    firstboot: Firstboot,
    scratch: Vec<u8>,
    stop: Option<Stop>,
}

impl Server {
    /// # Errors
    /// No folder or socket for the fork API, or no signal descriptor.
    pub(crate) fn new(options: Options, is_init: bool) -> io::Result<Self> {
        std::fs::create_dir_all(&options.run_dir)?;
        let local = Local::listen(&options.run_dir.join("fork.sock"))?;
        let machine = Machine::new(options.effects, options.run_dir);
        let signals = [
            libc::SIGCHLD,
            libc::SIGTERM,
            libc::SIGINT,
            libc::SIGUSR1,
            libc::SIGUSR2,
            // Only so that writing too much to a file is an error and not the end.
            libc::SIGXFSZ,
        ];
        let reset_oom =
            machine.is_real() && std::fs::write("/proc/self/oom_score_adj", "-1000").is_ok();
        Ok(Self {
            is_init,
            machine,
            port: Port::new(options.port),
            signals: sys::signal_fd(&signals)?,
            local,
            inherit: Inheritance { reset_oom, file_limit: sys::raise_file_limit(FILES_MAX).ok() },
            execs: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            leftovers: Leftovers::default(),
            quiesce: None,
            fork_limit: options.fork_limit,
            has_session: false,
            has_greeted: false,
            firstboot: Firstboot::None,
            scratch: vec![0; 32 * 1024],
            stop: None,
        })
    }

    /// Start the image's first-boot command, if there is one. The host is told when it has ended.
    pub(crate) fn run_firstboot(&mut self, program: &Path) {
        self.firstboot = Firstboot::start(program, self.inherit);
    }

    /// Serve until told to stop.
    pub(crate) fn run(&mut self) -> Stop {
        let mut ready = Vec::new();
        loop {
            self.port.refresh(Instant::now(), self.quiesce.is_some());
            self.carry_files_on();
            if let Err(lost) = self.port.flush() {
                self.disconnected(&lost);
            }
            if let Some(stop) = self.stop {
                return stop;
            }
            self.wait(&mut ready);
            let now = Instant::now();
            for (token, flags) in ready.drain(..) {
                if let Err(lost) = self.serve(token, flags, now) {
                    self.disconnected(&lost);
                }
            }
            self.tick(now);
        }
    }

    /// Streams towards the daemon may be carried on.
    fn has_room(&self) -> bool {
        self.quiesce.is_none() && self.port.is_connected() && self.port.has_room()
    }

    /// Wait for something to do; what is found goes to `ready`.
    fn wait(&self, ready: &mut Vec<(Token, PollFlags)>) {
        let room = self.has_room();
        let timeout = self.deadline(room).map(timeout_until);
        let mut set = PollSet::default();
        if let Some((fd, flags)) = self.port.interest() {
            set.add(Token::Port, fd, flags);
        }
        set.add(Token::Signals, self.signals.as_fd(), PollFlags::IN);
        if self.quiesce.is_none() {
            self.add_programs(room, &mut set);
        }
        // EINTR: no signal has a handler. Anything else (ENOMEM): the next round tries again.
        if poll(&mut set.fds, timeout.as_ref()).is_ok() {
            let found = set.tokens.iter().zip(&set.fds).filter(|(_, fd)| !fd.revents().is_empty());
            ready.extend(found.map(|(token, fd)| (*token, fd.revents())));
        }
    }

    fn add_programs<'a>(&'a self, room: bool, set: &mut PollSet<'a>) {
        if let Some(fd) = self.local.listener() {
            set.add(Token::Listener, fd, PollFlags::IN);
        }
        for (id, fd, flags) in self.local.interest(room) {
            set.add(Token::Local(id), fd, flags);
        }
        for (id, fd) in self.leftovers.fds() {
            set.add(Token::Leftover(id), fd, PollFlags::IN);
        }
        for (channel, exec) in &self.execs {
            for (part, fd, write) in exec.interest(room) {
                let flags = if write { PollFlags::OUT } else { PollFlags::IN };
                set.add(Token::Exec(*channel, part), fd, flags);
            }
        }
    }

    /// When something is due at the latest.
    fn deadline(&self, room: bool) -> Option<Instant> {
        let mut all = vec![self.port.deadline(), self.leftovers.deadline()];
        if let Some(quiesce) = &self.quiesce {
            all.push(Some(quiesce.until));
        } else {
            all.push(self.local.deadline());
            all.extend(self.execs.values().map(Exec::deadline));
            if room && self.outgoing.values().any(Outgoing::is_ready) {
                all.push(Some(Instant::now()));
            }
        }
        all.into_iter().flatten().min()
    }

    fn serve(&mut self, token: Token, flags: PollFlags, now: Instant) -> Result<(), Lost> {
        // A `Prepare` in the same batch: programs are found ready again afterwards.
        if self.quiesce.is_some() && !matches!(token, Token::Port | Token::Signals) {
            return Ok(());
        }
        match token {
            Token::Port => self.serve_port(flags, now)?,
            Token::Signals => {
                while let Some(signal) = sys::next_signal(self.signals.as_fd()) {
                    self.on_signal(signal, now);
                }
            }
            Token::Listener => self.local.accept(now),
            Token::Local(id) => {
                let hung = flags.intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR);
                self.local.serve(id, hung, &mut self.port, &mut self.scratch);
            }
            Token::Leftover(id) => self.leftovers.drain(id, &mut self.scratch),
            Token::Exec(channel, part) => {
                if let Some(exec) = self.execs.get_mut(&channel) {
                    exec.serve(part, channel, &mut self.port, &mut self.scratch, now);
                }
            }
        }
        Ok(())
    }

    fn serve_port(&mut self, flags: PollFlags, now: Instant) -> Result<(), Lost> {
        if !self.port.is_connected() {
            return Ok(()); // Its edge; `refresh` is next.
        }
        if flags.contains(PollFlags::IN) {
            let mut frames = Vec::new();
            let result = self.port.read(&mut frames);
            for frame in frames {
                self.on_frame(frame, now)?;
            }
            result
        } else if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
            self.port.hang_up(now)
        } else {
            Ok(()) // Room to write: `flush` is next.
        }
    }

    fn carry_files_on(&mut self) {
        let mut done = Vec::new();
        for (channel, file) in &mut self.outgoing {
            let room = self.quiesce.is_none() && self.port.is_connected() && self.port.has_room();
            if room && file.step(*channel, &mut self.port, &mut self.scratch) {
                done.push(*channel);
            }
        }
        for channel in done {
            self.outgoing.remove(&channel);
        }
    }

    /// What is due without anybody's being ready.
    fn tick(&mut self, now: Instant) {
        if self.port.is_connected() {
            self.has_session = true;
        } else if self.has_session && self.quiesce.is_none() {
            self.disconnected(&Lost("the host has disconnected".to_owned()));
        }
        self.local.tick(now);
        self.leftovers.tick(now);
        if let Some(Quiesce { fork, .. }) = self.quiesce.take_if(|quiesce| now >= quiesce.until) {
            log!("fork {fork}: nothing heard for {:?}, going on", self.fork_limit);
            self.resume(fork);
        }
        if self.quiesce.is_none() {
            let port = &mut self.port;
            let ended = self.execs.extract_if(.., |channel, exec| exec.finish(*channel, port, now));
            for (_, exec) in ended {
                self.leftovers.add_outputs(exec.into_leftovers());
            }
        }
    }

    fn resume(&mut self, fork: u64) {
        self.port.take_back(0, &ToHost::Prepared { fork });
        self.port.release();
        self.quiesce = None;
    }

    /// The daemon has gone, and with it all channels.
    fn disconnected(&mut self, lost: &Lost) {
        if self.has_session {
            log!("{}", lost.0);
        }
        self.has_session = false;
        self.quiesce = None;
        self.port.clear();
        let now = Instant::now();
        for (_, exec) in std::mem::take(&mut self.execs) {
            self.leftovers.hang_up(&exec, now);
        }
        self.outgoing.clear();
        self.incoming.clear();
        self.local.disconnected();
    }

    fn on_signal(&mut self, signal: i32, now: Instant) {
        match (signal, self.is_init) {
            (libc::SIGCHLD, _) => self.reap(now),
            (libc::SIGUSR1 | libc::SIGUSR2, true) => self.stop = Some(Stop::Poweroff),
            (libc::SIGTERM | libc::SIGINT, true) => self.stop = Some(Stop::Reboot),
            (libc::SIGTERM | libc::SIGINT, false) => self.stop = Some(Stop::Terminated),
            _ => {}
        }
    }

    /// Collect every process that has ended, ours or (as PID 1) anybody's.
    fn reap(&mut self, now: Instant) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get();
            let signal = status.terminating_signal();
            let exit_code = signal.map_or(status.exit_status().unwrap_or(0), |number| 128 + number);
            if let Some(exec) = self.execs.values_mut().find(|e| e.pid() == pid && !e.has_ended()) {
                exec.reaped(Ended { exit_code, signal }, now);
            } else if self.firstboot.reaped(pid, exit_code) {
                // Before the host's first `Hello` the daemon does not wait, and the answer to it
                // will say so.
                if self.has_greeted && self.has_session {
                    self.say_hello();
                }
            } else {
                self.leftovers.reaped(pid);
            }
        }
    }

    fn on_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Lost> {
        let Frame { kind, channel, end, payload } = frame;
        let fits = match kind {
            Kind::Message => {
                return match serde_json::from_slice(&payload) {
                    Ok(message) => {
                        self.on_message(channel, message, now);
                        Ok(())
                    }
                    Err(error) => Err(self.port.close(&format!("the host sent nonsense: {error}"))),
                };
            }
            Kind::Stdin => match self.execs.get_mut(&channel) {
                Some(exec) => exec.push_input(&payload, end, channel, &mut self.port),
                None => Ok(()),
            },
            Kind::File => {
                self.on_file(channel, &payload, end);
                Ok(())
            }
            Kind::Data => self.local.data(channel, &payload, end, &mut self.port),
            // Streams that only the agent sends.
            Kind::Stdout | Kind::Stderr => Ok(()),
        };
        fits.map_err(|Overrun| {
            self.port.close(&format!("the host sent more on channel {channel} than its credit"))
        })
    }

    fn on_file(&mut self, channel: u32, payload: &[u8], end: bool) {
        // Unknown: frames that were on their way when the transfer failed.
        let Some(mut file) = self.incoming.remove(&channel) else { return };
        let result = file.write(payload).and_then(|()| {
            if end {
                file.finish().map(Some)
            } else {
                Ok(self.incoming.insert(channel, file).and(None))
            }
        });
        match result {
            Ok(None) => {
                let bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
                self.port.send(channel, &ToHost::Credit { kind: Kind::File as u8, bytes });
            }
            Ok(Some(bytes)) => self.port.send(channel, &ToHost::Written { bytes }),
            Err(error) => self.port.send(channel, &ToHost::Failed(error)),
        }
    }

    fn on_message(&mut self, channel: u32, message: ToGuest, now: Instant) {
        match message {
            ToGuest::Hello { protocol, name, machine_id, entropy, realtime_ns } => {
                let (name, machine_id, entropy) = (&name, &machine_id, &entropy);
                self.on_hello(protocol, Basics { name, machine_id, entropy, realtime_ns });
            }
            ToGuest::Ping { token } => self.port.send(channel, &ToHost::Pong { token }),
            ToGuest::Exec { argv, env, cwd, user, tty } => {
                let spec = Spec { argv, env, cwd, user, tty };
                let result =
                    self.may_open(channel).and_then(|()| Exec::spawn(&spec, self.inherit, now));
                self.opened(channel, result, |server, exec| {
                    let pid = u32::try_from(exec.pid()).unwrap_or(0);
                    server.execs.insert(channel, exec);
                    Some(ToHost::Started { pid })
                });
            }
            ToGuest::Signal { signal } => {
                if let Some(exec) = self.execs.get(&channel) {
                    exec.signal(signal);
                }
            }
            ToGuest::Resize { rows, cols } => {
                if let Some(exec) = self.execs.get(&channel) {
                    exec.resize(rows, cols);
                }
            }
            ToGuest::Cancel => {
                if let Some(exec) = self.execs.remove(&channel) {
                    self.leftovers.hang_up(&exec, now);
                }
                self.outgoing.remove(&channel);
                self.incoming.remove(&channel);
            }
            ToGuest::Credit { kind, bytes } => {
                if let Some(exec) = self.execs.get_mut(&channel) {
                    exec.credit(kind, bytes);
                } else if let Some(file) = self.outgoing.get_mut(&channel) {
                    file.credit(bytes);
                } else {
                    self.local.credit(channel, bytes);
                }
            }
            ToGuest::ReadFile { path } => {
                let result = self.may_open(channel).and_then(|()| Outgoing::open(&path));
                self.opened(channel, result, |server, (file, info)| {
                    server.outgoing.insert(channel, file);
                    Some(ToHost::File(info))
                });
            }
            ToGuest::WriteFile { path, mode } => {
                let result =
                    self.may_open(channel).and_then(|()| Incoming::create(&path, mode, channel));
                self.opened(channel, result, |server, file| {
                    server.incoming.insert(channel, file);
                    None
                });
            }
            ToGuest::Prepare { fork } => {
                if let Some(Quiesce { fork, .. }) = self.quiesce {
                    self.resume(fork);
                }
                self.quiesce = Some(Quiesce { fork, until: now + self.fork_limit });
                self.port.send(0, &ToHost::Prepared { fork });
                self.port.hold();
            }
            ToGuest::Continue { fork } => {
                if self.quiesce.as_ref().is_some_and(|quiesce| quiesce.fork == fork) {
                    self.resume(fork);
                }
            }
            ToGuest::Identity(identity) => self.on_identity(&identity),
            ToGuest::Ticket { .. }
            | ToGuest::Ended { .. }
            | ToGuest::Incoming(_)
            | ToGuest::Ok { .. }
            | ToGuest::Error(_) => self.local.answer(channel, &message, &mut self.port),
            ToGuest::Poweroff => self.stop = Some(Stop::Poweroff),
        }
    }

    fn on_hello(&mut self, protocol: u32, basics: Basics<'_>) {
        if protocol != PROTOCOL_VERSION {
            log!(
                "the host speaks version {protocol} of the protocol, this agent {PROTOCOL_VERSION}"
            );
        } else if let Err(error) = self.machine.boot(basics) {
            // A VM may run with the identity of its image; it is its clones that may not.
            log!("identity not applied: {error}");
        }
        self.has_greeted = true;
        self.say_hello();
    }

    fn say_hello(&mut self) {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let hello = ToHost::Hello {
            protocol: PROTOCOL_VERSION,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            cpus: u32::try_from(cpus).unwrap_or(1),
            firstboot: self.firstboot.to_host(),
            pmem_root: std::env::var_os(crate::initrd::PMEM_ROOT).is_some(),
        };
        self.port.send(0, &hello);
    }

    fn on_identity(&mut self, identity: &ForkIdentity) {
        let fork = identity.fork;
        let result = match &self.quiesce {
            Some(Quiesce { fork: other, .. }) if *other != fork => {
                Err(format!("fork {other} is under way, not {fork}"))
            }
            _ => {
                self.machine.become_clone(identity).and_then(|()| self.local.become_clone(identity))
            }
        };
        self.port.drop_held();
        self.port.release();
        match result {
            // The fork stays under way: no program is to hear of a clone that is not released.
            Err(message) => {
                log!("fork {fork}: refused: {message}");
                self.port.send(0, &ToHost::Refused { fork, message });
                self.port.hold();
            }
            Ok(answer) => {
                self.quiesce = None;
                self.outgoing.clear();
                self.incoming.clear();
                for exec in self.execs.values_mut() {
                    exec.become_clone();
                }
                self.port.send(0, &ToHost::Confirmed { fork });
                if let Err(lost) = self.port.flush() {
                    self.disconnected(&lost);
                }
                self.local.answer_clone(answer, identity.ticket.is_some(), &mut self.port);
            }
        }
    }

    /// Whether the daemon may open this channel.
    fn may_open(&self, channel: u32) -> Result<(), RequestError> {
        let open = |channel| {
            self.execs.contains_key(channel)
                || self.outgoing.contains_key(channel)
                || self.incoming.contains_key(channel)
        };
        let (errno, message) = if channel == 0 || channel % 2 == 1 {
            (libc::EINVAL, format!("channel {channel} is not one of the daemon's"))
        } else if open(&channel) {
            (libc::EEXIST, format!("channel {channel} is open already"))
        } else if self.execs.len() + self.outgoing.len() + self.incoming.len() >= CHANNELS_MAX {
            (libc::EMFILE, format!("{CHANNELS_MAX} channels are open"))
        } else {
            return Ok(());
        };
        Err(RequestError { errno, message })
    }

    fn opened<T>(
        &mut self,
        channel: u32,
        result: Result<T, RequestError>,
        keep: impl FnOnce(&mut Self, T) -> Option<ToHost>,
    ) {
        let reply = match result {
            Ok(thing) => keep(self, thing),
            Err(error) => Some(ToHost::Failed(error)),
        };
        if let Some(reply) = reply {
            self.port.send(channel, &reply);
        }
    }
}

/// Descriptors to poll and what they are.
#[derive(Default)]
struct PollSet<'a> {
    tokens: Vec<Token>,
    fds: Vec<PollFd<'a>>,
}

impl<'a> PollSet<'a> {
    fn add(&mut self, token: Token, fd: BorrowedFd<'a>, flags: PollFlags) {
        self.tokens.push(token);
        self.fds.push(PollFd::from_borrowed_fd(fd, flags));
    }
}

fn timeout_until(at: Instant) -> rustix::time::Timespec {
    let left = at.saturating_duration_since(Instant::now());
    rustix::time::Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
        tv_nsec: i64::from(left.subsec_nanos()),
    }
}
