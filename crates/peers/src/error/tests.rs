//! What a reader gets of each error: code, cause and remedy.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use vmfork_api::ErrorBody;
use vmfork_api::ErrorCode::{
    self, BadRequest, Conflict, Host, Internal, NoCapacity, NotFound, Qemu, Timeout,
};
use vmfork_cluster::allocate::{AllocateError, HostView};
use vmfork_cluster::{
    FolderError, HeartbeatError, HostId, IssueError, JoinError, JoinToken, KeyError, MemberError,
    Room, TOKENS_MAX,
};
use vmfork_engine::EngineError;
use vmfork_fork::Error as ForkError;
use vmfork_fork::state::StateError;
use vmfork_guest_image::ArrivalError as GuestArrivalError;
use vmfork_host::error::{BUG, Error as HostError};
use vmfork_image::RangeError;
use vmfork_qemu::QmpError;

use super::*;

const DO: &str = "do it";
const ASK: &str = "`vmfork cluster ls` tells which hosts are there; each daemon's log has more";

#[track_caller]
fn assert_body(body: &ErrorBody, code: ErrorCode, cause: &str, remedy: Option<&str>) {
    let expected = ErrorBody {
        code,
        message: DO.to_owned(),
        cause: Some(cause.to_owned()),
        remedy: remedy.map(str::to_owned),
    };
    assert_eq!(*body, expected);
}

fn member() -> HostId {
    HostId::new(255).expect("not 0")
}

fn denied() -> FolderError {
    let source = io::Error::from(ErrorKind::PermissionDenied);
    FolderError::Io { doing: "remove", path: PathBuf::from("/keys/roster"), source }
}

fn taken() -> BeginError {
    let source = io::Error::from(ErrorKind::AddrInUse);
    BeginError::Listen { address: "10.0.0.1:7072".parse().expect("an address"), source }
}

fn unknown() -> MemberError {
    MemberError::Unknown { wanted: "h9".to_owned() }
}

fn late() -> CallError {
    CallError::Late { host: "h1".to_owned(), seconds: 5 }
}

#[test]
fn a_call_names_its_host_and_what_to_look_at() {
    let shows = |error: CallError, code, cause: &str, remedy| {
        assert_body(&error.to_body(DO), code, cause, Some(remedy));
    };
    let host = || "h1".to_owned();
    let (address, source) = ("10.0.0.1:7072".to_owned(), ErrorKind::ConnectionRefused.into());
    let silent = CallError::Connect { host: host(), address, source };
    shows(silent, Host, "host `h1` at 10.0.0.1:7072 does not answer: connection refused", ASK);
    let gone = "host `h1` is gone: nothing has been heard of it for a while";
    shows(CallError::Gone { host: host() }, Host, gone, ASK);
    shows(late(), Timeout, "host `h1` has not answered within 5 s", ASK);
    let other = CallError::Answer { host: host(), what: "404".to_owned() };
    shows(other, Host, "host `h1` answered something else than was asked for: 404", ASK);
    let source = ErrorBody::new(NotFound, "find it").cause("none").remedy("look again");
    let refused = CallError::Refused { host: host(), source };
    shows(refused, NotFound, "host `h1`: find it: none", "look again");
}

#[track_caller]
fn shows(error: ClusterError, code: ErrorCode, cause: &str, remedy: Option<&str>) {
    assert_body(&error.to_body(DO), code, cause, remedy);
}

#[test]
fn a_host_shows_why_it_is_no_member_or_not_the_one_that_it_should_be() {
    let make = "`vmfork cluster init` makes one, `vmfork cluster join` joins one";
    shows(ClusterError::InNone, Conflict, "this host is in no cluster", Some(make));
    let first = Some("`vmfork cluster leave` first");
    shows(ClusterError::InOne, Conflict, "this host is in a cluster already", first);
    shows(ClusterError::NoMore, NotFound, "this host is in no cluster any more", None);
    shows(ClusterError::Leaving, Host, "this host is leaving the cluster", None);

    let again = "put that right: it is tried again every few seconds; or `vmfork cluster leave`";
    let hindered = |by: Hindrance| ClusterError::Hindered(Arc::new(by));
    let port = "listen for other hosts on 10.0.0.1:7072: address in use";
    shows(hindered(taken().into()), Host, port, Some(again));
    let keys = "remove /keys/roster: permission denied";
    shows(hindered(denied().into()), Host, keys, Some(again));
    let ports = Some("name an address of this host with two free ports, `--address IP:PORT`");
    shows(taken().into(), Host, port, ports);
    let forget = ClusterError::Forget { folder: PathBuf::from("/keys"), error: Box::new(denied()) };
    shows(forget, Host, keys, Some("remove /keys by hand"));
    let exists = FolderError::Exists { path: PathBuf::from("/keys") };
    let leave = Some("leave that cluster first, with `vmfork cluster leave`");
    // The folder's own remedy comes first.
    shows(exists.into(), Host, "/keys holds the keys of a cluster already", leave);
    let exists = FolderError::Exists { path: PathBuf::from("/keys") };
    shows(hindered(exists.into()), Host, "/keys holds the keys of a cluster already", leave);
}

