//! The VMs of this host, running and ended, by id and by name.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;
use vmfork_api::{ErrorBody, NAME_BYTES_MAX, TreeNode};

use crate::error::Error;
use crate::vm::Vm;

/// Ended VMs that are remembered; the oldest are forgotten first.
const ENDED_MAX: usize = 256;

/// All VMs. Names are unique among those listed and those reserved.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By the order in which they were added.
    vms: BTreeMap<u64, Arc<Vm>>,
    next: u64,
    /// With their places in the order of the list: clones stand as they were named, whichever
    /// starts first.
    reserved: HashMap<String, u64>,
    ended: VecDeque<String>,
    /// By a number of their own. They stand beside the VMs, so that a family is looked at as a
    /// whole.
    /// A VM that is not listed yet is being made by one of these.
    forks: BTreeMap<u64, Fork>,
    next_fork: u64,
}

/// A fork in progress.
#[derive(Debug)]
struct Fork {
    /// The VM that is forked, and those that it descends from.
    line: Arc<[String]>,
    give_up: CancellationToken,
    over: CancellationToken,
}

/// Marks a fork as in progress until dropped: then all VMs that it has made are listed.
#[derive(Debug)]
pub struct UnderWay {
    registry: Arc<Registry>,
    number: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let fork = self.registry.inner().forks.remove(&self.number);
        if let Some(fork) = fork {
            fork.over.cancel();
        }
    }
}

/// What there is of a family at one instant.
#[derive(Debug)]
pub struct Family {
    /// Those that live, in the order in which they began.
    pub vms: Vec<Arc<Vm>>,
    /// Forks that were in progress, and were asked to give up: each is cancelled when its fork is
    /// over.
    pub forks: Vec<CancellationToken>,
}

/// Names that are kept for VMs about to be added; free again when dropped.
#[derive(Debug)]
pub struct Reservation {
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
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

impl Inner {
    /// The first names of an endless series that no listed VM has, dead or alive.
    fn free_names(
        &self,
        count: u32,
        name: impl Fn(u32) -> String,
        is_taken: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let is_listed = |name: &str| self.vms.values().any(|vm| vm.name() == name);
        let is_free = |name: &String| {
            !self.reserved.contains_key(name) && !is_listed(name) && !is_taken(name)
        };
        (1..).map(name).filter(is_free).take(count as usize).collect()
    }

    /// An ended VM gives its name up to one that begins.
    fn is_taken(&self, name: &str) -> bool {
        self.reserved.contains_key(name)
            || self.vms.values().any(|vm| vm.name() == name && vm.end_now().is_none())
    }
}

impl Registry {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keep those of the names that are free. An ended VM that has one stays listed until the new
    /// one is.
    pub fn reserve(self: &Arc<Self>, names: &[&str]) -> Reservation {
        let inner = self.inner();
        let mut kept: Vec<String> = Vec::new();
        for name in names {
            if !inner.is_taken(name) && !kept.iter().any(|kept| kept == name) {
                kept.push((*name).to_owned());
            }
        }
        self.keep(inner, kept)
    }

    /// Keep a free name made from an image's: `debian-1`, but for those that are taken elsewhere.
    pub fn reserve_for_image(
        self: &Arc<Self>,
        image: &str,
        is_taken: impl Fn(&str) -> bool,
    ) -> Reservation {
        let stem: String = image.chars().take(NAME_BYTES_MAX - 8).collect();
        let inner = self.inner();
        let names = inner.free_names(1, |number| format!("{stem}-{number}"), is_taken);
        self.keep(inner, names)
    }

