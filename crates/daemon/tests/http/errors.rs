//! Whatever is wrong with a request, the answer is an `ErrorBody` that says what.

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use vmfork_api::ErrorCode::{BadRequest, Conflict, Guest, Internal, NoCapacity, NotFound};

use crate::client::{Daemon, LONG, eventually};

#[tokio::test]
async fn bodies_that_are_not_what_is_taken() {
    let daemon = Daemon::start().await;
    for (body, word) in [
        ("", "no body"),
        ("{", "EOF while parsing"),
        ("[]", "invalid"),
        (r#"{"image": 7}"#, "invalid type"),
        (r#"{"image": "x", "memory": 7}"#, "unknown field `memory`"),
        (r#"{"name": "x"}"#, "missing field `image`"),
        (r#"{"image": "../x"}"#, "can't be the name of a image"),
        (r#"{"image": "x", "name": "a/b"}"#, "can't be the name of a VM"),
        (r#"{"image": "x", "name": "0123456789abcdef"}"#, "looks like an id"),
        (r#"{"image": "x", "memory_mib": 63}"#, "must be 64 to 262144"),
        (r#"{"image": "x", "memory_mib": 65}"#, "must be even"),
        (r#"{"image": "x", "cpus": 0}"#, "must be 1 to 64"),
        (r#"{"image": "x", "boot_timeout_ms": 99999999999}"#, "a day"),
    ] {
        daemon.send("POST", "/v1/vms", body).await.refused(400, BadRequest, word);
    }
    for count in [0, 1025] {
        let reply = daemon.post("/v1/vms/web/fork", &json!({"count": count})).await;
        reply.refused(400, BadRequest, "must be 1 to 1024");
    }
    let reply = daemon.post("/v1/vms/web/fork", &json!({"count": 1, "timeout_ms": 0})).await;
    reply.refused(400, BadRequest, "`timeout_ms` is 0");
}

#[tokio::test]
async fn bodies_that_are_too_large() {
    let daemon = Daemon::start().await;
    let reply = daemon.send("POST", "/v1/vms", vec![b' '; 1024 * 1024 + 1]).await;
    reply.refused(413, BadRequest, "length limit exceeded");
    assert!(reply.error().remedy.is_some());
}

#[tokio::test]
async fn paths_methods_and_parameters_that_are_not_there() {
    let daemon = Daemon::start().await;
    for path in ["/", "/v1", "/v2/vms", "/v1/vms/web/nope", "/v1/vms/a/b/c/d", "/v1/vms/"] {
        daemon.get(path).await.refused(404, NotFound, "no route `GET");
    }
    let reply = daemon.send("PUT", "/v1/vms/web", "").await;
    reply.refused(405, BadRequest, "does not take PUT");
    let allowed = reply.headers["allow"].to_str().expect("text");
    assert!(["GET", "DELETE"].iter().all(|m| allowed.split(',').any(|a| a == *m)), "{allowed}");
    daemon.send("BREW", "/v1/vms", "").await.refused(405, BadRequest, "does not take BREW");
    daemon.get("/v1/vms?al=1").await.refused(400, BadRequest, "unknown field `al`");
    daemon.get("/v1/vms?all=maybe").await.refused(400, BadRequest, "neither true nor false");
    for vm in ["..", "%2e%2e%2f", "a%20b", "%ff", "-x", &"a".repeat(64)] {
        let reply = daemon.get(&format!("/v1/vms/{vm}")).await;
        assert_eq!(reply.error().code, BadRequest, "{vm}");
    }
}

#[tokio::test]
async fn errors_of_the_host_come_through_with_their_status() {
    let daemon = Daemon::start().await;
    for (method, path) in [
        ("GET", "/v1/vms/nope"),
        ("DELETE", "/v1/vms/nope"),
        ("POST", "/v1/vms/nope/kill"),
        ("GET", "/v1/vms/nope/logs"),
        ("GET", "/v1/vms/nope/files?path=/x"),
        ("PUT", "/v1/vms/nope/files?path=/x"),
    ] {
        let reply = daemon.send(method, path, "").await;
        reply.refused(404, NotFound, "no VM named `nope` on this host");
        assert!(reply.error().remedy.expect("remedy").contains("vmfork ps"));
    }
    let reply = daemon.post("/v1/vms/nope/fork", &json!({"count": 1})).await;
    reply.refused(404, NotFound, "nope");
    let reply = daemon.post("/v1/vms/nope/exec", &json!({"argv": ["x"]})).await;
    reply.refused(404, NotFound, "nope");
    let reply = daemon.send("DELETE", "/v1/images/used", "").await;
    reply.refused(409, Conflict, "in use");
    let reply = daemon.post("/v1/vms", &json!({"image": "x", "memory_mib": 262_144})).await;
    reply.refused(507, NoCapacity, "too much");
    let reply = daemon.post("/v1/vms/web/exec", &json!({"argv": ["broken"]})).await;
    reply.refused(502, Guest, "no such program");
}

#[tokio::test]
async fn web_sockets_are_asked_for_as_such() {
    let daemon = Daemon::start().await;
    for path in ["/v1/vms/web/console", "/v1/vms/web/exec/stream"] {
        daemon.get(path).await.refused(400, BadRequest, "this route is a WebSocket");
    }
    let url = "ws://vmfork/v1/vms/nope/console";
    let refused = tokio_tungstenite::client_async(url, daemon.connect().await).await;
    let Err(tokio_tungstenite::tungstenite::Error::Http(response)) = refused else {
        panic!("a console of a VM that isn't there")
    };
    assert_eq!(response.status(), 404);
}

#[tokio::test]
async fn a_handler_that_panics_is_an_error_of_its_request_alone() {
    let daemon = Daemon::start().await;
    daemon.get("/v1/vms/panic").await.refused(500, Internal, "panicked");
    assert_eq!(daemon.get("/v1/vms/web").await.status, 200);
}

#[tokio::test]
async fn what_is_not_http_ends_that_connection_only() {
    let daemon = Daemon::start().await;
    let mut stream = daemon.connect().await;
    stream.write_all(b"\x16\x03\x01\x02\x00 hello?\r\n\r\n").await.expect("write");
    let mut answer = Vec::new();
    timeout(LONG, stream.read_to_end(&mut answer)).await.expect("in time").expect("read");
    assert!(answer.starts_with(b"HTTP/1.1 400"), "{answer:?}");
    assert_eq!(daemon.get("/v1/version").await.status, 200);
}

#[tokio::test]
async fn an_operation_is_dropped_when_its_client_goes_away() {
    let daemon = Daemon::start().await;
    let mut stream = daemon.connect().await;
    let request =
        "POST /v1/vms/hang/fork HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n{\"count\":1}";
    stream.write_all(request.as_bytes()).await.expect("write");
    eventually("the fork is awaited", || daemon.fake.waiting() == 1).await;
    drop(stream);
    eventually("the fork is dropped", || daemon.fake.waiting() == 0).await;
}
