//! What a frozen VM needs of a host to go on there: written down when it is frozen, compared before
//! a VM is started from it, be it from a store or on another host.

pub mod host;

use std::fs;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmfork_qemu::probe::{self, KvmFacts, NoKvm};
use vmfork_qemu::shape::ShapeError;
use vmfork_qemu::{Accel, GuestKind, Shape, Version};

use crate::error::Unlike;
use vmfork_guest_link::agent::{AgentInfo, Inheritance};
use vmfork_host::lifetime::Lifetime;
use vmfork_host::quotas::User;
use vmfork_host::vm::machine::Machine;
use vmfork_host::vm::{DriveSpec, Identity, Inherited, MachineSpec, pmem_bytes};

/// In the descriptor of a stored snapshot, as `vm`; in that of a fork, as `facts`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    #[serde(flatten)]
    pub inherited: Inherited,
    /// Whether a Linux guest with an agent's port runs in it, or a bare one.
    pub is_linux: bool,
    pub vmgenid: bool,
    pub qemu_version: String,
    /// QEMU's machine type with its version, which `pc` stood for.
    pub machine: String,
    /// What the guest takes its processor to be.
    pub cpu: String,
    pub agent: Option<AgentInfo>,
    /// What links to the guest's agent must know; `None` without an agent.
    pub inheritance: Option<Inheritance>,
    /// The number by which the guest's agent knows the freeze.
    pub fork: u64,
    pub pause_ms: f64,
}

/// What of a VM goes into its facts besides what its [`Machine`] and [`Identity`] say.
#[derive(Debug)]
pub struct Frozen {
    pub machine_type: String,
    pub inheritance: Option<Inheritance>,
    pub fork: u64,
    pub pause_ms: f64,
}

impl Facts {
    pub fn spec(&self) -> &MachineSpec {
        &self.inherited.spec
    }

    /// Of VMs that go on from it, without what tells them apart and where they come from: each the
    /// root of a family.
    pub fn identity(&self, user: User) -> Identity {
        Identity {
            id: String::new(),
            name: String::new(),
            inherited: self.inherited.clone(),
            snapshot: None,
            family: String::new(),
            user,
            job: None,
            lifetime: Lifetime::default(),
            parent: None,
            ancestors: Arc::default(),
            vmid: 0,
            has_agent: self.inheritance.is_some(),
            created_unix_ms: 0,
        }
    }

    pub fn of(
        identity: &Identity,
        machine: &Machine,
        agent: Option<AgentInfo>,
        frozen: Frozen,
    ) -> Self {
        let Frozen { machine_type, inheritance, fork, pause_ms } = frozen;
        let shape = &machine.shape;
        Self {
            inherited: identity.inherited.clone(),
            is_linux: shape.guest == GuestKind::Linux,
            vmgenid: shape.vmgenid,
            qemu_version: machine.version.to_string(),
            machine: machine_type,
            cpu: processor(shape.accel),
            agent,
            inheritance,
            fork,
            pause_ms,
        }
    }

    pub fn accel(&self) -> Accel {
        match self.spec().accel {
            vmfork_api::Accel::Kvm => Accel::Kvm,
            vmfork_api::Accel::Tcg => Accel::Tcg,
        }
    }

    /// The shape of QEMUs that can load it.
    pub fn shape(&self) -> Result<Shape, ShapeError> {
        let spec = self.spec();
        let guest = if self.is_linux { GuestKind::Linux } else { GuestKind::Bare };
        let drives = spec.drives.iter().map(DriveSpec::slot).collect();
        let shape = Shape::new(spec.memory_bytes, spec.cpus, self.accel(), guest, drives)?;
        let shape = shape.with_nics(spec.nics)?.with_pmem(spec.pmem_bytes())?;
        Ok(if self.vmgenid { shape } else { shape.without_vmgenid() })
    }

    /// Whether the QEMU and the processor of this host are those that it was taken on.
    ///
    /// # Errors
    /// They are not: names both.
    pub fn check_host(&self, qemu: Version) -> Result<(), Unlike> {
        let (qemu, cpu) = (qemu.to_string(), processor(self.accel()));
        if qemu != self.qemu_version {
            return Err(differs("QEMU", &self.qemu_version, &qemu));
        }
        if cpu != self.cpu {
            return Err(differs("a processor", &self.cpu, &cpu));
        }
        Ok(())
    }

