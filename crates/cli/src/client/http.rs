//! Requests and their answers.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use vmfork_api::{ErrorBody, ErrorCode};

use super::connect::Patient;
use super::{Client, QUICK, SLACK};
use crate::config::{Endpoint, Global};
use crate::failure::{ApiError, HintExt as _};

/// Largest document that the daemon may answer with. 10,000 VMs take some 5 MiB.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;

/// Names the hosts of the cluster whose part an answer lacks.
const MISSING_HOSTS: &str = "x-vmfork-missing-hosts";

const JSON: &str = "application/json";
const BYTES: &str = "application/octet-stream";

pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

/// A path with a query, percent-encoded.
#[derive(Debug, Clone)]
pub(crate) struct Query(String);

impl Query {
    /// `path` consists of route words and checked names, which need no encoding.
    pub(crate) fn new(path: impl Into<String>) -> Self {
        Self(path.into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn with(mut self, key: &str, value: &str) -> Self {
        self.0.push(if self.0.contains('?') { '&' } else { '?' });
        self.0.push_str(key);
        self.0.push('=');
        for &byte in value.as_bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                self.0.push(char::from(byte));
            } else {
                let _ = write!(self.0, "%{byte:02X}");
            }
        }
        self
    }
}

/// A response's body; dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Answer {
    response: Response<Incoming>,
    _connection: Connection,
}

/// Ends the task that drives a connection.
#[derive(Debug)]
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// The next piece of the body, `None` at its end. `bound`: how long it may take to come.
    pub(crate) async fn chunk(&mut self, bound: Option<Duration>) -> anyhow::Result<Option<Bytes>> {
        loop {
            let frame = match bound {
                None => self.response.body_mut().frame().await,
                Some(bound) => timeout(bound, self.response.body_mut().frame())
                    .await
                    .map_err(|_| anyhow!("the daemon sent no data for {} s", bound.as_secs()))?,
            };
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame
                        .context("the daemon closed the connection before the end of its reply")?;
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    async fn collect(self) -> anyhow::Result<Bytes> {
        collect(self.response.into_body()).await
    }
}

async fn collect(body: Incoming) -> anyhow::Result<Bytes> {
    let body = Limited::new(body, DOCUMENT_BYTES_MAX);
    match timeout(QUICK, body.collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) => Err(anyhow!("read the reply of the daemon: {error}")),
        Err(_) => {
            Err(anyhow!("the daemon did not complete its reply within {} s", QUICK.as_secs()))
        }
    }
}

/// The error in a reply that is one.
pub(super) async fn failed(response: Response<Incoming>) -> anyhow::Error {
    let status = response.status();
    match collect(response.into_body()).await {
        Ok(body) => api_error(status, &body).into(),
        Err(error) => error,
    }
}

