//! The real `vmfork` against a fake daemon: documents, tables, errors, exit statuses.

use crate::support::{FakeDaemon, run};

#[test]
fn every_document_parses_and_carries_its_fields() {
    let daemon = FakeDaemon::start();
    let fork = daemon.json(&["fork", "web", "-n", "3"]);
    assert_eq!(fork["granted"], 3);
    assert_eq!(fork["pause_ms"], 3.42);
    for clone in fork["clones"].as_array().unwrap() {
        assert!(clone["vmid"].is_u64() && clone["name"].is_string() && clone["ready_ms"].is_f64());
        assert_eq!(clone["state"], "running");
    }
    let inspect = daemon.json(&["inspect", "web"]);
    assert_eq!(inspect["name"], "web");
    assert_eq!(inspect["memory"]["cache_present_pages"], 2);
    assert_eq!(inspect["memory"]["faults"]["fetch"], 7);
    assert_eq!(inspect["memory"]["source"]["frozen"], 10);
    assert_eq!(daemon.json(&["ps", "-a"])["vms"][1]["parent"], "web");
    assert!(daemon.seen.has(r#"list {"all":"true"}"#));
    assert_eq!(daemon.json(&["tree"])["families"][0]["children"][0]["vm"]["name"], "web.1");
    assert_eq!(daemon.json(&["run", "debian", "--name", "a"])["name"], "a");
    assert_eq!(daemon.json(&["version"])["daemon"]["api"], "1");
    assert_eq!(daemon.json(&["kill", "web", "nope"])["results"][1]["error"]["code"], "not_found");
    assert_eq!(daemon.json(&["rm", "web"])["results"][0]["done"], true);
    assert_eq!(daemon.json(&["image", "ls"])["images"][0]["vms"], 2);
    assert_eq!(daemon.json(&["doctor"])["checks"][0]["name"], "daemon");
    assert_eq!(daemon.json(&["top", "--once"])["vms"][0]["faults_per_s"], 0.0);
    let status = daemon.json(&["daemon", "status"]);
    assert_eq!(status["running"], true);
    assert_eq!(status["pid"], std::process::id());
    let logs = daemon.run(&["logs", "web", "--json"]);
    let lines: Vec<serde_json::Value> =
        logs.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[2]["line"], "line 2");
    assert_eq!(lines[2]["schema"], "vmfork/1");
}

#[test]
fn a_fork_prints_a_row_for_each_clone_and_its_summary_apart() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["fork", "web", "-n", "3"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(
        ran.text(),
        "VM     VMID  STATE    READY\n\
         web.1     1  running  21 ms\n\
         web.2     2  running  22 ms\n\
         web.3     3  running  23 ms\n"
    );
    assert_eq!(ran.stderr, "Forked 3 of 3 in 31 ms, `web` paused 3.4 ms\n");
}

#[test]
fn a_fork_that_was_granted_in_part_fails_and_tells_each_error() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["fork", "full", "-n", "3"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.text().contains("full.2     2  running  22 ms\n"), "{ran:?}");
    assert!(
        ran.text().contains(
            "full.3     3  failed       -  start a clone: 512 MiB wanted, 100 MiB left\n"
        ),
        "{ran:?}"
    );
    assert_eq!(ran.stderr, "Forked 2 of 3 in 31 ms, `full` paused 3.4 ms\nhint: end some VMs\n");
}

#[test]
fn the_daemons_errors_read_as_in_the_house_style() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["fork", "nope", "-n", "1"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.text(), "");
    assert_eq!(
        ran.stderr,
        "error: fork `nope`\n  caused by: no VM named `nope` on this host\n\n\
         hint: `vmfork ps` lists the VMs that are here\n"
    );
    let ran = daemon.run(&["fork", "nope", "-n", "1", "--json"]);
    assert_eq!(ran.text(), "");
    let error: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!(error["error"]["code"], "not_found");
    assert_eq!(error["error"]["cause"], "no VM named `nope` on this host");
}

