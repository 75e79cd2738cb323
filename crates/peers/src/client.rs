//! Calls of other hosts' daemons: HTTP/1.1 over TLS, a connection each but for what is said again
//! and again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST, UPGRADE};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::error::{CallError, of_host};
use super::relay::{LastWord, relay};
use vmfork_rest::http::PASSED_ON;

/// How long another host may take to say something that it need not work for.
pub(crate) const WORD_WAIT: Duration = Duration::from_secs(5);
/// How long a host may take to be connected to.
const CONNECT_WAIT: Duration = Duration::from_secs(2);
/// Most bytes of an answer that is read as a whole.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// How long a host may be silent on a connection until it is asked whether it is there, how often
/// it is asked, and how many times. Together they are what a request waits for a host that has
/// vanished.
const SILENCE: Duration = Duration::from_secs(10);
const ASK_EVERY: Duration = Duration::from_secs(5);
const ASKS: u32 = 3;

/// To another host, for one request at a time.
pub(super) type Connection = SendRequest<Body>;

/// Another host, as one that can be called.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// For errors.
    pub name: String,
    /// `HOST:PORT`.
    pub address: String,
    pub server_name: ServerName<'static>,
    pub tls: Arc<ClientConfig>,
}

/// Find out that a host has vanished, which would never answer.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, ASKS)?;
    Ok(())
}

impl Peer {
    fn late(&self, wait: Duration) -> CallError {
        CallError::Late { host: self.name.clone(), seconds: wait.as_secs() }
    }

