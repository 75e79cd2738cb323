//! Clones of a VM that runs on another host, started here.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, ErrorCode};
use vmfork_engine::{Engine, EngineOptions};
use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange, PageSource};
use vmfork_qemu::probe::KvmFacts;

use super::arrivals::Arrivals;
use super::descriptor::{Descriptor, Order, Parent};
use super::images::Images;
use super::tickets::SetAside;
use vmfork_fork::facts::host;
use vmfork_fork::tickets::TicketOrigin;
use vmfork_fork::{Brood, Forker, Granted, Names, OnRun, Snapshot, Stem, Wanted};
use vmfork_host::admission::ForkAsk;
use vmfork_host::core::start_machines;
use vmfork_host::error::{BUG, chain};
use vmfork_host::metrics::Stage;
use vmfork_host::vm::{Identity, Provenance, WorkingSet};

/// The engines of other hosts' snapshots that VMs here were started from, for who starts more of
/// them.
#[derive(Debug, Default)]
pub(crate) struct Engines(Mutex<Vec<(ImageName, Weak<Engine>)>>);

impl Engines {
    /// The engine of a snapshot's image; `make` makes it. One at a time, so that there is one of
    /// each.
    fn get<E>(
        &self,
        name: ImageName,
        make: impl FnOnce() -> Result<Arc<Engine>, E>,
    ) -> Result<Arc<Engine>, E> {
        let mut engines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|(_, engine)| engine.strong_count() > 0);
        let known = engines.iter().find(|(known, _)| *known == name);
        if let Some(engine) = known.and_then(|(_, engine)| engine.upgrade()) {
            return Ok(engine);
        }
        let engine = make()?;
        engines.push((name, Arc::downgrade(&engine)));
        Ok(engine)
    }
}

/// What a host that starts others' clones works with.
pub(super) struct Here<'a> {
    pub(super) forker: &'a Arc<Forker>,
    pub(super) images: &'a Images,
    pub(super) engines: &'a Engines,
    pub(super) arrivals: &'a Arrivals,
    /// The source of an image's pages, by its name and its number of pages.
    pub(super) source: &'a (dyn Fn(ImageName, u64) -> Arc<dyn PageSource> + Sync),
}

/// Start the clones of a descriptor. `memory`: what was reserved for them.
/// `origin`: what is notified of the fate of a ticket's clones.
/// What fits is started; the rest is an error each.
///
/// # Errors
/// None was started.
pub(super) async fn start(
    here: Here<'_>,
    descriptor: Descriptor,
    memory: Option<SetAside>,
    origin: Option<TicketOrigin>,
    given_up: CancellationToken,
) -> Result<Vec<CloneResult>, ErrorBody> {
    let forker = here.forker;
    let core = &forker.core;
    let Descriptor { order, images, state } = descriptor;
    let Order { facts, parent, clones, .. } = order;
    let began = Instant::now();
    let message = format!("start clones of `{}`", parent.name);
    let names: Vec<String> = clones.iter().map(|clone| clone.name.clone()).collect();
    let count = u32::try_from(clones.len()).unwrap_or(u32::MAX);
    let timeout = vmfork_fork::check(&message, count, Some(&names), Some(order.timeout_ms))?;
    if let Some(name) = names.iter().find(|name| !vmfork_api::name_is_valid(name)) {
        return Err(ErrorBody::new(ErrorCode::BadRequest, message)
            .cause(format!("`{name}` is no name of a VM"))
            .remedy(BUG));
    }
    facts.check_accel(&message, &KvmFacts::gather()).map_err(unlike)?;
    host::check_qemu(core, &message, &facts).await.map_err(unlike)?;
    let (shape, _disk) = host::shape_and_disk(core, &message, &facts).map_err(unlike)?;

    let name = images.last().map_or(ImageName { host: 0, image: 0 }, |entry| entry.name);
    let engine = tokio::task::block_in_place(|| {
        let pages = facts.spec().memory_bytes / PAGE_BYTES;
        here.engines.get(name, || {
            let next = || core.next_image();
            let source = |image| (here.source)(image, pages);
            let image = here.images.open(&images, pages, next, source);
            let image = image.map_err(|error| bad(&message, &error))?;
            let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
            let engine = Engine::serve(image, &options, core.event_sink());
            let engine = Arc::new(engine.map_err(|error| failed(&message, &error))?);
            core.add_engine(&engine);
            engine.predict();
            Ok::<_, ErrorBody>(engine)
        })
    })?;
    let (memory, coming) = match memory {
        Some(SetAside { grant, coming }) => (Some(grant), coming),
        None => (None, Vec::new()),
    };
    let arrival = tokio::task::block_in_place(|| {
        here.arrivals.of(name, &engine, &core.admission, &message, &coming)
    })?;
    drop(coming);
    let (ahead, all) = (WorkingSet::default(), PageRange::first(engine.image().pages()));
    for (start, len) in order.working_set {
        if let Ok(run) = PageRange::new(PageIdx(start), len) {
            ahead.record(run.intersect(&all));
        }
    }
    engine.fetch_first(ahead.runs());
    if let Some(bytes_per_s) = NonZeroU64::new(order.hydrate_bytes_per_s) {
        arrival.hydrate(bytes_per_s);
    }
    core.metrics.observe_stage(Stage::Arrive, began.elapsed());

    let wanted = Names { wanted: Some(&names), stem: &parent.name, count, taken: None };
    let (reservation, names) = vmfork_fork::reserve(core, wanted, order.all_or_nothing, &message)?;
    let grant = match memory {
        Some(grant) => grant,
        None => {
            let ask = ForkAsk {
                message: &message,
                family: &parent.family,
                user: parent.user,
                ram_bytes: facts.spec().memory_bytes,
                cpus: facts.spec().cpus,
                count: u32::try_from(reservation.names().len()).unwrap_or(count),
                by_guest: origin.is_some(),
                allowed: None,
            };
            core.admit(ask, order.all_or_nothing).await?
        }
    };
    let _no_refill = core.hold_pool();
    core.pool.want(&shape, core.config.pool as usize);
    let mut pending = start_machines(core, &shape, grant.clones.len(), &given_up);
    let deadline = began + timeout;
    host::check_machine(&message, &facts, &mut pending, deadline).await.map_err(unlike)?;
    let state = vmfork_fork::state::write(&state).map_err(|error| failed(&message, &error))?;
    let lead =
        vmfork_fork::state::read(&state).ok().and_then(|state| vmfork_fork::state::lead_of(&state));
    let snapshot = Snapshot {
        state,
        lead,
        engine,
        inheritance: facts.inheritance.clone(),
        fork: facts.fork,
        lease: Some(grant.snapshot),
        provenance: Provenance::default().with(arrival),
        on_run: OnRun::default(),
        is_watched: order.is_watched,
    };
    let identity = Identity { job: order.job, ..identity(&facts, &parent) };
    let brood = Brood {
        forker: Arc::clone(forker),
        stem: Arc::new(Stem { message, identity, agent: facts.agent.clone() }),
        snapshot: Arc::new(snapshot),
        began,
        deadline,
        origin,
        given_up,
    };
    let wanted = names.into_iter().zip(clones).map(|((name, is_kept), clone)| Wanted {
        name,
        is_kept,
        vmid: clone.vmid,
        ticket: clone.ticket,
    });
    let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
    let results = brood.start(wanted.collect(), granted, order.all_or_nothing).await?;
    drop(reservation);
    Ok(results)
}

