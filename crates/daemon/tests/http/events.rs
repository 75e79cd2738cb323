//! Streams of events: where they begin, what they lose, and how they end.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};
use vmfork_api::{ErrorCode, EventVm, Happening, VmEnd, VmState};

use crate::client::{Daemon, LONG};
use crate::fake::{EPOCH, EVENTS_MAX};

fn vm(name: &str) -> EventVm {
    EventVm {
        id: format!("id of {name}"),
        name: name.to_owned(),
        family: format!("id of {name}"),
        parent: None,
        snapshot: None,
    }
}

fn start(daemon: &Daemon, name: &str) {
    daemon.fake.events.tell(Happening::VmStarted { vm: vm(name) });
}

fn end(daemon: &Daemon, name: &str) {
    daemon.fake.events.tell(Happening::VmEnded {
        vm: vm(name),
        state: VmState::Exited,
        reason: "killed on request".to_owned(),
        end: VmEnd::Killed,
    });
}

fn cursor(seq: u64) -> String {
    format!("{EPOCH:016x}-{seq}")
}

/// A client that reads a stream block by block.
struct Reader {
    body: Incoming,
    text: String,
    /// The last `id:`, as a browser keeps it.
    last_id: String,
}

impl Reader {
    async fn open(daemon: &Daemon, query: &str) -> Self {
        Self::open_with(daemon, query, &[]).await
    }

    async fn open_with(daemon: &Daemon, query: &str, headers: &[(&str, &str)]) -> Self {
        let path = format!("/v1/events{query}");
        let answer = daemon.open_with("GET", &path, headers, "").await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let mut reader =
            Self { body: answer.into_body(), text: String::new(), last_id: String::new() };
        let first = reader.block().await.expect("how to reconnect");
        assert!(first.starts_with("retry: 1000"), "{first}");
        reader
    }

    /// Up to the next empty line; `None` at the end of the stream.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                if let Some(id) = block.lines().find_map(|line| line.strip_prefix("id: ")) {
                    id.clone_into(&mut self.last_id);
                }
                return Some(block);
            }
            let frame = self.body.frame().await?.expect("a whole body");
            let data = frame.into_data().expect("no trailers");
            self.text.push_str(std::str::from_utf8(&data).expect("text"));
        }
    }

    /// The next event. Its id is its cursor.
    async fn event(&mut self) -> Value {
        let block = timeout(LONG, self.block()).await.expect("in time").expect("more events");
        let data = block.lines().find_map(|line| line.strip_prefix("data: "));
        let event: Value =
            serde_json::from_str(data.unwrap_or_else(|| panic!("{block}"))).expect("JSON");
        assert_eq!(event["cursor"], self.last_id.as_str());
        event
    }

    /// Kind and VM of the next event.
    async fn next(&mut self) -> (String, String) {
        let event = self.event().await;
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (word(&event["kind"]), word(&event["vm"]["name"]))
    }

    async fn ends_here(mut self) {
        assert_eq!(timeout(LONG, self.block()).await.expect("in time"), None);
    }
}

fn is(kind: &str, vm: &str) -> (String, String) {
    (kind.to_owned(), vm.to_owned())
}

#[tokio::test]
async fn a_stream_without_a_cursor_begins_now_and_one_from_0_with_what_is_kept() {
    let daemon = Daemon::start().await;
    start(&daemon, "before");
    let mut now = Reader::open(&daemon, "").await;
    assert_eq!(now.last_id, cursor(1), "a client that loses its connection now resumes here");
    let mut all = Reader::open(&daemon, "?after=0").await;
    start(&daemon, "web");
    assert_eq!(now.next().await, is("vm.started", "web"));
    assert_eq!(all.next().await, is("vm.started", "before"));
    assert_eq!(all.next().await, is("vm.started", "web"));
    assert_eq!(all.last_id, cursor(2));
}