    /// Keep free names for clones: `web.1`, `web.2` …, but for those that are taken elsewhere. A
    /// name that gets too long loses its beginning.
    pub fn reserve_for_clones(
        self: &Arc<Self>,
        parent: &str,
        count: u32,
        is_taken: impl Fn(&str) -> bool,
    ) -> Reservation {
        let keep = NAME_BYTES_MAX - 8;
        let stem = parent.get(parent.len().saturating_sub(keep)..).unwrap_or(parent);
        let stem = stem.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        let inner = self.inner();
        let names = inner.free_names(count, |number| format!("{stem}.{number}"), is_taken);
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

    /// List a VM. → ids of ended ones of its name, which are forgotten now.
    pub fn add(&self, vm: Arc<Vm>) -> Vec<String> {
        self.add_then(vm, || ())
    }

    /// The same; `listed` is called before any caller can find the VM.
    pub fn add_then(&self, vm: Arc<Vm>, listed: impl FnOnce()) -> Vec<String> {
        let mut inner = self.inner();
        let namesakes: Vec<u64> = inner
            .vms
            .iter()
            .filter(|(_, other)| other.name() == vm.name() && other.end_now().is_some())
            .map(|(number, _)| *number)
            .collect();
        let forgotten = namesakes
            .iter()
            .filter_map(|number| inner.vms.remove(number))
            .map(|vm| vm.identity.id.clone())
            .collect();
        let number = match inner.reserved.get(vm.name()) {
            Some(number) => *number,
            None => {
                inner.next += 1;
                inner.next - 1
            }
        };
        inner.vms.insert(number, vm);
        listed();
        forgotten
    }

    /// By name or id; `to` says what for.
    ///
    /// # Errors
    /// There is none.
    pub fn find(&self, to: &str, name_or_id: &str) -> Result<Arc<Vm>, ErrorBody> {
        let inner = self.inner();
        inner
            .vms
            .values()
            .find(|vm| vm.name() == name_or_id || vm.identity.id == name_or_id)
            .cloned()
            .ok_or_else(|| {
                let error = Error::NoVm { name: name_or_id.to_owned() };
                error.to_body(format!("{to} `{name_or_id}`"))
            })
    }

    /// All, in the order in which they began.
    pub fn all(&self) -> Vec<Arc<Vm>> {
        self.inner().vms.values().cloned().collect()
    }

    /// Those that have not ended.
    pub fn live(&self) -> Vec<Arc<Vm>> {
        let mut all = self.all();
        all.retain(|vm| vm.end_now().is_none());
        all
    }

    pub fn remove(&self, id: &str) {
        self.inner().vms.retain(|_, vm| vm.identity.id != id);
    }

    /// A VM has ended. → ids of ended VMs that are forgotten now, to make room.
    pub fn has_ended(&self, id: &str) -> Vec<String> {
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
    pub fn clones_of(&self, id: &str) -> Vec<Arc<Vm>> {
        let mut clones = self.live();
        clones.retain(|vm| vm.identity.parent.as_ref().is_some_and(|(parent, _)| parent == id));
        clones.sort_by_key(|vm| vm.identity.vmid);
        clones
    }

    /// A fork begins of the VM that ends this line, here or on another host. `give_up` is cancelled
    /// when it is to be given up for its family's sake.
    pub fn fork_begins(
        self: &Arc<Self>,
        line: Arc<[String]>,
        give_up: CancellationToken,
    ) -> UnderWay {
        let mut inner = self.inner();
        let number = inner.next_fork;
        inner.next_fork += 1;
        let over = CancellationToken::new();
        inner.forks.insert(number, Fork { line, give_up, over });
        drop(inner);
        UnderWay { registry: Arc::clone(self), number }
    }

    /// All live VMs that descend from this one, itself too, also if VMs between them are not listed
    /// any more.
    /// With them, the forks that are making more of them, which are cancelled.
    ///
    /// If there is neither, nothing of the family is left, nor comes: who would fork it is no more.
    pub fn end_of_family(&self, id: &str) -> Family {
        let inner = self.inner();
        let lives = |vm: &&Arc<Vm>| vm.identity.descends_from(id) && vm.end_now().is_none();
        let vms = inner.vms.values().filter(lives).cloned().collect();
        let forks = inner.forks.values().filter(|fork| fork.line.iter().any(|vm| vm == id));
        let forks = forks.map(|fork| (fork.give_up.clone(), fork.over.clone())).collect::<Vec<_>>();
        drop(inner);
        for (give_up, _) in &forks {
            give_up.cancel();
        }
        Family { vms, forks: forks.into_iter().map(|(_, over)| over).collect() }
    }

    /// The families. An ended VM is shown while something that lives descends from it.
    pub fn tree(&self) -> Vec<TreeNode> {
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
    use super::*;
    use crate::vm::log::Log;
    use crate::vm::{End, test_identity};

    fn vm(folder: &std::path::Path, name: &str, parent: Option<&Vm>) -> Arc<Vm> {
        Vm::new(test_identity(name, parent), Log::create(folder).expect("log"), None, None)
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
        let reservation = registry.reserve(&["web.1", "web.2", "web.3"]);
        for name in ["web.3", "web.1", "web.2"] {
            registry.add(vm(folder.path(), name, Some(&web)));
        }
        drop(reservation);
        registry.add(vm(folder.path(), "other", None));
        assert_eq!(names(&registry.all()), ["web", "web.1", "web.2", "web.3", "other"]);
        let tree = registry.tree();
        let children: Vec<_> = tree[0].children.iter().map(|node| &node.vm.name).collect();
        assert_eq!(children, ["web.1", "web.2", "web.3"]);
        assert_eq!(registry.end_of_family("id-web").vms.len(), 4);
    }

    #[test]
    fn a_family_is_whole_without_those_who_were_forgotten() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let web = vm(folder.path(), "web", None);
        let child = vm(folder.path(), "web.1", Some(&web));
        let grandchild = vm(folder.path(), "web.1.1", Some(&child));
        for vm in [&web, &child, &grandchild, &vm(folder.path(), "other", None)] {
            registry.add(Arc::clone(vm));
        }
        child.end(End::killed("in this test"), |_| ());
        registry.remove("id-web.1");
        assert_eq!(names(&registry.end_of_family("id-web").vms), ["web", "web.1.1"]);
        assert_eq!(names(&registry.end_of_family("id-web.1").vms), ["web.1.1"]);
    }

    #[test]
    fn the_end_of_a_family_ends_its_forks_under_way_and_no_others() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let web = vm(folder.path(), "web", None);
        let child = vm(folder.path(), "web.1", Some(&web));
        let tokens = [CancellationToken::new(), CancellationToken::new()];
        let of_web = registry.fork_begins(web.identity.line(), tokens[0].clone());
        let of_child = registry.fork_begins(child.identity.line(), tokens[1].clone());
        // Neither is listed (any more), and what they fork would be.
        let family = registry.end_of_family("id-web.1");
        assert_eq!(tokens.each_ref().map(CancellationToken::is_cancelled), [false, true]);
        assert_eq!(family.forks.len(), 1);
        assert!(!family.forks[0].is_cancelled());
        drop(of_child);
        assert!(family.forks[0].is_cancelled(), "it is over");
        assert!(registry.end_of_family("id-web.1").forks.is_empty());
        drop(of_web);
        assert!(!tokens[0].is_cancelled());
    }

    #[test]
    fn an_ended_vm_gives_its_name_up_and_a_running_one_does_not() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let web = vm(folder.path(), "web", None);
        registry.add(Arc::clone(&web));
        assert!(registry.reserve(&["web"]).names().is_empty());
        web.end(End::killed("in this test"), |_| ());
        assert_eq!(registry.reserve(&["web"]).names(), ["web"]);
        assert_eq!(registry.reserve(&["a", "a"]).names(), ["a"]);
        assert_eq!(registry.reserve(&["a"]).names(), ["a"], "free again");
    }