/// Of its clones, but for id, name, number and birth.
fn identity(facts: &vmfork_fork::facts::Facts, parent: &Parent) -> Identity {
    Identity {
        id: parent.id.clone(),
        name: parent.name.clone(),
        snapshot: parent.snapshot.clone(),
        family: parent.family.clone(),
        parent: Some((parent.id.clone(), parent.name.clone())),
        ancestors: parent.line(),
        ..facts.identity(parent.user)
    }
}

/// This host is not what the VM needs. What the starter of a snapshot may do about that, who forks
/// can't.
fn unlike(error: ErrorBody) -> ErrorBody {
    match error.code {
        ErrorCode::Conflict => error.remedy(
            "clones go on with the QEMU, the processor and the guest image of the VM's host: `--host` names hosts that have them",
        ),
        _ => error,
    }
}

/// What came can't be right.
fn bad(message: &str, error: &dyn std::error::Error) -> ErrorBody {
    ErrorBody::new(ErrorCode::BadRequest, message)
        .cause(chain(error))
        .remedy("do both hosts run the same version of vmfork? `vmfork cluster ls` tells")
}

/// The host can't do it.
fn failed(message: &str, error: &dyn std::error::Error) -> ErrorBody {
    ErrorBody::new(ErrorCode::Host, message)
        .cause(chain(error))
        .remedy("`vmfork doctor` checks the host; the daemon's log has more")
}

/// How long a host may take beyond what its clones may: the way there and back.
pub(super) const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_fork::facts::{self, Facts};

    #[test]
    fn who_forks_is_told_nothing_that_only_snapshots_have() {
        let refused = facts::check_machine("start clones of `web`", "pc-9", "pc-7");
        let error = unlike(refused.expect_err("another one"));
        let remedy = error.remedy.as_deref().expect("a remedy");
        assert!(remedy.contains("`--host`") && !remedy.contains("--force"), "{remedy}");
        assert!(error.to_string().contains("`pc-9`, this host has `pc-7`"), "{error}");
        let disk = Facts::of_a_test(1 << 20).check_root("start clones", Some("ff"));
        let remedy = unlike(disk.expect_err("another one")).remedy.expect("a remedy");
        assert!(!remedy.contains("snapshot"), "{remedy}");
        // What the host itself lacks stays as it is said.
        let host = ErrorBody::new(ErrorCode::Host, "m").remedy("`vmfork doctor`");
        assert_eq!(unlike(host.clone()), host);
    }
}
