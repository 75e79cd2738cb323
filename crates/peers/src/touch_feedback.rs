//! What a clone on this host touches, reported to the host of its parent. The parent's next fork
//! then sends first what clones need, and not what was fetched beside it
//! ([`vmfork_policy::transfer::Demanded::refine`]).
//!
//! ```text
//!   a fork's first hosts ─► their first clones ─► scans of their page tables,
//!                           after a while and at the end ─► the parent's host
//! ```
//!
//! Some clones of a fork are watched: the rest touch much the same. No VM waits for any of it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use vmfork_api::CloneResult;
use vmfork_cluster::HostId;
use vmfork_image::{ImageName, PageIdx, PageRange, PageTable, Source};
use vmfork_memory::TouchScan;
use vmfork_policy::ViewId;

use super::context::Context;
use super::error::{OrderError, RemoteForkError};
use super::member::Member;
use super::server::Caller;
use vmfork_host::core::Core;
use vmfork_host::error::chain;
use vmfork_host::vm::{LastLook, Vm};
use vmfork_rest::http::ApiError;

pub(super) const TOUCHED: &str = "/cluster/v1/touched";

/// Of an order's clones, at most this many are watched.
const CLONES_WATCHED: usize = 4;
/// When to look, since the clone was ready; and at its end. What was not touched by the first is
/// not needed soon.
const LOOKS: [Duration; 4] = [
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
];
/// Most runs that are reported, 1 MB. A clone with more reports none: half of them would be taken
/// for all.
const RUNS_MAX: usize = 65_536;
const TELL_WAIT: Duration = Duration::from_secs(10);

/// What a clone of a lent snapshot has touched until now.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Touched {
    /// Host and number of its image.
    snapshot: (u64, u64),
    /// First pages and numbers of pages.
    runs: Vec<(u64, u64)>,
}

/// Held by a VM that is watched.
#[derive(Debug)]
pub(crate) struct Watch {
    scan: TouchScan,
    view: Option<ViewId>,
    last: Mutex<Option<oneshot::Sender<Vec<PageRange>>>>,
}

impl Watch {
    /// What it has touched. `view`: the VM's own now. After a freeze it is another, whose pages are
    /// touched again.
    fn look(&self, view: Option<ViewId>) -> Option<Vec<PageRange>> {
        (view.is_some() && view == self.view).then(|| self.scan.touched().ok()).flatten()
    }
}

impl LastLook for Watch {
    fn last_look(&self, view: Option<ViewId>) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(last), Some(touched)) = (last, self.look(view)) {
            let _nobody_listens = last.send(touched);
        }
    }
}

/// Watch the first of these clones of `snapshot`, which host `of` has lent, and tell that host what
/// they touch.
pub(super) fn watch_some(
    member: &Arc<Member>,
    core: &Core,
    of: HostId,
    snapshot: ImageName,
    clones: &[CloneResult],
) {
    let ids = clones.iter().filter_map(|clone| clone.id.as_ref());
    // One that has ended already can't be watched.
    let vms = ids.filter_map(|id| core.registry.find("watch it", id).ok());
    vms.take(CLONES_WATCHED).for_each(|vm| watch(member, &vm, of, snapshot));
}

fn watch(member: &Arc<Member>, vm: &Arc<Vm>, of: HostId, snapshot: ImageName) {
    let Some(machine) = vm.machine() else { return };
    let (engine, view) = (machine.engine(), machine.view_id());
    let Some(table) = engine.and_then(|engine| engine.image().table().cloned()) else { return };
    let scan = tokio::task::block_in_place(|| machine.memory().touch_scan());
    let Ok(scan) = scan.inspect_err(|error| tracing::debug!(%error, "look at what a VM touches"))
    else {
        return;
    };
    let (sender, mut last) = oneshot::channel();
    let watch = Arc::new(Watch { scan, view, last: Mutex::new(Some(sender)) });
    vm.set_watch(Arc::clone(&watch) as Arc<dyn LastLook>);
    drop(machine);
    let (member, vm, began) = (Arc::clone(member), Arc::downgrade(vm), Instant::now());
    tokio::spawn(async move {
        for at in LOOKS {
            let (touched, is_last) = tokio::select! {
                () = tokio::time::sleep_until((began + at).into()) => {
                    let Some(vm) = vm.upgrade() else { return };
                    let view = vm.machine().and_then(|machine| machine.view_id());
                    (tokio::task::block_in_place(|| watch.look(view)), false)
                }
                touched = &mut last => (touched.ok(), true),
            };
            let Some(touched) = touched else { return };
            tell(&member, of, snapshot, &table, touched).await;
            if is_last {
                return;
            }
        }
    });
}

async fn tell(
    member: &Member,
    of: HostId,
    snapshot: ImageName,
    table: &PageTable,
    touched: Vec<PageRange>,
) {
    // Pages that were zero need no source.
    let runs = touched.into_iter().flat_map(|range| table.runs(range));
    let runs = runs.filter(|(_, source)| *source != Source::Zero);
    let runs: Vec<(u64, u64)> = runs.map(|(run, _)| (run.start().0, run.len())).collect();
    if runs.len() > RUNS_MAX {
        return;
    }
    let message = "tell what a clone touched";
    let told = match member.hosts.peer_of(of) {
        Ok(peer) => {
            let said = peer
                .ask::<_, ()>(
                    TOUCHED,
                    &Touched { snapshot: (snapshot.host, snapshot.image), runs },
                    TELL_WAIT,
                )
                .await;
            said.map_err(|error| chain(&error))
        }
        Err(error) => Err(chain(&error)),
    };
    if let Err(error) = told {
        tracing::debug!(error, %of, message);
    }
}

/// Another host tells what a clone there has touched. How many runs, the bound of a request's body
/// bounds.
pub(super) async fn hear(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(said): Json<Touched>,
) -> Result<Json<()>, ApiError> {
    let message = "hear what a clone has touched";
    let (member, _) = context.parts().map_err(|error| error.to_body(message))?;
    let run = |(start, len): &(u64, u64)| PageRange::new(PageIdx(*start), *len);
    let runs: Result<Vec<_>, _> = said.runs.iter().map(run).collect();
    let runs = runs.map_err(OrderError::from);
    let runs = runs.map_err(|error| RemoteForkError::from(error).to_body(message))?;
    tracing::debug!(host = %from, runs = runs.len(), "a clone's pages");
    let (host, image) = said.snapshot;
    member.images.touched(ImageName { host, image }, &runs);
    Ok(Json(()))
}
