//! Clones of a VM that runs on another host, started here.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody, ErrorCode};
use vmfork_engine::{Engine, EngineOptions};
use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange, PageSource};
use vmfork_qemu::probe::KvmFacts;
use vmfork_qemu::{Drives, Shape};

use super::SAME_VERSION;
use super::descriptor::{Descriptor, Order, Parent};
use crate::arrivals::{Arrival, Arrivals};
use crate::images::{Entry, Images};
use vmfork_fork::facts::{Facts, host};
use vmfork_fork::tickets::TicketOrigin;
use vmfork_fork::{Brood, Forker, Granted, Names, OnRun, Snapshot, Stem, Wanted};
use vmfork_host::admission::{ForkAsk, ForkGrant, Lease};
use vmfork_host::core::{Core, start_machines};
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
pub(crate) struct Here<'a> {
    pub(crate) forker: &'a Arc<Forker>,
    /// When the order came: what it says is left of a time is left from then on.
    pub(crate) arrived: Instant,
    pub(crate) images: &'a Images,
    pub(crate) engines: &'a Engines,
    pub(crate) arrivals: &'a Arrivals,
    /// The source of an image's pages, by its name and its number of pages.
    pub(crate) source: &'a (dyn Fn(ImageName, u64) -> Arc<dyn PageSource> + Sync),
}

/// Memory that this host reserved for an order before it came.
#[derive(Debug)]
pub(crate) struct SetAside {
    pub grant: ForkGrant,
    /// For what is still to fetch of the parent's memory: once for all asks for clones of it.
    pub coming: Vec<Arc<Lease>>,
}

/// Start the clones of a descriptor. `memory`: what was reserved for them.
/// `origin`: what is notified of the fate of a ticket's clones.
/// What fits is started; the rest is an error each.
///
/// # Errors
/// None was started.
pub(crate) async fn start(
    here: Here<'_>,
    descriptor: Descriptor,
    memory: Option<SetAside>,
    origin: Option<TicketOrigin>,
    given_up: CancellationToken,
) -> Result<Vec<CloneResult>, ErrorBody> {
    let core = &here.forker.core;
    let Descriptor { order, images, state } = descriptor;
    let began = Instant::now();
    let message = format!("start clones of `{}`", order.parent.name);
    let deadline = began + check(&message, &order)?;
    let (shape, drives) = check_host(core, &message, &order.facts).await?;
    let (memory, coming) = match memory {
        Some(SetAside { grant, coming }) => (Some(grant), coming),
        None => (None, Vec::new()),
    };
    let (engine, arrival) =
        tokio::task::block_in_place(|| open(&here, &message, &order, &images, &coming))?;
    drop(coming);
    core.metrics.observe_stage(Stage::Arrive, began.elapsed());

    let names: Vec<String> = order.clones.iter().map(|clone| clone.name.clone()).collect();
    let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let wanted = Names { wanted: Some(&names), stem: &order.parent.name, count, taken: None };
    // The names are kept until the clones have them.
    let (reservation, names) = vmfork_fork::reserve(core, wanted, order.all_or_nothing, &message)?;
    let grant = match memory {
        Some(grant) => grant,
        None => {
            let count = u32::try_from(reservation.names().len()).unwrap_or(count);
            let ask = ask(&message, &order, count, origin.is_some());
            core.admit(ask, order.all_or_nothing).await?
        }
    };
    let _no_refill = core.hold_pool();
    core.pool.want(&shape, core.config.pool as usize);
    let mut pending = start_machines(core, &shape, grant.clones.len(), &given_up);
    host::check_machine(&message, &order.facts, &mut pending, deadline).await.map_err(unlike)?;
    let snapshot = snapshot(&message, &order, &state, (engine, drives), grant.snapshot, arrival)?;
    let lifetime = order.lifetime.heard(here.arrived);
    let identity = Identity { job: order.job, lifetime, ..identity(&order.facts, &order.parent) };
    let brood = Brood {
        forker: Arc::clone(here.forker),
        stem: Arc::new(Stem { message, identity, agent: order.facts.agent.clone() }),
        snapshot: Arc::new(snapshot),
        began,
        deadline,
        origin,
        given_up,
    };
    let wanted = names.into_iter().zip(order.clones).map(|((name, is_kept), clone)| Wanted {
        name,
        is_kept,
        vmid: clone.vmid,
        ticket: clone.ticket,
    });
    let granted = Granted { leases: grant.clones, refused: grant.refused, pending };
    let results = brood.start(wanted.collect(), granted, order.all_or_nothing).await;
    drop(reservation);
    results
}

