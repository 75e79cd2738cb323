//! Lines of QMP from a QEMU, in which a guest may have broken out.

use wire::{Decoder, Message};

// The parser alone: the crate it is in would bring tokio, and minutes of compiling, along.
#[path = "../../crates/qemu/src/qmp/wire.rs"]
#[allow(dead_code, reason = "its crate uses more of it")]
mod wire;

/// Messages do not depend on how their bytes arrive.
pub fn run(data: &[u8]) {
    let (stream, reads) = crate::reads(data);
    let whole = decode(std::iter::once(stream));
    assert_eq!(decode(reads), whole, "depends on how the bytes arrive");
    let lines = stream.split(|byte| *byte == b'\n').count();
    assert!(whole.0.len() < lines, "more messages than lines");
}

fn decode<'a>(reads: impl Iterator<Item = &'a [u8]>) -> (Vec<Message>, Option<String>) {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    for read in reads {
        decoder.push(read);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(error.to_string())),
            }
        }
    }
    (messages, None)
}

pub fn seeds() -> Vec<Vec<u8>> {
    let lines = [
        r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2"}, "capabilities": ["oob"]}}"#,
        r#"{"return": {}}"#,
        r#"{"return": {"status": "postmigrate", "singlestep": false, "running": false}}"#,
        r#"{"error": {"class": "GenericError", "desc": "There's a migration process in progress"}}"#,
        r#"{"timestamp": {"seconds": 1763757021, "microseconds": 8}, "event": "MIGRATION", "data": {"status": "completed"}}"#,
        r#"{"timestamp": {"seconds": -1}, "event": "A_NEW_ONE"}"#,
        "[1, 2.5e300, null]",
        "",
    ];
    let mut streams: Vec<String> = lines.iter().map(|line| format!("{line}\r\n")).collect();
    streams.push(streams.concat());
    streams.iter().map(|stream| [b"\x07\x00\x60\xff", stream.as_bytes()].concat()).collect()
}
