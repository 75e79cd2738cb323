//! A WebSocket that is passed on: bytes both ways, and a last word to the client if the host behind
//! it is lost.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::{io, mem};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional};
use vmfork_api::{ErrorBody, ExecServerMessage};

/// Most bytes of a reason that a WebSocket is closed for.
const REASON_BYTES_MAX: usize = 123;
/// Close codes of RFC 6455: the server can't go on.
const SERVER_ERROR: u16 = 1011;
const TEXT: u8 = 0x81;
const CLOSE: u8 = 0x88;

/// How a WebSocket ends whose host is lost.
#[derive(Debug, Clone)]
pub(super) struct LastWord {
    pub(super) error: ErrorBody,
    /// It is a program's: its stream has a message for errors.
    pub(super) is_exec: bool,
}

impl LastWord {
    fn frames(self) -> Vec<u8> {
        let mut reason = self.error.to_string();
        while reason.len() > REASON_BYTES_MAX {
            reason.pop();
        }
        let mut frames = Vec::new();
        if self.is_exec {
            let message = ExecServerMessage::Error { error: self.error };
            frame(&mut frames, TEXT, &serde_json::to_vec(&message).unwrap_or_default());
        }
        frame(&mut frames, CLOSE, &[&SERVER_ERROR.to_be_bytes(), reason.as_bytes()].concat());
        frames
    }
}

fn frame(out: &mut Vec<u8>, kind: u8, payload: &[u8]) {
    out.push(kind);
    match u16::try_from(payload.len()) {
        Ok(len) if len < 126 => out.push(len.to_be_bytes()[1]),
        Ok(len) => {
            out.push(126);
            out.extend(len.to_be_bytes());
        }
        Err(_) => {
            out.push(127);
            out.extend((payload.len() as u64).to_be_bytes());
        }
    }
    out.extend(payload);
}

/// Pass bytes on both ways until either side ends. If the host's breaks off or `gone` is signalled,
/// the client is notified.
pub(super) async fn relay(
    client: impl AsyncRead + AsyncWrite + Unpin,
    mut host: impl AsyncRead + AsyncWrite + Unpin,
    gone: BoxFuture<'static, ()>,
    last_word: LastWord,
) {
    let mut client = Watched { stream: client, frames: Frames::default() };
    tokio::select! {
        ended = copy_bidirectional(&mut client, &mut host) => if ended.is_ok() {
            return;
        },
        () = gone => {}
    }
    if client.frames.is_between() {
        let _client_gone = client.write_all(&last_word.frames()).await;
    }
    let _client_gone = client.shutdown().await;
}

/// Where in the frames of a WebSocket's server a stream is.
#[derive(Debug, Default)]
struct Frames {
    head: Vec<u8>,
    /// Of the frame's payload.
    left: u64,
}

impl Frames {
    fn passed(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if self.left > 0 {
                let skip = usize::try_from(self.left).map_or(bytes.len(), |n| n.min(bytes.len()));
                self.left -= skip as u64;
                bytes = bytes.get(skip..).unwrap_or_default();
                continue;
            }
            self.head.push(*first);
            bytes = rest;
            if let Some(len) = payload_bytes(&self.head) {
                self.left = len;
                mem::take(&mut self.head);
            }
        }
    }

    fn is_between(&self) -> bool {
        self.head.is_empty() && self.left == 0
    }
}

/// Of the frame with this head; `None`: it has not come whole. What servers send is not masked.
fn payload_bytes(head: &[u8]) -> Option<u64> {
    match *head {
        [_, 126, a, b] => Some(u16::from_be_bytes([a, b]).into()),
        [_, 127, a, b, c, d, e, f, g, h] => Some(u64::from_be_bytes([a, b, c, d, e, f, g, h])),
        [_, len] if len < 126 => Some(len.into()),
        _ => None,
    }
}

/// A client's stream, with what has gone out to it.
struct Watched<S> {
    stream: S,
    frames: Frames,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(len)) = written {
            self.frames.passed(bytes.get(..len).unwrap_or_default());
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, duplex};
    use tokio::sync::oneshot;
    use vmfork_api::ErrorCode;

    use super::*;

    /// What the client of a program gets whose host sends this, and then is gone.
    async fn got(sent: &[u8]) -> Vec<u8> {
        let (mut client, ours) = duplex(1 << 20);
        let (theirs, mut host) = duplex(1 << 20);
        let (gone, lost) = oneshot::channel();
        let error = ErrorBody::new(ErrorCode::Host, "host `h1` is gone");
        let gone_comes = lost.map(drop).boxed();
        let word = LastWord { error, is_exec: true };
        let task = tokio::spawn(relay(ours, theirs, gone_comes, word));
        host.write_all(sent).await.expect("written");
        let mut got = vec![0; sent.len()];
        client.read_exact(&mut got).await.expect("passed on");
        gone.send(()).expect("waited for");
        client.read_to_end(&mut got).await.expect("closed");
        task.await.expect("no panic");
        got
    }

    #[tokio::test]
    async fn who_waits_for_a_program_is_told_that_its_host_is_gone() {
        let mut sent = Vec::new();
        for len in [3, 200, 70_000] {
            frame(&mut sent, 0x82, &vec![7; len]);
        }
        let got = got(&sent).await;
        let (text, close) = (&got[sent.len()..], got.windows(2).rposition(|two| two == [3, 243]));
        assert_eq!(text[0], TEXT);
        assert!(String::from_utf8_lossy(text).contains("host `h1` is gone"), "{text:?}");
        let close = close.expect("a close frame");
        assert_eq!(got[close - 2], CLOSE);
        assert_eq!(&got[close + 2..], b"host `h1` is gone");
    }

    #[tokio::test]
    async fn a_frame_that_broke_off_is_not_written_into() {
        let mut sent = Vec::new();
        frame(&mut sent, 0x82, &[7; 200]);
        sent.pop();
        assert_eq!(got(&sent).await, sent);
        assert_eq!(got(&sent[..1]).await, sent[..1]);
    }

    #[tokio::test]
    async fn a_reason_fits_into_its_frame() {
        let error = ErrorBody::new(ErrorCode::Host, "ü".repeat(300));
        let frames = LastWord { error, is_exec: false }.frames();
        assert!(frames.len() <= 127 && usize::from(frames[1]) == frames.len() - 2);
    }
}
