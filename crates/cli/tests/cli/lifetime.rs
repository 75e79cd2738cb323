//! `pause`, `resume` and `ttl` against a fake daemon.

use crate::support::FakeDaemon;

#[test]
fn each_vm_is_paused_or_resumed_and_one_failure_fails() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["pause", "nope", "web"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("error: pause `nope`"), "{ran:?}");
    assert!(ran.stderr.contains("Paused `web`"), "{ran:?}");
    let results = daemon.json(&["pause", "web"]);
    assert_eq!(results["results"][0]["vm"]["state"], "paused");
    let ran = daemon.run(&["resume", "web"]);
    assert!(ran.code == Some(0) && ran.stderr.contains("Resumed `web`"), "{ran:?}");
    assert!(daemon.seen.has("resume web"));
}

#[test]
fn a_bound_is_set_and_removed() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["ttl", "web", "1.5h"]);
    assert!(ran.code == Some(0) && ran.stderr.contains("`web` ends in 1h30m"), "{ran:?}");
    assert!(daemon.seen.has(r#"ttl web {"ttl_ms":5400000}"#));
    let ran = daemon.run(&["ttl", "web", "none"]);
    assert!(ran.stderr.contains("`web` does not end by itself"), "{ran:?}");
    assert!(daemon.seen.has(r#"ttl web {"ttl_ms":null}"#));
    daemon.json(&["fork", "web", "--ttl", "1d"]);
    let asked = daemon.seen.requests.lock().unwrap().join("\n");
    assert!(asked.contains(r#""ttl_ms":86400000"#), "{asked}");
    for bad in ["0", "366d", "often"] {
        let ran = daemon.run(&["ttl", "web", bad]);
        assert_eq!(ran.code, Some(2), "{ran:?}");
    }
}
