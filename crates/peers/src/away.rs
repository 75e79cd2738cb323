//! The part of a fork that goes to other hosts of the cluster.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use vmfork_api::{CloneResult, ErrorBody, Place};
use vmfork_cluster::allocate::{Ask, Held, HostView, Plan, Policy};
use vmfork_cluster::{HostId, Room};

use super::error::{ClusterError, PlanError, RemoteForkError};
use super::guest_images::TAKES_LONG;
use super::lifetimes::tell_if_changed;
use super::member::Member;
use super::remote_fork::CloneOrder;
use super::remote_fork::send::{Sender, Sending, Share, send};
use super::tickets::Abroad;
use vmfork_fork::facts::{Facts, Frozen, host};
use vmfork_fork::tickets::{Event, TicketOrigin};
use vmfork_fork::{Departure, Hold, PlanAsk, Reserved, Wanted, failed, name_taken, report_failure};
use vmfork_host::core::Core;
use vmfork_host::vm::machine::Machine;

/// How long a fork that is given up waits until the other hosts have heard of that.
const END_WAIT: Duration = Duration::from_secs(5);

/// Who starts how many, decided before the pause.
#[derive(Debug)]
struct Away {
    member: Arc<Member>,
    /// How many stay here.
    here: u32,
    shares: Vec<Destination>,
    /// Why some clones are started nowhere: what was asked for has no place for them.
    unplaced: Option<RemoteForkError>,
    machine_type: String,
    hydrate_bytes_per_s: u64,
    /// Where the numbers of tickets begin that the clones may get.
    books: u64,
    /// What an engine holds for the fork, until all clones have their places.
    hold: Option<Hold>,
}

/// A host, how many clones go there, and the number of the order.
#[derive(Debug)]
struct Destination {
    host: HostId,
    count: u32,
    number: u64,
    /// Places that are set aside there for it.
    lease: Option<u64>,
}

/// That a host in no cluster can do what is asked for.
///
/// # Errors
/// It wants other hosts.
fn check_here(placement: &vmfork_fork::Placement) -> Result<(), ClusterError> {
    let wants_more = matches!(placement.place, Some(Place::Spread | Place::Pack));
    match wants_more || placement.hosts.is_some() {
        true => Err(ClusterError::InNone),
        false => Ok(()),
    }
}

/// Decide what goes elsewhere; `None`: nothing does.
///
/// # Errors
/// What [`of_fork`] and [`of_ticket`] say.
pub(super) async fn plan(
    member: Option<Arc<Member>>,
    ask: PlanAsk<'_>,
) -> Result<Option<Box<dyn vmfork_fork::Away>>, ErrorBody> {
    let away = match ask.by_ticket {
        true => of_ticket(member, ask).await,
        false => of_fork(member, ask).await,
    };
    let away = away.map_err(|error| error.to_body(ask.wanted.message))?;
    Ok(away.map(|away| Box::new(away) as Box<dyn vmfork_fork::Away>))
}

