//! What of a VM is stored already: its next snapshot is a delta on that.

use std::collections::BTreeMap;

use vmfork_host::vm::CameOf;
use vmfork_image::PageTable;
use vmfork_store::{BaseRef, Role, SnapshotId};

/// The newest stored images that a VM's memory and disks descend from, by role. They need not be of
/// one snapshot: one of the disks alone has no memory.
#[derive(Debug, Clone, Default)]
pub(super) struct Bases(BTreeMap<Role, Base>);

impl CameOf for Bases {}

/// A stored image.
#[derive(Debug, Clone)]
pub(super) struct Base {
    /// Where it is; the name is what the snapshot was called then.
    pub(super) at: BaseRef,
    /// Of the image, while that was in memory: whose bytes it stored.
    pub(super) table: PageTable,
}

impl FromIterator<(Role, Base)> for Bases {
    fn from_iter<T: IntoIterator<Item = (Role, Base)>>(bases: T) -> Self {
        Self(bases.into_iter().collect())
    }
}

impl Bases {
    /// The images of one snapshot, with the page tables that they had in memory.
    pub(super) fn of(
        (name, id): (&str, SnapshotId),
        tables: impl IntoIterator<Item = (Role, PageTable)>,
    ) -> Self {
        let base = |(role, table): (Role, PageTable)| {
            let at = BaseRef { name: name.to_owned(), id, role: role.clone() };
            (role, Base { at, table })
        };
        tables.into_iter().map(base).collect()
    }

    /// The same with newer ones in place of those of their roles.
    pub(super) fn with(&self, newer: Self) -> Self {
        let mut all = self.0.clone();
        all.extend(newer.0);
        Self(all)
    }

    /// The same with others for the roles that have none.
    pub(super) fn or(&self, others: Self) -> Self {
        others.with(self.clone())
    }

    /// Those that `may` accepts, by their role and by the name and ID of their snapshot.
    pub(super) fn those(&self, may: impl Fn(&Role, &str, SnapshotId) -> bool) -> Self {
        let all = self.0.iter().filter(|(role, base)| may(role, &base.at.name, base.at.id));
        all.map(|(role, base)| (role.clone(), base.clone())).collect()
    }

    /// What an image of that role and number of pages is a delta on: for the store, and its table.
    pub(super) fn image(&self, role: &Role, pages: u64) -> Option<(BaseRef, &PageTable)> {
        let Base { at, table } = self.0.get(role).filter(|base| base.table.pages() == pages)?;
        Some((at.clone(), table))
    }

    /// The snapshot of the first of them, as a descriptor lists it.
    pub(super) fn name(&self) -> Option<&str> {
        self.0.values().next().map(|base| base.at.name.as_str())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use vmfork_image::{ImageId, Source};

    use super::*;

    fn id() -> SnapshotId {
        SnapshotId::random().expect("random numbers")
    }

    fn table(pages: u64) -> PageTable {
        PageTable::uniform(pages, Source::Image(ImageId::new(7).expect("not 0")))
    }

    #[test]
    fn each_image_has_the_newest_base_of_its_role_and_size() {
        let disk = |name: &str| Role::Disk(name.parse().expect("a device"));
        let (full, disks) = (id(), id());
        let all = [(Role::Memory, table(512)), (disk("a"), table(64)), (disk("b"), table(64))];
        let came_of = Bases::of(("full", full), all);
        let newer = Bases::of(("disks", disks), [(disk("a"), table(128))]);
        let both = came_of.with(newer);
        let base = |bases: &Bases, role: Role, pages| {
            bases.image(&role, pages).map(|(base, _)| (base.name, base.id))
        };
        assert_eq!(base(&both, Role::Memory, 512), Some(("full".to_owned(), full)));
        assert_eq!(base(&both, disk("a"), 128), Some(("disks".to_owned(), disks)));
        assert_eq!(base(&both, disk("b"), 64), Some(("full".to_owned(), full)));
        assert_eq!(base(&both, disk("a"), 64), None, "it has grown");
        assert_eq!(base(&both, disk("c"), 64), None);
        assert_eq!(both.name(), Some("full"));
        // A snapshot that was removed is no base, though another has its name now.
        let there = both.those(|_, name, id| name == "disks" && id == disks);
        assert_eq!(base(&there, Role::Memory, 512), None);
        assert_eq!(there.name(), Some("disks"));
        assert!(!there.is_empty() && there.those(|_, _, _| false).is_empty());
    }
}
