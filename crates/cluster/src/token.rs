//! What lets a newcomer in: a line of text, made by a member, good for one host and some time.
//!
//! ```text
//!   vmfork-join-1:BASE64URL
//!                 fingerprint 32 │ secret 16 │ expiry 8 │ address … │ check 4
//! ```
//!
//! The fingerprint is that of the *certificate of the host that made the token*. By it the newcomer
//! knows which host gets the secret. (It is not the authority's fingerprint: every host has that
//! key, also a host that has left.) Numbers are big-endian. The expiry is in seconds since 1970.
//! The check is the beginning of the SHA-256 of what stands before it. It tells a token that was
//! cut off or mistyped from a wrong one.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::id::{Fingerprint, RandomError, hex, random, sha256, unhex};
use crate::membership::{EntryError, check_address};

const PREFIX: &str = "vmfork-join-1:";
const SECRET_BYTES: usize = 16;
const CHECK_BYTES: usize = 4;
const FIXED_BYTES: usize = 32 + SECRET_BYTES + 8;
/// An address is at most 259 bytes long.
const TEXT_BYTES_MAX: usize = 1024;

/// Most tokens that a host has out at a time: no cluster needs more, and the book stays small.
pub const TOKENS_MAX: usize = 1024;

/// 128 random bits that open the door once. Not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    fn hash(&self) -> [u8; 32] {
        sha256(&self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // Not in the error's text, which may be logged.
        unhex(&text).map(Self).ok_or_else(|| serde::de::Error::custom("a secret has 32 hex digits"))
    }
}

/// A token. Its text holds a secret: show it only to whom it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// Where the host listens that made it.
    pub address: String,
    /// The certificate that host shows.
    pub issuer: Fingerprint,
    pub secret: Secret,
    /// By that host's clock, which decides.
    pub expires_unix_s: u64,
}

/// Text that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("a token begins with `{PREFIX}`")]
    Prefix,
    #[error("the token is of another version of vmfork; this one makes and reads `{PREFIX}…`")]
    Version,
    #[error("the token is damaged: a part of it is missing, or was mistyped")]
    Damaged,
    #[error("the token can't be")]
    Address {
        #[source]
        source: EntryError,
    },
}

impl JoinToken {
    /// The line of text.
    pub fn to_text(&self) -> String {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.address.len() + CHECK_BYTES);
        bytes.extend_from_slice(self.issuer.as_bytes());
        bytes.extend_from_slice(&self.secret.0);
        bytes.extend_from_slice(&self.expires_unix_s.to_be_bytes());
        bytes.extend_from_slice(self.address.as_bytes());
        let check = sha256(&bytes);
        bytes.extend_from_slice(&check[..CHECK_BYTES]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    /// Spaces and line ends around it are not minded: tokens are pasted.
    fn from_str(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let Some(encoded) = text.strip_prefix(PREFIX) else {
            let is_ours = text.starts_with("vmfork-join-");
            return Err(if is_ours { TokenError::Version } else { TokenError::Prefix });
        };
        if encoded.len() > TEXT_BYTES_MAX {
            return Err(TokenError::Damaged);
        }
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| TokenError::Damaged)?;
        let (content, check) =
            bytes.split_last_chunk::<CHECK_BYTES>().ok_or(TokenError::Damaged)?;
        if sha256(content)[..CHECK_BYTES] != check[..] {
            return Err(TokenError::Damaged);
        }
        let (issuer, rest) = content.split_first_chunk().ok_or(TokenError::Damaged)?;
        let (secret, rest) = rest.split_first_chunk().ok_or(TokenError::Damaged)?;
        let (expiry, address) = rest.split_first_chunk().ok_or(TokenError::Damaged)?;
        let address = std::str::from_utf8(address).map_err(|_| TokenError::Damaged)?;
        check_address(address).map_err(|source| TokenError::Address { source })?;
        Ok(Self {
            address: address.to_owned(),
            issuer: Fingerprint::from_bytes(*issuer),
            secret: Secret(*secret),
            expires_unix_s: u64::from_be_bytes(*expiry),
        })
    }
}

/// The tokens that this host has out, by the hashes of their secrets: who reads the book can't join
/// by it.
#[derive(Debug, Default, Clone)]
pub struct Tokens {
    issued: BTreeMap<[u8; 32], Issued>,
}

#[derive(Debug, Clone)]
struct Issued {
    expires_unix_s: u64,
    used: Option<Used>,
}

