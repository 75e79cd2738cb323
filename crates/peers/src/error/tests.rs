//! What a reader gets of each error: code, cause and remedy.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use vmfork_api::ErrorBody;
use vmfork_api::ErrorCode::{self, BadRequest, Conflict, Host, NoCapacity, NotFound, Timeout};
use vmfork_cluster::{
    FolderError, HeartbeatError, HostId, IssueError, JoinError, JoinToken, KeyError, MemberError,
    TOKENS_MAX,
};

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