    async fn connect(&self) -> Result<Connection, CallError> {
        let failed = |source| CallError::Connect {
            host: self.name.clone(),
            address: self.address.clone(),
            source,
        };
        let connected = timeout(CONNECT_WAIT, async {
            let stream = TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            keep_alive(&stream)?;
            TlsConnector::from(Arc::clone(&self.tls))
                .connect(self.server_name.clone(), stream)
                .await
        });
        let stream = match connected.await {
            Ok(connected) => connected.map_err(failed)?,
            Err(_elapsed) => return Err(failed(io::ErrorKind::TimedOut.into())),
        };
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|source| CallError::Broken { host: self.name.clone(), source })?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to another host broke off");
            }
        });
        Ok(sender)
    }

    /// Ask for something; the answer's head has to come within `wait`.
    ///
    /// # Errors
    /// The host can't be reached, or is late.
    pub(crate) async fn send(
        &self,
        request: Request,
        wait: Duration,
    ) -> Result<Response<Incoming>, CallError> {
        let mut connection = self.connect().await?;
        self.send_over(&mut connection, request, wait).await
    }

    async fn send_over(
        &self,
        connection: &mut Connection,
        mut request: Request,
        wait: Duration,
    ) -> Result<Response<Incoming>, CallError> {
        // What is asked of a server itself has no host in its first line.
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        request.headers_mut().insert(HOST, HeaderValue::from_static("vmfork.internal"));
        match timeout(wait, connection.send_request(request)).await {
            Ok(sent) => {
                sent.map_err(|source| CallError::Broken { host: self.name.clone(), source })
            }
            Err(_elapsed) => Err(self.late(wait)),
        }
    }

    /// Ask for something, and read all of the answer.
    ///
    /// # Errors
    /// [`CallError`]; `Refused` if that is what it said.
    pub(crate) async fn call(&self, request: Request, wait: Duration) -> Result<Bytes, CallError> {
        let whole = async { self.whole(self.send(request, wait).await?).await };
        timeout(wait, whole).await.map_err(|_elapsed| self.late(wait))?
    }

    /// All of an answer.
    async fn whole(&self, response: Response<Incoming>) -> Result<Bytes, CallError> {
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| CallError::Answer {
            host: self.name.clone(),
            what: error.to_string(),
        })?;
        let body = body.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice(&body) {
            Ok(source) => Err(CallError::Refused { host: self.name.clone(), source }),
            Err(_) => Err(CallError::Answer { host: self.name.clone(), what: status.to_string() }),
        }
    }

    /// The same for JSON.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(crate) async fn ask<A: Serialize + Sync, B: DeserializeOwned>(
        &self,
        path: &str,
        ask: &A,
        wait: Duration,
    ) -> Result<B, CallError> {
        let wrong = |what: String| CallError::Answer { host: self.name.clone(), what };
        let body = serde_json::to_vec(ask).map_err(|error| wrong(error.to_string()))?;
        let answer = self.post(path, "application/json", body.into(), wait).await?;
        serde_json::from_slice(&answer).map_err(|error| wrong(error.to_string()))
    }

    /// The same for what may be said twice: over `kept`, or a new connection, which that then is.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(super) async fn ask_again<A: Serialize + Sync, B: DeserializeOwned>(
        &self,
        kept: &mut Option<Connection>,
        path: &str,
        ask: &A,
        wait: Duration,
    ) -> Result<B, CallError> {
        let wrong = |what: String| CallError::Answer { host: self.name.clone(), what };
        let body = serde_json::to_vec(ask).map_err(|error| wrong(error.to_string()))?;
        let body = Bytes::from(body);
        let request = || post(path, "application/json", body.clone());
        let answer = self.call_again(kept, request, wait).await?;
        serde_json::from_slice(&answer).map_err(|error| wrong(error.to_string()))
    }

    /// What it answers to a GET, over `kept` as with [`Peer::ask_again`].
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(super) async fn get_again(
        &self,
        kept: &mut Option<Connection>,
        path: &str,
        wait: Duration,
    ) -> Result<Bytes, CallError> {
        let request = || {
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = uri(path);
            request
        };
        self.call_again(kept, request, wait).await
    }

    async fn call_again(
        &self,
        kept: &mut Option<Connection>,
        request: impl Fn() -> Request,
        wait: Duration,
    ) -> Result<Bytes, CallError> {
        let said = async {
            // One that has ended since it was used last says nothing of the host.
            if let Some(mut connection) = kept.take()
                && let Ok(response) = self.send_over(&mut connection, request(), wait).await
            {
                return self.whole_over(connection, response, kept).await;
            }
            let mut connection = self.connect().await?;
            let response = self.send_over(&mut connection, request(), wait).await?;
            self.whole_over(connection, response, kept).await
        };
        timeout(wait, said).await.map_err(|_elapsed| self.late(wait))?
    }

    /// All of an answer. The connection is kept after a refusal, too.
    async fn whole_over(
        &self,
        connection: Connection,
        response: Response<Incoming>,
        kept: &mut Option<Connection>,
    ) -> Result<Bytes, CallError> {
        let answer = self.whole(response).await;
        if matches!(answer, Ok(_) | Err(CallError::Refused { .. })) {
            *kept = Some(connection);
        }
        answer
    }

    /// Send bytes, and read all of the answer.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(crate) async fn post(
        &self,
        path: &str,
        kind: &'static str,
        body: Bytes,
        wait: Duration,
    ) -> Result<Bytes, CallError> {
        self.call(post(path, kind, body), wait).await
    }

    /// What it answers to a GET that was passed on.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub(crate) async fn get(&self, path: &str, wait: Duration) -> Result<Bytes, CallError> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = uri(path);
        request.headers_mut().insert(PASSED_ON, HeaderValue::from_static("1"));
        self.call(request, wait).await
    }

    /// Pass a client's request on, and the answer back, also if both go over to another protocol:
    /// until `gone` comes. If the returned response is dropped, the host gives up what it does.
    ///
    /// # Errors
    /// The host can't be reached, or is gone before it has answered.
    pub(crate) async fn pass_on(
        &self,
        mut request: Request,
        mut gone: BoxFuture<'static, ()>,
    ) -> Result<Response, CallError> {
        let is_exec = request.uri().path().ends_with("/exec/stream");
        let message = format!("{} {}", request.method(), request.uri().path());
        request.headers_mut().insert(PASSED_ON, HeaderValue::from_static("1"));
        let upgrades = request.headers().contains_key(UPGRADE);
        let ours = hyper::upgrade::on(&mut request);
        let lost = CallError::Gone { host: self.name.clone() };
        // How long it takes is between the client and the host.
        let mut response = tokio::select! {
            sent = self.send(request, Duration::MAX) => sent?,
            () = &mut gone => return Err(lost),
        };
        if upgrades && response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let theirs = hyper::upgrade::on(&mut response);
            let last_word = LastWord { error: lost.to_body(message), is_exec };
            tokio::spawn(async move {
                let Ok((ours, theirs)) = tokio::try_join!(ours, theirs) else { return };
                relay(TokioIo::new(ours), TokioIo::new(theirs), gone, last_word).await;
            });
        } else if !response.status().is_success() {
            return self.refusal(response).await;
        }
        Ok(response.map(Body::new))
    }

    /// A refusal, as this host's clients can make use of it.
    async fn refusal(&self, response: Response<Incoming>) -> Result<Response, CallError> {
        let (mut parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let what = |error: &dyn std::fmt::Display| error.to_string();
        let wrong = |what| CallError::Answer { host: self.name.clone(), what };
        let mut body = body.map_err(|error| wrong(what(&error)))?.to_bytes();
        if let Ok(error) = serde_json::from_slice(&body) {
            let error = serde_json::to_vec(&of_host(&self.name, error));
            body = error.map_err(|error| wrong(what(&error)))?.into();
        }
        parts.headers.remove(CONTENT_LENGTH);
        Ok(Response::from_parts(parts, Body::from(body)))
    }
}

fn post(path: &str, kind: &'static str, body: Bytes) -> Request {
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri(path);
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    request
}

fn uri(path: &str) -> Uri {
    path.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_host_that_vanishes_is_found_out_within_half_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let stream = TcpStream::connect(address).await.expect("connected");
        keep_alive(&stream).expect("set");
        assert!(sockopt::socket_keepalive(&stream).expect("told"));
        let idle = sockopt::tcp_keepidle(&stream).expect("told");
        let every = sockopt::tcp_keepintvl(&stream).expect("told");
        let asks = sockopt::tcp_keepcnt(&stream).expect("told");
        assert!(idle + every * asks <= Duration::from_secs(30));
    }
}
