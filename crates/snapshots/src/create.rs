//! Taking a snapshot of a running VM, and writing it to the store.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use vmfork_api::{Compression, ErrorBody, SnapshotRequest};
use vmfork_image::{BLOCK_PAGES, BlockIdx, PAGE_BYTES, PageRange, PageTable, Source};
use vmfork_store::{Descriptor, Draft, Extent, ImageDraft, Role, SnapshotId, StoreError};

use crate::bases::Bases;
use crate::disks::{self, FrozenDisk};
use crate::error::SnapshotError;
use crate::library::{Library, Snapshots};
use crate::record::{self, Subject};
use crate::tell::Tell;
use crate::under_way::{Doing, Listed, UnderWay};
use crate::work::{CancelOnDrop, blocking};
use vmfork_fork::Snapshot;
use vmfork_fork::facts::{self, Facts};
use vmfork_host::core::Core;
use vmfork_host::disks::DiskContent;
use vmfork_host::vm::Vm;

/// How long the freeze may take with all that leads to it.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long finding what the VM had written may take: 1 ms per GiB where nothing is in the way.
const SEAL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long what the VM touches is recorded, where the request does not say.
const RECORD_DEFAULT: Duration = Duration::from_secs(300);
/// Fast, and within a tenth of the next levels' size; see docs/format.md.
pub(super) const ZSTD_LEVEL: i32 = 1;
/// Pages that are compressed, and fetched, together; see docs/format.md for how it was measured.
pub(super) const CHUNK_PAGES: u64 = 64;

/// Take a snapshot. → when the VM continues or, with `wait`, when it is stored.
/// If a caller that waits gives up, nothing is stored.
///
/// # Errors
/// There is no snapshot of it.
pub async fn create(
    library: &Arc<Library>,
    request: SnapshotRequest,
) -> Result<vmfork_api::Snapshot, ErrorBody> {
    let vm = library.core.registry.find("take a snapshot of", &request.vm)?;
    let name = request.name.clone();
    let message = format!("take snapshot `{name}` of `{}`", vm.name());
    let failed = |error: SnapshotError| error.to_body(&message);
    check(&request).map_err(failed)?;
    let inherited = vm.identity.inherited.with_labels(&request.labels);
    let inherited = inherited.map_err(|error| failed(error.into()))?;
    let placed = library.snapshots.place(&name, Doing::Write).map_err(failed)?;
    let (frozen, pause) = match request.disk_only {
        false => Frozen::all(&library.core, &vm).await?,
        true => Frozen::disks(&library.core, &vm).await?,
    };
    let facts = facts_of(&vm, &frozen, pause).await.map_err(failed)?;
    let mut facts = Facts { inherited, ..facts };
    disks::put_specs(&mut facts.inherited.spec, &frozen.disks);
    let bases = match request.full || request.keep_zero_pages {
        true => Bases::default(),
        false => {
            tokio::task::block_in_place(|| library.snapshots.usable_bases(&vm, request.disk_only))
        }
    };
    let id = SnapshotId::random().map_err(|error| SnapshotError::State(error.into()));
    let id = id.map_err(failed)?;
    let table = tokio::task::block_in_place(|| frozen.memory.as_ref().map(sealed_table));
    let table = table.transpose().map_err(failed)?;
    let (base, pause_ms) = (bases.name().map(ToOwned::to_owned), facts.pause_ms);
    tracing::info!(snapshot = name, vm = vm.name(), pause_ms, base, "snapshot taken");
    let under_way = Arc::clone(&placed.under_way);
    let disk_only = request.disk_only;
    under_way.list(Listed { facts: facts.clone(), base, disk_only });
    let time_max = request.record_ms.map_or(RECORD_DEFAULT, Duration::from_millis);
    if let Some(table) = table.clone().filter(|_| !time_max.is_zero()) {
        record::start(library, &vm, Subject { name: name.clone(), id, table, time_max });
    }
    let wait = request.wait;
    let writing = {
        let (library, vm) = (Arc::clone(library), Arc::clone(&vm));
        let order = Order { request, id, table, facts, bases, frozen };
        blocking(move || {
            let tell = Tell { vm: Some(vm.identity.in_event()), ..library.tell() };
            tell.stored_by(&placed.under_way.work);
            let outcome = write(&library, &vm, order, &placed.under_way);
            placed.ends(outcome.as_ref().err());
            outcome.map(drop)
        })
    };
    if !wait {
        // It goes on.
        drop(writing);
        return Ok(library.snapshots.listed_under_way(&under_way));
    }
    let _cancel = CancelOnDrop(Arc::clone(&under_way.work));
    writing.await.map_err(failed)?;
    library.snapshots.listed(&library.core, &name)
}

