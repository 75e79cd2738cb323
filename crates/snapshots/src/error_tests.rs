use std::io;

use vmfork_host::error::VmError;
use vmfork_image::{ImageId, PageIdx};

use super::*;

/// An error, and what the API says: code, cause, remedy.
type Row = (SnapshotError, ErrorCode, &'static str, Option<&'static str>);

fn check(rows: impl IntoIterator<Item = Row>) {
    for (error, code, cause, remedy) in rows {
        let body = error.to_body("do it");
        assert_eq!((body.code, body.message.as_str()), (code, "do it"), "{error:?}");
        assert_eq!(body.cause.as_deref(), Some(cause), "{error:?}");
        assert_eq!(body.remedy.as_deref(), remedy, "{error:?}");
    }
}

fn warm() -> String {
    "warm".to_owned()
}

const CHECKS: Option<&str> = Some(DOCTOR);

#[test]
fn a_name_that_can_not_be_had_is_a_conflict_with_what_to_do() {
    check([
        (
            SnapshotError::UnderWay { name: warm(), participle: "pulled" },
            ErrorCode::Conflict,
            "`warm` is still being pulled",
            Some(
                "wait until `vmfork snapshot ls` shows `warm` ready, or give it up: \
                 `vmfork snapshot rm warm`",
            ),
        ),
        (
            SnapshotError::NameTaken { name: warm() },
            ErrorCode::Conflict,
            "there is a snapshot named `warm` already",
            Some("choose another name, or `vmfork snapshot rm warm`"),
        ),
        (
            SnapshotError::HereAs { here: "cold".to_owned(), name: warm() },
            ErrorCode::Conflict,
            "that is here already, as `cold`, and `warm` is another one here",
            Some("use `cold`, or remove one: `vmfork snapshot rm warm`"),
        ),
        (
            SnapshotError::PullGivenUp,
            ErrorCode::Conflict,
            "the pull was given up",
            Some("what is not here comes as it is needed; or pull it again"),
        ),
    ]);
}

#[test]
fn what_is_stored_wrongly_or_nowhere_says_so() {
    let not_json = serde_json::from_str::<u8>("x").expect_err("no number");
    let damaged = Some(
        "it was made by another version of vmfork, or tampered with: \
         `vmfork snapshot verify warm`",
    );
    let place = Some(PLACE);
    check([
        (
            SnapshotError::Facts { name: warm(), source: not_json },
            ErrorCode::Conflict,
            "what the daemon wrote down of `warm` can't be read: expected value at line 1 column 1",
            damaged,
        ),
        (
            SnapshotError::Size { name: warm(), said: 4096, pages: 2 },
            ErrorCode::Conflict,
            "`warm` says 4096 bytes of memory, its page table has 2 pages",
            damaged,
        ),
        (SnapshotError::Empty, ErrorCode::Conflict, "it is a chain of no snapshots", CHECKS),
        (
            SnapshotError::Location { location: "x:".to_owned(), why: "no scheme".to_owned() },
            ErrorCode::BadRequest,
            "`x:` is no place of a store: no scheme",
            place,
        ),
        (
            SnapshotError::NoFolder { location: "/none".to_owned() },
            ErrorCode::NotFound,
            "there is no folder `/none` on the daemon's host",
            place,
        ),
        (
            StoreError::Busy { name: warm() }.into(),
            ErrorCode::Conflict,
            "snapshot `warm` is being written",
            Some("wait until it is ready, then try again"),
        ),
    ]);
    let other =
        SnapshotError::OtherImage { name: warm(), role: "disk:data".parse().expect("a role") };
    let body = other.to_body("do it");
    assert_eq!(body.code, ErrorCode::Conflict);
    let disks = |count: u32| (0..count).map(|number| format!("vm{number}/data")).collect();
    for (count, says) in [
        (0, "it is needed by disks of VMs that are being started"),
        (1, "it is needed by the disk `vm0/data`"),
        (2, "it is needed by the disks `vm0/data`, `vm1/data`"),
        (7, "`vm3/data`, `vm4/data` and 2 more"),
    ] {
        let error = SnapshotError::DisksNeedIt { disks: disks(count) };
        assert!(error.to_string().ends_with(says), "{error}");
    }
    assert!(body.remedy.is_some_and(|remedy| remedy.contains("another snapshot")));
}