#[test]
fn what_is_wrong_with_a_newcomer_or_its_token_is_shown() {
    let left = "this host has left the cluster and admits no other";
    let member = Some("use a token of a host that is still a member");
    shows(JoinError::HasLeft.into(), BadRequest, left, member);
    shows(ClusterError::NotAdmitted(JoinError::HasLeft), Conflict, left, member);
    let no_token = "x".parse::<JoinToken>().expect_err("no token");
    let (text, token) =
        (no_token.to_string(), "`vmfork cluster token` on a member prints one, for one host");
    shows(no_token.into(), BadRequest, &text, Some(token));
    let no_pem = KeyError::Pem { what: "the key", why: "it is empty".to_owned() };
    shows(ClusterError::JoinKeys(no_pem), BadRequest, "the key is no PEM: it is empty", None);
    let life = ClusterError::TokenLife { ttl_s: 0, max_s: 9 };
    shows(life, BadRequest, "0 s are not in 1 to 9", None);
    let many =
        format!("{TOKENS_MAX} tokens of this host are out; it makes no more until one expires");
    shows(IssueError::TooMany.into(), Host, &many, None);
}

#[test]
fn what_is_asked_of_members_fails_with_the_hosts_named() {
    let id = member();
    let drains = "this host takes no more clones: it drains";
    let activate = Some("`vmfork cluster activate` takes it back into use");
    shows(ClusterError::Drains, NoCapacity, drains, activate);
    let no_member = format!("host {id} is no member of the cluster any more");
    shows(ClusterError::NoMember { host: id }, NotFound, &no_member, None);
    let list = Some("`vmfork cluster ls` lists the hosts");
    shows(unknown().into(), NotFound, "no host `h9` in the cluster", list);
    shows(ClusterError::Gone, Host, "it is gone", None);
    shows(late().into(), Timeout, "host `h1` has not answered within 5 s", Some(ASK));
    let hosts = vec!["h1".to_owned(), "h3".to_owned()];
    let several = "several hosts have one of that name: h1, h3";
    let by_id = Some("name it by its id: `vmfork ps --json` tells");
    shows(ClusterError::SeveralHave { hosts: hosts.clone() }, Conflict, several, by_id);
    let silent = "no host that answers has it; these do not answer: h1, h3";
    let back = "`vmfork cluster ls` tells when they are back; `vmfork cluster leave HOST` takes one out that will not come back";
    shows(ClusterError::Silent { hosts }, Host, silent, Some(back));
    let starts = "more of it is started on the hosts all the time";
    let tree = Some("`vmfork tree` shows what is left of it: kill it again");
    shows(ClusterError::KeepsStarting, Timeout, starts, tree);
    let stranger = format!("host {id} is no member of this cluster");
    shows(HeartbeatError::Stranger { from: id }.into(), BadRequest, &stranger, None);
}

#[track_caller]
fn fork_shows(error: RemoteForkError, code: ErrorCode, cause: &str, remedy: Option<&str>) {
    assert_body(&error.to_body(DO), code, cause, remedy);
}

fn view(name: &str, closed: Option<&'static str>) -> HostView {
    HostView {
        id: member(),
        name: name.to_owned(),
        closed,
        free: Room { memory_bytes: 10 << 20, vcpus: 64 },
        once_bytes: 2 << 20,
        has_family: false,
    }
}