/// Whether what is asked for goes together.
///
/// # Errors
/// It does not: something is asked of a memory that is not stored.
fn check(request: &SnapshotRequest) -> Result<(), SnapshotError> {
    let records = request.record_ms.is_some_and(|ms| ms > 0);
    match [("keep_zero_pages", request.keep_zero_pages), ("record_ms", records)]
        .into_iter()
        .find(|(_, is_asked)| request.disk_only && *is_asked)
    {
        Some((option, _)) => Err(SnapshotError::NeedsMemory { option }),
        None => Ok(()),
    }
}

/// What is stored of a VM that stood still.
#[derive(Debug)]
struct Frozen {
    disks: Vec<DiskContent>,
    /// `None`: only the disks are stored.
    memory: Option<Snapshot>,
}

impl Frozen {
    async fn all(core: &Arc<Core>, vm: &Arc<Vm>) -> Result<(Self, Duration), ErrorBody> {
        let frozen = vmfork_fork::freeze_only(core, vm, FREEZE_TIMEOUT).await?;
        let disks = frozen.snapshot.disks.clone();
        Ok((Self { disks, memory: Some(frozen.snapshot) }, frozen.pause))
    }

    async fn disks(core: &Arc<Core>, vm: &Arc<Vm>) -> Result<(Self, Duration), ErrorBody> {
        let frozen = vmfork_fork::freeze_disks_only(core, vm, FREEZE_TIMEOUT).await?;
        Ok((Self { disks: frozen.disks, memory: None }, frozen.pause))
    }
}

async fn facts_of(vm: &Arc<Vm>, frozen: &Frozen, pause: Duration) -> Result<Facts, SnapshotError> {
    let machine = vm.running_machine().map_err(|_| SnapshotError::Ended)?;
    let memory = frozen.memory.as_ref();
    let frozen = facts::Frozen {
        machine_type: facts::host::machine_type(&machine).await?,
        inheritance: memory.and_then(|snapshot| snapshot.inheritance.clone()),
        fork: memory.map_or(0, |snapshot| snapshot.fork),
        pause_ms: vmfork_fork::ms(pause),
    };
    Ok(Facts::of(&vm.identity, &machine, vm.agent(), frozen))
}

/// What a frozen memory's pages are by the table, which is complete some milliseconds after the
/// freeze.
fn sealed_table(frozen: &Snapshot) -> Result<PageTable, SnapshotError> {
    let is_sealed = frozen.engine.wait_sealed(SEAL_TIMEOUT);
    let table = frozen.engine.image().table().filter(|_| is_sealed).cloned();
    let seconds = SEAL_TIMEOUT.as_secs();
    table.ok_or(SnapshotError::NotSealed { seconds })
}

#[derive(Debug)]
struct Order {
    request: SnapshotRequest,
    id: SnapshotId,
    /// Of the frozen memory.
    table: Option<PageTable>,
    facts: Facts,
    bases: Bases,
    frozen: Frozen,
}

