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
            pmem_root: false,
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
