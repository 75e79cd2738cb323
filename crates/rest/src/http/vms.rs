use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use vmfork_api::labels::{LabelFilters, match_all};
use vmfork_api::schema::{Name, Switch};
use vmfork_api::{
    ErrorBody, ForkReply, ForkRequest, KillRequest, LabelFilter, RunRequest, TreeNode, Vm, VmDetail,
};

use super::App;
use super::check;
use super::elsewhere::{self, OfHosts, PassedOn};
use super::error::ApiError;
use super::extract::{Body, By, Filtered, OptionalBody, Params, VmRef, switch};
use vmfork_control::Killed;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListParams {
    /// With the VMs that have ended.
    #[serde(default, deserialize_with = "switch")]
    #[param(value_type = Option<Switch>)]
    all: bool,
}

/// For the OpenAPI document; [`Filtered`] reads it.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct LabelParams {
    /// Only what has this label: `KEY` or `KEY=VALUE`. Several must all match.
    #[param(value_type = Option<LabelFilters>, style = Form, explode)]
    #[expect(dead_code, reason = "for its schema")]
    label: Vec<String>,
}

/// No other parameters.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoParams {}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RemoveParams {
    /// Kill it first.
    #[serde(default, deserialize_with = "switch")]
    #[param(value_type = Option<Switch>)]
    force: bool,
}

/// The VMs of all hosts of the cluster, this one's first. Where hosts do not answer, `x-vmfork-missing-hosts` names them.
#[utoipa::path(get, path = "/v1/vms", tag = "vms", params(ListParams, LabelParams), responses(
    (status = 200, body = Vec<Vm>), (status = "default", body = ErrorBody)
))]
pub(super) async fn list(
    State(app): State<App>,
    PassedOn(passed_on): PassedOn,
    Filtered(filters, params): Filtered<ListParams>,
) -> Result<OfHosts<Vec<Vm>>, ApiError> {
    let here = app.control.vms(params.all).await?;
    let path = if params.all { "/v1/vms?all=true" } else { "/v1/vms" };
    let mut all = elsewhere::all_vms(&app, passed_on, path, here).await;
    all.document.retain(|vm| match_all(&filters, &vm.labels));
    Ok(all)
}

/// Start a VM from an image, and wait until its agent has answered.
#[utoipa::path(post, path = "/v1/vms", tag = "vms", request_body = RunRequest, responses(
    (status = 201, body = Vm),
    (status = 507, description = "It does not fit into memory", body = ErrorBody),
    (status = "default", body = ErrorBody)
))]
pub(super) async fn run(
    State(app): State<App>,
    By(user): By,
    Body(request): Body<RunRequest>,
) -> Result<(StatusCode, Json<Vm>), ApiError> {
    check::run(&request)?;
    Ok((StatusCode::CREATED, Json(app.control.run(user, request).await?)))
}

/// All that is known of one VM.
#[utoipa::path(get, path = "/v1/vms/{vm}", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    responses((status = 200, body = VmDetail), (status = "default", body = ErrorBody))
)]
pub(super) async fn inspect(
    State(app): State<App>,
    VmRef(vm): VmRef,
) -> Result<Json<VmDetail>, ApiError> {
    let mut detail = app.control.inspect(&vm).await?;
    elsewhere::name_host(&app, [&mut detail.vm]);
    Ok(Json(detail))
}

/// Forget a VM that has ended.
#[utoipa::path(delete, path = "/v1/vms/{vm}", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id"), RemoveParams),
    responses(
        (status = 204, description = "Forgotten"),
        (status = 409, description = "It runs, and `force` was not given", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn remove(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Params(params): Params<RemoveParams>,
) -> Result<StatusCode, ApiError> {
    app.control.remove(&vm, params.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// End a VM. Without a body: at once. Where hosts of the cluster do not answer that may have VMs of its family,
/// `x-vmfork-missing-hosts` names them.
#[utoipa::path(post, path = "/v1/vms/{vm}/kill", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    request_body = Option<KillRequest>,
    responses((status = 200, body = Vm), (status = "default", body = ErrorBody))
)]
pub(super) async fn kill(
    State(app): State<App>,
    VmRef(vm): VmRef,
    OptionalBody(request): OptionalBody<KillRequest>,
) -> Result<OfHosts<Vm>, ApiError> {
    check::kill(&request)?;
    let Killed { mut vm, missing } = app.control.kill(&vm, request).await?;
    elsewhere::name_host(&app, [&mut vm]);
    Ok(OfHosts { document: vm, missing })
}

/// Fork a running VM. What fits is started; the rest is an error of that clone each.
#[utoipa::path(post, path = "/v1/vms/{vm}/fork", tag = "vms",
    params(("vm" = Name, Path, description = "A VM's name or id")),
    request_body = ForkRequest,
    responses(
        (status = 200, body = ForkReply),
        (status = 507, description = "Not all fit, and all were insisted on", body = ErrorBody),
        (status = "default", body = ErrorBody)
    )
)]
pub(super) async fn fork(
    State(app): State<App>,
    VmRef(vm): VmRef,
    Body(request): Body<ForkRequest>,
) -> Result<Json<ForkReply>, ApiError> {
    check::fork(&request)?;
    Ok(Json(app.control.fork(&vm, request).await?))
}

/// The families: who was forked from whom. With `label`: the VMs that match, and their ancestors.
#[utoipa::path(get, path = "/v1/tree", tag = "vms", params(LabelParams), responses(
    (status = 200, body = Vec<TreeNode>), (status = "default", body = ErrorBody)
))]
pub(super) async fn tree(
    State(app): State<App>,
    PassedOn(passed_on): PassedOn,
    Filtered(filters, NoParams {}): Filtered<NoParams>,
) -> Result<OfHosts<Vec<TreeNode>>, ApiError> {
    let here = app.control.tree().await?;
    let mut all = elsewhere::all_trees(&app, passed_on, here).await;
    all.document.retain_mut(|node| keep_matching(node, &filters));
    Ok(all)
}

/// Whether a VM matches, or one that descends from it; those that do neither go.
fn keep_matching(node: &mut TreeNode, filters: &[LabelFilter]) -> bool {
    node.children.retain_mut(|child| keep_matching(child, filters));
    !node.children.is_empty() || match_all(filters, &node.vm.labels)
}
