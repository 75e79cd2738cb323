//! Requests about VMs of other hosts of the cluster, which are passed on to where those are.
//!
//! A request that has been passed on is answered by the host that gets it, and goes no farther.

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::convert::Infallible;

use futures_util::future::BoxFuture;
use vmfork_api::{ErrorBody, TreeNode, Vm};

use super::App;
use super::error::ApiError;
use vmfork_control::Answer;

/// Says that another host has passed the request on.
pub const PASSED_ON: HeaderName = HeaderName::from_static("x-vmfork-passed-on");

/// Names the hosts whose part an answer lacks, since they do not answer.
const MISSING: HeaderName = HeaderName::from_static("x-vmfork-missing-hosts");

/// The other hosts of the cluster, if this one is in any.
pub trait Elsewhere: Send + Sync + 'static {
    /// The host that has a VM, by name or id, if another one has it. An error if that can't be told while hosts are silent.
    fn host_of<'a>(&'a self, vm: &'a str) -> Answer<'a, Option<String>>;
    /// Have a host answer a request.
    fn pass_on(&self, host: String, request: Request) -> Answer<'_, Response>;
    /// What this host is called there.
    fn here(&self) -> Option<String>;
    /// What every other host answers to a GET of this path, with its name; those that are gone are not asked.
    fn ask_all<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Vec<(String, Answered)>>;
}

/// The body of an answer that is well.
pub type Answered = Result<Bytes, ErrorBody>;

/// `/v1/vms/{vm}` and all below it, if another host has the VM.
pub(super) async fn pass_on(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(elsewhere) = app.elsewhere.as_ref().filter(|_| !was_passed_on(request.headers()))
    else {
        return next.run(request).await;
    };
    let Some(vm) = vm_of(request.uri().path()) else { return next.run(request).await };
    if app.control.has_vm(&vm) {
        return next.run(request).await;
    }
    let passed = match elsewhere.host_of(&vm).await {
        Ok(Some(host)) => elsewhere.pass_on(host, request).await,
        Ok(None) => return next.run(request).await,
        Err(error) => Err(error),
    };
    passed.unwrap_or_else(|error| ApiError::from(error).into_response())
}

fn was_passed_on(headers: &HeaderMap) -> bool {
    headers.contains_key(PASSED_ON)
}

/// Whether another host has passed the request on.
#[derive(Debug)]
pub(super) struct PassedOn(pub(super) bool);

impl<S: Send + Sync> FromRequestParts<S> for PassedOn {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(was_passed_on(&parts.headers)))
    }
}

/// Say of VMs of this host where they are.
pub(super) fn name_host<'a>(app: &App, vms: impl IntoIterator<Item = &'a mut Vm>) {
    let Some(here) = app.elsewhere.as_ref().and_then(|elsewhere| elsewhere.here()) else { return };
    for vm in vms {
        vm.host = Some(here.clone());
    }
}

/// The VM that a path is about. Names need no decoding: what has a `%` in it is none.
fn vm_of(path: &str) -> Option<String> {
    let vm = path.strip_prefix("/v1/vms/")?.split('/').next()?;
    vmfork_api::name_is_valid(vm).then(|| vm.to_owned())
}

/// A document that other hosts have a part in, and the names of those that don't answer.
#[derive(Debug)]
pub(super) struct OfHosts<T> {
    pub(super) document: T,
    pub(super) missing: Vec<String>,
}

impl<T: serde::Serialize> IntoResponse for OfHosts<T> {
    fn into_response(self) -> Response {
        let mut response = axum::Json(self.document).into_response();
        if let Ok(names) = HeaderValue::from_str(&self.missing.join(","))
            && !self.missing.is_empty()
        {
            response.headers_mut().insert(MISSING, names);
        }
        response
    }
}

/// This host's list, and those of all others at the same path.
async fn with_all<T: serde::de::DeserializeOwned>(
    app: &App,
    passed_on: bool,
    path: &str,
    mut list: Vec<T>,
) -> OfHosts<Vec<T>> {
    let mut missing = Vec::new();
    let Some(elsewhere) = app.elsewhere.as_ref().filter(|_| !passed_on) else {
        return OfHosts { document: list, missing };
    };
    for (host, answered) in elsewhere.ask_all(path).await {
        let parsed = answered.map_err(|error| error.to_string()).and_then(|body| {
            serde_json::from_slice::<Vec<T>>(&body).map_err(|error| error.to_string())
        });
        match parsed {
            Ok(theirs) => list.extend(theirs),
            Err(error) => {
                tracing::info!(host, error, "not asked for its VMs");
                missing.push(host);
            }
        }
    }
    OfHosts { document: list, missing }
}

