//! Programs, files and the life of a link, against a guest that the test plays.

mod agent_fake;

use std::time::Duration;

use agent_fake::{Bench, SOON, bench};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmfork_agent_proto::{
    FileInfo, Firstboot, Kind, PROTOCOL_VERSION, RequestError, ToGuest, ToHost, WINDOW_BYTES,
};
use vmfork_api::{ErrorBody, ErrorCode, ExecRequest};
use vmfork_control::{ExecInput, ExecOutput};
use vmfork_guest_link::agent::{CloseReason, HelloRequest, LinkError};

fn command(argv: &[&str]) -> ExecRequest {
    ExecRequest {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        ..ExecRequest::default()
    }
}

fn hello_request() -> HelloRequest {
    HelloRequest { name: "web".into(), machine_id: "0".repeat(32), entropy: "0".repeat(128) }
}

fn hello_answer(protocol: u32) -> ToHost {
    let (agent_version, kernel) = ("0.1.0".to_owned(), "6.1".to_owned());
    let (firstboot, pmem_root) = (None, false);
    ToHost::Hello { protocol, agent_version, kernel, cpus: 2, firstboot, pmem_root }
}

async fn next(output: &mut mpsc::Receiver<ExecOutput>) -> ExecOutput {
    timeout(SOON, output.recv()).await.expect("in time").expect("output")
}

#[tokio::test]
async fn hello_is_said_again_until_the_guest_answers() {
    let Bench { link, mut agent, .. } = bench();
    let guest = tokio::spawn(async move {
        assert!(matches!(agent.message().await, (0, ToGuest::Hello { .. })));
        assert!(matches!(agent.message().await, (0, ToGuest::Hello { .. })));
        agent.say(0, &hello_answer(PROTOCOL_VERSION)).await;
        agent
    });
    let info = link.hello(hello_request(), SOON).await.expect("hello");
    assert_eq!((info.cpus, info.kernel.as_str()), (2, "6.1"));
    guest.await.expect("guest");
}

#[tokio::test]
async fn a_guest_is_ready_when_its_first_boot_command_has_ended() {
    let Bench { link, mut agent, .. } = bench();
    let said = |firstboot| match hello_answer(PROTOCOL_VERSION) {
        ToHost::Hello { protocol, agent_version, kernel, cpus, pmem_root, .. } => {
            let firstboot = Some(firstboot);
            ToHost::Hello { protocol, agent_version, kernel, cpus, firstboot, pmem_root }
        }
        other => other,
    };
    let guest = async {
        agent.message().await;
        agent.say(0, &said(Firstboot::Running)).await;
    };
    let (info, ()) = tokio::join!(link.hello(hello_request(), SOON), guest);
    assert!(!info.expect("hello").is_ready());
    let short = Duration::from_millis(30);
    assert!(matches!(link.ready(short).await, Err(LinkError::Timeout { .. })));
    let waiting = tokio::spawn({
        let link = link.clone();
        async move { link.ready(SOON).await }
    });
    agent.say(0, &said(Firstboot::Ended { exit_code: 3 })).await;
    let info = waiting.await.expect("waits").expect("ready");
    assert_eq!(info.firstboot, Some(Firstboot::Ended { exit_code: 3 }));
    // A later caller gets the answer at once.
    assert_eq!(link.ready(SOON).await, Ok(info));
}

#[tokio::test]
async fn another_protocol_and_a_silent_guest_are_errors_of_their_own() {
    let Bench { link, mut agent, .. } = bench();
    let guest = tokio::spawn(async move {
        agent.message().await;
        agent.say(0, &hello_answer(99)).await;
        agent
    });
    assert_eq!(link.hello(hello_request(), SOON).await, Err(LinkError::Version { agent: 99 }));
    let _agent = guest.await.expect("guest");
    let short = Duration::from_millis(30);
    let timed_out = LinkError::Timeout { what: "ping", after: short };
    assert_eq!(link.ping(short).await, Err(timed_out));
}

