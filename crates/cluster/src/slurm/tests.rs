//! The allocator on commands that print what Slurm 22.05 printed; tests/slurm.rs has the real ones.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use proptest::prelude::*;

use super::parse::{Held, ParseError};
use super::*;
use crate::allocate::CommandError;

fn text(name: &str) -> &'static str {
    match name {
        "job" => include_str!("printed/job.txt"),
        "job-ended" => include_str!("printed/job-ended.txt"),
        "nodes" => include_str!("printed/nodes.txt"),
        "granted" => include_str!("printed/granted.txt"),
        "busy" => include_str!("printed/busy.txt"),
        "unknown" => include_str!("printed/unknown.txt"),
        other => panic!("no such text: {other}"),
    }
}

#[test]
fn what_slurm_printed_is_read() {
    let job = parse::job(text("job")).expect("real");
    let held = |node: &str, cpus| Held { node: node.to_owned(), cpus };
    assert_eq!(job.state, "RUNNING");
    assert_eq!(job.nodes, [held("h1", 4), held("h2", 4), held("h3", 1)]);
    let ended = parse::job(text("job-ended")).expect("real");
    assert_eq!((ended.state.as_str(), ended.reason.as_str()), ("CANCELLED", "None"));
    assert!(parse::holds_nodes(&job.state) && !parse::holds_nodes(&ended.state));

    let nodes = parse::nodes(text("nodes")).expect("real");
    let free: Vec<_> = nodes
        .iter()
        .map(|it| (it.name.as_str(), it.is_up, it.cpus_free, it.memory_free_mib))
        .collect();
    assert_eq!(free, [("h1", true, 0, 600), ("h2", false, 0, 600), ("h3", true, 3, 900)]);
    assert!(nodes.iter().all(|it| it.partitions == ["main"]));

    assert_eq!(parse::granted_job(text("granted")), Some(1));
    assert_eq!(parse::granted_job(text("busy")), None);
    assert!(parse::is_busy(text("busy")) && !parse::is_busy(text("granted")));
    assert!(parse::is_unknown_job(text("unknown")));
}

#[test]
fn lists_of_hosts_are_unfolded() {
    let list = |text| parse::host_list(text).expect("a list");
    assert_eq!(list("h1"), ["h1"]);
    assert_eq!(list("h[1-3,7],x"), ["h1", "h2", "h3", "h7", "x"]);
    assert_eq!(list("n[08-11]"), ["n08", "n09", "n10", "n11"]);
    assert_eq!(list("r[1-2]n[1-2].dc"), ["r1n1.dc", "r1n2.dc", "r2n1.dc", "r2n2.dc"]);
    for bad in [
        "",
        "a,",
        "h[",
        "h]",
        "h[1",
        "h[]",
        "h[a]",
        "h[2-1]",
        "h[[1]]",
        "h[1-]",
        "h[+1]",
        "h[1-999999999]",
        "h[0-999][0-999]",
        "h[99999999999]",
    ] {
        assert!(parse::host_list(bad).is_err(), "{bad}");
    }
}

#[test]
fn what_is_not_slurms_is_told() {
    assert_eq!(parse::job("hello"), Err(ParseError::Missing { key: "JobState" }));
    let error = parse::nodes("NodeName=a State=IDLE CPUTot=x CPUAlloc=0").expect_err("no number");
    assert_eq!(error.to_string(), "`CPUTot=x` is no number");
    let error = parse::job("JobState=A Reason=B Nodes=h[1-2] CPU_IDs=3-1").expect_err("no list");
    assert_eq!(error.to_string(), "`3-1` is no list of CPUs");
}

proptest! {
    #[test]
    fn any_text_is_read_without_panic(text in any::<String>(), list in "[a-c0-9,\\[\\]-]{0,24}") {
        let _ = (parse::job(&text), parse::nodes(&text), parse::granted_job(&text));
        let _ = parse::host_list(&list);
        let _ = parse::job(&format!("JobState=A Reason=B Nodes={list} CPU_IDs={list}"));
    }

    #[test]
    fn a_range_has_all_its_hosts(from in 0..500u32, len in 0..50u32, width in 0..5usize) {
        let to = from + len;
        let wanted: Vec<String> = (from..=to).map(|n| format!("n{n:0width$}")).collect();
        let text = format!("n[{from:0width$}-{to:0width$}]");
        prop_assert_eq!(parse::host_list(&text).expect("a list"), wanted);
    }
}