#[test]
fn requests_carry_what_the_flags_say() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&[
        "run",
        "debian",
        "--name",
        "web",
        "--memory",
        "2G",
        "--cpus",
        "2",
        "--accel",
        "tcg",
        "--timeout",
        "90s",
        "--disk",
        "data=blank:1M",
        "--root",
        "overlay",
        "--root-size",
        "64M",
        "--root-device",
        "block",
    ]);
    assert_eq!((ran.code, ran.text().as_str()), (Some(0), "web\n"), "{ran:?}");
    assert!(ran.stderr.starts_with("`web` is ready after 3.10 s"), "{ran:?}");
    assert!(
        daemon.seen.has(
            r#"run {"image":"debian","name":"web","memory_mib":2048,"cpus":2,"accel":"tcg","boot_timeout_ms":90000,"disks":[{"name":"data","source":{"type":"blank","size_bytes":1048576}}],"root":"overlay","root_bytes":67108864,"root_device":"block"}"#
        ),
        "{:?}",
        daemon.seen.requests
    );
    daemon.run(&["fork", "web", "--name", "a,b", "--all-or-nothing", "--timeout", "500ms"]);
    assert!(
        daemon.seen.has(
            r#"fork web {"count":2,"names":["a","b"],"all_or_nothing":true,"timeout_ms":500}"#
        )
    );
    daemon.run(&["kill", "web", "--grace", "10s", "--family"]);
    assert!(daemon.seen.has(r#"kill web {"grace_ms":10000,"family":true}"#));
    daemon.run(&["rm", "-f", "web"]);
    assert!(daemon.seen.has(r#"remove web {"force":"true"}"#));
}

#[test]
fn of_several_vms_each_is_tried_and_one_failure_fails() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["kill", "nope", "web"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("error: kill `nope`"), "{ran:?}");
    assert!(ran.stderr.contains("Killed `web`"), "{ran:?}");
    let ran = daemon.run(&["image", "rm", "debian", "other"]);
    assert_eq!(ran.code, Some(1));
    assert!(
        ran.stderr.contains("2 VMs use it") && ran.stderr.contains("Removed `other`"),
        "{ran:?}"
    );
}

#[test]
fn tables_have_no_colour_and_no_box_in_a_pipe() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["ps"]);
    assert_eq!(ran.code, Some(0));
    assert_eq!(
        ran.text(),
        "VM     PARENT  STATE    AGE  PRIVATE   SHARED  FAULTS\n\
         web    -       running   2m   38 MiB  474 MiB   9,812\n\
         web.1  web     running   2m   38 MiB  474 MiB   9,812\n"
    );
    assert_eq!(daemon.run(&["ps", "-q"]).text(), "web\nweb.1\n");
    let ran = daemon.run(&["tree"]);
    assert!(ran.text().contains("\n└─ web.1     1  running"), "{ran:?}");
    let ran = daemon.run(&["top", "--once"]);
    assert!(ran.text().contains("FAULTS/S") && !ran.text().contains('\x1b'), "{ran:?}");
    let ran = daemon.run(&["inspect", "web"]);
    assert!(ran.text().contains("  private          9,728 pages (38 MiB)\n"), "{ran:?}");
    assert!(ran.text().contains("2 of 3 clones in 31 ms, paused 3.4 ms, "), "{ran:?}");
}

#[test]
fn a_failed_check_fails_the_doctor_and_has_its_remedy_below() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["doctor"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let text = ran.text();
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| line.contains("permission denied")).expect("the check");
    assert!(lines[at].starts_with("failed   userfaultfd"), "{text}");
    assert!(lines[at + 1].trim().starts_with("remedy: run vmforkd as root"), "{text}");
    // The daemon's word on QEMU stands; ours is not added.
    assert_eq!(lines.iter().filter(|line| line.contains(" qemu ")).count(), 1, "{text}");
}

#[test]
fn misuse_is_status_2() {
    let daemon = FakeDaemon::start();
    for args in [
        &["frobnicate"][..],
        &["run"],
        &["run", "../x"],
        &["run", "debian", "--memory", "7"],
        &["run", "debian", "--disk", "data"],
        &["run", "debian", "--disk", "root=blank:1G"],
        &["run", "debian", "--disk", "a=blank:1G", "--disk", "a=blank:1G"],
        &["run", "debian", "--root-size", "1G"],
        &["run", "debian", "--root", "overlay", "--root-size", "much"],
        &["fork", "web", "-n", "2", "--name", "one"],
        &["cp", "a", "b"],
        &["exec", "web"],
        &["ps", "-q", "-v"],
    ] {
        let ran = daemon.run(args);
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        assert!(ran.stderr.starts_with("error: ") && ran.stdout.is_empty(), "{args:?}: {ran:?}");
    }
    let ran = daemon.run(&["console", "web", "--json"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains(r#""code":"bad_request""#), "{ran:?}");
    assert_eq!(daemon.run(&["--help"]).code, Some(0));
    assert_eq!(daemon.run(&["--version"]).code, Some(0));
}

#[test]
fn completions_are_made_for_each_shell() {
    let daemon = FakeDaemon::start();
    for shell in ["bash", "zsh", "fish"] {
        let ran = daemon.run(&["completion", shell]);
        assert_eq!(ran.code, Some(0));
        assert!(ran.text().contains("all-or-nothing"), "{shell}");
        assert!(!ran.text().contains("__detached"), "{shell}");
    }
}

#[test]
fn verbose_says_what_is_asked_and_quiet_nothing_besides_data() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["-v", "ps"]);
    assert!(ran.stderr.contains("GET /v1/vms: 200 OK in "), "{ran:?}");
    assert_eq!(daemon.run(&["-q", "run", "debian"]).stderr, "");
}

#[test]
fn a_console_without_a_terminal_passes_bytes_through() {
    let daemon = FakeDaemon::start();
    let ran = run(daemon.command(&["console", "web"]), b"hi\x1d bye\n");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.text(), "login: hi\x1d bye\n");
}

