//! What a membership needs of this host, whichever cluster it is in.

use std::sync::{Arc, OnceLock, Weak};

use axum::Router;
use vmfork_fork::Forker;
use vmfork_host::core::Core;

use crate::settings::Settings;
use crate::stored::Stored;

/// One per daemon.
pub(crate) struct ThisHost {
    pub(crate) settings: Settings,
    /// By which this life of the daemon is told from others.
    pub(crate) epoch: u32,
    /// What members may ask of this host: its REST API. Set once, before anything is served.
    pub(crate) api: OnceLock<Router>,
    /// Guest images that hosts pull from each other.
    pub(crate) stored: Stored,
    forker: OnceLock<Weak<Forker>>,
}

impl std::fmt::Debug for ThisHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThisHost").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl ThisHost {
    pub(crate) fn new(settings: Settings, epoch: u32) -> Self {
        Self {
            settings,
            epoch,
            api: OnceLock::new(),
            stored: Stored::default(),
            forker: OnceLock::new(),
        }
    }

    /// What clones of other hosts' VMs are started with.
    pub(crate) fn set_forker(&self, forker: &Arc<Forker>) {
        let _first = self.forker.set(Arc::downgrade(forker));
    }

    /// `None`: the daemon ends.
    pub(crate) fn forker(&self) -> Option<Arc<Forker>> {
        self.forker.get().and_then(Weak::upgrade)
    }

    /// `None`: the daemon ends.
    pub(crate) fn core(&self) -> Option<Arc<Core>> {
        self.forker().map(|forker| Arc::clone(&forker.core))
    }
}