#[tokio::test]
async fn a_plan_says_what_each_host_or_the_engine_lacks() {
    let plan_shows = |error: PlanError, code, cause: &str, remedy| {
        fork_shows(error.into(), code, cause, remedy);
    };
    let views = vec![view("h2", None), view("h3", Some("it drains"))];
    let places = "1 of 8 clones fit: `h2` has 10 MiB left (2 of them for memory that its clones share) and 64 virtual CPUs; `h3`: it drains";
    let list = Some("`vmfork cluster ls` shows which hosts take clones, and what they have left");
    plan_shows(PlanError::NoPlace { placed: 1, count: 8, views }, NoCapacity, places, list);
    let short = vec!["h2 is busy".to_owned(), "h3 is down".to_owned()];
    let held = "1 of 8 clones have nodes: h2 is busy; h3 is down";
    let sinfo = Some("`sinfo` and `squeue` show what Slurm's nodes have");
    plan_shows(PlanError::NotHeld { placed: 1, count: 8, short }, NoCapacity, held, sinfo);
    plan_shows(PlanError::NodesLate, Timeout, "no nodes were given in time", None);
    let shape = Room { memory_bytes: 1 << 30, vcpus: 2 };
    let none = AllocateError::NoRoom { asked: 8, shape, why: vec!["no node".to_owned()] };
    let room = "no room for any of 8 clones of 1024 MiB and 2 CPUs: no node";
    let less = Some("`sinfo` and `squeue` show what Slurm's nodes have; ask for less, or wait");
    plan_shows(none.into(), NoCapacity, room, less);
    let odd = AllocateError::Engine { engine: "Slurm", what: "it said nothing".to_owned() };
    let works = Some("do Slurm's commands work on this host, for the user that vmforkd runs as?");
    plan_shows(odd.into(), Host, "Slurm: it said nothing", works);
    let lost = QmpError::Lost { reason: "it ended".to_owned() };
    plan_shows(lost.into(), Qemu, "the connection to QEMU is lost: it ended", None);
    let task = tokio::spawn(std::future::pending::<()>());
    task.abort();
    let ended = task.await.expect_err("aborted");
    let text = ended.to_string();
    plan_shows(ended.into(), Internal, &text, Some(BUG));
}

#[test]
fn what_is_sent_or_started_fails_with_where_to_look() {
    let log = Some("the daemon's log has more");
    let send_shows = |error: SendError, code, cause: &str, remedy| {
        fork_shows(error.into(), code, cause, remedy);
    };
    send_shows(SendError::NotSealed, Host, "what it had written is not known in time", log);
    let lend = "what its VM had written is not known yet";
    send_shows(LendError::NotSealed.into(), Host, lend, log);
    let form = "the device state that QEMU wrote is of no known form";
    send_shows(StateError::Form.into(), Host, form, log);
    let head = "its head of 9 bytes is too large";
    send_shows(SendError::Encode(DescriptorError::Head { bytes: 9 }), Internal, head, None);
    let no_json = serde_json::from_slice::<u32>(b"x").expect_err("no JSON");
    let text = no_json.to_string();
    send_shows(SendError::Answer(no_json), Host, &text, None);
    send_shows(SendError::OtherClones, Host, "it told of other clones", None);

    let doctor = Some("`vmfork doctor` checks the host; the daemon's log has more");
    fork_shows(StartError::from(StateError::Form).into(), Host, form, doctor);
    let full = EngineError::Start(ErrorKind::OutOfMemory.into());
    fork_shows(StartError::from(full).into(), Host, "start a page engine: out of memory", doctor);
}

#[test]
fn what_another_host_sends_is_a_bug_or_of_another_version() {
    let order_shows = |error: OrderError, cause: &str, remedy| {
        fork_shows(error.into(), BadRequest, cause, Some(remedy));
    };
    let name = OrderError::Name { name: "a b".to_owned() };
    order_shows(name, "`a b` is no name of a VM", BUG);
    let far = RangeError::TooFar { start: 7, len: u64::MAX };
    let text = far.to_string();
    order_shows(far.into(), &text, BUG);
    let version = "do both hosts run the same version of vmfork? `vmfork version` on each tells";
    order_shows(DescriptorError::Long { left: 1 }.into(), "1 bytes follow its end", version);
    order_shows(ArrivalError::Empty.into(), "it names no image", version);
}

#[test]
fn what_others_say_passes_a_fork_as_it_is() {
    let said = ErrorBody::new(Conflict, "look").cause("another QEMU").remedy("--force");
    assert_eq!(RemoteForkError::from(ForkError::Clone(said.clone())).to_body(DO), said);
    assert_eq!(RemoteForkError::from(HostError::Keeper(said.clone())).to_body(DO), said);
    assert_eq!(RemoteForkError::Image(said.clone()).to_body(DO), said);
    let given_up = RemoteForkError::GivenUp.to_body(DO);
    assert_eq!(given_up, ForkError::GivenUp.to_body(DO));
    let no_turn = ForkError::NoTurn;
    assert_eq!(RemoteForkError::from(no_turn).to_body(DO), ForkError::NoTurn.to_body(DO));
    fork_shows(ClusterError::Gone.into(), Host, "it is gone", None);
    fork_shows(late().into(), Timeout, "host `h1` has not answered within 5 s", Some(ASK));
    // But for a remedy that only a snapshot's starter has.
    let refused = vmfork_fork::facts::check_machine("pc-9", "pc-7").expect_err("another one");
    let unlike = RemoteForkError::Unlike(refused.into()).to_body(DO);
    assert!(unlike.to_string().contains("`pc-9`, this host has `pc-7`"), "{unlike}");
    let remedy = unlike.remedy.expect("a remedy");
    assert!(remedy.contains("`--host` names hosts that have them"), "{remedy}");
}

