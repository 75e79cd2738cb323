//! The document that is checked in is the one that is served.

use std::path::Path;

use vmfork_rest::http::openapi_json;

#[test]
fn the_checked_in_document_is_the_served_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let served = openapi_json();
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&path, &served).expect("write docs/openapi.json");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        checked_in == served,
        "docs/openapi.json is not what the daemon serves; \
         run UPDATE_OPENAPI=1 cargo test -p vmfork-daemon --test http"
    );
}

#[test]
fn every_route_of_the_api_is_in_the_document() {
    let document: serde_json::Value = serde_json::from_str(&openapi_json()).expect("JSON");
    for (path, methods) in [
        ("/v1/version", &["get"][..]),
        ("/v1/doctor", &["get"]),
        ("/v1/host", &["get"]),
        ("/v1/images", &["get"]),
        ("/v1/images/{name}", &["delete"]),
        ("/v1/vms", &["get", "post"]),
        ("/v1/vms/{vm}", &["get", "delete"]),
        ("/v1/vms/{vm}/kill", &["post"]),
        ("/v1/vms/{vm}/fork", &["post"]),
        ("/v1/tree", &["get"]),
        ("/v1/vms/{vm}/exec", &["post"]),
        ("/v1/vms/{vm}/exec/stream", &["get"]),
        ("/v1/vms/{vm}/files", &["get", "put"]),
        ("/v1/vms/{vm}/logs", &["get"]),
        ("/v1/vms/{vm}/console", &["get"]),
        ("/v1/events", &["get"]),
        ("/v1/openapi.json", &["get"]),
        ("/metrics", &["get"]),
    ] {
        for method in methods {
            let operation = &document["paths"][path][method];
            assert!(operation.is_object(), "{method} {path} is missing");
            assert!(operation["summary"].is_string(), "{method} {path} says nothing");
        }
    }
    for schema in
        ["Event", "ErrorBody", "ExecClientMessage", "ExecServerMessage", "VmDetail", "ForkReply"]
    {
        assert!(document["components"]["schemas"][schema].is_object(), "{schema} is missing");
    }
}
