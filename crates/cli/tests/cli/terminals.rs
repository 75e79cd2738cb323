//! On a terminal: raw mode and its end, keys, sizes, the screen of `top`, progress.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::support::{FakeDaemon, send, wait_until};

/// A terminal with somebody before it.
struct Terminal {
    keyboard: File,
    /// What a program on it uses.
    line: File,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn new() -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let path = ptsname(&keyboard, Vec::new()).unwrap();
        let line = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
        let terminal = Self { keyboard: File::from(keyboard), line, shown: Arc::default() };
        terminal.resize(40, 120);
        let (mut screen, shown) = (terminal.keyboard.try_clone().unwrap(), terminal.shown.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = screen.read(&mut buffer) {
                shown.lock().unwrap().extend_from_slice(&buffer[..len]);
            }
        });
        terminal
    }

    fn resize(&self, rows: u16, cols: u16) {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.line, size).unwrap();
    }

    fn spawn(&self, command: Command) -> Child {
        self.spawn_into(command, self.line.try_clone().unwrap().into())
    }

    /// As `vmfork … | stdout` is.
    fn spawn_into(&self, mut command: Command, stdout: Stdio) -> Child {
        command.stdin(self.line.try_clone().unwrap());
        command.stdout(stdout);
        command.stderr(self.line.try_clone().unwrap());
        command.env("TERM", "xterm").spawn().unwrap()
    }

    fn press(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).unwrap();
    }

    fn shows(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).contains(text)
    }

    /// Whether keys come one by one.
    fn is_raw(&self) -> bool {
        !tcgetattr(&self.line).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }
}

fn ends(child: &mut Child) -> Option<i32> {
    let mut code = None;
    wait_until("vmfork ends", || match child.try_wait().unwrap() {
        Some(status) => {
            code = status.code();
            true
        }
        None => false,
    });
    code
}

