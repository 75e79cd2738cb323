//! `vmfork inspect`: one VM, with where its memory is.

use vmfork_api::disk::RootDevice;
use vmfork_api::{BytesBetweenHosts, CacheInfo, Disk, DiskActivity, MemoryInfo, VmDetail};

use super::run::accel_word;
use crate::client::Query;
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, render_table, state_word};
use crate::start::reach;

pub(super) const PAGE_BYTES: u64 = 4096;

fn qemu(vm: &VmDetail) -> String {
    match vm.vm.pid {
        Some(pid) => format!("{}, pid {pid}", vm.qemu_version),
        None => vm.qemu_version.clone(),
    }
}

fn root_device(vm: &VmDetail) -> String {
    let Some(device) = vm.root_device else { return "-".to_owned() };
    let word = match device {
        RootDevice::Pmem => "pmem",
        RootDevice::Block => "block",
    };
    match vm.root_device_reason.as_str() {
        "" => word.to_owned(),
        reason => format!("{word} ({reason})"),
    }
}

pub(super) async fn run(global: &Global, vm: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let detail: VmDetail = client.get(Query::new(format!("/v1/vms/{vm}"))).await?;
    if global.printer.json {
        global.printer.document(&detail)?;
    } else {
        global.printer.data(&render(&detail))?;
    }
    Ok(Exit::Done)
}

fn render(detail: &VmDetail) -> String {
    let mut text = section("", &identity(detail));
    text.push_str("\nmemory\n");
    let mut fields = memory(&detail.memory);
    if detail.vm.snapshot.is_some() {
        fields.extend(store(&detail.memory));
    }
    fields.extend(between_hosts(&detail.memory.hosts));
    text.push_str(&section("  ", &fields));
    if !detail.memory.caches.is_empty() {
        text.push_str("\ncaches\n");
        text.push_str(&caches(&detail.memory.caches));
    }
    text
}

/// What the VM is, without its memory.
fn identity(detail: &VmDetail) -> Vec<(&'static str, String)> {
    let vm = &detail.vm;
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let mut state = state_word(vm.state).to_owned();
    if let Some(reason) = &vm.reason {
        state = format!("{state}: {}", format::printable(reason));
    }
    let clones = match detail.clone_names.as_slice() {
        [] => "-".to_owned(),
        names => names.join(" "),
    };
    let ready = vm.ready_ms.map_or_else(|| "-".to_owned(), format::millis);
    let mut fields = vec![
        ("name", vm.name.clone()),
        ("id", vm.id.clone()),
        ("state", state),
        ("image", vm.image.clone()),
        ("parent", or_none(&vm.parent)),
        ("vmid", vm.vmid.to_string()),
        ("clones", clones),
        ("user", detail.user.clone()),
        ("age", format::age_since(vm.created_unix_ms)),
        ("ready after", ready),
        (
            "machine",
            format!(
                "{}, {}",
                format::plural(u64::from(vm.cpus), "vCPU"),
                format::size(vm.memory_mib.saturating_mul(1 << 20))
            ),
        ),
        ("accelerator", format!("{} ({})", accel_word(vm.accel), detail.accel_reason)),
        ("root device", root_device(detail)),
        ("qemu", qemu(detail)),
        (
            "last fork",
            detail.last_fork.as_ref().map_or_else(
                || "-".to_owned(),
                |fork| {
                    format!(
                        "{} of {} clones in {}, paused {}, {} ago",
                        fork.granted,
                        fork.requested,
                        format::millis(fork.total_ms),
                        format::millis(fork.pause_ms),
                        format::age_since(fork.began_unix_ms)
                    )
                },
            ),
        ),
        ("agent", or_none(&detail.agent_version)),
        ("guest kernel", or_none(&detail.guest_kernel)),
    ];
    // Between its parent and what makes it differ from it; most VMs have none.
    if let Some(snapshot) = &vm.snapshot {
        let at = fields.iter().position(|(name, _)| *name == "vmid").unwrap_or(fields.len());
        fields.insert(at, ("snapshot", snapshot.clone()));
    }
    if !vm.labels.is_empty() {
        let at = fields.iter().position(|(name, _)| *name == "clones").unwrap_or(fields.len());
        fields.insert(at, ("labels", vm.labels.to_string()));
    }
    if !vm.state.has_ended() {
        let at = fields.iter().position(|(name, _)| *name == "ready after").unwrap_or(fields.len());
        fields.insert(at, ("ends", super::ttl::line(detail.ttl.as_ref())));
    }
    let at = fields.iter().position(|(name, _)| *name == "accelerator").unwrap_or(fields.len());
    let disks = detail.disks.iter().map(|disk| ("disk", disk_line(disk)));
    fields.splice(at..at, disks);
    if let Some(job) = &detail.job {
        let at = fields.iter().position(|(name, _)| *name == "age").unwrap_or(fields.len());
        fields.insert(at, ("job", job.clone()));
    }
    for (_, value) in &mut fields {
        *value = format::printable(value);
    }
    fields
}

