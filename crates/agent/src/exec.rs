//! One program that the daemon runs in the guest: its process, its streams, its end.
//!
//! ```text
//!   stdin frames ──► Sink ──► pipe or terminal ──► program ──► pipes or terminal ──► frames
//!                     └─► credit                                   (only with window and room)
//! ```
//!
//! The program leads a session of its own, hence a process group of its own, which gets its
//! signals. It has ended for the daemon when its process has been reaped and its outputs have
//! ended. An output that a background process holds open counts as ended when it has been silent
//! for [`LINGER`]. It is still read then, and dropped, so that the process does not die of SIGPIPE.
//!
//! No decisions about channels here: [`crate::server`] says which one a program has.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, SpecialCodeIndex, Winsize, tcgetattr, tcgetpgrp, tcsetwinsize};
use vmfork_agent_proto::{Kind, RequestError, TerminalSize, ToHost};

use crate::pipe::{Overrun, Sink, Window};
use crate::port::Port;
use crate::sys::{self, ChildSetup};
use crate::user;

/// How long an output may be silent after its program's end before it counts as ended.
const LINGER: Duration = Duration::from_millis(200);
/// Payload of one output frame: with its header what a virtio port takes in one write.
pub(crate) const CHUNK_BYTES: usize = 32 * 1024 - 12;
/// What programs find their commands by, if the daemon says nothing else.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What to run: the fields of `ToGuest::Exec`.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) cwd: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) tty: Option<TerminalSize>,
}

/// What the agent itself has that its programs must not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inheritance {
    pub(crate) reset_oom: bool,
    pub(crate) file_limit: Option<libc::rlimit>,
}

/// A program's output, towards the daemon.
#[derive(Debug)]
struct Output {
    kind: Kind,
    fd: Option<OwnedFd>,
    window: Window,
    end_sent: bool,
    last_read: Instant,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) exit_code: i32,
    pub(crate) signal: Option<i32>,
}

#[derive(Debug)]
pub(crate) struct Exec {
    pid: i32,
    input: Sink,
    outputs: Vec<Output>,
    terminal: bool,
    ended: Option<(Ended, Instant)>,
}

/// Which of a program's descriptors is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Input,
    Output(usize),
}

fn failed(errno: i32, message: String) -> RequestError {
    RequestError { errno, message }
}

fn errno(what: &str) -> impl Fn(Errno) -> RequestError {
    let what = what.to_owned();
    move |errno| failed(errno.raw_os_error(), format!("{what}: {errno}"))
}

/// The child's three descriptors, and the agent's ends of them.
struct Streams {
    child: [OwnedFd; 3],
    input: OwnedFd,
    outputs: Vec<(Kind, OwnedFd)>,
}

