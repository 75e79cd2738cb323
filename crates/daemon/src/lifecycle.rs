//! A daemon's life from its settings to its end.
//!
//! ```text
//!   limits ─► State (lock, clear away) ─► holder ─► sockets ─► host starts ─► READY ─► serve
//!                                                                                      signal
//!                                                                                        │
//!   exit ◄─ socket and lock given up ◄─ host shuts down ◄─ requests finish ◄─ holder ends ◄┘
//! ```
//!
//! The sockets exist before the host starts, so a client that just started the daemon waits in the
//! backlog and not in a loop. They are a predecessor's, if the holder has them. On SIGUSR2 the
//! holder stays, with the sockets: clients wait for a successor. A second signal ends the wait for
//! whatever the end waits for.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::future::Future;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::BoxFuture;
use rustix::process::{Resource, Rlimit, getpid, getrlimit, set_child_subreaper, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::config::Config;
use crate::counted::Counted;
use crate::holder::{Ending, Holding};
use crate::objects;
use vmfork_control::Control;
use vmfork_host::admission::{self, Admission, Policy, ProcProbe};
use vmfork_host::cgroup::Cgroups;
use vmfork_host::disks::HostDisks;
use vmfork_host::metrics::Metrics;
use vmfork_host::state::{Recovery, State};
use vmfork_peers::{Cluster, Operations};
use vmfork_rest::http::{self, App, Elsewhere, Listeners, SocketOwner, Token};
use vmfork_snapshots::Snapshots;

/// How long the host may take to end its VMs.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(30);
/// A VM takes about a dozen; this is far below what the kernel allows by default (2²⁰).
const FILES_WANTED: u64 = 1 << 19;

/// What a host is made of.
#[derive(Debug, Clone)]
pub struct Parts {
    pub config: Arc<Config>,
    pub state: Arc<State>,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    /// Or why VMs get no memory limit of their own.
    pub cgroups: Result<Arc<Cgroups>, String>,
    pub disks: Arc<HostDisks>,
    pub snapshots: Arc<Snapshots>,
    pub holder: Arc<Holding>,
}

/// A host that has started.
pub struct Host {
    pub control: Arc<dyn Control>,
    /// What it is, or is to be, in a cluster.
    pub cluster: Option<Arc<Cluster>>,
    /// Ends all VMs and records that their end is no loss. Called once, after the last request.
    pub shutdown: BoxFuture<'static, ()>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

/// Live until SIGTERM or SIGINT, or until SIGUSR2, which says that a successor follows.
///
/// # Errors
/// If the daemon can't be started. What goes wrong later is in the log.
pub async fn run<S, F>(config: Config, start: S) -> Result<()>
where
    S: FnOnce(Parts) -> F,
    F: Future<Output = Result<Host>>,
{
    let mut signals = Signals::new().context("wait for signals")?;
    let notify = std::env::var_os("NOTIFY_SOCKET");
    run_until(config, start, notify, async move || signals.next().await).await
}

/// The same; `end` answers each time that the daemon is asked to end. `notify` is the address for
/// systemd's notifications.
///
/// # Errors
/// If the daemon can't be started.
pub async fn run_until<S, F>(
    config: Config,
    start: S,
    notify: Option<OsString>,
    mut end: impl AsyncFnMut() -> Ending,
) -> Result<()>
where
    S: FnOnce(Parts) -> F,
    F: Future<Output = Result<Host>>,
{
    raise_limits();
    let (state, recovery) = State::open(&config.host.state)?;
    log_recovery(&recovery);
    let cgroups = memory_limits();
    let disks = HostDisks::open(&state.disks(), state.sockets());
    let quotas = (config.host.disk_quota_bytes, config.host.disk_bounds.clone());
    let disks = disks.and_then(|disks| disks.limited(quotas.0, quotas.1));
    let disks = Arc::new(disks.context("open the disks of VMs")?);
    let snapshots = Arc::new(Snapshots::new(&config.host.state.join("snapshots"))?);
    disks.know_stored(Arc::<Snapshots>::clone(&snapshots));
    objects::know(&disks, &config.host.state)?;
    // Behind the cgroups, which want us to be alone in ours.
    let holder = Arc::new(Holding::begin(&config, state.root()));
    let listeners = listen(&config, &holder).await.inspect_err(|_| holder.give_up())?;
    let policy = Policy::of(&config.host, admission::cores());
    let (config, state, metrics) = (Arc::new(config), Arc::new(state), Arc::new(Metrics::new()));
    let parts = Parts {
        config: Arc::clone(&config),
        state: Arc::clone(&state),
        metrics: Arc::clone(&metrics),
        admission: Admission::new(policy, Box::new(ProcProbe)),
        cgroups,
        disks: Arc::clone(&disks),
        snapshots,
        holder: Arc::clone(&holder),
    };
    // A signal while the host starts ends it there: dropping the future gives up what it had begun.
    let host = tokio::select! {
        host = start(parts) => host.inspect_err(|_| holder.give_up())?,
        ending = end() => {
            tracing::info!(ending.why, "ending before the host had started");
            holder.part(ending).await;
            return Ok(());
        }
    };
    let (stop_tx, stop_rx) = watch::channel(false);
    let mut app = App::new(host.control, Arc::new(Counted(metrics)), stop_rx.clone())
        .debug_faults(config.debug_faults);
    if let Some(cluster) = &host.cluster {
        app = app.elsewhere(Arc::clone(cluster) as Arc<dyn Elsewhere>);
        app = app.cluster(Arc::new(Operations::new(cluster)));
        cluster.begin(http::router(app.clone())).await;
    }
    let serving = tokio::spawn(http::serve(listeners, app, stop_rx));
    let reaping = tokio::spawn(reap(state));
    if let Err(error) = holder.watch() {
        tracing::warn!("watch the holder: {error}");
    }
    tracing::info!(socket = %config.socket.display(), state = %config.host.state.display(), "ready");
    tell(notify.as_deref(), "READY=1");

    let ending = end().await;
    // Also if a second signal ends it at once: the next daemon gives them back.
    disks.keep_all();
    tracing::info!(ending.why, ending.successor, "ending");
    tell(notify.as_deref(), "STOPPING=1");
    holder.part(ending).await;
    stop_tx.send_replace(true);
    let ending = async {
        if let Some(cluster) = &host.cluster {
            cluster.stop().await;
        }
        if let Err(error) = serving.await {
            tracing::error!("the HTTP server ended by itself: {error}");
        }
        if timeout(SHUTDOWN_WAIT, host.shutdown).await.is_err() {
            tracing::error!(
                "not all VMs ended within {SHUTDOWN_WAIT:?}; the next daemon ends them"
            );
        }
    };
    tokio::select! {
        () = ending => tracing::info!("ended"),
        at_once = end() => {
            tracing::warn!(at_once.why, "ending at once; the next daemon clears away the rest");
            // For good after all, perhaps.
            if !at_once.successor {
                holder.part(at_once).await;
            }
        }
    }
    reaping.abort();
    Ok(())
}

/// Says which VMs an earlier daemon lost, and what else of it was cleared away.
fn log_recovery(recovery: &Recovery) {
    for vm in &recovery.lost {
        tracing::warn!(vm = vm.name, id = vm.id, image = vm.image, "lost with an earlier daemon");
    }
    if recovery.processes_killed + recovery.folders_removed + recovery.lines_skipped > 0 {
        tracing::warn!(
            processes_killed = recovery.processes_killed,
            folders_removed = recovery.folders_removed,
            journal_lines_skipped = recovery.lines_skipped,
            "cleared away what an earlier daemon left"
        );
    }
}

/// The cgroups for a memory limit per VM, without those of an earlier daemon. Or why there are
/// none.
fn memory_limits() -> Result<Arc<Cgroups>, String> {
    match Cgroups::detect() {
        Ok(cgroups) => {
            cgroups.remove_stale();
            Ok(Arc::new(cgroups))
        }
        Err(error) => {
            let reason = format!("{:#}", anyhow::Error::from(error));
            tracing::info!("VMs get no memory limit of their own: {reason}");
            Err(reason)
        }
    }
}

async fn listen(config: &Config, holder: &Holding) -> Result<Listeners> {
    if let Some(folder) = config.socket.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("make the folder {}", folder.display()))?;
    }
    let owner = SocketOwner { gid: config.socket_gid };
    let listeners = match holder.take_unix(&config.socket, owner)? {
        Some(listeners) => listeners,
        None => Listeners::unix(&config.socket, owner).await?,
    };
    let listeners = listen_on_tcp(config, holder, listeners).await?;
    holder.keep(config, &listeners).context("copy the sockets for a successor")?;
    Ok(listeners)
}

