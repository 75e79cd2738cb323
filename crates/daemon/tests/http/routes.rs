//! Every route's ordinary answer.

use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use futures_util::SinkExt;
use vmfork_api::ErrorCode;

use crate::client::{Daemon, LONG, next};

#[tokio::test]
async fn what_is_read_comes_as_documents() {
    let daemon = Daemon::start().await;
    for (path, pointer, value) in [
        ("/v1/version", "/schema", json!("vmfork/1")),
        ("/v1/doctor", "/checks/0/name", json!("kvm")),
        ("/v1/host", "/memory_admissible_bytes", json!(1)),
        ("/v1/images", "", json!([])),
        ("/v1/vms", "/0/name", json!("web")),
        ("/v1/tree", "/0/children/0/vm/name", json!("web.1")),
        ("/v1/vms/web", "/name", json!("web")),
        ("/v1/vms/00000000000000aa", "/memory/pages", json!(0)),
        ("/v1/openapi.json", "/openapi", json!("3.1.0")),
    ] {
        let reply = daemon.get(path).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.headers["content-type"], "application/json", "{path}");
        assert_eq!(reply.json().pointer(pointer), Some(&value), "{path}");
    }
}

#[tokio::test]
async fn vms_are_started_forked_killed_and_forgotten() {
    let daemon = Daemon::start().await;
    let reply = daemon.post("/v1/vms", &json!({"image": "debian", "name": "web"})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["name"]), (201, &json!("web")));

    let reply = daemon.post("/v1/vms/web/fork", &json!({"count": 3})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["granted"]), (200, &json!(3)));

    assert_eq!(daemon.post("/v1/vms/web/kill", &json!({"family": true})).await.status, 200);
    assert_eq!(daemon.fake.last_call(), "kill web 0 true");
    assert_eq!(daemon.send("POST", "/v1/vms/web/kill", "").await.status, 200);
    assert_eq!(daemon.fake.last_call(), "kill web 0 false");

    assert_eq!(daemon.send("DELETE", "/v1/vms/web?force=true", "").await.status, 204);
    assert_eq!(daemon.fake.last_call(), "remove web true");
    assert_eq!(daemon.send("DELETE", "/v1/images/debian", "").await.status, 204);
    assert_eq!(daemon.fake.last_call(), "remove image debian");
}

#[tokio::test]
async fn faults_are_made_only_where_that_is_allowed() {
    let path = "/v1/debug/vms/web/engine-panic";
    let daemon = Daemon::start().await;
    daemon.send("POST", path, "").await.refused(404, ErrorCode::NotFound, "no route");
    let daemon = Daemon::start_with(|app| app.debug_faults(true)).await;
    assert_eq!(daemon.send("POST", path, "").await.status, 204);
    assert_eq!(daemon.fake.last_call(), "panic engine web");
    assert!(!daemon.get("/v1/openapi.json").await.json().to_string().contains("debug"));
}

#[tokio::test]
async fn switches_may_stand_alone() {
    let daemon = Daemon::start().await;
    for (query, seen) in [("", false), ("?all", true), ("?all=true", true), ("?all=0", false)] {
        assert_eq!(daemon.get(&format!("/v1/vms{query}")).await.status, 200);
        assert_eq!(daemon.fake.last_call(), format!("vms {seen}"));
    }
}

