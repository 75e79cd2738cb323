//! The chunks that a snapshot lacks, from the store that it was adopted from.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use blake3::Hash;
use parking_lot::Mutex;
use vmfork_image::{PAGE_BYTES, PageRange};
use vmfork_policy::FetchOrder;

use crate::blobs::BlobError;
use crate::error::StoreError;
use crate::files::read_descriptor;
use crate::flights::{Fetched, Turn};
use crate::format::descriptor::SnapshotId;
use crate::format::role::Role;
use crate::format::table::{Table, Window};
use crate::names::{ORIGIN, chunk_key};
use crate::store::{Store, check_name};
use crate::stored::{Stored, StoredImage};
use crate::work::Work;

/// Most lists of pages that are remembered to be preferred.
const PREFERRED_MAX: usize = 64;

/// What [`Store::fetch_chunks`] is to fetch, and in which order.
#[derive(Debug)]
pub struct Missing {
    /// Those that were not all here: the snapshot and its bases.
    family: Vec<Arc<Stored>>,
    /// Of different chunks. A chunk's number is its place here.
    windows: Vec<Window>,
    numbers: HashMap<Hash, usize>,
    order: Mutex<Order>,
}

#[derive(Debug)]
struct Order {
    salt: u64,
    next: FetchOrder,
    /// All lists of chunks that were preferred.
    preferred: Vec<Vec<usize>>,
}

impl Missing {
    /// These pages of an image of snapshot `id` are wanted before all others that have not come
    /// yet, the first of them first.
    pub fn prefer(&self, id: SnapshotId, role: &Role, runs: &[PageRange]) {
        let mut images = self.family.iter().filter(|stored| stored.descriptor().id == id);
        let Some(image) = images.next().and_then(|stored| stored.image(role).ok()) else { return };
        let chunks = self.chunks_of(&image, runs);
        let mut order = self.order.lock();
        order.next.prefer(chunks.iter().copied());
        // Each run of a workload prefers the same.
        order.preferred.retain(|before| *before != chunks);
        order.preferred.push(chunks);
        let too_many = order.preferred.len().saturating_sub(PREFERRED_MAX);
        order.preferred.drain(..too_many);
    }

    fn chunks_of(&self, image: &StoredImage, runs: &[PageRange]) -> Vec<usize> {
        let table = image.table();
        let all = PageRange::first(table.pages());
        let mut chunks = Vec::new();
        for run in runs {
            let mut rest = run.intersect(&all);
            while !rest.is_empty() {
                let own = table.window_of(rest.start());
                let number = own.and_then(|window| self.numbers.get(&window.hash)).copied();
                if number.is_some() && chunks.last() != number.as_ref() {
                    chunks.extend(number);
                }
                let chunk_pages = table.chunk_pages();
                let piece = rest.truncate(chunk_pages - rest.start().0 % chunk_pages);
                rest = rest.from_page(piece.end());
            }
        }
        chunks
    }

    /// All are given again, in the order that is known by now.
    fn begin(&self) {
        let mut order = self.order.lock();
        let Order { salt, next, preferred } = &mut *order;
        *next = FetchOrder::new(self.windows.len(), *salt);
        preferred.iter().for_each(|chunks| next.prefer(chunks.iter().copied()));
    }

    fn next(&self) -> Option<&Window> {
        self.order.lock().next.next().and_then(|number| self.windows.get(number))
    }
}

impl Store {
    /// Chunks that have come from other stores, since the last call of this.
    pub fn take_fetched(&self) -> Fetched {
        self.inner.flights.take()
    }

    /// What of snapshot `name` and of all its bases is to come from another store. `salt`: another
    /// number on each host, so that hosts fetch in different orders.
    ///
    /// # Errors
    /// No such snapshot, or damage.
    pub fn missing(&self, name: &str, salt: u64) -> Result<Missing, StoreError> {
        check_name(name)?;
        let mut family = self.open_family(name)?;
        family.retain(|stored| stored.origin().is_some());
        let (mut windows, mut numbers) = (Vec::new(), HashMap::new());
        for window in family.iter().flat_map(|it| it.tables()).flat_map(Table::windows) {
            numbers.entry(window.hash).or_insert_with(|| {
                windows.push(*window);
                windows.len() - 1
            });
        }
        let next = FetchOrder::new(windows.len(), salt);
        let order = Mutex::new(Order { salt, next, preferred: Vec::new() });
        Ok(Missing { family, windows, numbers, order })
    }

    /// Copy the missing chunks of a snapshot and of its bases from `remote`, which they were
    /// adopted from. Each is verified; one that is damaged here is replaced. Then the snapshot is
    /// complete here. A chunk that is read meanwhile comes once, and before the others.
    ///
    /// # Errors
    /// The snapshot was removed meanwhile; `remote` can't be reached, lacks a chunk or has it
    /// damaged; [`StoreError::Cancelled`]. Chunks that had come by then are kept.
    pub fn fetch_chunks(
        &self,
        missing: &Missing,
        remote: &Store,
        work: &Work,
    ) -> Result<(), StoreError> {
        let Missing { family, windows, .. } = missing;
        missing.begin();
        work.expect(windows.iter().map(|window| window.own_pages * PAGE_BYTES).sum());
        let threads = self.inner.threads(work).max(remote.inner.threads(work));
        work.for_each_on(
            threads,
            windows,
            || Ok(()),
            |(), _| {
                // Before a chunk is picked: it is the most urgent one when its turn comes.
                let turn = self.inner.flights.turn(threads, work)?;
                let Some(window) = missing.next() else { return Ok(()) };
                self.fetch_one(window, remote, turn)?;
                work.done(window.own_pages * PAGE_BYTES);
                Ok(())
            },
        )?;
        // On the medium before the snapshot says that it is complete.
        self.inner.blobs().sync()?;
        let _catalogue = self.inner.catalogue.lock();
        for stored in family {
            let descriptor = stored.descriptor();
            // Another one, or the same adopted again, has chunks that were not looked for.
            if read_descriptor(self.inner.blobs(), &descriptor.name)? != *descriptor {
                return Err(self.not_found(&descriptor.name));
            }
            self.inner.blobs().delete(&descriptor.key_beside(ORIGIN))?;
        }
        Ok(())
    }

    fn fetch_one(&self, window: &Window, remote: &Store, turn: Turn<'_>) -> Result<(), StoreError> {
        let _flight = self.inner.flights.begin(&window.hash);
        // A reader may have brought it.
        match self.read_chunk(window) {
            Ok(_) => return Ok(()),
            Err(StoreError::Damaged(_) | StoreError::Blob(BlobError::NotFound { .. })) => {}
            Err(error) => return Err(error),
        }
        let began = Instant::now();
        let file = remote.read_chunk(window)?;
        turn.came(file.len(), began.elapsed());
        self.inner.blobs().put(&chunk_key(&window.hash), &file)?;
        Ok(())
    }
}