/// `data at /dev/vdb, 10 GiB, 1.5 MiB written, volume db`.
fn disk_line(disk: &Disk) -> String {
    let Disk { name, size_bytes, written_bytes, device, volume, read_only, empty, .. } = disk;
    if *empty {
        return format!("{name} at {device}, empty");
    }
    let written = match read_only {
        true => "read-only".to_owned(),
        false => format!("{} written", format::size(*written_bytes)),
    };
    let volume = volume.as_ref().map(|volume| format!(", volume {volume}")).unwrap_or_default();
    let size = format::size(*size_bytes);
    format!("{name} at {device}, {size}, {written}{volume}{}", asked(disk))
}

/// `; 812 reads (37 MiB), 5,120 writes (20 MiB), 3 failed; stalled for 12 s`.
fn asked(disk: &Disk) -> String {
    let DiskActivity { reads, read_bytes, writes, written_bytes, errors, .. } = disk.activity;
    let mut text = String::new();
    if reads + writes > 0 {
        let (read, written) = (format::size(read_bytes), format::size(written_bytes));
        let (reads, writes) = (format::plural(reads, "read"), format::plural(writes, "write"));
        text += &format!("; {reads} ({read}), {writes} ({written})");
    }
    if errors > 0 {
        text += &format!(", {} failed", format::count(errors));
    }
    if let Some(stalled_ms) = disk.stalled_ms {
        text += &format!("; stalled for {} s", stalled_ms / 1000);
    }
    text
}

/// Whose memory is shared with whom.
fn caches(caches: &[CacheInfo]) -> String {
    let row = |cache: &CacheInfo| {
        vec![
            Field::Text(format!("  {}", format::printable(&cache.image))),
            Field::Figure(format::size(cache.resident_bytes)),
            Field::Figure(cache.pages.map_or_else(|| "-".to_owned(), format::count)),
            Field::Text(format::printable(&cache.vms.join(" "))),
        ]
    };
    render_table(
        &["  IMAGE", "HELD", "PAGES", "NEEDED BY"],
        caches.iter().map(row).collect(),
        false,
    )
}

/// A count of pages, and what they come to.
pub(super) fn pages(n: u64) -> String {
    format!("{} ({})", format::plural(n, "page"), format::size(n.saturating_mul(PAGE_BYTES)))
}

fn memory(memory: &MemoryInfo) -> Vec<(&'static str, String)> {
    let faults = &memory.faults;
    let source = &memory.source;
    vec![
        ("guest", pages(memory.pages)),
        ("private", pages(memory.private_pages)),
        ("zero", pages(memory.zero_pages)),
        ("in the cache", pages(memory.cache_present_pages)),
        ("not yet drained", pages(memory.undrained_pages)),
        (
            "image",
            match &memory.image {
                Some(image) => {
                    format!("{image}, {}", format::plural(u64::from(memory.image_views), "view"))
                }
                None => "- (it booted)".to_owned(),
            },
        ),
        (
            "fetched",
            format!(
                "{}, {} of it on demand",
                format::size(memory.fetched_bytes),
                format::size(memory.demand_bytes)
            ),
        ),
        (
            "faults",
            format!(
                "{} zero, {} fetch, {} present, {} mapped",
                format::count(faults.zero),
                format::count(faults.fetch),
                format::count(faults.present),
                format::count(faults.mapped)
            ),
        ),
        (
            "bytes from",
            format!(
                "{} frozen, {} image, {} peer, {} chunk",
                format::size(source.frozen),
                format::size(source.image),
                format::size(source.peer),
                format::size(source.chunk)
            ),
        ),
    ]
}

/// The lines about pages that other hosts sent or received.
fn between_hosts(bytes: &BytesBetweenHosts) -> Option<(&'static str, String)> {
    let BytesBetweenHosts { demand, ahead, given } = *bytes;
    (demand + ahead + given > 0).then(|| {
        let text = format!(
            "{} came on demand, {} ahead, {} given",
            format::size(demand),
            format::size(ahead),
            format::size(given)
        );
        ("other hosts", text)
    })
}

/// The lines about pages that come from a store.
fn store(memory: &MemoryInfo) -> [(&'static str, String); 2] {
    let faults = &memory.store_faults;
    [
        ("fetched ahead", format::size(memory.prefetched_bytes)),
        (
            "store faults",
            format!(
                "{} predicted, {} remote",
                format::count(faults.predicted),
                format::count(faults.remote)
            ),
        ),
    ]
}

pub(super) fn section(indent: &str, fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    fields.iter().map(|(name, value)| format!("{indent}{name:width$}  {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_told_with_what_was_asked_of_it() {
        let mut disk = Disk {
            name: "data".to_owned(),
            size_bytes: 10 << 30,
            written_bytes: 3 << 20,
            device: "/dev/vdb".to_owned(),
            volume: Some("db".to_owned()),
            read_only: false,
            empty: false,
            activity: DiskActivity::default(),
            stalled_ms: None,
        };
        let quiet = "data at /dev/vdb, 10 GiB, 3 MiB written, volume db";
        assert_eq!(disk_line(&disk), quiet);
        let (read_bytes, written_bytes) = (5 << 20, 4096);
        disk.activity =
            DiskActivity { reads: 1200, read_bytes, writes: 1, written_bytes, ..disk.activity };
        let busy = format!("{quiet}; 1,200 reads (5 MiB), 1 write (4 KiB)");
        assert_eq!(disk_line(&disk), busy);
        disk.activity.errors = 3;
        disk.stalled_ms = Some(12_700);
        assert_eq!(disk_line(&disk), format!("{busy}, 3 failed; stalled for 12 s"));
    }
}
