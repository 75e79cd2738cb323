//! What answers to other hosts are given from: the state of most routes.

use std::sync::{Arc, Weak};

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_fork::Forker;
use vmfork_host::core::Core;

use crate::member::Member;
use crate::this_host::ThisHost;

/// Of one membership.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    this: Arc<ThisHost>,
    member: Weak<Member>,
}

impl Context {
    pub(crate) fn new(this: &Arc<ThisHost>, member: &Arc<Member>) -> Self {
        Self { this: Arc::clone(this), member: Arc::downgrade(member) }
    }

    /// What other hosts' clones are started with.
    ///
    /// # Errors
    /// This host is leaving the cluster.
    pub(crate) fn forker(&self, message: &str) -> Result<Arc<Forker>, ErrorBody> {
        self.this.forker().ok_or_else(|| is_leaving(message))
    }

    /// This host as a member, and its VMs.
    ///
    /// # Errors
    /// This host is leaving the cluster.
    pub(crate) fn parts(&self, message: &str) -> Result<(Arc<Member>, Arc<Core>), ErrorBody> {
        self.member.upgrade().zip(self.this.core()).ok_or_else(|| is_leaving(message))
    }
}

pub(crate) fn is_leaving(message: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::Host, message).cause("this host is leaving the cluster")
}
