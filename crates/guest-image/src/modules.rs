//! Which kernel modules go into the initrd, and in which order they load.
//!
//! By name through `modules.dep`, as `modprobe` does it, so that kernels whose modules are split or
//! placed otherwise work too. What is built in needs nothing.

use std::collections::{BTreeMap, BTreeSet};

/// What the agent needs before it has a root file system, and what the kernel uses best early on.
/// `vmgenid` reseeds by itself where it exists (6.12); it and the last ones may be absent.
pub(crate) const WANTED: [(&str, Need); 10] = [
    ("virtio_pci", Need::Must),
    ("virtio_blk", Need::Must),
    ("virtio_console", Need::Must),
    ("ext4", Need::Must),
    ("overlay", Need::Must),
    ("virtio_balloon", Need::Must),
    ("virtio_rng", Need::May),
    ("vmgenid", Need::May),
    ("virtio_net", Need::May),
    ("virtio_mmio", Need::May),
];

/// What the agent needs, beside those, to have its root as persistent memory.
pub(crate) const FOR_PMEM: [(&str, Need); 2] = [("nfit", Need::Must), ("nd_pmem", Need::Must)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    Must,
    May,
}

/// A kernel's `modules.dep` and `modules.builtin`.
#[derive(Debug, Default)]
pub(crate) struct ModuleIndex {
    /// Name to path and the paths it depends on, as listed.
    modules: BTreeMap<String, (String, Vec<String>)>,
    builtin: BTreeSet<String>,
}

impl ModuleIndex {
    pub(crate) fn parse(modules_dep: &str, modules_builtin: &str) -> Self {
        let mut index = Self::default();
        for line in modules_dep.lines() {
            if let Some((path, needs)) = line.split_once(':') {
                let needs = needs.split_ascii_whitespace().map(str::to_owned).collect();
                index.modules.insert(name_of(path), (path.trim().to_owned(), needs));
            }
        }
        index.builtin = modules_builtin.lines().map(name_of).collect();
        index
    }

    /// Paths to load, each after all that it needs; `Err` names a module that must be there and is
    /// not.
    pub(crate) fn load_order(&self, wanted: &[(&str, Need)]) -> Result<Vec<String>, String> {
        let mut order = Vec::new();
        for (name, need) in wanted {
            if self.builtin.contains(&name_of(name)) {
                continue;
            }
            match self.modules.get(&name_of(name)) {
                Some((path, _)) => self.visit(path, &mut order, &mut BTreeSet::new()),
                None if *need == Need::May => {}
                None => return Err((*name).to_owned()),
            }
        }
        Ok(order)
    }

    /// Depth first. `path` may be one that modules.dep mentions without an entry of its own: it
    /// loads all the same. A cycle, which depmod never writes, is cut.
    fn visit(&self, path: &str, order: &mut Vec<String>, open: &mut BTreeSet<String>) {
        if order.iter().any(|p| p == path) || !open.insert(path.to_owned()) {
            return;
        }
        if let Some((_, needs)) = self.modules.get(&name_of(path)) {
            // Listed with the deepest last.
            for needed in needs.iter().rev() {
                self.visit(needed, order, open);
            }
        }
        order.push(path.to_owned());
    }
}

/// `kernel/drivers/char/hw_random/virtio-rng.ko.xz` is the module `virtio_rng`.
fn name_of(path: &str) -> String {
    let file = path.trim().rsplit('/').next().unwrap_or_default();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio_pci_legacy_dev.ko:
kernel/drivers/virtio/virtio_pci_modern_dev.ko:
kernel/drivers/virtio/virtio_pci.ko: kernel/drivers/virtio/virtio_pci_legacy_dev.ko kernel/drivers/virtio/virtio_pci_modern_dev.ko kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/char/hw_random/virtio-rng.ko.xz: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/a.ko: kernel/b.ko
kernel/b.ko: kernel/a.ko
";

    fn order(wanted: &[(&str, Need)]) -> Result<Vec<String>, String> {
        let index = ModuleIndex::parse(DEP, "kernel/fs/ext4/ext4.ko\n");
        let names = index.load_order(wanted)?;
        Ok(names.iter().map(|p| name_of(p)).collect())
    }

    #[test]
    fn what_a_module_needs_comes_before_it_and_once() {
        assert_eq!(
            order(&[("virtio_pci", Need::Must), ("virtio_rng", Need::Must)]).unwrap(),
            [
                "virtio_ring",
                "virtio",
                "virtio_pci_modern_dev",
                "virtio_pci_legacy_dev",
                "virtio_pci",
                "virtio_rng"
            ]
        );
    }

    #[test]
    fn dashes_and_underscores_are_one_and_builtin_needs_nothing() {
        assert_eq!(order(&[("virtio-rng", Need::Must)]).unwrap().last().unwrap(), "virtio_rng");
        assert!(order(&[("ext4", Need::Must)]).unwrap().is_empty());
    }

    #[test]
    fn only_a_module_that_must_be_there_is_missed() {
        assert!(order(&[("vmgenid", Need::May)]).unwrap().is_empty());
        assert_eq!(order(&[("vmgenid", Need::Must)]).unwrap_err(), "vmgenid");
    }

    #[test]
    fn a_cycle_ends() {
        assert_eq!(order(&[("a", Need::Must)]).unwrap(), ["b", "a"]);
    }
}
