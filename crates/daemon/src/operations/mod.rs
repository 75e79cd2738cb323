//! The operations of one host: everything that [`vmfork_control::Control`] promises, put together.
//!
//! ```text
//!   Hub (Control) ──┬── core: the VMs of this host
//!                   ├── forker: forks of them, here and on other hosts
//!                   ├── library: stored snapshots
//!                   └── cluster: this host among others
//! ```

mod boot;
mod boot_disks;
mod boot_stored;
mod control;
mod disks;
mod error;
mod image_swarm;
mod root_device;
mod snapshots;
mod volumes;

use std::sync::Arc;

use crate::holder::Holding;
use crate::lifecycle::Parts;
use vmfork_fork::tickets::Tickets;
use vmfork_fork::{Forker, Remote};
use vmfork_host::core::{self, Core};
use vmfork_peers::Cluster;
use vmfork_snapshots::{Library, prefetch};

/// The real [`vmfork_control::Control`].
pub struct Hub {
    pub(crate) core: Arc<Core>,
    pub(crate) forker: Arc<Forker>,
    pub(crate) library: Arc<Library>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) holder: Arc<Holding>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").finish_non_exhaustive()
    }
}

impl Hub {
    /// Put the host together. On a tokio runtime. Without a QEMU it starts as well.
    /// `doctor` reports that, and each request for a VM fails with it.
    pub async fn start(parts: Parts) -> Arc<Self> {
        let Parts { config, state, metrics, admission, cgroups, disks, snapshots, holder } = parts;
        let cluster =
            Arc::new(Cluster::new(config.host.state.join("cluster"), config.peers.clone()));
        let parts = core::Parts {
            config: Arc::new(config.host.clone()),
            state,
            metrics: Arc::clone(&metrics),
            admission,
            cgroups: cgroups.ok(),
            disks,
            keeper: Arc::clone(&cluster) as Arc<dyn core::Keeper>,
            life: cluster.epoch(),
        };
        let core = Core::start(parts).await;
        let remote = Arc::clone(&cluster) as Arc<dyn Remote>;
        let forker =
            Arc::new(Forker { core: Arc::clone(&core), remote, tickets: Arc::new(Tickets) });
        cluster.set_forker(&forker);
        let library = Library { core: Arc::clone(&core), forker: Arc::clone(&forker), snapshots };
        let library = Arc::new(library);
        image_swarm::connect(&library, &cluster);
        prefetch::mind_memory(&library);
        let tidies = Arc::clone(&library);
        tokio::spawn(async move { tidies.forget_unneeded().await });
        let (weak, others) = (Arc::downgrade(&core), Arc::downgrade(&cluster));
        metrics.on_scrape(move |metrics| {
            let (Some(core), Some(cluster)) = (weak.upgrade(), others.upgrade()) else { return };
            core.refresh(metrics);
            for (side, role, traffic) in cluster.traffic() {
                core.tally.look_at_traffic(side, role, traffic, metrics);
            }
            for (what, count) in cluster.sourced() {
                core.tally.look_at_sourced(what, count, metrics);
            }
            for (what, count) in cluster.image_chunks() {
                core.tally.look_at_image_chunks(what, count, metrics);
            }
            for (what, count) in cluster.multicast() {
                core.tally.look_at_multicast(what, count, metrics);
            }
        });
        Arc::new(Self { core, forker, library, cluster, holder })
    }

    /// What this host is, or is to be, in a cluster.
    pub fn cluster(&self) -> Arc<Cluster> {
        Arc::clone(&self.cluster)
    }

    /// End all VMs, in no particular order, and what is being written.
    pub async fn stop(&self) {
        self.library.snapshots.stop();
        self.core.stop().await;
    }
}
