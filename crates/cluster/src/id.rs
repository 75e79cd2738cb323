//! What hosts and certificates are called.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, DnsName, ServerName};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Below which every host has a name for certificates. It is never resolved: addresses are the
/// membership's.
const DOMAIN: &str = ".vmfork.internal";

/// A host of a cluster: 64 random bits, chosen when it makes or joins one, never used again. Shown
/// as 16 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(u64);

/// Text that is no [`HostId`] or [`Fingerprint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("`{text}` is no host id: it has 16 hex digits, not all 0")]
    Host { text: String },
    #[error("`{text}` is no certificate's fingerprint: it has 64 hex digits")]
    Fingerprint { text: String },
}

/// The system gives no random bytes.
#[derive(Debug, thiserror::Error)]
#[error("get random bytes from the system")]
pub struct RandomError {
    #[source]
    source: getrandom::Error,
}

/// Fills `bytes` from the system's random source.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], RandomError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|source| RandomError { source })?;
    Ok(bytes)
}

impl HostId {
    /// `None` for 0, which no host has.
    pub const fn new(id: u64) -> Option<Self> {
        if id == 0 { None } else { Some(Self(id)) }
    }

    /// A new one.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn random() -> Result<Self, RandomError> {
        // 0 comes once in 2^64 draws.
        Ok(Self(u64::from_be_bytes(random()?).max(1)))
    }

    /// As a number, never 0.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The subject alternative name of the host's certificate.
    pub fn domain_name(self) -> String {
        format!("{self}{DOMAIN}")
    }

    /// What a client that wants to reach this host, and no other, gives to `rustls`.
    pub fn server_name(self) -> ServerName<'static> {
        let name = DnsName::try_from(self.domain_name());
        ServerName::DnsName(name.expect("hex digits and the domain are a DNS name"))
    }

    /// The host that a client wants by [`HostId::server_name`].
    pub(crate) fn of_server_name(name: &ServerName<'_>) -> Option<Self> {
        match name {
            ServerName::DnsName(name) => name.as_ref().strip_suffix(DOMAIN)?.parse().ok(),
            _ => None,
        }
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({self})")
    }
}

impl FromStr for HostId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let bytes = unhex::<8>(text);
        bytes
            .and_then(|bytes| Self::new(u64::from_be_bytes(bytes)))
            .ok_or_else(|| IdError::Host { text: shortened(text) })
    }
}

/// SHA-256 of a certificate's DER, as `openssl x509 -fingerprint -sha256` shows it, but for the
/// colons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(sha256(certificate))
    }

    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        unhex(text).map(Self).ok_or_else(|| IdError::Fingerprint { text: shortened(text) })
    }
}

/// As their text: what people read in a file is what the CLI shows.
macro_rules! serde_as_text {
    ($($type:ty),+) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}

serde_as_text!(HostId, Fingerprint);

pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `N` bytes of two lower-case hex digits each; no sign, no space.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

/// For errors: a peer's text may be long, and may be anything.
pub(crate) fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let mut short: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_by_16_hex_digits() {
        let host = HostId::new(0xa1).expect("not 0");
        assert_eq!(host.to_string(), "00000000000000a1");
        assert_eq!("00000000000000a1".parse(), Ok(host));
        for bad in [
            "",
            "a1",
            "00000000000000A1",
            "+0000000000000a1",
            "0000000000000000",
            "000000000000000g",
        ] {
            assert!(bad.parse::<HostId>().is_err(), "{bad}");
        }
        let long = "x".repeat(500).parse::<HostId>().expect_err("no id").to_string();
        assert!(long.len() < 200, "{long}");
        let wide = "ä".repeat(8).parse::<HostId>().expect_err("no id").to_string();
        assert_eq!(wide, "`ääääääää` is no host id: it has 16 hex digits, not all 0");
    }

    #[test]
    fn a_server_name_names_a_host() {
        let host = HostId::new(7).expect("not 0");
        let name = host.server_name();
        assert_eq!(name.to_str(), "0000000000000007.vmfork.internal");
        assert_eq!(HostId::of_server_name(&name), Some(host));
        for other in ["localhost", "7.vmfork.internal", "127.0.0.1"] {
            let name = ServerName::try_from(other).expect("a name");
            assert_eq!(HostId::of_server_name(&name), None, "{other}");
        }
    }

    #[test]
    fn ids_are_text_in_json() {
        let print = Fingerprint::from_bytes([0xab; 32]);
        let json = serde_json::to_string(&print).expect("text");
        assert_eq!(json, format!("\"{}\"", "ab".repeat(32)));
        assert_eq!(serde_json::from_str::<Fingerprint>(&json).expect("as written"), print);
        let error = serde_json::from_str::<HostId>("\"zz\"").expect_err("no id");
        assert!(error.to_string().starts_with("`zz` is no host id"), "{error}");
    }
}
