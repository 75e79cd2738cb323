//! QEMU's command line: a pure function of the shape and of what QEMU is for.
//!
//! Every file is named by the fd that QEMU inherits ([`Slot`]), so that it needs no right to any
//! path. Both a QEMU that boots and one that waits get the same devices at the same addresses, or
//! the state wouldn't load. Behind the drives of one that waits are placeholders.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::drives::Drives;
use crate::shape::{Accel, DRIVES_MAX, DriveSlot, GuestKind, NICS_MAX, Shape};

/// Name of the agent's virtio-serial port, as the guest sees it in `/dev/virtio-ports/`.
pub const AGENT_PORT: &str = "org.vmfork.agent.0";

/// The same port by its id in QEMU, which is in the `VSERPORT_CHANGE` events: one without an id has
/// none.
pub const AGENT_DEVICE: &str = "agentport";

/// Where in QEMU each fd is. 0 to 2 are `/dev/null`, `/dev/null` and the error pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    Qmp,
    Serial,
    Agent,
    Ram,
    /// The file that persistent memory is said to be.
    Pmem,
    Kernel,
    Initrd,
    TapControl,
    TapUserfaultfd,
    TapKvm,
    TapLibrary,
    /// The file of a drive that a VM boots with, or the folder of its socket, by the drive's
    /// index.
    Drive(u8),
    /// The tap of a network card, by the card's index.
    Nic(u8),
}

const DRIVES_FIRST: i32 = 14;
const NICS_FIRST: i32 = DRIVES_FIRST + DRIVES_MAX as i32;
/// First number above all slots.
pub(crate) const SLOT_END: i32 = NICS_FIRST + NICS_MAX as i32;

impl Slot {
    /// The number of the fd in QEMU.
    pub fn number(self) -> i32 {
        match self {
            Self::Qmp => 3,
            Self::Serial => 4,
            Self::Agent => 5,
            Self::Ram => 6,
            Self::Pmem => 7,
            Self::Kernel => 8,
            Self::Initrd => 9,
            Self::TapControl => 10,
            Self::TapUserfaultfd => 11,
            Self::TapKvm => 12,
            Self::TapLibrary => 13,
            Self::Drive(index) => DRIVES_FIRST + i32::from(index),
            Self::Nic(index) => NICS_FIRST + i32::from(index),
        }
    }

    /// A path that opens the file again, inside QEMU.
    pub fn path(self) -> String {
        format!("/proc/self/fd/{}", self.number())
    }
}

/// What QEMU does once it is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin<'a> {
    /// Boot a kernel, from [`Slot::Kernel`] and [`Slot::Initrd`].
    Kernel { append: &'a OsStr, initrd: bool },
    /// Boot from the first drive.
    Disk,
    /// Wait for a state. It takes no kernel: 14 MB and 10 ms less each.
    Wait,
}

/// Bytes of translated code, MiB, that a vCPU's TCG keeps. QEMU's own default of 1 GiB would let
/// every clone grow to that. A Debian guest that boots and runs a few programs fills less than 64.
const TB_MIB_FIRST_CPU: u32 = 64;
const TB_MIB_MORE_CPUS: u32 = 32;
const TB_MIB_MAX: u32 = 512;

/// Of all virtio devices. A modern one saves 1024 queues, 45 kB of zeros, field by field. The four
/// of them would make two thirds of the time that the device state takes (decision 0009).
const VIRTIO: &str = "disable-modern=on";

