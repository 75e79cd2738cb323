//! An S3 server of a test's own.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::runtime::Runtime;

pub(crate) const ACCESS: &str = "tester";
pub(crate) const SECRET: &str = "a secret of the tests";

/// Machines under load are slow.
const START_TICKS_MAX: u32 = 1200;
const TICK: Duration = Duration::from_millis(50);
/// Somebody else may take the port between our asking and the server's.
const PORTS_MAX: u32 = 5;

/// A running server with a bucket `snapshots`. Ended, with all that it keeps, when dropped.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    child: Child,
    _folder: std::sync::Arc<tempfile::TempDir>,
}

pub(crate) fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound")
}

/// Where mk/versitygw.sh has put it.
fn program() -> Option<PathBuf> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache");
    let folders = std::fs::read_dir(cache).ok()?.flatten();
    let names = |name: &str| name.starts_with("versitygw-v") && !name.ends_with(".new");
    let mut found: Vec<_> = folders
        .filter(|folder| names(&folder.file_name().to_string_lossy()))
        .map(|folder| folder.path().join("versitygw"))
        .filter(|program| program.is_file())
        .collect();
    found.sort();
    found.pop()
}

impl Server {
    /// `None`, with a line that says so, where there is no server to start.
    pub(crate) fn start(runtime: &Runtime) -> Option<Self> {
        let Some(program) = program() else {
            let what = "left out: no versitygw in .cache (mk/versitygw.sh builds it)";
            assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none_or(|v| v != "1"), "{what}");
            eprintln!("{what}");
            return None;
        };
        let folder = std::sync::Arc::new(tempfile::tempdir().expect("folder"));
        std::fs::create_dir(folder.path().join("snapshots")).expect("bucket");
        let started = (0..PORTS_MAX).find_map(|_| {
            let address = free_address();
            let child = Command::new(&program)
                .args(["--access", ACCESS, "--secret", SECRET, "--region", "us-east-1"])
                .args(["--port", &address.to_string(), "--quiet", "posix"])
                .arg(folder.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("versitygw starts");
            // Dropped, it is ended, also if what follows fails.
            let endpoint = format!("http://{address}");
            let mut server = Self { endpoint, child, _folder: folder.clone() };
            for _ in 0..START_TICKS_MAX {
                if TcpStream::connect(address).is_ok() {
                    return Some(server);
                }
                if server.child.try_wait().expect("our child").is_some() {
                    break;
                }
                runtime.block_on(async { tokio::time::sleep(TICK).await });
            }
            None
        });
        assert!(started.is_some(), "versitygw does not start: {}", program.display());
        started
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
