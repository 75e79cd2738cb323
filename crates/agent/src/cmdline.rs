//! The kernel's command line: words that begin with `vmfork.` are for the agent.

/// What the command line asks of the agent.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Cmdline {
    /// `vmfork.init=PATH`: the program that becomes PID 1 of the root; the agent serves beside it.
    pub(crate) init: Option<String>,
    /// `vmfork.root=PATH`: the root file system's device; default `/dev/vda`.
    pub(crate) root: Option<String>,
    /// `vmfork.rootfstype=NAME`: default `ext4`.
    pub(crate) root_type: Option<String>,
    /// `vmfork.upper=PATH`: the device of an ext4 file system that takes writes to the root.
    /// Default: none, a tmpfs takes them.
    pub(crate) upper: Option<String>,
    /// `vmfork.rw=PATH`: the root file system's device, which takes the writes itself. It goes
    /// before `vmfork.root` and `vmfork.upper`.
    pub(crate) writable: Option<String>,
    /// `vmfork.pmem=PATH`: the root file system's device, if it is there and can do without the
    /// page cache. Else `vmfork.root` counts.
    pub(crate) pmem: Option<String>,
    /// `vmfork.reporting_order=N`: smallest free block, 2^N pages, that the guest reports to the
    /// host.
    pub(crate) reporting_order: Option<u32>,
}

impl Cmdline {
    /// Of the running kernel. Without `/proc` it is empty.
    pub(crate) fn read() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    pub(crate) fn parse(text: &str) -> Self {
        let mut out = Self::default();
        for word in text.split_ascii_whitespace() {
            let Some((key, value)) = word.split_once('=') else { continue };
            let path = || value.starts_with('/').then(|| value.to_owned());
            match key {
                "vmfork.init" => out.init = path(),
                "vmfork.root" => out.root = path(),
                "vmfork.rootfstype" => out.root_type = Some(value.to_owned()),
                "vmfork.upper" => out.upper = path(),
                "vmfork.rw" => out.writable = path(),
                "vmfork.pmem" => out.pmem = path(),
                "vmfork.reporting_order" => out.reporting_order = value.parse().ok(),
                _ => {}
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_words_count_and_bad_values_are_left_out() {
        let line = Cmdline::parse(
            "console=ttyS0 vmfork.init=/sbin/init quiet vmfork.reporting_order=x vmfork.root=vda",
        );
        assert_eq!(line, Cmdline { init: Some("/sbin/init".into()), ..Cmdline::default() });
        let line = Cmdline::parse("vmfork.pmem=/dev/pmem0 vmfork.pmem0=/x");
        assert_eq!(line, Cmdline { pmem: Some("/dev/pmem0".into()), ..Cmdline::default() });
        let line = Cmdline::parse("root=/dev/vda ro vmfork.root=/dev/vdc rw vmfork.rw=/dev/vda");
        let (root, writable) = (Some("/dev/vdc".into()), Some("/dev/vda".into()));
        assert_eq!(line, Cmdline { root, writable, ..Cmdline::default() });
    }
}
