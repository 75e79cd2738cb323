//! The real agent as a service, and the daemon's side of its port.
//!
//! Identity is dry: its effects are files in [`Daemon::folder`].

#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vmfork_agent_proto::{
    Decoder, ForkIdentity, Frame, Kind, PAYLOAD_BYTES_MAX, PROTOCOL_VERSION, TicketClone, ToGuest,
    ToHost, WINDOW_BYTES, encode, encode_message,
};

/// No test waits longer for one thing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) agent: Child,
    listener: UnixListener,
    stream: UnixStream,
    decoder: Decoder,
    frames: VecDeque<Frame>,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// Start an agent and accept its connection.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("temp dir");
        let socket = folder.path().join("port");
        let listener = UnixListener::bind(&socket).expect("bind");
        // As a shell's background job is: it ignores some signals, which its programs must not.
        let agent = Command::new("sh")
            .args(["-c", "trap '' INT QUIT 64; exec \"$0\" \"$@\""])
            .args([env!("CARGO_BIN_EXE_vmfork-agent"), "serve"])
            .args(["--port".as_ref(), socket.as_os_str()])
            .args(["--dry-identity".as_ref(), folder.path().as_os_str()])
            .args(["--run-dir".as_ref(), folder.path().join("run").as_os_str()])
            .args(options)
            .stdin(Stdio::null())
            .spawn()
            .expect("start the agent");
        let stream = accept(&listener);
        Self { agent, listener, stream, decoder: Decoder::new(), frames: VecDeque::new(), folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn fork_socket(&self) -> PathBuf {
        self.folder.path().join("run/fork.sock")
    }

    /// What a dry identity wrote.
    pub(crate) fn effect(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    /// The agent has closed its end; it comes again.
    pub(crate) fn accept_again(&mut self) {
        self.stream = accept(&self.listener);
        self.decoder = Decoder::new();
        self.frames.clear();
    }

    /// Drop the connection and take the agent's next one.
    pub(crate) fn reconnect(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).expect("shut down");
        self.accept_again();
    }

    pub(crate) fn send(&mut self, channel: u32, message: &ToGuest) {
        let bytes = encode_message(channel, message).expect("short");
        self.send_raw(&bytes);
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.set_write_timeout(Some(PATIENCE)).expect("set a timeout");
        self.stream.write_all(bytes).expect("the agent reads");
    }

    /// Send `bytes` up to `times` times; the agent may end the connection meanwhile.
    pub(crate) fn send_until_closed(&mut self, bytes: &[u8], times: usize) {
        for _ in 0..times {
            match self.stream.write_all(bytes) {
                Ok(()) => {}
                Err(e)
                    if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
                {
                    return;
                }
                Err(error) => panic!("write to the agent: {error}"),
            }
        }
    }

    pub(crate) fn stream(&mut self, kind: Kind, channel: u32, end: bool, bytes: &[u8]) {
        self.send_raw(&encode(kind, channel, end, bytes));
    }

    /// The next frame, or `None` if there is none within `wait`.
    pub(crate) fn frame_within(&mut self, wait: Duration) -> Option<Frame> {
        let until = Instant::now() + wait;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some(frame);
            }
            let left =
                until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.stream.set_read_timeout(Some(left)).expect("set a timeout");
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!("the agent has closed the port"),
                Ok(n) => self.decoder.push(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return None;
                }
                Err(error) => panic!("read from the agent: {error}"),
            }
            while let Some(frame) = self.decoder.next_frame().expect("frames from the agent") {
                self.frames.push_back(frame);
            }
        }
    }

    pub(crate) fn frame(&mut self) -> Frame {
        self.frame_within(PATIENCE).expect("the agent says nothing")
    }

    /// What programs print until it ends with `end`. A terminal hands out a line in parts if it
    /// is read at the wrong moment, as pipes do with what several calls wrote.
    pub(crate) fn text_until(&mut self, end: &str) -> String {
        let mut text = String::new();
        while !text.ends_with(end) {
            let frame = self.frame();
            assert!(matches!(frame.kind, Kind::Stdout | Kind::Stderr), "{frame:?} after {text:?}");
            text += &String::from_utf8_lossy(&frame.payload);
        }
        text
    }

    pub(crate) fn message(&mut self) -> (u32, ToHost) {
        let frame = self.frame();
        assert_eq!(frame.kind, Kind::Message, "a message, not {frame:?}");
        (frame.channel, serde_json::from_slice(&frame.payload).expect("a message"))
    }

    /// The next message; it must be on this channel.
    pub(crate) fn message_on(&mut self, channel: u32) -> ToHost {
        let (on, message) = self.message();
        assert_eq!(on, channel, "{message:?}");
        message
    }

    pub(crate) fn expect_end_of_port(&mut self) {
        self.stream.set_read_timeout(Some(PATIENCE)).expect("set a timeout");
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }

    /// Start a program; `Started` is checked. What others say meanwhile is kept.
    pub(crate) fn exec(&mut self, channel: u32, argv: &[&str]) {
        self.send(channel, &exec(argv));
        let mut others = Vec::new();
        let first = loop {
            let frame = self.frame();
            if frame.channel == channel {
                break frame;
            }
            others.push(frame);
        };
        for frame in others.into_iter().rev() {
            self.frames.push_front(frame);
        }
        self.frames.push_front(first);
        assert!(matches!(self.message_on(channel), ToHost::Started { .. }));
    }

    /// Collect what a started program says until it has exited, crediting all.
    pub(crate) fn finish(&mut self, channel: u32) -> Finished {
        let mut out = Finished::default();
        let mut ended = 0;
        loop {
            let frame = self.frame();
            assert_eq!(frame.channel, channel, "{frame:?}");
            match frame.kind {
                Kind::Stdout | Kind::Stderr => {
                    assert!(frame.payload.len() <= PAYLOAD_BYTES_MAX);
                    let stdout = frame.kind == Kind::Stdout;
                    let to = if stdout { &mut out.stdout } else { &mut out.stderr };
                    to.extend_from_slice(&frame.payload);
                    ended += u32::from(frame.end);
                    let bytes = u32::try_from(frame.payload.len()).expect("short");
                    self.send(channel, &ToGuest::Credit { kind: frame.kind as u8, bytes });
                }
                _ => match serde_json::from_slice(&frame.payload).expect("a message") {
                    ToHost::Exited { exit_code, signal } => {
                        out.exit_code = exit_code;
                        out.signal = signal;
                        out.streams_ended = ended;
                        return out;
                    }
                    ToHost::Credit { .. } => {}
                    other => panic!("{other:?}"),
                },
            }
        }
    }

    /// Prepare, and wait until the agent is quiet.
    pub(crate) fn prepare(&mut self, fork: u64) {
        self.send(0, &ToGuest::Prepare { fork });
        while self.message() != (0, ToHost::Prepared { fork }) {}
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("non-blocking");
    let until = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).expect("blocking");
                return stream;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                pause(Duration::from_millis(2));
            }
            Err(error) => panic!("no agent: {error}"),
        }
    }
}