/// What a token was used for. Kept as long as the token would have been good, so that a newcomer
/// that did not get the answer can ask again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    /// Of the whole request.
    pub(crate) request: Fingerprint,
    pub(crate) certificate_pem: String,
}

/// As it is written.
#[derive(Serialize, Deserialize)]
struct Written {
    format: String,
    tokens: Vec<WrittenToken>,
}

#[derive(Serialize, Deserialize)]
struct WrittenToken {
    /// Of the secret.
    sha256: Fingerprint,
    expires_unix_s: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    used: Option<Used>,
}

const FORMAT: &str = "vmfork-tokens/1";

/// A written book of tokens that is not as it was written.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The cause names line and column.
    #[error("it is no list of tokens")]
    Json {
        #[source]
        source: serde_json::Error,
    },
    #[error("its format is `{found}`, this vmfork reads `{FORMAT}`")]
    Format { found: String },
}

/// Why no token was made.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("{TOKENS_MAX} tokens of this host are out; it makes no more until one expires")]
    TooMany,
    #[error("the token can't be")]
    Address {
        #[source]
        source: EntryError,
    },
    #[error(transparent)]
    Random(#[from] RandomError),
}

/// Why a secret opens nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RedeemError {
    #[error("this host made no such token, or it has expired")]
    Unknown,
    #[error("the token has been used already; each is good for one host")]
    Used,
}

impl Tokens {
    /// A token to join by, at this address of this host, for `ttl_s` seconds. The book should be
    /// written down before anybody gets it.
    ///
    /// # Errors
    /// There are too many, or no random bytes.
    pub fn issue(
        &mut self,
        address: &str,
        issuer: Fingerprint,
        ttl_s: u64,
        unix_s: u64,
    ) -> Result<JoinToken, IssueError> {
        check_address(address).map_err(|source| IssueError::Address { source })?;
        self.expire(unix_s);
        if self.issued.len() >= TOKENS_MAX {
            return Err(IssueError::TooMany);
        }
        let secret = Secret(random()?);
        let expires_unix_s = unix_s.saturating_add(ttl_s);
        self.issued.insert(secret.hash(), Issued { expires_unix_s, used: None });
        Ok(JoinToken { address: address.to_owned(), issuer, secret, expires_unix_s })
    }

    /// What the token of this secret was used for already: `None` if it is still good.
    pub(crate) fn look(
        &mut self,
        secret: &Secret,
        unix_s: u64,
    ) -> Result<Option<&Used>, RedeemError> {
        self.expire(unix_s);
        // By its hash: how long this takes tells nothing of the secret.
        let issued = self.issued.get(&secret.hash()).ok_or(RedeemError::Unknown)?;
        Ok(issued.used.as_ref())
    }

    pub(crate) fn mark_used(&mut self, secret: &Secret, used: Used) {
        if let Some(issued) = self.issued.get_mut(&secret.hash()) {
            issued.used = Some(used);
        }
    }

    fn expire(&mut self, unix_s: u64) {
        self.issued.retain(|_, issued| issued.expires_unix_s > unix_s);
    }

    /// The book, to be written down.
    pub fn to_json(&self) -> Vec<u8> {
        let token = |(hash, issued): (&[u8; 32], &Issued)| WrittenToken {
            sha256: Fingerprint::from_bytes(*hash),
            expires_unix_s: issued.expires_unix_s,
            used: issued.used.clone(),
        };
        let written =
            Written { format: FORMAT.to_owned(), tokens: self.issued.iter().map(token).collect() };
        let mut json = serde_json::to_vec_pretty(&written).expect("plain data to memory");
        json.push(b'\n');
        json
    }