#[tokio::test]
async fn logs_come_as_text_and_followers_get_them_as_they_come() {
    let daemon = Daemon::start().await;
    let reply = daemon.get("/v1/vms/web/logs").await;
    assert_eq!(reply.headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(reply.body, "booted\n");

    let mut following = daemon.open("GET", "/v1/vms/web/logs?follow", "").await.into_body();
    let frame = timeout(LONG, following.frame()).await.expect("in time").expect("a frame");
    assert_eq!(frame.expect("data").into_data().expect("data"), "booted\n");
    let more = timeout(std::time::Duration::from_millis(50), following.frame()).await;
    assert!(more.is_err(), "it must stay open");
}

#[tokio::test]
async fn the_console_shows_and_takes_bytes_until_the_vm_ends() {
    let daemon = Daemon::start().await;
    let mut ws = daemon.web_socket("/v1/vms/web/console").await;
    assert_eq!(next(&mut ws).await.into_data(), "login: ");
    ws.send(Message::binary("root\n")).await.expect("send");
    assert_eq!(next(&mut ws).await.into_data(), "root\n");
    ws.send(Message::binary("poweroff")).await.expect("send");
    let Message::Close(Some(frame)) = next(&mut ws).await else { panic!("no close") };
    assert_eq!((u16::from(frame.code), frame.reason.as_str()), (1000, "the VM has ended"));
}

#[tokio::test]
async fn metrics_count_requests_by_route_and_status() {
    let daemon = Daemon::start().await;
    daemon.get("/v1/vms/web").await;
    daemon.get("/v1/vms/nope").await;
    daemon.get("/no/such/route").await;
    let reply = daemon.get("/metrics").await;
    let text = String::from_utf8(reply.body.to_vec()).expect("text");
    for line in [
        r#"vmfork_http_requests_total{method="GET",route="/v1/vms/{vm}",status="200"} 1"#,
        r#"vmfork_http_requests_total{method="GET",route="/v1/vms/{vm}",status="404"} 1"#,
        r#"vmfork_http_requests_total{method="GET",route="none",status="404"} 1"#,
    ] {
        assert!(text.contains(line), "no `{line}` in\n{text}");
    }
}

#[tokio::test]
async fn hosts_that_keep_their_part_of_a_family_are_named() {
    let daemon = Daemon::start().await;
    let answer = daemon.post("/v1/vms/split/kill", &json!({"family": true})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["x-vmfork-missing-hosts"], "h2,h3");
    assert_eq!(answer.json()["name"], "split");
    let answer = daemon.post("/v1/vms/web/kill", &json!({"family": true})).await;
    assert!(!answer.headers.contains_key("x-vmfork-missing-hosts"));
}

#[tokio::test]
async fn lists_are_filtered_by_labels() {
    let daemon = Daemon::start().await;
    for (path, pointer, value) in [
        ("/v1/vms?label=is", "/0/name", Some(json!("web"))),
        ("/v1/vms?all=true&label=is%3Dweb&label=is", "/0/name", Some(json!("web"))),
        ("/v1/vms?label=is%3Ddb", "", Some(json!([]))),
        ("/v1/vms?label=is&label=other", "", Some(json!([]))),
        // What a match descends from is shown with it, and no other clone.
        ("/v1/tree?label=is%3Dweb.1", "/0/children/0/vm/name", Some(json!("web.1"))),
        ("/v1/tree?label=is%3Dweb", "/0/children", Some(json!([]))),
        ("/v1/tree?label=is%3Ddb", "", Some(json!([]))),
        ("/v1/snapshots?label=is%3Dwarm", "/0/labels/is", Some(json!("warm"))),
        ("/v1/snapshots?label=other", "", Some(json!([]))),
    ] {
        let reply = daemon.get(path).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.json().pointer(pointer), value.as_ref(), "{path}");
    }
    for path in ["/v1/vms?label=", "/v1/tree?label=-a", "/v1/snapshots?label=a%0A%3D"] {
        daemon.get(path).await.refused(400, ErrorCode::BadRequest, "`KEY` or `KEY=VALUE`");
    }
    for path in ["/v1/vms?labels=a", "/v1/tree?all=true", "/v1/snapshots?name=a"] {
        daemon.get(path).await.refused(400, ErrorCode::BadRequest, "not what this route takes");
    }
}

#[tokio::test]
async fn labels_that_can_not_be_are_refused() {
    let daemon = Daemon::start().await;
    for labels in [json!({"-a": "x"}), json!({"a": 1}), json!({"a": "b\n"}), json!(["a=b"])] {
        let reply = daemon.post("/v1/vms", &json!({"image": "debian", "labels": labels})).await;
        reply.refused(400, ErrorCode::BadRequest, "not what this route takes");
        let reply = daemon.post("/v1/vms/web/fork", &json!({"count": 1, "labels": labels})).await;
        reply.refused(400, ErrorCode::BadRequest, "not what this route takes");
    }
}

#[tokio::test]
async fn an_image_is_served_on_a_connection_that_is_upgraded() {
    let daemon = Daemon::start().await;
    let path = "/v1/images/debian/nbd";
    daemon.get(path).await.refused(400, ErrorCode::BadRequest, "this route speaks NBD");
    daemon.get("/v1/images/debian/nbd?write=1").await.refused(400, ErrorCode::BadRequest, "write");
    for (path, writable) in [(path, false), ("/v1/images/debian/nbd?writable=true", true)] {
        let headers = [("connection", "keep-alive, Upgrade"), ("upgrade", "nbd")];
        let mut socket = daemon.connect().await;
        let headers = headers.map(|(name, value)| format!("{name}: {value}\r\n")).concat();
        let request = format!("GET {path} HTTP/1.1\r\nhost: vmforkd\r\n{headers}\r\n");
        // What comes with the request is the protocol's, too.
        let said = format!("{request}NBD");
        socket.write_all(said.as_bytes()).await.expect("said");
        let mut reply = Vec::new();
        while !reply.ends_with(b"\r\n\r\nNBD") {
            let mut byte = [0];
            let read = timeout(LONG, socket.read_exact(&mut byte)).await.expect("in time");
            read.expect("a reply");
            reply.push(byte[0]);
        }
        let reply = String::from_utf8_lossy(&reply).to_lowercase();
        assert!(reply.starts_with("http/1.1 101 "), "{reply}");
        assert!(reply.contains("upgrade: nbd"), "{reply}");
        let call = format!("serve image debian {writable} to ");
        assert!(daemon.fake.last_call().starts_with(&call), "{}", daemon.fake.last_call());
        // The daemon's end is the connection's.
        if writable {
            daemon.stop.send_replace(true);
            let ended = timeout(LONG, socket.read(&mut [0])).await.expect("in time");
            assert_eq!(ended.ok().unwrap_or(0), 0);
        }
    }
}
