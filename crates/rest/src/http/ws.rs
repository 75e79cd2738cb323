//! What both WebSockets have in common.

use std::time::Duration;

use axum::Error;
use axum::body::Bytes;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::error::{ApiError, bad_request};

pub(super) type Sink = SplitSink<WebSocket, Message>;
pub(super) type Stream = SplitStream<WebSocket>;

/// Most bytes of one message from a client.
const MESSAGE_BYTES_MAX: usize = 256 * 1024;
/// A ping keeps proxies from closing an idle connection, and its failure shows that a client is gone
/// whose messages are not being read. No pong is insisted on: a client that is suspended, or
/// whose reader pauses, is not gone.
const PING_EVERY: Duration = Duration::from_secs(15);
/// How long to wait for the client's half of the closing handshake.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// How a request comes: `Err` if it wants no WebSocket.
pub(super) type Upgrade = Result<WebSocketUpgrade, WebSocketUpgradeRejection>;

pub(super) fn accept(upgrade: Upgrade) -> Result<WebSocketUpgrade, ApiError> {
    match upgrade {
        Ok(upgrade) => {
            Ok(upgrade.max_message_size(MESSAGE_BYTES_MAX).max_frame_size(MESSAGE_BYTES_MAX))
        }
        Err(rejection) => Err(bad_request("this route is a WebSocket")
            .cause(rejection.body_text())
            .remedy("connect with a WebSocket client, or use `vmfork`")
            .into()),
    }
}

pub(super) fn pings() -> Interval {
    let mut pings = interval(PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings.reset();
    pings
}

pub(super) async fn ping(sink: &mut Sink) -> Result<(), Error> {
    sink.send(Message::Ping(Bytes::new())).await
}

/// Close in good order: what was sent last must reach the client, so its side is read until it
/// closes, too (an early close would reset the connection over unread bytes).
pub(super) async fn close(mut sink: Sink, mut stream: Stream, code: u16, reason: &'static str) {
    let frame = CloseFrame { code, reason: reason.into() };
    let handshake = async {
        sink.send(Message::Close(Some(frame))).await?;
        while let Some(message) = stream.next().await {
            message?;
        }
        Ok::<(), Error>(())
    };
    // A client that does not take part is gone, or soon is.
    let _ = timeout(CLOSE_WAIT, handshake).await;
}

pub(super) const DONE: u16 = close_code::NORMAL;
pub(super) const GOING_AWAY: u16 = close_code::AWAY;
