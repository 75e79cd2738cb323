//! The routes of volumes.

use serde_json::json;
use vmfork_api::ErrorCode;

use crate::client::Daemon;

#[tokio::test]
async fn volumes_are_made_looked_at_changed_and_removed() {
    let daemon = Daemon::start().await;
    let source = json!({"type": "blank", "size_bytes": 1 << 30});
    let request = json!({"name": "db", "source": source, "on_fork": "refuse"});
    let reply = daemon.post("/v1/volumes", &request).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["on_fork"]), (201, &json!("refuse")));
    let call = "create volume db Blank { size_bytes: 1073741824 }";
    assert_eq!(daemon.fake.last_call(), call);
    assert_eq!(daemon.get("/v1/volumes").await.json()[0]["name"], "db");
    assert_eq!(daemon.get("/v1/volumes?label=is%3Ddb").await.json()[0]["name"], "db");
    assert_eq!(daemon.get("/v1/volumes?label=other").await.json(), json!([]));
    assert_eq!(daemon.get("/v1/volumes/db").await.json()["vms"], json!([]));
    let body = json!({"on_fork": "read_only"}).to_string();
    let reply = daemon.send("PUT", "/v1/volumes/db/on-fork", body).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["on_fork"]), (200, &json!("read_only")));
    let reply = daemon.post("/v1/volumes/db/attach", &json!({"vm": "web", "disk": "x"})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["device"]), (200, &json!("/dev/vdb")));
    assert_eq!(daemon.fake.last_call(), "attach db to web Some(\"x\")");
    let reply = daemon.post("/v1/volumes/db/detach", &json!({"vm": "web"})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["name"]), (200, &json!("db")));
    assert_eq!(daemon.fake.last_call(), "detach db from web false");
    let reply = daemon.post("/v1/volumes/db/resize", &json!({"size_bytes": 4_u64 << 30})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["size_bytes"]), (200, &json!(4_u64 << 30)));
    assert_eq!(daemon.fake.last_call(), "resize volume db 4294967296");
    assert_eq!(daemon.send("DELETE", "/v1/volumes/db", "").await.status, 204);
    assert_eq!(daemon.fake.last_call(), "remove volume db");
}

#[tokio::test]
async fn what_can_be_no_volume_is_refused() {
    let daemon = Daemon::start().await;
    let missing = daemon.get("/v1/volumes/nope").await;
    missing.refused(404, ErrorCode::NotFound, "no volume named `nope`");
    let blank = |size_bytes: u64| json!({"type": "blank", "size_bytes": size_bytes});
    for (request, words) in [
        (json!({"name": "../db", "source": blank(1 << 30)}), "can't be the name of a volume"),
        (json!({"name": "db", "source": blank(1)}), "1 MiB to 2 TiB"),
        (json!({"name": "db"}), "source"),
        (json!({"name": "db", "source": {"type": "file", "path": "x"}}), "no absolute path"),
        (json!({"name": "db", "source": {"type": "image", "image": ".."}}), "name of a image"),
        (json!({"name": "db", "source": blank(1 << 30), "on_fork": "x"}), "not what this route"),
    ] {
        daemon.post("/v1/volumes", &request).await.refused(400, ErrorCode::BadRequest, words);
    }
    for (way, request) in [
        ("attach", json!({"vm": "../x"})),
        ("attach", json!({"vm": "web", "disk": "A"})),
        ("attach", json!({"vm": "web", "force": true})),
        ("detach", json!({"vm": ""})),
        ("detach", json!({})),
        ("resize", json!({"size_bytes": 1_048_577})),
        ("resize", json!({"size_bytes": 3_u64 << 40})),
        ("resize", json!({"size_bytes": "4G"})),
    ] {
        let reply = daemon.post(&format!("/v1/volumes/db/{way}"), &request).await;
        assert_eq!(reply.status, 400, "{way} {request}");
    }
    let disk = json!({"name": "data", "source": {"type": "volume", "volume": "a/b"}});
    let reply = daemon.post("/v1/vms", &json!({"image": "debian", "disks": [disk]})).await;
    reply.refused(400, ErrorCode::BadRequest, "can't be the name of a volume");
    let reply = daemon.send("DELETE", "/v1/volumes/%2e%2e", "").await;
    reply.refused(400, ErrorCode::BadRequest, "can't be the name of a volume");
}

#[tokio::test]
async fn a_disk_is_resized_by_its_id() {
    let daemon = Daemon::start().await;
    let reply = daemon.post("/v1/disks/d15c/resize", &json!({"size_bytes": 1 << 30})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["size_bytes"]), (200, &json!(1 << 30)));
    assert_eq!(daemon.fake.last_call(), "resize disk d15c 1073741824");
    let odd = daemon.post("/v1/disks/d15c/resize", &json!({"size_bytes": 0})).await;
    odd.refused(400, ErrorCode::BadRequest, "1 MiB to 2 TiB");
    let shrink = json!({"size_bytes": 1 << 30, "shrink": true});
    assert_eq!(daemon.post("/v1/disks/d15c/resize", &shrink).await.status, 400);
}
