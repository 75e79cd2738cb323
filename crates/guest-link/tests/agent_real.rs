//! The link against the real agent, which runs here as an ordinary process. It is built with the
//! workspace; where it is missing these tests say so and pass.
#![expect(clippy::print_stderr, reason = "a skipped test must be seen")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_agent_proto::ForkIdentity;
use vmfork_api::ExecRequest;
use vmfork_control::{ExecInput, ExecOutput, ExecSession};
use vmfork_guest_link::agent::{
    AgentLink, GuestRequest, HelloRequest, LinkError, LinkOptions, MailLimits, MailRoom,
};

const SOON: Duration = Duration::from_secs(20);

/// An agent at work; ended with the test.
struct Agent {
    process: Child,
    folder: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Guest {
    link: AgentLink,
    _requests: mpsc::Receiver<GuestRequest>,
    agent: Agent,
}

/// The agent beside this test's own folder in the target folder.
fn agent_binary() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let binary = test.parent()?.parent()?.join("vmfork-agent");
    if binary.exists() {
        return Some(binary);
    }
    let why = format!("no {}; build the workspace first", binary.display());
    assert!(std::env::var_os("VMFORK_TEST_STRICT").is_none(), "{why}");
    eprintln!("SKIPPED: {why}");
    None
}

async fn start_agent() -> Option<(Agent, UnixStream)> {
    let binary = agent_binary()?;
    let folder = tempfile::tempdir().expect("folder");
    let socket = folder.path().join("port");
    std::fs::create_dir(folder.path().join("identity")).expect("folder");
    let listener = UnixListener::bind(&socket).expect("bind");
    let process = Command::new(binary)
        .args(["serve", "--port"])
        .arg(&socket)
        .arg("--dry-identity")
        .arg(folder.path().join("identity"))
        .arg("--run-dir")
        .arg(folder.path().join("run"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("agent");
    let agent = Agent { process, folder };
    let (stream, _) = timeout(SOON, listener.accept()).await.expect("in time").expect("accept");
    Some((agent, stream))
}

async fn guest() -> Option<Guest> {
    let (agent, stream) = start_agent().await?;
    let (log, _log) = mpsc::channel(16);
    let (requests_tx, requests) = mpsc::channel(16);
    let options = LinkOptions {
        log,
        requests: requests_tx,
        mail: MailLimits::default(),
        room: MailRoom::default(),
    };
    let link = AgentLink::start(stream, options);
    let guest = Guest { link, _requests: requests, agent };
    let hello =
        HelloRequest { name: "web".into(), machine_id: "ab".repeat(16), entropy: "cd".repeat(64) };
    let info = guest.link.hello(hello, SOON).await.expect("hello");
    assert!(info.cpus >= 1 && !info.kernel.is_empty());
    Some(guest)
}

async fn start(link: &AgentLink, script: &str) -> ExecSession {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    link.exec(ExecRequest { argv, ..ExecRequest::default() }, SOON).await.expect("exec")
}

/// All that a program prints, and its exit code.
async fn finish(session: &mut ExecSession) -> (Vec<u8>, i32) {
    let mut out = Vec::new();
    loop {
        match timeout(SOON, session.output.recv()).await.expect("in time").expect("an end") {
            ExecOutput::Stdout(bytes) | ExecOutput::Stderr(bytes) => out.extend_from_slice(&bytes),
            ExecOutput::Exited { exit_code, .. } => return (out, exit_code),
            ExecOutput::Error(error) => panic!("{error:?}"),
        }
    }
}

#[tokio::test]
async fn programs_run_with_input_output_and_signals() {
    let Some(guest) = guest().await else { return };
    let mut session = start(&guest.link, "echo out; exit 3").await;
    assert_eq!(finish(&mut session).await, (b"out\n".to_vec(), 3));

    // Far more than a window, both ways at once.
    let mut session = start(&guest.link, "cat").await;
    let whole: Vec<u8> = (0..5_000_000u32).map(|n| (n % 251) as u8).collect();
    let input = session.input.clone();
    let bytes = Bytes::from(whole.clone());
    let feeder = tokio::spawn(async move {
        input.send(ExecInput::Stdin(bytes)).await.expect("input");
        input.send(ExecInput::StdinEof).await.expect("input");
    });
    let (out, exit_code) = finish(&mut session).await;
    assert!(out == whole && exit_code == 0);
    feeder.await.expect("feeder");

    let mut session = start(&guest.link, "sleep 60").await;
    session.input.send(ExecInput::Signal(15)).await.expect("input");
    assert_eq!(finish(&mut session).await.1, 128 + 15);

    let mark = guest.agent.folder.path().join("hung-up");
    let script = format!(
        "exec 2>/dev/null; trap ': > {}; exit' HUP; echo up; while :; do sleep 0.05; done",
        mark.display()
    );
    let mut session = start(&guest.link, &script).await;
    assert!(matches!(session.output.recv().await, Some(ExecOutput::Stdout(_))));
    drop(session);
    timeout(SOON, async {
        while !mark.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("SIGHUP");
}

#[tokio::test]
async fn files_go_both_ways() {
    let Some(guest) = guest().await else { return };
    let path = guest.agent.folder.path().join("file");
    let path = path.to_str().expect("text");
    let (content_tx, content) = mpsc::channel(2);
    let whole: Vec<u8> = (0..3_000_000u32).map(|n| (n % 241) as u8).collect();
    let pieces: Vec<Bytes> = whole.chunks(700_000).map(Bytes::copy_from_slice).collect();
    let feeder = tokio::spawn(async move {
        for piece in pieces {
            content_tx.send(Ok(piece)).await.expect("content");
        }
    });
    let written = guest.link.write_file(path, 0o640, content, SOON).await;
    assert_eq!(written, Ok(3_000_000));
    feeder.await.expect("feeder");
    let mut file = guest.link.read_file(path, SOON).await.expect("file");
    assert_eq!((file.mode & 0o777, file.size_bytes), (0o640, 3_000_000));
    let mut read = Vec::new();
    while let Some(bytes) = timeout(SOON, file.content.recv()).await.expect("in time") {
        read.extend_from_slice(&bytes.expect("content"));
    }
    assert!(read == whole);
    let missing = guest.link.read_file("/no/such/file", SOON).await.expect_err("missing");
    assert!(matches!(missing, LinkError::Guest(error) if error.errno == 2));
    let (_content_tx, content) = mpsc::channel(1);
    let folder = guest.link.write_file("/tmp", 0o640, content, SOON).await.expect_err("folder");
    assert!(matches!(folder, LinkError::Guest(error) if error.errno == 21));
}

#[tokio::test]
async fn a_parent_goes_on_after_every_fork() {
    let Some(guest) = guest().await else { return };
    let mut noisy = start(&guest.link, "while :; do echo noise; done").await;
    for fork in 1..30 {
        let held = guest.link.prepare(fork, SOON).await.expect("prepared");
        while noisy.output.try_recv().is_ok() {}
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(held.is_intact());
        held.continue_();
        let mut session = start(&guest.link, "echo on").await;
        assert_eq!(finish(&mut session).await.0, b"on\n");
    }
    drop(noisy);
    guest.link.ping(SOON).await.expect("alive");
    let asked = std::time::Instant::now();
    guest.link.ping(SOON).await.expect("alive");
    let pinged = asked.elapsed();
    let asked = std::time::Instant::now();
    let held = guest.link.prepare(99, SOON).await.expect("prepared");
    eprintln!("ping {pinged:?}, prepare {:?}", asked.elapsed());
    drop(held);
}

/// What the daemon does for a clone, played on one process: prepared by one link, named by another.
#[tokio::test]
async fn an_identity_is_confirmed_over_the_link_of_a_clone() {
    let Some((agent, mut port)) = start_agent().await else { return };
    let options = || {
        let (log, log_rx) = mpsc::channel(64);
        let (requests, requests_rx) = mpsc::channel(16);
        let options =
            LinkOptions { log, requests, mail: MailLimits::default(), room: MailRoom::default() };
        (options, log_rx, requests_rx)
    };
    // The parent's link, through a relay that can be changed under the agent's feet like a fork
    // does.
    let (near, mut far) = UnixStream::pair().expect("socketpair");
    let (parent_options, _log, _requests) = options();
    let parent = AgentLink::start(near, parent_options);
    let (inheritance, _session, _held) = {
        let work = async {
            let mut session = start(&parent, "while sleep 0.02; do echo tick; done").await;
            assert!(matches!(session.output.recv().await, Some(ExecOutput::Stdout(_))));
            let held = parent.prepare(5, SOON).await.expect("prepared");
            let inheritance = held.inheritance().clone();
            (inheritance, session, held)
        };
        tokio::select! {
            done = work => done,
            _ = tokio::io::copy_bidirectional(&mut port, &mut far) => panic!("the port closed"),
        }
    };
    let (near, mut far) = UnixStream::pair().expect("socketpair");
    let (clone_options, mut log, _clone_requests) = options();
    let clone = AgentLink::start_clone(near, clone_options, &inheritance);
    let identity = ForkIdentity {
        fork: 5,
        vmid: 3,
        name: "web.3".into(),
        machine_id: "ef".repeat(16),
        entropy: "01".repeat(64),
        realtime_ns: 1_800_000_000_000_000_000,
        ticket: None,
    };
    let work = async {
        clone.identity(identity, SOON).await.expect("confirmed");
        let line = timeout(SOON, log.recv()).await.expect("in time").expect("log");
        assert!(line.starts_with(b"tick"), "{line:?}");
        let mut session = start(&clone, "echo clone").await;
        assert_eq!(finish(&mut session).await.0, b"clone\n");
    };
    tokio::select! {
        () = work => {}
        _ = tokio::io::copy_bidirectional(&mut port, &mut far) => panic!("the port closed"),
    }
    let vmid = std::fs::read_to_string(agent.folder.path().join("run/vmid")).expect("vmid");
    assert_eq!(vmid.trim(), "3");
}
