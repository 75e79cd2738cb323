//! Programs: whole (`POST …/exec`) and streamed (WebSocket).

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures_util::SinkExt;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use vmfork_api::ErrorCode::BadRequest;

use crate::client::{Daemon, LONG, Ws, eventually, next, next_json};

const STREAM: &str = "/v1/vms/web/exec/stream";

fn decoded(value: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(value.as_str().expect("a string")).expect("base64")
}

async fn start(daemon: &Daemon, program: &str) -> Ws {
    let mut ws = daemon.web_socket(STREAM).await;
    say(&mut ws, json!({"type": "start", "argv": [program]})).await;
    assert_eq!(next_json(&mut ws).await, json!({"type": "started", "pid": 7}));
    ws
}

async fn say(ws: &mut Ws, message: Value) {
    ws.send(Message::text(message.to_string())).await.expect("send");
}

async fn closed(ws: &mut Ws) {
    match next(ws).await {
        Message::Close(Some(frame)) => assert_eq!(u16::from(frame.code), 1000),
        other => panic!("{other:?} where a close was due"),
    }
}

#[tokio::test]
async fn the_whole_output_and_the_exit_code_are_answered() {
    let daemon = Daemon::start().await;
    let reply = daemon.post("/v1/vms/web/exec", &json!({"argv": ["both"]})).await;
    assert_eq!(reply.status, 200);
    let reply = reply.json();
    assert_eq!(decoded(&reply["stdout_base64"]), b"out");
    assert_eq!(decoded(&reply["stderr_base64"]), b"err");
    assert_eq!((&reply["exit_code"], &reply["truncated"]), (&json!(0), &json!(false)));

    let reply = daemon.post("/v1/vms/web/exec", &json!({"argv": ["false"]})).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["exit_code"]), (200, &json!(1)));
}

#[tokio::test]
async fn standard_input_larger_than_every_buffer_comes_back() {
    let daemon = Daemon::start().await;
    let input: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 253) as u8).collect();
    let body = json!({"argv": ["cat"], "stdin_base64": BASE64_STANDARD.encode(&input)});
    let reply = daemon.post("/v1/vms/web/exec", &body).await;
    assert_eq!(reply.status, 200);
    assert!(decoded(&reply.json()["stdout_base64"]) == input);
}

#[tokio::test]
async fn output_is_cut_at_16_mib_and_says_so() {
    let daemon = Daemon::start().await;
    let reply = daemon.post("/v1/vms/web/exec", &json!({"argv": ["flood"]})).await.json();
    assert_eq!(reply["truncated"], json!(true));
    assert_eq!(decoded(&reply["stdout_base64"]).len(), 16 * 1024 * 1024);
    assert_eq!(daemon.fake.programs.produced_bytes.load(SeqCst), 64 * 1024 * 1024);
}

#[tokio::test]
async fn programs_are_killed_at_their_timeout() {
    let daemon = Daemon::start().await;
    let begun = Instant::now();
    let body = json!({"argv": ["sleep"], "timeout_ms": 50});
    let reply = daemon.post("/v1/vms/web/exec", &body).await.json();
    assert_eq!((&reply["timed_out"], &reply["exit_code"]), (&json!(true), &json!(137)));
    assert!(reply["duration_ms"].as_f64().expect("a number") >= 50.0);
    assert!(begun.elapsed() < Duration::from_secs(5));

    // And an agent that does not start it in time is not waited for.
    let body = json!({"argv": ["x"], "timeout_ms": 50});
    let reply = daemon.post("/v1/vms/hang/exec", &body).await;
    reply.refused(504, vmfork_api::ErrorCode::Timeout, "not started in time");
    assert_eq!(daemon.fake.waiting(), 0);
}

#[tokio::test]
async fn what_a_program_cannot_be_given_is_refused() {
    let daemon = Daemon::start().await;
    for (body, word) in [
        (json!({"argv": []}), "names no program"),
        (json!({"argv": ["a\0"]}), "NUL"),
        (json!({"argv": ["a"], "env": {"A=B": "c"}}), "environment variable"),
        (json!({"argv": ["a"], "stdin_base64": "§"}), "not base64"),
        (json!({"argv": ["a"], "tty": {"rows": 1, "cols": 1}}), "exec stream only"),
        (json!({"argv": ["a", "x".repeat(50_000)]}), "arguments and environment are"),
        (json!({"argv": ["a"], "timeout_ms": 999_999_999_999_u64}), "a day"),
    ] {
        daemon.post("/v1/vms/web/exec", &body).await.refused(400, BadRequest, word);
    }
    let reply = daemon.post("/v1/vms/web/exec", &json!({"argv": ["vanish"]})).await;
    reply.refused(502, vmfork_api::ErrorCode::Guest, "went away");
}

#[tokio::test]
async fn a_stream_carries_input_output_and_the_end() {
    let daemon = Daemon::start().await;
    let mut ws = start(&daemon, "cat").await;
    ws.send(Message::binary("hello")).await.expect("send");
    assert_eq!(next(&mut ws).await.into_data(), "\x01hello");
    say(&mut ws, json!({"type": "stdin_eof"})).await;
    let exited = json!({"type": "exited", "exit_code": 0, "signal": null});
    assert_eq!(next_json(&mut ws).await, exited);
    closed(&mut ws).await;

    let mut ws = start(&daemon, "both").await;
    assert_eq!(next(&mut ws).await.into_data(), "\x01out");
    assert_eq!(next(&mut ws).await.into_data(), "\x02err");
    assert_eq!(next_json(&mut ws).await, exited);
}

