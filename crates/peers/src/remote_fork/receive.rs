//! Clones of a VM that runs on another host, started here.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody};
use vmfork_engine::{Engine, EngineOptions};
use vmfork_image::{ImageName, PAGE_BYTES, PageIdx, PageRange, PageSource};
use vmfork_qemu::probe::KvmFacts;
use vmfork_qemu::{Drives, Shape};

use super::descriptor::{Descriptor, Order, Parent};
use crate::arrivals::{Arrival, Arrivals};
use crate::disks::{self, DiskEntry, Keeper, Needs};
use crate::error::{OrderError, RemoteForkError, StartError};
use crate::images::{Entry, Images};
use vmfork_fork::facts::{Facts, host};
use vmfork_fork::tickets::TicketOrigin;
use vmfork_fork::{
    Brood, Error as ForkError, Forker, Granted, Names, OnRun, Snapshot, Stem, Wanted,
};
use vmfork_host::admission::{ForkAsk, ForkGrant, Lease};
use vmfork_host::core::{Core, start_machines};
use vmfork_host::disks::DiskContent;
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
    /// The same, of the owner of a disk's pages.
    pub(crate) disk_source: &'a (dyn Fn(ImageName, u64) -> Arc<dyn PageSource> + Sync),
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
    let message = format!("start clones of `{}`", descriptor.order.parent.name);
    let started = carry_out(here, descriptor, memory, origin, (&message, given_up)).await;
    started.map_err(|error| error.to_body(message))
}

