//! The VMs of this host, running and ended, by id and by name.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmfork_api::{ErrorBody, ErrorCode, NAME_BYTES_MAX, TreeNode};

use crate::vm::Vm;

/// Ended VMs that are remembered; the oldest are forgotten first.
const ENDED_MAX: usize = 256;

/// All VMs. Names are unique among those listed and those reserved.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By the order in which they were added.
    vms: BTreeMap<u64, Arc<Vm>>,
    next: u64,
    /// With their places in the order of the list: clones stand as they were named, whichever starts first.
    reserved: HashMap<String, u64>,
    ended: VecDeque<String>,
}

/// Names that are kept for VMs about to be added; free again when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    names: Vec<String>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut inner = self.registry.inner();
        for name in &self.names {
            inner.reserved.remove(name);
        }
    }
}

impl Reservation {
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }
}

impl Inner {
    /// The first free ones of a series that has no end.
    fn free_names(&self, count: u32, name: impl Fn(u32) -> String) -> Vec<String> {
        (1..).map(name).filter(|name| !self.is_taken(name)).take(count as usize).collect()
    }

    fn is_taken(&self, name: &str) -> bool {
        self.reserved.contains_key(name) || self.vms.values().any(|vm| vm.name() == name)
    }
}

impl Registry {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keep names.
    ///
    /// # Errors
    /// The first that is taken.
    pub(crate) fn reserve(self: &Arc<Self>, names: &[&str]) -> Result<Reservation, String> {
        let mut inner = self.inner();
        let mut kept = Vec::new();
        for name in names {
            // An ended VM gives its name up to one that begins.
            let of_ended = inner
                .vms
                .iter()
                .find(|(_, vm)| vm.name() == *name && vm.end_now().is_some())
                .map(|(number, _)| *number);
            if let Some(number) = of_ended {
                inner.vms.remove(&number);
            }
            if inner.is_taken(name) || kept.iter().any(|kept| kept == name) {
                return Err((*name).to_owned());
            }
            kept.push((*name).to_owned());
        }
        Ok(self.keep(inner, kept))
    }

    /// Keep a free name made from an image's: `debian-1`.
    pub(crate) fn reserve_for_image(self: &Arc<Self>, image: &str) -> Reservation {
        let stem: String = image.chars().take(NAME_BYTES_MAX - 8).collect();
        let inner = self.inner();
        let names = inner.free_names(1, |number| format!("{stem}-{number}"));
        self.keep(inner, names)
    }

    /// Keep free names for clones: `web.1`, `web.2` … A name that gets too long loses its beginning.
    pub(crate) fn reserve_for_clones(self: &Arc<Self>, parent: &str, count: u32) -> Reservation {
        let keep = NAME_BYTES_MAX - 8;
        let stem = parent.get(parent.len().saturating_sub(keep)..).unwrap_or(parent);
        let stem = stem.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        let inner = self.inner();
        let names = inner.free_names(count, |number| format!("{stem}.{number}"));
        self.keep(inner, names)
    }

    fn keep(self: &Arc<Self>, mut inner: MutexGuard<'_, Inner>, names: Vec<String>) -> Reservation {
        for name in &names {
            let number = inner.next;
            inner.next += 1;
            inner.reserved.insert(name.clone(), number);
        }
        drop(inner);
        Reservation { registry: Arc::clone(self), names }
    }

    pub(crate) fn add(&self, vm: Arc<Vm>) {
        let mut inner = self.inner();
        let number = match inner.reserved.get(vm.name()) {
            Some(number) => *number,
            None => {
                inner.next += 1;
                inner.next - 1
            }
        };
        inner.vms.insert(number, vm);
    }

    /// By name or id; `to` says what for.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn find(&self, to: &str, name_or_id: &str) -> Result<Arc<Vm>, ErrorBody> {
        let inner = self.inner();
        inner
            .vms
            .values()
            .find(|vm| vm.name() == name_or_id || vm.identity.id == name_or_id)
            .cloned()
            .ok_or_else(|| ErrorBody {
                code: ErrorCode::NotFound,
                message: format!("{to} `{name_or_id}`"),
                cause: Some(format!("no VM named `{name_or_id}` on this host")),
                remedy: Some("`vmfork ps` lists the VMs that are here".to_owned()),
            })
    }

    /// All, in the order in which they began.
    pub(crate) fn all(&self) -> Vec<Arc<Vm>> {
        self.inner().vms.values().cloned().collect()
    }

    /// Those that have not ended.
    pub(crate) fn live(&self) -> Vec<Arc<Vm>> {
        let mut all = self.all();
        all.retain(|vm| vm.end_now().is_none());
        all
    }

    pub(crate) fn remove(&self, id: &str) {
        self.inner().vms.retain(|_, vm| vm.identity.id != id);
    }

    /// A VM has ended. → ids of ended VMs that are forgotten now, to make room.
    pub(crate) fn has_ended(&self, id: &str) -> Vec<String> {
        let mut inner = self.inner();
        inner.ended.push_back(id.to_owned());
        let mut forgotten = Vec::new();
        while inner.ended.len() > ENDED_MAX {
            let Some(oldest) = inner.ended.pop_front() else { break };
            inner.vms.retain(|_, vm| vm.identity.id != oldest);
            forgotten.push(oldest);
        }
        forgotten
    }

    /// Live VMs that were forked from this one, by number.
    pub(crate) fn clones_of(&self, id: &str) -> Vec<Arc<Vm>> {
        let mut clones = self.live();
        clones.retain(|vm| vm.identity.parent.as_ref().is_some_and(|(parent, _)| parent == id));
        clones.sort_by_key(|vm| vm.identity.vmid);
        clones
    }

    /// All live VMs that descend from this one, itself too.
    pub(crate) fn descendants(&self, id: &str) -> Vec<Arc<Vm>> {
        let all = self.all();
        let mut ids: HashSet<String> = HashSet::from([id.to_owned()]);
        // Parents are added before their clones, so one pass finds all.
        for vm in &all {
            if vm.identity.parent.as_ref().is_some_and(|(parent, _)| ids.contains(parent)) {
                ids.insert(vm.identity.id.clone());
            }
        }
        all.into_iter()
            .filter(|vm| ids.contains(&vm.identity.id) && vm.end_now().is_none())
            .collect()
    }

    /// The families. An ended VM is shown while something that lives descends from it.
    pub(crate) fn tree(&self) -> Vec<TreeNode> {
        let all = self.all();
        let known: HashSet<&str> = all.iter().map(|vm| vm.identity.id.as_str()).collect();
        all.iter()
            .filter(|vm| match &vm.identity.parent {
                None => true,
                Some((parent, _)) => !known.contains(parent.as_str()),
            })
            .filter_map(|root| node(root, &all))
            .collect()
    }
}

