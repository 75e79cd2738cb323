//! Guests that a test plays.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_agent_proto::{Decoder, ToGuest, ToHost, encode_message};

use crate::agent::{AgentLink, GuestRequest, LinkOptions, MailLimits, MailRoom};

/// Bounds every wait.
pub const SOON: Duration = Duration::from_secs(10);

/// The guest's end of a link.
#[derive(Debug)]
pub struct Guest {
    pub stream: UnixStream,
    decoder: Decoder,
}

impl Guest {
    pub async fn say(&mut self, channel: u32, message: &ToHost) {
        let frame = encode_message(channel, message).expect("short");
        self.stream.write_all(&frame).await.expect("write");
    }

    /// The next message.
    pub async fn hear(&mut self) -> (u32, ToGuest) {
        let next = async {
            loop {
                if let Some(frame) = self.decoder.next_frame().expect("frames") {
                    let message = serde_json::from_slice(&frame.payload).expect("a message");
                    return (frame.channel, message);
                }
                let mut buffer = vec![0; 4096];
                let bytes = self.stream.read(&mut buffer).await.expect("read");
                assert_ne!(bytes, 0, "the link was closed");
                self.decoder.push(&buffer[..bytes]);
            }
        };
        timeout(SOON, next).await.expect("an answer in time")
    }
}

/// A link, its guest, and what that asks for.
pub fn link() -> (AgentLink, Guest, mpsc::Receiver<GuestRequest>) {
    let (here, there) = UnixStream::pair().expect("socketpair");
    let (log, _) = mpsc::channel(1);
    let (requests_tx, requests) = mpsc::channel(16);
    let (mail, room) = (MailLimits::default(), MailRoom::default());
    let link = AgentLink::start(here, LinkOptions { log, requests: requests_tx, mail, room });
    (link, Guest { stream: there, decoder: Decoder::new() }, requests)
}