/// Write all of it. Blocks for as long as that takes.
fn write(
    library: &Library,
    vm: &Arc<Vm>,
    order: Order,
    under_way: &UnderWay,
) -> Result<Descriptor, SnapshotError> {
    let Order { request, id, table, facts, bases, frozen } = order;
    let Frozen { disks, memory } = &frozen;
    let disks = FrozenDisk::all(disks)?;
    let draft = Draft {
        name: request.name.clone(),
        id: Some(id),
        images: Vec::new(),
        state: match memory {
            Some(snapshot) => vmfork_fork::state::read(&snapshot.state)?,
            None => Vec::new(),
        },
        vm: serde_json::to_value(&facts)
            .map_err(|source| SnapshotError::Facts { name: under_way.name.clone(), source })?,
    };
    let read = |role: &Role, range: PageRange, bytes: &mut [u8]| match (role, memory) {
        (Role::Memory, Some(snapshot)) => {
            snapshot.engine.image().read(range, bytes).map_err(io::Error::other)
        }
        (role, _) => match disks.iter().find(|disk| disk.role == *role) {
            Some(disk) => disk.read(range, bytes),
            None => Err(io::ErrorKind::NotFound.into()),
        },
    };
    let bases = match request.full {
        true => bases,
        false => bases.or(library.snapshots.stored_bases(&disks)),
    };
    let on = |bases: &Bases| {
        let memory = table.iter().map(|table| memory_draft(table, bases, &request));
        let disks = disks.iter().map(|disk| disk_draft(disk, bases, compression(&request)));
        Draft { images: memory.chain(disks).collect(), ..draft.clone() }
    };
    let store = &library.snapshots.store;
    let mut bases = bases;
    let descriptor = loop {
        let error = match store.create(on(&bases), &read, &under_way.work) {
            Ok(descriptor) => break descriptor,
            Err(error) if bases.is_empty() || !is_of_the_base(&error) => return Err(error.into()),
            Err(error) => vmfork_host::error::chain(&error),
        };
        // Those that are still there may do: once, since one that is damaged stays.
        let left = library.snapshots.that_are_there(&bases);
        let left = if left.len() < bases.len() { left } else { Bases::default() };
        tracing::warn!(snapshot = under_way.name, base = bases.name(), error, "written again");
        bases = left;
        let base = bases.name().map(ToOwned::to_owned);
        let (facts, disk_only) = (facts.clone(), request.disk_only);
        under_way.list(Listed { facts, base, disk_only });
        under_way.begin_anew();
    };
    let counts = descriptor.counts();
    tracing::info!(
        snapshot = descriptor.name,
        own_mib = (counts.own_pages * PAGE_BYTES) >> 20,
        stored_mib = counts.stored_bytes >> 20,
        "snapshot stored"
    );
    let memory = table.map(|table| (Role::Memory, table)).into_iter();
    let disks = disks.into_iter().map(|disk| (disk.role, disk.table));
    let newer = Bases::of((&descriptor.name, id), memory.chain(disks));
    let earlier = vm.provenance().get::<Bases>().unwrap_or_default();
    vm.add_provenance(Arc::new(earlier.with(newer)));
    Ok(descriptor)
}

fn compression(request: &SnapshotRequest) -> vmfork_store::Compression {
    match request.compression.unwrap_or(Compression::Zstd) {
        Compression::None => vmfork_store::Compression::None,
        Compression::Zstd => vmfork_store::Compression::Zstd { level: ZSTD_LEVEL },
    }
}

/// What a memory is to become: a delta, if there is a base.
fn memory_draft(table: &PageTable, bases: &Bases, request: &SnapshotRequest) -> ImageDraft {
    let on = bases.image(&Role::Memory, table.pages());
    ImageDraft {
        role: Role::Memory,
        bytes: table.pages() * PAGE_BYTES,
        extents: match request.keep_zero_pages {
            true => vec![(table.range(), Extent::Own)],
            false => difference(table, on.as_ref().map(|(_, table)| *table)),
        },
        base: on.map(|(base, _)| base),
        compression: compression(request),
        chunk_pages: CHUNK_PAGES,
        keep_zero_pages: request.keep_zero_pages,
    }
}

/// What a disk is to become: a delta, if there is a base that has it in that size.
fn disk_draft(
    disk: &FrozenDisk,
    bases: &Bases,
    compression: vmfork_store::Compression,
) -> ImageDraft {
    let on = bases.image(&disk.role, disk.table.pages());
    ImageDraft {
        role: disk.role.clone(),
        bytes: disk.image.size_bytes(),
        extents: difference(&disk.table, on.as_ref().map(|(_, table)| *table)),
        base: on.map(|(base, _)| base),
        compression,
        chunk_pages: CHUNK_PAGES,
        keep_zero_pages: false,
    }
}

