//! What was promised to whom, by lease. Sums only: who may have what is decided by
//! [`super::Admission`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use vmfork_cluster::Room;
use vmfork_cluster::allocate::Amount;

use crate::quotas::User;

#[derive(Debug, Clone)]
pub(super) struct Account {
    /// The id of its VM's family; `None` for what is no VM's.
    pub(super) family: Option<Arc<str>>,
    /// Of a VM: whose it is, and its virtual CPUs.
    pub(super) owner: Option<(User, u32)>,
    pub(super) committed_bytes: u64,
    pub(super) private_bytes: u64,
    pub(super) pid: Option<u32>,
}

impl Account {
    fn amount(&self) -> Amount {
        let vcpus = self.owner.map_or(0, |(_, vcpus)| vcpus);
        let room = Room { memory_bytes: self.committed_bytes, vcpus };
        Amount { vms: u32::from(self.owner.is_some()), room }
    }
}

#[derive(Debug, Default)]
pub(super) struct Accounts {
    next: u64,
    pub(super) leases: HashMap<u64, Account>,
    /// When the private memory of all was looked up last, and what the host had available then.
    pub(super) probed: Option<(Instant, u64)>,
}

impl Accounts {
    pub(super) fn outstanding_bytes(&self) -> u64 {
        let owed =
            |account: &Account| account.committed_bytes.saturating_sub(account.private_bytes);
        self.leases.values().map(owed).fold(0, u64::saturating_add)
    }

    pub(super) fn committed_bytes(&self) -> u64 {
        self.leases.values().map(|account| account.committed_bytes).fold(0, u64::saturating_add)
    }

    /// How many virtual CPUs VMs have or were promised.
    pub(super) fn vcpus(&self) -> u32 {
        let each = self.leases.values().filter_map(|account| Some(account.owner?.1));
        each.fold(0, u32::saturating_add)
    }

    /// What a family has or was promised, with its forks and snapshots in progress.
    pub(super) fn of_family(&self, family: &str) -> Amount {
        let theirs = self.leases.values().filter(|a| a.family.as_deref() == Some(family));
        theirs.map(Account::amount).fold(Amount::default(), Amount::plus)
    }

    /// What each user's VMs have or were promised.
    pub(super) fn of_users(&self) -> BTreeMap<User, Amount> {
        let mut users: BTreeMap<User, Amount> = BTreeMap::new();
        for account in self.leases.values() {
            if let Some((user, _)) = account.owner {
                let has = users.entry(user).or_default();
                *has = has.plus(account.amount());
            }
        }
        users
    }

    pub(super) fn add(&mut self, committed_bytes: u64, family: Option<Arc<str>>) -> u64 {
        let id = self.next;
        self.next += 1;
        let account = Account { family, owner: None, committed_bytes, private_bytes: 0, pid: None };
        self.leases.insert(id, account);
        id
    }
}