#[tokio::test]
async fn a_cursor_resumes_without_a_loss_and_without_a_repetition() {
    let daemon = Daemon::start().await;
    for n in 1..=10 {
        start(&daemon, &format!("vm{n}"));
    }
    let mut seen = Vec::new();
    let mut after = "0".to_owned();
    // A new connection for each few events, as clients that lose theirs.
    for how_many in [1, 2, 3, 4] {
        let mut reader = Reader::open(&daemon, &format!("?after={after}")).await;
        for _ in 0..how_many {
            seen.push(reader.next().await.1);
        }
        after = reader.last_id;
    }
    assert_eq!(seen, (1..=10).map(|n| format!("vm{n}")).collect::<Vec<_>>());
    // A browser keeps the address that it began with, and says more in a header.
    let last = [("last-event-id", after.as_str())];
    let mut reader = Reader::open_with(&daemon, "?after=0", &last).await;
    start(&daemon, "vm11");
    assert_eq!(reader.next().await, is("vm.started", "vm11"));
}

#[tokio::test]
async fn what_has_left_the_window_is_told_and_the_stream_continues() {
    let daemon = Daemon::start().await;
    for n in 1..=EVENTS_MAX + 7 {
        start(&daemon, &format!("vm{n}"));
    }
    let mut reader = Reader::open(&daemon, &format!("?after={}&kind=vm.ended", cursor(2))).await;
    let gap = reader.event().await;
    assert_eq!(
        (&gap["kind"], &gap["cause"], &gap["lost"]),
        (&json!("gap"), &json!("overflow"), &json!(5))
    );
    assert_eq!(reader.last_id, cursor(7), "the gap is not told again");
    end(&daemon, "vm1");
    assert_eq!(reader.next().await, is("vm.ended", "vm1"));
    // A stream from the start of the window has lost nothing that it asked for.
    let mut all = Reader::open(&daemon, "?after=0").await;
    assert_eq!(all.next().await, is("vm.started", "vm9"));
}

#[tokio::test]
async fn a_cursor_of_an_earlier_daemon_is_told_as_a_gap() {
    let daemon = Daemon::start().await;
    start(&daemon, "web");
    let mut reader = Reader::open(&daemon, "?after=0000000000000def-12345").await;
    let gap = reader.event().await;
    assert_eq!(
        (&gap["kind"], &gap["cause"], &gap["lost"]),
        (&json!("gap"), &json!("restarted"), &json!(0))
    );
    assert_eq!(reader.next().await, is("vm.started", "web"));
    let after = "?after=0000000000000def-0&follow=false";
    let mut reader = Reader::open(&daemon, after).await;
    assert_eq!(reader.next().await.0, "gap");
    assert_eq!(reader.next().await, is("vm.started", "web"));
    reader.ends_here().await;
}

#[tokio::test]
async fn a_filter_chooses_by_kind_and_by_vm() {
    let daemon = Daemon::start().await;
    for name in ["web", "db"] {
        start(&daemon, name);
        end(&daemon, name);
    }
    for (query, expected) in [
        ("vm=web", vec![is("vm.started", "web"), is("vm.ended", "web")]),
        ("kind=vm.ended", vec![is("vm.ended", "web"), is("vm.ended", "db")]),
        ("kind=vm.ended,host.gone&vm=db", vec![is("vm.ended", "db")]),
        ("kind=host.gone", vec![]),
    ] {
        let mut reader = Reader::open(&daemon, &format!("?follow=false&{query}")).await;
        for event in expected {
            assert_eq!(reader.next().await, event, "{query}");
        }
        reader.ends_here().await;
    }
}