impl Client<'_> {
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: Query) -> anyhow::Result<T> {
        self.call(Method::GET, path, None::<&()>, QUICK).await
    }

    /// A document with a part from each host, unparsed. Hosts without a reply are named in a
    /// warning, with the consequence `so`.
    pub(crate) async fn get_of_all(&self, path: Query, so: &str) -> anyhow::Result<Bytes> {
        let answer = self.send(Method::GET, &path, empty(), QUICK).await?;
        self.warn_of_missing(&answer, so);
        answer.collect().await
    }

    /// [`Client::post`] of what all hosts have a part in, as [`Client::get_of_all`].
    pub(crate) async fn post_to_all<T: DeserializeOwned>(
        &self,
        path: Query,
        document: &impl Serialize,
        bound: Duration,
        so: &str,
    ) -> anyhow::Result<T> {
        let body = full(serde_json::to_vec(document)?);
        let bound = bound.saturating_add(SLACK);
        let answer = self.send_as(Method::POST, &path, body, Some(JSON), bound).await?;
        self.warn_of_missing(&answer, so);
        understood(&path, &answer.collect().await?)
    }

    fn warn_of_missing(&self, answer: &Answer, so: &str) {
        if let Some(hosts) = answer.header(MISSING_HOSTS) {
            let hosts = crate::format::printable(&hosts.replace(',', ", "));
            self.global.printer.warn(&format!("no reply from {hosts}: {so}"));
        }
    }

    /// `bound`: how long the daemon may take for it by its own rules.
    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: Query,
        document: &impl Serialize,
        bound: Duration,
    ) -> anyhow::Result<T> {
        self.call(Method::POST, path, Some(document), bound.saturating_add(SLACK)).await
    }

    /// A `POST` without a body.
    pub(crate) async fn act<T: DeserializeOwned>(
        &self,
        path: Query,
        bound: Duration,
    ) -> anyhow::Result<T> {
        self.call(Method::POST, path, None::<&()>, bound.saturating_add(SLACK)).await
    }

    /// A `PUT` of a document, whose reply is another.
    pub(crate) async fn put<T: DeserializeOwned>(
        &self,
        path: Query,
        document: &impl Serialize,
    ) -> anyhow::Result<T> {
        self.call(Method::PUT, path, Some(document), QUICK).await
    }

    /// `None` if the daemon replies `not_found`.
    pub(crate) async fn find<T: DeserializeOwned>(&self, path: Query) -> anyhow::Result<Option<T>> {
        match self.get(path).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A `POST` of bytes that come as a stream. `bound`: how long the daemon may take for it, the
    /// stream included.
    pub(crate) async fn upload<T: DeserializeOwned>(
        &self,
        path: Query,
        body: Body,
        bound: Duration,
    ) -> anyhow::Result<T> {
        let answer = self.send_as(Method::POST, &path, body, Some(BYTES), bound).await?;
        understood(&path, &answer.collect().await?)
    }

    pub(crate) async fn delete(&self, path: Query) -> anyhow::Result<()> {
        let bound = QUICK.saturating_add(SLACK);
        self.send(Method::DELETE, &path, empty(), bound).await?.collect().await?;
        Ok(())
    }

    /// A `DELETE` whose reply lists what was removed.
    pub(crate) async fn remove<T: DeserializeOwned>(
        &self,
        path: Query,
        bound: Duration,
    ) -> anyhow::Result<T> {
        self.call(Method::DELETE, path, None::<&()>, bound.saturating_add(SLACK)).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: Query,
        document: Option<&impl Serialize>,
        bound: Duration,
    ) -> anyhow::Result<T> {
        let (body, content_type) = match document {
            None => (empty(), None),
            Some(document) => (full(serde_json::to_vec(document)?), Some(JSON)),
        };
        let answer = self.send_as(method, &path, body, content_type, bound).await?;
        understood(&path, &answer.collect().await?)
    }

    /// The head of the reply must arrive within `bound` after the request was sent.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &Query,
        body: Body,
        bound: Duration,
    ) -> anyhow::Result<Answer> {
        self.send_as(method, path, body, None, bound).await
    }

    async fn send_as(
        &self,
        method: Method,
        path: &Query,
        body: Body,
        content_type: Option<&'static str>,
        bound: Duration,
    ) -> anyhow::Result<Answer> {
        let started = Instant::now();
        let stream = super::connect(&self.global.endpoint)
            .await
            .map_err(|error| unreachable(self.global, error.into_io()))?;
        let lost = || format!("the daemon at {} does not reply", self.global.endpoint);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(Patient(stream))).await.with_context(lost)?;
        let driver = tokio::spawn(async move {
            // Its error is also the request's or the body's, where it is reported.
            let _ = connection.await;
        });
        let connection = Connection(driver.abort_handle());
        let mut request =
            Request::builder().method(method.clone()).uri(&path.0).header(HOST, host(self.global));
        if let Some(content_type) = content_type {
            request = request.header(CONTENT_TYPE, content_type);
        }
        if let Some(token) = &self.global.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(body).context("make the request")?;
        let response = timeout(bound, sender.send_request(request))
            .await
            .map_err(|_| anyhow!("{method} {}: no reply within {} s", path.0, bound.as_secs()))
            .hint("check `vmfork daemon status` and the log of the daemon")?
            .with_context(lost)?;
        let status = response.status();
        self.global.printer.detail(&format!(
            "{method} {}: {status} in {}",
            path.0,
            crate::format::millis(started.elapsed().as_secs_f64() * 1000.0)
        ));
        let answer = Answer { response, _connection: connection };
        if status.is_success() {
            return Ok(answer);
        }
        Err(api_error(status, &answer.collect().await?).into())
    }
}

