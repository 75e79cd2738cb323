//! How a host gets in.
//!
//! ```text
//!   newcomer                                   host that made the token
//!   Newcomer::new: id, key
//!     ─── TLS: that host's certificate, by the token's fingerprint; none of its own ───►
//!     ─── JoinRequest: secret, name, address, signing request ───►  admit: check, certify, take in
//!     ◄── JoinAnswer: certificate, authority with its key, members ───
//!   Newcomer::finish: checks ──► Cluster
//! ```
//!
//! The newcomer gets the authority's key, so that it can admit others in its turn: there is no host
//! that the cluster can't do without. A token is good for one host; the same request may come
//! again, if its answer was lost, and gets the same answer. Left to others: carrying the two
//! messages, writing down what changed.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::ClientConfig;
use rustls::pki_types::{DnsName, ServerName};
use serde::{Deserialize, Serialize};

use crate::id::{Fingerprint, HostId, RandomError, sha256};
use crate::keys::{
    Authority, CERTIFICATE_BYTES_MAX, HostKey, Identity, KeyError, certificate_pem,
    check_certified, join_client,
};
use crate::membership::{
    Entry, EntryError, MemberError, Membership, MergeError, Now, check_address, check_name,
};
use crate::token::{JoinToken, RedeemError, Secret, Tokens, Used};

/// Of both messages.
const VERSION: u32 = 1;

/// Text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(…)")
    }
}

/// What a newcomer asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRequest {
    pub version: u32,
    pub secret: Secret,
    /// Chosen by the newcomer.
    pub id: HostId,
    pub name: String,
    /// Where it will listen for members.
    pub address: String,
    /// PKCS #10, in base64.
    pub signing_request: String,
}

/// What it gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinAnswer {
    pub version: u32,
    /// The newcomer's.
    pub certificate_pem: String,
    pub authority_pem: String,
    pub authority_key_pem: SecretText,
    /// The newcomer too.
    pub members: Vec<Entry>,
}

/// Why a host did not get in, on either side.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error("the {whose} speaks version {version} of the join protocol, this vmfork {VERSION}")]
    Version { whose: &'static str, version: u32 },
    #[error(transparent)]
    Token(#[from] RedeemError),
    #[error(transparent)]
    Member(#[from] MemberError),
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error("the signing request is no base64")]
    Base64 {
        #[source]
        source: base64::DecodeError,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("the members that the answer names can't be")]
    Members {
        #[source]
        source: MergeError,
    },
    #[error("the answer is not for this host: it lacks {what}")]
    Answer { what: &'static str },
    #[error("this host has left the cluster and admits no other")]
    HasLeft,
    #[error(transparent)]
    Random(#[from] RandomError),
}

impl JoinError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Token(_) => Some("make a new one with `vmfork cluster token` on a member"),
            Self::Member(error) => error.remedy(),
            Self::Entry(error) => Some(error.remedy()),
            Self::Version { .. } => Some("install the same version of vmfork on all hosts"),
            Self::HasLeft => Some("use a token of a host that is still a member"),
            _ => None,
        }
    }
}

