use vmfork_agent_proto::{PROTOCOL_VERSION, ToHost};
use vmfork_api::ErrorCode;

use super::*;
use vmfork_host::testing::{Guest, Host, link};

/// A VM without a QEMU, and its guest.
fn vm(host: &Host) -> (Arc<Vm>, Guest) {
    let vm = host.vm("web", None);
    let (link, guest, _requests) = link();
    vm.set_link(link);
    (vm, guest)
}

/// Wait for the daemon's word, then say these, one after the other.
async fn answer(guest: &mut Guest, said: &[Option<Firstboot>]) {
    guest.hear().await;
    for firstboot in said {
        let hello = ToHost::Hello {
            protocol: PROTOCOL_VERSION,
            agent_version: "0.1.0".to_owned(),
            kernel: "6.1".to_owned(),
            cpus: 1,
            firstboot: *firstboot,
        };
        guest.say(0, &hello).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_ready_when_its_first_boot_command_has_ended_well() {
    for said in
        [vec![None], vec![Some(Firstboot::Running), Some(Firstboot::Ended { exit_code: 0 })]]
    {
        let host = Host::start().await;
        let (vm, mut guest) = vm(&host);
        let patience = Patience::new(Some(Duration::from_secs(20)));
        let (outcome, ()) =
            tokio::join!(greet(&host.core, &vm, patience), answer(&mut guest, &said));
        outcome.expect("ready");
        assert!(vm.ready().is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_boot_command_that_fails_fails_the_run_with_its_words() {
    let host = Host::start().await;
    let (vm, mut guest) = vm(&host);
    vm.log.append("loading\r\ncurl: \x1b[31mno network\r\n".into());
    let said = [Some(Firstboot::Running), Some(Firstboot::Ended { exit_code: 6 })];
    let patience = Patience::new(Some(Duration::from_secs(20)));
    let (outcome, ()) = tokio::join!(greet(&host.core, &vm, patience), answer(&mut guest, &said));
    let error = outcome.expect_err("it failed").to_body("run `web`");
    assert_eq!(error.code, ErrorCode::Guest);
    assert_eq!(
        error.to_string(),
        "run `web`: the image's first-boot command ended with exit code 6; the console's last \
         lines: loading / curl: [31mno network"
    );
    assert!(error.remedy.expect("remedy").contains("vmfork logs web"));
    assert!(vm.ready().is_none(), "it may be forked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_boot_command_that_takes_too_long_is_named_as_the_cause() {
    let host = Host::start().await;
    let (vm, mut guest) = vm(&host);
    let patience = Patience {
        ready: Duration::from_millis(30),
        ..Patience::new(Some(Duration::from_secs(20)))
    };
    let (outcome, ()) = tokio::join!(
        greet(&host.core, &vm, patience),
        answer(&mut guest, &[Some(Firstboot::Running)])
    );
    let error = outcome.expect_err("it runs").to_body("run `web`");
    assert_eq!(error.code, ErrorCode::Timeout);
    let cause = error.cause.expect("cause");
    assert!(cause.starts_with("the image's first-boot command still ran 0.03 s after"), "{cause}");
    assert!(vm.ready().is_none(), "it may be forked");
}

#[test]
fn time_for_the_first_boot_command_is_on_top_unless_all_of_it_was_given() {
    assert_eq!(Patience::new(None).ready, BOOT_TIMEOUT + FIRSTBOOT_TIMEOUT);
    let given = Patience::new(Some(Duration::from_secs(7)));
    assert_eq!((given.answer, given.ready), (Duration::from_secs(7), Duration::from_secs(7)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_another_host_has_is_not_taken() {
    let host = vmfork_host::testing::Host::start().await;
    let elsewhere = ["web", "debian-1"].map(|name| (name.to_owned(), "h1".to_owned()));
    let request = |name: Option<&str>| {
        let request = serde_json::json!({"image": "debian", "name": name});
        serde_json::from_value(request).expect("a request")
    };
    let name = |name| name_for(&host.core, &request(name), &HashMap::from(elsewhere.clone()));
    let error = name(Some("web")).expect_err("it is taken").to_body("run `web`");
    assert_eq!(error.code, ErrorCode::Conflict);
    assert_eq!(error.to_string(), "run `web`: there is a VM named `web` on host `h1` already");
    assert_eq!(name(Some("other")).expect("free").0.names(), ["other"]);
    assert_eq!(name(None).expect("free").1, "debian-2");
}

fn metadata(more: &serde_json::Value) -> Metadata {
    let mut metadata = serde_json::json!({
        "schema": "", "name": "web", "created_unix_ms": 0, "origin": "", "kernel_version": "",
        "cmdline": "", "packages": [], "agent": true, "default_memory_mib": 512,
        "input_hash": null, "tree_hash": null,
        "files": {"root.img": {"size_bytes": 1 << 20, "blake3": "ab12"}},
    });
    for (key, value) in more.as_object().expect("an object") {
        metadata[key] = value.clone();
    }
    serde_json::from_value(metadata).expect("an image")
}

#[test]
fn a_root_on_a_disk_takes_the_place_of_the_images() {
    let request = |root: &str| -> RunRequest {
        let disk = serde_json::json!({"name": "data", "source": {"type": "empty"}});
        let request = serde_json::json!({"image": "web", "disks": [disk], "root": root});
        serde_json::from_value(request).expect("a request")
    };
    let old = metadata(&serde_json::json!({"input_hash": "1f"}));
    let built = serde_json::json!({"input_hash": "1f", "root_overlay": true, "root_disk": true});
    let (built, imported) = (metadata(&built), metadata(&serde_json::json!({})));
    for of in [&built, &imported] {
        let (root, disks) = wanted_disks(&request("disk"), of).expect("it can");
        assert_eq!(root, Some(RootDisk::Whole { size_bytes: None }));
        let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(names, ["root", "data"]);
        assert_eq!(disks[0].source, DiskSource::Image { image: "web".to_owned() });
        assert_eq!(drives(of, root, &[]), [], "the image's own is no drive");
        assert_eq!(words(root), " rw vmfork.rw=/dev/vda");
    }
    let (root, _) = wanted_disks(&request("overlay"), &built).expect("it can");
    assert_eq!(drives(&built, root, &[]), [DriveSpec::Root { blake3: "ab12".to_owned() }]);
    assert_eq!(words(root), " vmfork.upper=/dev/vdb");
    for (of, root) in [(&old, "disk"), (&old, "overlay"), (&imported, "overlay")] {
        let refused = wanted_disks(&request(root), of).expect_err("it can't").to_body("run it");
        assert!(refused.remedy.is_some_and(|remedy| remedy.contains("image build")), "{root}");
    }
    let (root, _) = wanted_disks(&request("tmpfs"), &imported).expect("it can");
    assert_eq!((root, words(root)), (None, ""));
}