#[test]
fn hosts_that_do_not_answer_are_named_apart_from_the_document() {
    let daemon = FakeDaemon::start();
    let commands: [&[&str]; 4] =
        [&["ps"], &["tree"], &["--json", "ps"], &["kill", "--family", "web"]];
    for args in commands {
        *daemon.seen.missing.lock().unwrap() = None;
        let whole = daemon.run(args);
        assert!(!whole.stderr.contains("warning"), "{args:?}: {whole:?}");
        *daemon.seen.missing.lock().unwrap() = Some("h2,h3");
        let part = daemon.run(args);
        assert_eq!(part.code, Some(0), "{args:?}: {part:?}");
        let warnings: Vec<_> = part.stderr.lines().filter(|it| it.contains("warning")).collect();
        assert_eq!(warnings.len(), 1, "{args:?}: {part:?}");
        assert!(warnings[0].starts_with("warning: no reply from h2, h3: "), "{args:?}: {part:?}");
        if !args.contains(&"--json") {
            assert_eq!(part.text(), whole.text(), "{args:?}");
        } else {
            let vms = |text: &str| {
                serde_json::from_str::<serde_json::Value>(text).unwrap()["vms"].clone()
            };
            assert_eq!(vms(&part.text())[0]["name"], vms(&whole.text())[0]["name"]);
        }
    }
}

#[test]
fn a_tree_names_the_host_of_each_vm_in_a_cluster() {
    let daemon = FakeDaemon::start();
    let alone = daemon.run(&["tree"]);
    assert!(!alone.text().contains("HOST"), "{alone:?}");
    *daemon.seen.is_member.lock().unwrap() = true;
    let ran = daemon.run(&["tree"]);
    let text = ran.text();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    assert!(lines[0].ends_with("HOST"), "{ran:?}");
    assert!(lines[1].starts_with("web ") && lines[1].ends_with(" h1"), "{ran:?}");
    assert!(lines[2].starts_with("└─ web.1 ") && lines[2].ends_with(" h2"), "{ran:?}");
    let document = daemon.json(&["tree"]);
    assert_eq!(document["families"][0]["vm"]["host"], "h1");
    assert_eq!(document["families"][0]["children"][0]["vm"]["host"], "h2");
}

#[test]
fn a_poor_name_of_a_host_is_warned_of() {
    let daemon = FakeDaemon::start();
    let init = ["cluster", "init", "--address", "10.0.0.1:7072"];
    let join = ["cluster", "join", "TOKEN", "--address", "10.0.0.1:7072"];
    for (args, name, warning) in [
        (&init[..], None, Some("is `debian`, a name that many hosts have")),
        (&init, Some("VM"), Some("is `VM`, a name that many hosts have")),
        (&init, Some("h1"), None),
        (&join, None, Some("is `localhost.localdomain`, a name that many hosts have")),
        (&join, Some("h1"), Some("is `h1`, the name of another member too")),
        (&join, Some("h3"), None),
    ] {
        let named = name.map_or_else(Vec::new, |name| vec!["--name", name]);
        let ran = daemon.run(&[args, &named].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(name.is_none_or(|name| ran.text().contains(name)), "{ran:?}");
        let warned = warning.is_some_and(|text| {
            ran.stderr.contains(&format!("warning: the name of this host in the cluster {text}"))
                && ran.stderr.contains("--name NAME")
        });
        assert_eq!(warned, warning.is_some(), "{ran:?}");
        assert_eq!(ran.stderr.contains("warning"), warning.is_some(), "{ran:?}");
    }
}