/// Lets a newcomer in, if its token is good and nothing else speaks against it. A request that is
/// refused changes nothing. Tokens and members should be written down before the answer goes.
///
/// # Errors
/// Why not. Tell the newcomer: who has no token learns no more than that.
pub fn admit(
    request: &JoinRequest,
    tokens: &mut Tokens,
    members: &mut Membership,
    authority: &Authority,
    now: Now,
) -> Result<JoinAnswer, JoinError> {
    if request.version != VERSION {
        return Err(JoinError::Version { whose: "newcomer", version: request.version });
    }
    let request_hash = hash(request);
    // The token first: only a holder of one may learn names of members.
    let used = tokens.look(&request.secret, now.unix_s)?.cloned();
    if members.has_left() {
        return Err(JoinError::HasLeft);
    }
    let certificate_pem = match used {
        // It may have been removed again since.
        Some(used) if used.request == request_hash && members.member(request.id).is_some() => {
            used.certificate_pem
        }
        Some(_) => return Err(RedeemError::Used.into()),
        None => {
            members.check_newcomer(request.id, &request.name, &request.address)?;
            if request.signing_request.len() > 2 * CERTIFICATE_BYTES_MAX {
                let bytes = request.signing_request.len();
                return Err(KeyError::TooLong { what: "the signing request", bytes }.into());
            }
            let signing_request = STANDARD
                .decode(&request.signing_request)
                .map_err(|source| JoinError::Base64 { source })?;
            let certificate = authority.certify(request.id, &signing_request)?;
            let fingerprint = Fingerprint::of(&certificate);
            members.admit(request.id, &request.name, &request.address, fingerprint, now)?;
            let certificate_pem = certificate_pem(&certificate);
            let used = Used { request: request_hash, certificate_pem: certificate_pem.clone() };
            tokens.mark_used(&request.secret, used);
            certificate_pem
        }
    };
    Ok(JoinAnswer {
        version: VERSION,
        certificate_pem,
        authority_pem: authority.certificate_pem(),
        authority_key_pem: SecretText(authority.key_pem()),
        members: members.entries().cloned().collect(),
    })
}

fn hash(request: &JoinRequest) -> Fingerprint {
    let json = serde_json::to_vec(request).expect("plain data to memory");
    Fingerprint::from_bytes(sha256(&json))
}

/// All that makes a host a member.
#[derive(Debug)]
pub struct Cluster {
    pub authority: Authority,
    pub identity: Identity,
    pub members: Membership,
}

impl Cluster {
    /// A new cluster, of this host alone.
    ///
    /// # Errors
    /// The name or the address can't be one; keys can't be made.
    pub fn init(name: &str, address: &str) -> Result<Self, JoinError> {
        check_name(name)?;
        check_address(address)?;
        let authority = Authority::generate()?;
        let identity = Identity::generate(HostId::random()?, &authority)?;
        let fingerprint = identity.fingerprint();
        let members = Membership::alone(identity.host(), name, address, fingerprint)?;
        Ok(Self { authority, identity, members })
    }
}

/// A host that wants in. Keep it until an answer came: the same request may be sent again, a new
/// one needs a new token.
#[derive(Debug)]
pub struct Newcomer {
    token: JoinToken,
    key: HostKey,
    request: JoinRequest,
}

impl Newcomer {
    /// # Errors
    /// The name or the address can't be one; keys can't be made.
    pub fn new(token: JoinToken, name: &str, address: &str) -> Result<Self, JoinError> {
        check_name(name)?;
        check_address(address)?;
        let id = HostId::random()?;
        let key = HostKey::generate(id)?;
        let request = JoinRequest {
            version: VERSION,
            secret: token.secret.clone(),
            id,
            name: name.to_owned(),
            address: address.to_owned(),
            signing_request: STANDARD.encode(key.signing_request()?),
        };
        Ok(Self { token, key, request })
    }

    /// Where to send the request.
    pub fn address(&self) -> &str {
        &self.token.address
    }

    /// What to send.
    pub fn request(&self) -> &JoinRequest {
        &self.request
    }

    /// For the connection; it accepts only the host that made the token.
    ///
    /// # Errors
    /// TLS can't be set up.
    pub fn client(&self) -> Result<Arc<ClientConfig>, KeyError> {
        join_client(self.token.issuer)
    }

