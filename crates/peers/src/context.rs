//! What answers to other hosts are given from: the state of most routes.

use std::sync::{Arc, Weak};

use vmfork_fork::Forker;
use vmfork_host::core::Core;

use crate::error::ClusterError;
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
    pub(crate) fn forker(&self) -> Result<Arc<Forker>, ClusterError> {
        self.this.forker().ok_or(ClusterError::Leaving)
    }

    /// This host as a member, and its VMs.
    ///
    /// # Errors
    /// This host is leaving the cluster.
    pub(crate) fn parts(&self) -> Result<(Arc<Member>, Arc<Core>), ClusterError> {
        self.member.upgrade().zip(self.this.core()).ok_or(ClusterError::Leaving)
    }
}