/// A VM with what descends from it; `None` if nothing of that lives.
fn node(vm: &Arc<Vm>, all: &[Arc<Vm>]) -> Option<TreeNode> {
    let children: Vec<TreeNode> = all
        .iter()
        .filter(|other| {
            other.identity.parent.as_ref().is_some_and(|(parent, _)| *parent == vm.identity.id)
        })
        .filter_map(|child| node(child, all))
        .collect();
    let lives = vm.end_now().is_none();
    let count = u32::try_from(children.len()).unwrap_or(u32::MAX);
    (lives || !children.is_empty()).then(|| TreeNode { vm: vm.summary(count, lives), children })
}

#[cfg(test)]
mod tests {
    use vmfork_api::Accel;

    use super::*;
    use crate::vm::log::Log;
    use crate::vm::{End, Identity};

    fn vm(folder: &std::path::Path, name: &str, parent: Option<&Vm>) -> Arc<Vm> {
        let identity = Identity {
            id: format!("id-{name}"),
            name: name.to_owned(),
            image: "default".to_owned(),
            family: "id-web".to_owned(),
            parent: parent.map(|parent| (parent.identity.id.clone(), parent.name().to_owned())),
            vmid: 0,
            accel: Accel::Tcg,
            accel_reason: String::new(),
            cpus: 1,
            memory_bytes: 64 << 20,
            has_agent: true,
            created_unix_ms: 0,
        };
        Vm::new(identity, Log::create(folder).expect("log"), None, None)
    }

    fn names(vms: &[Arc<Vm>]) -> Vec<&str> {
        vms.iter().map(|vm| vm.name()).collect()
    }

    #[test]
    fn clones_stand_in_the_order_of_their_names_whichever_starts_first() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let web = vm(folder.path(), "web", None);
        registry.add(Arc::clone(&web));
        let reservation = registry.reserve(&["web.1", "web.2", "web.3"]).expect("free");
        for name in ["web.3", "web.1", "web.2"] {
            registry.add(vm(folder.path(), name, Some(&web)));
        }
        drop(reservation);
        registry.add(vm(folder.path(), "other", None));
        assert_eq!(names(&registry.all()), ["web", "web.1", "web.2", "web.3", "other"]);
        let tree = registry.tree();
        let children: Vec<_> = tree[0].children.iter().map(|node| &node.vm.name).collect();
        assert_eq!(children, ["web.1", "web.2", "web.3"]);
        assert_eq!(registry.descendants("id-web").len(), 4);
    }

    #[test]
    fn an_ended_vm_gives_its_name_up_and_a_running_one_does_not() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let web = vm(folder.path(), "web", None);
        registry.add(Arc::clone(&web));
        assert_eq!(registry.reserve(&["web"]).expect_err("taken"), "web");
        web.end(End::killed("in this test"));
        drop(registry.reserve(&["web"]).expect("free"));
        assert_eq!(registry.reserve(&["a", "a"]).expect_err("twice"), "a");
        registry.reserve(&["a"]).expect("nothing of a refused reservation stays");
    }

    #[test]
    fn two_forks_at_once_get_names_of_their_own() {
        let registry = Arc::new(Registry::default());
        let first = registry.reserve_for_clones("web", 2);
        let second = registry.reserve_for_clones("web", 1);
        assert_eq!(first.names(), ["web.1", "web.2"]);
        assert_eq!(second.names(), ["web.3"]);
        drop(first);
        assert_eq!(registry.reserve_for_clones("web", 2).names(), ["web.1", "web.2"]);
    }

    #[test]
    fn names_of_clones_stay_within_the_bound() {
        let registry = Arc::new(Registry::default());
        let parent = "n".repeat(NAME_BYTES_MAX);
        let reservation = registry.reserve_for_clones(&parent, 1);
        assert!(reservation.names()[0].len() <= NAME_BYTES_MAX);
    }
}