#[test]
fn a_guest_image_that_does_not_come_says_what_to_do() {
    let shows = |error: FetchError, code, cause: &str, remedy| {
        assert_body(&error.to_body(DO), code, cause, remedy);
    };
    let source = axum::Error::new(io::Error::from(ErrorKind::TimedOut));
    let broken = FetchError::Broken { file: "root.img".to_owned(), source };
    let body = broken.to_body(DO);
    let cause = body.cause.expect("a cause");
    assert!(cause.starts_with("`root.img`: the connection broke off: timed out"), "{cause}");
    let reach = "try again when the hosts reach each other";
    assert_eq!((body.code, body.remedy.as_deref()), (Host, Some(reach)));
    let odd = FetchError::Description { host: "h1".to_owned(), why: "no JSON".to_owned() };
    let described = "host `h1` describes it in a way that can't be: no JSON";
    shows(odd, Host, described, Some("do both hosts run the same version of vmfork?"));
    let no_image = GuestArrivalError::NoImage { why: "no disk".to_owned() };
    let version = Some("check that both hosts run the same version of vmfork");
    let cannot = "this version cannot receive the image: no disk";
    shows(no_image.into(), Host, cannot, version);
    let late_text = "not all of it has come in the time that there was";
    let more = Some("allow more with `--timeout`, or bring the image there before");
    shows(FetchError::Late, Timeout, late_text, more);
    // All that waited for one transfer get the same.
    shows(FetchError::Shared(Arc::new(FetchError::Late)), Timeout, late_text, more);
    let hash = "0123456789abcdef".to_owned();
    let none = "no image here has the root disk of hash 0123456789abcdef…";
    let other = Some("was it removed, or built again? Fork a VM of the image that is there now");
    shows(FetchError::NoImage { hash }, NotFound, none, other);
    shows(FetchError::NoFile, NotFound, "the image has no such file", None);
    shows(ClusterError::Gone.into(), Host, "it is gone", None);
    shows(late().into(), Timeout, "host `h1` has not answered within 5 s", Some(ASK));
}

#[tokio::test]
async fn tickets_and_quotas_show_what_they_wait_for() {
    let shows = |error: TicketError, code, cause: &str, remedy| {
        assert_body(&error.to_body(DO), code, cause, remedy);
    };
    let many = "7 tickets of that host wait to be used";
    shows(TicketError::TooMany { limit: 7 }, NoCapacity, many, None);
    let short = vec!["h2 is busy".to_owned(), "h3 is down".to_owned()];
    shows(TicketError::Short { short }, NoCapacity, "h2 is busy; h3 is down", None);
    let inbox = Semaphore::new(1);
    inbox.close();
    let closed = inbox.acquire().await.expect_err("closed");
    let text = closed.to_string();
    shows(closed.into(), Internal, &text, None);
    let after = Duration::from_millis(5900);
    shows(TicketError::Late { after }, Timeout, "it has not come within 5 s", None);
    let reset = TicketError::Broken { what: "reset".to_owned() };
    shows(reset, BadRequest, "reset", None);
    shows(LetterError::Short.into(), BadRequest, "cut short", Some(BUG));
    let unknown = "the ticket is not known here (any more)";
    shows(TicketError::Unknown, NotFound, unknown, None);
    let changed = "hosts have come or gone just now";
    shows(Unsettled::JustChanged.into(), Conflict, changed, None);
    let said = ErrorBody::new(NoCapacity, "make room").cause("it is full");
    assert_eq!(TicketError::from(HostError::Keeper(said.clone())).to_body(DO), said);
}

#[test]
fn a_quota_that_no_host_tells_says_why() {
    let id = member();
    let source = ErrorBody::new(Conflict, "count what a user has").cause("a host is new");
    let no_member = format!("ask what a user has: host {id} is no member of the cluster any more");
    let cases: [(NotTold, &str); 4] = [
        (NotTold::NoKeeper, "no host counts it"),
        (
            Unsettled::OtherKeeper.into(),
            "count what a user has: another host counts that, as this one sees it",
        ),
        (ClusterError::NoMember { host: id }.into(), &no_member),
        (
            CallError::Refused { host: "h1".to_owned(), source }.into(),
            "host `h1`: count what a user has: a host is new",
        ),
    ];
    let again = "try again in some seconds; `vmfork cluster ls` tells which hosts are there";
    for (source, why) in cases {
        let cause = format!("what user 1000 has can't be told now: {why}");
        let untold = TicketError::Untold { user: "1000".to_owned(), source: Box::new(source) };
        assert_body(&untold.to_body(DO), Host, &cause, Some(again));
    }
}
