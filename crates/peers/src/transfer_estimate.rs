//! Estimates how much memory each host will fetch for clones of a VM, so that hosts can reserve it
//! before the freeze. When the clones arrive, their host itself finds out what it lacks
//! ([`super::arrivals`]), and that counts.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmfork_cluster::HostId;
use vmfork_cluster::allocate::HostView;
use vmfork_image::{ImageName, PAGE_BYTES};

use super::images::Images;
use vmfork_host::admission::Admission;
use vmfork_host::vm::Identity;
use vmfork_host::vm::machine::Machine;

/// How long what a VM had written before its last fork may take to be known, which is 1 ms per GiB.
const SEAL_WAIT: Duration = Duration::from_secs(1);

/// To each host, in bytes.
#[derive(Debug, Default)]
pub(crate) struct TransferEstimate(BTreeMap<HostId, u64>);

impl TransferEstimate {
    pub(crate) fn to(&self, host: HostId) -> u64 {
        self.0.get(&host).copied().unwrap_or(0)
    }
}

/// What a VM consists of, as it is now.
#[derive(Debug, Default)]
struct Parts {
    /// In the caches of which images, how many bytes.
    images: Vec<(ImageName, u64)>,
    /// What it has written since it was frozen last.
    new_bytes: u64,
}

impl Parts {
    /// What of it a host lacks that has these images open. Of those either all is there, or the
    /// host has promised memory for it.
    fn lacking(&self, host: HostId, open: Option<&BTreeSet<ImageName>>) -> u64 {
        let is_there = |name: &ImageName| {
            name.host == host.get() || open.is_some_and(|open| open.contains(name))
        };
        let images = self.images.iter().filter(|(name, _)| !is_there(name));
        images.map(|(_, bytes)| *bytes).fold(self.new_bytes, u64::saturating_add)
    }
}

/// Estimates what has to come to other hosts.
#[derive(Debug)]
pub(crate) struct Estimates {
    own: HostId,
    images: Arc<Images>,
    /// The images of others that each host has open, by its last word, which told of its room, too.
    open: Mutex<HashMap<HostId, BTreeSet<ImageName>>>,
}

impl Estimates {
    pub(super) fn new(own: HostId, images: &Arc<Images>) -> Self {
        Self { own, images: Arc::clone(images), open: Mutex::default() }
    }

    /// A host has said which images of others it has open.
    pub(super) fn heard(&self, host: HostId, open: BTreeSet<ImageName>) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(host, open);
    }

    /// How much of a VM's memory each host of the plan will fetch. What all clones there share is
    /// added to the host's view.
    pub(crate) fn coming(
        &self,
        admission: &Admission,
        parent: &Identity,
        machine: &Machine,
        views: &mut [HostView],
    ) -> TransferEstimate {
        let parts = tokio::task::block_in_place(|| self.parts(machine));
        let fork_bytes = admission.fork_bytes(parent.spec().memory_bytes);
        let mut coming = TransferEstimate::default();
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for view in views {
            view.once_bytes = fork_bytes;
            if view.id != self.own {
                let bytes = parts.lacking(view.id, open.get(&view.id));
                view.once_bytes = fork_bytes.saturating_add(bytes);
                coming.0.insert(view.id, bytes);
            }
        }
        coming
    }

    fn parts(&self, machine: &Machine) -> Parts {
        let new_bytes = machine.sample().private_pages.saturating_mul(PAGE_BYTES);
        let Some(engine) = machine.engine() else {
            return Parts { images: Vec::new(), new_bytes };
        };
        engine.wait_sealed(SEAL_WAIT);
        let costs = engine.image().costs().into_iter();
        let bytes =
            costs.map(|(image, pages)| (self.images.name(image), pages.saturating_mul(PAGE_BYTES)));
        Parts { images: bytes.collect(), new_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_has_open_or_froze_itself_does_not_come_again() {
        let [one, two] = [1, 2].map(|id| HostId::new(id).expect("not 0"));
        let name = |host, image| ImageName { host, image };
        let parts = Parts {
            images: vec![(name(1, 1), 100), (name(1, 2), 20), (name(2, 1), 3)],
            new_bytes: 1000,
        };
        assert_eq!(parts.lacking(two, None), 1120, "never heard of");
        let open = BTreeSet::from([name(1, 1), name(7, 7)]);
        assert_eq!(parts.lacking(two, Some(&open)), 1020);
        assert_eq!(parts.lacking(one, Some(&BTreeSet::new())), 1003);
        let huge = Parts { images: vec![(name(1, 1), u64::MAX)], new_bytes: 1 };
        assert_eq!(huge.lacking(two, None), u64::MAX);
    }
}
