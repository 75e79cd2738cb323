//! The allocator on a real Slurm: munged, slurmctld and three slurmd in a temporary folder, on free
//! ports of this machine.
//!
//! Skipped, with the missing thing named, where they are not installed (Debian: `apt install
//! slurm-wlm munge`) or the test does not run as root. `VMFORK_TEST_STRICT=1` makes that a failure.

use std::fs::{self, File, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use vmfork_cluster::allocate::{AllocateError, Allocator, Ask, Held, HostView, Policy};
use vmfork_cluster::slurm::{Commands as _, Settings, Slurm, System};
use vmfork_cluster::{HostId, Room};

/// Each node has 4 CPUs and 1000 MiB.
const NODES: u64 = 3;
const MIB: u64 = 1 << 20;
/// For daemons to come up, and for jobs to end. Seconds are usual.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is missing for this test.
fn missing() -> Option<String> {
    let programs = ["munged", "slurmctld", "slurmd", "salloc", "scontrol", "scancel", "squeue"];
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = || path.split(':').chain(["/usr/sbin"]);
    let is_there = |name: &&str| folders().any(|folder| Path::new(folder).join(name).is_file());
    if let Some(name) = programs.iter().find(|name| !is_there(name)) {
        return Some(format!("{name} is not installed (apt install slurm-wlm munge)"));
    }
    (!rustix::process::geteuid().is_root()).then(|| "slurmd needs root".to_owned())
}

fn sbin(name: &str) -> Command {
    let in_sbin = Path::new("/usr/sbin").join(name);
    Command::new(if in_sbin.is_file() { in_sbin } else { PathBuf::from(name) })
}

/// A Slurm that ends with this value.
struct Cluster {
    folder: TempDir,
    /// In the order in which they were started.
    daemons: Vec<(&'static str, Child)>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        while let Some((_, mut child)) = self.daemons.pop() {
            // By its id. They keep nothing that is worth a gentle end.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Cluster {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn conf(&self) -> PathBuf {
        self.path("slurm.conf")
    }

    fn start(&mut self, name: &'static str, arguments: &[&str]) {
        let log = File::create(self.path(&format!("{name}-{}.out", self.daemons.len())));
        let log = log.expect("the folder is ours");
        let child = sbin(name)
            .args(arguments)
            .env("SLURM_CONF", self.conf())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("an fd"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| panic!("start {name}: {e}"));
        self.daemons.push((name, child));
    }

    fn logs(&self) -> String {
        let files = fs::read_dir(self.folder.path()).expect("ours").flatten();
        let logs = files.filter(|file| {
            let name = file.file_name().to_string_lossy().into_owned();
            name.ends_with(".log") || name.ends_with(".out")
        });
        let tail = |text: String| {
            let from = text.len().saturating_sub(1500);
            text.get(from..).unwrap_or_default().to_owned()
        };
        let each = |file: fs::DirEntry| {
            let text = fs::read(file.path()).map(|it| String::from_utf8_lossy(&it).into_owned());
            format!("== {:?}\n{}\n", file.file_name(), tail(text.unwrap_or_default()))
        };
        logs.map(each).collect()
    }

    /// Daemons that are up, with all nodes idle.
    async fn up() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("ours");
        let mut it = Self { folder, daemons: Vec::new() };
        // All at once, so that no two are the same.
        let sockets: Vec<TcpListener> =
            (0..=NODES).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
        let ports: Vec<u16> =
            sockets.iter().map(|it| it.local_addr().expect("bound").port()).collect();
        drop(sockets);
        fs::write(it.conf(), it.configuration(&ports)).expect("ours");
        let key = it.path("munge.key");
        fs::write(&key, [7; 128]).expect("ours");
        fs::set_permissions(&key, Permissions::from_mode(0o400)).expect("ours");
        let option = |name: &str, file: &str| format!("--{name}={}", it.path(file).display());
        let options = [
            option("key-file", "munge.key"),
            option("socket", "munge.socket"),
            option("pid-file", "munge.pid"),
            option("log-file", "munge.log"),
            option("seed-file", "munge.seed"),
        ];
        let mut arguments = vec!["--force", "--foreground"];
        arguments.extend(options.iter().map(String::as_str));
        it.start("munged", &arguments);
        let socket = it.path("munge.socket");
        it.wait("munged listens", async || socket.exists()).await;
        let conf = it.conf().display().to_string();
        it.start("slurmctld", &["-D", "-f", &conf]);
        for node in 1..=NODES {
            it.start("slurmd", &["-D", "-f", &conf, "-N", &format!("h{node}")]);
        }
        let idle = format!("{NODES} idle");
        it.wait("all nodes are idle", async || {
            let output = it.run("sinfo", &["--noheader", "--format=%D %t"]).await;
            output.trim() == idle
        })
        .await;
        it
    }

    fn configuration(&self, ports: &[u16]) -> String {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let short = host.split('.').next().unwrap_or(&host).to_owned();
        let at = |name: &str| self.path(name).display().to_string();
        let mut text = format!(
            "ClusterName=vmforktest\n\
             SlurmctldHost={short}(127.0.0.1)\n\
             SlurmctldPort={port}\n\
             SlurmUser=root\n\
             AuthType=auth/munge\n\
             AuthInfo=socket={munge}\n\
             CredType=cred/munge\n\
             StateSaveLocation={state}\n\
             SlurmdSpoolDir={spool}.%n\n\
             SlurmctldPidFile={ctld}.pid\n\
             SlurmdPidFile={slurmd}.%n.pid\n\
             SlurmctldLogFile={ctld}.log\n\
             SlurmdLogFile={slurmd}.%n.log\n\
             ProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\n\
             SwitchType=switch/none\n\
             MpiDefault=none\n\
             SelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU_Memory\n\
             SlurmdParameters=config_overrides\n\
             AccountingStorageType=accounting_storage/none\n\
             JobAcctGatherType=jobacct_gather/none\n\
             ReturnToService=2\n\
             KillWait=1\n",
            port = ports[0],
            munge = at("munge.socket"),
            state = at("state"),
            spool = at("spool"),
            ctld = at("slurmctld"),
            slurmd = at("slurmd"),
        );
        for (node, port) in (1..).zip(&ports[1..]) {
            text.push_str(&format!(
                "NodeName=h{node} NodeHostname={short} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN\n"
            ));
        }
        text.push_str("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n");
        text
    }

    async fn run(&self, program: &'static str, arguments: &[&str]) -> String {
        let arguments = arguments.iter().map(|it| (*it).to_owned()).collect();
        let output = System::new(Some(self.conf())).run(program, arguments, PATIENCE).await;
        output.map_or_else(|e| e.to_string(), |output| output.stdout + &output.stderr)
    }

    async fn wait(&self, what: &str, mut is_so: impl AsyncFnMut() -> bool) {
        let waited = tokio::time::timeout(PATIENCE, async {
            while !is_so().await {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        if waited.await.is_err() {
            panic!("{what}: not within {PATIENCE:?}\n{}", self.logs());
        }
    }

    /// States of all jobs that hold nodes.
    async fn jobs(&self) -> String {
        self.run("squeue", &["--noheader", "--format=%T"]).await.trim().to_owned()
    }
}

/// Members by the nodes' names.
fn views(members: u64) -> Vec<HostView> {
    let view = |n: u64| HostView {
        id: HostId::new(n).expect("not 0"),
        name: format!("h{n}"),
        closed: None,
        free: Room { memory_bytes: 100 << 30, vcpus: 100 },
        once_bytes: 0,
        has_family: false,
    };
    (1..=members).map(view).collect()
}

fn ask(count: u32, memory_mib: u64) -> Ask {
    let shape = Room { memory_bytes: memory_mib * MIB, vcpus: 1 };
    Ask { count, shape, family: "vm-1".into(), policy: Policy::Spread }
}

#[tokio::test]
async fn a_ticket_is_a_job_that_holds_nodes_and_ends_with_it() {
    if let Some(what) = missing() {
        assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "{what}");
        eprintln!("SKIPPED: tests/slurm.rs: {what}");
        return;
    }
    let cluster = Cluster::up().await;
    let own = HostId::new(1).expect("not 0");
    let settings = Settings { patience_s: 3, conf: Some(cluster.conf()), ..Settings::default() };
    let slurm = |settings: &Settings| Slurm::new(own, settings.clone());
    let allocator = slurm(&settings);
    let hosts = views(NODES);
    let count = |held: &Held| held.places.values().sum::<u32>();

    // Eight of twelve CPUs, then what is left, then nothing.
    let first = allocator.hold(&ask(8, 100), &hosts).await.expect("room").expect("a job");
    assert_eq!((count(&first), first.short.len()), (8, 0), "{first:?}");
    assert_eq!(first.places.len(), 3, "spread over all: {first:?}");
    let second = allocator.hold(&ask(8, 100), &hosts).await.expect("some room").expect("a job");
    assert_eq!(count(&second), 4, "{second:?}");
    assert_eq!(second.short, ["Slurm gave room for 4"]);
    let error = allocator.hold(&ask(1, 100), &hosts).await.expect_err("all is taken");
    assert!(matches!(error, AllocateError::NoRoom { .. }), "{error}");
    assert_eq!(cluster.jobs().await, "RUNNING\nRUNNING");
    let both = [&first, &second].map(|held| held.job.clone());
    assert_eq!(allocator.jobs().await.expect("asked"), both.into());

    // Given back, twice.
    allocator.release(&second.job).await.expect("given back");
    allocator.release(&second.job).await.expect("given back before");
    // Slurm says COMPLETING for a moment.
    cluster
        .wait("it is cancelled", async || {
            let ended = allocator.ended(&second.job).await.expect("asked").expect("it ended");
            ended.starts_with(&format!("Slurm ended job {}: CANCELLED", second.job))
        })
        .await;

    // Ended by the site.
    assert_eq!(allocator.ended(&first.job).await.expect("asked"), None, "it runs");
    cluster.run("scancel", &[&first.job]).await;
    cluster
        .wait("it has ended", async || {
            let ended = allocator.ended(&first.job).await.expect("asked");
            ended.is_some_and(|why| why.contains(": CANCELLED"))
        })
        .await;
    allocator.release(&first.job).await.expect("over anyhow");
    cluster.wait("no job is left", async || cluster.jobs().await.is_empty()).await;

    // By memory: 3 of 300 MiB on each node.
    let by_memory = allocator.hold(&ask(12, 300), &hosts).await.expect("room").expect("a job");
    assert_eq!(count(&by_memory), 9, "{by_memory:?}");
    allocator.release(&by_memory.job).await.expect("given back");

    // Two clones for each of Slurm's CPUs, on nodes of which one is no member.
    let dense = slurm(&Settings { clones_per_task: 2, ..settings.clone() });
    cluster.wait("all nodes are free", async || cluster.jobs().await.is_empty()).await;
    let two = dense.hold(&ask(24, 10), &views(NODES - 1)).await.expect("room").expect("a job");
    assert_eq!(count(&two), 16, "{two:?}");
    assert_eq!(two.short, ["Slurm gave room for 16"], "h3 is no member");
    dense.release(&two.job).await.expect("given back");
    cluster.wait("no job is left", async || cluster.jobs().await.is_empty()).await;

    // What the site does not have is told as the engine says it.
    let nowhere = Settings { extra: vec!["--partition=nowhere".into()], ..settings.clone() };
    let error = slurm(&nowhere).hold(&ask(1, 10), &hosts).await.expect_err("no partition");
    assert!(error.to_string().contains("Invalid partition name"), "{error}");

    // Who has gone away leaves no job.
    let (gone, request) = (slurm(&settings), ask(2, 10));
    drop(tokio::time::timeout(Duration::from_millis(5), gone.hold(&request, &hosts)).await);
    cluster
        .wait("the job was granted or not", async || {
            // Whichever came first: in the end there is none.
            tokio::time::sleep(Duration::from_secs(1)).await;
            cluster.jobs().await.is_empty()
        })
        .await;
}
