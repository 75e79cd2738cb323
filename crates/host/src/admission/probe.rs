//! The figures that admission goes by.

use std::fs;

/// What the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    pub total_bytes: u64,
    /// What the kernel could still give out, caches that it can drop included.
    pub available_bytes: u64,
}

/// What of the host's cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Where the figures come from: the kernel, or a test.
pub trait Probe: Send + Sync {
    fn host(&self) -> HostMemory;
    /// Memory that only this process holds, 0 if it is gone.
    fn private_bytes(&self, pid: u32) -> u64;
}

/// The figures of `/proc`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcProbe;

impl Probe for ProcProbe {
    fn host(&self) -> HostMemory {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        HostMemory {
            total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
        }
    }

    fn private_bytes(&self, pid: u32) -> u64 {
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        statm_private_pages(&statm) * rustix::param::page_size() as u64
    }
}

/// 0 if there is no such line.
fn meminfo_bytes(meminfo: &str, key: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// `size resident shared …`: what is resident and neither of a file nor shared memory.
fn statm_private_pages(statm: &str) -> u64 {
    let mut fields = statm.split_ascii_whitespace().skip(1).map(|field| field.parse::<u64>());
    match (fields.next(), fields.next()) {
        (Some(Ok(resident)), Some(Ok(shared))) => resident.saturating_sub(shared),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_figures_are_read() {
        let meminfo = "MemTotal:       24105 kB\nMemAvailable:      77 kB\nMemAvailableX: 1 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable"), 77 * 1024);
        assert_eq!(meminfo_bytes(meminfo, "Nope"), 0);
        assert_eq!(statm_private_pages("1000 300 120 1 0 5 0"), 180);
        assert_eq!(statm_private_pages(""), 0);
        let host = ProcProbe.host();
        assert!(host.available_bytes > 0 && host.available_bytes <= host.total_bytes);
        assert!(ProcProbe.private_bytes(std::process::id()) > 0);
        assert_eq!(ProcProbe.private_bytes(u32::MAX), 0);
    }
}