/// Prints what it was told to, in that order.
#[derive(Debug, Default)]
struct Script {
    answers: Mutex<VecDeque<(&'static str, Answer)>>,
    said: Mutex<Vec<String>>,
}

#[derive(Debug)]
enum Answer {
    Prints(&'static str),
    Fails(&'static str),
    Hangs,
}

impl Commands for Script {
    fn run(
        &self,
        program: &'static str,
        arguments: Vec<String>,
        bound: Duration,
    ) -> Boxed<'_, Result<Output, CommandError>> {
        let next = self.answers.lock().expect("whole").pop_front();
        let line = format!("{program} {}", arguments.join(" "));
        self.said.lock().expect("whole").push(line.clone());
        let (wanted, answer) = next.unwrap_or_else(|| panic!("not expected: `{line}`"));
        assert_eq!(program, wanted, "{line}");
        Box::pin(async move {
            let output = |success, out: &str, err: &str| {
                Ok(Output { success, stdout: out.to_owned(), stderr: err.to_owned() })
            };
            match answer {
                Answer::Prints(out) if program == "salloc" => output(true, "", out),
                Answer::Prints(out) => output(true, out, ""),
                Answer::Fails(err) => output(false, "", err),
                Answer::Hangs => Err(CommandError::TimedOut { program: program.to_owned(), bound }),
            }
        })
    }
}

/// Hosts h1 and h3.
fn views() -> [HostView; 2] {
    [(1, "h1"), (3, "third")].map(|(id, name)| HostView {
        id: HostId::new(id).expect("not 0"),
        name: name.to_owned(),
        closed: None,
        free: Room::default(),
        once_bytes: 0,
        has_family: false,
    })
}

fn slurm(script: Vec<(&'static str, Answer)>) -> (Slurm, Arc<Script>) {
    let script = Arc::new(Script { answers: Mutex::new(script.into()), ..Script::default() });
    let own = HostId::new(10).expect("not 0");
    let nodes = BTreeMap::from([("h3".to_owned(), "third".to_owned())]);
    let settings = Settings {
        nodes,
        partition: Some("main".into()),
        time_limit_min: Some(5),
        ..Settings::default()
    };
    let commands = Arc::clone(&script) as Arc<dyn Commands>;
    (Slurm::with_commands(own, settings, commands), script)
}

fn ask(count: u32) -> Ask {
    let shape = Room { memory_bytes: 100 << 20, vcpus: 1 };
    Ask { count, shape, family: "a/b c".into(), policy: Policy::Spread }
}

fn said(script: &Script) -> Vec<String> {
    assert!(script.answers.lock().expect("whole").is_empty(), "all was asked");
    script.said.lock().expect("whole").clone()
}

#[tokio::test]
async fn less_is_asked_for_until_it_is_granted() {
    use Answer::{Fails, Prints};
    let script = vec![
        // Three CPUs are free, as far as that tells.
        ("scontrol", Prints(text("nodes"))),
        ("salloc", Fails(text("busy"))),
        ("salloc", Prints(text("granted"))),
        ("scontrol", Prints(text("job"))),
        ("scancel", Prints("")),
        ("scancel", Fails(text("unknown"))),
    ];
    let (slurm, script) = slurm(script);
    let held = slurm.hold(&ask(30), &views()).await.expect("granted").expect("a job");
    assert_eq!((held.job.as_str(), held.places.values().sum::<u32>()), ("1", 5));
    assert_eq!(
        held.short,
        ["h2: Slurm gave this node, which is no member", "Slurm gave room for 5"]
    );
    slurm.release("1").await.expect("given back");
    slurm.release("1").await.expect("given back before");
    let said = said(&script);
    let asked: Vec<_> = said.iter().filter(|line| line.starts_with("salloc ")).collect();
    assert!(asked[0].contains(" --ntasks=3 ") && asked[1].contains(" --ntasks=1 "), "{asked:?}");
    let wanted = [
        "--no-shell",
        "--job-name=vmfork-000000000000000a-abc-",
        "--cpus-per-task=1",
        "--mem-per-cpu=100M",
        "--spread-job",
        "--exclude=h2",
        "--partition=main",
        "--time=5",
        "--immediate=5",
    ];
    assert!(wanted.iter().all(|it| asked[0].contains(it)), "{asked:?}");
}

#[tokio::test]
async fn a_job_of_no_use_is_cancelled() {
    use Answer::{Fails, Hangs, Prints};
    let nodes = ("scontrol", Prints(text("nodes")));
    let granted = || ("salloc", Prints(text("granted")));
    // No node is a member that takes clones: there is nothing to ask for.
    let [mut first, mut third] = views();
    (first.name, third.closed) = ("other".to_owned(), Some("it is silent"));
    let (it, script) = slurm(vec![nodes]);
    let error = it.hold(&ask(3), &[first, third]).await.expect_err("no room").to_string();
    assert!(error.contains("no node of a host that takes clones"), "{error}");
    assert_eq!(said(&script).len(), 1);

    // It can't be looked at.
    let script = vec![
        ("scontrol", Prints(text("nodes"))),
        granted(),
        ("scontrol", Fails("slurm_load_jobs error: Unable to contact slurm controller")),
        ("scancel", Prints("")),
    ];
    let (it, script) = slurm(script);
    let error = it.hold(&ask(3), &views()).await.expect_err("no answer").to_string();
    assert!(error.contains("Unable to contact"), "{error}");
    assert_eq!(said(&script).pop().as_deref(), Some("scancel 1"));

    // It is not known whether it was granted.
    let script =
        vec![("scontrol", Prints(text("nodes"))), ("salloc", Hangs), ("scancel", Prints(""))];
    let (it, script) = slurm(script);
    let error = it.hold(&ask(3), &views()).await.expect_err("no answer");
    assert!(matches!(error, AllocateError::Command { .. }), "{error}");
    let last = said(&script).pop().expect("three");
    assert!(last.starts_with("scancel --name=vmfork-000000000000000a-abc-"), "{last}");
}

#[tokio::test]
async fn what_is_refused_for_good_is_not_asked_for_again() {
    use Answer::{Fails, Prints};
    let invalid = "salloc: error: invalid partition specified: nowhere\nsalloc: error: Job submit/allocate failed: Invalid partition name specified\n";
    let script = vec![("scontrol", Prints(text("nodes"))), ("salloc", Fails(invalid))];
    let (it, script) = slurm(script);
    let error = it.hold(&ask(3), &views()).await.expect_err("no such partition").to_string();
    assert_eq!(
        error,
        "Slurm: `salloc` failed: salloc: error: Job submit/allocate failed: Invalid partition name specified"
    );
    assert_eq!(said(&script).len(), 2);
}

#[tokio::test]
async fn that_a_job_has_ended_is_for_the_controller_to_say() {
    use Answer::{Fails, Prints};
    let script = vec![
        ("scontrol", Prints("JobId=1 JobState=PENDING Reason=Resources")),
        ("scontrol", Prints(text("job"))),
        ("scontrol", Fails("slurm_load_jobs error: Unable to contact slurm controller")),
        ("scontrol", Prints(text("job-ended"))),
        ("scontrol", Fails(text("unknown"))),
    ];
    let (it, script) = slurm(script);
    assert_eq!(it.ended("1").await.expect("asked"), None, "it has not begun");
    assert_eq!(it.ended("1").await.expect("asked"), None);
    it.ended("1").await.expect_err("it does not answer");
    let ended = it.ended("1").await.expect("asked");
    assert_eq!(ended.as_deref(), Some("Slurm ended job 1: CANCELLED"));
    let forgotten = it.ended("1").await.expect("asked");
    assert_eq!(forgotten.as_deref(), Some("Slurm has no job 1 any more"));
    assert_eq!(said(&script).len(), 5);
    let error = it.ended("1; rm").await.expect_err("no number");
    assert_eq!(error.to_string(), "Slurm: `1; rm` is no job");
}

/// Counts how many run at a time, and fails each.
#[derive(Debug, Default)]
struct Slow {
    now: Mutex<(usize, usize)>,
}

impl Commands for Slow {
    fn run(
        &self,
        _: &'static str,
        _: Vec<String>,
        _: Duration,
    ) -> Boxed<'_, Result<Output, CommandError>> {
        Box::pin(async {
            {
                let mut now = self.now.lock().expect("whole");
                now.0 += 1;
                now.1 = now.1.max(now.0);
            }
            tokio::task::yield_now().await;
            self.now.lock().expect("whole").0 -= 1;
            let (stdout, stderr) = (String::new(), "busy".to_owned());
            Ok(Output { success: false, stdout, stderr })
        })
    }
}

#[tokio::test]
async fn however_many_ask_only_some_are_asked_for_at_a_time() {
    let slow = Arc::new(Slow::default());
    let own = HostId::new(10).expect("not 0");
    let commands = Arc::clone(&slow) as Arc<dyn Commands>;
    let it = Slurm::with_commands(own, Settings::default(), commands);
    let (ask, views) = (ask(1), views());
    let holds: Vec<_> = (0..3 * ASKS_MAX).map(|_| it.hold(&ask, &views)).collect();
    for hold in futures_util::future::join_all(holds).await {
        hold.expect_err("it failed");
    }
    assert_eq!(slow.now.lock().expect("whole").1, ASKS_MAX);
}

#[tokio::test]
async fn jobs_of_this_host_are_known_by_their_names() {
    let listed = "7 vmfork-000000000000000a-abc-1\n8 vmfork-000000000000000b-abc-1\n9 other\n";
    let (it, _) = slurm(vec![("squeue", Answer::Prints(listed))]);
    assert_eq!(it.jobs().await.expect("asked"), ["7".to_owned()].into());
}
