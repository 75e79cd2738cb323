//! Where the daemon is and how we talk to people.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use super::misuse;
use crate::args::RawGlobal;
use crate::failure::Misuse;
use crate::printer::{Level, Printer};

const STATE_DEFAULT: &str = "/var/lib/vmfork";
const SOCKET_DEFAULT: &str = "/run/vmfork/vmforkd.sock";
const SOCKET_NAME: &str = "vmforkd.sock";

/// Longest path that fits into a `sockaddr_un` with its final NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The variables that vmfork reads. An empty one counts as absent.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) socket: Option<OsString>,
    pub(crate) state: Option<OsString>,
    pub(crate) host: Option<OsString>,
    pub(crate) token: Option<OsString>,
    pub(crate) cache: Option<OsString>,
    pub(crate) no_color: bool,
    pub(crate) no_progress: bool,
    pub(crate) dumb_terminal: bool,
}

impl Environment {
    pub(crate) fn read() -> Self {
        let get = |name| env::var_os(name).filter(|value| !value.is_empty());
        Self {
            socket: get("VMFORK_SOCKET"),
            state: get("VMFORK_STATE"),
            host: get("VMFORK_HOST"),
            token: get("VMFORK_TOKEN"),
            cache: get("VMFORK_CACHE"),
            no_color: get("NO_COLOR").is_some(),
            no_progress: get("VMFORK_NO_PROGRESS").is_some(),
            dumb_terminal: get("TERM").is_some_and(|term| term == "dumb"),
        }
    }
}

/// Where the daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
        }
    }
}

/// What every command gets.
#[derive(Debug, Clone)]
pub(crate) struct Global {
    pub(crate) endpoint: Endpoint,
    pub(crate) token: Option<String>,
    pub(crate) state_dir: PathBuf,
    /// Downloads and base systems of image builds.
    pub(crate) cache_dir: PathBuf,
    /// Whether a missing daemon may be started.
    pub(crate) may_start: bool,
    pub(crate) printer: Printer,
}

impl Global {
    pub(crate) fn new(raw: &RawGlobal, env: &Environment) -> Result<Self, Misuse> {
        let endpoint = endpoint(raw, env)?;
        let token = match &env.token {
            None => None,
            Some(token) => match token.to_str() {
                Some(token) if token.bytes().all(|b| b.is_ascii_graphic()) => {
                    Some(token.to_owned())
                }
                _ => {
                    return misuse(
                        "VMFORK_TOKEN: a token has printable ASCII characters only; check its value",
                    );
                }
            },
        };
        let may_start = !raw.no_start && matches!(endpoint, Endpoint::Unix(_));
        let state_dir = absolute(state_given(raw, env).unwrap_or(Path::new(STATE_DEFAULT)))?;
        let cache_dir = match &env.cache {
            Some(folder) => absolute(Path::new(folder))?,
            None => state_dir.join("cache"),
        };
        Ok(Self {
            endpoint,
            token,
            state_dir,
            cache_dir,
            may_start,
            printer: Self::printer(raw, env),
        })
    }

    /// Enough to report that the rest can't be had.
    pub(crate) fn printer(raw: &RawGlobal, env: &Environment) -> Printer {
        let level = match (raw.quiet, raw.verbose) {
            (true, _) => Level::Quiet,
            (_, true) => Level::Verbose,
            _ => Level::Normal,
        };
        Printer::new(
            raw.json,
            level,
            !env.no_color && !env.dumb_terminal,
            !env.no_progress && !env.dumb_terminal,
        )
    }
}

/// A flag goes before a variable; among variables the more special one wins.
fn endpoint(raw: &RawGlobal, env: &Environment) -> Result<Endpoint, Misuse> {
    if let Some(path) = &raw.socket {
        return unix(path);
    }
    if raw.state.is_none() {
        if let Some(host) = &env.host {
            return tcp(host);
        }
        if let Some(path) = &env.socket {
            return unix(Path::new(path));
        }
    }
    match state_given(raw, env) {
        Some(state) => unix(&state.join(SOCKET_NAME)),
        None => unix(Path::new(SOCKET_DEFAULT)),
    }
}

fn state_given<'a>(raw: &'a RawGlobal, env: &'a Environment) -> Option<&'a Path> {
    raw.state.as_deref().or_else(|| env.state.as_deref().map(Path::new))
}

