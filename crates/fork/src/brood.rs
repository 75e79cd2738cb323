//! VMs that continue one snapshot, started side by side: the clones of a fork, or VMs from a store.

use std::sync::Arc;
use std::time::Instant;

use tokio_util::sync::CancellationToken;
use vmfork_api::{CloneResult, ErrorBody};

use crate::clone::{self, CloneOrder, Stem, failed};
use crate::error::Error;
use crate::forker::Forker;
use crate::messages;
use crate::names::Wanted;
use crate::origin::TicketOrigin;
use crate::snapshot::Snapshot;
use crate::starting::{Broken, Starting};
use vmfork_host::admission::Lease;
use vmfork_host::core::PendingMachine;

/// What all of them share.
#[derive(Debug)]
pub struct Brood {
    pub forker: Arc<Forker>,
    pub stem: Arc<Stem>,
    pub snapshot: Arc<Snapshot>,
    pub began: Instant,
    pub deadline: Instant,
    /// The ticket behind it, and what is notified of the fate of each.
    pub origin: Option<TicketOrigin>,
    pub given_up: CancellationToken,
}

/// What there is for them: for as many as fit.
#[derive(Debug)]
pub struct Granted {
    pub leases: Vec<Lease>,
    /// Why the others may not.
    pub refused: Option<ErrorBody>,
    /// As many as leases.
    pub pending: Vec<PendingMachine>,
}

impl Brood {
    /// Start them. → each with what became of it, by number.
    ///
    /// # Errors
    /// The clones are not wanted any more, or one failed and all were insisted on: none is left.
    pub async fn start(
        &self,
        wanted: Vec<Wanted>,
        granted: Granted,
        all_or_nothing: bool,
    ) -> Result<Vec<CloneResult>, ErrorBody> {
        let Granted { leases, refused, pending } = granted;
        let fail = |vmid, name, error: ErrorBody| {
            self.forker.core.metrics.clone_failed(error.code);
            clone::report_failure(self.origin.as_ref(), vmid, &error);
            failed(vmid, name, error)
        };
        let mut places = leases.into_iter().zip(pending);
        let mut starting = Starting::default();
        let mut results = Vec::new();
        for Wanted { name, is_kept, vmid, ticket } in wanted {
            if !is_kept {
                results.push(clone::name_taken(vmid, name));
                continue;
            }
            let Some((lease, machine)) = places.next() else {
                let error = refused.clone().unwrap_or_else(|| self.was_given_up());
                results.push(fail(vmid, name, error));
                continue;
            };
            let (began, deadline, origin) = (self.began, self.deadline, self.origin.clone());
            let order =
                CloneOrder { name: name.clone(), vmid, ticket, lease, began, deadline, origin };
            let (forker, stem, snapshot) =
                (Arc::clone(&self.forker), Arc::clone(&self.stem), Arc::clone(&self.snapshot));
            starting.add(vmid, name, clone::start(forker, stem, snapshot, order, machine));
        }
        let mut started = Vec::new();
        let mut dropped = false;
        loop {
            let next = tokio::select! {
                next = starting.next() => next,
                // No client waits: what is half-way ends here, not when it would be ready.
                () = self.given_up.cancelled(), if !dropped => {
                    dropped = true;
                    starting.give_up();
                    continue;
                }
            };
            match next {
                Some(Ok((result, vm))) => {
                    results.push(result);
                    started.extend(vm);
                }
                Some(Err(Broken { vmid, name, error })) => {
                    let error = error.to_body(messages::start_message(&name));
                    results.push(fail(vmid, name, error));
                }
                None => break,
            }
        }
        results.sort_by_key(|result| result.vmid);
        let has_failed = results.iter().any(|result| result.error.is_some());
        if self.given_up.is_cancelled() || (all_or_nothing && has_failed) {
            for vm in &started {
                self.forker.core.end(vm, vmfork_host::vm::End::killed("its start was given up"));
            }
            let first = results.iter().find_map(|result| result.error.clone());
            return Err(first.unwrap_or_else(|| self.was_given_up()));
        }
        Ok(results)
    }

    fn was_given_up(&self) -> ErrorBody {
        Error::GivenUp.to_body(&self.stem.message)
    }
}
