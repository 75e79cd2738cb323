//! Files both ways: any size, whole or not at all.

use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmfork_api::ErrorCode::{BadRequest, Guest, NotFound};

use crate::client::{Daemon, eventually};
use crate::fake::BIG_BYTES;

#[tokio::test]
async fn what_is_put_can_be_got_with_its_mode() {
    let daemon = Daemon::start().await;
    let content: Vec<u8> = (0..=250).cycle().take(BIG_BYTES).collect();
    let put = daemon.send("PUT", "/v1/vms/web/files?path=/tmp/x&mode=0750", content.clone()).await;
    assert_eq!(put.status, 204);
    let got = daemon.get("/v1/vms/web/files?path=/tmp/x").await;
    assert_eq!(got.status, 200);
    assert_eq!(got.headers["x-vmfork-mode"], "0750");
    assert_eq!(got.headers["x-vmfork-size"], BIG_BYTES.to_string().as_str());
    assert!(got.body == content, "{} bytes came back", got.body.len());

    assert_eq!(daemon.send("PUT", "/v1/vms/web/files?path=/empty", "").await.status, 204);
    let got = daemon.get("/v1/vms/web/files?path=%2Fempty").await;
    assert_eq!((got.body.len(), &got.headers["x-vmfork-mode"]), (0, &"0644".parse().expect("v")));
}

#[tokio::test]
async fn paths_and_modes_are_checked() {
    let daemon = Daemon::start().await;
    for (query, word) in [
        ("", "missing field `path`"),
        ("?path=x", "`path` is `x`"),
        ("?path=", "`path` is ``"),
        ("?path=/a%00b", "NUL"),
        ("?path=/x/", "a folder"),
        ("?path=/", "a folder"),
        ("?path=/x&mode=999", "`mode` is `999`"),
        ("?path=/x&mod=644", "unknown field `mod`"),
    ] {
        let reply = daemon.send("PUT", &format!("/v1/vms/web/files{query}"), "").await;
        reply.refused(400, BadRequest, word);
    }
    daemon.get("/v1/vms/web/files?path=/none").await.refused(404, NotFound, "/none");
}

#[tokio::test]
async fn a_read_that_fails_at_once_is_an_error_and_one_that_fails_later_breaks_off() {
    let daemon = Daemon::start().await;
    daemon.get("/v1/vms/web/files?path=/broken").await.refused(502, Guest, "the disk is bad");
    let half = daemon.open("GET", "/v1/vms/web/files?path=/half", "").await;
    assert_eq!(half.status(), 200);
    assert!(half.into_body().collect().await.is_err(), "a broken transfer passed for a whole one");
}

#[tokio::test]
async fn an_upload_that_breaks_off_never_looks_like_the_end_of_the_file() {
    let daemon = Daemon::start().await;
    for vm in ["web", "hang"] {
        let mut stream = daemon.connect().await;
        let head = format!(
            "PUT /v1/vms/{vm}/files?path=/x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("write");
        stream.write_all(&[1; 500]).await.expect("write");
        drop(stream);
    }
    let ends = &daemon.fake.ends;
    eventually("the transfer ended", || !ends.lock().expect("lock").is_empty()).await;
    assert_eq!(*ends.lock().expect("lock"), ["abandoned"]);
    assert!(daemon.fake.files.lock().expect("lock").is_empty());
}

#[tokio::test]
async fn a_client_that_sends_on_after_a_failure_still_gets_the_answer() {
    let daemon = Daemon::start().await;
    let content = vec![7; 8 << 20];
    for (target, status) in [("nope/files?path=/x", "404"), ("web/files?path=x", "400")] {
        let mut stream = daemon.connect().await;
        let head = format!(
            "PUT /v1/vms/{target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            content.len()
        );
        stream.write_all(head.as_bytes()).await.expect("write");
        stream.write_all(&content).await.expect("the daemon hung up on a client that was sending");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
}