    /// What [`Tokens::to_json`] wrote.
    ///
    /// # Errors
    /// It is something else.
    pub fn from_json(json: &[u8]) -> Result<Self, TokensError> {
        let written: Written =
            serde_json::from_slice(json).map_err(|source| TokensError::Json { source })?;
        if written.format != FORMAT {
            return Err(TokensError::Format { found: crate::id::shortened(&written.format) });
        }
        let issued = written.tokens.into_iter().map(|token| {
            let issued = Issued { expires_unix_s: token.expires_unix_s, used: token.used };
            (*token.sha256.as_bytes(), issued)
        });
        Ok(Self { issued: issued.collect() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(address: &str) -> JoinToken {
        JoinToken {
            address: address.into(),
            issuer: Fingerprint::from_bytes([7; 32]),
            secret: Secret([9; 16]),
            expires_unix_s: 1_800_000_000,
        }
    }

    #[test]
    fn a_token_is_a_line_that_stays_as_it_is() {
        let text = token("10.0.0.1:7070").to_text();
        assert_eq!(
            text,
            "vmfork-join-1:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcJCQkJCQkJCQkJCQkJCQkJAAAAAGtJ0gAxMC4wLjAuMTo3MDcwuXXQNg"
        );
        assert_eq!(text.parse(), Ok(token("10.0.0.1:7070")));
        assert_eq!(format!(" {text}\n").parse(), Ok(token("10.0.0.1:7070")));
        assert!(!format!("{:?}", token("a:1")).contains('9'), "the secret is not shown");
    }

    #[test]
    fn what_is_no_token_is_told_why() {
        let why = |text: &str| text.parse::<JoinToken>().expect_err("no token").to_string();
        assert_eq!(why("hello"), "a token begins with `vmfork-join-1:`");
        assert!(why("vmfork-join-2:AAAA").contains("another version"));
        for bad in ["vmfork-join-1:", "vmfork-join-1:AAAA", "vmfork-join-1:ä"] {
            assert!(why(bad).contains("damaged"), "{bad}");
        }
        assert!(why(&format!("{PREFIX}{}", "A".repeat(5000))).contains("damaged"));
        let nowhere = why(&token("nowhere").to_text());
        assert_eq!(nowhere, "the token can't be");
    }

    #[test]
    fn a_token_is_good_once_and_for_a_time() {
        let mut tokens = Tokens::default();
        let print = Fingerprint::from_bytes([1; 32]);
        let first = tokens.issue("a:1", print, 60, 1000).expect("room");
        let second = tokens.issue("a:1", print, 600, 1000).expect("room");
        assert_ne!(first.secret, second.secret);
        assert_eq!(tokens.look(&first.secret, 1059), Ok(None));
        let used = Used { request: print, certificate_pem: "x".into() };
        tokens.mark_used(&first.secret, used.clone());
        assert_eq!(tokens.look(&first.secret, 1059), Ok(Some(&used)));
        assert_eq!(tokens.look(&first.secret, 1060), Err(RedeemError::Unknown));
        assert_eq!(tokens.look(&Secret([0; 16]), 1060), Err(RedeemError::Unknown));
        assert_eq!(tokens.look(&second.secret, 1599), Ok(None));
    }

    #[test]
    fn the_book_knows_hashes_only_and_can_be_read_again() {
        let mut tokens = Tokens::default();
        let print = Fingerprint::from_bytes([1; 32]);
        let token = tokens.issue("a:1", print, 60, 1000).expect("room");
        let json = tokens.to_json();
        let text = String::from_utf8(json.clone()).expect("text");
        assert!(!text.contains(&hex(&token.secret.0)), "{text}");
        let mut read = Tokens::from_json(&json).expect("as written");
        assert_eq!(read.look(&token.secret, 1001), Ok(None));
        for end in 0..json.len() - 2 {
            assert!(Tokens::from_json(&json[..end]).is_err(), "cut at {end}");
        }
        let later = text.replace("tokens/1", "tokens/9");
        let error = Tokens::from_json(later.as_bytes()).expect_err("of the future").to_string();
        assert_eq!(error, "its format is `vmfork-tokens/9`, this vmfork reads `vmfork-tokens/1`");
    }

    #[test]
    fn there_are_not_too_many() {
        let mut tokens = Tokens::default();
        let print = Fingerprint::from_bytes([1; 32]);
        for _ in 0..TOKENS_MAX {
            tokens.issue("a:1", print, 60, 1000).expect("room");
        }
        assert!(matches!(tokens.issue("a:1", print, 60, 1001), Err(IssueError::TooMany)));
        tokens.issue("a:1", print, 60, 1060).expect("all have expired");
    }

    proptest! {
        #[test]
        fn one_wrong_character_is_noticed(at in 0..100usize, other in "[A-Za-z0-9_-]") {
            let text = token("10.0.0.1:7070").to_text();
            let at = PREFIX.len() + at % (text.len() - PREFIX.len());
            let mut damaged = text.clone();
            damaged.replace_range(at..=at, &other);
            prop_assert!(damaged == text || damaged.parse::<JoinToken>() == Err(TokenError::Damaged));
        }

        #[test]
        fn any_text_is_read_without_panic(text in any::<String>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = text.parse::<JoinToken>();
            let encoded = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(&bytes));
            let _ = encoded.parse::<JoinToken>();
            let mut checked = bytes;
            let check = sha256(&checked);
            checked.extend_from_slice(&check[..CHECK_BYTES]);
            let _ = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(checked)).parse::<JoinToken>();
        }
    }
}
