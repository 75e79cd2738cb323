//! Where a host keeps what makes it a member.
//!
//! ```text
//!   cluster/               0700
//!   ├── authority.pem      its certificate, the same on all hosts
//!   ├── authority-key.pem  0600
//!   ├── host.pem           this host's certificate
//!   ├── host-key.pem       0600
//!   ├── tokens.json        0600: hashes of what lets others in (see `token`)
//!   └── members.json       0600: the book (see `membership`), written last: it makes a member
//! ```
//!
//! Promises: a file appears whole, and outlasts a power cut once its writer has returned; keys that
//! others could have read are not used. Left to others: that no two daemons use one folder.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::join::Cluster;
use crate::keys::{Authority, Identity, KeyError, check_certified};
use crate::membership::{HOSTS_MAX, LoadError, Membership};
use crate::token::{Tokens, TokensError};

const AUTHORITY: &str = "authority.pem";
const AUTHORITY_KEY: &str = "authority-key.pem";
const HOST: &str = "host.pem";
const HOST_KEY: &str = "host-key.pem";
const TOKENS: &str = "tokens.json";
const MEMBERS: &str = "members.json";
/// Keys first, so that none stays behind if the rest can't be removed.
const ALL: [&str; 6] = [MEMBERS, AUTHORITY_KEY, HOST_KEY, TOKENS, AUTHORITY, HOST];

/// An entry has at most 700 bytes; tokens are fewer, with a certificate each.
const FILE_BYTES_MAX: u64 = HOSTS_MAX as u64 * 1024;

/// The folder of a host that is a member.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

/// What a [`Folder`] holds.
#[derive(Debug)]
pub struct Opened {
    pub folder: Folder,
    pub cluster: Cluster,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("{doing} {path}")]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} holds the keys of a cluster already")]
    Exists { path: PathBuf },
    #[error(
        "{path} can be read or written by others (its mode is {mode:04o}), so its keys may be known"
    )]
    Open { path: PathBuf, mode: u32 },
    #[error("{path} belongs to user {owner}, not to the one that vmforkd runs as, {user}")]
    NotOurs { path: PathBuf, owner: u32, user: u32 },
    #[error("{path} has {bytes} bytes; it may have {FILE_BYTES_MAX}")]
    TooLong { path: PathBuf, bytes: u64 },
    #[error("{path} is no text")]
    NoText { path: PathBuf },
    #[error("{path} is damaged")]
    Members {
        path: PathBuf,
        #[source]
        source: LoadError,
    },
    #[error("{path} is damaged")]
    Tokens {
        path: PathBuf,
        #[source]
        source: TokensError,
    },
    #[error("the keys in {path} can't be used")]
    Keys {
        path: PathBuf,
        #[source]
        source: KeyError,
    },
    #[error("{path} is damaged: it names another certificate of this host than the one beside it")]
    OtherCertificate { path: PathBuf },
}

impl FolderError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Exists { .. } => {
                Some("leave that cluster first, with `vmfork cluster leave`".to_owned())
            }
            Self::Open { path, .. } => Some(format!(
                "if no other user has seen them, `chmod go= {path}`; if in doubt, leave the cluster and join again",
                path = path.display()
            )),
            Self::NotOurs { path, user, .. } => Some(format!(
                "`chown -R {user} {path}`, or start vmforkd as the user that made it",
                path = path.display()
            )),
            Self::Members { .. }
            | Self::Tokens { .. }
            | Self::Keys { .. }
            | Self::OtherCertificate { .. }
            | Self::TooLong { .. }
            | Self::NoText { .. } => Some(
                "restore the file, or remove the folder, have another member remove this host, and join again"
                    .to_owned(),
            ),
            Self::Io { .. } => None,
        }
    }
}

impl Folder {
    /// Whether there are keys of a cluster in `path`.
    pub fn is_used(path: &Path) -> bool {
        path.join(MEMBERS).symlink_metadata().is_ok()
    }

    /// Puts a new membership into `path`, which is made if it isn't there: [`Cluster::init`]'s, or
    /// what [`crate::Newcomer::finish`] gave.
    ///
    /// # Errors
    /// There is one already, others can look into the folder, or it can't be written. Then the
    /// folder holds no membership.
    pub fn create(path: impl Into<PathBuf>, cluster: &Cluster) -> Result<Self, FolderError> {
        let it = Self { path: path.into() };
        if Self::is_used(&it.path) {
            return Err(FolderError::Exists { path: it.path });
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&it.path)
            .map_err(it.error("make", None))?;
        it.check_folder()?;
        let Cluster { authority, identity, members } = cluster;
        it.write(AUTHORITY, authority.certificate_pem().as_bytes())?;
        it.write(AUTHORITY_KEY, authority.key_pem().as_bytes())?;
        it.write(HOST, identity.certificate_pem().as_bytes())?;
        it.write(HOST_KEY, identity.key_pem().as_bytes())?;
        it.save_tokens(&Tokens::default())?;
        it.save_members(members)?;
        Ok(it)
    }