/// The runs of pages that have another source by `table` than by `base` (without one: than zero).
/// Both are of this daemon, so that the same source means the same bytes.
fn difference(table: &PageTable, base: Option<&PageTable>) -> Vec<(PageRange, Extent)> {
    let zeros = PageTable::uniform(table.pages(), Source::Zero);
    let base = base.unwrap_or(&zeros);
    let mut found: Vec<(PageRange, Extent)> = Vec::new();
    for block in (0..table.pages().div_ceil(BLOCK_PAGES)).map(BlockIdx) {
        let Some(pages) = block.pages().filter(|_| !table.same_block(base, block)) else {
            continue;
        };
        for (run, source) in table.runs(pages) {
            let extent = match source {
                Source::Zero => Extent::Zero,
                Source::Image(_) => Extent::Own,
            };
            for (part, before) in base.runs(run).filter(|(_, before)| *before != source) {
                debug_assert_ne!(before, source);
                match found.last_mut() {
                    Some((last, same)) if *same == extent && last.end() == part.start() => {
                        *last = PageRange::between(last.start(), part.end());
                    }
                    _ => found.push((part, extent)),
                }
            }
        }
    }
    found
}

/// Whether it is the base that no delta can be written on: removed meanwhile, deep down a chain, or
/// damaged. Of what was stored before, writing reads nothing else.
fn is_of_the_base(error: &StoreError) -> bool {
    use StoreError::{Base, Damaged, DeepChain};
    matches!(error, Base { .. } | DeepChain { .. } | Damaged(_))
}

impl Snapshots {
    /// What disks lie on that is stored, be it of a snapshot or of a guest image.
    fn stored_bases(&self, disks: &[FrozenDisk]) -> Bases {
        let open = self.open_ones().stored_disks();
        let base = |disk: &FrozenDisk| {
            let mut below = disk
                .image
                .owners()
                .filter_map(|(id, _)| open.iter().find(|stored| stored.id() == id));
            let base = below.find_map(|stored| stored.base().ok())?;
            let is_there = |there: Descriptor| there.id == base.at.id;
            let is_usable = base.table.pages() == disk.table.pages()
                && self.store.descriptor(&base.at.name).is_ok_and(is_there);
            is_usable.then(|| (disk.role.clone(), base))
        };
        Bases::from_iter(disks.iter().filter_map(base))
    }

    /// What of a VM's stored images the next snapshot of it can be a delta on: those that are still
    /// there.
    fn usable_bases(&self, vm: &Vm, disk_only: bool) -> Bases {
        let bases = vm.provenance().get::<Bases>().unwrap_or_default();
        let bases = bases.those(|role, _, _| !disk_only || *role != Role::Memory);
        self.that_are_there(&bases)
    }

    /// Blocks as long as reading small files takes.
    fn that_are_there(&self, bases: &Bases) -> Bases {
        bases.those(|_, name, id| self.store.descriptor(name).is_ok_and(|there| there.id == id))
    }
}

#[cfg(test)]
mod tests {
    use vmfork_image::{ImageId, PageIdx};

    use super::*;

    #[test]
    fn a_delta_is_what_differs_in_source() {
        let range = |start, len| PageRange::new(PageIdx(start), len).expect("small");
        let image = |id| Source::Image(ImageId::new(id).expect("not 0"));
        let zeros = PageTable::uniform(2048, Source::Zero);
        let base = zeros.derive([(range(100, 1000), image(1))]).expect("fits");
        assert_eq!(difference(&base, None), [(range(100, 1000), Extent::Own)]);
        assert_eq!(difference(&base, Some(&base)), []);
        let changes =
            [(range(90, 5), image(2)), (range(511, 2), image(3)), (range(600, 10), Source::Zero)];
        let table = base.derive(changes).expect("fits");
        assert_eq!(
            difference(&table, Some(&base)),
            [
                (range(90, 5), Extent::Own),
                (range(511, 2), Extent::Own),
                (range(600, 10), Extent::Zero)
            ]
        );
    }
}
