//! Forks and the fork API's requests, against a guest that the test plays.

mod agent_fake;

use std::time::Duration;

use agent_fake::{Bench, SOON, bench, bench_with, clone_bench, clone_bench_in, identity};
use bytes::Bytes;
use rustix::io::Errno;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use vmfork_agent_proto::{
    Kind, MessageInfo, RequestError, ToGuest, ToHost, WINDOW_BYTES, Worker, encode, encode_message,
};
use vmfork_api::ExecRequest;
use vmfork_control::{ExecInput, ExecOutput};
use vmfork_guest_link::agent::{
    CloseReason, GuestRequest, HostMail, Inheritance, LinkError, MailLimits, MailRoom, Message,
    RequestId,
};

fn command(word: &str) -> ExecRequest {
    ExecRequest { argv: vec![word.to_owned()], ..ExecRequest::default() }
}

#[tokio::test]
async fn between_prepare_and_continue_nothing_is_said() {
    let Bench { link, mut agent, .. } = bench();
    let (session, channel) = tokio::join!(link.exec(command("yes"), SOON), agent.start_program(1));
    let mut session = session.expect("exec");
    let preparer = link.clone();
    let prepare = tokio::spawn(async move { preparer.prepare(1, SOON).await });
    assert_eq!(agent.message().await, (0, ToGuest::Prepare { fork: 1 }));
    // Output goes on until the guest is prepared, and is passed on.
    agent.stream(Kind::Stdout, channel, &[b'x'; 40_000], false).await;
    agent.stream(Kind::Stdout, channel, &[b'x'; 40_000], false).await;
    agent.say(0, &ToHost::Prepared { fork: 1 }).await;
    let held = prepare.await.expect("task").expect("prepared");
    let mut bytes = 0;
    while bytes < 80_000 {
        match timeout(SOON, session.output.recv()).await.expect("in time") {
            Some(ExecOutput::Stdout(piece)) => bytes += piece.len(),
            other => panic!("{other:?}"),
        }
    }
    // Credit is due, a program is started, one is written to: all of it waits.
    let starter = link.clone();
    let start = tokio::spawn(async move { starter.exec(command("ls"), SOON).await });
    session.input.send(ExecInput::Stdin(Bytes::from("in"))).await.expect("input");
    assert_eq!(link.prepare(2, SOON).await.expect_err("held"), LinkError::Busy);
    agent.silence().await;
    assert!(held.is_intact());
    held.continue_();
    assert_eq!(agent.message().await, (0, ToGuest::Continue { fork: 1 }));
    let other = agent.start_program(2).await;
    assert_ne!(other, channel);
    assert_eq!(start.await.expect("task").expect("exec").pid, 2);
    // And again, by dropping this time.
    let (held, fork) = tokio::join!(link.prepare(2, SOON), async {
        loop {
            let frame = agent.frame().await;
            if frame.kind == Kind::Message
                && let Ok(ToGuest::Prepare { fork }) = serde_json::from_slice(&frame.payload)
            {
                agent.say(0, &ToHost::Prepared { fork }).await;
                break fork;
            }
        }
    });
    drop(held.expect("prepared"));
    assert_eq!(agent.no_credit().await, (0, ToGuest::Continue { fork }));
}

#[tokio::test]
async fn qemu_has_read_everything_when_the_freeze_may_begin() {
    let Bench { link, mut agent, .. } = bench();
    let preparer = link.clone();
    let prepare = tokio::spawn(async move { preparer.prepare(1, SOON).await });
    tokio::time::sleep(Duration::from_millis(30)).await;
    // A guest that answers before QEMU has emptied its side of the socket.
    agent.say(0, &ToHost::Prepared { fork: 1 }).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!prepare.is_finished());
    agent.message().await;
    prepare.await.expect("task").expect("prepared");
}

