//! Decompressed chunks that are likely to be wanted again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use blake3::Hash;
use parking_lot::{Condvar, Mutex};

/// Decompressed chunks, shared by all sources, bounded in bytes; who was not wanted for longest
/// goes first.
///
/// Two threads that want one chunk at the same time decompress it once. A chunk of which all was
/// read isn't kept: the pages are in an image's cache by then.
#[derive(Debug)]
pub struct HotChunks {
    capacity_bytes: u64,
    state: Mutex<State>,
    loaded: Condvar,
}

#[derive(Debug, Default)]
struct State {
    chunks: HashMap<Hash, Slot>,
    /// When each was last wanted, as a count of wants. The first is the next to go.
    by_age: BTreeMap<u64, Hash>,
    clock: u64,
    bytes: u64,
}

#[derive(Debug)]
enum Slot {
    /// A thread is at it; how many wait for it.
    Loading {
        waiting: u32,
    },
    Loaded {
        raw: Arc<[u8]>,
        wanted: u64,
    },
}

impl State {
    fn touch(&mut self, hash: &Hash) -> Option<Arc<[u8]>> {
        let Some(Slot::Loaded { raw, wanted }) = self.chunks.get_mut(hash) else { return None };
        self.by_age.remove(wanted);
        self.clock += 1;
        *wanted = self.clock;
        self.by_age.insert(self.clock, *hash);
        Some(raw.clone())
    }

    fn insert(&mut self, hash: Hash, raw: Arc<[u8]>, capacity_bytes: u64) {
        self.bytes += raw.len() as u64;
        self.clock += 1;
        self.by_age.insert(self.clock, hash);
        self.chunks.insert(hash, Slot::Loaded { raw, wanted: self.clock });
        while self.bytes > capacity_bytes
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            if let Some(Slot::Loaded { raw, .. }) = self.chunks.remove(&oldest) {
                self.bytes -= raw.len() as u64;
            }
        }
    }
}

/// Tells those who wait that a load has ended, however it did.
struct Loading<'a> {
    hot: &'a HotChunks,
    hash: Hash,
    /// The mark is gone already; by now there may be another thread's.
    is_done: bool,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.hot.state.lock().chunks.remove(&self.hash);
        }
        self.hot.loaded.notify_all();
    }
}

impl HotChunks {
    pub fn new(capacity_bytes: u64) -> Arc<Self> {
        Arc::new(Self { capacity_bytes, state: Mutex::default(), loaded: Condvar::new() })
    }

    /// Bytes that are kept.
    pub fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Whether a chunk is kept right now.
    pub(crate) fn has(&self, hash: &Hash) -> bool {
        matches!(self.state.lock().chunks.get(hash), Some(Slot::Loaded { .. }))
    }

    /// The chunk's content, and whether it was there. `keep`: it will be wanted again.
    ///
    /// Who waits for a thread that then fails loads it itself: each waits at most once for every
    /// other thread.
    pub(crate) fn get<E>(
        &self,
        hash: &Hash,
        keep: bool,
        load: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<(Arc<[u8]>, bool), E> {
        let mut state = self.state.lock();
        loop {
            if let Some(raw) = state.touch(hash) {
                return Ok((raw, true));
            }
            match state.chunks.get_mut(hash) {
                Some(Slot::Loading { waiting }) => *waiting += 1,
                _ => break,
            }
            self.loaded.wait(&mut state);
        }
        state.chunks.insert(*hash, Slot::Loading { waiting: 0 });
        drop(state);
        let mut mark = Loading { hot: self, hash: *hash, is_done: false };
        let raw: Arc<[u8]> = load()?.into();
        let mut state = self.state.lock();
        let awaited = matches!(state.chunks.remove(hash), Some(Slot::Loading { waiting: 1.. }));
        mark.is_done = true;
        if keep || awaited {
            state.insert(*hash, raw.clone(), self.capacity_bytes);
        }
        drop(state);
        drop(mark);
        Ok((raw, false))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn hash(n: u8) -> Hash {
        blake3::hash(&[n])
    }

    fn get(hot: &HotChunks, n: u8, keep: bool) -> bool {
        let load = || Ok::<_, Infallible>(vec![n; 100]);
        let Ok((raw, hit)) = hot.get(&hash(n), keep, load);
        assert_eq!(&raw[..], [n; 100]);
        hit
    }

    #[test]
    fn what_was_not_wanted_for_longest_goes_first() {
        let hot = HotChunks::new(300);
        assert!([1, 2, 3].iter().all(|n| !get(&hot, *n, true)));
        assert!(get(&hot, 1, true));
        assert!(!get(&hot, 4, true), "in the place of 2");
        assert!(get(&hot, 1, true) && get(&hot, 3, true) && get(&hot, 4, true));
        assert!(!get(&hot, 2, true));
        assert_eq!(hot.bytes(), 300);
    }

    #[test]
    fn what_is_not_kept_takes_no_room() {
        let hot = HotChunks::new(300);
        assert!(!get(&hot, 1, false) && !get(&hot, 1, false));
        assert_eq!(hot.bytes(), 0);
        let none = HotChunks::new(0);
        assert!(!get(&none, 1, true) && !get(&none, 1, true));
        assert_eq!((none.bytes(), none.state.lock().by_age.len()), (0, 0));
    }

    #[test]
    fn a_load_that_fails_is_tried_again_by_who_wants_it_next() {
        let hot = HotChunks::new(300);
        assert_eq!(hot.get(&hash(1), true, || Err("no")), Err("no"));
        assert!(!get(&hot, 1, true) && get(&hot, 1, true));
    }

    #[test]
    fn bytes_are_counted_right_whatever_is_loaded_and_dropped_at_once() {
        for capacity_bytes in [0, 150, 250] {
            let hot = HotChunks::new(capacity_bytes);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        (0..2000u32).for_each(|n| {
                            get(&hot, (n % 3).to_le_bytes()[0], n % 2 == 0);
                        })
                    });
                }
            });
            let state = hot.state.lock();
            let loaded = state.chunks.values().filter(|slot| matches!(slot, Slot::Loaded { .. }));
            assert_eq!(state.bytes, 100 * loaded.count() as u64);
            assert_eq!(state.by_age.len(), state.chunks.len());
            assert!(state.bytes <= capacity_bytes);
        }
    }

    #[test]
    fn threads_that_want_one_chunk_load_it_once() {
        const THREADS: u32 = 8;
        let hot = HotChunks::new(1 << 20);
        let loads = AtomicU32::new(0);
        let all_others_wait = || match hot.state.lock().chunks.get(&hash(1)) {
            Some(Slot::Loading { waiting }) => *waiting == THREADS - 1,
            _ => true,
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    // Not kept on its own account, but for those who wait.
                    let got = hot.get(&hash(1), false, || {
                        loads.fetch_add(1, Ordering::Relaxed);
                        for _ in 0..1_000_000 {
                            if all_others_wait() {
                                break;
                            }
                            std::thread::yield_now();
                        }
                        Ok::<_, Infallible>(vec![1; 100])
                    });
                    let Ok((raw, _)) = got;
                    assert_eq!(&raw[..], [1; 100]);
                });
            }
        });
        assert_eq!(loads.into_inner(), 1);
    }
}
