//! A WebSocket to the daemon, cut in two so that neither direction can hold up the other.

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::http::header::AUTHORIZATION;
use tokio_tungstenite::tungstenite::{self, Message};

use super::{Client, QUICK, Stream, http};

/// One message from the daemon.
#[derive(Debug)]
pub(crate) enum Incoming {
    Text(String),
    Binary(Bytes),
}

#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) tx: Sender,
    pub(crate) rx: Receiver,
}

#[derive(Debug)]
pub(crate) struct Sender(SplitSink<WebSocketStream<Stream>, Message>);

#[derive(Debug)]
pub(crate) struct Receiver(SplitStream<WebSocketStream<Stream>>);

impl Client<'_> {
    pub(crate) async fn open_socket(&self, path: &str) -> anyhow::Result<Socket> {
        let url = format!("ws://{}{path}", http::host(self.global));
        let mut request = url.into_client_request().context("make the request")?;
        if let Some(token) = &self.global.token {
            let value = HeaderValue::try_from(format!("Bearer {token}"))?;
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let stream = super::connect(&self.global.endpoint)
            .await
            .map_err(|error| http::unreachable(self.global, error.into_io()))?;
        let opening = timeout(QUICK, tokio_tungstenite::client_async(request, stream));
        match opening.await {
            Ok(Ok((socket, _))) => {
                self.global.printer.detail(&format!("GET {path}: WebSocket opened"));
                let (tx, rx) = socket.split();
                Ok(Socket { tx: Sender(tx), rx: Receiver(rx) })
            }
            Ok(Err(tungstenite::Error::Http(response))) => {
                let body = response.body().as_deref().unwrap_or_default();
                Err(http::api_error(response.status(), body).into())
            }
            Ok(Err(error)) => Err(error)
                .with_context(|| format!("the daemon at {} does not reply", self.global.endpoint)),
            Err(_) => Err(anyhow!("GET {path}: no reply within {} s", QUICK.as_secs())),
        }
    }
}

impl Sender {
    /// Fails once the other side has closed; the receiver then knows why.
    pub(crate) async fn text(&mut self, text: String) -> anyhow::Result<()> {
        self.0.send(Message::text(text)).await.context("send to the daemon")
    }

    pub(crate) async fn binary(&mut self, bytes: Bytes) -> anyhow::Result<()> {
        self.0.send(Message::binary(bytes)).await.context("send to the daemon")
    }
}

impl Receiver {
    /// `None` once the other side has closed.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Incoming>> {
        loop {
            match self.0.next().await {
                None | Some(Ok(Message::Close(_))) => return Ok(None),
                Some(Ok(Message::Text(text))) => {
                    return Ok(Some(Incoming::Text(text.to_string())));
                }
                Some(Ok(Message::Binary(bytes))) => return Ok(Some(Incoming::Binary(bytes))),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                // What the end means is for the messages before it to tell.
                Some(Err(
                    tungstenite::Error::ConnectionClosed
                    | tungstenite::Error::AlreadyClosed
                    | tungstenite::Error::Protocol(ProtocolError::ResetWithoutClosingHandshake),
                )) => return Ok(None),
                Some(Err(error)) => {
                    return Err(error).context("the connection to the daemon broke");
                }
            }
        }
    }
}
