//! Writes `newc` archives, the form in which the kernel takes an initrd.
//!
//! ```text
//!   "070701" | 13 fields of 8 hex digits | name NUL | pad to 4 | data | pad to 4
//!   ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
//! ```
//!
//! Everything belongs to root and has one time stamp, so equal contents give equal bytes.

use std::io::{self, Write};

const MAGIC: &[u8] = b"070701";
const TRAILER: &str = "TRAILER!!!";
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFCHR: u32 = 0o020_000;
/// The length of header and name together, and of the data, are multiples of this.
const ALIGN: u64 = 4;

/// An archive being written. Add folders before what is in them: the kernel makes none by itself.
pub(crate) struct Archive<W: Write> {
    out: W,
    at: u64,
    inode: u32,
    mtime_s: u32,
}

struct Entry {
    mode: u32,
    links: u32,
    device: (u32, u32),
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W, mtime_s: u32) -> Self {
        Self { out, at: 0, inode: 0, mtime_s }
    }

    pub(crate) fn folder(&mut self, name: &str, permissions: u32) -> io::Result<()> {
        let entry = Entry { mode: S_IFDIR | permissions, links: 2, device: (0, 0) };
        self.entry(name, &entry, &[])
    }

    pub(crate) fn file(&mut self, name: &str, permissions: u32, data: &[u8]) -> io::Result<()> {
        let entry = Entry { mode: S_IFREG | permissions, links: 1, device: (0, 0) };
        self.entry(name, &entry, data)
    }

    pub(crate) fn char_device(
        &mut self,
        name: &str,
        permissions: u32,
        device: (u32, u32),
    ) -> io::Result<()> {
        let entry = Entry { mode: S_IFCHR | permissions, links: 1, device };
        self.entry(name, &entry, &[])
    }

    /// Write the end mark and hand the writer back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.mtime_s = 0;
        let inode = 0;
        self.write(TRAILER, &Entry { mode: 0, links: 1, device: (0, 0) }, inode, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, entry: &Entry, data: &[u8]) -> io::Result<()> {
        if name.is_empty() || name.starts_with('/') || name == TRAILER || name.contains('\0') {
            let why = format!("`{}` cannot be a name in an archive", name.escape_debug());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        self.inode += 1;
        self.write(name, entry, self.inode, data)
    }

    fn write(&mut self, name: &str, entry: &Entry, inode: u32, data: &[u8]) -> io::Result<()> {
        let too_large = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let size = u32::try_from(data.len()).map_err(too_large)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_large)?;
        let (major, minor) = entry.device;
        self.put(MAGIC)?;
        for field in [
            inode,
            entry.mode,
            0,
            0,
            entry.links,
            self.mtime_s,
            size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ] {
            self.put(format!("{field:08x}").as_bytes())?;
        }
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad()?;
        self.put(data)?;
        self.pad()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self) -> io::Result<()> {
        while !self.at.is_multiple_of(ALIGN) {
            self.put(&[0])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new(), 7);
        archive.folder("dev", 0o755).unwrap();
        archive.char_device("dev/console", 0o600, (5, 1)).unwrap();
        archive.file("init", 0o755, b"hello").unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn the_bytes_are_those_of_the_format() {
        let mut archive = Archive::new(Vec::new(), 7);
        archive.file("a", 0o644, b"xyz").unwrap();
        let bytes = archive.finish().unwrap();
        let mut want = b"070701\
            00000001000081a400000000000000000000000100000007\
            0000000300000000000000000000000000000000\
            0000000200000000a\0"
            .to_vec();
        want.extend(b"xyz\0");
        want.extend(
            b"070701\
            000000000000000000000000000000000000000100000000\
            0000000000000000000000000000000000000000\
            0000000b00000000TRAILER!!!\0\0\0\0",
        );
        assert_eq!(String::from_utf8(bytes).unwrap(), String::from_utf8(want).unwrap());
    }

    #[test]
    fn equal_contents_give_equal_bytes() {
        assert_eq!(sample(), sample());
        assert_eq!(sample().len() % 4, 0);
    }

    #[test]
    fn names_that_the_kernel_would_misread_are_refused() {
        for name in ["", "/init", "TRAILER!!!", "a\0b"] {
            assert!(Archive::new(Vec::new(), 0).file(name, 0o644, b"").is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_cpio_program_reads_it_back() {
        if !crate::process::on_path("cpio") {
            assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "cpio is not installed");
            eprintln!("SKIPPED: cpio is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.cpio");
        std::fs::write(&path, sample()).unwrap();
        let mut command = std::process::Command::new("cpio");
        command.args(["-itv", "--quiet", "--numeric-uid-gid", "-F"]).arg(&path);
        let cancel = crate::process::Cancel::default();
        let text =
            crate::process::output(command, &cancel, std::time::Duration::from_secs(20)).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with(" dev"), "{text}");
        assert!(lines[1].starts_with("crw-------") && lines[1].contains("5,   1"), "{text}");
        assert!(lines[2].starts_with("-rwxr-xr-x") && lines[2].ends_with(" init"), "{text}");
    }
}