async fn listen_on_tcp(
    config: &Config,
    holder: &Holding,
    listeners: Listeners,
) -> Result<Listeners> {
    let Some(tcp) = &config.tcp else { return Ok(listeners) };
    let token = Token::from_file(&tcp.token_file)?;
    let listeners = match holder.take_tcp(tcp.address) {
        Some(socket) => listeners.and_tcp_taken_over(socket, tcp.address, token)?,
        None => listeners.and_tcp(tcp.address, token).await?,
    };
    if let Some(address) = listeners.tcp_address() {
        tracing::info!(%address, "serving on TCP to those who have the token");
        if !address.ip().is_loopback() {
            tracing::warn!(%address, "tokens and data pass unencrypted: keep it to a network you trust");
        }
    }
    Ok(listeners)
}

/// Neither is needed to begin with, so neither is an error.
fn raise_limits() {
    let files = getrlimit(Resource::Nofile);
    let wanted = files.maximum.map_or(FILES_WANTED, |maximum| maximum.min(FILES_WANTED));
    if files.current.is_some_and(|current| current < wanted) {
        let limit = Rlimit { current: Some(wanted), maximum: files.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!("raise the number of open files to {wanted}: {error}");
        }
    }
    // Keepers outlive their QEMUs and then become our children.
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        tracing::warn!("become the parent of orphaned keepers: {error}");
    }
}

async fn reap(state: Arc<State>) {
    let mut children = match signal(SignalKind::child()) {
        Ok(children) => children,
        Err(error) => return tracing::warn!("wait for children: {error}"),
    };
    while children.recv().await.is_some() {
        for keeper in state.reap_keepers() {
            tracing::debug!(pid = keeper.pid, "a keeper has ended");
        }
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// A successor follows.
    restart: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            restart: signal(SignalKind::user_defined2())?,
        })
    }

    async fn next(&mut self) -> Ending {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM".into(),
            _ = self.interrupt.recv() => "SIGINT".into(),
            _ = self.restart.recv() => Ending { why: "SIGUSR2", successor: true },
        }
    }
}

/// Tell systemd, if it asked to be told (sd_notify(3)).
fn tell(notify: Option<&OsStr>, message: &str) {
    let Some(notify) = notify else { return };
    let address = match notify.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(notify),
    };
    let told = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.send_to_addr(message.as_bytes(), &address)
    });
    if let Err(error) = told {
        tracing::warn!("tell systemd {message}: {error}");
    }
}
