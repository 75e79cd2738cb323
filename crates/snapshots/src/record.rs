//! Learning which pages VMs of a snapshot touch first.
//!
//! ```text
//!   VM runs on / starts ─► looks at its page tables (PAGEMAP_SCAN), soon at first, then once a second ─► Recording
//!        ─► Profile, merged over runs ─► working set, stored apart for the next start
//! ```
//!
//! The VM is not slowed down: nothing of it is protected or unmapped, and a look takes about 1 ms
//! per GiB that is mapped, beside it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmfork_api::{ErrorBody, ProfileCluster, ProfileInfo};
use vmfork_image::{PageRange, PageTable};
use vmfork_policy::{Profile, Recorder, RecorderConfig, Recording, sequential};
use vmfork_store::{Role, SnapshotId, StoreError, Work};

use crate::error::SnapshotError;
use crate::library::{Library, Snapshots};
use crate::turns::Change;
use vmfork_host::core::Core;
use vmfork_host::vm::Vm;
use vmfork_host::vm::machine::Machine;

/// Pages that are touched, and counted, together: what the kernel maps at once around a read.
const CLUSTER_PAGES: u64 = 16;
/// VMs of one snapshot that are looked at at the same time: more would tell little more.
const RECORDINGS_MAX: usize = 2;
/// A recording that its VM's end has cut short counts from this on: what a shorter one did not
/// touch is not unused.
const WORTH: Duration = Duration::from_secs(5);
/// A cluster that at least this share of the runs touched belongs to the working set.
const FREQUENCY_MIN: f64 = 0.5;
/// 1 GiB: a bound on what is loaded before anyone asks.
const WORKING_SET_PAGES_MAX: u64 = 262_144;
/// The stored working set is written again when more than this percentage of its pages has changed.
const CHANGED_PERCENT: u64 = 10;
/// How many clusters `profile show` tells.
const SHOWN_MAX: usize = 1000;

/// Whose working set a VM's is part of.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) id: SnapshotId,
    /// Of the image that the VM continues.
    pub(super) table: PageTable,
    pub(super) time_max: Duration,
}

/// Watch what a VM touches from now on, until hardly anything is new, it has ended, or it is
/// frozen or paused. → what it touched; `None`: nothing can be told.
pub(super) async fn record(vm: &Vm, machine: &Machine, subject: &Subject) -> Option<Recording> {
    let began = Instant::now();
    let view = machine.view_id();
    let scan = tokio::task::block_in_place(|| machine.memory().touch_scan()).ok()?;
    let config = RecorderConfig { time_max: subject.time_max, ..RecorderConfig::default() };
    let mut recorder = Recorder::new(subject.table.clone(), config);
    while let Some(at) = recorder.next_look() {
        let is_over = tokio::select! {
            () = tokio::time::sleep_until((began + at).into()) => false,
            _ = vm.wait_end() => true,
        };
        if is_over {
            break;
        }
        let touched = tokio::task::block_in_place(|| scan.touched());
        // After a freeze its memory is mapped again: what it touches now is another snapshot's.
        let Ok(touched) = touched else { break };
        if machine.view_id() != view {
            break;
        }
        recorder.observe(began.elapsed(), touched);
        // Its next looks would find nothing new, and the working set complete.
        if vm.pause.is_paused() {
            break;
        }
    }
    Some(recorder.finish())
}

/// Record a VM in the background, and learn from it, unless others of its snapshot are being
/// recorded. One that is paused is recorded after its pause.
pub(super) fn start(library: &Arc<Library>, vm: &Arc<Vm>, subject: Subject) {
    let (weak, vm) = (Arc::downgrade(library), Arc::clone(vm));
    tokio::spawn(async move {
        vm.pause.over().await;
        let may_record = |library: Arc<Library>| library.snapshots.may_record(subject.id);
        let Some(turn) = weak.upgrade().and_then(may_record) else { return };
        let recording = {
            // Held no longer than the VM lives: it is dropped with its end.
            let Some(machine) = vm.machine() else { return };
            record(&vm, &machine, &subject).await
        };
        let (Some(library), Some(recording)) = (weak.upgrade(), recording) else { return };
        library.snapshots.until_written(&subject.name).await;
        let work = library.snapshots.work();
        let turn_to_learn = library.snapshots.turns.take(subject.id, Change::Learn, &work).await;
        let learnt = tokio::task::spawn_blocking(move || {
            let _until_learnt = turn_to_learn;
            let outcome = library.snapshots.learn(&library.core, &subject, &recording, &work);
            if let Err(error) = outcome
                && !error.is_cancelled()
            {
                let error = vmfork_host::error::chain(&error);
                tracing::warn!(snapshot = subject.name, error, "what its VM touched is not kept");
            }
        });
        let _panicked = learnt.await;
        drop(turn);
    });
}

/// A recording that counts.
#[derive(Debug)]
pub(super) struct Turn {
    id: SnapshotId,
    recordings: Arc<crate::library::Recordings>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = recordings.get_mut(&self.id) {
            *count -= 1;
        }
        recordings.retain(|_, count| *count > 0);
    }
}

impl Snapshots {
    fn may_record(&self, id: SnapshotId) -> Option<Turn> {
        let mut recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        let count = recordings.entry(id).or_default();
        if *count >= RECORDINGS_MAX {
            return None;
        }
        *count += 1;
        drop(recordings);
        Some(Turn { id, recordings: Arc::clone(&self.recordings) })
    }