/// Let other processes run.
pub(crate) fn pause(time: Duration) {
    std::thread::park_timeout(time);
}

/// Wait until `condition` holds.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "{what}");
        pause(Duration::from_millis(5));
    }
}

/// What a program said and how it ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Finished {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit_code: i32,
    pub(crate) signal: Option<i32>,
    pub(crate) streams_ended: u32,
}

impl Finished {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub(crate) fn exec(argv: &[&str]) -> ToGuest {
    ToGuest::Exec {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        env: Vec::new(),
        cwd: None,
        user: None,
        tty: None,
    }
}

pub(crate) fn sh(script: &str) -> ToGuest {
    exec(&["sh", "-c", script])
}

pub(crate) fn hello() -> ToGuest {
    ToGuest::Hello {
        protocol: PROTOCOL_VERSION,
        name: "web".to_owned(),
        machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
        entropy: "5a".repeat(64),
        realtime_ns: 1_234_567_890_123_456_789,
    }
}

pub(crate) fn identity(fork: u64, vmid: u32, ticket: Option<TicketClone>) -> ForkIdentity {
    ForkIdentity {
        fork,
        vmid,
        name: format!("web.{vmid}"),
        machine_id: format!("{vmid:032x}"),
        entropy: format!("{vmid:02x}").repeat(64),
        realtime_ns: 2_000_000_000_000_000_000,
        ticket,
    }
}

/// Whole windows, for senders that keep to them.
pub(crate) const WINDOW: usize = WINDOW_BYTES as usize;
