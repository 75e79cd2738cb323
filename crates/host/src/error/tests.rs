use std::path::PathBuf;

use vmfork_cluster::Room;
use vmfork_cluster::allocate::Amount;
use vmfork_control::User;

use super::*;

const END: &str = "end some of them (`vmfork ps`, `vmfork kill`), or raise vmforkd's --quota";

fn amount(vms: u32, mib: u64, vcpus: u32) -> Amount {
    Amount { vms, room: Room { memory_bytes: mib * MIB, vcpus } }
}

fn web() -> String {
    "web".to_owned()
}

/// An error, and what the API says: code, message, cause, remedy.
type Row = (Error, ErrorCode, &'static str, &'static str, &'static str);

fn check(rows: impl IntoIterator<Item = Row>) {
    for (error, code, message, cause, remedy) in rows {
        let body = error.to_body("do it");
        assert_eq!((body.code, body.message.as_str()), (code, message), "{error:?}");
        assert_eq!(body.cause.as_deref(), Some(cause), "{error:?}");
        assert_eq!(body.remedy.as_deref(), Some(remedy), "{error:?}");
    }
}

#[test]
fn what_a_vm_can_not_do_is_a_conflict_that_names_the_vm() {
    let ended = || VmError::Ended { name: web(), reason: "killed on request".to_owned() };
    let (last_words, running) =
        ("`vmfork logs web` shows its last words", "try again when `vmfork ps` shows it running");
    let agent = "reach the agent of `web`";
    check([
        (
            ended().into(),
            ErrorCode::Conflict,
            "`web` is not running",
            "killed on request",
            last_words,
        ),
        (Error::Over(ended()), ErrorCode::Conflict, "do it", "killed on request", last_words),
        (
            VmError::NoQemu { name: web() }.into(),
            ErrorCode::Conflict,
            "`web` is not running",
            "its QEMU is being started",
            running,
        ),
        (
            VmError::Starting { name: web() }.into(),
            ErrorCode::Conflict,
            agent,
            "the VM is still starting",
            running,
        ),
        (
            VmError::NoAgent { name: web(), image: "bare".to_owned() }.into(),
            ErrorCode::Conflict,
            agent,
            "image `bare` has no agent",
            "`vmfork console` still works",
        ),
        (
            VmError::Paused { name: web() }.into(),
            ErrorCode::Conflict,
            agent,
            "the VM is paused",
            "`vmfork resume web` lets it continue",
        ),
        (
            VmError::Stalled { name: web(), reason: "disk `data` is full".to_owned() }.into(),
            ErrorCode::Conflict,
            agent,
            "the VM is stalled: disk `data` is full",
            "it goes on by itself once its disk answers; is the host's disk full?",
        ),
    ]);
    assert_eq!(ErrorBody::from(ended()), Error::Vm(ended()).to_body("do it"));
}

#[test]
fn what_has_no_room_is_refused_with_the_figures_and_the_setting() {
    let (has, may) = (amount(5, 100, 8), amount(6, 200, 9));
    let family = |by| Refusal::Family { by, has, may };
    let no_vcpus =
        Refusal::Vcpus { want: 6, admissible: 3, max: 4, per_core: 1, cores: 4, promised: 1 };
    let quota = |may| Refusal::Quota { user: User::Uid(7), has, may };
    check([
        (
            Refusal::Memory {
                want_bytes: 20 * MIB,
                admissible_bytes: 19 * MIB,
                total_bytes: 100 * MIB,
                available_bytes: 90 * MIB,
                outstanding_bytes: 40 * MIB,
                committed_bytes: 50 * MIB,
                reserve_bytes: 31 * MIB,
            }
            .into(),
            ErrorCode::NoCapacity,
            "do it",
            "20 MiB needed, 19 MiB admissible: of 100 MiB the host has 90 MiB available, 40 MiB of \
             that are promised to VMs that have yet to use it (50 MiB in all), 31 MiB are in reserve",
            "end VMs (`vmfork ps`, `vmfork kill`), ask for less memory, or lower vmforkd's \
             --memory-reserve-mib or --clone-growth-percent",
        ),
        (
            Error::Few { granted: 1, asked: 3, why: no_vcpus },
            ErrorCode::NoCapacity,
            "do it: 1 of 3 fit",
            "6 virtual CPUs needed, 3 admissible: VMs may have 4 on this host (cores: 4, 1 each), 1 are promised",
            "end VMs (`vmfork ps`, `vmfork kill`), ask for fewer, or raise vmforkd's \
             --vcpus-per-core",
        ),
        (
            family(Figure::Vms).into(),
            ErrorCode::NoCapacity,
            "do it",
            "its family has 5 VMs, and guests may make it 6",
            "end some of them (`vmfork tree`, `vmfork kill`), fork from outside, or raise \
             vmforkd's --family-vms-max",
        ),
        (
            family(Figure::Memory).into(),
            ErrorCode::NoCapacity,
            "do it",
            "its family was promised 100 MiB, and guests may make that 200 MiB",
            "end some of them (`vmfork tree`, `vmfork kill`), fork from outside, or raise \
             vmforkd's --family-memory-percent",
        ),
        (
            family(Figure::Vcpus).into(),
            ErrorCode::NoCapacity,
            "do it",
            "its family has 8 virtual CPUs, and guests may make that 9",
            "end some of them (`vmfork tree`, `vmfork kill`), fork from outside, or raise \
             vmforkd's --family-vcpus-percent",
        ),
        (
            quota(may).into(),
            ErrorCode::NoCapacity,
            "do it",
            "user 7 has 5 of 6 VMs and 100 of 200 MiB and 8 of 9 virtual CPUs on all hosts: the \
             quota leaves no room for more",
            END,
        ),
        (
            quota(Amount { vms: 6, ..Amount::ALL }).into(),
            ErrorCode::NoCapacity,
            "do it",
            "user 7 has 5 of 6 VMs on all hosts: the quota leaves no room for more",
            END,
        ),
    ]);
}

#[test]
fn other_errors_have_a_code_a_cause_and_a_remedy() {
    let image = |error| Error::from(ImageError { name: "bare".to_owned(), error });
    check([
        (
            Error::NoVm { name: web() },
            ErrorCode::NotFound,
            "do it",
            "no VM named `web` on this host",
            "`vmfork ps` lists the VMs that are here",
        ),
        (
            image(StoreError::NotFound { name: "bare".to_owned() }),
            ErrorCode::NotFound,
            "open image `bare`",
            "no image named `bare`",
            "list the images with `vmfork image ls`, or build one with `vmfork image build`",
        ),
        (
            image(StoreError::Busy { path: PathBuf::from("/images"), seconds: 3 }),
            ErrorCode::Host,
            "open image `bare`",
            "the image store /images is locked by another process for 3 s",
            "try again when the other build has ended",
        ),
        (
            LabelError::Many { count: 65 }.into(),
            ErrorCode::BadRequest,
            "do it",
            "65 labels: there can be at most 64",
            "give fewer labels; those of the same key are replaced",
        ),
        (
            Error::ForkStays,
            ErrorCode::Timeout,
            "do it",
            "a fork under way does not come to its end",
            "`vmfork tree` shows what is left of it: kill it again",
        ),
    ]);
    let bad_name = image(StoreError::BadName { name: "bare".to_owned() }).to_body("do it");
    assert_eq!(bad_name.code, ErrorCode::BadRequest);
}

#[tokio::test]
async fn what_another_host_says_is_passed_on_and_a_task_that_panics_is_a_bug() {
    let said = ErrorBody::new(ErrorCode::Timeout, "count what a user has").cause("no answer");
    let keeper = Error::Keeper(said.clone());
    assert_eq!(keeper.to_body("do it"), said);
    let task = tokio::spawn(async { panic!("in this test") });
    let body = outcome::<()>(task, "do it").await.expect_err("it panicked");
    assert_eq!((body.code, body.message.as_str()), (ErrorCode::Internal, "do it"));
    assert!(body.cause.is_some_and(|cause| cause.contains("in this test")));
    assert_eq!(body.remedy.as_deref(), Some(BUG));
}
