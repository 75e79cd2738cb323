//! Reading from hosts of which the swarm does not know that they have the pages: those that were named, and then whoever has some of the image.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmfork_image::PageRange;
use vmfork_policy::transfer::bounds::DEMAND_WAIT;

use super::peer::{Early, Peer, PeerError};
use super::source::{PeerSource, Vain};
use crate::proto::{Route, Urgency};

impl PeerSource {
    /// From those that were named when the image was, one after the other; not from who has just refused.
    pub(super) fn read_in_order(
        &self,
        peers: &[Arc<Peer>],
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        mut early: Option<&mut Early<'_>>,
        failed: &mut Vec<Vain>,
    ) -> bool {
        for peer in peers {
            if failed.iter().any(|(asked, _)| Arc::ptr_eq(asked, peer)) {
                continue;
            }
            // Of a swarm, whether it is the origin is known only when it has answered.
            let believed = self.swarm().is_none() && self.is_origin(peer);
            let answer = self.checked(believed, early.as_deref_mut(), |early| {
                let by = (Route::Insist, Duration::MAX);
                peer.read_by(by, self.image, piece, urgency, bytes, early)
            });
            match answer {
                Ok(()) => {
                    let swarm = self.swarm();
                    let origin = swarm.map_or_else(|| self.is_origin(peer), |it| it.gave(peer));
                    match self.verified(urgency, piece, bytes, peer, origin) {
                        Ok(()) => return true,
                        Err(error) => self.on_failed(Arc::clone(peer), piece, error, failed),
                    }
                }
                Err(error) => self.on_failed(Arc::clone(peer), piece, error, failed),
            }
        }
        false
    }

    /// From whoever has some of the image, until `give_up`. What hosts have is known by whole units: of one that a later image changed in part, hosts
    /// that need only that image bring the rest, and never have the whole unit.
    pub(super) fn read_from_any(
        &self,
        urgency: Urgency,
        piece: PageRange,
        bytes: &mut [u8],
        give_up: Instant,
        mut early: Option<&mut Early<'_>>,
        failed: &mut Vec<Vain>,
    ) -> bool {
        let Some(swarm) = self.swarm() else { return false };
        let mut is_late = false;
        for (host, peer) in swarm.with_some() {
            if failed.iter().any(|(asked, _)| Arc::ptr_eq(asked, &peer)) {
                continue;
            }
            if is_late {
                return false;
            }
            is_late = Instant::now() >= give_up;
            let may_wait = match urgency {
                Urgency::Demand => DEMAND_WAIT,
                Urgency::Ahead => Duration::MAX,
            };
            let answer = self.checked(false, early.as_deref_mut(), |early| {
                let by = (Route::Insist, may_wait);
                peer.read_by(by, self.image, piece, urgency, bytes, early)
            });
            let answer = answer.and_then(|()| {
                swarm.answered(host, piece);
                self.verified(urgency, piece, bytes, &peer, false)
            });
            let Err(error) = answer else { return true };
            // Nor can be compared what the next one gives.
            let is_undecided = matches!(error, PeerError::Undecided);
            swarm.failed(host, piece, &error);
            self.on_failed(peer, piece, error, failed);
            if is_undecided {
                return false;
            }
        }
        false
    }
}
