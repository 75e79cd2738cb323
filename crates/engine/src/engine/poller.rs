//! What an engine's thread sleeps on: its commands, and the faults of its views.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use vmfork_policy::ViewId;

/// No view has this number.
const COMMANDS: u64 = 0;

/// Views told of in one go; the others are told of in the next.
const READY_MAX: usize = 64;

/// Rouses an engine's thread.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    pub(super) fn ring(&self) {
        let _rung = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn silence(&self) {
        let mut count = [0; 8];
        let _rung = rustix::io::read(&*self.0, &mut count);
    }
}

/// What woke the thread.
#[derive(Debug, Default)]
pub(super) struct Ready {
    pub(super) commands: bool,
    pub(super) views: Vec<ViewId>,
    /// The files that tell of their faults are not as they were: another process has tampered with
    /// them.
    pub(super) broken: Vec<ViewId>,
}

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(super) fn new(bell: &Bell) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*bell.0, EventData::new_u64(COMMANDS), EventFlags::IN)?;
        Ok(Self { epoll })
    }

    pub(super) fn add(&self, view: ViewId, faults: BorrowedFd<'_>) -> io::Result<()> {
        let data = EventData::new_u64(view.0);
        Ok(epoll::add(&self.epoll, faults, data, EventFlags::IN)?)
    }

    pub(super) fn remove(&self, faults: BorrowedFd<'_>) {
        let _removed = epoll::delete(&self.epoll, faults);
    }

    /// Sleep until something is ready, or until `timeout` is over if there is one. A signal ends it
    /// early.
    pub(super) fn wait(&self, timeout: Option<Duration>, ready: &mut Ready) -> io::Result<()> {
        ready.commands = false;
        ready.views.clear();
        ready.broken.clear();
        let mut events = [const { MaybeUninit::<Event>::uninit() }; READY_MAX];
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        let (events, _) = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(events) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        for event in events {
            let flags = event.flags;
            match event.data.u64() {
                COMMANDS => ready.commands = true,
                view if flags.intersects(EventFlags::ERR | EventFlags::HUP) => {
                    ready.broken.push(ViewId(view));
                }
                view => ready.views.push(ViewId(view)),
            }
        }
        Ok(())
    }
}