#[tokio::test]
async fn signals_and_sizes_reach_the_program() {
    let daemon = Daemon::start().await;
    let mut ws = start(&daemon, "sleep").await;
    say(&mut ws, json!({"type": "resize", "rows": 50, "cols": 132})).await;
    say(&mut ws, json!({"type": "signal", "signal": 2})).await;
    let exited = json!({"type": "exited", "exit_code": 130, "signal": 2});
    assert_eq!(next_json(&mut ws).await, exited);
    let inputs = daemon.fake.programs.inputs.lock().expect("lock").clone();
    assert_eq!(inputs, ["Resize { rows: 50, cols: 132 }", "signal 2"]);
}

#[tokio::test]
async fn a_stream_is_killed_at_its_timeout() {
    let daemon = Daemon::start().await;
    let mut ws = daemon.web_socket(STREAM).await;
    say(&mut ws, json!({"type": "start", "argv": ["sleep"], "timeout_ms": 50})).await;
    assert_eq!(next_json(&mut ws).await["type"], "started");
    let exited = json!({"type": "exited", "exit_code": 137, "signal": 9});
    assert_eq!(next_json(&mut ws).await, exited);
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_the_program_not_the_daemon() {
    let daemon = Daemon::start().await;
    let mut ws = start(&daemon, "flood").await;
    let produced = &daemon.fake.programs.produced_bytes;
    sleep(Duration::from_millis(300)).await;
    let held_back = produced.load(SeqCst);
    assert!(held_back < 8 * 1024 * 1024, "{held_back} bytes were taken with no reader");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(produced.load(SeqCst), held_back, "it went on with no reader");

    let mut bytes = 0;
    while let Message::Binary(chunk) = next(&mut ws).await {
        bytes += chunk.len() - 1;
    }
    assert_eq!(bytes, 64 * 1024 * 1024);
}

#[tokio::test]
async fn a_program_that_does_not_read_stops_the_client() {
    let daemon = Daemon::start().await;
    let mut ws = start(&daemon, "slow-reader").await;
    let block = vec![b'x'; 256 * 1024];
    let mut all = Box::pin(async {
        for _ in 0..64 {
            ws.send(Message::binary(block.clone())).await.expect("send");
        }
    });
    let early = timeout(Duration::from_millis(150), &mut all).await;
    assert!(early.is_err(), "16 MiB went nowhere");
    timeout(LONG, all).await.expect("in time");
    say(&mut ws, json!({"type": "stdin_eof"})).await;
    assert_eq!(next_json(&mut ws).await["exit_code"], 0);
    let programs = &daemon.fake.programs;
    assert_eq!(programs.taken_bytes.load(SeqCst), 16 * 1024 * 1024);
    assert!(programs.largest_stdin.load(SeqCst) <= 64 * 1024);
}

#[tokio::test]
async fn a_client_that_goes_away_is_a_hang_up() {
    let daemon = Daemon::start().await;
    let hangups = &daemon.fake.programs.hangups;
    // In silence, and while it is flooded.
    drop(start(&daemon, "sleep").await);
    eventually("the sleeper is hung up", || hangups.load(SeqCst) == 1).await;
    drop(start(&daemon, "flood").await);
    eventually("the flooder is hung up", || hangups.load(SeqCst) == 2).await;
    let mut ws = start(&daemon, "sleep").await;
    ws.close(None).await.expect("close");
    eventually("a close in good order, too", || hangups.load(SeqCst) == 3).await;

    // While it is only being started.
    let mut ws = daemon.web_socket("/v1/vms/hang/exec/stream").await;
    say(&mut ws, json!({"type": "start", "argv": ["x"]})).await;
    eventually("the start is awaited", || daemon.fake.waiting() == 1).await;
    drop(ws);
    eventually("the start is dropped", || daemon.fake.waiting() == 0).await;
}

#[tokio::test]
async fn messages_that_make_no_sense_are_answered_with_an_error() {
    let daemon = Daemon::start().await;
    for (first, word) in [
        (Message::binary("x"), "no `start`"),
        (Message::text("{"), "not what this stream takes"),
        (Message::text(r#"{"type":"stdin_eof"}"#), "no `start`"),
        (Message::text(r#"{"type":"start","argv":[]}"#), "names no program"),
        (Message::text(r#"{"type":"start","argv":["x"],"stdin_base64":""}"#), "`POST …/exec` only"),
        (Message::text(r#"{"type":"start","argv":["broken"]}"#), ""),
    ] {
        let mut ws = daemon.web_socket(STREAM).await;
        ws.send(first).await.expect("send");
        let mut answer = next_json(&mut ws).await;
        if answer["type"] == "started" {
            answer = next_json(&mut ws).await;
        }
        assert_eq!(answer["type"], "error");
        let message = answer["error"]["message"].as_str().expect("a message");
        assert!(message.contains(word), "`{message}` lacks `{word}`");
        closed(&mut ws).await;
    }
    for later in [
        json!({"type": "start", "argv": ["x"]}),
        json!({"type": "signal", "signal": 0}),
        json!({"type": "signal", "signal": 65}),
        json!({"type": "dance"}),
    ] {
        let mut ws = start(&daemon, "sleep").await;
        say(&mut ws, later).await;
        assert_eq!(next_json(&mut ws).await["error"]["code"], "bad_request");
        closed(&mut ws).await;
    }
    let mut ws = daemon.web_socket("/v1/vms/nope/exec/stream").await;
    say(&mut ws, json!({"type": "start", "argv": ["x"]})).await;
    assert_eq!(next_json(&mut ws).await["error"]["code"], "not_found");
}