#[tokio::test]
async fn a_program_gets_its_input_and_gives_its_output_in_order() {
    let Bench { link, mut agent, .. } = bench();
    let guest = tokio::spawn(async move {
        let channel = agent.start_program(77).await;
        let mut stdin = Vec::new();
        loop {
            let frame = agent.frame().await;
            assert_eq!((frame.kind, frame.channel), (Kind::Stdin, channel));
            stdin.extend(frame.payload);
            if frame.end {
                break;
            }
        }
        assert_eq!(stdin, b"in");
        agent.stream(Kind::Stdout, channel, b"out", false).await;
        agent.stream(Kind::Stderr, channel, b"err", false).await;
        agent.exit_program(channel, 3).await;
        agent
    });
    let mut session = link.exec(command(&["cat"]), SOON).await.expect("exec");
    assert_eq!(session.pid, 77);
    session.input.send(ExecInput::Stdin(Bytes::from("in"))).await.expect("input");
    session.input.send(ExecInput::StdinEof).await.expect("input");
    assert!(matches!(next(&mut session.output).await, ExecOutput::Stdout(b) if b == "out"));
    assert!(matches!(next(&mut session.output).await, ExecOutput::Stderr(b) if b == "err"));
    assert!(matches!(next(&mut session.output).await, ExecOutput::Exited { exit_code: 3, .. }));
    assert!(timeout(SOON, session.output.recv()).await.expect("in time").is_none());
    let mut agent = guest.await.expect("guest");
    drop(session);
    agent.silence().await;
}

