//! The client against a made-up QEMU on the other end of a socket pair.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::{OUTSTANDING_MAX, Qmp};
use crate::qmp::QmpError;

const SOON: Duration = Duration::from_secs(5);
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 1, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#;

struct FakeQemu {
    stream: BufReader<UnixStream>,
}

impl FakeQemu {
    async fn say(&mut self, line: &str) {
        let line = format!("{line}\r\n");
        self.stream.get_mut().write_all(line.as_bytes()).await.expect("client reads");
    }

    async fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.expect("client writes");
        serde_json::from_str(&line).expect("a command is one line of JSON")
    }

    async fn obey(&mut self, command: &str) {
        assert_eq!(self.hear().await["execute"], command);
        self.say(r#"{"return": {}}"#).await;
    }
}

async fn connected() -> (Qmp, FakeQemu) {
    let (ours, theirs) = StdUnixStream::pair().expect("socketpair");
    theirs.set_nonblocking(true).expect("nonblocking");
    let stream = UnixStream::from_std(theirs).expect("on a runtime");
    let mut fake = FakeQemu { stream: BufReader::new(stream) };
    let server = async {
        fake.say(GREETING).await;
        fake.obey("qmp_capabilities").await;
    };
    let (qmp, ()) = tokio::join!(Qmp::connect(OwnedFd::from(ours), SOON), server);
    (qmp.expect("greeted"), fake)
}

#[tokio::test]
async fn answers_go_to_their_commands_with_events_between() {
    let (qmp, mut fake) = connected().await;
    let mut events = qmp.events();
    assert_eq!(qmp.greeting().major, 7);
    let server = async {
        fake.obey("first").await;
        fake.say(r#"{"event": "NEVER_HEARD_OF", "data": {"x": 1}}"#).await;
        assert_eq!(fake.hear().await, json!({"execute": "second", "arguments": {"a": 1}}));
        fake.say(r#"{"error": {"class": "Novel", "desc": "won't"}}"#).await;
    };
    let client = async {
        assert_eq!(qmp.execute("first", None, SOON).await.expect("obeyed"), json!({}));
        let error = qmp.execute("second", Some(json!({"a": 1})), SOON).await.expect_err("refused");
        assert_eq!(error.to_string(), "QEMU refused `second`: won't");
    };
    tokio::join!(server, client);
    assert_eq!(events.recv().await.expect("kept").name, "NEVER_HEARD_OF");
}

#[tokio::test]
async fn a_late_answer_is_not_taken_for_the_next_commands() {
    let (qmp, mut fake) = connected().await;
    let error = qmp.execute("slow", None, Duration::from_millis(20)).await.expect_err("late");
    assert_eq!(error.to_string(), "QEMU did not answer `slow` within 20 ms");
    let server = async {
        fake.hear().await;
        fake.hear().await;
        fake.say(r#"{"return": "slow"}"#).await;
        fake.say(r#"{"return": "quick"}"#).await;
    };
    let (answer, ()) = tokio::join!(qmp.execute("quick", None, SOON), server);
    assert_eq!(answer.expect("answered"), json!("quick"));
}

#[tokio::test]
async fn everybody_hears_of_a_lost_connection() {
    let (qmp, fake) = connected().await;
    let many = async {
        let ask = |command| qmp.execute(command, None, SOON);
        let ((a, b), (c, d)) = tokio::join!(async { tokio::join!(ask("a"), ask("b")) }, async {
            tokio::join!(qmp.closed(), qmp.migration_end(SOON))
        });
        (a, b, c, d)
    };
    let ((a, b, reason, end), ()) = tokio::join!(many, async {
        tokio::task::yield_now().await;
        drop(fake);
    });
    for error in [a.expect_err("lost"), b.expect_err("lost"), end.expect_err("lost")] {
        assert!(error.is_lost(), "{error}");
    }
    assert!(!reason.is_empty() && !qmp.is_open());
    assert!(qmp.execute("later", None, SOON).await.expect_err("lost").is_lost());
}

#[tokio::test]
async fn garbage_ends_the_connection_with_its_reason() {
    let (qmp, mut fake) = connected().await;
    let (answer, ()) = tokio::join!(qmp.execute("a", None, SOON), fake.say("{]"));
    let text = answer.expect_err("lost").to_string();
    assert_eq!(text, "the connection to QEMU is lost: a QMP line is not JSON: \"{]\"");
}

#[tokio::test]
async fn commands_without_an_answer_pile_up_to_a_bound() {
    let (qmp, _fake) = connected().await;
    for _ in 0..OUTSTANDING_MAX {
        let error = qmp.execute("x", None, Duration::from_millis(1)).await;
        assert!(matches!(error, Err(QmpError::Timeout { .. })), "{error:?}");
    }
    let error = qmp.execute("x", None, SOON).await;
    assert!(matches!(error, Err(QmpError::Busy { .. })), "{error:?}");
}

#[tokio::test]
async fn cont_waits_for_a_migration_to_be_finalized() {
    let (qmp, mut fake) = connected().await;
    let server = async {
        for _ in 0..20 {
            fake.hear().await;
            fake.say(
                r#"{"error": {"class": "GenericError", "desc": "Migration is not finalized yet"}}"#,
            )
            .await;
        }
        fake.obey("cont").await;
    };
    let (answer, ()) = tokio::join!(qmp.cont(), server);
    answer.expect("continued at last");
}

#[tokio::test]
async fn a_failed_save_carries_qemus_words() {
    let (qmp, mut fake) = connected().await;
    let file = tempfile::tempfile().expect("temp file");
    let server = async {
        fake.obey("getfd").await;
        fake.obey("migrate").await;
        fake.say(r#"{"event": "MIGRATION", "data": {"status": "setup"}}"#).await;
        fake.say(r#"{"event": "MIGRATION", "data": {"status": "failed"}}"#).await;
        assert_eq!(fake.hear().await["execute"], "query-migrate");
        fake.say(r#"{"return": {"status": "failed", "error-desc": "disk full"}}"#).await;
    };
    let (answer, ()) = tokio::join!(qmp.save_state(std::os::fd::AsFd::as_fd(&file), SOON), server);
    let text = answer.expect_err("failed").to_string();
    assert_eq!(text, "QEMU could not save the device state: disk full");
}

#[tokio::test]
async fn a_save_that_hangs_is_cancelled() {
    let (qmp, mut fake) = connected().await;
    let file = tempfile::tempfile().expect("temp file");
    let server = async {
        fake.obey("getfd").await;
        fake.obey("migrate").await;
        fake.obey("migrate_cancel").await;
        fake.say(r#"{"event": "MIGRATION", "data": {"status": "cancelled"}}"#).await;
    };
    let save = qmp.save_state(std::os::fd::AsFd::as_fd(&file), Duration::from_millis(50));
    let (answer, ()) = tokio::join!(save, server);
    assert!(matches!(answer, Err(QmpError::Timeout { .. })), "{answer:?}");
}