    /// Whether this host has what its guest's processors are run by.
    ///
    /// # Errors
    /// They were run by KVM, which can't be used here.
    pub fn check_accel(&self, kvm: &KvmFacts) -> Result<(), Unlike> {
        if self.accel() == Accel::Tcg {
            return Ok(());
        }
        let choice = probe::choose_accel(Some(Accel::Kvm), kvm);
        choice.map(drop).map_err(|NoKvm { reason }| Unlike::NoKvm { reason })
    }

    /// Whether its persistent memory is that of a root of that size.
    ///
    /// # Errors
    /// It has another size: then there is more of it than the root shows, or less.
    pub fn check_pmem(&self, root_bytes: Option<u64>) -> Result<(), Unlike> {
        match self.spec().pmem_bytes() {
            Some(bytes) if root_bytes.map(pmem_bytes) != Some(bytes) => Err(Unlike::Pmem { bytes }),
            _ => Ok(()),
        }
    }

    /// Whether this version of vmfork can connect what its guest has beside its drives.
    ///
    /// # Errors
    /// It can't: the guest has network cards.
    pub fn check_devices(&self) -> Result<(), Unlike> {
        match self.spec().nics {
            0 => Ok(()),
            count => Err(Unlike::Nics { count }),
        }
    }

    /// Whether the root disk of an image is the one that the guest knows.
    ///
    /// # Errors
    /// It is not: a guest that goes on with another disk than it has in its memory destroys what it
    /// reads.
    pub fn check_root(&self, found: Option<&str>) -> Result<(), Unlike> {
        if found == self.spec().root_blake3() {
            return Ok(());
        }
        let word = |hash: Option<&str>| {
            hash.map_or("none".to_owned(), |hash| hash.chars().take(16).collect())
        };
        let (wanted, found) = (word(self.spec().root_blake3()), word(found));
        Err(Unlike::Root { image: self.spec().image.clone(), wanted, found })
    }
}

/// Whether the machine type that a QEMU of this host stands for is the one that a snapshot was
/// `taken` on.
///
/// # Errors
/// It is another one: names both.
pub fn check_machine(taken: &str, here: &str) -> Result<(), Unlike> {
    if here != taken {
        return Err(differs("machine type", taken, here));
    }
    Ok(())
}

fn differs(what: &'static str, taken: &str, here: &str) -> Unlike {
    Unlike::Differs { what, taken: taken.to_owned(), here: here.to_owned() }
}

/// What a guest takes its processor to be: QEMU's own under TCG, the host's under KVM.
fn processor(accel: Accel) -> String {
    match accel {
        Accel::Tcg => "QEMU's default (TCG)".to_owned(),
        Accel::Kvm => host_processor(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
    }
}

/// Model and features by `/proc/cpuinfo`: microcode and clock rates do not matter.
fn host_processor(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("", |(_, value)| value.trim())
    };
    let mut flags: Vec<_> = field("flags").split_ascii_whitespace().collect();
    flags.sort_unstable();
    let features = blake3::hash(flags.join(" ").as_bytes()).to_hex();
    format!("{} (features {})", field("model name"), &features[..8])
}