async fn carry_out(
    here: Here<'_>,
    descriptor: Descriptor,
    memory: Option<SetAside>,
    origin: Option<TicketOrigin>,
    (message, given_up): (&str, CancellationToken),
) -> Result<Vec<CloneResult>, RemoteForkError> {
    let core = &here.forker.core;
    let Descriptor { order, images, disks, state } = descriptor;
    let began = Instant::now();
    let deadline = began + check(&order)?;
    let (shape, drives) = check_host(core, &order.facts).await?;
    let (memory, coming) = match memory {
        Some(SetAside { grant, coming }) => (Some(grant), coming),
        None => (None, Vec::new()),
    };
    let (mut contents, needs, keeper) =
        tokio::task::block_in_place(|| open_disks(&here, &order.facts, &disks))?;
    core.disks.count_on(order.parent.user, &mut contents);
    let (engine, arrival) =
        tokio::task::block_in_place(|| open(&here, &order, &images, &coming, needs))?;
    // Whatever reads from the disks keeps what is lent, also after their VM.
    let _first = keeper.set(Arc::<Arrival>::clone(&arrival));
    drop(coming);
    core.metrics.observe_stage(Stage::Arrive, began.elapsed());

    let names: Vec<String> = order.clones.iter().map(|clone| clone.name.clone()).collect();
    let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let wanted = Names { wanted: Some(&names), stem: &order.parent.name, count, taken: None };
    // The names are kept until the clones have them.
    let (reservation, names) = vmfork_fork::reserve(core, wanted, order.all_or_nothing)?;
    let grant = match memory {
        Some(grant) => grant,
        None => {
            let count = u32::try_from(reservation.names().len()).unwrap_or(count);
            let ask = ask(message, &order, count, origin.is_some());
            core.admit(ask, order.all_or_nothing).await?
        }
    };
    let _no_refill = core.hold_pool();
    core.pool.want(&shape, core.config.pool as usize);
    let mut pending = start_machines(core, &shape, grant.clones.len(), &given_up);
    let machine = host::check_machine(&order.facts, &mut pending, deadline).await;
    machine.map_err(|error| RemoteForkError::Unlike(error.into()))?;
    let content = (engine, drives, contents);
    let snapshot = snapshot(&order, &state, content, grant.snapshot, arrival)?;
    let lifetime = order.lifetime.heard(here.arrived);
    let identity = Identity { job: order.job, lifetime, ..identity(&order.facts, &order.parent) };
    let brood = Brood {
        forker: Arc::clone(here.forker),
        stem: Arc::new(Stem {
            message: message.to_owned(),
            identity,
            agent: order.facts.agent.clone(),
        }),
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
    Ok(results.map_err(ForkError::Clone)?)
}

/// Whether an order can be carried out as it is. → how long it may take.
fn check(order: &Order) -> Result<Duration, RemoteForkError> {
    let names: Vec<String> = order.clones.iter().map(|clone| clone.name.clone()).collect();
    let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let timeout = vmfork_fork::check(count, Some(&names), Some(order.timeout_ms))?;
    match names.into_iter().find(|name| !vmfork_api::name_is_valid(name)) {
        Some(name) => Err(OrderError::Name { name }.into()),
        None => Ok(timeout),
    }
}

/// Whether this host is what the clones need. → the shape of their QEMUs, and what
/// their drives hold.
async fn check_host(core: &Core, facts: &Facts) -> Result<(Shape, Drives), RemoteForkError> {
    let unlike = RemoteForkError::Unlike;
    facts.check_accel(&KvmFacts::gather()).map_err(|error| unlike(error.into()))?;
    host::check_qemu(core, facts).await.map_err(unlike)?;
    host::shape_and_drives(core, facts).map_err(unlike)
}

/// The engine of the clones' memory, with what comes ahead on its way. Blocks while page tables are
/// built. `coming`: memory that was reserved for it.
fn open(
    here: &Here<'_>,
    order: &Order,
    images: &[Entry],
    coming: &[Arc<Lease>],
    needs: Needs,
) -> Result<(Arc<Engine>, Arc<Arrival>), RemoteForkError> {
    let core = &here.forker.core;
    let name = images.last().map_or(ImageName { host: 0, image: 0 }, |entry| entry.name);
    let pages = order.facts.spec().memory_bytes / PAGE_BYTES;
    let engine = here.engines.get(name, || {
        let next = || core.next_image();
        let source = |image| (here.source)(image, pages);
        let image = here.images.open(images, pages, next, source).map_err(OrderError::from)?;
        let options = EngineOptions { fill_unit_pages: core.config.fill_unit_pages.into() };
        let engine = Engine::serve(image, &options, core.event_sink());
        let engine = Arc::new(engine.map_err(StartError::from)?);
        core.add_engine(&engine);
        engine.predict();
        Ok::<_, RemoteForkError>(engine)
    })?;
    let arrival = here.arrivals.of(name, &engine, &core.admission, coming, needs)?;
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

/// What the clones' disks hold, in their order, and what is to come of it.
fn open_disks(
    here: &Here<'_>,
    facts: &Facts,
    entries: &[DiskEntry],
) -> Result<(Vec<DiskContent>, Needs, Keeper), RemoteForkError> {
    let specs = facts.spec().disks().map(|(_, spec)| spec.clone()).collect();
    let own = |name| here.images.lent_owner(name);
    let (disks, source) = (&here.forker.core.disks, here.disk_source);
    let opened = disks::open(here.images.disks(), disks, (specs, entries), own, source);
    Ok(opened.map_err(OrderError::from)?)
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
    order: &Order,
    state: &[u8],
    (engine, drives, disks): (Arc<Engine>, Drives, Vec<DiskContent>),
    lease: Lease,
    arrival: Arc<Arrival>,
) -> Result<Snapshot, StartError> {
    let state = vmfork_fork::state::write(state)?;
    let lead =
        vmfork_fork::state::read(&state).ok().and_then(|state| vmfork_fork::state::lead_of(&state));
    Ok(Snapshot {
        state,
        lead,
        engine,
        drives,
        disks,
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

/// How long a host may take beyond what its clones may: the way there and back.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use vmfork_api::ErrorCode;
    use vmfork_fork::facts;

    use super::*;

    #[test]
    fn who_forks_is_told_nothing_that_only_snapshots_have() {
        let unlike = |error| RemoteForkError::Unlike(error).to_body("start clones of `web`");
        let refused = facts::check_machine("pc-9", "pc-7");
        let error = unlike(refused.expect_err("another one").into());
        let remedy = error.remedy.as_deref().expect("a remedy");
        assert!(remedy.contains("`--host`") && !remedy.contains("--force"), "{remedy}");
        assert!(error.to_string().contains("`pc-9`, this host has `pc-7`"), "{error}");
        let disk = Facts::of_a_test(1 << 20).check_root(Some("ff"));
        let remedy = unlike(disk.expect_err("another one").into()).remedy.expect("a remedy");
        assert!(!remedy.contains("snapshot"), "{remedy}");
        // What the host itself lacks stays as it is said.
        let host = unlike(vmfork_fork::Error::NoQemu(vmfork_qemu::probe::ProbeError::NotFound));
        assert_eq!(host.code, ErrorCode::Host);
        assert!(host.remedy.is_some_and(|remedy| remedy.contains("apt-get")));
    }
}
