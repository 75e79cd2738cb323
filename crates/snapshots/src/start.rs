//! Starting VMs from a stored snapshot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, StartReply, StartRequest};
use vmfork_qemu::probe::KvmFacts;

use super::record::{self, Subject};
use super::{Library, Opened, SnapshotError};
use vmfork_fork::facts::host;
use vmfork_fork::{Brood, Granted, Names, OnRun, Snapshot, Stem, Wanted};
use vmfork_host::admission::ForkAsk;
use vmfork_host::core::start_machines;
use vmfork_host::error::outcome;
use vmfork_host::metrics::Stage;
use vmfork_host::quotas::User;
use vmfork_host::vm::{Identity, Provenance, now_unix_ms};

/// How long what a VM touches is recorded at most.
const RECORD_MAX: Duration = Duration::from_secs(300);

/// Start VMs. What fits is started; the rest is an error each. If this future is dropped, what was
/// started is ended.
///
/// # Errors
/// None was started.
pub async fn start(
    library: &Arc<Library>,
    user: User,
    name: &str,
    request: StartRequest,
) -> Result<StartReply, ErrorBody> {
    let given_up = CancellationToken::new();
    let _on_drop = given_up.clone().drop_guard();
    let message = format!("start snapshot `{name}`");
    let (library, name) = (Arc::clone(library), name.to_owned());
    // A task of its own: QEMUs that are half-way up are ended in order, also when the client
    // disconnects.
    let task =
        tokio::spawn(async move { carry_out(&library, (user, &name), request, given_up).await });
    outcome(task, message).await
}

async fn carry_out(
    library: &Arc<Library>,
    (user, name): (User, &str),
    request: StartRequest,
    given_up: CancellationToken,
) -> Result<StartReply, ErrorBody> {
    let core = &library.core;
    let (began, began_unix_ms) = (Instant::now(), now_unix_ms());
    let message = format!("start snapshot `{name}`");
    let wanted = request.names.as_deref();
    let deadline = began + vmfork_fork::check(&message, request.count, wanted, request.timeout_ms)?;
    let failed = |error: SnapshotError| error.to_body(&message);
    let opened = tokio::task::block_in_place(|| {
        library.snapshots.check_written(name, &message)?;
        library.snapshots.open(core, name).map_err(failed)
    })?;
    let open = began.elapsed();
    core.metrics.observe_stage(Stage::Open, open);
    opened.facts.check_accel(&message, &KvmFacts::gather())?;
    if !request.force {
        host::check_qemu(core, &message, &opened.facts).await?;
    }
    let (shape, disk) = host::shape_and_disk(core, &message, &opened.facts)?;
    opened.keep_disk(disk);
    tokio::task::block_in_place(|| opened.promise_memory(&core.admission, &message))?;

    let taken = library.forker.remote.names().await;
    let names = Names { wanted, stem: name, count: request.count, taken: taken.as_ref() };
    let (reservation, names) = vmfork_fork::reserve(core, names, request.all_or_nothing, &message)?;
    let ask = ForkAsk {
        message: &message,
        family: &opened.id.to_string(),
        user,
        ram_bytes: shape.memory_bytes,
        cpus: opened.facts.spec().cpus,
        count: u32::try_from(reservation.names().len()).unwrap_or(request.count),
        by_guest: false,
        allowed: None,
    };
    let grant = core.admit(ask, request.all_or_nothing).await?;

    // Until the last of them is ready.
    let _no_refill = core.hold_pool();
    core.pool.want(&shape, core.config.pool as usize);
    let mut pending = start_machines(core, &shape, grant.clones.len(), &given_up);
    super::prefetch::begin(library, name, &opened, request.prefetch, request.hydrate_mib_per_s);
    if !request.force {
        host::check_machine(&message, &opened.facts, &mut pending, deadline).await?;
    }
    let facts = &opened.facts;
    let snapshot = Arc::new(Snapshot {
        state: opened
            .state
            .try_clone()
            .map_err(|error| failed(SnapshotError::State(error.into())))?,
        lead: opened.lead.clone(),
        engine: Arc::clone(&opened.engine),
        inheritance: facts.inheritance.clone(),
        fork: facts.fork,
        lease: Some(grant.snapshot),
        provenance: provenance(name, &opened),
        on_run: learn(library, name, &opened),
        is_watched: false,
    });
    let brood = Brood {
        forker: Arc::clone(&library.forker),
        stem: Arc::new(stem(user, name, &opened)),
        snapshot,
        began,
        deadline,
        origin: None,
        given_up,
    };
    let wanted = (1..).zip(names).map(|(vmid, (name, is_kept))| Wanted {
        name,
        is_kept,
        vmid,
        ticket: None,
    });
    let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
    let vms = brood.start(wanted.collect(), granted, request.all_or_nothing).await?;
    drop(reservation);
    let granted = vms.iter().filter(|vm| vm.error.is_none()).count();
    let total_ms = vmfork_fork::ms(began.elapsed());
    tracing::info!(snapshot = name, requested = request.count, granted, total_ms, "started");
    Ok(StartReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        snapshot: name.to_owned(),
        requested: request.count,
        granted: u32::try_from(granted).unwrap_or(u32::MAX),
        began_unix_ms,
        open_ms: vmfork_fork::ms(open),
        total_ms,
        vms,
    })
}

/// Of VMs that are started from it.
fn provenance(name: &str, opened: &Arc<Opened>) -> Provenance {
    let provenance = Provenance::default().with(Arc::clone(opened));
    match opened.base(name) {
        Some(base) => provenance.with(Arc::new(base)),
        None => provenance,
    }
}

/// Learn what each VM touches that was started from it and begins to run. `name` is what it is
/// called now.
fn learn(library: &Arc<Library>, name: &str, opened: &Arc<Opened>) -> OnRun {
    let (library, name, opened) = (Arc::clone(library), name.to_owned(), Arc::clone(opened));
    OnRun::new(move |vm| {
        let Some(table) = opened.engine.image().table() else { return };
        let (name, id, table) = (name.clone(), opened.id, table.clone());
        record::start(&library, vm, Subject { name, id, table, time_max: RECORD_MAX });
    })
}

fn stem(user: User, name: &str, opened: &Opened) -> Stem {
    let facts = &opened.facts;
    let identity =
        Identity { name: name.to_owned(), snapshot: Some(name.to_owned()), ..facts.identity(user) };
    let message = format!("start snapshot `{name}`");
    Stem { message, identity, agent: facts.agent.clone() }
}
