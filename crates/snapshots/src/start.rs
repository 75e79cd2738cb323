//! Starting VMs from a stored snapshot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, StartReply, StartRequest};
use vmfork_qemu::probe::KvmFacts;
use vmfork_qemu::{Drives, Shape};

use crate::error::SnapshotError;
use crate::library::Library;
use crate::opened::Opened;
use crate::prefetch;
use crate::record::{self, Subject};
use vmfork_fork::facts::host;
use vmfork_fork::state::StateError;
use vmfork_fork::{Brood, Error as ForkError, Granted, Names, OnRun, Snapshot, Stem, Wanted};
use vmfork_host::admission::{ForkAsk, ForkGrant, Lease};
use vmfork_host::core::start_machines;
use vmfork_host::error::outcome;
use vmfork_host::lifetime::Lifetime;
use vmfork_host::metrics::Stage;
use vmfork_host::quotas::User;
use vmfork_host::vm::{Identity, Inherited, Provenance, now_unix_ms};

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
    let failed = message.clone();
    let task = tokio::spawn(async move {
        let outcome = carry_out(&library, (user, &name), request, given_up).await;
        outcome.map_err(|error| error.to_body(failed))
    });
    outcome(task, message).await
}

/// A start under way.
struct Start<'a> {
    library: &'a Arc<Library>,
    user: User,
    /// What the snapshot is called now.
    name: &'a str,
    request: StartRequest,
    message: String,
    began: Instant,
    deadline: Instant,
    given_up: CancellationToken,
}

async fn carry_out(
    library: &Arc<Library>,
    (user, name): (User, &str),
    request: StartRequest,
    given_up: CancellationToken,
) -> Result<StartReply, SnapshotError> {
    let (began, began_unix_ms) = (Instant::now(), now_unix_ms());
    let message = format!("start snapshot `{name}`");
    let wanted = request.names.as_deref();
    let timeout = vmfork_fork::check(request.count, wanted, request.timeout_ms)?;
    let deadline = began + timeout;
    let start = Start { library, user, name, request, message, began, deadline, given_up };
    let opened = start.open()?;
    let open = began.elapsed();
    library.core.metrics.observe_stage(Stage::Open, open);
    let (shape, drives) = start.check_host(&opened).await?;
    let vms = start.start(&opened, &shape, drives).await?;
    let granted = vms.iter().filter(|vm| vm.error.is_none()).count();
    let (requested, total_ms) = (start.request.count, vmfork_fork::ms(began.elapsed()));
    tracing::info!(snapshot = name, requested, granted, total_ms, "started");
    Ok(StartReply {
        schema: vmfork_api::SCHEMA.to_owned(),
        snapshot: name.to_owned(),
        requested,
        granted: u32::try_from(granted).unwrap_or(u32::MAX),
        began_unix_ms,
        open_ms: vmfork_fork::ms(open),
        total_ms,
        vms,
    })
}

