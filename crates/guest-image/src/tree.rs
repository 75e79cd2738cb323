//! Works on a root file system that lies unpacked in a folder: add to it, tidy it, measure it.
//!
//! The tree comes from packages, so its symbolic links may point anywhere. Every path in it is
//! resolved by the kernel as if the tree were `/` ([`ResolveFlags::IN_ROOT`]).

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use rustix::io::Errno;

/// Deeper than this no tree of packages goes; a loop would.
const DEPTH_MAX: usize = 128;

/// A tree being put together.
pub(crate) struct Tree {
    root: PathBuf,
    fd: OwnedFd,
}

/// What [`Tree::measure`] found.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) inodes: u64,
    /// Contents in whole 4 KiB blocks, folders included.
    pub(crate) bytes: u64,
}

impl Tree {
    pub(crate) fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(root, flags, Mode::empty())?;
        Ok(Self { root: root.into(), fd })
    }

    /// Write a file with contents of our own, in place of any other of that name.
    pub(crate) fn write(&self, guest: &Path, data: &[u8], mode: u32) -> io::Result<()> {
        self.create(guest, mode)?.write_all(data)
    }

    /// Copy a host's file, link or folder with all in it. Special files are refused.
    pub(crate) fn copy(&self, host: &Path, guest: &Path, mode: Option<u32>) -> io::Result<()> {
        self.copy_at(host, guest, mode, 0)
    }

    fn copy_at(
        &self,
        host: &Path,
        guest: &Path,
        mode: Option<u32>,
        depth: usize,
    ) -> io::Result<()> {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", host.display()));
        let found = fs::symlink_metadata(host).map_err(named)?;
        if depth > DEPTH_MAX {
            return Err(named(io::Error::other("folders too deep")));
        }
        if found.is_dir() {
            self.folder(guest)?;
            for entry in sorted(host).map_err(named)? {
                let name = entry.file_name().unwrap_or_default();
                self.copy_at(&entry, &guest.join(name), mode, depth + 1)?;
            }
            Ok(())
        } else if found.is_file() {
            let mut from = File::open(host).map_err(named)?;
            let mut to = self.create(guest, mode.unwrap_or(found.mode() & 0o7777))?;
            io::copy(&mut from, &mut to).map_err(named).map(drop)
        } else if found.is_symlink() {
            let target = fs::read_link(host).map_err(named)?;
            let (parent, name) = self.parent(guest)?;
            remove_at(&parent, &name)?;
            Ok(rustix::fs::symlinkat(&target, &parent, &name)?)
        } else {
            Err(named(io::Error::other("neither a file, a link nor a folder")))
        }
    }

    /// Give a file to another owner.
    pub(crate) fn chown(&self, guest: &Path, uid: u32, gid: u32) -> io::Result<()> {
        let fd = self.in_root(guest, OFlags::RDONLY)?;
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        Ok(rustix::fs::fchown(fd, Some(uid), Some(gid))?)
    }

    /// Remove a file if it is there.
    pub(crate) fn remove(&self, guest: &Path) -> io::Result<()> {
        match self.in_root(guest.parent().unwrap_or(Path::new("/")), OFlags::DIRECTORY) {
            Ok(parent) => remove_at(&parent, Path::new(guest.file_name().unwrap_or_default())),
            Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// The contents of a file, `None` where there is none.
    pub(crate) fn read(&self, guest: &Path) -> io::Result<Option<String>> {
        match self.in_root(guest, OFlags::RDONLY) {
            Ok(fd) => {
                let mut text = String::new();
                File::from(fd).read_to_string(&mut text)?;
                Ok(Some(text))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Names in a folder, sorted; none where there is no folder.
    pub(crate) fn names(&self, guest: &Path) -> io::Result<Vec<String>> {
        let fd = match self.in_root(guest, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        };
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(fd)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Set every time stamp after `epoch_s` back to it, and count what there is.
    pub(crate) fn measure(&self, epoch_s: i64) -> io::Result<Size> {
        let mut size = Size::default();
        walk(&self.root, &mut |path, found| {
            let data = if found.is_dir() { found.size().max(4096) } else { found.size() };
            size.inodes += 1;
            size.bytes += data.next_multiple_of(4096);
            if found.mtime() > epoch_s {
                let stamp = Timespec { tv_sec: epoch_s, tv_nsec: 0 };
                let both = Timestamps { last_access: stamp, last_modification: stamp };
                rustix::fs::utimensat(rustix::fs::CWD, path, &both, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Ok(())
        })?;
        Ok(size)
    }

    /// Hash over the tree, see [`hash_of`].
    pub(crate) fn hash(&self) -> io::Result<String> {
        hash_of(&self.root)
    }

    fn create(&self, guest: &Path, mode: u32) -> io::Result<File> {
        let (parent, name) = self.parent(guest)?;
        remove_at(&parent, &name)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&parent, &name, flags, Mode::from(0o600))?);
        file.set_permissions(fs::Permissions::from_mode(mode))?; // past the umask
        Ok(file)
    }

    fn parent(&self, guest: &Path) -> io::Result<(OwnedFd, PathBuf)> {
        let name = guest.file_name().ok_or_else(|| io::Error::other("no file name"))?;
        let parent = self.folder(guest.parent().unwrap_or(Path::new("/")))?;
        Ok((parent, name.into()))
    }

    /// Open a folder of the tree, making what is missing of it.
    fn folder(&self, guest: &Path) -> io::Result<OwnedFd> {
        let mut at = PathBuf::from("/");
        let mut fd = self.in_root(&at, OFlags::DIRECTORY)?;
        for part in guest.components() {
            let Component::Normal(name) = part else { continue };
            at.push(name);
            fd = match self.in_root(&at, OFlags::DIRECTORY) {
                Err(Errno::NOENT) => {
                    rustix::fs::mkdirat(&fd, name, Mode::from(0o755))?;
                    let made = self.in_root(&at, OFlags::DIRECTORY)?;
                    rustix::fs::fchmod(&made, Mode::from(0o755))?;
                    made
                }
                other => other?,
            };
        }
        Ok(fd)
    }

    fn in_root(&self, guest: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        // An absolute path means the tree's root under IN_ROOT.
        let flags = flags | OFlags::CLOEXEC;
        rustix::fs::openat2(&self.fd, guest, flags, Mode::empty(), ResolveFlags::IN_ROOT)
    }
}

fn remove_at(parent: &OwnedFd, name: &Path) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn sorted(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries =
        fs::read_dir(folder)?.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?;
    entries.sort();
    Ok(entries)
}

/// Visit everything below `root` and `root` itself, parents first, siblings by name, links not
/// followed.
fn walk(
    root: &Path,
    visit: &mut dyn FnMut(&Path, &fs::Metadata) -> io::Result<()>,
) -> io::Result<()> {
    let mut waiting = vec![(root.to_owned(), 0_usize)];
    while let Some((path, depth)) = waiting.pop() {
        let found = fs::symlink_metadata(&path)?;
        visit(&path, &found)?;
        if found.is_dir() {
            if depth > DEPTH_MAX {
                return Err(io::Error::other(format!("{}: folders too deep", path.display())));
            }
            waiting.extend(sorted(&path)?.into_iter().rev().map(|p| (p, depth + 1)));
        }
    }
    Ok(())
}

/// Hash over names, kinds, modes, owners, link targets and contents below `root`, not over times
/// and extended attributes. A lone file is its own tree.
pub(crate) fn hash_of(root: &Path) -> io::Result<String> {
    let mut hash = blake3::Hasher::new();
    let mut buffer = vec![0_u8; 1 << 16];
    walk(root, &mut |path, found| {
        let name = path.strip_prefix(root).unwrap_or(path).as_os_str().as_bytes();
        let link = if found.is_symlink() { fs::read_link(path)? } else { PathBuf::new() };
        let link = link.as_os_str().as_bytes();
        for number in [
            name.len() as u64,
            link.len() as u64,
            u64::from(found.mode()),
            u64::from(found.uid()),
            u64::from(found.gid()),
            if found.is_file() { found.size() } else { 0 },
            found.rdev(),
        ] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(name).update(link);
        if found.is_file() {
            let mut file = File::open(path)?;
            loop {
                match file.read(&mut buffer)? {
                    0 => break,
                    n => hash.update(&buffer[..n]),
                };
            }
        }
        Ok(())
    })?;
    Ok(hash.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> (tempfile::TempDir, Tree) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("root/usr/lib")).unwrap();
        let tree = Tree::open(&dir.path().join("root")).unwrap();
        (dir, tree)
    }

    #[test]
    fn links_in_the_tree_cannot_lead_out_of_it() {
        let (dir, tree) = tree();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, dir.path().join("root/etc")).unwrap();
        std::os::unix::fs::symlink("/usr/lib", dir.path().join("root/lib")).unwrap();
        std::os::unix::fs::symlink("../../..", dir.path().join("root/up")).unwrap();
        assert!(tree.write(Path::new("/etc/x"), b"1", 0o644).is_err(), "dangles in the tree");
        tree.write(Path::new("/up/y"), b"2", 0o644).unwrap();
        tree.write(Path::new("/lib/z"), b"3", 0o755).unwrap();
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert_eq!(fs::read(dir.path().join("root/y")).unwrap(), b"2");
        assert_eq!(fs::read(dir.path().join("root/usr/lib/z")).unwrap(), b"3");
    }

    #[test]
    fn a_copy_replaces_a_link_instead_of_following_it() {
        let (dir, tree) = tree();
        let victim = dir.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join("root/file")).unwrap();
        tree.write(Path::new("/file"), b"new", 0o640).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
        let found = fs::symlink_metadata(dir.path().join("root/file")).unwrap();
        assert!(found.is_file());
        assert_eq!(found.mode() & 0o777, 0o640);
    }

    #[test]
    fn folders_are_copied_whole() {
        let (dir, tree) = tree();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("sub")).unwrap();
        fs::write(from.join("sub/a"), "a").unwrap();
        std::os::unix::fs::symlink("sub/a", from.join("b")).unwrap();
        tree.copy(&from, Path::new("/opt/x"), None).unwrap();
        assert_eq!(tree.read(Path::new("/opt/x/b")).unwrap().as_deref(), Some("a"));
        assert_eq!(tree.names(Path::new("/opt/x")).unwrap(), ["b", "sub"]);
        assert_eq!(tree.read(Path::new("/opt/none")).unwrap(), None);
        assert!(tree.copy(Path::new("/dev/null"), Path::new("/dev/null"), None).is_err());
    }

    #[test]
    fn the_hash_sees_names_modes_and_contents_but_not_times() {
        let (dir, tree) = tree();
        tree.write(Path::new("/a"), b"1", 0o644).unwrap();
        let first = tree.hash().unwrap();
        assert_eq!(tree.measure(1_000_000).unwrap().inodes, 4);
        assert_eq!(fs::metadata(dir.path().join("root/a")).unwrap().mtime(), 1_000_000);
        assert_eq!(tree.hash().unwrap(), first);
        tree.write(Path::new("/a"), b"2", 0o644).unwrap();
        let second = tree.hash().unwrap();
        tree.write(Path::new("/a"), b"2", 0o600).unwrap();
        assert!(first != second && tree.hash().unwrap() != second);
        tree.remove(Path::new("/a")).unwrap();
        tree.remove(Path::new("/a")).unwrap();
        tree.remove(Path::new("/no/such")).unwrap();
    }
}
