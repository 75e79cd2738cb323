//! Which VMs have a volume. No I/O.
//!
//! ```text
//!   free ──take──► a VM has it ──its VM ends──► being given back ──give_back──► free
//! ```
//!
//! Promises: one VM has a volume, unless it is shared.

/// One VM that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Use {
    number: u64,
    vm: String,
    /// The VM has ended; its last writes may be under way.
    ends: bool,
}

/// Who has it.
#[derive(Debug, Default)]
pub(super) struct Uses {
    all: Vec<Use>,
    next: u64,
}

/// Another VM has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) vm: String,
    /// It has ended, and gives the volume back soon.
    pub(super) ends: bool,
}

impl Uses {
    /// Whether a VM may have it. `shared`: many may.
    ///
    /// # Errors
    /// Another has it.
    pub(super) fn free(&self, shared: bool) -> Result<(), Taken> {
        match self.all.first() {
            Some(Use { vm, ends, .. }) if !shared => Err(Taken { vm: vm.clone(), ends: *ends }),
            _ => Ok(()),
        }
    }

    /// A VM gets it. → by which number it gives it back.
    ///
    /// # Errors
    /// Another has it.
    pub(super) fn take(&mut self, vm: &str, shared: bool) -> Result<u64, Taken> {
        self.free(shared)?;
        let number = self.next;
        self.next += 1;
        self.all.push(Use { number, vm: vm.to_owned(), ends: false });
        Ok(number)
    }

    /// The VM has ended.
    pub(super) fn vm_ends(&mut self, vm: &str) {
        for one in self.all.iter_mut().filter(|one| one.vm == vm) {
            one.ends = true;
        }
    }

    pub(super) fn give_back(&mut self, number: u64) {
        self.all.retain(|one| one.number != number);
    }

    /// Whether it is being given back by one of these VMs.
    pub(super) fn is_ending(&self, is_one: impl Fn(&str) -> bool) -> bool {
        self.all.iter().any(|one| one.ends && is_one(&one.vm))
    }

    /// The VMs that have it, each once, in the order in which they got it.
    pub(super) fn vms(&self) -> Vec<String> {
        let mut vms: Vec<String> = Vec::new();
        for one in &self.all {
            if !vms.contains(&one.vm) {
                vms.push(one.vm.clone());
            }
        }
        vms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_vm_has_a_volume_until_it_is_given_back() {
        let mut uses = Uses::default();
        let web = uses.take("web", false).expect("free");
        let taken = Taken { vm: "web".to_owned(), ends: false };
        assert_eq!(uses.take("db", false), Err(taken.clone()));
        assert_eq!(uses.take("web", false), Err(taken.clone()), "nor twice for one VM");
        uses.vm_ends("db");
        assert!(!uses.is_ending(|_| true));
        uses.vm_ends("web");
        assert!(uses.is_ending(|_| true) && uses.is_ending(|vm| vm == "web"));
        assert!(!uses.is_ending(|vm| vm == "db"), "it has none");
        assert_eq!(uses.free(false), Err(Taken { ends: true, ..taken }));
        uses.give_back(web + 1);
        assert_eq!(uses.vms(), ["web"]);
        uses.give_back(web);
        let db = uses.take("db", false).expect("free again");
        assert_ne!(db, web, "a use that is over can't end a later one");
        assert_eq!(uses.vms(), ["db"]);
    }

    #[test]
    fn many_vms_have_a_shared_volume() {
        let mut uses = Uses::default();
        let numbers = ["web", "db", "web"].map(|vm| uses.take(vm, true).expect("shared"));
        assert_eq!(uses.vms(), ["web", "db"]);
        uses.vm_ends("db");
        assert_eq!(uses.take("late", true), Ok(3), "though one gives it back");
        numbers.into_iter().for_each(|number| uses.give_back(number));
        assert_eq!(uses.vms(), ["late"]);
    }
}