pub(crate) fn understood<T: DeserializeOwned>(path: &Query, answer: &[u8]) -> anyhow::Result<T> {
    serde_json::from_slice(answer)
        .with_context(|| format!("the reply of the daemon to {} is malformed", path.0))
        .hint("compare the versions of vmfork and vmforkd with `vmfork version`")
}

/// Whether the daemon itself reported `not_found`, rather than a proxy.
pub(crate) fn is_not_found(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ApiError(ErrorBody { code: ErrorCode::NotFound, .. })))
}

/// The `Host` header, which HTTP/1.1 demands.
pub(super) fn host(global: &Global) -> &str {
    match &global.endpoint {
        Endpoint::Unix(_) => "vmforkd",
        Endpoint::Tcp(address) => address,
    }
}

pub(crate) fn empty() -> Body {
    Empty::new().map_err(never).boxed_unsync()
}

fn full(bytes: Vec<u8>) -> Body {
    Full::new(Bytes::from(bytes)).map_err(never).boxed_unsync()
}

fn never(never: Infallible) -> io::Error {
    match never {}
}

/// The error in a failed reply, which may come from a proxy instead of the daemon.
pub(super) fn api_error(status: StatusCode, body: &[u8]) -> ApiError {
    ApiError(serde_json::from_slice::<ErrorBody>(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
        let text = crate::format::printable(text.trim());
        ErrorBody {
            code: if status == StatusCode::UNAUTHORIZED {
                ErrorCode::Unauthorized
            } else {
                ErrorCode::Internal
            },
            message: format!("the daemon replied {status}"),
            cause: (!text.is_empty()).then_some(text),
            remedy: (status == StatusCode::UNAUTHORIZED)
                .then(|| "set VMFORK_TOKEN to the token of the daemon".to_owned()),
        }
    }))
}

/// The error of a daemon that cannot be reached, with its remedy.
pub(crate) fn unreachable(global: &Global, error: io::Error) -> anyhow::Error {
    let hint = match (&global.endpoint, error.kind()) {
        (_, io::ErrorKind::PermissionDenied) => {
            "use sudo, or join the group that owns the socket".to_owned()
        }
        (Endpoint::Unix(_), _) => {
            "start it with `vmfork daemon start`, or set --socket or VMFORK_SOCKET to another daemon".to_owned()
        }
        (Endpoint::Tcp(_), _) => "check VMFORK_HOST, and that the daemon runs with --listen and --token-file".to_owned(),
    };
    let result: anyhow::Result<()> =
        Err(anyhow::Error::new(error).context(format!("no daemon answers at {}", global.endpoint)))
            .hint(hint);
    match result {
        Err(error) => error,
        Ok(()) => anyhow!("no daemon answers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_values_can_hold_any_byte() {
        let query = Query::new("/v1/vms/web/files").with("path", "/a b&c=ü").with("mode", "644");
        assert_eq!(query.0, "/v1/vms/web/files?path=/a%20b%26c%3D%C3%BC&mode=644");
    }

    #[test]
    fn an_answer_that_is_no_error_body_is_still_told() {
        let ApiError(body) = api_error(StatusCode::BAD_GATEWAY, b"<html>\x1b[0m");
        assert_eq!(body.message, "the daemon replied 502 Bad Gateway");
        assert_eq!(body.cause.as_deref(), Some("<html>\u{fffd}[0m"));
    }
}