impl Streams {
    fn pipes() -> Result<Self, Errno> {
        let ours = |fd: &OwnedFd| rustix::io::ioctl_fionbio(fd, true);
        let (stdin, input) = pipe_with(PipeFlags::CLOEXEC)?;
        let (output, stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (error, stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        ours(&input)?;
        ours(&output)?;
        ours(&error)?;
        Ok(Self {
            child: [stdin, stdout, stderr],
            input,
            outputs: vec![(Kind::Stdout, output), (Kind::Stderr, error)],
        })
    }

    fn terminal(size: &TerminalSize) -> Result<Self, Errno> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        unlockpt(&master)?;
        tcsetwinsize(&master, winsize(size.rows, size.cols))?;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        let dup = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        let child = [dup(&slave)?, dup(&slave)?, slave];
        Ok(Self { child, input: dup(&master)?, outputs: vec![(Kind::Stdout, master)] })
    }
}

fn winsize(rows: u16, cols: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Exec {
    /// Start the program.
    ///
    /// # Errors
    /// The errno of what failed: `ENOENT` (no such program, folder or user), `EACCES`, `EMFILE`,
    /// `EAGAIN` (no more processes), …
    pub(crate) fn spawn(
        spec: &Spec,
        inherit: Inheritance,
        now: Instant,
    ) -> Result<Self, RequestError> {
        let Some(program) = spec.argv.first().filter(|program| !program.is_empty()) else {
            return Err(failed(libc::EINVAL, "no program to run".to_owned()));
        };
        let user = match &spec.user {
            None => None,
            Some(name) => Some(user::look_up(name).map_err(|text| failed(libc::ENOENT, text))?),
        };
        let home = user.as_ref().map_or("/root", |user| user.home.as_str());
        let cwd = match &spec.cwd {
            Some(cwd) => cwd.as_str(),
            None if std::path::Path::new(home).is_dir() => home,
            None => "/",
        };
        let nul = |_| failed(libc::EINVAL, "an argument holds a NUL byte".to_owned());
        let setup = ChildSetup {
            terminal: spec.tty.is_some(),
            reset_oom: inherit.reset_oom,
            file_limit: inherit.file_limit,
            ids: user.as_ref().map(|user| (user.uid, user.gid, user.groups.clone())),
            cwd: CString::new(cwd).map_err(nul)?,
        };
        let streams = match &spec.tty {
            None => Streams::pipes().map_err(errno("make pipes"))?,
            Some(size) => Streams::terminal(size).map_err(errno("make a terminal"))?,
        };
        let name = user.as_ref().map_or("root", |user| user.name.as_str());
        let mut command = Command::new(program);
        command.args(spec.argv.get(1..).unwrap_or_default()).env_clear();
        command.envs([("PATH", PATH), ("HOME", home), ("USER", name), ("LOGNAME", name)]);
        command.env("LANG", "C.UTF-8");
        command.env("SHELL", user.as_ref().map_or("/bin/sh", |user| user.shell.as_str()));
        if let Some(size) = &spec.tty {
            command.env("TERM", if size.term.is_empty() { "linux" } else { &size.term });
        }
        command.envs(
            spec.env.iter().filter(|(key, _)| !key.is_empty() && !key.contains('=')).cloned(),
        );
        let [stdin, stdout, stderr] = streams.child;
        command.stdin(Stdio::from(stdin)).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
        // SAFETY: `apply` only makes system calls; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(move || setup.apply()) };
        let child = command.spawn().map_err(|error| {
            let number = error.raw_os_error().unwrap_or(libc::EINVAL);
            failed(number, format!("run `{program}` in {cwd}: {error}"))
        })?;
        let output = |(kind, fd)| Output {
            kind,
            fd: Some(fd),
            window: Window::full(),
            end_sent: false,
            last_read: now,
        };
        Ok(Self {
            pid: i32::try_from(child.id()).unwrap_or(0),
            input: Sink::new(Some(streams.input)),
            outputs: streams.outputs.into_iter().map(output).collect(),
            terminal: spec.tty.is_some(),
            ended: None,
        })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// The descriptors to poll; `room`: whether outputs may be read. An output without window is
    /// left out, since its hang-up would be reported again and again.
    pub(crate) fn interest(
        &self,
        room: bool,
    ) -> impl Iterator<Item = (Part, BorrowedFd<'_>, bool)> {
        let input = self.input.fd().filter(|_| self.input.wants_to_write());
        let outputs = self.outputs.iter().enumerate().filter_map(move |(index, output)| {
            let fd = output.fd.as_ref().filter(|_| room && output.window.left() > 0)?;
            Some((Part::Output(index), fd.as_fd(), false))
        });
        input.map(|fd| (Part::Input, fd, true)).into_iter().chain(outputs)
    }

    /// Serve a ready descriptor.
    pub(crate) fn serve(
        &mut self,
        part: Part,
        channel: u32,
        port: &mut Port,
        scratch: &mut [u8],
        now: Instant,
    ) {
        match part {
            Part::Input => self.write_input(channel, port),
            Part::Output(index) => {
                if let Some(output) = self.outputs.get_mut(index) {
                    output.read(channel, port, scratch, now);
                }
            }
        }
    }

    /// Bytes for standard input, `end` with the last.
    ///
    /// # Errors
    /// [`Overrun`].
    pub(crate) fn push_input(
        &mut self,
        bytes: &[u8],
        end: bool,
        channel: u32,
        port: &mut Port,
    ) -> Result<(), Overrun> {
        self.input.push(bytes)?;
        if end {
            self.input.end();
        }
        self.write_input(channel, port);
        Ok(())
    }

    fn write_input(&mut self, channel: u32, port: &mut Port) {
        let bytes = self.input.write();
        if bytes > 0 {
            port.send(channel, &ToHost::Credit { kind: Kind::Stdin as u8, bytes });
        }
        if self.input.is_finished() {
            if self.terminal {
                self.type_end_of_file();
            }
            self.input.close();
        }
    }

    /// On a terminal in line mode the end of input is a character.
    fn type_end_of_file(&self) {
        let Some(fd) = self.input.fd() else { return };
        if let Ok(modes) = tcgetattr(fd)
            && modes.local_modes.contains(LocalModes::ICANON)
        {
            let _ = rustix::io::write(fd, &[modes.special_codes[SpecialCodeIndex::VEOF]]);
        }
    }

    pub(crate) fn credit(&mut self, kind: u8, bytes: u32) {
        for output in self.outputs.iter_mut().filter(|output| output.kind as u8 == kind) {
            output.window.credit(bytes);
        }
    }

    /// To the program's process group; with a terminal, to its foreground one.
    pub(crate) fn signal(&self, signal: i32) {
        if signal <= 0 || self.has_ended() {
            return;
        }
        let master =
            self.outputs.first().and_then(|output| output.fd.as_ref()).filter(|_| self.terminal);
        let group = master
            .and_then(|fd| tcgetpgrp(fd).ok())
            .map_or(self.pid, |group| group.as_raw_nonzero().get());
        // No such process: it has ended, which its reaping will say.
        let _ = sys::kill(-group, signal);
    }

    pub(crate) fn resize(&self, rows: u16, cols: u16) {
        if let Some(fd) = self.outputs.first().and_then(|output| output.fd.as_ref())
            && self.terminal
        {
            let _ = tcsetwinsize(fd, winsize(rows, cols));
        }
    }

    /// Its process was reaped.
    pub(crate) fn reaped(&mut self, ended: Ended, now: Instant) {
        self.ended = Some((ended, now));
    }

    /// In a clone: no input will come any more, and the windows are those of another daemon side.
    pub(crate) fn become_clone(&mut self) {
        if self.terminal {
            self.input.close();
        } else {
            self.input.end();
            if self.input.is_finished() {
                self.input.close();
            }
        }
        for output in &mut self.outputs {
            output.window = Window::full();
        }
    }

    /// When [`Exec::finish`] will give up waiting for a silent output.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let (_, at) = self.ended?;
        self.outputs
            .iter()
            .filter(|output| !output.end_sent && output.window.left() > 0)
            .map(|output| output.last_read.max(at) + LINGER)
            .min()
    }

    /// Once the process is reaped and the outputs have ended: tell the daemon. Returns whether that
    /// is so; [`Exec::into_leftovers`] is next then.
    pub(crate) fn finish(&mut self, channel: u32, port: &mut Port, now: Instant) -> bool {
        let Some((ended, at)) = self.ended else { return false };
        for output in &mut self.outputs {
            let silent = now >= output.last_read.max(at) + LINGER && output.window.left() > 0;
            if !output.end_sent && silent {
                output.send_end(channel, port);
            }
        }
        let done = self.outputs.iter().all(|output| output.end_sent);
        if done {
            let Ended { exit_code, signal } = ended;
            port.send(channel, &ToHost::Exited { exit_code, signal });
        }
        done
    }

    /// Outputs that others still hold open.
    pub(crate) fn into_leftovers(self) -> impl Iterator<Item = OwnedFd> {
        let terminal = self.terminal;
        self.outputs.into_iter().filter_map(|output| output.fd).filter(move |_| !terminal)
    }
}

impl Output {
    fn read(&mut self, channel: u32, port: &mut Port, scratch: &mut [u8], now: Instant) {
        let Some(fd) = &self.fd else { return };
        let bytes = CHUNK_BYTES.min(self.window.left()).min(scratch.len());
        let Some(room) = scratch.get_mut(..bytes).filter(|room| !room.is_empty()) else { return };
        match rustix::io::read(fd, &mut *room) {
            Ok(n) if n > 0 => {
                self.window.spend(n);
                self.last_read = now;
                if !self.end_sent {
                    port.send_stream(self.kind, channel, false, room.get(..n).unwrap_or_default());
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The end; of a terminal it is EIO.
            Ok(_) | Err(_) => {
                self.fd = None;
                self.send_end(channel, port);
            }
        }
    }

    fn send_end(&mut self, channel: u32, port: &mut Port) {
        if !self.end_sent {
            self.end_sent = true;
            port.send_stream(self.kind, channel, true, &[]);
        }
    }
}