    /// The server name for that connection. It is not looked at: the token does not say the host's
    /// id.
    pub fn server_name() -> ServerName<'static> {
        let name = DnsName::try_from("join.vmfork.internal");
        ServerName::DnsName(name.expect("it is a DNS name"))
    }

    /// Takes the answer.
    ///
    /// # Errors
    /// It is not what this host asked for.
    pub fn finish(self, answer: &JoinAnswer, now: Now) -> Result<Cluster, JoinError> {
        if answer.version != VERSION {
            return Err(JoinError::Version { whose: "cluster", version: answer.version });
        }
        let authority = Authority::from_pem(&answer.authority_pem, &answer.authority_key_pem.0)?;
        let id = self.key.host();
        let key_pem = self.key.key_pem();
        let identity = Identity::from_pem(id, &answer.certificate_pem, key_pem)?;
        check_certified(&identity, &authority)?;
        let JoinRequest { name, address, .. } = &self.request;
        let own = answer.members.iter().find(|entry| entry.id == id);
        if own.is_none_or(|own| own.fingerprint != identity.fingerprint() || own.state.is_left()) {
            return Err(JoinError::Answer { what: "this host among the members" });
        }
        let mut members = Membership::alone(id, name, address, identity.fingerprint())?;
        members.merge(&answer.members, now).map_err(|source| JoinError::Members { source })?;
        if members.member_by_fingerprint(self.token.issuer).is_none() {
            return Err(JoinError::Answer { what: "the host that made the token" });
        }
        Ok(Cluster { authority, identity, members })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn now(unix_s: u64) -> Now {
        Now { monotonic: Duration::from_secs(unix_s), unix_s }
    }

    struct Host {
        cluster: Cluster,
        tokens: Tokens,
    }

    impl Host {
        fn first() -> Self {
            let cluster = Cluster::init("a", "10.0.0.1:7070").expect("good");
            Self { cluster, tokens: Tokens::default() }
        }

        fn token(&mut self) -> JoinToken {
            let print = self.cluster.identity.fingerprint();
            self.tokens.issue("10.0.0.1:7070", print, 60, 1000).expect("room")
        }

        fn admit(&mut self, request: &JoinRequest, at: u64) -> Result<JoinAnswer, JoinError> {
            let Cluster { authority, members, .. } = &mut self.cluster;
            admit(request, &mut self.tokens, members, authority, now(at))
        }
    }

    #[test]
    fn who_joined_can_admit_the_next() {
        let mut first = Host::first();
        let newcomer = Newcomer::new(first.token(), "b", "10.0.0.2:7070").expect("good");
        let answer = first.admit(newcomer.request(), 1001).expect("admitted");
        let cluster = newcomer.finish(&answer, now(1)).expect("joined");
        assert_eq!(cluster.members.members().count(), 2);
        assert_eq!(cluster.members.digest(), first.cluster.members.digest());

        let mut second = Host { cluster, tokens: Tokens::default() };
        let newcomer = Newcomer::new(second.token(), "c", "10.0.0.3:7070").expect("good");
        let answer = second.admit(newcomer.request(), 1001).expect("admitted");
        let third = newcomer.finish(&answer, now(1)).expect("joined");
        assert_eq!(third.members.members().count(), 3);
        check_certified(&third.identity, &first.cluster.authority).expect("the same authority");
    }

    #[test]
    fn a_token_lets_one_host_in_and_answers_it_again() {
        let mut host = Host::first();
        let token = host.token();
        let newcomer = Newcomer::new(token.clone(), "b", "10.0.0.2:7070").expect("good");
        let answer = host.admit(newcomer.request(), 1001).expect("admitted");
        let again = host.admit(newcomer.request(), 1002).expect("the answer was lost");
        assert_eq!(answer, again);
        let other = Newcomer::new(token, "c", "10.0.0.3:7070").expect("good");
        let error = host.admit(other.request(), 1003).expect_err("used");
        assert!(matches!(error, JoinError::Token(RedeemError::Used)), "{error}");
        let error = host.admit(newcomer.request(), 1060).expect_err("expired");
        assert!(matches!(error, JoinError::Token(RedeemError::Unknown)), "{error}");
        assert_eq!(host.cluster.members.members().count(), 2);
        // Removed meanwhile: its old token is no way back.
        let mut host = Host::first();
        let newcomer = Newcomer::new(host.token(), "b", "10.0.0.2:7070").expect("good");
        host.admit(newcomer.request(), 1001).expect("admitted");
        host.cluster.members.leave(newcomer.request().id, now(1002)).expect("a member");
        let error = host.admit(newcomer.request(), 1003).expect_err("removed");
        assert!(matches!(error, JoinError::Token(RedeemError::Used)), "{error}");
    }

    #[test]
    fn what_is_refused_leaves_the_token_good() {
        let mut host = Host::first();
        let token = host.token();
        let taken = Newcomer::new(token.clone(), "a", "10.0.0.2:7070").expect("good");
        let error = host.admit(taken.request(), 1001).expect_err("the name is taken");
        assert!(matches!(error, JoinError::Member(MemberError::NameTaken { .. })), "{error}");
        assert!(error.remedy().expect("there is one").contains("--name"));

        let good = Newcomer::new(token, "b", "10.0.0.2:7070").expect("good");
        let with = |change: fn(&mut JoinRequest)| {
            let mut request = good.request().clone();
            change(&mut request);
            request
        };
        for (bad, text) in [
            (with(|it| it.version = 2), "version 2"),
            (with(|it| it.signing_request = "?".into()), "no base64"),
            (with(|it| it.signing_request = "AAAA".into()), "signing request is not"),
            (with(|it| it.signing_request = "A".repeat(100_000)), "100000 bytes"),
            (with(|it| it.name = "b b".into()), "not a valid host name"),
            (with(|it| it.address = "b".into()), "not a valid host address"),
        ] {
            let error = host.admit(&bad, 1001).expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        }
        // A signing request whose signature is another key's.
        let mut forged = good.request().clone();
        let mut der = STANDARD.decode(&forged.signing_request).expect("base64");
        let last = der.len() - 1;
        der[last] ^= 1;
        forged.signing_request = STANDARD.encode(der);
        assert!(matches!(host.admit(&forged, 1001), Err(JoinError::Key(_))));
        host.admit(good.request(), 1001).expect("the token is still good");
    }

    #[test]
    fn an_answer_for_another_or_from_another_is_refused() {
        let mut host = Host::first();
        let first = Newcomer::new(host.token(), "b", "10.0.0.2:7070").expect("good");
        let second = Newcomer::new(host.token(), "c", "10.0.0.3:7070").expect("good");
        let for_first = host.admit(first.request(), 1001).expect("admitted");
        let for_second = host.admit(second.request(), 1001).expect("admitted");
        let error = second.finish(&for_first, now(1)).expect_err("another's");
        assert!(matches!(error, JoinError::Key(KeyError::Mismatch { .. })), "{error}");

        let mut foreign = for_first.clone();
        foreign.authority_pem = Authority::generate().expect("keys").certificate_pem();
        let again = |answer: &JoinAnswer| {
            let mut host = Host::first();
            let newcomer = Newcomer::new(host.token(), "b", "10.0.0.2:7070").expect("good");
            let mut good = host.admit(newcomer.request(), 1001).expect("admitted");
            if answer.authority_pem != for_first.authority_pem {
                good.authority_pem.clone_from(&answer.authority_pem);
            }
            if answer.members.is_empty() {
                good.members.clear();
            }
            newcomer.finish(&good, now(1)).expect_err("not what it should be").to_string()
        };
        assert!(again(&foreign).contains("don't belong together"));
        let empty = JoinAnswer { members: Vec::new(), ..for_second };
        assert!(again(&empty).contains("this host among the members"));
    }

    #[test]
    fn no_secret_is_shown() {
        let mut host = Host::first();
        let newcomer = Newcomer::new(host.token(), "b", "10.0.0.2:7070").expect("good");
        let answer = host.admit(newcomer.request(), 1001).expect("admitted");
        let shown = format!("{newcomer:?} {answer:?} {host:?}", host = host.cluster);
        assert!(!shown.contains("PRIVATE"), "{shown}");
        assert!(shown.contains("Secret(…)") && shown.contains("SecretText(…)"));
    }
}