/// Whether an order can be carried out as it is. → how long it may take.
fn check(message: &str, order: &Order) -> Result<Duration, ErrorBody> {
    let names: Vec<String> = order.clones.iter().map(|clone| clone.name.clone()).collect();
    let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let timeout = vmfork_fork::check(message, count, Some(&names), Some(order.timeout_ms))?;
    if let Some(name) = names.iter().find(|name| !vmfork_api::name_is_valid(name)) {
        return Err(ErrorBody::new(ErrorCode::BadRequest, message)
            .cause(format!("`{name}` is no name of a VM"))
            .remedy(BUG));
    }
    Ok(timeout)
}

/// Whether this host is what the clones need. → the shape of their QEMUs, and what
/// their drives hold.
async fn check_host(
    core: &Core,
    message: &str,
    facts: &Facts,
) -> Result<(Shape, Drives), ErrorBody> {
    facts.check_accel(message, &KvmFacts::gather()).map_err(unlike)?;
    host::check_qemu(core, message, facts).await.map_err(unlike)?;
    host::shape_and_drives(core, message, facts).map_err(unlike)
}

/// The engine of the clones' memory, with what comes ahead on its way. Blocks while page tables are
/// built. `coming`: memory that was reserved for it.
fn open(
    here: &Here<'_>,
    message: &str,
    order: &Order,
    images: &[Entry],
    coming: &[Arc<Lease>],
) -> Result<(Arc<Engine>, Arc<Arrival>), ErrorBody> {
    let core = &here.forker.core;
    let name = images.last().map_or(ImageName { host: 0, image: 0 }, |entry| entry.name);
    let pages = order.facts.spec().memory_bytes / PAGE_BYTES;
    let engine = here.engines.get(name, || {
        let next = || core.next_image();
        let source = |image| (here.source)(image, pages);
        let image = here.images.open(images, pages, next, source);
        let image = image.map_err(|error| bad(message, &error))?;
        let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
        let engine = Engine::serve(image, &options, core.event_sink());
        let engine = Arc::new(engine.map_err(|error| failed(message, &error))?);
        core.add_engine(&engine);
        engine.predict();
        Ok::<_, ErrorBody>(engine)
    })?;
    let arrival = here.arrivals.of(name, &engine, &core.admission, message, coming)?;
    let (ahead, all) = (WorkingSet::default(), PageRange::first(engine.image().pages()));
    for (start, len) in &order.working_set {
        if let Ok(run) = PageRange::new(PageIdx(*start), *len) {
            ahead.record(run.intersect(&all));
        }
    }
    engine.fetch_first(ahead.runs());
    if let Some(bytes_per_s) = NonZeroU64::new(order.hydrate_bytes_per_s) {
        arrival.hydrate(bytes_per_s);
    }
    Ok((engine, arrival))
}

/// For memory for `count` of an order's clones.
fn ask<'a>(message: &'a str, order: &'a Order, count: u32, by_guest: bool) -> ForkAsk<'a> {
    ForkAsk {
        message,
        family: &order.parent.family,
        user: order.parent.user,
        ram_bytes: order.facts.spec().memory_bytes,
        cpus: order.facts.spec().cpus,
        count,
        by_guest,
        allowed: None,
    }
}

/// What each of the clones continues.
fn snapshot(
    message: &str,
    order: &Order,
    state: &[u8],
    (engine, drives): (Arc<Engine>, Drives),
    lease: Lease,
    arrival: Arc<Arrival>,
) -> Result<Snapshot, ErrorBody> {
    let state = vmfork_fork::state::write(state).map_err(|error| failed(message, &error))?;
    let lead =
        vmfork_fork::state::read(&state).ok().and_then(|state| vmfork_fork::state::lead_of(&state));
    Ok(Snapshot {
        state,
        lead,
        engine,
        drives,
        inheritance: order.facts.inheritance.clone(),
        fork: order.facts.fork,
        lease: Some(lease),
        provenance: Provenance::default().with(arrival),
        on_run: OnRun::default(),
        is_watched: order.is_watched,
    })
}

/// Of its clones, but for id, name, number and birth.
fn identity(facts: &Facts, parent: &Parent) -> Identity {
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
    ErrorBody::new(ErrorCode::BadRequest, message).cause(chain(error)).remedy(SAME_VERSION)
}

/// The host can't do it.
fn failed(message: &str, error: &dyn std::error::Error) -> ErrorBody {
    ErrorBody::new(ErrorCode::Host, message)
        .cause(chain(error))
        .remedy("`vmfork doctor` checks the host; the daemon's log has more")
}

/// How long a host may take beyond what its clones may: the way there and back.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use vmfork_fork::facts;

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