#[tokio::test]
async fn a_slow_consumer_stops_its_program_and_no_other() {
    let Bench { link, mut agent, .. } = bench();
    let (slow, channel) = tokio::join!(link.exec(command(&["yes"]), SOON), agent.start_program(1));
    let mut slow = slow.expect("exec");
    // A program that writes as long as it has credit, and counts what it gets.
    let mut credit = WINDOW_BYTES;
    let mut sent = 0u32;
    let piece = vec![b'y'; 16 * 1024];
    let piece_bytes = u32::try_from(piece.len()).expect("small");
    loop {
        while credit >= piece_bytes {
            agent.stream(Kind::Stdout, channel, &piece, false).await;
            credit -= piece_bytes;
            sent += piece_bytes;
        }
        let more = timeout(Duration::from_millis(100), agent.message()).await;
        let Ok((_, ToGuest::Credit { bytes, .. })) = more else { break };
        credit += bytes;
    }
    assert!(sent <= 3 * WINDOW_BYTES, "{sent} bytes went into nothing");

    let (quick, other) = tokio::join!(link.exec(command(&["id"]), SOON), agent.start_program(2));
    let mut quick = quick.expect("exec");
    agent.stream(Kind::Stdout, other, b"root", false).await;
    agent.exit_program(other, 0).await;
    assert!(matches!(next(&mut quick.output).await, ExecOutput::Stdout(b) if b == "root"));
    assert!(matches!(next(&mut quick.output).await, ExecOutput::Exited { .. }));

    agent.exit_program(channel, 0).await;
    let mut received = 0;
    loop {
        match next(&mut slow.output).await {
            ExecOutput::Stdout(bytes) => received += bytes.len(),
            ExecOutput::Exited { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(received, sent as usize);
}

#[tokio::test]
async fn input_waits_for_the_programs_credit() {
    let Bench { link, mut agent, .. } = bench();
    let (session, channel) =
        tokio::join!(link.exec(command(&["sleep"]), SOON), agent.start_program(1));
    let session = session.expect("exec");
    let total = 3 * WINDOW_BYTES as usize;
    let feeder = tokio::spawn(async move {
        session.input.send(ExecInput::Stdin(Bytes::from(vec![7; total]))).await.expect("input");
        session
    });
    let mut received = 0;
    while received < WINDOW_BYTES as usize {
        received += agent.frame().await.payload.len();
    }
    assert_eq!(received, WINDOW_BYTES as usize);
    agent.silence().await;
    let mut session = feeder.await.expect("feeder");
    while received < total {
        let credit = ToHost::Credit { kind: Kind::Stdin as u8, bytes: 1000 };
        agent.say(channel, &credit).await;
        received += agent.frame().await.payload.len();
    }
    assert_eq!(received, total);
    assert!(session.output.try_recv().is_err());
}

#[tokio::test]
async fn whatever_is_dropped_is_cancelled_in_the_guest() {
    let Bench { link, mut agent, .. } = bench();
    // The future of a program that has not started.
    let short = Duration::from_millis(40);
    let waited = link.exec(command(&["slow"]), short).await;
    assert!(matches!(waited, Err(LinkError::Timeout { .. })), "{waited:?}");
    let (channel, message) = agent.message().await;
    assert!(matches!(message, ToGuest::Exec { .. }));
    assert_eq!(agent.message().await, (channel, ToGuest::Cancel));
    // Late messages about it belong to no session.
    agent.say(channel, &ToHost::Started { pid: 9 }).await;
    agent.stream(Kind::Stdout, channel, b"late", false).await;

    let (session, channel) = tokio::join!(link.exec(command(&["a"]), SOON), agent.start_program(1));
    let mut session = session.expect("exec");
    drop(session.input);
    assert_eq!(agent.message().await, (channel, ToGuest::Cancel));
    assert!(matches!(next(&mut session.output).await, ExecOutput::Error(_)));

    let (session, channel) = tokio::join!(link.exec(command(&["b"]), SOON), agent.start_program(1));
    drop(session.expect("exec").output);
    assert_eq!(agent.message().await, (channel, ToGuest::Cancel));

    let (file, channel) = tokio::join!(link.read_file("/x", SOON), async {
        let (channel, _) = agent.message().await;
        agent.say(channel, &ToHost::File(FileInfo { mode: 0o644, size_bytes: 5 })).await;
        channel
    });
    drop(file.expect("file"));
    assert_eq!(agent.message().await, (channel, ToGuest::Cancel));
    agent.silence().await;
}

#[tokio::test]
async fn a_program_that_cant_start_says_why() {
    let Bench { link, mut agent, .. } = bench();
    let error = RequestError { errno: 2, message: "no such program: nope".to_owned() };
    let (session, ()) = tokio::join!(link.exec(command(&["nope"]), SOON), async {
        let (channel, _) = agent.message().await;
        agent.say(channel, &ToHost::Failed(error.clone())).await;
    });
    let failed = session.expect_err("no program");
    assert_eq!(failed, LinkError::Guest(error));
    assert_eq!(failed.to_body("run `nope`").code, ErrorCode::NotFound);
    let long = "x".repeat(70_000);
    let refused = link.exec(command(&["echo", &long]), SOON).await.expect_err("too long");
    assert_eq!(refused, LinkError::TooLong);
}

#[tokio::test]
async fn files_go_both_ways_whole_or_not_at_all() {
    let Bench { link, mut agent, .. } = bench();
    let whole: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
    let sent = whole.clone();
    let guest = tokio::spawn(async move {
        let (channel, message) = agent.message().await;
        assert!(matches!(message, ToGuest::ReadFile { path } if path == "/data"));
        let size_bytes = sent.len() as u64;
        agent.say(channel, &ToHost::File(FileInfo { mode: 0o600, size_bytes })).await;
        let mut credit = WINDOW_BYTES as usize;
        for piece in sent.chunks(30_000) {
            while credit < piece.len() {
                let (_, ToGuest::Credit { bytes, .. }) = agent.message().await else {
                    panic!("credit")
                };
                credit += bytes as usize;
            }
            credit -= piece.len();
            agent.stream(Kind::File, channel, piece, false).await;
        }
        agent.stream(Kind::File, channel, b"", true).await;
        agent
    });
    let mut file = link.read_file("/data", SOON).await.expect("file");
    assert_eq!((file.mode, file.size_bytes), (0o600, 1_000_000));
    let mut read = Vec::new();
    while let Some(bytes) = timeout(SOON, file.content.recv()).await.expect("in time") {
        read.extend_from_slice(&bytes.expect("content"));
    }
    assert!(read == whole);
    let mut agent = guest.await.expect("guest");

    // In, with an end.
    let (content_tx, content) = mpsc::channel(4);
    let writer = link.clone();
    let write = tokio::spawn(async move { writer.write_file("/new", 0o640, content, SOON).await });
    content_tx.send(Ok(Bytes::from(vec![1; 100_000]))).await.expect("content");
    drop(content_tx);
    let (channel, message) = agent.no_credit().await;
    assert_eq!(message, ToGuest::WriteFile { path: "/new".into(), mode: 0o640 });
    let mut bytes = 0;
    loop {
        let frame = agent.frame().await;
        bytes += frame.payload.len() as u64;
        if frame.end {
            break;
        }
    }
    agent.say(channel, &ToHost::Written { bytes }).await;
    assert_eq!(write.await.expect("task"), Ok(100_000));

    // In, given up by its source.
    let (content_tx, content) = mpsc::channel(4);
    let body = ErrorBody {
        code: ErrorCode::BadRequest,
        message: "upload ended early".into(),
        cause: None,
        remedy: None,
    };
    content_tx.send(Err(body.clone())).await.expect("content");
    let given_up = link.write_file("/new", 0o640, content, SOON).await;
    assert_eq!(given_up, Err(LinkError::Abandoned(body)));

    // In, refused by the guest while the source is slow.
    let (_content_tx, content) = mpsc::channel(4);
    let (refused, ()) = tokio::join!(link.write_file("/dir", 0o640, content, SOON), async {
        let (channel, message) = loop {
            match agent.no_credit().await {
                (_, ToGuest::Cancel) => {}
                (_, ToGuest::WriteFile { path, .. }) if path == "/new" => {}
                other => break other,
            }
        };
        assert!(matches!(message, ToGuest::WriteFile { .. }), "{message:?}");
        let error = RequestError { errno: 21, message: "is a folder".into() };
        agent.say(channel, &ToHost::Failed(error)).await;
    });
    assert!(matches!(refused, Err(LinkError::Guest(error)) if error.errno == 21));
}

#[tokio::test]
async fn the_end_of_the_guest_reaches_everybody_after_its_last_words() {
    let Bench { link, mut agent, .. } = bench();
    let (session, channel) = tokio::join!(link.exec(command(&["a"]), SOON), agent.start_program(1));
    let mut session = session.expect("exec");
    let asker = link.clone();
    let ping = tokio::spawn(async move { asker.ping(SOON).await });
    agent.message().await;
    agent.stream(Kind::Stdout, channel, b"bye", false).await;
    drop(agent);
    assert_eq!(timeout(SOON, link.closed()).await, Ok(CloseReason::Eof));
    assert_eq!(ping.await.expect("task"), Err(LinkError::Closed(CloseReason::Eof)));
    assert!(matches!(next(&mut session.output).await, ExecOutput::Stdout(b) if b == "bye"));
    assert!(matches!(next(&mut session.output).await, ExecOutput::Error(_)));
    assert!(timeout(SOON, session.output.recv()).await.expect("in time").is_none());
    assert_eq!(link.ping(SOON).await, Err(LinkError::Closed(CloseReason::Eof)));
    let again = link.exec(command(&["a"]), SOON).await.expect_err("closed");
    assert_eq!(again, LinkError::Closed(CloseReason::Eof));
}

#[tokio::test]
async fn a_link_without_a_holder_ends() {
    let Bench { link, mut agent, .. } = bench();
    let closed = link.closed_now();
    drop(link);
    assert_eq!(closed, None);
    let mut byte = [0];
    let read = tokio::io::AsyncReadExt::read(&mut agent.stream, &mut byte);
    assert_eq!(timeout(SOON, read).await.expect("in time").expect("read"), 0);
}

#[tokio::test]
async fn garbage_closes_the_link_with_a_reason() {
    let started =
        |channel| vmfork_agent_proto::encode_message(channel, &ToHost::Started { pid: 1 });
    let cases: [(&str, Vec<u8>); 7] = [
        ("at most 65536 are allowed", b"garbage garbage garbage".to_vec()),
        ("unknown kind 99", vec![1, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0]),
        ("can't be read", vmfork_agent_proto::encode(Kind::Message, 0, false, b"{\"type\":\"?\"}")),
        ("can't be read", vmfork_agent_proto::encode(Kind::Message, 0, false, &[0xff, 0, 1])),
        ("out of place", vmfork_agent_proto::encode(Kind::Stdin, 2, false, b"x")),
        ("out of place", started(3).expect("short")),
        (
            "out of place",
            vmfork_agent_proto::encode_message(0, &ToHost::Confirmed { fork: 1 }).expect("short"),
        ),
    ];
    for (expected, bytes) in cases {
        let Bench { link, mut agent, .. } = bench();
        agent.write(&bytes).await;
        let reason = timeout(SOON, link.closed()).await.expect("in time");
        assert!(matches!(reason, CloseReason::Protocol(_)), "{reason:?}");
        let broken = reason.to_string();
        assert!(broken.contains(expected), "{expected}: {broken}");
    }
}

#[tokio::test]
async fn a_program_that_ignores_its_window_closes_the_link() {
    let Bench { link, mut agent, .. } = bench();
    let (session, channel) =
        tokio::join!(link.exec(command(&["yes"]), SOON), agent.start_program(1));
    let _session = session.expect("exec");
    let flood = async {
        loop {
            let frame = vmfork_agent_proto::encode(Kind::Stdout, channel, false, &[0; 16 * 1024]);
            if tokio::io::AsyncWriteExt::write_all(&mut agent.stream, &frame).await.is_err() {
                break;
            }
        }
    };
    timeout(SOON, flood).await.expect("the flood is stopped");
    let reason = timeout(SOON, link.closed()).await.expect("in time");
    assert!(reason.to_string().contains("beyond its window"), "{reason}");
}