#[test]
fn exec_on_a_terminal_is_raw_while_it_runs_and_tells_the_size() {
    let daemon = FakeDaemon::start();
    let mut terminal = Terminal::new();
    let script = "echo ready; head -c 3 | od -c; exit 4";
    let mut child =
        terminal.spawn(daemon.command(&["exec", "-t", "web", "--", "sh", "-c", script]));
    wait_until("the program runs", || terminal.shows("ready"));
    assert!(terminal.is_raw());
    assert!(daemon.seen.has(r#""tty":{"rows":40,"cols":120,"term":"xterm"}"#));
    terminal.resize(50, 90);
    send(child.id(), Signal::WINCH);
    wait_until("the size is told", || daemon.seen.has("resize 50 90"));
    // Ctrl-C is a key, and the program's.
    terminal.press(b"a\x03b");
    assert_eq!(ends(&mut child), Some(4));
    wait_until("the keys come back", || terminal.shows("a 003   b"));
    assert!(!terminal.is_raw());
}

#[test]
fn the_terminal_is_put_back_however_the_command_ends() {
    let daemon = FakeDaemon::start();
    let terminal = Terminal::new();
    for (signal, code) in [(Signal::HUP, 129), (Signal::TERM, 143)] {
        let script = "trap '' TERM HUP; echo ready; exec sleep 60";
        terminal.shown.lock().unwrap().clear();
        let mut child = terminal.spawn(daemon.command(&["exec", "-t", "web", "sh", "-c", script]));
        wait_until("the program runs", || terminal.shows("ready") && terminal.is_raw());
        send(child.id(), signal);
        if signal == Signal::TERM {
            wait_until("the first has arrived", || daemon.seen.has("signal 15"));
            assert!(terminal.is_raw());
            send(child.id(), signal);
        }
        assert_eq!(ends(&mut child), Some(code));
        assert!(!terminal.is_raw());
    }
}

#[test]
fn a_console_passes_keys_until_the_escape() {
    let daemon = FakeDaemon::start();
    let mut terminal = Terminal::new();
    let mut child = terminal.spawn(daemon.command(&["console", "web"]));
    wait_until("it is attached", || terminal.shows("login: ") && terminal.is_raw());
    terminal.press(b"root\x03\r");
    wait_until("the keys come back", || terminal.shows("root\x03\r"));
    terminal.press(b"x\x1dy");
    assert_eq!(ends(&mut child), Some(0));
    wait_until("it says good-bye", || terminal.shows("Detached from the console of `web`"));
    assert!(!terminal.is_raw());
}

#[test]
fn the_escape_leaves_a_console_whose_output_is_not_taken() {
    let daemon = FakeDaemon::start();
    let mut terminal = Terminal::new();
    let mut child = terminal.spawn_into(daemon.command(&["console", "flood"]), Stdio::piped());
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert!(terminal.is_raw());
    let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    let _ = rustix::event::poll(&mut [], Some(&pause)); // the pipe fills
    terminal.press(b"\x1d");
    assert_eq!(ends(&mut child), Some(0));
    wait_until("it says good-bye", || terminal.shows("Detached from the console of `flood`"));
    assert!(!terminal.is_raw());
}

#[test]
fn top_has_a_screen_of_its_own_and_leaves_it_on_q_and_on_a_signal() {
    let daemon = FakeDaemon::start();
    let mut terminal = Terminal::new();
    for key in [true, false] {
        terminal.shown.lock().unwrap().clear();
        let mut child = terminal.spawn(daemon.command(&["top", "--interval", "100ms"]));
        wait_until("it draws", || terminal.shows("\x1b[?1049h") && terminal.shows("FAULTS/S"));
        assert!(terminal.is_raw());
        if key {
            terminal.press(b"q");
        } else {
            send(child.id(), Signal::INT);
        }
        assert_eq!(ends(&mut child), Some(if key { 0 } else { 130 }));
        wait_until("the screen is left", || terminal.shows("\x1b[?25h\x1b[?1049l"));
        assert!(!terminal.is_raw());
    }
}

#[test]
fn a_long_fork_shows_how_far_it_is_unless_told_not_to() {
    let daemon = FakeDaemon::start();
    let terminal = Terminal::new();
    let mut child = terminal.spawn(daemon.command(&["fork", "slow", "-n", "3"]));
    wait_until("the bar is there", || terminal.shows("Forking `slow`"));
    send(child.id(), Signal::INT);
    assert_eq!(ends(&mut child), Some(130));
    let terminal = Terminal::new();
    let mut quiet = daemon.command(&["fork", "web", "-n", "3"]);
    quiet.env("VMFORK_NO_PROGRESS", "1").env("NO_COLOR", "1");
    let mut child = terminal.spawn(quiet);
    assert_eq!(ends(&mut child), Some(0));
    wait_until("it is told", || terminal.shows("paused 3.4 ms"));
    assert!(!terminal.shows("\x1b["), "{:?}", terminal.shown);
}

#[test]
fn a_snapshot_that_is_waited_for_shows_how_far_it_is() {
    let daemon = FakeDaemon::start();
    let terminal = Terminal::new();
    let create = daemon.command(&["snapshot", "create", "web", "long", "--wait"]);
    let mut child = terminal.spawn(create);
    wait_until("the bar is there", || terminal.shows("42.00 MiB/100.00 MiB"));
    send(child.id(), Signal::INT);
    assert_eq!(ends(&mut child), Some(130));
    wait_until("it is told", || terminal.shows("Cancelled snapshot `long`"));
}

#[test]
fn a_terminal_is_no_place_for_a_snapshots_bytes() {
    let daemon = FakeDaemon::start();
    for (args, said) in [
        (["snapshot", "export", "warm", "-"], "standard output is a terminal"),
        (["snapshot", "import", "-", "--no-start"], "standard input is a terminal"),
    ] {
        let terminal = Terminal::new();
        let line = terminal.line.try_clone().unwrap();
        let mut child = terminal.spawn_into(daemon.command(&args), line.into());
        assert_eq!(ends(&mut child), Some(2));
        wait_until("it is told", || terminal.shows(said));
    }
}
