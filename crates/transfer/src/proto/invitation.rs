//! How a host comes to hear a group: where it is, and the keys. Goes over TLS alone.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

use super::{ProtoError, wrong};

/// Of AES-256.
pub const KEY_BYTES: usize = 32;

/// A key, as it is handed on over TLS.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(pub [u8; KEY_BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

pub(super) const INVITATION_BYTES: usize = 32 + 2 * KEY_BYTES;
const VERSION: u8 = 1;

/// To the group of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invitation {
    /// Where it is heard.
    pub group: SocketAddrV4,
    /// Where requests go, at the host that was asked.
    pub requests_port: u16,
    /// Of the sender: another one, another group.
    pub session: u64,
    /// The listener's name in the group.
    pub listener: u16,
    /// Datagrams of the sender from here on count.
    pub counter: u64,
    /// Of the sender's datagrams.
    pub group_key: Key,
    /// Of this listener's.
    pub own_key: Key,
}

impl Invitation {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION, 0];
        bytes.extend(self.listener.to_le_bytes());
        bytes.extend(self.group.ip().octets());
        bytes.extend(self.group.port().to_le_bytes());
        bytes.extend(self.requests_port.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.session.to_le_bytes());
        bytes.extend(self.counter.to_le_bytes());
        bytes.extend(self.group_key.0);
        bytes.extend(self.own_key.0);
        bytes
    }

    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ProtoError> {
        let Ok(bytes) = <&[u8; INVITATION_BYTES]>::try_from(bytes) else {
            return wrong(format!("an invitation of {} bytes", bytes.len()));
        };
        if bytes[..2] != [VERSION, 0] || bytes[12..16] != [0; 4] {
            return wrong("an invitation that is not known here");
        }
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u64_at = |at| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let key_at = |at| bytes[at..].first_chunk().map_or(Key([0; KEY_BYTES]), |key| Key(*key));
        let group = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
        let (port, requests_port) = (u16_at(8), u16_at(10));
        if !is_local_group(group) || port == 0 || requests_port == 0 {
            return wrong(format!("an invitation to {group}:{port}, which is no group of a site"));
        }
        Ok(Self {
            group: SocketAddrV4::new(group, port),
            requests_port,
            session: u64_at(16),
            listener: u16_at(2),
            counter: u64_at(24),
            group_key: key_at(32),
            own_key: key_at(32 + KEY_BYTES),
        })
    }
}

/// Of 239.255.0.0/16, which no router hands on beyond the site (RFC 2365).
pub const fn local_group(number: u16) -> Ipv4Addr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(239, 255, high, low)
}

fn is_local_group(address: Ipv4Addr) -> bool {
    address.octets()[..2] == [239, 255]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_what_was_written_and_names_a_group_of_the_site() {
        let mut invitation = Invitation {
            group: SocketAddrV4::new(local_group(0x1234), 7073),
            requests_port: 7074,
            session: 5,
            listener: 6,
            counter: 7,
            group_key: Key([8; KEY_BYTES]),
            own_key: Key([9; KEY_BYTES]),
        };
        let bytes = invitation.encode();
        assert_eq!(bytes.len(), INVITATION_BYTES);
        assert_eq!(Invitation::decode(&bytes), Ok(invitation.clone()));
        assert!(Invitation::decode(&bytes[1..]).is_err());
        invitation.group = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 7073);
        let error = Invitation::decode(&invitation.encode()).expect_err("no group");
        assert!(error.to_string().contains("10.0.0.1:7073"), "{error}");
        assert!(!format!("{invitation:?}").contains("8, 8"), "keys are not for logs");
    }
}