    /// Reads what is in `path`; `None` if there is no membership.
    ///
    /// # Errors
    /// Others can read it, it is damaged (and where), or can't be read.
    pub fn open(path: impl Into<PathBuf>) -> Result<Option<Opened>, FolderError> {
        let it = Self { path: path.into() };
        if !Self::is_used(&it.path) {
            return Ok(None);
        }
        it.check_folder()?;
        let damaged = |path| move |source| FolderError::Members { path, source };
        let members = Membership::from_json(it.read(MEMBERS)?.as_bytes())
            .map_err(damaged(it.path.join(MEMBERS)))?;
        let tokens = Tokens::from_json(it.read(TOKENS)?.as_bytes())
            .map_err(|source| FolderError::Tokens { path: it.path.join(TOKENS), source })?;
        let keys = |source| FolderError::Keys { path: it.path.clone(), source };
        let authority =
            Authority::from_pem(&it.read(AUTHORITY)?, &it.read(AUTHORITY_KEY)?).map_err(keys)?;
        let identity =
            Identity::from_pem(members.own(), &it.read(HOST)?, it.read(HOST_KEY)?).map_err(keys)?;
        check_certified(&identity, &authority).map_err(keys)?;
        if members.own_entry().fingerprint != identity.fingerprint() {
            return Err(FolderError::OtherCertificate { path: it.path.join(MEMBERS) });
        }
        let cluster = Cluster { authority, identity, members };
        Ok(Some(Opened { folder: it, cluster, tokens }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the book down.
    ///
    /// # Errors
    /// It can't be written; what was there stays.
    pub fn save_members(&self, members: &Membership) -> Result<(), FolderError> {
        self.write(MEMBERS, &members.to_json())
    }

    /// Writes the tokens down.
    ///
    /// # Errors
    /// As [`Folder::save_members`].
    pub fn save_tokens(&self, tokens: &Tokens) -> Result<(), FolderError> {
        self.write(TOKENS, &tokens.to_json())
    }

    /// Removes the membership in `path`, also one that can't be opened, as [`Folder::remove`] does.
    ///
    /// # Errors
    /// Something can't be removed.
    pub fn forget(path: impl Into<PathBuf>) -> Result<(), FolderError> {
        Self { path: path.into() }.remove()
    }

    /// Removes all that was written here, and the folder if nothing else is in it: this host is no
    /// member any more.
    ///
    /// # Errors
    /// Something can't be removed.
    pub fn remove(self) -> Result<(), FolderError> {
        for name in ALL {
            match fs::remove_file(self.path.join(name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(self.error("remove", Some(name))(e));
                }
                _ => {}
            }
        }
        match fs::remove_dir(&self.path) {
            // Somebody put something there, which is theirs.
            Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => {
                Err(self.error("remove", None)(e))
            }
            _ => Ok(()),
        }
    }

    fn error(
        &self,
        doing: &'static str,
        name: Option<&str>,
    ) -> impl FnOnce(io::Error) -> FolderError + use<> {
        let path = name.map_or_else(|| self.path.clone(), |name| self.path.join(name));
        move |source| FolderError::Io { doing, path, source }
    }

    fn check_folder(&self) -> Result<(), FolderError> {
        let folder = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed())
            .open(&self.path)
            .map_err(self.error("open", None))?;
        check_private(&folder, &self.path)
    }

    fn read(&self, name: &str) -> Result<String, FolderError> {
        let path = self.path.join(name);
        let file = OpenOptions::new()
            .read(true)
            // A fifo would wait for its writer.
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(&path)
            .map_err(self.error("open", Some(name)))?;
        check_private(&file, &path)?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(self.error("read", Some(name)))?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(FolderError::TooLong { path, bytes: bytes.len() as u64 });
        }
        String::from_utf8(bytes).map_err(|_| FolderError::NoText { path })
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), FolderError> {
        let temporary = self.path.join(format!(".{name}.new"));
        let replace = || {
            // Of a writer that was killed.
            match fs::remove_file(&temporary) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, self.path.join(name))?;
            File::open(&self.path)?.sync_all()
        };
        replace().map_err(|source| {
            // The error is the first one's.
            let _ = fs::remove_file(&temporary);
            self.error("write", Some(name))(source)
        })
    }
}

