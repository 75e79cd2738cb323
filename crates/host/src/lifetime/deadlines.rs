//! Which VMs are due, and when the next one is: decisions without I/O or clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::setting::{Lifetime, Setting};

/// The bounds of a host's VMs. A bound is kept while a VM lives that descends from its VM, and
/// while a fork is in progress that makes such VMs.
#[derive(Debug, Default)]
pub struct Deadlines {
    /// Of each live VM what it descends from, the root first, and itself last.
    lines: HashMap<String, Arc<[String]>>,
    /// How many live VMs, and forks in progress, have a VM in their line.
    users: HashMap<String, usize>,
    settings: HashMap<String, Setting>,
}

impl Deadlines {
    /// A VM begins at `now`; the last of `line` is its own id. → whether it has a deadline.
    pub fn begin(&mut self, line: Arc<[String]>, lifetime: &Lifetime, now: Instant) -> bool {
        let Some(id) = line.last().cloned() else { return false };
        if self.lines.contains_key(&id) {
            return false;
        }
        self.hold(&line);
        self.lines.insert(id.clone(), line);
        if let Some(inherited) = &lifetime.inherited {
            self.hear(inherited.clone());
        }
        if let Some(own) = lifetime.own {
            self.set(&id, now.checked_add(own));
        }
        self.deadline(&id).is_some()
    }

    /// A VM has ended. Its bound stays while VMs may inherit it.
    pub fn ended(&mut self, id: &str) {
        if let Some(line) = self.lines.remove(id) {
            self.release(&line);
        }
    }

    /// A fork begins of the VM that ends this line. What it inherits is kept until
    /// [`Deadlines::release`], also if the VM ends, and changes of it are heard.
    pub fn hold(&mut self, line: &[String]) {
        for vm in line {
            *self.users.entry(vm.clone()).or_default() += 1;
        }
    }

    /// A fork is over: its clones have begun. One call for each of [`Deadlines::hold`].
    pub fn release(&mut self, line: &[String]) {
        for vm in line {
            let Some(users) = self.users.get_mut(vm) else { continue };
            *users -= 1;
            if *users == 0 {
                self.users.remove(vm);
                self.settings.remove(vm);
            }
        }
    }

    /// Bound a live VM; `None`: it never ends by itself. → the new setting; `None`: no such VM.
    pub fn set(&mut self, id: &str, ends: Option<Instant>) -> Option<Setting> {
        if !self.lines.contains_key(id) {
            return None;
        }
        let version = self.settings.get(id).map_or(1, |setting| setting.version.saturating_add(1));
        let setting = Setting { of: id.to_owned(), version, ends };
        self.settings.insert(id.to_owned(), setting.clone());
        Some(setting)
    }

    /// Another host, or a fork, tells of a bound. → whether it is news of a VM's line.
    /// It is none if the VM lives here: only its own host bounds it.
    pub fn hear(&mut self, setting: Setting) -> bool {
        let is_newer =
            self.settings.get(&setting.of).is_none_or(|known| known.version < setting.version);
        let lives_here = self.lines.contains_key(&setting.of);
        let is_news = is_newer && !lives_here && self.users.contains_key(&setting.of);
        if is_news {
            self.settings.insert(setting.of.clone(), setting);
        }
        is_news
    }

    /// Whether a newer bound of its VM is known.
    pub fn is_outdated(&self, setting: &Setting) -> bool {
        self.settings.get(&setting.of).is_some_and(|known| known.version > setting.version)
    }

    /// The bound of the nearest VM of a line that has one. The line is that of a live VM, or held.
    pub fn nearest(&self, line: &[String]) -> Option<&Setting> {
        line.iter().rev().find_map(|vm| self.settings.get(vm))
    }

    /// The bound that a live VM has, its own or inherited.
    pub fn of(&self, id: &str) -> Option<&Setting> {
        self.nearest(self.lines.get(id)?)
    }

    fn deadline(&self, id: &str) -> Option<Instant> {
        self.of(id)?.ends
    }

    /// The live VMs whose time is over.
    pub fn due(&self, now: Instant) -> Vec<String> {
        let is_due = |id: &&String| self.deadline(id).is_some_and(|ends| ends <= now);
        self.bounded().filter(is_due).cloned().collect()
    }

    /// When the next VM is due; `None`: no VM has a bound.
    pub fn next(&self) -> Option<Instant> {
        self.bounded().filter_map(|id| self.deadline(id)).min()
    }

