//! Taking a snapshot of a running VM, and writing it to the store.

use std::sync::Arc;
use std::time::Duration;

use vmfork_api::{Compression, ErrorBody, SnapshotRequest};
use vmfork_image::{BLOCK_PAGES, BlockIdx, PAGE_BYTES, PageRange, PageTable, Source};
use vmfork_store::{Descriptor, Draft, Extent, ImageDraft, Role, SnapshotId, StoreError};

use crate::disks::{self, FrozenDisk};
use crate::error::SnapshotError;
use crate::library::{Library, Snapshots};
use crate::opened::Base;
use crate::record::{self, Subject};
use crate::tell::Tell;
use crate::under_way::{Doing, UnderWay};
use crate::work::{CancelOnDrop, blocking};
use vmfork_fork::Frozen;
use vmfork_fork::facts::{self, Facts};
use vmfork_host::vm::Vm;

/// How long the freeze may take with all that leads to it.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long finding what the VM had written may take: 1 ms per GiB where nothing is in the way.
const SEAL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long what the VM touches is recorded, where the request does not say.
const RECORD_DEFAULT: Duration = Duration::from_secs(300);
/// Fast, and within a tenth of the next levels' size; see docs/format.md.
const ZSTD_LEVEL: i32 = 1;
/// Pages that are compressed, and fetched, together; see docs/format.md for how it was measured.
const CHUNK_PAGES: u64 = 64;

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
    let inherited = vm.identity.inherited.with_labels(&request.labels);
    let inherited = inherited.map_err(|error| failed(error.into()))?;
    let placed = library.snapshots.place(&name, Doing::Write).map_err(failed)?;
    let frozen = vmfork_fork::freeze_only(&library.core, &vm, FREEZE_TIMEOUT).await?;
    let facts = facts_of(&vm, &frozen).await.map_err(failed)?;
    let mut facts = Facts { inherited, ..facts };
    disks::put_specs(&mut facts.inherited.spec, &frozen.snapshot.disks);
    let base = match request.full || request.keep_zero_pages {
        true => None,
        false => library.snapshots.usable_base(&vm),
    };
    let sealed = tokio::task::block_in_place(|| sealed_table(&frozen));
    let (id, table) = sealed.map_err(failed)?;
    let base_name = base.as_ref().map(|base| base.name.clone());
    tracing::info!(
        snapshot = name,
        vm = vm.name(),
        pause_ms = facts.pause_ms,
        base = base_name,
        "snapshot taken"
    );
    let under_way = Arc::clone(&placed.under_way);
    under_way.list(facts.clone(), base_name);
    let time_max = request.record_ms.map_or(RECORD_DEFAULT, Duration::from_millis);
    if !time_max.is_zero() {
        let subject = Subject { name: name.clone(), id, table: table.clone(), time_max };
        record::start(library, &vm, subject);
    }
    let wait = request.wait;
    let writing = {
        let (library, vm) = (Arc::clone(library), Arc::clone(&vm));
        let order = Order { request, id, table, facts, base, frozen };
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

async fn facts_of(vm: &Arc<Vm>, frozen: &Frozen) -> Result<Facts, SnapshotError> {
    let machine = vm.running_machine().map_err(|_| SnapshotError::Ended)?;
    let frozen = facts::Frozen {
        machine_type: facts::host::machine_type(&machine).await?,
        inheritance: frozen.snapshot.inheritance.clone(),
        fork: frozen.snapshot.fork,
        pause_ms: vmfork_fork::ms(frozen.pause),
    };
    Ok(Facts::of(&vm.identity, &machine, vm.agent(), frozen))
}

/// An id for it, and what its pages are by the table, which is complete some milliseconds after the
/// freeze.
fn sealed_table(frozen: &Frozen) -> Result<(SnapshotId, PageTable), SnapshotError> {
    let engine = &frozen.snapshot.engine;
    let is_sealed = engine.wait_sealed(SEAL_TIMEOUT);
    let table = engine.image().table().filter(|_| is_sealed).cloned();
    let seconds = SEAL_TIMEOUT.as_secs();
    let table = table.ok_or(SnapshotError::NotSealed { seconds })?;
    let id = SnapshotId::random().map_err(|error| SnapshotError::State(error.into()))?;
    Ok((id, table))
}

#[derive(Debug)]
struct Order {
    request: SnapshotRequest,
    id: SnapshotId,
    /// Of the frozen image.
    table: PageTable,
    facts: Facts,
    base: Option<Arc<Base>>,
    frozen: Frozen,
}

/// Write all of it. Blocks for as long as that takes.
fn write(
    library: &Library,
    vm: &Arc<Vm>,
    order: Order,
    under_way: &UnderWay,
) -> Result<Descriptor, SnapshotError> {
    let Order { request, id, table, facts, base, frozen } = order;
    let image = frozen.snapshot.engine.image();
    let disks = FrozenDisk::all(&frozen.snapshot.disks)?;
    let draft = Draft {
        name: request.name,
        id: Some(id),
        images: Vec::new(),
        state: vmfork_fork::state::read(&frozen.snapshot.state)?,
        vm: serde_json::to_value(&facts)
            .map_err(|source| SnapshotError::Facts { name: under_way.name.clone(), source })?,
    };
    let disk_of = |role: &Role| disks.iter().find(|disk| disk.role == *role);
    let read = |role: &Role, range: PageRange, bytes: &mut [u8]| match disk_of(role) {
        Some(disk) => disk.read(range, bytes),
        None => image.read(range, bytes).map_err(std::io::Error::other),
    };
    let store = &library.snapshots.store;
    let compression = match request.compression.unwrap_or(Compression::Zstd) {
        Compression::None => vmfork_store::Compression::None,
        Compression::Zstd => vmfork_store::Compression::Zstd { level: ZSTD_LEVEL },
    };
    let memory_on = |base: Option<&Base>| ImageDraft {
        role: Role::Memory,
        bytes: image.pages() * PAGE_BYTES,
        base: base.map(Base::memory),
        extents: match request.keep_zero_pages {
            true => vec![(table.range(), Extent::Own)],
            false => difference(&table, base.map(|base| &base.table)),
        },
        compression,
        chunk_pages: CHUNK_PAGES,
        keep_zero_pages: request.keep_zero_pages,
    };
    let on = |base: Option<&Base>| {
        let disks = disks.iter().map(|disk| disk_draft(disk, base, compression));
        let images = std::iter::once(memory_on(base)).chain(disks).collect();
        Draft { images, ..draft.clone() }
    };
    let mut written = store.create(on(base.as_deref()), &read, &under_way.work);
    if let (Some(base), Err(error)) = (&base, &written)
        && is_of_the_base(error)
    {
        let error = vmfork_host::error::chain(error);
        tracing::warn!(snapshot = under_way.name, base = base.name, error, "written in full");
        under_way.list(facts, None);
        under_way.begin_anew();
        written = store.create(on(None), &read, &under_way.work);
    }
    let descriptor = written?;
    let counts = descriptor.counts();
    tracing::info!(
        snapshot = descriptor.name,
        own_mib = (counts.own_pages * PAGE_BYTES) >> 20,
        stored_mib = counts.stored_bytes >> 20,
        "snapshot stored"
    );
    let name = descriptor.name.clone();
    let disks = disks.into_iter().map(|disk| (disk.name().to_owned(), disk.table)).collect();
    vm.add_provenance(Arc::new(Base { name, id, table, disks }));
    Ok(descriptor)
}

/// What a disk is to become: a delta, if there is a base that has it in that size.
fn disk_draft(
    disk: &FrozenDisk,
    base: Option<&Base>,
    compression: vmfork_store::Compression,
) -> ImageDraft {
    let on = base.and_then(|base| base.disk(&disk.role, &disk.table));
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
    /// The stored snapshot that the next one of a VM is a delta of; `None`: there is none (any
    /// more).
    fn usable_base(&self, vm: &Vm) -> Option<Arc<Base>> {
        let base = vm.provenance().get::<Base>()?;
        let there = self.store.descriptor(&base.name).ok()?;
        (there.id == base.id).then_some(base)
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