/// What of a fork's clones goes elsewhere; `None`: nothing does.
///
/// # Errors
/// Hosts are named that there are not, or not all fit and all are insisted on.
async fn of_fork(
    member: Option<Arc<Member>>,
    ask: PlanAsk<'_>,
) -> Result<Option<Away>, RemoteForkError> {
    let PlanAsk { core, parent, machine, placement, count, all_or_nothing, .. } = ask;
    let vmfork_fork::FreezeWanted { message, deadline, given_up, .. } = ask.wanted;
    let Some(member) = member else {
        check_here(placement)?;
        return Ok(None);
    };
    let policy = match placement.place {
        Some(Place::Here) => {
            member.hosts.check_active()?;
            return Ok(None);
        }
        Some(Place::Pack) => Policy::Pack,
        Some(Place::Spread) | None => Policy::Spread,
    };
    let mut views = member.hosts.views(core);
    if let Some(hosts) = &placement.hosts {
        let named = member.hosts.find_all(hosts)?;
        views.retain(|view| named.contains(&view.id));
    }
    let shape = Room {
        memory_bytes: core.admission.clone_bytes(parent.identity.spec().memory_bytes),
        vcpus: parent.identity.spec().cpus,
    };
    member.estimates.coming(&core.admission, &parent.identity, machine, &mut views);
    // VMs above the user's quota are placed on no host.
    // If the user's other VMs grow meanwhile, here or elsewhere, the refusal follows after the
    // pause.
    let quota = core.quota_left(parent.identity.user, (count, shape), message).await?;
    let (wish, count) = (count, quota.map_or(count, |allowed| allowed.count));
    let over = quota.map(|allowed| allowed.few(wish));
    match over {
        Some(error) if all_or_nothing || count == 0 => return Err(error.into()),
        _ => {}
    }
    let ask = Ask { count, shape, family: parent.identity.family.clone(), policy };
    let hold = tokio::select! {
        hold = member.jobs.hold(&ask, &views) => hold?,
        () = given_up.cancelled() => return Err(RemoteForkError::GivenUp),
        () = tokio::time::sleep_until(deadline.into()) => {
            return Err(PlanError::NodesLate.into());
        }
    };
    let held = hold.as_ref().map(|hold| &*hold.held);
    let plan = |views: &[HostView]| shares(views, held, (count, shape), policy, member.hosts.id());
    let mut shares = plan(&views);
    let until = (deadline, given_up);
    while member.guest_images.give(&parent.identity, &shares, &mut views, until).await? {
        shares = plan(&views);
    }
    let placed: u32 = shares.iter().map(|(_, share)| share).sum();
    let may_stay = views.iter().any(|view| view.id == member.hosts.id());
    let unplaced = (placed < count).then(|| match held {
        Some(held) if !held.short.is_empty() => {
            PlanError::NotHeld { placed, count, short: held.short.clone() }
        }
        _ => PlanError::NoPlace { placed, count, views: views.clone() },
    });
    // What fits nowhere is refused on this host, with the figures, unless this host is not to have
    // any.
    let here_takes = shares.iter().find(|(id, _)| *id == member.hosts.id()).map_or(0, |(_, n)| *n);
    let (here, unplaced) = match unplaced {
        Some(error) if all_or_nothing || (placed == 0 && !may_stay) => return Err(error.into()),
        Some(error) if placed == 0 && held.is_some() => return Err(error.into()),
        // Of a host that is late it says so.
        Some(_)
            if may_stay
                && held.is_none()
                && !views.iter().any(|view| view.closed == Some(TAKES_LONG)) =>
        {
            (here_takes + (count - placed), None)
        }
        unplaced => (here_takes, unplaced),
    };
    let shares = shares.into_iter().filter(|(id, _)| *id != member.hosts.id());
    let shares: Vec<_> = shares
        .map(|(host, count)| Destination { host, count, number: member.next_order(), lease: None })
        .collect();
    if shares.is_empty() && hold.is_none() {
        return Ok(None);
    }
    let away = Away::to(core, member, machine, (here, shares)).await?;
    let unplaced = unplaced.map(RemoteForkError::from).or(over.map(RemoteForkError::from));
    let hydrate_bytes_per_s = placement.hydrate_bytes_per_s;
    Ok(Some(Away { unplaced, hydrate_bytes_per_s, hold, ..away }))
}

/// What of a ticket's clones goes elsewhere: to where it has places. `None`: nothing does.
///
/// # Errors
/// What QEMU plays can't be told.
async fn of_ticket(
    member: Option<Arc<Member>>,
    ask: PlanAsk<'_>,
) -> Result<Option<Away>, RemoteForkError> {
    let PlanAsk { core, machine, count, .. } = ask;
    let reserved: &[Reserved] = &ask.placement.reserved;
    let Some(member) = member.filter(|_| !reserved.is_empty()) else {
        return Ok(None);
    };
    let away = reserved.iter().map(|it| it.count).fold(0, u32::saturating_add);
    let shares = reserved.iter().map(|it| Destination {
        host: it.host,
        count: it.count,
        number: member.next_order(),
        lease: Some(it.number),
    });
    let shares = (count.saturating_sub(away), shares.collect());
    Ok(Some(Away::to(core, member, machine, shares).await?))
}

fn shares(
    views: &[HostView],
    held: Option<&Held>,
    (count, shape): (u32, Room),
    policy: Policy,
    near: HostId,
) -> Vec<(HostId, u32)> {
    Plan::within(views, held, count, shape, policy, Some(near)).next_asks()
}

impl Away {
    async fn to(
        core: &Core,
        member: Arc<Member>,
        machine: &Machine,
        (here, shares): (u32, Vec<Destination>),
    ) -> Result<Self, PlanError> {
        let machine_type = host::machine_type(machine).await?;
        let books = core.books();
        let (unplaced, hydrate_bytes_per_s, hold) = (None, 0, None);
        Ok(Self { member, here, shares, unplaced, machine_type, hydrate_bytes_per_s, books, hold })
    }

