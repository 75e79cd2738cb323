//! What is known of one host, and which of two sayings about it is the later.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{Fingerprint, HostId, shortened};

/// Most bytes of a host's name.
pub const HOST_NAME_BYTES_MAX: usize = 63;
/// Longest host part of an address: that of a DNS name.
const ADDRESS_HOST_BYTES_MAX: usize = 253;

/// Whether a host takes part. Later is greater: of two sayings of one incarnation, the greater
/// stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    Active,
    /// A member that gets nothing new.
    Draining,
    /// No member any more, for good: a host that comes back gets a new [`HostId`].
    Left {
        /// By the clock of the host that said so, in seconds since 1970.
        at_unix_s: u64,
    },
}

impl HostState {
    pub const fn is_left(self) -> bool {
        matches!(self, Self::Left { .. })
    }
}

impl fmt::Display for HostState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Left { .. } => "left",
        })
    }
}

/// One host, as some member last said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub id: HostId,
    /// Unique among members; 1 to 63 of `a-z A-Z 0-9 . _ -`, the first a letter or digit.
    pub name: String,
    /// Where its daemon listens for members: `HOST:PORT`, an IPv6 host in brackets.
    pub address: String,
    /// Of the certificate that it shows.
    pub fingerprint: Fingerprint,
    pub state: HostState,
    /// Grows with every change that is said about the host.
    pub incarnation: u64,
}

/// What of an entry can't be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error(
        "`{name}` is not a valid host name: use 1 to {HOST_NAME_BYTES_MAX} of a-z A-Z 0-9 . _ -, starting with a letter or digit"
    )]
    Name { name: String },
    #[error("`{address}` is not a valid host address: {why}; use `host:port` or `[ipv6]:port`")]
    Address { address: String, why: &'static str },
}

impl EntryError {
    /// What the user can do about it, one line.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Name { .. } => "give this host a name with `--name`",
            Self::Address { .. } => "give an address that the other hosts reach with `--address`",
        }
    }
}

impl Entry {
    /// Whether `self` replaces `other`, of the same host. An entry that says that the host left
    /// wins, then the higher incarnation. Otherwise the greater by state and the rest wins, since
    /// every host must choose the same one. This is a total order: the greatest of any entries is
    /// the same in whatever order they come, and however often.
    pub(super) fn supersedes(&self, other: &Self) -> bool {
        fn key(entry: &Entry) -> (bool, u64, HostState, &Fingerprint, &str, &str) {
            let Entry { id: _, name, address, fingerprint, state, incarnation } = entry;
            (state.is_left(), *incarnation, *state, fingerprint, address, name)
        }
        key(self) > key(other)
    }

    /// # Errors
    /// The name or the address can't be one.
    pub fn check(&self) -> Result<(), EntryError> {
        check_name(&self.name)?;
        check_address(&self.address)
    }
}

/// # Errors
/// It can't be a host's name.
pub fn check_name(name: &str) -> Result<(), EntryError> {
    let good = name.len() <= HOST_NAME_BYTES_MAX
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if good { Ok(()) } else { Err(EntryError::Name { name: shortened(name) }) }
}

/// # Errors
/// It can't be `HOST:PORT`.
pub fn check_address(address: &str) -> Result<(), EntryError> {
    address_flaw(address)
        .map_or(Ok(()), |why| Err(EntryError::Address { address: shortened(address), why }))
}

fn address_flaw(address: &str) -> Option<&'static str> {
    let Some((host, port)) = address.rsplit_once(':') else { return Some("it has no port") };
    // `parse` takes a sign.
    let port = Some(port).filter(|it| it.bytes().all(|b| b.is_ascii_digit()));
    if port.and_then(|it| it.parse::<u16>().ok()).is_none_or(|port| port == 0) {
        return Some("its port is not one of 1 to 65535");
    }
    if let Some(ip) = host.strip_prefix('[') {
        let ip = ip.strip_suffix(']').and_then(|ip| ip.parse::<std::net::Ipv6Addr>().ok());
        return if ip.is_none() { Some("what is in brackets is no IPv6 address") } else { None };
    }
    if host.is_empty() {
        return Some("it has no host");
    }
    let of_host = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if host.len() > ADDRESS_HOST_BYTES_MAX || !host.bytes().all(of_host) {
        return Some("its host is neither a name nor an IPv4 address");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in
            ["a:1", "10.0.0.1:7070", "host-1.rack_2.example:65535", "[::1]:80", "[fe80::1]:9"]
        {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for bad in [
            "", "a", ":1", "a:", "a:0", "a:65536", "a:+1", "a:-1", "::1:80", "[::1]", "[a]:1",
            "[::1:1", "a b:1", "a/b:1", "a@b:1", "ä:1",
        ] {
            assert!(check_address(bad).is_err(), "{bad}");
        }
        let error = check_address("a:0").expect_err("no port").to_string();
        assert_eq!(
            error,
            "`a:0` is not a valid host address: its port is not one of 1 to 65535; use `host:port` or `[ipv6]:port`"
        );
    }

    #[test]
    fn names_are_short_and_plain() {
        for bad in ["", ".", "-a", "a b", "a/b", "ä", &"a".repeat(64)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        for good in ["a", "node-1.rack_2", &"a".repeat(63)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
    }

    #[test]
    fn an_entry_in_json_stays_as_it_is() {
        let entry = Entry {
            id: HostId::new(1).expect("not 0"),
            name: "a".into(),
            address: "10.0.0.1:7070".into(),
            fingerprint: Fingerprint::from_bytes([0; 32]),
            state: HostState::Left { at_unix_s: 9 },
            incarnation: 3,
        };
        let json = serde_json::to_string(&entry).expect("plain data");
        let zeros = "0".repeat(64);
        assert_eq!(
            json,
            format!(
                r#"{{"id":"0000000000000001","name":"a","address":"10.0.0.1:7070","fingerprint":"{zeros}","state":{{"left":{{"at_unix_s":9}}}},"incarnation":3}}"#
            )
        );
        assert_eq!(serde_json::from_str::<Entry>(&json).expect("as written"), entry);
    }
}
