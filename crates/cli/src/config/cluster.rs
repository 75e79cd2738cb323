use vmfork_api::{ClusterHostRequest, ClusterInitRequest, ClusterJoinRequest, ClusterTokenRequest};

use super::{misuse, value};
use crate::args::RawCluster;
use crate::failure::Misuse;

#[derive(Debug)]
pub(crate) enum ClusterAction {
    Init(ClusterInitRequest),
    Token(ClusterTokenRequest),
    Join(ClusterJoinRequest),
    Ls,
    Leave(ClusterHostRequest),
    Drain(ClusterHostRequest),
    Activate(ClusterHostRequest),
}

pub(super) fn action(raw: RawCluster) -> Result<ClusterAction, Misuse> {
    let of = |host| ClusterHostRequest { host };
    Ok(match raw {
        RawCluster::Init(to) => {
            ClusterAction::Init(ClusterInitRequest { address: to.address, name: to.name })
        }
        RawCluster::Token { ttl } => {
            let ttl = ttl.map(|text| value::time(&text, "--ttl")).transpose()?;
            let ttl_s = ttl.map(|ttl| ttl.as_secs());
            if ttl_s == Some(0) {
                return misuse("--ttl: shorter than 1s; use 1s or more");
            }
            ClusterAction::Token(ClusterTokenRequest { ttl_s })
        }
        RawCluster::Join { token, address: to } => {
            let (address, name) = (to.address, to.name);
            ClusterAction::Join(ClusterJoinRequest { token, address, name })
        }
        RawCluster::Ls => ClusterAction::Ls,
        RawCluster::Leave { host } => ClusterAction::Leave(of(host)),
        RawCluster::Drain { host } => ClusterAction::Drain(of(host)),
        RawCluster::Activate { host } => ClusterAction::Activate(of(host)),
    })
}
