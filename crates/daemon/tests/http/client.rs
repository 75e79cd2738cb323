//! A daemon's HTTP side in the test's process, and a client for it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_daemon::counted::Counted;
use vmfork_host::metrics::Metrics;
use vmfork_rest::http::{App, Listeners, SocketOwner, serve};

use crate::fake::Fake;

/// Far more than anything here takes; a test that waits so long has found something.
pub(crate) const LONG: Duration = Duration::from_secs(20);

pub(crate) struct Daemon {
    pub(crate) fake: Arc<Fake>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) served: JoinHandle<()>,
    pub(crate) folder: TempDir,
}

pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?} {:?}", self.status, self.body))
    }

    /// Every failed request must answer so.
    pub(crate) fn error(&self) -> ErrorBody {
        assert!(!self.status.is_success(), "{:?} {:?}", self.status, self.body);
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?} {:?}", self.status, self.body))
    }

    #[track_caller]
    pub(crate) fn refused(&self, status: u16, code: ErrorCode, message: &str) {
        let error = self.error();
        assert_eq!((self.status.as_u16(), error.code), (status, code), "{error}");
        assert!(error.to_string().contains(message), "`{error}` lacks `{message}`");
    }
}

impl Daemon {
    pub(crate) async fn start() -> Self {
        Self::start_with(|app| app).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(App) -> App) -> Self {
        let folder = tempfile::tempdir().expect("temp dir");
        let socket = folder.path().join("sock");
        let listeners = Listeners::unix(&socket, SocketOwner::default()).await.expect("listen");
        Self::serve_on(folder, listeners, change)
    }

    pub(crate) fn start_on(folder: TempDir, listeners: Listeners) -> Self {
        Self::serve_on(folder, listeners, |app| app)
    }

    fn serve_on(folder: TempDir, listeners: Listeners, change: impl FnOnce(App) -> App) -> Self {
        let (stop, stop_rx) = watch::channel(false);
        let fake = Arc::new(Fake::default());
        let app = change(App::new(
            fake.clone(),
            Arc::new(Counted(Arc::new(Metrics::new()))),
            stop_rx.clone(),
        ));
        let served = tokio::spawn(serve(listeners, app, stop_rx));
        Self { fake, stop, served, folder }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("sock")
    }

    pub(crate) async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).await.expect("connect")
    }

    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        self.open_with(method, path, &[], body).await
    }

    pub(crate) async fn open_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        let io = TokioIo::new(self.connect().await);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(io).await.expect("handshake");
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", "vmfork");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        timeout(LONG, sender.send_request(request)).await.expect("in time").expect("an answer")
    }

    pub(crate) async fn send(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Reply {
        let response = self.open(method, path, body).await;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = timeout(LONG, response.into_body().collect()).await.expect("in time");
        Reply { status, headers, body: body.expect("a whole body").to_bytes() }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send("GET", path, "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, body.to_string()).await
    }

    pub(crate) async fn web_socket(&self, path: &str) -> Ws {
        let url = format!("ws://vmfork{path}");
        let (stream, _) = timeout(LONG, tokio_tungstenite::client_async(url, self.connect().await))
            .await
            .expect("in time")
            .expect("a WebSocket");
        stream
    }
}

pub(crate) type Ws = WebSocketStream<UnixStream>;

/// The next message that is not a ping.
pub(crate) async fn next(ws: &mut Ws) -> Message {
    loop {
        match timeout(LONG, ws.next()).await.expect("in time").expect("open").expect("a message") {
            Message::Ping(_) | Message::Pong(_) => {}
            message => return message,
        }
    }
}

/// The next message, as JSON text.
pub(crate) async fn next_json(ws: &mut Ws) -> Value {
    match next(ws).await {
        Message::Text(text) => serde_json::from_str(text.as_str()).expect("JSON"),
        other => panic!("{other:?} where text was due"),
    }
}

/// Wait until `condition` holds.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    timeout(LONG, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("never came true: {what}"));
}
