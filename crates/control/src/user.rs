use std::fmt;

use serde::{Deserialize, Serialize};

/// Who began a family, as far as the daemon can tell: for quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum User {
    /// Whose process asked on the unix socket.
    Uid(u32),
    /// Any client with the token, over TCP.
    Token,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uid(uid) => uid.fmt(f),
            Self::Token => f.write_str("token"),
        }
    }
}
