//! The agent's own log: lines on standard error, which is the console for PID 1 and the journal or
//! the console for a service. Nothing of it goes over the port.

use std::fmt;
use std::io::Write;

/// Write one line. A console that can't take it is no reason to stop.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let whole = format!("vmfork-agent: {text}\n");
    let _ = std::io::stderr().write_all(whole.as_bytes());
}

/// `log!("…", …)`: one line on the console.
macro_rules! log {
    ($($arg:tt)*) => { $crate::console::line(format_args!($($arg)*)) };
}
pub(crate) use log;
