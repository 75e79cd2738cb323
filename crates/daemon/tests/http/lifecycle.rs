//! A whole daemon in the test's process, from its settings to its end.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches};
use futures_util::FutureExt;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use vmfork_api::LostVm;
use vmfork_daemon::config::{Config, Flags};
use vmfork_daemon::lifecycle::{Host, Parts, run_until};

use crate::client::{LONG, eventually};
use crate::fake::Fake;

fn config(state: &Path, flags: &[&str]) -> Config {
    let state = state.to_str().expect("text");
    let flags = [&["vmforkd", "--state", state], flags].concat();
    // Not those of the user that runs the tests: `mk/env.sh` sets some of them.
    let command = Flags::command().mut_args(|arg| arg.env(Resettable::Reset));
    let flags = Flags::from_arg_matches(&command.get_matches_from(flags)).expect("flags");
    flags.check().expect("settings")
}

struct Running {
    task: JoinHandle<anyhow::Result<()>>,
    end: mpsc::Sender<&'static str>,
    has_shut_down: Arc<AtomicBool>,
}

/// `begin` is called with the parts; `end_slowly`: the host never gets done with shutting down.
fn launch(
    config: Config,
    notify: Option<&Path>,
    end_slowly: bool,
    begin: impl FnOnce(&Parts) + Send + 'static,
) -> Running {
    let (end, mut ends) = mpsc::channel(2);
    let has_shut_down = Arc::new(AtomicBool::new(false));
    let shut_down = has_shut_down.clone();
    let start = async move |parts: Parts| {
        begin(&parts);
        let shutdown = async move {
            if end_slowly {
                std::future::pending::<()>().await;
            }
            shut_down.store(true, SeqCst);
            drop(parts);
        };
        let control = Arc::new(Fake::default());
        Ok(Host { control, cluster: None, shutdown: shutdown.boxed() })
    };
    let notify = notify.map(|path| path.as_os_str().to_owned());
    let task = tokio::task::spawn_local(async move {
        let end = async || ends.recv().await.unwrap_or("dropped").into();
        run_until(config, start, notify, end).await
    });
    Running { task, end, has_shut_down }
}

async fn answers(socket: &Path) {
    for _ in 0..500 {
        if UnixStream::connect(socket).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no daemon answers on {}", socket.display());
}

/// `run_until` belongs to one task.
async fn locally(test: impl Future<Output = ()>) {
    tokio::task::LocalSet::new().run_until(test).await;
}

fn vm(id: &str) -> LostVm {
    LostVm {
        name: "web".into(),
        id: id.into(),
        image: "debian".into(),
        parent: None,
        created_unix_ms: 1,
    }
}

#[tokio::test]
async fn it_serves_tells_systemd_ends_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("temp dir");
    let socket = folder.path().join("vmforkd.sock");
    let elsewhere = tempfile::tempdir().expect("temp dir");
    let notify = elsewhere.path().join("notify");
    let told = UnixDatagram::bind(&notify).expect("bind");
    told.set_nonblocking(true).expect("non-blocking");
    locally(async {
        let running = launch(config(folder.path(), &[]), Some(&notify), false, |_| ());
        answers(&socket).await;
        let hear = || {
            let mut message = [0; 64];
            told.recv(&mut message).map(|n| String::from_utf8_lossy(&message[..n]).into_owned())
        };
        eventually("systemd is told", || hear().is_ok_and(|message| message == "READY=1")).await;

        running.end.send("test").await.expect("it listens");
        timeout(LONG, running.task).await.expect("in time").expect("no panic").expect("no error");
        assert_eq!(hear().expect("told"), "STOPPING=1");
        assert!(running.has_shut_down.load(SeqCst));
        assert!(!socket.exists());
    })
    .await;
}

#[tokio::test]
async fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let folder = tempfile::tempdir().expect("temp dir");
    let socket = folder.path().join("vmforkd.sock");
    locally(async {
        let first = launch(config(folder.path(), &[]), None, false, |_| ());
        answers(&socket).await;
        let second = launch(config(folder.path(), &[]), None, false, |_| panic!("started"));
        let error = second.task.await.expect("no panic").expect_err("refused").to_string();
        assert!(error.contains("already runs on"), "{error}");
        // With a state folder of its own, but the same socket.
        let other = tempfile::tempdir().expect("temp dir");
        let flags = ["--socket", socket.to_str().expect("text")];
        let third = launch(config(other.path(), &flags), None, false, |_| panic!("started"));
        let error = third.task.await.expect("no panic").expect_err("refused").to_string();
        assert!(error.contains("another vmforkd answers"), "{error}");
        answers(&socket).await;
        drop(first.end);
        first.task.await.expect("no panic").expect("no error");
    })
    .await;
}

#[tokio::test]
async fn a_restarted_daemon_knows_what_was_lost_and_what_was_stopped() {
    let folder = tempfile::tempdir().expect("temp dir");
    let socket = folder.path().join("vmforkd.sock");
    locally(async {
        let first = launch(config(folder.path(), &[]), None, true, |parts| {
            parts.state.vm_created(vm("aa")).expect("append");
            parts.state.vm_created(vm("bb")).expect("append");
            parts.state.vm_ended("aa");
        });
        answers(&socket).await;
        // Twice: it must not wait for a host that never ends.
        first.end.send("once").await.expect("it listens");
        first.end.send("twice").await.expect("it listens");
        timeout(LONG, first.task).await.expect("in time").expect("no panic").expect("no error");
        assert!(!first.has_shut_down.load(SeqCst));

        let (lost_tx, mut lost_rx) = mpsc::channel(1);
        let second = launch(config(folder.path(), &[]), None, false, move |parts| {
            lost_tx.try_send(parts.state.lost()).expect("room");
        });
        let lost = timeout(LONG, lost_rx.recv()).await.expect("in time").expect("sent");
        assert_eq!(lost, [vm("bb")]);
        drop(second.end);
        second.task.await.expect("no panic").expect("no error");
    })
    .await;
}