/// The arguments after the program's name. `contents` is what the drives of a VM that boots hold.
pub fn command_line(
    shape: &Shape,
    begin: Begin<'_>,
    contents: &Drives,
    firmware: &[PathBuf],
    kvm_cpu: &str,
) -> Vec<OsString> {
    let mut line = Line::default();
    for folder in firmware {
        line.option("-L", folder);
    }
    line.flag("-nodefaults").flag("-no-user-config").option("-display", "none");
    line.option("-vga", "none");
    machine(&mut line, shape, kvm_cpu);
    channels(&mut line, shape);
    drives(&mut line, shape, contents, matches!(begin, Begin::Wait));
    nics(&mut line, shape);
    devices(&mut line, shape);
    // A guest that reboots must not run on in a clone without a kernel: its QEMU ends.
    line.flag("-no-reboot").option("-action", "reboot=shutdown,shutdown=poweroff,panic=shutdown");
    line.option(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
    if shape.pmem_bytes.is_some() && !matches!(begin, Begin::Wait) {
        // Until the shim has something to show in persistent memory.
        line.flag("-S");
    }
    match begin {
        Begin::Kernel { append, initrd } => {
            line.option("-kernel", Slot::Kernel.path());
            if initrd {
                line.option("-initrd", Slot::Initrd.path());
            }
            line.option("-append", append);
        }
        Begin::Disk => {}
        Begin::Wait => {
            line.option("-incoming", "defer");
        }
    }
    line.arguments
}

fn machine(line: &mut Line, shape: &Shape, kvm_cpu: &str) {
    let machine = shape.machine.name();
    // mem-merge: a mergeable RAM makes a freeze walk every page. suppress-vmdesc: 100 kB of JSON
    // less.
    let nvdimm = if shape.pmem_bytes.is_some() { ",nvdimm=on" } else { "" };
    line.option(
        "-machine",
        format!("{machine},mem-merge=off,suppress-vmdesc=on,memory-backend=ram{nvdimm}"),
    );
    let memory_kib = shape.memory_bytes >> 10;
    let slots = match shape.pmem_bytes {
        None => String::new(),
        Some(bytes) => format!(",slots=1,maxmem={}K", memory_kib.saturating_add(bytes >> 10)),
    };
    line.option("-m", format!("{memory_kib}K{slots}"));
    let ram = Slot::Ram.path();
    line.option(
        "-object",
        format!("memory-backend-file,id=ram,size={memory_kib}K,mem-path={ram},share=on,align=1G"),
    );
    if let Some(bytes) = shape.pmem_bytes {
        // share: device states leave it out, as they do RAM.
        let (kib, path) = (bytes >> 10, Slot::Pmem.path());
        line.option(
            "-object",
            format!("memory-backend-file,id=pmem,size={kib}K,mem-path={path},share=on,readonly=on,align=2M"),
        );
        line.option("-device", "nvdimm,id=nvdimm0,memdev=pmem,unarmed=on");
    }
    line.option("-smp", shape.cpus.to_string());
    match shape.accel {
        Accel::Tcg => {
            let more = TB_MIB_MORE_CPUS.saturating_mul(shape.cpus.saturating_sub(1));
            let tb_mib = TB_MIB_FIRST_CPU.saturating_add(more).min(TB_MIB_MAX);
            // Not `single`, even for one vCPU: its thread enables the clock of a paused VM again.
            // The main loop then polls a clock that stands still (QEMU's `rr_cpu_thread_fn`).
            line.option("-accel", format!("tcg,thread=multi,tb-size={tb_mib}"));
        }
        Accel::Kvm => {
            line.option("-accel", "kvm").option("-cpu", kvm_cpu);
        }
    }
}

fn channels(line: &mut Line, shape: &Shape) {
    let socket = |id: &str, slot: Slot| format!("socket,id={id},fd={}", slot.number());
    line.option("-chardev", socket("qmp", Slot::Qmp));
    line.option("-mon", "chardev=qmp,mode=control");
    line.option("-chardev", socket("serial", Slot::Serial)).option("-serial", "chardev:serial");
    if shape.guest == GuestKind::Linux {
        line.option("-chardev", socket("agent", Slot::Agent));
        line.option(
            "-device",
            format!("virtio-serial-pci,id=ports,bus=pci.0,addr=0x3,max_ports=2,{VIRTIO}"),
        );
        line.option(
            "-device",
            format!(
                "virtserialport,id={AGENT_DEVICE},bus=ports.0,nr=1,chardev=agent,name={AGENT_PORT}"
            ),
        );
    }
}

/// PCI slot of a drive: the first where it always was, the others above the network cards.
fn drive_address(index: u8) -> u8 {
    match index {
        0 => 0x4,
        _ => 0x10_u8.saturating_add(index),
    }
}

/// Of a drive that the guest writes to. The VM stops on an error, so that the request can be
/// repeated. 4 KiB is the page of a disk's layer: a smaller write would have to read the rest.
const WRITABLE: &str = ",werror=stop,rerror=stop,physical_block_size=4096,discard=on";
/// Of one that has a server, too, and that the guest can only read.
const SHARED: &str = ",rerror=stop,physical_block_size=4096";

/// A drive without content has a placeholder.
fn drives(line: &mut Line, shape: &Shape, contents: &Drives, waits: bool) {
    for (index, slot, content) in contents.by_slot(&shape.drives, waits) {
        let name = format!("drive{index}");
        let writable = match slot {
            DriveSlot::ReadOnly => "",
            DriveSlot::Disk(disk) if disk.read_only => SHARED,
            DriveSlot::Disk(_) => WRITABLE,
        };
        let node = match content {
            Some(content) => content.node(&name, &Slot::Drive(index).path()).to_string(),
            None => {
                format!("driver=null-co,size=512,read-zeroes=on,node-name={name},read-only=on")
            }
        };
        line.option("-blockdev", node);
        let boot = match (shape.guest, index) {
            (GuestKind::Bare, 0) => ",bootindex=0",
            _ => "",
        };
        let address = drive_address(index);
        line.option(
            "-device",
            format!(
                "virtio-blk-pci,id=disk{index},drive={name},bus=pci.0,addr={address:#x},{VIRTIO}{writable}{boot}"
            ),
        );
    }
}

/// First PCI slot of network cards.
const NIC_ADDRESS: u8 = 0x7;

/// The tap comes with QEMU. It joins a network outside, so nothing is bound at clone time. The MAC
/// is a placeholder, too: the one in the state that is loaded counts.
fn nics(line: &mut Line, shape: &Shape) {
    for index in 0..shape.nics {
        let fd = Slot::Nic(index).number();
        line.option("-netdev", format!("tap,id=tap{index},fd={fd},vhost=off"));
        let address = NIC_ADDRESS.saturating_add(index);
        let mac = index.saturating_add(1);
        // romfile: a ROM for booting from the network adds 250 kB to the state.
        line.option(
            "-device",
            format!(
                "virtio-net-pci,id=net{index},netdev=tap{index},mac=52:54:00:00:00:{mac:02x},bus=pci.0,addr={address:#x},romfile=,{VIRTIO}"
            ),
        );
    }
}

fn devices(line: &mut Line, shape: &Shape) {
    if shape.guest == GuestKind::Linux {
        line.option(
            "-device",
            format!(
                "virtio-balloon-pci,id=balloon,bus=pci.0,addr=0x5,free-page-reporting=on,{VIRTIO}"
            ),
        );
        line.option("-object", "rng-builtin,id=random");
        line.option(
            "-device",
            format!("virtio-rng-pci,id=rng,rng=random,bus=pci.0,addr=0x6,{VIRTIO}"),
        );
        // Each QEMU draws its own; after loading a state it tells the guest.
        if shape.vmgenid {
            line.option("-device", "vmgenid,id=vmgenid,guid=auto");
        }
    }
}

#[derive(Debug, Default)]
struct Line {
    arguments: Vec<OsString>,
}

impl Line {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.arguments.push(flag.into());
        self
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.arguments.push(name.into());
        self.arguments.push(value.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drives::{DriveContent, NbdSocket};
    use crate::shape::DiskSlot;

    /// Where the first drive's file is.
    const FILE: &str = "/proc/self/fd/14";

    fn shape(cpus: u32, accel: Accel, guest: GuestKind) -> Shape {
        Shape::new(512 << 20, cpus, accel, guest, vec![DriveSlot::ReadOnly]).expect("possible")
    }

    /// What the shape's drives may hold.
    fn contents(shape: &Shape) -> Drives {
        let folder = || std::fs::File::open("/").expect("there");
        let contents = shape.drives.iter().map(|slot| match slot {
            DriveSlot::ReadOnly => DriveContent::ReadOnly(folder().into()),
            DriveSlot::Disk(slot) => {
                let socket = NbdSocket::new(folder(), "s,ock", "e", *slot);
                DriveContent::Disk(socket.expect("possible"))
            }
        });
        Drives::new(GuestKind::Linux, contents.collect()).expect("open")
    }

    fn disks(shape: &Shape) -> Drives {
        let drives = shape.disks().map(DriveSlot::Disk).collect();
        contents(&Shape { drives, ..shape.clone() })
    }

    fn text(shape: &Shape, begin: Begin<'_>) -> String {
        let drives = match begin {
            Begin::Wait => disks(shape),
            Begin::Kernel { .. } | Begin::Disk => contents(shape),
        };
        let words = command_line(shape, begin, &drives, &[], "host");
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn a_linux_guest_has_its_line() {
        let begin = Begin::Kernel { append: OsStr::new("console=ttyS0 quiet"), initrd: true };
        assert_eq!(
            text(&shape(2, Accel::Tcg, GuestKind::Linux), begin),
            "-nodefaults -no-user-config -display none -vga none \
             -machine pc,mem-merge=off,suppress-vmdesc=on,memory-backend=ram -m 524288K \
             -object memory-backend-file,id=ram,size=524288K,mem-path=/proc/self/fd/6,share=on,align=1G \
             -smp 2 -accel tcg,thread=multi,tb-size=96 \
             -chardev socket,id=qmp,fd=3 -mon chardev=qmp,mode=control \
             -chardev socket,id=serial,fd=4 -serial chardev:serial \
             -chardev socket,id=agent,fd=5 \
             -device virtio-serial-pci,id=ports,bus=pci.0,addr=0x3,max_ports=2,disable-modern=on \
             -device virtserialport,id=agentport,bus=ports.0,nr=1,chardev=agent,name=org.vmfork.agent.0 \
             -blockdev {\"driver\":\"file\",\"filename\":\"/proc/self/fd/14\",\"locking\":\"off\",\
             \"node-name\":\"drive0\",\"read-only\":true} \
             -device virtio-blk-pci,id=disk0,drive=drive0,bus=pci.0,addr=0x4,disable-modern=on \
             -device virtio-balloon-pci,id=balloon,bus=pci.0,addr=0x5,free-page-reporting=on,disable-modern=on \
             -object rng-builtin,id=random \
             -device virtio-rng-pci,id=rng,rng=random,bus=pci.0,addr=0x6,disable-modern=on \
             -device vmgenid,id=vmgenid,guid=auto \
             -no-reboot -action reboot=shutdown,shutdown=poweroff,panic=shutdown \
             -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
             -kernel /proc/self/fd/8 -initrd /proc/self/fd/9 -append console=ttyS0 quiet"
        );
    }

    #[test]
    fn one_that_waits_has_placeholders_and_the_same_devices() {
        for guest in [GuestKind::Linux, GuestKind::Bare] {
            for accel in [Accel::Tcg, Accel::Kvm] {
                let shape = shape(1, accel, guest);
                let file = contents(&shape).iter().next().expect("one").node("drive0", FILE);
                let boots = text(&shape, Begin::Disk);
                assert!(boots.contains(&file.to_string()), "{boots}");
                let placeholder =
                    "driver=null-co,size=512,read-zeroes=on,node-name=drive0,read-only=on";
                let waits = boots.replace(&file.to_string(), placeholder);
                assert_eq!(text(&shape, Begin::Wait), format!("{waits} -incoming defer"));
            }
        }
    }

    #[test]
    fn a_disk_stops_the_vm_on_errors_and_is_connected_while_it_waits() {
        let slot = DiskSlot { size_bytes: 1 << 30, read_only: false, flushes: false };
        let drives = vec![DriveSlot::ReadOnly, DriveSlot::Disk(slot)];
        let shape = Shape::new(512 << 20, 1, Accel::Tcg, GuestKind::Linux, drives);
        let shape = shape.expect("possible");
        let (boots, waits) = (text(&shape, Begin::Disk), text(&shape, Begin::Wait));
        for line in [&boots, &waits] {
            assert!(line.contains(r#""path":"/proc/self/fd/15/s,ock""#), "{line}");
        }
        assert!(waits.contains("node-name=drive0,read-only=on"), "{waits}");
        for line in [boots, waits] {
            let devices: Vec<_> = line.split(" -").filter(|word| word.contains("-blk-")).collect();
            assert_eq!(
                devices,
                [
                    "device virtio-blk-pci,id=disk0,drive=drive0,bus=pci.0,addr=0x4,disable-modern=on",
                    "device virtio-blk-pci,id=disk1,drive=drive1,bus=pci.0,addr=0x11,disable-modern=on,\
                 werror=stop,rerror=stop,physical_block_size=4096,discard=on",
                ]
            );
        }
    }

    #[test]
    fn each_drive_and_network_card_has_a_pci_slot_and_an_fd_of_its_own() {
        let drives = vec![DriveSlot::ReadOnly; DRIVES_MAX.into()];
        let shape = Shape::new(512 << 20, 1, Accel::Tcg, GuestKind::Linux, drives);
        let shape = shape.expect("possible").with_nics(NICS_MAX).expect("possible");
        let line = text(&shape, Begin::Disk);
        let values = |key: &str| {
            let all = line.split([' ', ',']).filter_map(|word| word.strip_prefix(key));
            let mut all: Vec<_> = all.map(str::to_owned).collect();
            let count = all.len();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count, "{key} is there twice: {line}");
            all
        };
        // Beside them: the agent's port, balloon, random numbers.
        assert_eq!(values("addr=").len(), 19);
        // The control socket, console and agent's port; then the taps.
        assert_eq!(values("fd=").len(), 3 + 8);
        assert_eq!(values("\"filename\":").len(), 8);
        assert_eq!(values("mac=").len(), 8);
        assert!(Slot::Nic(NICS_MAX - 1).number() < SLOT_END);
    }

    #[test]
    fn a_machine_without_network_cards_has_no_network() {
        for guest in [GuestKind::Linux, GuestKind::Bare] {
            let line = text(&shape(1, Accel::Kvm, guest), Begin::Wait);
            assert!(!line.contains("net"), "{line}");
        }
    }

    #[test]
    fn persistent_memory_is_shared_and_read_only_and_a_boot_waits_for_it() {
        let shape = shape(1, Accel::Tcg, GuestKind::Linux).with_pmem(Some(6 << 20));
        let shape = shape.expect("possible");
        let (boots, waits) = (text(&shape, Begin::Disk), text(&shape, Begin::Wait));
        for line in [&boots, &waits] {
            for part in [
                "memory-backend=ram,nvdimm=on -m 524288K,slots=1,maxmem=530432K ",
                "id=pmem,size=6144K,mem-path=/proc/self/fd/7,share=on,readonly=on,align=2M ",
                "-device nvdimm,id=nvdimm0,memdev=pmem,unarmed=on ",
            ] {
                assert!(line.contains(part), "{line}");
            }
        }
        assert!(boots.ends_with(" -S") && !waits.contains(" -S"), "{boots} {waits}");
    }

    #[test]
    fn translated_code_is_bounded_however_many_cpus() {
        let line = text(&shape(200, Accel::Tcg, GuestKind::Linux), Begin::Wait);
        assert!(line.contains("tb-size=512"), "{line}");
    }
}
