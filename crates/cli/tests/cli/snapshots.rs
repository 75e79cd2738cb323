//! The real `vmfork` against a fake daemon: stored snapshots, and VMs started from them.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::sync::atomic::Ordering;

use rustix::process::Signal;

use crate::support::{FakeDaemon, exported, finish, run, send, wait_until};

#[test]
fn a_name_is_started_as_what_it_is() {
    let daemon = FakeDaemon::start();
    assert_eq!(daemon.run(&["run", "debian"]).text(), "debian-1\n");
    assert!(daemon.seen.has(r#"run {"image":"debian""#) && !daemon.seen.has("start "));
    let ran = daemon.run(&["run", "warm", "-n", "3"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(
        ran.text(),
        "VM      VMID  STATE    READY\n\
         warm.1     1  running  21 ms\n\
         warm.2     2  running  22 ms\n\
         warm.3     3  running  23 ms\n"
    );
    assert_eq!(ran.stderr, "Started 3 of 3 from `warm` in 31 ms, open after 4.2 ms\n");
    assert_eq!(daemon.run(&["-q", "run", "warm", "-n", "2"]).text(), "warm.1\nwarm.2\n");
    assert_eq!(daemon.json(&["run", "warm"])["open_ms"], 4.21);
}

#[test]
fn a_name_of_both_is_refused_until_a_switch_says_which() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["run", "both"]);
    assert_eq!((ran.code, ran.text().as_str()), (Some(2), ""), "{ran:?}");
    assert_eq!(
        ran.stderr,
        "error: run: `both` is the name of an image and of a snapshot\n\n\
         hint: choose one with --image or --snapshot\n"
    );
    assert!(!daemon.seen.has("run {") && !daemon.seen.has("start both"));
    assert_eq!(daemon.run(&["run", "both", "--image"]).code, Some(0));
    assert!(daemon.seen.has(r#"run {"image":"both""#) && !daemon.seen.has("start both"));
    assert_eq!(daemon.run(&["run", "both", "--snapshot"]).code, Some(0));
    assert!(daemon.seen.has("start both"));
}

#[test]
fn options_of_the_other_kind_are_refused_once_the_kind_is_known() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["run", "warm", "--memory", "1G", "--accel", "tcg"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(
        ran.stderr.starts_with(
            "error: run: `warm` is a snapshot, but --memory and --accel are for images only"
        ),
        "{ran:?}"
    );
    let ran = daemon.run(&["run", "debian", "--prefetch", "none"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("`debian` is an image, but --prefetch is for snapshots only"));
    assert!(!daemon.seen.has("run {") && !daemon.seen.has("start "));
}

#[test]
fn a_name_of_neither_is_told_so_and_a_damaged_snapshot_is_not_taken_for_none() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["run", "gone"]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (
            Some(1),
            "error: run `gone`\n  caused by: there is no image `gone`\n\n\
             hint: list the names with `vmfork image ls` and `vmfork snapshot ls`\n"
        )
    );
    let ran = daemon.run(&["run", "torn"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("cut off at byte 17"), "{ran:?}");
    // No request was sent for it.
    assert!(!daemon.seen.has(r#"run {"image":"torn""#));
}

#[test]
fn start_requests_carry_what_the_flags_say() {
    let daemon = FakeDaemon::start();
    daemon.run(&[
        "run",
        "warm",
        "--name",
        "a,b",
        "--all-or-nothing",
        "--force",
        "--prefetch",
        "working-set",
        "--hydrate",
        "100",
        "--timeout",
        "500ms",
    ]);
    assert!(
        daemon.seen.has(
            r#"start warm {"count":2,"names":["a","b"],"all_or_nothing":true,"force":true,"prefetch":"working_set","hydrate_mib_per_s":100,"timeout_ms":500}"#
        ),
        "{:?}",
        daemon.seen.requests
    );
    daemon.run(&["run", "warm"]);
    assert!(daemon.seen.has(
        r#"start warm {"count":1,"names":null,"all_or_nothing":false,"force":false,"prefetch":"all","hydrate_mib_per_s":0,"timeout_ms":null}"#
    ));
}

#[test]
fn a_start_that_was_granted_in_part_fails_and_tells_each_error() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["run", "full", "-n", "3"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let row = "full.3     3  failed       -  start a VM: 512 MiB wanted, 100 MiB left\n";
    assert!(ran.text().contains(row), "{ran:?}");
    assert!(ran.stderr.ends_with("\nhint: end some VMs\n"), "{ran:?}");
    let ran = daemon.run(&["-q", "run", "full", "-n", "3"]);
    assert_eq!((ran.code, ran.text().as_str()), (Some(1), "full.1\nfull.2\n"), "{ran:?}");
    assert!(ran.stderr.contains("`full.3`: start a VM: 512 MiB wanted"), "{ran:?}");
}

#[test]
fn a_snapshot_is_taken_while_the_vm_runs_on_or_waited_for() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "create", "web", "long"]);
    assert_eq!((ran.code, ran.text().as_str()), (Some(0), ""), "{ran:?}");
    assert_eq!(
        ran.stderr,
        "Took snapshot `long` of `web`, paused 3.4 ms\n\
         It is being written: `vmfork snapshot ls` shows how far it is\n"
    );
    let ran = daemon.run(&["snapshot", "create", "web", "warm", "--wait"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.stderr.contains("`web` in ") && ran.stderr.contains(", paused 3.4 ms\n"),
        "{ran:?}"
    );
    assert!(
        ran.stderr.ends_with("Stored 210 MiB of 512 MiB as 64 MiB, 12.5 % of its memory\n"),
        "{ran:?}"
    );
    assert_eq!(daemon.json(&["snapshot", "create", "web", "warm"])["pause_ms"], 3.42);
    daemon.run(&[
        "snapshot",
        "create",
        "web",
        "odd",
        "--no-compression",
        "--full",
        "--keep-zero-pages",
        "--record",
        "0",
    ]);
    assert!(
        daemon.seen.has(
            r#"snapshot {"vm":"web","name":"odd","wait":false,"compression":"none","full":true,"disk_only":false,"keep_zero_pages":true,"record_ms":0}"#
        ),
        "{:?}",
        daemon.seen.requests
    );
    let ran = daemon.run(&["snapshot", "create", "web", "taken", "--wait"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(
        ran.stderr,
        "error: take snapshot `taken`\n  caused by: there is a snapshot named `taken` already\n\n\
         hint: choose another name\n"
    );
}

#[test]
fn ctrl_c_gives_up_what_is_waited_for_and_says_so() {
    let daemon = FakeDaemon::start();
    for (i, (args, said)) in [
        (
            &["snapshot", "create", "web", "long", "--wait"][..],
            "Cancelled snapshot `long`; `web` keeps running\n",
        ),
        (
            &["snapshot", "pull", "long", "s3://b/p", "--wait"],
            "Cancelled the pull of `long`; check it with `vmfork snapshot ls`\n",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let mut command = daemon.command(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until("the request has arrived", || {
            daemon.seen.has(if i == 0 { r#""wait":true,"compression""# } else { "pull long" })
        });
        send(child.id(), Signal::INT);
        let ran = finish(child);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(130), said), "{ran:?}");
        wait_until("the daemon has noticed", || {
            daemon.seen.abandoned.load(Ordering::SeqCst) == u64::try_from(i).unwrap() + 1
        });
    }
}

#[test]
fn snapshots_are_listed_with_how_far_they_are() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "ls"]);
    assert_eq!(
        ran.text(),
        "NAME  STATE         MEMORY  STORED  BASE  VMS  AGE\n\
         hot   ready        512 MiB  64 MiB  warm    2   2m\n\
         long  writing 42%  512 MiB       -  -       2   2m\n\
         torn  failed             -       -  -       0    -\n\
         warm  ready        512 MiB  64 MiB  -       2   2m\n"
    );
    assert_eq!(ran.stderr, "`torn`: its page table is cut off at byte 17\u{fffd}[2J\n");
    assert_eq!(daemon.run(&["-q", "snapshot", "ls"]).text(), "hot\nlong\ntorn\nwarm\n");
    let listed = daemon.json(&["snapshot", "ls"]);
    assert_eq!(listed["snapshots"][1]["progress"]["done_bytes"], 42 << 20);
    let ran = daemon.run(&["snapshot", "inspect", "hot"]);
    for line in [
        "base          warm\n",
        "deltas of it  hot\n",
        "paused for    3.4 ms\n",
        "taken on      QEMU 7.2.22, pc-q35-7.2, max\n",
        "chunks        of 64 pages, zstd\n",
        "own           53,760 pages (210 MiB)\n",
        "profile       512 pages (2 MiB) from 3 runs, one more is being recorded\n",
    ] {
        assert!(ran.text().contains(line), "{line:?} in {ran:?}");
    }
    assert_eq!(daemon.json(&["snapshot", "inspect", "hot"])["chunk_pages"], 64);
    let ran = daemon.run(&["snapshot", "inspect", "nope"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("no snapshot named `nope`"), "{ran:?}");
}

#[test]
fn a_vms_snapshot_is_a_column_only_where_there_is_one() {
    let daemon = FakeDaemon::start();
    assert!(!daemon.run(&["ps"]).text().contains("SNAPSHOT"));
    let ran = daemon.run(&["ps", "-a"]);
    assert!(ran.text().starts_with("VM      PARENT  STATE "), "{ran:?}");
    let rows: Vec<String> = ran.text().lines().map(str::to_owned).collect();
    assert!(rows[0].ends_with("  SNAPSHOT"), "{ran:?}");
    assert!(rows[1].ends_with("  -") && rows[3].ends_with("  warm"), "{ran:?}");
    let ran = daemon.run(&["inspect", "warm.1"]);
    assert!(ran.text().contains("\nsnapshot      warm\nvmid  "), "{ran:?}");
    assert!(ran.text().contains("  store faults     0 predicted, 0 remote\n"), "{ran:?}");
    assert!(!daemon.run(&["inspect", "web"]).text().contains("snapshot"));
}

#[test]
fn removal_goes_in_order_and_each_is_tried() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "rm", "warm", "nope", "hot"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("caused by: `hot` depends on it"), "{ran:?}");
    assert!(ran.stderr.contains("hint: --cascade removes `hot` too"), "{ran:?}");
    assert!(ran.stderr.contains("no snapshot named `nope`"), "{ran:?}");
    assert!(ran.stderr.ends_with("Removed `hot`, 64 MiB freed\n"), "{ran:?}");
    daemon.seen.requests.lock().unwrap().clear();
    // What has gone with another is not asked for again.
    let ran = daemon.run(&["snapshot", "rm", "--cascade", "warm", "hot"]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (Some(0), "Removed `warm` and `hot`, 128 MiB freed\n"),
        "{ran:?}"
    );
    assert!(daemon.seen.has(r#"remove snapshot warm {"cascade":"true"}"#));
    assert!(!daemon.seen.has("remove snapshot hot"));
    let results = &daemon.json(&["snapshot", "rm", "warm", "hot"])["results"];
    assert_eq!(results[0]["error"]["code"], "conflict");
    assert_eq!(results[1]["freed_bytes"], 64 << 20);
}

#[test]
fn damage_is_listed_and_fails() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "verify", "warm"]);
    assert_eq!((ran.code, ran.text().as_str()), (Some(0), ""), "{ran:?}");
    assert_eq!(ran.stderr, "`warm` is intact (64 MiB read, 840 chunks)\n");
    let ran = daemon.run(&["snapshot", "verify", "pulled"]);
    assert_eq!(ran.code, Some(0));
    let text = "`pulled` is intact as far as it has arrived (64 MiB read, 840 chunks)\n\
                12 chunks not checked: they have not arrived from the source of the pull\n";
    assert_eq!(ran.stderr, text);
    let ran = daemon.run(&["snapshot", "verify", "torn"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(
        ran.text(),
        "snapshot `torn` is damaged: chunk 7\u{fffd}: its hash is another\n\
         snapshot `torn` is damaged: chunk 9\u{fffd}: its hash is another\n"
    );
    assert_eq!(
        ran.stderr,
        "`torn` is damaged in 2 places (64 MiB read, 840 chunks)\nhint: pull it again\n"
    );
    let ran = daemon.run(&["snapshot", "verify", "torn", "--json"]);
    assert_eq!(ran.code, Some(1));
    let reply: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(reply["damage"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_delta_is_made_whole() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "flatten", "hot"]);
    assert_eq!(
        ran.stderr,
        "`hot` depends on no other snapshot: 210 MiB of 512 MiB as 64 MiB, 12.5 % of its memory\n"
    );
    assert!(daemon.json(&["snapshot", "flatten", "hot"]).get("base").is_none());
}

#[test]
fn an_export_is_a_whole_file_that_only_its_owner_reads_or_none() {
    let daemon = FakeDaemon::start();
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("warm.snapshot");
    let ran = daemon.run(&["snapshot", "export", "warm", to.to_str().unwrap()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.stderr, format!("Exported `warm` to {} (2.9 MiB)\n", to.display()), "{ran:?}");
    assert!(std::fs::read(&to).unwrap() == exported());
    assert_eq!(std::fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o600);
    // A broken one leaves the old file, and nothing beside it.
    for name in ["torn", "nope"] {
        let ran = daemon.run(&["snapshot", "export", name, to.to_str().unwrap()]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(std::fs::read(&to).unwrap() == exported());
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let ran = daemon.run(&["snapshot", "export", "warm", folder.path().to_str().unwrap()]);
    assert!(ran.code == Some(1) && ran.stderr.contains("is a folder"), "{ran:?}");
    let document = daemon.json(&["snapshot", "export", "warm", to.to_str().unwrap()]);
    assert_eq!(document["size_bytes"], exported().len());
    // As a stream it is the bytes and nothing else.
    let ran = daemon.run(&["snapshot", "export", "warm", "-"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(ran.stdout == exported());
    assert_eq!(daemon.run(&["snapshot", "export", "torn", "-"]).code, Some(1));
}

#[test]
fn an_import_sends_the_file_or_standard_input_and_names_what_came() {
    let daemon = FakeDaemon::start();
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    std::fs::write(&from, exported()).unwrap();
    let ran = daemon.run(&["snapshot", "import", from.to_str().unwrap()]);
    assert_eq!(
        (ran.code, ran.stderr.as_str()),
        (Some(0), "Imported `warm` and `hot` (128 MiB)\n"),
        "{ran:?}"
    );
    assert!(daemon.seen.has("import 3000000 application/octet-stream {}"));
    let ran = run(daemon.command(&["snapshot", "import", "-", "--name", "mine"]), &exported());
    assert_eq!(ran.stderr, "Imported `warm` and `mine` (128 MiB)\n", "{ran:?}");
    let ran = run(daemon.command(&["snapshot", "import", "-", "--json"]), &exported());
    let document: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(document["snapshots"][0]["name"], "warm");
    let ran = run(daemon.command(&["snapshot", "import", "-"]), b"other");
    assert_eq!(ran.stderr, "- is already in the store\n", "{ran:?}");
    // Refused with most of it still on its way: the answer is told, not the broken pipe.
    let mut foreign = b"no snapshot".to_vec();
    foreign.resize(20 << 20, 0);
    std::fs::write(&from, foreign).unwrap();
    let ran = daemon.run(&["snapshot", "import", from.to_str().unwrap()]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("it begins with other bytes than an export"), "{ran:?}");
    let ran = daemon.run(&["snapshot", "import", "/no/such/file"]);
    assert!(ran.stderr.starts_with("error: read /no/such/file\n"), "{ran:?}");
}

#[test]
fn stores_are_named_by_url_or_by_a_path_from_the_root() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "push", "hot", "s3://bucket/prefix"]);
    assert_eq!(
        ran.stderr,
        "Pushed `warm` and `hot` to s3://bucket/prefix in 1.25 s, 64 MiB sent\n"
    );
    assert!(daemon.seen.has(r#"push hot {"location":"s3://bucket/prefix","wait":false}"#));
    let folder = tempfile::tempdir().unwrap();
    let mut command = daemon.command(&["snapshot", "pull", "hot", "store"]);
    command.current_dir(folder.path());
    let ran = run(command, b"");
    let location = folder.path().join("store");
    assert_eq!(
        ran.stderr,
        format!(
            "`hot` can be started; its pages still arrive from {}; see the progress with \
             `vmfork snapshot ls`\n",
            location.display()
        )
    );
    assert!(daemon.seen.has(&format!(r#"pull hot {{"location":"{}","#, location.display())));
    let ran = daemon.run(&["snapshot", "pull", "hot", "s3://b/p", "--wait"]);
    assert!(ran.stderr.starts_with("Pulled `hot`: 210 MiB of 512 MiB"), "{ran:?}");
    assert_eq!(daemon.json(&["snapshot", "pull", "hot", "s3://b/p"])["remote"], "s3://b/p");
    assert_eq!(daemon.json(&["snapshot", "push", "hot", "s3://b/p"])["sent_bytes"], 64 << 20);
}

#[test]
fn a_profile_is_shown_and_forgotten() {
    let daemon = FakeDaemon::start();
    let ran = daemon.run(&["snapshot", "profile", "show", "warm"]);
    assert!(ran.text().contains("0x10000    512       0.75         1.3 ms\n"), "{ran:?}");
    let document = daemon.json(&["snapshot", "profile", "show", "warm"]);
    assert_eq!(document["clusters"][0]["pages"], 512);
    let ran = daemon.run(&["snapshot", "profile", "reset", "warm"]);
    assert_eq!(ran.stderr, "Deleted the record of the pages that VMs of `warm` touch first\n");
    assert!(daemon.seen.has("reset warm"));
    assert_eq!(daemon.run(&["snapshot", "profile", "reset", "nope"]).code, Some(1));
}