/// The VMs of all hosts.
pub(super) async fn all_vms(
    app: &App,
    passed_on: bool,
    path: &str,
    mut here: Vec<Vm>,
) -> OfHosts<Vec<Vm>> {
    name_host(app, &mut here);
    with_all(app, passed_on, path, here).await
}

/// The families, wherever their VMs are.
pub(super) async fn all_trees(
    app: &App,
    passed_on: bool,
    mut here: Vec<TreeNode>,
) -> OfHosts<Vec<TreeNode>> {
    let mut vms = Vec::new();
    here.iter_mut().for_each(|node| each_vm(node, &mut vms));
    name_host(app, vms);
    let OfHosts { document, missing } = with_all(app, passed_on, "/v1/tree", here).await;
    OfHosts { document: joined(document), missing }
}

/// Trees of several hosts as one forest: what was forked on one host from a VM of another hangs below that.
fn joined(forest: Vec<TreeNode>) -> Vec<TreeNode> {
    let mut roots: Vec<TreeNode> = Vec::new();
    // Those whose parent has not been seen yet; a parent may hang below any other.
    let mut waiting = forest;
    loop {
        let before = waiting.len();
        let mut left = Vec::new();
        for node in std::mem::take(&mut waiting) {
            let Some(parent) = node.vm.parent_id.clone() else {
                roots.push(node);
                continue;
            };
            let below = roots.iter_mut().chain(&mut left).find_map(|root| find(root, &parent));
            match below {
                Some(place) => place.children.push(node),
                None => left.push(node),
            }
        }
        waiting = left;
        if waiting.len() == before {
            break;
        }
    }
    roots.append(&mut waiting);
    roots
}

fn find<'a>(node: &'a mut TreeNode, id: &str) -> Option<&'a mut TreeNode> {
    if node.vm.id == id {
        return Some(node);
    }
    node.children.iter_mut().find_map(|child| find(child, id))
}

fn each_vm<'a>(node: &'a mut TreeNode, vms: &mut Vec<&'a mut Vm>) {
    vms.push(&mut node.vm);
    node.children.iter_mut().for_each(|child| each_vm(child, vms));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: &str, parent: Option<&str>, children: Vec<TreeNode>) -> TreeNode {
        let vm = serde_json::json!({
            "id": id, "name": id, "image": "default", "family": "root", "parent": parent, "parent_id": parent,
            "vmid": 0, "state": "running", "reason": null, "accel": "tcg", "cpus": 1, "memory_mib": 64,
            "created_unix_ms": 0, "ready_ms": null, "pid": null, "clones": 0, "private_bytes": 0,
            "shared_bytes": 0, "faults": 0
        });
        TreeNode { vm: serde_json::from_value(vm).expect("a VM"), children }
    }

    fn text(node: &TreeNode) -> String {
        let children: Vec<_> = node.children.iter().map(text).collect();
        format!("{}({})", node.vm.id, children.join(" "))
    }

    #[test]
    fn what_was_forked_on_another_host_hangs_below_its_parent() {
        // Of three hosts, in any order; the middle of a line may be listed last.
        let forest = vec![
            node("deep", Some("middle"), Vec::new()),
            node("root", None, vec![node("here", Some("root"), Vec::new())]),
            node("orphan", Some("forgotten"), Vec::new()),
            node("middle", Some("here"), Vec::new()),
        ];
        let joined: Vec<_> = joined(forest).iter().map(text).collect();
        assert_eq!(joined, ["root(here(middle(deep())))", "orphan()"]);
    }

    #[test]
    fn only_paths_about_a_vm_are_passed_on() {
        assert_eq!(vm_of("/v1/vms/web.1/exec").as_deref(), Some("web.1"));
        assert_eq!(vm_of("/v1/vms/web").as_deref(), Some("web"));
        for none in ["/v1/vms", "/v1/vms/", "/v1/tree", "/v1/vms/..%2f", "/v1/snapshots/web"] {
            assert_eq!(vm_of(none), None, "{none}");
        }
    }
}
