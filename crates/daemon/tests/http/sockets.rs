//! Who may connect, one daemon to a socket, and how it ends.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use vmfork_rest::http::{ListenError, Listeners, SocketOwner, Token};

use crate::client::{Daemon, LONG, eventually, next};

const TOKEN: &str = "0123456789abcdef0123";

async fn listen(path: &Path) -> Result<Listeners, ListenError> {
    Listeners::unix(path, SocketOwner::default()).await
}

#[tokio::test]
async fn the_socket_is_for_its_owner_and_group() {
    let folder = tempfile::tempdir().expect("temp dir");
    let path = folder.path().join("sock");
    // The folder that we made is ours.
    let we = folder.path().metadata().expect("metadata");
    let gid = if we.uid() == 0 { 12_345 } else { we.gid() };
    let _listeners = Listeners::unix(&path, SocketOwner { gid: Some(gid) }).await.expect("listen");
    let metadata = std::fs::symlink_metadata(&path).expect("metadata");
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o660);
    assert_eq!((metadata.uid(), metadata.gid()), (we.uid(), gid));
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("read").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().expect("temp dir");
    let path = folder.path().join("sock");
    drop(UnixListener::bind(&path).expect("bind"));
    let first = listen(&path).await.expect("the stale socket gives way");
    let error = listen(&path).await.expect_err("the live one does not");
    assert_eq!(error.to_string(), format!("another vmforkd answers on {}", path.display()));
    drop(first);
    assert!(!path.exists(), "the socket's file is left behind");

    std::fs::write(&path, "precious").expect("write");
    let error = listen(&path).await.expect_err("a file is no socket");
    assert!(error.to_string().ends_with("is in the way: it is no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("read"), "precious");
}

#[tokio::test]
async fn a_socket_that_is_another_daemons_by_now_is_left_alone() {
    let folder = tempfile::tempdir().expect("temp dir");
    let path = folder.path().join("sock");
    let first = listen(&path).await.expect("listen");
    std::fs::remove_file(&path).expect("remove");
    let second = listen(&path).await.expect("listen");
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

async fn over_tcp(daemon_address: std::net::SocketAddr, head: &str) -> String {
    let mut stream = TcpStream::connect(daemon_address).await.expect("connect");
    let request = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{head}\r\n");
    stream.write_all(request.as_bytes()).await.expect("write");
    let mut answer = String::new();
    timeout(LONG, stream.read_to_string(&mut answer)).await.expect("in time").expect("read");
    answer
}

#[tokio::test]
async fn tcp_wants_the_token_and_the_unix_socket_does_not() {
    let folder = tempfile::tempdir().expect("temp dir");
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, format!("{TOKEN}\n")).expect("write");
    std::fs::set_permissions(&token_file, PermissionsExt::from_mode(0o600)).expect("chmod");
    let token = Token::from_file(&token_file).expect("a token");
    let listeners = listen(&folder.path().join("sock")).await.expect("listen");
    let listeners =
        listeners.and_tcp("127.0.0.1:0".parse().expect("address"), token).await.expect("listen");
    let address = listeners.tcp_address().expect("an address");
    let daemon = Daemon::start_on(folder, listeners);

    for head in ["", "authorization: Bearer 0123456789abcdef0124\r\n", "authorization: x\r\n"] {
        let answer = over_tcp(address, head).await;
        assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
        assert!(answer.contains(r#""code":"unauthorized""#), "{answer}");
        assert!(answer.contains("--token-file"), "{answer}");
    }
    let answer = over_tcp(address, &format!("authorization: Bearer {TOKEN}\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(daemon.get("/v1/version").await.status, 200);
}

#[tokio::test]
async fn a_taken_port_is_an_error_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = taken.local_addr().expect("address");
    let folder = tempfile::tempdir().expect("temp dir");
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, TOKEN).expect("write");
    std::fs::set_permissions(&token_file, PermissionsExt::from_mode(0o600)).expect("chmod");
    let listeners = listen(&folder.path().join("sock")).await.expect("listen");
    let token = Token::from_file(&token_file).expect("a token");
    let error = listeners.and_tcp(address, token).await.expect_err("taken");
    assert_eq!(error.to_string(), format!("listen on {address}"));
}

#[tokio::test]
async fn the_end_lets_requests_finish_and_closes_what_would_not() {
    let daemon = Daemon::start().await;
    let mut console = daemon.web_socket("/v1/vms/web/console").await;
    assert_eq!(next(&mut console).await.into_data(), "login: ");
    let follower = daemon.open("GET", "/v1/vms/web/logs?follow", "").await;
    let sleep = json!({"argv": ["sleep"], "timeout_ms": 200});
    let exec = daemon.post("/v1/vms/web/exec", &sleep);
    let begun = Instant::now();
    let ended = async {
        eventually("it runs", || daemon.fake.last_call() == "exec web sleep").await;
        daemon.stop.send_replace(true);
    };
    let (reply, ()) = tokio::join!(exec, ended);
    assert_eq!(reply.json()["timed_out"], true, "a request under way was cut off");
    let text = timeout(LONG, follower.into_body().collect()).await.expect("in time");
    assert_eq!(text.expect("a whole body").to_bytes(), "booted\n");
    let Message::Close(Some(frame)) = next(&mut console).await else { panic!("no close") };
    assert_eq!(u16::from(frame.code), 1001);

    let Daemon { served, folder, .. } = daemon;
    timeout(LONG, served).await.expect("in time").expect("no panic");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(!folder.path().join("sock").exists());
}