    /// The VMs that may have a bound: none, at no cost, where no bound is set.
    fn bounded(&self) -> impl Iterator<Item = &String> {
        self.lines.keys().take(if self.settings.is_empty() { 0 } else { usize::MAX })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// What a host goes through. Numbers choose among the VMs that there ever were.
    #[derive(Debug, Clone)]
    enum Step {
        /// A VM boots, with or without a bound of its own.
        Boot {
            own: Option<u64>,
        },
        /// A fork of a VM begins, and takes what its clones inherit.
        Fork(prop::sample::Index),
        /// A clone of a fork in progress begins, maybe after its parent's end.
        Clone {
            fork: prop::sample::Index,
            own: Option<u64>,
        },
        /// A fork is over.
        Over(prop::sample::Index),
        End(prop::sample::Index),
        Set {
            vm: prop::sample::Index,
            ttl: Option<u64>,
        },
        /// Time goes on, and what is due ends.
        Pass(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (any, ttl) = (any::<prop::sample::Index>(), prop::option::of(1..50_u64));
        prop_oneof![
            2 => ttl.clone().prop_map(|own| Step::Boot { own }),
            3 => any.clone().prop_map(Step::Fork),
            3 => (any.clone(), ttl.clone()).prop_map(|(fork, own)| Step::Clone { fork, own }),
            1 => any.clone().prop_map(Step::Over),
            2 => any.clone().prop_map(Step::End),
            2 => (any, ttl).prop_map(|(vm, ttl)| Step::Set { vm, ttl }),
            3 => (1..20_u64).prop_map(Step::Pass),
        ]
    }

    /// A VM of the model: what it was given last, and by which VM it was forked.
    #[derive(Debug, Clone)]
    struct Known {
        parent: Option<usize>,
        lives: bool,
        /// The bound that was set: never, or a second.
        set: Option<Option<u64>>,
    }

    fn deadline(vms: &[Known], vm: usize) -> Option<u64> {
        match vms[vm].set {
            Some(set) => set,
            None => deadline(vms, vms[vm].parent?),
        }
    }

    fn line(vms: &[Known], vm: usize) -> Vec<String> {
        let mut line = vms[vm].parent.map(|parent| line(vms, parent)).unwrap_or_default();
        line.push(vm.to_string());
        line
    }

    proptest! {
        #[test]
        fn each_vm_ends_with_its_nearest_ancestor_that_has_a_bound(
            steps in prop::collection::vec(step(), 1..80),
        ) {
            let epoch = Instant::now();
            let at = |second| epoch + Duration::from_secs(second);
            let (mut now, mut vms) = (0_u64, Vec::<Known>::new());
            // Of each fork in progress the VM, and what its clones inherit.
            let mut forks = Vec::<(usize, Option<Setting>)>::new();
            let mut deadlines = Deadlines::default();
            for step in steps {
                match step {
                    Step::Fork(parent) => {
                        // Only what lives can be forked.
                        let live: Vec<_> = (0..vms.len()).filter(|vm| vms[*vm].lives).collect();
                        if !live.is_empty() {
                            let parent = *parent.get(&live);
                            let line = line(&vms, parent);
                            deadlines.hold(&line);
                            forks.push((parent, deadlines.nearest(&line).cloned()));
                        }
                    }
                    Step::Over(fork) if !forks.is_empty() => {
                        let (parent, _) = forks.swap_remove(fork.index(forks.len()));
                        deadlines.release(&line(&vms, parent));
                    }
                    Step::Boot { own } | Step::Clone { own, .. } => {
                        let fork = match step {
                            Step::Clone { .. } if forks.is_empty() => continue,
                            Step::Clone { fork, .. } => Some(fork.get(&forks).clone()),
                            _ => None,
                        };
                        let inherited = fork.as_ref().and_then(|(_, inherited)| inherited.clone());
                        let lifetime = Lifetime { own: own.map(Duration::from_secs), inherited };
                        let set = own.map(|own| Some(now + own));
                        vms.push(Known { parent: fork.map(|(vm, _)| vm), lives: true, set });
                        let line = line(&vms, vms.len() - 1);
                        let bounded = deadlines.begin(line.into(), &lifetime, at(now));
                        prop_assert_eq!(bounded, deadline(&vms, vms.len() - 1).is_some());
                    }
                    Step::End(vm) if !vms.is_empty() => {
                        let vm = vm.index(vms.len());
                        vms[vm].lives = false;
                        deadlines.ended(&vm.to_string());
                    }
                    Step::Set { vm, ttl } if !vms.is_empty() => {
                        let vm = vm.index(vms.len());
                        let ends = ttl.map(|ttl| now + ttl);
                        let set = deadlines.set(&vm.to_string(), ends.map(at));
                        prop_assert_eq!(set.is_some(), vms[vm].lives);
                        if vms[vm].lives {
                            vms[vm].set = Some(ends);
                        }
                    }
                    Step::Pass(seconds) => now += seconds,
                    Step::End(_) | Step::Set { .. } | Step::Over(_) => {}
                }
                let live = || (0..vms.len()).filter(|vm| vms[*vm].lives);
                let next = live().filter_map(|vm| deadline(&vms, vm)).min();
                prop_assert_eq!(deadlines.next(), next.map(at));
                let over = |vm: &usize| deadline(&vms, *vm).is_some_and(|ends| ends <= now);
                let due: BTreeSet<_> = live().filter(over).map(|vm| vm.to_string()).collect();
                prop_assert_eq!(&deadlines.due(at(now)).into_iter().collect::<BTreeSet<_>>(), &due);
                for id in due {
                    deadlines.ended(&id);
                    let vm: usize = id.parse().expect("a number");
                    vms[vm].lives = false;
                }
                prop_assert!(deadlines.next().is_none_or(|next| next > at(now)), "no hot loop");
            }
            for vm in 0..vms.len() {
                deadlines.ended(&vm.to_string());
            }
            for (parent, _) in forks {
                deadlines.release(&line(&vms, parent));
            }
            let empty = (deadlines.lines.len(), deadlines.users.len(), deadlines.settings.len());
            prop_assert_eq!(empty, (0, 0, 0), "nothing is kept of families that have ended");
        }

        #[test]
        fn of_news_from_other_hosts_the_newest_stands_in_any_order(
            order in Just((1..6_u64).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let epoch = Instant::now();
            let mut deadlines = Deadlines::default();
            let line = ["web", "web.1"].map(ToOwned::to_owned);
            deadlines.begin(line.into(), &Lifetime::default(), epoch);
            for version in order {
                let ends = Some(epoch + Duration::from_secs(version));
                deadlines.hear(Setting { of: "web".to_owned(), version, ends });
            }
            let strange = Setting { of: "db".to_owned(), version: 9, ends: Some(epoch) };
            prop_assert!(!deadlines.hear(strange), "no VM here is of that family");
            prop_assert_eq!(deadlines.next(), Some(epoch + Duration::from_secs(5)));
        }
    }

    #[test]
    fn a_bound_that_is_taken_away_stays_away_from_what_inherits_it() {
        let epoch = Instant::now();
        let hour = Lifetime { own: Some(Duration::from_secs(3600)), inherited: None };
        let mut deadlines = Deadlines::default();
        let line = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Arc<[String]>>();
        deadlines.begin(line(&["web"]), &hour, epoch);
        let inherited = deadlines.of("web").cloned();
        let lifetime = Lifetime { own: None, inherited };
        deadlines.begin(line(&["web", "web.1"]), &lifetime, epoch);
        deadlines.begin(line(&["web", "web.1", "web.1.1"]), &lifetime, epoch);
        deadlines.set("web.1", None).expect("it lives");
        assert!(deadlines.of("web.1.1").is_some_and(|setting| setting.ends.is_none()));
        assert_eq!(deadlines.due(epoch + Duration::from_secs(3600)), ["web"]);
    }

    #[test]
    fn a_host_hears_of_a_bound_before_the_clones_of_a_fork_in_progress_begin() {
        let epoch = Instant::now();
        let at = |second| epoch + Duration::from_secs(second);
        let setting = |version, ends| Setting { of: "web".to_owned(), version, ends };
        let line = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Arc<[String]>>();
        let mut deadlines = Deadlines::default();
        deadlines.hold(&line(&["web"]));
        assert!(deadlines.hear(setting(2, Some(at(5)))), "clones of it are expected");
        assert_eq!(deadlines.next(), None, "no VM lives yet");
        let lifetime = Lifetime { own: None, inherited: Some(setting(1, None)) };
        assert!(deadlines.begin(line(&["web", "web.1"]), &lifetime, epoch));
        deadlines.release(&line(&["web"]));
        assert_eq!(deadlines.next(), Some(at(5)));
    }

    #[test]
    fn no_other_host_bounds_a_vm_that_lives_here() {
        let epoch = Instant::now();
        let mut deadlines = Deadlines::default();
        let line = ["web"].map(ToOwned::to_owned);
        deadlines.begin(line.into(), &Lifetime::default(), epoch);
        let strange = Setting { of: "web".to_owned(), version: u64::MAX, ends: Some(epoch) };
        assert!(!deadlines.hear(strange));
        assert_eq!(deadlines.next(), None);
        let set = deadlines.set("web", None).expect("it lives");
        assert_eq!((set.version, set.ends), (1, None));
    }
}