#[cfg(any(test, feature = "testing"))]
impl Facts {
    /// Of a VM without a disk.
    pub fn of_a_test(memory_bytes: u64) -> Self {
        Self {
            inherited: Inherited::of_a_test(memory_bytes),
            is_linux: true,
            vmgenid: false,
            qemu_version: "7.2.22".to_owned(),
            machine: "pc-i440fx-7.2".to_owned(),
            cpu: processor(Accel::Tcg),
            agent: None,
            inheritance: None,
            fork: 3,
            pause_ms: 1.5,
        }
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::Durability;
    use vmfork_host::disks::DiskSpec;

    use super::*;

    fn facts() -> Facts {
        let mut facts = Facts::of_a_test(512 << 20);
        let blake3 = "0123456789abcdef0123".to_owned();
        facts.inherited.spec.drives = vec![DriveSpec::Root { blake3, pmem_bytes: None }];
        facts
    }

    #[test]
    fn facts_survive_being_stored() {
        let facts = facts();
        let stored = serde_json::to_value(&facts).expect("plain");
        assert_eq!(
            (&stored["memory_bytes"], &stored["accel"]),
            (&(512 << 20).into(), &"tcg".into())
        );
        assert_eq!(serde_json::from_value::<Facts>(stored).expect("the same"), facts);
    }

    #[test]
    fn another_qemu_machine_processor_or_disk_is_refused_naming_both() {
        let facts = facts();
        let version = |minor| Version { major: 7, minor, micro: 22 };
        facts.check_host(version(2)).expect("the same");
        let text = |refused: Result<(), Unlike>| refused.expect_err("refused").to_string();
        assert_eq!(
            text(facts.check_host(version(3))),
            "it was taken on QEMU `7.2.22`, this host has `7.3.22`"
        );
        let elsewhere = Facts { cpu: "Other (features 1)".to_owned(), ..facts.clone() };
        let refused = text(elsewhere.check_host(version(2)));
        assert!(refused.contains("`Other (features 1)`") && refused.contains("(TCG)"), "{refused}");
        check_machine(&facts.machine, "pc-i440fx-7.2").expect("the same");
        let refused = text(check_machine(&facts.machine, "pc-i440fx-10.0"));
        assert!(refused.contains("`pc-i440fx-7.2`, this host has `pc-i440fx-10.0`"), "{refused}");
        facts.check_root(Some("0123456789abcdef0123")).expect("the same");
        for other in [None, Some("ffff")] {
            let refused = text(facts.check_root(other));
            assert!(refused.contains("hash 0123456789abcdef…"), "{refused}");
        }
    }

    #[test]
    fn one_that_was_taken_with_kvm_is_refused_where_there_is_none() {
        let without = KvmFacts { device: Err("No such file".to_owned()), modules: Vec::new() };
        let with = KvmFacts { device: Ok(()), modules: Vec::new() };
        facts().check_accel(&without).expect("TCG is everywhere");
        let mut taken = facts();
        taken.inherited.spec.accel = vmfork_api::Accel::Kvm;
        taken.check_accel(&with).expect("it is there");
        let refused = taken.check_accel(&without).expect_err("refused");
        assert_eq!(
            refused.to_string(),
            "it was taken with KVM, which can't be used here: \
             /dev/kvm does not open: No such file"
        );
    }

    #[test]
    fn one_with_network_cards_is_refused_until_they_can_be_connected() {
        facts().check_devices().expect("none");
        for (nics, says) in [(1, "a network card"), (3, "3 network cards")] {
            let mut taken = facts();
            taken.inherited.spec.nics = nics;
            let refused = crate::Error::from(taken.check_devices().expect_err("refused"));
            let refused = refused.to_body("start `web`");
            assert_eq!(refused.code, vmfork_api::ErrorCode::Conflict);
            assert!(refused.remedy.is_some() && refused.to_string().contains(says), "{refused}");
        }
    }

    #[test]
    fn disks_and_persistent_memory_are_checked() {
        let mut taken = facts();
        let name = "data".to_owned();
        let durability = Durability::Host;
        let (size_bytes, empty, read_only) = (1 << 30, false, false);
        let disk = DiskSpec { name, size_bytes, durability, volume: None, empty, read_only };
        taken.inherited.spec.drives.push(DriveSpec::Disk(disk));
        let stored = serde_json::to_value(&taken).expect("plain");
        assert_eq!(stored["drives"][1]["role"], "disk");
        assert_eq!(serde_json::from_value::<Facts>(stored).expect("the same"), taken);
        taken.check_devices().expect("drives are not devices beside them");
        facts().check_pmem(Some(1 << 20)).expect("it has none");
        let (blake3, pmem_bytes) = ("ab".to_owned(), Some(6 << 20));
        taken.inherited.spec.drives[0] = DriveSpec::Root { blake3, pmem_bytes };
        taken.check_pmem(Some(4 << 20)).expect("it fits");
        for root_bytes in [Some((4 << 20) + 1), Some(2 << 20), None] {
            taken.check_pmem(root_bytes).expect_err("another root");
        }
    }

    #[test]
    fn processors_differ_by_model_and_features_alone() {
        let one = "processor: 0\nmodel name\t: Fast 9000\nflags\t\t: sse avx\ncpu MHz : 1\n";
        let same = "processor: 7\nmodel name\t: Fast 9000\nflags\t\t: avx sse\ncpu MHz : 2\n";
        let other = "model name\t: Fast 9000\nflags\t\t: sse avx avx2\n";
        assert_eq!(host_processor(one), host_processor(same));
        assert_ne!(host_processor(one), host_processor(other));
        assert!(host_processor(one).starts_with("Fast 9000 (features "));
    }
}