    /// Merge what a VM touched into the profile of its snapshot, and store the working set that
    /// follows from it, if that has changed. Nothing, or not all of it, if `work` is cancelled.
    fn learn(
        &self,
        core: &Core,
        subject: &Subject,
        recording: &Recording,
        work: &Work,
    ) -> Result<(), SnapshotError> {
        if work.cancelled.load(Ordering::Relaxed) {
            return Ok(());
        }
        let memory = match self.store.open(&subject.name) {
            Ok(stored) if stored.descriptor().id == subject.id => stored.image(&Role::Memory)?,
            // It could not be written, or has been removed meanwhile.
            _ => return Ok(()),
        };
        let mut profile = self.profile(&subject.name, memory.image().pages())?;
        let is_whole = recording.end().is_some() || recording.until() >= WORTH;
        if recording.pages() == 0 || !(is_whole || profile.is_empty()) {
            return Ok(());
        }
        profile.merge(recording);
        self.store.put_profile(&subject.name, &Role::Memory, &profile.encode())?;
        let wanted = profile.working_set(FREQUENCY_MIN, WORKING_SET_PAGES_MAX);
        let stored_set = match self.store.working_set(&subject.name, &Role::Memory) {
            Err(StoreError::Damaged(_)) => None, // replaced
            set => set?,
        };
        let there = stored_set.as_ref().map_or(&[][..], |set| set.runs());
        if !differs(&sequential(there), &sequential(&wanted)) {
            return Ok(());
        }
        let image = self.image_of(core, &subject.name)?;
        let table = image.table().ok_or(SnapshotError::NoTable)?;
        let runs: Vec<PageRange> = wanted
            .iter()
            .flat_map(|run| table.runs(*run))
            .filter(|(_, source)| source.image().is_some())
            .map(|(run, _)| run)
            .collect();
        let read = |range: PageRange, bytes: &mut [u8]| {
            image.read(range, bytes).map_err(std::io::Error::other)
        };
        self.store.put_working_set(&memory, &runs, &read, work)?;
        tracing::info!(
            snapshot = subject.name,
            runs = profile.runs(),
            pages = runs.iter().map(PageRange::len).sum::<u64>(),
            recorded_ms = recording.until().as_millis(),
            "working set stored"
        );
        Ok(())
    }

    /// A profile that cannot be read is begun again: it is a help and no more.
    fn profile(&self, name: &str, pages: u64) -> Result<Profile, SnapshotError> {
        let new = || Profile::new(pages, CLUSTER_PAGES).map_err(SnapshotError::Profile);
        let stored = match self.store.profile(name, &Role::Memory) {
            Err(error @ StoreError::Damaged(_)) => {
                tracing::warn!(snapshot = name, %error, "profile begun anew");
                None
            }
            stored => stored?,
        };
        match stored.map(|bytes| Profile::decode(&bytes)) {
            Some(Ok(profile)) if profile.pages() == pages => Ok(profile),
            Some(Ok(_)) | None => new(),
            Some(Err(error)) => {
                tracing::warn!(snapshot = name, %error, "profile begun anew");
                new()
            }
        }
    }

    /// What is known of the pages that VMs touch first.
    ///
    /// # Errors
    /// There is no such snapshot, or its profile can't be read.
    pub fn profile_info(&self, name: &str) -> Result<ProfileInfo, ErrorBody> {
        let failed = |error: SnapshotError| {
            error.to_body(format!("look at the profile of snapshot `{name}`"))
        };
        let descriptor = self.store.descriptor(name).map_err(|error| failed(error.into()))?;
        let Some(memory) = descriptor.image(&Role::Memory) else {
            return Ok(ProfileInfo::default());
        };
        let profile = self.profile(name, memory.pages()).map_err(failed)?;
        let set = self.store.working_set(name, &Role::Memory);
        let set = set.map_err(|error| failed(error.into()))?;
        let clusters = profile.stretches();
        let recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(ProfileInfo {
            runs: profile.runs(),
            working_set_pages: set.as_ref().map_or(0, |set| set.pages()),
            working_set_bytes: self
                .store
                .working_set_bytes(name, &Role::Memory)
                .map_err(|error| failed(error.into()))?,
            recording: recordings.contains_key(&descriptor.id),
            clusters: clusters
                .iter()
                .take(SHOWN_MAX)
                .map(|cluster| ProfileCluster {
                    first_page: cluster.pages.start().0,
                    pages: cluster.pages.len(),
                    frequency: cluster.frequency,
                    first_access_ms: vmfork_fork::ms(cluster.first_access),
                })
                .collect(),
        })
    }
}

/// Whether a working set is worth storing again: both are in page order.
fn differs(there: &[PageRange], wanted: &[PageRange]) -> bool {
    let pages = |runs: &[PageRange]| runs.iter().map(PageRange::len).sum::<u64>();
    let mut common = 0;
    let mut rest = there;
    for run in wanted {
        while let Some(first) = rest.first() {
            common += first.intersect(run).len();
            if first.end() > run.end() {
                break;
            }
            rest = &rest[1..];
        }
    }
    let others = (pages(wanted) - common) + (pages(there) - common);
    others * 100 > pages(wanted).max(1) * CHANGED_PERCENT
}

#[cfg(test)]
mod tests {
    use vmfork_image::PageIdx;

    use super::*;

    #[test]
    fn a_working_set_is_stored_anew_when_a_tenth_of_it_has_changed() {
        let range = |start, len| PageRange::new(PageIdx(start), len).expect("small");
        let set = [range(0, 50), range(100, 50)];
        assert!(!differs(&set, &set));
        assert!(differs(&[], &set));
        assert!(!differs(&set, &[range(0, 50), range(100, 45)]));
        assert!(differs(&set, &[range(0, 50), range(100, 40)]));
        assert!(differs(&set, &[range(6, 50), range(100, 50)]));
        assert!(!differs(&set, &[range(0, 55), range(105, 45)]));
    }
}