    async fn start(&self, what: Departure<'_>, wanted: Vec<Wanted>) -> Vec<CloneResult> {
        let Departure { parent, machine, snapshot, .. } = what;
        let frozen = Frozen {
            machine_type: self.machine_type.clone(),
            inheritance: snapshot.inheritance.clone(),
            fork: snapshot.fork,
            pause_ms: what.pause_ms,
        };
        let mut results = Vec::new();
        let mut kept = Vec::new();
        for Wanted { name, is_kept, vmid, ticket } in wanted {
            match is_kept {
                true => kept.push(CloneOrder { name, vmid, ticket }),
                false => results.push(name_taken(vmid, name)),
            }
        }
        let mut kept = kept.into_iter();
        let shares = self.shares.iter().map(|Destination { host, count, number, lease }| Share {
            host: *host,
            number: *number,
            lease: *lease,
            clones: kept.by_ref().take(*count as usize).collect(),
        });
        let mut shares: Vec<Share> = shares.collect();
        shares.retain(|share| !share.clones.is_empty());
        if let Some(error) = &self.unplaced {
            let error = |name: &str| {
                let message = vmfork_fork::start_message(name);
                let mut body = error.to_body(message.as_str());
                // A quota's refusal names the whole fork.
                body.message = message;
                body
            };
            results.extend(kept.map(|it| failed(it.vmid, it.name.clone(), error(&it.name))));
        }
        if shares.is_empty() {
            return results;
        }
        let sending = Sending {
            metrics: &what.core.metrics,
            facts: Facts {
                inherited: what.inherited.clone(),
                ..Facts::of(&parent.identity, machine, parent.agent(), frozen)
            },
            parent: &parent.identity,
            snapshot,
            working_set: &parent.working_set,
            all_or_nothing: what.all_or_nothing,
            deadline: what.deadline,
            hydrate_bytes_per_s: self.hydrate_bytes_per_s,
            given_up: what.given_up,
            ticket: what.origin.map(|origin| origin.ticket),
            books: self.books,
            job: what.job.clone(),
            lifetime: what.lifetime,
        };
        let open = |origin| {
            let line = |share: &Share| {
                let vms = share.clones.iter().map(|clone| clone.vmid);
                Abroad::open(
                    (&self.member.hosts, &self.member.lines),
                    share.host,
                    share.number,
                    origin,
                    vms,
                )
            };
            shares.iter().map(line).collect::<Vec<_>>()
        };
        let abroad = what.origin.map(open).unwrap_or_default();
        let Member { hosts, images, locate, .. } = &*self.member;
        let answered = |host| tell_if_changed(hosts, &what, host);
        results.extend(send(Sender { hosts, images, locate }, sending, shares, &answered).await);
        if let Some(origin) = what.origin {
            tell(origin, &abroad, &results);
        }
        results
    }

    async fn end(&self) {
        let told = self.shares.iter().map(|it| self.member.hosts.give_up(it.host, it.number));
        let _those_that_are_silent = tokio::time::timeout(END_WAIT, join_all(told)).await;
    }
}

impl vmfork_fork::Away for Away {
    fn here(&self) -> u32 {
        self.here
    }

    fn hold(&self) -> Option<&Hold> {
        self.hold.as_ref()
    }

    fn start<'a>(
        &'a self,
        what: Departure<'a>,
        wanted: Vec<Wanted>,
    ) -> BoxFuture<'a, Vec<CloneResult>> {
        self.start(what, wanted).boxed()
    }

    fn end(&self) -> BoxFuture<'_, ()> {
        self.end().boxed()
    }
}

/// Tell a ticket's desk what became of its clones elsewhere.
fn tell(origin: &TicketOrigin, abroad: &[Arc<Abroad>], results: &[CloneResult]) {
    for CloneResult { vmid, error, .. } in results {
        let Some(error) = error else {
            let running = Event::Running { ticket: origin.ticket, vmid: *vmid };
            let _desk_closed = origin.parent.send(running);
            continue;
        };
        report_failure(Some(origin), *vmid, error);
        for there in abroad {
            there.ended(*vmid, error.to_string());
        }
    }
    abroad.iter().for_each(|there| there.ordered());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_is_spread_over_all_that_take_clones() {
        let shape = Room { memory_bytes: 100, vcpus: 1 };
        let id = |id| HostId::new(id).expect("not 0");
        let view = |number, closed| HostView {
            id: id(number),
            name: format!("h{number}"),
            closed,
            free: Room { memory_bytes: 10_000, vcpus: 64 },
            once_bytes: 0,
            has_family: false,
        };
        let views = [view(1, None), view(2, None), view(3, Some("it drains"))];
        let spread = shares(&views, None, (8, shape), Policy::Spread, id(1));
        assert_eq!(spread, [(id(1), 4), (id(2), 4)]);
        assert_eq!(shares(&views, None, (8, shape), Policy::Pack, id(2)), [(id(2), 8)]);
        // Nothing on those that are closed, though no other host is asked.
        assert_eq!(shares(&views[2..], None, (8, shape), Policy::Spread, id(1)), []);
        let error = PlanError::NoPlace { placed: 0, count: 8, views: views[1..].to_vec() };
        let error = error.to_string();
        assert!(
            error.contains("0 of 8 clones fit: `h2` has 0 MiB left (0 of them for memory that its clones share) and 64 virtual CPUs; `h3`: it drains"),
            "{error}"
        );
    }
}
