//! `vmfork events` against a fake daemon: connections that break, and what is lost.

use crate::support::FakeDaemon;

#[test]
fn events_go_on_with_the_last_cursor_after_a_connection_broke() {
    let daemon = FakeDaemon::start();
    let ran =
        daemon.run(&["events", "--no-follow", "--kind", "vm.started,vm.ended", "--vm", "web"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(
        ran.text(),
        "2025-11-25T07:29:59.123Z  vm.started        a\n\
         2025-11-25T07:29:59.123Z  vm.started        c\n"
    );
    assert_eq!(ran.stderr, "warning: 5 events lost: they were not read in time\n");
    let seen = daemon.seen.requests.lock().unwrap().clone();
    assert_eq!(
        seen,
        [
            "events kind=vm.started%2Cvm.ended&vm=web&follow=false",
            "events after=0000000000000abc-2&kind=vm.started%2Cvm.ended&vm=web&follow=false",
        ]
    );
}

#[test]
fn each_event_is_a_document_of_one_line_and_so_is_a_gap() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["events", "--json", "--no-follow"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let documents: Vec<serde_json::Value> =
        ran.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let words: Vec<_> = documents.iter().map(|document| document["kind"].as_str()).collect();
    assert_eq!(words, [Some("vm.started"), Some("gap"), Some("vm.started")]);
    assert_eq!((&documents[1]["lost"], &documents[1]["schema"]), (&5.into(), &"vmfork/1".into()));
    assert_eq!(documents[2]["cursor"], "0000000000000abc-8");
    assert!(ran.stderr.contains("5 events lost"), "{ran:?}");
}

#[test]
fn what_the_daemon_refuses_ends_the_command() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["events", "--after", "bad"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("`bad` is not a cursor"), "{ran:?}");
    let ran = daemon.run(&["events", "--kind", "vm.frozen"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("vm.started, vm.forked"), "{ran:?}");
}