#[tokio::test]
async fn a_prepare_that_is_given_up_lets_the_guest_go_on() {
    let Bench { link, mut agent, .. } = bench();
    let short = Duration::from_millis(30);
    let late = link.prepare(1, short).await.expect_err("no answer");
    assert_eq!(late, LinkError::Timeout { what: "prepare", after: short });
    assert_eq!(agent.message().await, (0, ToGuest::Prepare { fork: 1 }));
    assert_eq!(agent.message().await, (0, ToGuest::Continue { fork: 1 }));
    agent.say(0, &ToHost::Prepared { fork: 1 }).await;
    let (held, _) = tokio::join!(link.prepare(2, SOON), agent.prepared());
    assert_eq!(held.expect("prepared").fork(), 2);
}

#[tokio::test]
async fn a_guest_that_speaks_while_held_spoils_the_freeze_and_not_the_link() {
    let Bench { link, mut agent, .. } = bench();
    let (held, _) = tokio::join!(link.prepare(1, SOON), agent.prepared());
    let held = held.expect("prepared");
    assert!(held.is_intact());
    agent.say(0, &ToHost::Pong { token: 5 }).await;
    timeout(SOON, async {
        while held.is_intact() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("noticed");
    held.continue_();
    assert_eq!(agent.message().await, (0, ToGuest::Continue { fork: 1 }));
    assert_eq!(link.closed_now(), None);
}

/// The inheritance of a parent that has run one program, and that program's channel.
async fn forked_parent() -> (Bench, Inheritance, u32) {
    let mut parent = bench();
    let Bench { link, agent, .. } = &mut parent;
    let (session, channel) = tokio::join!(link.exec(command("yes"), SOON), agent.start_program(1));
    let mut session = session.expect("exec");
    // Its session lives on: the test is about the clone.
    tokio::spawn(async move { while session.output.recv().await.is_some() {} });
    let (held, _) = tokio::join!(link.prepare(1, SOON), agent.prepared());
    let inheritance = held.expect("prepared").inheritance().clone();
    (parent, inheritance, channel)
}

#[tokio::test]
async fn a_clone_hears_nothing_before_it_has_confirmed_its_identity() {
    let (_parent, inheritance, inherited) = forked_parent().await;
    let Bench { link, mut agent, mut log, .. } = clone_bench(&inheritance);
    let starter = link.clone();
    let start = tokio::spawn(async move { starter.exec(command("id"), SOON).await });
    agent.silence().await;
    let namer = link.clone();
    let named = tokio::spawn(async move { namer.identity(identity(1, 3, 1), SOON).await });
    assert!(matches!(agent.message().await, (0, ToGuest::Identity(id)) if id.vmid == 3));
    agent.silence().await;
    agent.say(0, &ToHost::Confirmed { fork: 1 }).await;
    named.await.expect("task").expect("confirmed");
    let own = agent.start_program(9).await;
    assert!(own > inherited, "{own} was the parent's");
    let session = start.await.expect("task").expect("exec");
    assert_eq!(session.pid, 9);

    // What the parent's program prints here is logged and credited, and nothing it does is an
    // error.
    agent.stream(Kind::Stdout, inherited, b"from the clone", false).await;
    let credit = ToGuest::Credit { kind: Kind::Stdout as u8, bytes: 14 };
    assert_eq!(agent.message().await, (inherited, credit));
    let line = timeout(SOON, log.recv()).await.expect("in time").expect("log");
    assert_eq!(line, "from the clone");
    agent.stream(Kind::File, inherited, b"a transfer", false).await;
    assert_eq!(agent.message().await, (inherited, ToGuest::Cancel));
    agent.exit_program(inherited, 0).await;
    agent.say(7, &ToHost::Abandon).await;
    agent.say(inherited, &ToHost::Credit { kind: Kind::Stdin as u8, bytes: 3 }).await;
    agent.stream(Kind::Data, 5, b"a message half sent", false).await;
    let answerer = link.clone();
    let ping = tokio::spawn(async move { answerer.ping(SOON).await });
    let (_, ToGuest::Ping { token }) = agent.message().await else { panic!("ping") };
    agent.say(0, &ToHost::Pong { token }).await;
    ping.await.expect("task").expect("alive");
}

#[tokio::test]
async fn a_clone_that_refuses_or_does_not_answer_is_an_error() {
    let (_parent, inheritance, _) = forked_parent().await;
    let Bench { link, mut agent, .. } = clone_bench(&inheritance);
    let (refused, ()) = tokio::join!(link.identity(identity(1, 1, 1), SOON), async {
        agent.message().await;
        let message = "no random pool".to_owned();
        agent.say(0, &ToHost::Refused { fork: 1, message }).await;
    });
    let message = "no random pool".to_owned();
    assert_eq!(refused, Err(LinkError::Refused { message }));

    let Bench { link, agent: _agent, .. } = clone_bench(&inheritance);
    let short = Duration::from_millis(30);
    let silent = link.identity(identity(1, 1, 1), short).await;
    assert_eq!(silent, Err(LinkError::Timeout { what: "identity", after: short }));
}

#[tokio::test]
async fn a_log_that_is_full_loses_output_says_so_and_stops_no_program() {
    let inheritance = forked_parent().await.1;
    let bench = bench_with(Some(&inheritance), MailLimits::default(), 1);
    let Bench { link, mut agent, mut log, .. } = bench;
    let confirm = async {
        agent.message().await;
        agent.say(0, &ToHost::Confirmed { fork: 1 }).await;
    };
    tokio::join!(link.identity(identity(1, 1, 1), SOON), confirm).0.expect("confirmed");
    let mut log_text = Vec::new();
    for _ in 0..20 {
        agent.stream(Kind::Stderr, 2, b"line\n", false).await;
        assert!(matches!(agent.message().await, (2, ToGuest::Credit { bytes: 5, .. })));
    }
    log_text.extend(log.recv().await.expect("log"));
    agent.stream(Kind::Stderr, 2, b"line\n", false).await;
    agent.message().await;
    log_text.extend(timeout(SOON, log.recv()).await.expect("in time").expect("log"));
    let text = String::from_utf8(log_text).expect("text");
    assert_eq!(text, "line\n[95 bytes of output were dropped here]\n");
}

async fn next(requests: &mut tokio::sync::mpsc::Receiver<GuestRequest>) -> GuestRequest {
    timeout(SOON, requests.recv()).await.expect("in time").expect("request")
}

#[tokio::test]
async fn requests_are_answered_as_they_were_meant() {
    let Bench { link: _link, mut agent, mut requests, .. } = bench();
    agent.say(1, &ToHost::RequestTicket { count: 4, hierarchical: true }).await;
    match next(&mut requests).await {
        GuestRequest::RequestTicket { count: 4, hierarchical: true, reply } => reply.ticket(7, 3),
        other => panic!("{other:?}"),
    }
    assert_eq!(agent.message().await, (1, ToGuest::Ticket { ticket: 7, granted: 3 }));

    agent.say(3, &ToHost::Clone { ticket: 7 }).await;
    match next(&mut requests).await {
        GuestRequest::Clone { ticket: 7, reply } => reply.ok(3),
        other => panic!("{other:?}"),
    }
    assert_eq!(agent.message().await, (3, ToGuest::Ok { value: 3 }));

    agent.say(5, &ToHost::Join { ticket: 7 }).await;
    let workers =
        vec![Worker { vmid: 1, error: None }, Worker { vmid: 2, error: Some("killed".into()) }];
    match next(&mut requests).await {
        GuestRequest::Join { ticket: 7, reply } => reply.ended(workers.clone()),
        other => panic!("{other:?}"),
    }
    assert_eq!(agent.message().await, (5, ToGuest::Ended { workers }));

    agent.say(7, &ToHost::KillTicket { ticket: 8 }).await;
    match next(&mut requests).await {
        GuestRequest::KillTicket { ticket: 8, reply } => reply.error(Errno::STALE, "discarded"),
        other => panic!("{other:?}"),
    }
    let error = RequestError { errno: 116, message: "discarded".into() };
    assert_eq!(agent.message().await, (7, ToGuest::Error(error)));

    // A request that is never answered.
    agent.say(9, &ToHost::ExitClone { vmid: 1, error: None }).await;
    drop(next(&mut requests).await);
    assert!(matches!(agent.message().await, (9, ToGuest::Error(error)) if error.errno == 5));
}

#[tokio::test]
async fn a_list_of_workers_that_is_too_long_loses_its_words_first() {
    let Bench { link: _link, mut agent, mut requests, .. } = bench();
    agent.say(1, &ToHost::Join { ticket: 1 }).await;
    let GuestRequest::Join { reply, .. } = next(&mut requests).await else { panic!("join") };
    let error = Some("a long story ".repeat(20));
    reply.ended((1..=1000).map(|vmid| Worker { vmid, error: error.clone() }).collect());
    match agent.message().await {
        (1, ToGuest::Ended { workers }) => {
            assert_eq!(workers.len(), 1000);
            assert_eq!(workers[999].error.as_deref(), Some("failed"));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_message_of_any_size_reaches_the_program_that_receives() {
    let Bench { link: _link, mut agent, mut requests, .. } = bench();
    let body: Vec<u8> = (0..1_000_000u32).map(|i| (i % 253) as u8).collect();
    agent.say(1, &ToHost::Recv { ticket: 1, vmid: None }).await;
    let GuestRequest::Recv { ticket: 1, vmid: None, reply } = next(&mut requests).await else {
        panic!("recv")
    };
    reply.incoming(4, Message::new(body.clone()));
    let info = MessageInfo { vmid: 4, length_bytes: 1_000_000 };
    assert_eq!(agent.message().await, (1, ToGuest::Incoming(info)));
    let mut received = Vec::new();
    let mut credited = 0;
    loop {
        let frame = agent.frame().await;
        assert_eq!((frame.kind, frame.channel), (Kind::Data, 1));
        received.extend_from_slice(&frame.payload);
        assert!(received.len() - credited <= WINDOW_BYTES as usize);
        if frame.end {
            break;
        }
        if received.len() - credited == WINDOW_BYTES as usize {
            let credit = ToHost::Credit { kind: Kind::Data as u8, bytes: WINDOW_BYTES };
            agent.say(1, &credit).await;
            credited = received.len();
        }
    }
    assert!(received == body);
}

/// A clone whose workers are `vmid`, …, with its identity confirmed.
async fn worker_bench(vmid: u32, workers: u32, mail: MailLimits) -> Bench {
    let bench = bench_with(Some(&Inheritance::default()), mail, 4);
    confirmed(bench, vmid, workers).await
}

async fn confirmed(mut bench: Bench, vmid: u32, workers: u32) -> Bench {
    let Bench { link, agent, .. } = &mut bench;
    let (named, ()) = tokio::join!(link.identity(identity(1, vmid, workers), SOON), async {
        agent.message().await;
        agent.say(0, &ToHost::Confirmed { fork: 1 }).await;
    });
    named.expect("confirmed");
    bench
}

#[tokio::test]
async fn messages_come_whole_and_wait_in_the_guest_when_the_host_holds_enough() {
    let limit = 300_000;
    let mail = MailLimits { undelivered_bytes_max: limit, message_bytes_max: 2_000_000 };
    let Bench { link: _link, mut agent, mut requests, .. } = worker_bench(2, 1, mail).await;
    let window = WINDOW_BYTES as usize;
    // Longer than the limit, but the only one: it may come.
    let long = vec![1u8; 600_000];
    agent.say(1, &ToHost::Send { vmid: 2, length_bytes: 600_000 }).await;
    let mut sent = 0;
    let mut credit = window;
    while sent < long.len() {
        let bytes = credit.min(long.len() - sent).min(16_000);
        agent.stream(Kind::Data, 1, &long[sent..sent + bytes], sent + bytes == long.len()).await;
        (sent, credit) = (sent + bytes, credit - bytes);
        while credit == 0 && sent < long.len() {
            let (1, ToGuest::Credit { bytes, .. }) = agent.message().await else {
                panic!("credit")
            };
            credit += bytes as usize;
        }
    }
    let first = next(&mut requests).await;
    let GuestRequest::Send { vmid: 2, message, reply } = first else { panic!("send") };
    assert_eq!(message.length_bytes(), 600_000);
    assert!(message.pieces().iter().all(|piece| piece.iter().all(|byte| *byte == 1)));
    reply.ok(0);
    assert_eq!(agent.no_credit().await, (1, ToGuest::Ok { value: 0 }));

    // The next one gets its first window across and no further, until the first is delivered.
    agent.say(3, &ToHost::Send { vmid: 2, length_bytes: 280_000 }).await;
    for piece in vec![2u8; window].chunks(32 * 1024) {
        agent.stream(Kind::Data, 3, piece, false).await;
    }
    agent.silence().await;
    drop(message);
    let (3, ToGuest::Credit { bytes, .. }) = agent.message().await else { panic!("credit") };
    assert!(bytes as usize >= 280_000 - window);
    agent.stream(Kind::Data, 3, &vec![2; 280_000 - window], true).await;
    let GuestRequest::Send { message, reply, .. } = next(&mut requests).await else {
        panic!("send")
    };
    assert_eq!(message.length_bytes(), 280_000);
    drop(reply);
}

#[tokio::test]
async fn siblings_share_their_parents_room_and_wait_until_it_has_received() {
    let room = MailRoom::new(&HostMail::default(), 400_000);
    let inheritance = Inheritance::default();
    let mut first = confirmed(clone_bench_in(&inheritance, room.clone()), 1, 1).await;
    let mut second = confirmed(clone_bench_in(&inheritance, room), 2, 1).await;
    for (vmid, bench) in [(1, &mut first), (2, &mut second)] {
        bench.agent.say(1, &ToHost::Send { vmid, length_bytes: 300_000 }).await;
        for piece in vec![0u8; WINDOW_BYTES as usize].chunks(32 * 1024) {
            bench.agent.stream(Kind::Data, 1, piece, false).await;
        }
        if vmid == 1 {
            assert!(matches!(bench.agent.message().await, (1, ToGuest::Credit { .. })));
        } else {
            bench.agent.silence().await;
        }
    }
    let rest = vec![0; 300_000 - WINDOW_BYTES as usize];
    first.agent.stream(Kind::Data, 1, &rest, true).await;
    let GuestRequest::Send { message, reply, .. } = next(&mut first.requests).await else {
        panic!("send")
    };
    reply.ok(0);
    // It survives its sender, and counts as long as it lies here.
    drop(first);
    second.agent.silence().await;
    drop(message);
    assert!(matches!(second.agent.message().await, (1, ToGuest::Credit { .. })));
}

#[tokio::test]
async fn a_message_for_which_the_host_has_no_room_is_refused() {
    let room = MailRoom::new(&HostMail::new(1000), 400_000);
    let bench = clone_bench_in(&Inheritance::default(), room);
    let Bench { link: _link, mut agent, mut requests, .. } = confirmed(bench, 1, 1).await;
    agent.say(1, &ToHost::Send { vmid: 1, length_bytes: 2000 }).await;
    agent.stream(Kind::Data, 1, &[0; 2000], true).await;
    let (1, ToGuest::Error(error)) = agent.message().await else { panic!("error") };
    assert_eq!(error.errno, Errno::NOMEM.raw_os_error());
    agent.say(3, &ToHost::Send { vmid: 1, length_bytes: 500 }).await;
    agent.stream(Kind::Data, 3, &[0; 500], true).await;
    assert!(matches!(next(&mut requests).await, GuestRequest::Send { vmid: 1, .. }));
}

#[tokio::test]
async fn messages_that_cant_be_are_refused_and_leave_nothing_behind() {
    let mail = MailLimits { undelivered_bytes_max: 1000, message_bytes_max: 2000 };
    let Bench { link: _link, mut agent, mut requests, .. } = worker_bench(2, 2, mail).await;
    let cases = [(4, 1, Errno::INVAL), (1, 1, Errno::INVAL), (3, 2001, Errno::MSGSIZE)];
    for (channel, (vmid, length_bytes, errno)) in (1u32..).step_by(2).zip(cases) {
        agent.say(channel, &ToHost::Send { vmid, length_bytes }).await;
        agent.stream(Kind::Data, channel, b"x", true).await;
        let (answered, ToGuest::Error(error)) = agent.message().await else { panic!("error") };
        assert_eq!((answered, error.errno), (channel, errno.raw_os_error()));
    }
    // Longer or shorter than announced.
    for (channel, bytes) in [(11, &b"abc"[..]), (13, b"a")] {
        agent.say(channel, &ToHost::Send { vmid: 3, length_bytes: 2 }).await;
        agent.stream(Kind::Data, channel, bytes, true).await;
        assert!(matches!(agent.message().await, (_, ToGuest::Error(error)) if error.errno == 22));
    }
    // Given up halfway: the worker's allowance is free again.
    for channel in (21..61).step_by(2) {
        agent.say(channel, &ToHost::Send { vmid: 2, length_bytes: 1500 }).await;
        agent.stream(Kind::Data, channel, &[0; 700], false).await;
        agent.say(channel, &ToHost::Abandon).await;
    }
    agent.say(61, &ToHost::Send { vmid: 2, length_bytes: 0 }).await;
    agent.stream(Kind::Data, 61, b"", true).await;
    let GuestRequest::Send { vmid: 2, message, reply } = next(&mut requests).await else {
        panic!("send")
    };
    assert_eq!((message.length_bytes(), reply.id()), (0, RequestId(61)));
}

#[tokio::test]
async fn abandoned_requests_are_taken_back_or_told() {
    let Bench { link: _link, mut agent, mut requests, .. } = bench();
    agent.say(1, &ToHost::Join { ticket: 1 }).await;
    let join = next(&mut requests).await;
    // Five more: four fill the channel, the fifth waits behind it, and is taken back there.
    for channel in (3..13).step_by(2) {
        agent.say(channel, &ToHost::Join { ticket: 1 }).await;
    }
    agent.say(11, &ToHost::Abandon).await;
    agent.say(1, &ToHost::Abandon).await;
    agent.say(13, &ToHost::KillTicket { ticket: 2 }).await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    let mut seen = Vec::new();
    let mut abandoned = Vec::new();
    loop {
        let request = next(&mut requests).await;
        seen.push(request.id().0);
        match request {
            GuestRequest::Abandon { request } => abandoned.push(request.0),
            GuestRequest::KillTicket { reply, .. } => break reply.ok(1),
            GuestRequest::Join { reply, .. } => reply.ok(0),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((seen, abandoned), (vec![3, 5, 7, 9, 1, 13], vec![1]));
    // An answer without a waiter goes nowhere.
    drop(join);
    for channel in [3, 5, 7, 9] {
        assert_eq!(agent.message().await, (channel, ToGuest::Ok { value: 0 }));
    }
    assert_eq!(agent.message().await, (13, ToGuest::Ok { value: 1 }));
    agent.silence().await;
}

#[tokio::test]
async fn a_flood_of_requests_is_held_back_or_ends_the_link() {
    let Bench { link, mut agent, requests, .. } = bench();
    // No consumer takes requests, and the guest reads no answers.
    let _requests = requests;
    let flood = async {
        let mut total = 0usize;
        for channel in (1u32..).step_by(2) {
            let join = ToHost::Recv { ticket: u64::MAX, vmid: None };
            let frame = encode_message(channel, &join).expect("short");
            if agent.stream.write_all(&frame).await.is_err() {
                break;
            }
            total += frame.len();
            assert!(total < 64 << 20, "the host takes everything");
        }
    };
    let stopped = timeout(Duration::from_secs(3), flood).await;
    if stopped.is_ok() {
        assert!(matches!(link.closed_now(), Some(CloseReason::Protocol(_))));
    }
    // Empty frames cost nothing and are nothing.
    let Bench { link, mut agent, .. } = bench();
    let (session, channel) = tokio::join!(link.exec(command("a"), SOON), agent.start_program(1));
    let mut session = session.expect("exec");
    let empty = encode(Kind::Stdout, channel, false, b"").repeat(1000);
    for _ in 0..50 {
        agent.write(&empty).await;
    }
    agent.exit_program(channel, 0).await;
    let only = timeout(SOON, session.output.recv()).await.expect("in time");
    assert!(matches!(only, Some(ExecOutput::Exited { .. })));
}