    #[test]
    fn a_taken_name_costs_neither_the_others_nor_ended_namesakes() {
        let folder = tempfile::tempdir().expect("folder");
        let registry = Arc::new(Registry::default());
        let old = vm(folder.path(), "old", None);
        registry.add(Arc::clone(&old));
        old.end(End::killed("in this test"), |_| ());
        registry.add(vm(folder.path(), "web", None));
        let reservation = registry.reserve(&["old", "web", "new"]);
        assert_eq!(reservation.names(), ["old", "new"]);
        assert_eq!(names(&registry.all()), ["old", "web"], "its log may still be read");
        // Only the VM that takes the name takes the place.
        let forgotten = registry.add(vm(folder.path(), "old", None));
        assert_eq!(forgotten, ["id-old"]);
        assert_eq!(registry.all().len(), 2);
        assert!(registry.find("find", "old").expect("listed").end_now().is_none());
    }

    #[test]
    fn two_forks_at_once_get_names_of_their_own() {
        let registry = Arc::new(Registry::default());
        let first = registry.reserve_for_clones("web", 2, |_| false);
        let second = registry.reserve_for_clones("web", 1, |_| false);
        assert_eq!(first.names(), ["web.1", "web.2"]);
        assert_eq!(second.names(), ["web.3"]);
        drop(first);
        assert_eq!(registry.reserve_for_clones("web", 2, |_| false).names(), ["web.1", "web.2"]);
    }

    #[test]
    fn names_of_clones_stay_within_the_bound() {
        let registry = Arc::new(Registry::default());
        let parent = "n".repeat(NAME_BYTES_MAX);
        let reservation = registry.reserve_for_clones(&parent, 1, |_| false);
        assert!(reservation.names()[0].len() <= NAME_BYTES_MAX);
    }
}
