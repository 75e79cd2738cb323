//! Pauses and bounds in time, as the API has them.

use serde_json::json;
use vmfork_api::ErrorCode;

use crate::client::Daemon;

#[tokio::test]
async fn vms_are_paused_and_resumed() {
    let daemon = Daemon::start().await;
    for (verb, state) in [("pause", "paused"), ("resume", "running")] {
        let reply = daemon.send("POST", &format!("/v1/vms/web/{verb}"), "").await;
        assert_eq!((reply.status.as_u16(), &reply.json()["state"]), (200, &json!(state)));
        assert_eq!(daemon.fake.last_call(), format!("{verb} web"));
        let missing = daemon.send("POST", &format!("/v1/vms/nope/{verb}"), "").await;
        missing.refused(404, ErrorCode::NotFound, "nope");
    }
}

#[tokio::test]
async fn a_time_to_live_is_set_and_removed_within_its_limits() {
    let daemon = Daemon::start().await;
    for (ttl_ms, seen) in [(json!(1000), "Some(1000)"), (json!(null), "None")] {
        let body = json!({"ttl_ms": ttl_ms}).to_string();
        let reply = daemon.send("PUT", "/v1/vms/web/ttl", body).await;
        assert_eq!(reply.status, 200);
        assert_eq!(daemon.fake.last_call(), format!("ttl web {seen}"));
        assert_eq!(reply.json()["ttl"].is_null(), ttl_ms.is_null());
    }
    for bad in ["{\"ttl_ms\": 999}", "{\"ttl_ms\": 31536000001}", "{}"] {
        let reply = daemon.send("PUT", "/v1/vms/web/ttl", bad).await;
        reply.refused(400, ErrorCode::BadRequest, "ttl_ms");
    }
    let starts = [
        ("/v1/vms", json!({"image": "debian", "ttl_ms": 1})),
        ("/v1/vms/web/fork", json!({"count": 1, "ttl_ms": 1})),
        ("/v1/snapshots/warm/start", json!({"ttl_ms": 1})),
    ];
    for (path, body) in starts {
        daemon.post(path, &body).await.refused(400, ErrorCode::BadRequest, "ttl_ms");
    }
}