#[test]
fn what_the_host_fails_at_points_to_the_doctor() {
    let lost = || QmpError::Lost { reason: "it ended".to_owned() };
    let image = ImageId::new(3).expect("not 0");
    let page = PageLost { page: PageIdx(7), image, reason: "no answer".to_owned() };
    let page_says = page.to_string();
    let body = SnapshotError::from(page).to_body("do it");
    assert_eq!((body.code, body.cause), (ErrorCode::PageLost, Some(page_says)));
    assert_eq!(body.remedy.as_deref(), CHECKS);
    check([
        (SnapshotError::NoTable, ErrorCode::Host, "its image has no page table", CHECKS),
        (SnapshotError::Ended, ErrorCode::Conflict, "its VM has ended", CHECKS),
        (
            lost().into(),
            ErrorCode::Qemu,
            "ask QEMU: the connection to QEMU is lost: it ended",
            CHECKS,
        ),
        (
            SnapshotError::NotSealed { seconds: 60 },
            ErrorCode::Host,
            "what its VM had written was not known within 60 s",
            CHECKS,
        ),
        (
            StateError::Form.into(),
            ErrorCode::Host,
            "its device state: the device state that QEMU wrote is of no known form",
            CHECKS,
        ),
        (
            EngineError::Start(io::Error::other("no threads")).into(),
            ErrorCode::Host,
            "serve its memory: start a page engine: no threads",
            CHECKS,
        ),
        (
            OpenError::Base { base: image, pages: 9 }.into(),
            ErrorCode::Host,
            "open its memory: its base, image 3, has no complete table of 9 pages",
            CHECKS,
        ),
        (
            SnapshotError::Stream { source: io::ErrorKind::BrokenPipe.into() },
            ErrorCode::Host,
            "send it: broken pipe",
            CHECKS,
        ),
        (
            SnapshotError::Broken,
            ErrorCode::Internal,
            "the daemon's own code failed; its log has more",
            None,
        ),
    ]);
}

#[tokio::test]
async fn what_a_panic_leaves_is_internal() {
    let gone = tokio::spawn(async { panic!("in this test") }).await.expect_err("it panicked");
    let body = SnapshotError::from(gone).to_body("do it");
    assert_eq!((body.code, body.remedy), (ErrorCode::Internal, None));
    assert!(body.cause.is_some_and(|cause| cause.contains("in this test")));
}

#[test]
fn errors_of_the_host_and_of_clones_are_passed_on_as_they_are() {
    let ended = VmError::Ended { name: "web".to_owned(), reason: "killed".to_owned() };
    let body = SnapshotError::from(HostError::from(ended.clone())).to_body("do it");
    assert_eq!(body, ErrorBody::from(ended));
    let said = ErrorBody::new(ErrorCode::Timeout, "start VM `a`").cause("not ready");
    assert_eq!(SnapshotError::from(ForkError::Clone(said.clone())).to_body("do it"), said);
    check([
        (
            Unlike::NoKvm { reason: "no /dev/kvm".to_owned() }.into(),
            ErrorCode::Conflict,
            "it was taken with KVM, which can't be used here: no /dev/kvm",
            Some("start it where KVM is, or take one of a VM that runs with `--accel tcg`"),
        ),
        (
            LabelError::Many { count: 65 }.into(),
            ErrorCode::BadRequest,
            "65 labels: there can be at most 64",
            Some("give fewer labels; those of the same key are replaced"),
        ),
    ]);
}
