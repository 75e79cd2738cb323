//! The user's terminal: raw mode, the alternate screen, its size.
//!
//! Promises: whatever was changed is put back when its guard is dropped, and by [`restore`], which
//! `main` calls last, in case a guard sits in a task that could not be ended.

use std::io::{self, IsTerminal, Write};

use parking_lot::Mutex;
use rustix::termios::{self, OptionalActions, Termios};

#[derive(Default)]
struct Changed {
    /// The settings before raw mode.
    settings: Option<Termios>,
    screen: bool,
}

static CHANGED: Mutex<Changed> = Mutex::new(Changed { settings: None, screen: false });

const SCREEN_ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const SCREEN_LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";

/// Puts back all that was changed. Does nothing a second time.
pub(crate) fn restore() {
    let mut changed = CHANGED.lock();
    if std::mem::take(&mut changed.screen) {
        let mut stderr = io::stderr().lock();
        let _ = stderr.write_all(SCREEN_LEAVE).and_then(|()| stderr.flush());
    }
    if let Some(settings) = changed.settings.take() {
        // A terminal that is gone needs no restoring.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &settings);
    }
}

/// Keys come one by one and unechoed, Ctrl-C too.
#[derive(Debug)]
pub(crate) struct RawMode(());

impl RawMode {
    /// `None` if standard input is no terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let mut changed = CHANGED.lock();
        let before = termios::tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        changed.settings.get_or_insert(before);
        termios::tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// A screen of its own, drawn on stderr so that stdout stays data.
#[derive(Debug)]
pub(crate) struct Screen {
    _raw: RawMode,
}

impl Screen {
    /// `None` unless standard input and standard error are a terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        if !io::stderr().is_terminal() {
            return Ok(None);
        }
        let Some(raw) = RawMode::enter()? else { return Ok(None) };
        CHANGED.lock().screen = true;
        let mut stderr = io::stderr().lock();
        stderr.write_all(SCREEN_ENTER)?;
        stderr.flush()?;
        Ok(Some(Self { _raw: raw }))
    }

    /// Shows `text`, cut to the size of the terminal.
    pub(crate) fn draw(&self, text: &str) -> io::Result<()> {
        let (rows, cols) = size().unwrap_or((24, 80));
        let mut stderr = io::stderr().lock();
        stderr.write_all(frame(text, rows, cols).as_bytes())?;
        stderr.flush()
    }
}

/// Overwrites line by line and clears the rests, which does not flicker.
fn frame(text: &str, rows: u16, cols: u16) -> String {
    let mut frame = String::from("\x1b[H");
    for (i, line) in text.lines().take(usize::from(rows)).enumerate() {
        if i > 0 {
            frame.push_str("\r\n");
        }
        frame.extend(line.chars().take(usize::from(cols)));
        frame.push_str("\x1b[K");
    }
    frame.push_str("\x1b[J");
    frame
}

/// Rows and columns, if a terminal is there.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = termios::tcgetwinsize(io::stdin())
        .or_else(|_| termios::tcgetwinsize(io::stdout()))
        .or_else(|_| termios::tcgetwinsize(io::stderr()))
        .ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_never_exceeds_the_terminal() {
        assert_eq!(frame("abcdef\nx\ny\n", 2, 3), "\x1b[Habc\x1b[K\r\nx\x1b[K\x1b[J");
    }
}
