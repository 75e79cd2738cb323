//! The routes of stored snapshots.

use serde_json::json;
use vmfork_api::ErrorCode;

use crate::client::Daemon;

#[tokio::test]
async fn snapshots_are_taken_looked_at_started_and_removed() {
    let daemon = Daemon::start().await;
    let request = json!({"vm": "web", "name": "warm", "compression": "none"});
    let reply = daemon.post("/v1/snapshots", &request).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["state"]), (201, &json!("ready")));
    assert_eq!(daemon.fake.last_call(), "create web warm Some(None)");
    assert_eq!(daemon.get("/v1/snapshots").await.json()[0]["name"], "warm");
    assert_eq!(daemon.get("/v1/snapshots/warm").await.json()["machine"], "pc-i440fx-7.2");

    let reply = daemon.post("/v1/snapshots/warm/start", &json!({})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["granted"]), (200, &json!(1)));
    assert_eq!(daemon.fake.last_call(), "start warm 1 All");
    let request = json!({"count": 5, "prefetch": "none"});
    assert_eq!(daemon.post("/v1/snapshots/warm/start", &request).await.status, 200);
    assert_eq!(daemon.fake.last_call(), "start warm 5 None");

    for (method, path, status, call) in [
        ("POST", "verify", 200, "verify warm"),
        ("POST", "flatten", 200, "flatten warm"),
        ("GET", "profile", 200, "profile warm"),
        ("DELETE", "profile", 204, "reset warm"),
    ] {
        let reply = daemon.send(method, &format!("/v1/snapshots/warm/{path}"), "").await;
        assert_eq!(reply.status, status, "{path}");
        assert_eq!(daemon.fake.last_call(), call);
    }
    let place = json!({"location": "/elsewhere"});
    for direction in ["push", "pull"] {
        let reply = daemon.post(&format!("/v1/snapshots/warm/{direction}"), &place).await;
        assert_eq!(reply.status, 200);
        assert_eq!(daemon.fake.last_call(), format!("{direction} warm /elsewhere"));
    }
    let reply = daemon.send("DELETE", "/v1/snapshots/warm?cascade", "").await;
    assert_eq!((reply.status.as_u16(), &reply.json()["names"]), (200, &json!(["warm"])));
    assert_eq!(daemon.fake.last_call(), "remove snapshot warm true");
}

#[tokio::test]
async fn exports_and_imports_are_streams() {
    let daemon = Daemon::start().await;
    let reply = daemon.get("/v1/snapshots/warm/export").await;
    assert_eq!(reply.headers["content-type"], "application/octet-stream");
    assert_eq!(reply.body, "all of it");
    let reply = daemon.send("POST", "/v1/import?name=other", "all of it").await;
    assert_eq!((reply.status.as_u16(), &reply.json()[0]["name"]), (201, &json!("other")));
    assert_eq!(daemon.fake.last_call(), "import other 9");
}

#[tokio::test]
async fn what_can_not_be_is_refused() {
    let daemon = Daemon::start().await;
    let missing = daemon.get("/v1/snapshots/nope").await;
    missing.refused(404, ErrorCode::NotFound, "no snapshot named `nope`");
    let missing = daemon.get("/v1/snapshots/nope/export").await;
    missing.refused(404, ErrorCode::NotFound, "no snapshot named `nope`");
    for (path, request, words) in [
        ("/v1/snapshots", json!({"vm": "web", "name": "../x"}), "can't be the name of a snapshot"),
        ("/v1/snapshots", json!({"vm": "web"}), "is not what this route takes"),
        ("/v1/snapshots", json!({"vm": "web", "name": "a", "zip": 1}), "zip"),
        ("/v1/snapshots/warm/start", json!({"count": 0}), "`count` is 0"),
        ("/v1/snapshots/warm/start", json!({"timeout_ms": 0}), "`timeout_ms` is 0"),
        ("/v1/snapshots/warm/start", json!({"count": 2, "names": ["a"]}), "1 names for 2 VMs"),
        ("/v1/snapshots/warm/start", json!({"prefetch": "much"}), "much"),
        ("/v1/snapshots/warm/push", json!({}), "location"),
    ] {
        let reply = daemon.post(path, &request).await;
        reply.refused(400, ErrorCode::BadRequest, words);
    }
    let reply = daemon.send("POST", "/v1/import?name=a/b", "").await;
    reply.refused(400, ErrorCode::BadRequest, "can't be the name of a snapshot");
    let reply = daemon.get("/v1/snapshots/%2e%2e").await;
    reply.refused(400, ErrorCode::BadRequest, "can't be the name of a snapshot");
}
