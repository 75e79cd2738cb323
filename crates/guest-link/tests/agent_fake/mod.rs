//! The guest's end of a link, played by a test.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_agent_proto::{
    Decoder, ForkIdentity, Frame, Kind, ToGuest, ToHost, encode, encode_message,
};
use vmfork_guest_link::agent::{
    AgentLink, GuestRequest, Inheritance, LinkOptions, MailLimits, MailRoom,
};

/// Bounds every wait of a test that is not about time.
pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) struct FakeAgent {
    pub(crate) stream: UnixStream,
    decoder: Decoder,
}

/// A link, what came out of it unasked, and the guest behind it.
pub(crate) struct Bench {
    pub(crate) link: AgentLink,
    pub(crate) agent: FakeAgent,
    pub(crate) log: mpsc::Receiver<Bytes>,
    pub(crate) requests: mpsc::Receiver<GuestRequest>,
}

pub(crate) fn bench() -> Bench {
    bench_with(None, MailLimits::default(), 64)
}

pub(crate) fn clone_bench(inheritance: &Inheritance) -> Bench {
    bench_with(Some(inheritance), MailLimits::default(), 64)
}

/// A clone whose workers' messages lie in `room`.
pub(crate) fn clone_bench_in(inheritance: &Inheritance, room: MailRoom) -> Bench {
    bench_in(Some(inheritance), MailLimits::default(), room, 64)
}

pub(crate) fn bench_with(
    inheritance: Option<&Inheritance>,
    mail: MailLimits,
    log_items: usize,
) -> Bench {
    bench_in(inheritance, mail, MailRoom::default(), log_items)
}

fn bench_in(
    inheritance: Option<&Inheritance>,
    mail: MailLimits,
    room: MailRoom,
    log_items: usize,
) -> Bench {
    let (here, there) = UnixStream::pair().expect("socketpair");
    let (log_tx, log) = mpsc::channel(log_items);
    let (requests_tx, requests) = mpsc::channel(4);
    let options = LinkOptions { log: log_tx, requests: requests_tx, mail, room };
    let link = match inheritance {
        None => AgentLink::start(here, options),
        Some(inheritance) => AgentLink::start_clone(here, options, inheritance),
    };
    Bench { link, agent: FakeAgent { stream: there, decoder: Decoder::new() }, log, requests }
}

pub(crate) fn identity(fork: u64, vmid: u32, workers: u32) -> ForkIdentity {
    ForkIdentity {
        fork,
        vmid,
        name: "web.1".to_owned(),
        machine_id: "0".repeat(32),
        entropy: "0".repeat(128),
        realtime_ns: 1,
        ticket: Some(vmfork_agent_proto::TicketClone { ticket: 1, workers, channel: None }),
    }
}

impl FakeAgent {
    pub(crate) async fn frame(&mut self) -> Frame {
        timeout(SOON, async {
            loop {
                if let Some(frame) = self.decoder.next_frame().expect("the daemon sends frames") {
                    return frame;
                }
                let mut buffer = vec![0; 16 * 1024];
                let bytes = self.stream.read(&mut buffer).await.expect("read");
                assert_ne!(bytes, 0, "the daemon closed the link");
                self.decoder.push(&buffer[..bytes]);
            }
        })
        .await
        .expect("a frame in time")
    }

    /// The next frame, which must be a message.
    pub(crate) async fn message(&mut self) -> (u32, ToGuest) {
        let frame = self.frame().await;
        assert_eq!(frame.kind, Kind::Message, "{frame:?}");
        (frame.channel, serde_json::from_slice(&frame.payload).expect("a message"))
    }

    /// The next message that is no credit.
    pub(crate) async fn no_credit(&mut self) -> (u32, ToGuest) {
        loop {
            let (channel, message) = self.message().await;
            if !matches!(message, ToGuest::Credit { .. }) {
                return (channel, message);
            }
        }
    }

    /// Nothing comes for a while.
    pub(crate) async fn silence(&mut self) {
        assert!(self.decoder.is_at_boundary());
        let mut buffer = [0; 256];
        let read = timeout(Duration::from_millis(80), self.stream.read(&mut buffer)).await;
        if let Ok(bytes) = read {
            panic!("{:?}", String::from_utf8_lossy(&buffer[..bytes.expect("read")]));
        }
    }

    pub(crate) async fn say(&mut self, channel: u32, message: &ToHost) {
        let frame = encode_message(channel, message).expect("short");
        self.write(&frame).await;
    }

    pub(crate) async fn stream(&mut self, kind: Kind, channel: u32, bytes: &[u8], end: bool) {
        self.write(&encode(kind, channel, end, bytes)).await;
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        timeout(SOON, self.stream.write_all(bytes)).await.expect("in time").expect("write");
    }

    /// Answer the `Exec` that comes next; its channel.
    pub(crate) async fn start_program(&mut self, pid: u32) -> u32 {
        let (channel, message) = self.no_credit().await;
        assert!(matches!(message, ToGuest::Exec { .. }), "{message:?}");
        self.say(channel, &ToHost::Started { pid }).await;
        channel
    }

    pub(crate) async fn exit_program(&mut self, channel: u32, exit_code: i32) {
        self.stream(Kind::Stdout, channel, b"", true).await;
        self.stream(Kind::Stderr, channel, b"", true).await;
        self.say(channel, &ToHost::Exited { exit_code, signal: None }).await;
    }

    /// Answer the `Prepare` that comes next; its number.
    pub(crate) async fn prepared(&mut self) -> u64 {
        match self.no_credit().await {
            (0, ToGuest::Prepare { fork }) => {
                self.say(0, &ToHost::Prepared { fork }).await;
                fork
            }
            other => panic!("{other:?}"),
        }
    }
}
