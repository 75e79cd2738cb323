//! Frames from a guest's agent, and to one: the agent trusts the daemon, never the other way.

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmfork_agent_proto::{
    Decoder, Frame, FrameError, Kind, TerminalSize, ToGuest, ToHost, encode, encode_message,
};

/// Frames do not depend on how their bytes arrive, and are the bytes that came in. A message that
/// is understood means the same when it is sent on.
pub fn run(data: &[u8]) {
    let (stream, reads) = crate::reads(data);
    let (frames, error) = decode(std::iter::once(stream));
    assert_eq!(decode(reads), (frames.clone(), error), "depends on how the bytes arrive");

    let again: Vec<u8> =
        frames.iter().flat_map(|f| encode(f.kind, f.channel, f.end, &f.payload)).collect();
    assert!(stream.starts_with(&again), "frames are not what came in");

    for frame in frames.iter().filter(|frame| frame.kind == Kind::Message) {
        check_message::<ToHost>(&frame.payload);
        check_message::<ToGuest>(&frame.payload);
    }
}

fn decode<'a>(reads: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Option<FrameError>) {
    let (mut decoder, mut frames) = (Decoder::new(), Vec::new());
    for read in reads {
        decoder.push(read);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.next_frame(), Err(error.clone()), "an error is for good");
                    return (frames, Some(error));
                }
            }
        }
    }
    (frames, None)
}

fn check_message<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(payload: &[u8]) {
    let Ok(message) = serde_json::from_slice::<M>(payload) else { return };
    // Escapes may make it longer than a frame can be; that is an error, not a panic.
    if encode_message(1, &message).is_ok() {
        let json = serde_json::to_vec(&message).expect("as encode_message did");
        assert_eq!(serde_json::from_slice::<M>(&json).expect("our own JSON"), message);
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let text = String::from;
    let exec = ToGuest::Exec {
        argv: vec![text("sh"), text("-c"), text("echo \u{fc}")],
        env: vec![(text("A"), text("b"))],
        cwd: Some(text("/")),
        user: None,
        tty: Some(TerminalSize { rows: 24, cols: 80, term: text("xterm") }),
    };
    let to_guest = [exec, ToGuest::Cancel, ToGuest::Credit { kind: 3, bytes: 65_536 }];
    let to_host = [
        ToHost::Hello {
            protocol: 1,
            agent_version: text("0.1.0"),
            kernel: text("6.1.0"),
            cpus: 2,
            firstboot: None,
            pmem_root: true,
        },
        ToHost::Exited { exit_code: 137, signal: Some(9) },
        ToHost::Recv { ticket: u64::MAX, vmid: None },
        ToHost::Abandon,
    ];
    let messages = to_guest.iter().map(|m| encode_message(2, m));
    let messages = messages.chain(to_host.iter().map(|m| encode_message(3, m)));
    let mut streams: Vec<Vec<u8>> = messages.map(|bytes| bytes.expect("short")).collect();
    streams.push(encode(Kind::Stdout, 2, false, b"output"));
    streams.push(encode(Kind::File, 0xffff_ffff, true, b""));
    streams.push(streams.concat());
    streams.iter().map(|stream| [&[2, 0, 40, 255], &stream[..]].concat()).collect()
}
