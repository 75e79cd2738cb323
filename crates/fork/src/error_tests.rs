use std::path::PathBuf;

use super::*;

/// An error, and what the API says: code, cause, remedy.
type Row = (Error, ErrorCode, &'static str, Option<&'static str>);

fn check(rows: impl IntoIterator<Item = Row>) {
    for (error, code, cause, remedy) in rows {
        let body = error.to_body("fork `web`");
        assert_eq!((body.code, body.message.as_str()), (code, "fork `web`"), "{error:?}");
        assert_eq!(body.cause.as_deref(), Some(cause), "{error:?}");
        assert_eq!(body.remedy.as_deref(), remedy, "{error:?}");
    }
}

const AGAIN: Option<&str> = Some("try again when `vmfork ps` shows it running");
const CHECKS: Option<&str> = Some(DOCTOR);

fn lost() -> QmpError {
    QmpError::Lost { reason: "it ended".to_owned() }
}

const LOST: &str = "the connection to QEMU is lost: it ended";

fn still() -> FreezeError {
    FreezeError::Still(io::Error::other("it runs"))
}

#[test]
fn what_is_asked_for_or_comes_too_early_is_refused_with_what_to_do() {
    check([
        (
            Error::Count { count: 0, max: 9 },
            ErrorCode::BadRequest,
            "count 0 is not in 1 to 9",
            None,
        ),
        (Error::Names { names: 2, count: 3 }, ErrorCode::BadRequest, "2 names for 3 VMs", None),
        (
            Error::NameTaken { name: "a".to_owned() },
            ErrorCode::Conflict,
            "there is a VM named `a` already",
            Some("choose another name, or `vmfork rm a`"),
        ),
        (
            Error::NotYet,
            ErrorCode::Conflict,
            "its guest has not come up yet",
            Some("wait until `vmfork ps` shows it running"),
        ),
        (
            Error::GivenUp,
            ErrorCode::Conflict,
            "it was given up: its client has gone, or its family was killed",
            None,
        ),
        (
            Error::NoTurn,
            ErrorCode::Timeout,
            "other forks or snapshots of it went on all the time",
            AGAIN,
        ),
        (
            Error::StillFrozen { after: Duration::from_secs(60) },
            ErrorCode::Timeout,
            "it was still being frozen after 60 s",
            AGAIN,
        ),
    ]);
}

#[test]
fn what_breaks_a_freeze_is_of_the_guest_of_qemu_or_of_the_host() {
    check([
        (
            Error::Unquiet { vm: "web".to_owned() },
            ErrorCode::Guest,
            "the guest's agent did not fall silent before the VM was paused",
            Some("`vmfork resume web`, then pause it again"),
        ),
        (
            LinkError::Busy.into(),
            ErrorCode::Conflict,
            "another fork of this VM is under way, or it has no identity yet",
            Some("try again when the other fork is done"),
        ),
        (lost().into(), ErrorCode::Qemu, LOST, CHECKS),
        (NotFrozen::from(lost()).into(), ErrorCode::Qemu, LOST, CHECKS),
        (
            NotFrozen::Engine(EngineError::Start(io::Error::other("no threads"))).into(),
            ErrorCode::Host,
            "start a page engine: no threads",
            CHECKS,
        ),
        (
            NotFrozen::Memory(still()).into(),
            ErrorCode::Qemu,
            "QEMU can't be stopped: it runs",
            CHECKS,
        ),
        (
            NotFrozen::State(StateError::Memory(io::Error::other("no fds"))).into(),
            ErrorCode::Qemu,
            "device state in memory: no fds",
            CHECKS,
        ),
        (
            NotFrozen::Disks(io::Error::other("the medium fails")).into(),
            ErrorCode::Host,
            "its disks: the medium fails",
            CHECKS,
        ),
        (
            NotFrozen::Unquiet.into(),
            ErrorCode::Qemu,
            "the guest's agent spoke before the VM stood still: its guest is very slow",
            CHECKS,
        ),
    ]);
    assert!(!NotFrozen::Memory(still()).is_fatal());
    let process = FreezeError::Process(io::Error::other("it ended"));
    assert!(NotFrozen::Memory(process).is_fatal());
}