/// Refuses what others can read or write, or own.
fn check_private(file: &File, path: &Path) -> Result<(), FolderError> {
    let metadata = file.metadata().map_err(|source| FolderError::Io {
        doing: "look at",
        path: path.to_owned(),
        source,
    })?;
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(FolderError::NotOurs { path: path.to_owned(), owner: metadata.uid(), user });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(FolderError::Open { path: path.to_owned(), mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::TempDir;

    use super::*;
    use crate::id::HostId;

    fn made() -> (TempDir, PathBuf, Cluster) {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("cluster");
        let cluster = Cluster::init("a", "10.0.0.1:7070").expect("good");
        Folder::create(&path, &cluster).expect("written");
        (dir, path, cluster)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("there").permissions().mode() & 0o7777
    }

    fn error(path: &Path) -> String {
        let error = Folder::open(path).expect_err("damaged");
        assert!(error.remedy().is_some());
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }

    #[test]
    fn what_was_written_is_read_again_and_is_private() {
        let (_dir, path, cluster) = made();
        assert_eq!(mode(&path), 0o700);
        let names: Vec<_> = fs::read_dir(&path).expect("there").flatten().collect();
        assert_eq!(names.len(), ALL.len());
        for name in names {
            assert_eq!(mode(&name.path()), 0o600, "{name:?}");
        }
        let opened = Folder::open(&path).expect("good").expect("there");
        assert_eq!(opened.cluster.identity.fingerprint(), cluster.identity.fingerprint());
        assert_eq!(opened.cluster.members.to_json(), cluster.members.to_json());
        let again = Folder::create(&path, &cluster).expect_err("there is one");
        assert!(matches!(again, FolderError::Exists { .. }));
        opened.folder.remove().expect("removed");
        assert!(!path.exists());
        assert!(Folder::open(&path).expect("nothing wrong").is_none());
    }

    #[test]
    fn keys_that_others_can_read_are_not_used() {
        let (_dir, path, _) = made();
        let key = path.join(HOST_KEY);
        fs::set_permissions(&key, Permissions::from_mode(0o640)).expect("ours");
        assert_eq!(
            error(&path),
            format!(
                "{} can be read or written by others (its mode is 0640), so its keys may be known",
                key.display()
            )
        );
        fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("ours");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("ours");
        assert!(error(&path).contains("its mode is 0755"));
        let elsewhere = path.with_file_name("open");
        fs::create_dir(&elsewhere).expect("new");
        fs::set_permissions(&elsewhere, Permissions::from_mode(0o755)).expect("ours");
        let cluster = Cluster::init("a", "10.0.0.1:7070").expect("good");
        let refused = Folder::create(&elsewhere, &cluster).expect_err("others can look in");
        assert!(matches!(refused, FolderError::Open { .. }));
        assert!(!Folder::is_used(&elsewhere));
    }

    #[test]
    fn what_is_damaged_is_refused_with_what_and_where() {
        let (_dir, path, _) = made();
        let members = path.join(MEMBERS);
        let good = fs::read_to_string(&members).expect("there");
        let check = |text: &str, wanted: &str| {
            fs::write(&members, text).expect("ours");
            let error = error(&path);
            assert!(error.starts_with(&members.display().to_string()), "{error}");
            assert!(error.contains(wanted), "{error}");
        };
        check(&good[..good.len() / 2], " at line ");
        check("", "line 1 column 0");
        check(&good.replace("members/1", "members/2"), "its format is `vmfork-members/2`");
        check(&good.replace("10.0.0.1:7070", "nowhere"), "entry 0, of host");
        check(&good.replace("\"own\": \"", "\"own\": \"x"), "is no host id");
        let own = Cluster::init("a", "10.0.0.1:7070").expect("good").identity;
        let print = Folder::open({
            fs::write(&members, &good).expect("ours");
            &path
        });
        let print = print.expect("good").expect("there").cluster.identity.fingerprint();
        let other = good.replace(&print.to_string(), &own.fingerprint().to_string());
        check(&other, "names another certificate");
        // Another host's book, with all else in order.
        let id = HostId::random().expect("random").to_string();
        let old = Membership::from_json(good.as_bytes()).expect("good").own().to_string();
        fs::write(&members, good.replace(&old, &id)).expect("ours");
        assert!(error(&path).contains("not one of this cluster's for host"));

        fs::write(&members, &good).expect("ours");
        let key = path.join(HOST_KEY);
        fs::write(&key, own.key_pem()).expect("ours");
        assert!(error(&path).contains("don't belong together"));
        fs::write(&key, "no key").expect("ours");
        assert!(error(&path).contains("the host's key is no PEM"));
        fs::write(&key, [0xff, 0xfe]).expect("ours");
        assert!(error(&path).contains("is no text"));
        fs::remove_file(&key).expect("ours");
        assert!(Folder::open(&path).expect_err("gone").to_string().starts_with("open "));
    }

    #[test]
    fn a_write_that_was_cut_off_leaves_the_old_book() {
        let (_dir, path, cluster) = made();
        // As a writer leaves it that is killed before its rename.
        fs::write(path.join(format!(".{MEMBERS}.new")), "{").expect("ours");
        let opened = Folder::open(&path).expect("good").expect("there");
        assert_eq!(opened.cluster.members.to_json(), cluster.members.to_json());
        opened.folder.save_members(&opened.cluster.members).expect("written over it");
        assert!(!path.join(format!(".{MEMBERS}.new")).exists());
        fs::create_dir(path.join(format!(".{TOKENS}.new"))).expect("in the way");
        let error = opened.folder.save_tokens(&opened.tokens).expect_err("in the way");
        assert!(error.to_string().starts_with("write "), "{error}");
        assert!(Folder::open(&path).expect("good").is_some());
    }
}
