//! The fake daemon's routes of pauses and bounds in time.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{post, put};
use axum::{Json, Router};
use serde_json::{Value, json};
use vmfork_api::{Vm, VmState};

use super::routes::{Failure, Seen, not_found, vm};

pub(super) fn router() -> Router<Arc<Seen>> {
    Router::new()
        .route("/v1/vms/{vm}/pause", post(pause))
        .route("/v1/vms/{vm}/resume", post(resume))
        .route("/v1/vms/{vm}/ttl", put(ttl))
}

async fn pause(
    State(seen): State<Arc<Seen>>,
    Path(name): Path<String>,
) -> Result<Json<Vm>, Failure> {
    seen.note(format!("pause {name}"));
    match name.as_str() {
        "nope" => Err(not_found("pause", &name)),
        _ => Ok(Json(Vm { state: VmState::Paused, ..vm(&name, None, 0) })),
    }
}

async fn resume(State(seen): State<Arc<Seen>>, Path(name): Path<String>) -> Json<Vm> {
    seen.note(format!("resume {name}"));
    Json(vm(&name, None, 0))
}

async fn ttl(
    State(seen): State<Arc<Seen>>,
    Path(name): Path<String>,
    Json(request): Json<Value>,
) -> Json<Value> {
    seen.note(format!("ttl {name} {request}"));
    let left_ms = &request["ttl_ms"];
    let ttl = json!({"expires_unix_ms": 1_700_000_000_000_u64, "left_ms": left_ms});
    let ttl = if left_ms.is_null() { Value::Null } else { ttl };
    Json(json!({"schema": "vmfork/1", "vm": name, "ttl": ttl}))
}