impl Start<'_> {
    fn open(&self) -> Result<Arc<Opened>, SnapshotError> {
        let snapshots = &self.library.snapshots;
        tokio::task::block_in_place(|| {
            snapshots.check_written(self.name)?;
            snapshots.open(&self.library.core, self.name)
        })
    }

    /// Whether this host is what its VMs need, with memory for what they may touch. → the shape of
    /// their QEMUs, and what their drives hold.
    async fn check_host(&self, opened: &Opened) -> Result<(Shape, Drives), SnapshotError> {
        let core = &self.library.core;
        opened.facts.check_accel(&KvmFacts::gather())?;
        if !self.request.force {
            host::check_qemu(core, &opened.facts).await?;
        }
        let machine = host::shape_and_drives(core, &opened.facts)?;
        tokio::task::block_in_place(|| opened.promise_memory(&core.admission))?;
        Ok(machine)
    }

    /// Memory for as many VMs as have names.
    async fn admit(&self, opened: &Opened, names: usize) -> Result<ForkGrant, SnapshotError> {
        let spec = opened.facts.spec();
        let ask = ForkAsk {
            message: &self.message,
            family: &opened.id.to_string(),
            user: self.user,
            ram_bytes: spec.memory_bytes,
            cpus: spec.cpus,
            count: u32::try_from(names).unwrap_or(self.request.count),
            by_guest: false,
            allowed: None,
        };
        Ok(self.library.core.admit(ask, self.request.all_or_nothing).await?)
    }

    async fn start(
        &self,
        opened: &Arc<Opened>,
        shape: &Shape,
        drives: Drives,
    ) -> Result<Vec<CloneResult>, SnapshotError> {
        let Self { library, request, name, .. } = self;
        let core = &library.core;
        let inherited = opened.facts.inherited.with_labels(&request.labels)?;
        let taken = library.forker.remote.names().await;
        let names = Names {
            wanted: request.names.as_deref(),
            stem: name,
            count: request.count,
            taken: taken.as_ref(),
        };
        // The names are kept until the VMs have them.
        let (reservation, names) = vmfork_fork::reserve(core, names, request.all_or_nothing)?;
        let grant = self.admit(opened, reservation.names().len()).await?;
        // Until the last of them is ready.
        let _no_refill = core.hold_pool();
        core.pool.want(shape, core.config.pool as usize);
        let mut pending = start_machines(core, shape, grant.clones.len(), &self.given_up);
        prefetch::begin(library, name, opened, request.prefetch, request.hydrate_mib_per_s);
        if !request.force {
            host::check_machine(&opened.facts, &mut pending, self.deadline).await?;
        }
        let brood = Brood {
            forker: Arc::clone(&library.forker),
            stem: Arc::new(stem(self.user, name, opened, (inherited, request.ttl_ms))),
            snapshot: Arc::new(self.snapshot(opened, drives, grant.snapshot)?),
            began: self.began,
            deadline: self.deadline,
            origin: None,
            given_up: self.given_up.clone(),
        };
        let wanted = (1..).zip(names).map(|(vmid, (name, is_kept))| Wanted {
            name,
            is_kept,
            vmid,
            ticket: None,
        });
        let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
        let started = brood.start(wanted.collect(), granted, request.all_or_nothing).await;
        drop(reservation);
        Ok(started.map_err(ForkError::Clone)?)
    }

    /// What each of the VMs continues.
    fn snapshot(
        &self,
        opened: &Arc<Opened>,
        drives: Drives,
        lease: Lease,
    ) -> Result<Snapshot, SnapshotError> {
        let facts = &opened.facts;
        let mut disks = opened.disks.clone();
        self.library.core.disks.count_on(self.user, &mut disks);
        Ok(Snapshot {
            state: opened.state.try_clone().map_err(StateError::Memory)?,
            lead: opened.lead.clone(),
            engine: Arc::clone(&opened.engine),
            drives,
            disks,
            inheritance: facts.inheritance.clone(),
            fork: facts.fork,
            lease: Some(lease),
            provenance: provenance(self.name, opened),
            on_run: learn(self.library, self.name, opened),
            is_watched: false,
        })
    }
}

/// Of VMs that are started from it.
fn provenance(name: &str, opened: &Arc<Opened>) -> Provenance {
    Provenance::default().with(Arc::clone(opened)).with(Arc::new(opened.bases(name)))
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

fn stem(
    user: User,
    name: &str,
    opened: &Opened,
    (inherited, ttl_ms): (Inherited, Option<u64>),
) -> Stem {
    let facts = &opened.facts;
    let identity = Identity {
        name: name.to_owned(),
        snapshot: Some(name.to_owned()),
        inherited,
        lifetime: Lifetime { own: ttl_ms.map(Duration::from_millis), inherited: None },
        ..facts.identity(user)
    };
    let message = format!("start snapshot `{name}`");
    Stem { message, identity, agent: facts.agent.clone() }
}