#[tokio::test]
async fn what_is_there_is_told_whole_over_many_pages() {
    let daemon = Daemon::start().await;
    for n in 1..=EVENTS_MAX {
        start(&daemon, &format!("vm{n}"));
    }
    let mut reader = Reader::open(&daemon, "?after=0&follow=false").await;
    for n in 1..=EVENTS_MAX {
        assert_eq!(reader.next().await.1, format!("vm{n}"));
    }
    reader.ends_here().await;
    let nothing = format!("?after={}&follow=0", cursor(EVENTS_MAX as u64));
    Reader::open(&daemon, &nothing).await.ends_here().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_with_nothing_to_tell_shows_that_it_lives_and_where_it_is() {
    let daemon = Daemon::start().await;
    let mut reader = Reader::open(&daemon, "?kind=host.gone").await;
    let began = Instant::now();
    // An event that the filter leaves out is no sign of life. It moves the place.
    tokio::time::sleep(Duration::from_secs(10)).await;
    start(&daemon, "web");
    let block = reader.block().await.expect("a heartbeat");
    assert_eq!(block, format!(": heartbeat\nid: {}", cursor(1)));
    let first = began.elapsed();
    assert!((14..=16).contains(&first.as_secs()), "{first:?}");
    assert!(reader.block().await.expect("another").starts_with(": heartbeat"));
    assert!((29..=31).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_cursor_or_filter_that_can_not_be_is_refused_with_what_to_do() {
    let daemon = Daemon::start().await;
    start(&daemon, "web");
    for (query, why, remedy) in [
        ("?after=yesterday", "`yesterday` is not a cursor", "after=0"),
        ("?after=", "`` is not a cursor", "after=0"),
        ("?after=0000000000000abc-2", "is after 0000000000000abc-1, the newest", "after=0"),
        ("?kind=vm.frozen", "`vm.frozen` is no kind of event", "vm.started, vm.forked"),
        ("?kind=", "`` is no kind of event", "vm.started"),
        ("?vm=../x", "can't be the name of a VM", "a name is"),
        ("?follow=perhaps", "neither true nor false", "openapi"),
        ("?since=0", "unknown field", "openapi"),
    ] {
        let reply = daemon.get(&format!("/v1/events{query}")).await;
        reply.refused(400, ErrorCode::BadRequest, why);
        let told = reply.error().remedy.unwrap_or_default();
        assert!(told.contains(remedy), "{query}: {told}");
    }
    let headers = [("last-event-id", "17")];
    let answer = daemon.open_with("GET", "/v1/events", &headers, "").await;
    assert_eq!(answer.status(), 400);
}

#[tokio::test]
async fn a_stream_ends_in_order_when_the_daemon_stops() {
    let daemon = Daemon::start().await;
    let mut reader = Reader::open(&daemon, "").await;
    start(&daemon, "web");
    assert_eq!(reader.next().await, is("vm.started", "web"));
    daemon.stop.send_replace(true);
    reader.ends_here().await;
    timeout(LONG, daemon.served).await.expect("it ends").expect("in order");
}

#[tokio::test]
async fn streams_leave_connections_for_others_and_free_their_places() {
    let daemon = Daemon::start().await;
    let mut readers = Vec::new();
    for _ in 0..256 {
        readers.push(Reader::open(&daemon, "").await);
    }
    let reply = daemon.get("/v1/events?after=0").await;
    reply.refused(507, ErrorCode::NoCapacity, "256 streams of events are open");
    assert_eq!(daemon.get("/v1/version").await.status, 200);
    drop(readers.pop());
    timeout(LONG, async {
        while daemon.open("GET", "/v1/events", "").await.status() != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the place is free again");
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_no_event() {
    let daemon = Daemon::start().await;
    let mut reader = Reader::open(&daemon, "").await;
    let name = "x".repeat(40_000);
    for n in 1..=400 {
        start(&daemon, &name);
        if n == 90 {
            // The stream fills the buffers on the way, and is stuck.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }
    let (mut seen, mut lost) = (0, 0);
    while seen + lost < 400 {
        let event = reader.event().await;
        match event["kind"].as_str() {
            Some("gap") => lost += event["lost"].as_u64().expect("a number"),
            _ => seen += 1,
        }
    }
    assert_eq!(seen + lost, 400, "each is read, or told as lost");
    // The window has 100, a chunk two, and the buffers of both sides a megabyte.
    assert!(lost > 250, "{lost} of 400 lost: the stream kept what the window lacks");
}