/// The daemon has another working folder.
fn absolute(path: &Path) -> Result<PathBuf, Misuse> {
    std::path::absolute(path).map_err(|error| Misuse(format!("{}: {error}", path.display())))
}

fn unix(path: &Path) -> Result<Endpoint, Misuse> {
    let path = absolute(path)?;
    let len = path.as_os_str().len();
    if len > SOCKET_PATH_BYTES_MAX {
        return misuse(format!(
            "the path of the socket {} has {len} bytes; use at most {SOCKET_PATH_BYTES_MAX}",
            path.display()
        ));
    }
    Ok(Endpoint::Unix(path))
}

fn tcp(host: &OsString) -> Result<Endpoint, Misuse> {
    let text = host.to_string_lossy();
    let port = |address: &str| {
        let (name, port) = address.rsplit_once(':')?;
        let port = port.parse::<u16>().ok()?;
        (!name.is_empty() && port != 0 && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/'))
            .then_some(())
    };
    match text.strip_prefix("tcp://") {
        Some(address) if port(address).is_some() => Ok(Endpoint::Tcp(address.to_owned())),
        _ => match text.strip_prefix("unix://") {
            Some(path) => unix(Path::new(path)),
            None => misuse(format!(
                "VMFORK_HOST={text}: write it as tcp://127.0.0.1:7070 or unix:///PATH"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(socket: &str, state: &str, host: &str) -> Environment {
        let some = |text: &str| (!text.is_empty()).then(|| OsString::from(text));
        Environment {
            socket: some(socket),
            state: some(state),
            host: some(host),
            ..Default::default()
        }
    }

    fn endpoint_of(raw: &RawGlobal, env: &Environment) -> String {
        Global::new(raw, env).expect("these fit").endpoint.to_string()
    }

    #[test]
    fn the_socket_follows_flags_then_variables_then_the_default() {
        let none = RawGlobal::default();
        assert_eq!(endpoint_of(&none, &env("", "", "")), "/run/vmfork/vmforkd.sock");
        assert_eq!(endpoint_of(&none, &env("", "/s", "")), "/s/vmforkd.sock");
        assert_eq!(endpoint_of(&none, &env("/a.sock", "/s", "")), "/a.sock");
        assert_eq!(endpoint_of(&none, &env("/a.sock", "/s", "tcp://h:1")), "tcp://h:1");
        let state = RawGlobal { state: Some("/f".into()), ..Default::default() };
        assert_eq!(endpoint_of(&state, &env("/a.sock", "/s", "tcp://h:1")), "/f/vmforkd.sock");
        let socket = RawGlobal { socket: Some("/b.sock".into()), ..Default::default() };
        assert_eq!(endpoint_of(&socket, &env("/a.sock", "/s", "tcp://h:1")), "/b.sock");
    }

    #[test]
    fn downloads_are_kept_in_the_state_folder_unless_a_variable_names_another() {
        let state = RawGlobal { state: Some("/s".into()), ..Default::default() };
        let mut env = Environment::default();
        assert_eq!(Global::new(&state, &env).unwrap().cache_dir, Path::new("/s/cache"));
        env.cache = Some("/c".into());
        assert_eq!(Global::new(&state, &env).unwrap().cache_dir, Path::new("/c"));
    }

    #[test]
    fn a_daemon_elsewhere_is_never_started() {
        let tcp = Global::new(&RawGlobal::default(), &env("", "", "tcp://127.0.0.1:7")).unwrap();
        assert!(!tcp.may_start);
        let raw = RawGlobal { no_start: true, ..Default::default() };
        assert!(!Global::new(&raw, &env("", "", "")).unwrap().may_start);
    }

    #[test]
    fn addresses_and_paths_that_cannot_work_are_refused() {
        for host in ["127.0.0.1:80", "tcp://", "tcp://h", "tcp://h:0", "tcp://:9", "tcp://h:99999"]
        {
            assert!(Global::new(&RawGlobal::default(), &env("", "", host)).is_err(), "{host}");
        }
        let raw = RawGlobal {
            socket: Some(format!("/{}", "x".repeat(120)).into()),
            ..Default::default()
        };
        assert!(Global::new(&raw, &env("", "", "")).is_err());
    }
}