#[test]
fn a_host_that_is_unlike_what_a_vm_needs_is_a_conflict_that_names_both() {
    let text = ToOwned::to_owned;
    check([
        (
            Unlike::Differs { what: "QEMU", taken: text("7.2"), here: text("7.3") }.into(),
            ErrorCode::Conflict,
            "it was taken on QEMU `7.2`, this host has `7.3`",
            Some("start it where it was taken, or try with --force: QEMU says if it can't"),
        ),
        (
            Unlike::NoKvm { reason: text("no /dev/kvm") }.into(),
            ErrorCode::Conflict,
            "it was taken with KVM, which can't be used here: no /dev/kvm",
            Some("start it where KVM is, or take one of a VM that runs with `--accel tcg`"),
        ),
        (
            Unlike::Root { image: text("default"), wanted: text("01"), found: text("02") }.into(),
            ErrorCode::Conflict,
            "its guest runs from a root disk of hash 01…, that of image `default` here is 02…",
            Some(
                "bring image `default` as it was when the snapshot was taken: `vmfork image import`",
            ),
        ),
        (
            Unlike::Shape(ShapeError::NoBootDisk).into(),
            ErrorCode::Conflict,
            "its machine: a bare guest has no disk to boot from",
            None,
        ),
        (
            Error::NoQemu(ProbeError::NotFound),
            ErrorCode::Host,
            "no qemu-system-x86_64 in PATH; install the package qemu-system-x86",
            Some("`apt-get install qemu-system-x86`"),
        ),
        (Error::Drives(io::Error::other("no fds")), ErrorCode::Host, "no fds", None),
        (
            Error::Stalled,
            ErrorCode::Conflict,
            "it is stalled: a disk can't answer its guest",
            Some("`vmfork ps` says why; it goes on by itself when the disk answers"),
        ),
    ]);
}

#[test]
fn a_clone_that_does_not_start_says_what_of_it_failed() {
    let full = || io::Error::other("the disk is full");
    check([
        (
            NotStarted::Late { after: Duration::from_millis(70) }.into(),
            ErrorCode::Timeout,
            "not ready 70 ms after the request",
            Some("give it a longer `--timeout`, or start fewer at once"),
        ),
        (NotStarted::GivenUp.into(), ErrorCode::Timeout, "it was given up", CHECKS),
        (
            NotStarted::Launch(LaunchError::Journal(full())).into(),
            ErrorCode::Host,
            "write the journal: the disk is full",
            Some("make room on the disk of the state folder"),
        ),
        (
            NotStarted::Memory(still()).into(),
            ErrorCode::Qemu,
            "QEMU can't be stopped: it runs",
            CHECKS,
        ),
        (
            NotStarted::Drives(BindError::Qmp(lost())).into(),
            ErrorCode::Qemu,
            "give a waiting QEMU its drives: the connection to QEMU is lost: it ended",
            CHECKS,
        ),
        (
            NotStarted::Folder(full()).into(),
            ErrorCode::Host,
            "the disk is full",
            Some("is the disk of the state folder full?"),
        ),
        (
            NotStarted::Disks(DiskError::Serve(full())).into(),
            ErrorCode::Host,
            "serve a disk: the disk is full",
            Some("is the disk of the state folder full?"),
        ),
        (NotStarted::Channels(full()).into(), ErrorCode::Qemu, "the disk is full", CHECKS),
        (NotStarted::Qmp(lost()).into(), ErrorCode::Qemu, LOST, CHECKS),
        (
            NotStarted::Identity(LinkError::HungUp).into(),
            ErrorCode::Guest,
            "it was hung up",
            Some("a VM that can't confirm its identity is never released; is the guest starved?"),
        ),
        (
            NotStarted::PageLost { reason: "page 7 is lost".to_owned() }.into(),
            ErrorCode::PageLost,
            "page 7 is lost",
            Some("of a stored snapshot, `vmfork snapshot verify` tells what else is damaged"),
        ),
    ]);
    let open = LaunchError::Open { path: PathBuf::from("/dev/kvm"), source: full() };
    assert_eq!(
        Error::from(NotStarted::Launch(open)).to_body("start it").cause.as_deref(),
        Some("open /dev/kvm: the disk is full")
    );
}

#[test]
fn what_the_host_or_another_one_says_is_passed_on_as_it_is() {
    let said = ErrorBody::new(ErrorCode::NotFound, "fork onto `h2`").cause("there is no such host");
    for error in [Error::Remote(said.clone()), Error::Clone(said.clone())] {
        assert_eq!(error.to_body("fork `web`"), said);
    }
    let ended = VmError::Ended { name: "web".to_owned(), reason: "killed".to_owned() };
    let body = Error::from(ended.clone()).to_body("fork `web`");
    assert_eq!(body, ErrorBody::from(ended));
    assert_eq!(body.to_string(), "`web` is not running: killed");
}
