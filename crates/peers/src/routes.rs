//! What hosts ask each other.
//!
//! | route | does |
//! |---|---|
//! | `POST /cluster/v1/join` | of who is no member yet: [`vmfork_cluster::JoinRequest`] → `JoinAnswer` |
//! | `POST /cluster/v1/heartbeat` | [`Beat`] → the receiver's |
//! | `POST /cluster/v1/clones` | a descriptor, as bytes → `Vec<CloneResult>`: start clones |
//! | `POST /cluster/v1/clones/give-up` | the number of an order: end what it started |
//! | `…/cluster/v1/guest-images…` | [`super::guest_images`] |
//! | `…/cluster/v1/stored-images…` | [`super::stored_routes`] |
//! | `POST /cluster/v1/leases` | [`PlacesAsk`] → for how many clones of a ticket room is set aside |
//! | `POST /cluster/v1/leases/release` | the number of an ask: its room is not needed |
//! | `POST /cluster/v1/quotas` | of a user's keeper: [`QuotaAsk`] → `QuotaAnswer` |
//! | `POST /cluster/v1/tickets/letters` | what hosts of a ticket say to each other, as bytes → how many words have come |
//! | `POST /cluster/v1/families/end` | the VM whose family is ended here → how many VMs and forks that were |
//! | `POST /cluster/v1/touched` | what a clone of a snapshot that is lent has touched: [`super::touch_feedback`] |
//! | `POST /cluster/v1/lifetimes` | the bound of a VM in time, which clones here may inherit: [`super::lifetimes`] |
//! | `GET /cluster/v1/names` | names of the VMs that are here, dead or alive |
//! | `/v1/…` | the REST API, about VMs that are here |

use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use vmfork_api::CloneResult;
use vmfork_cluster::allocate::{QuotaAnswer, QuotaAsk};
use vmfork_cluster::{HostId, JoinAnswer, JoinRequest, admit};

use super::context::Context;
use super::error::{ClusterError, OrderError, RemoteForkError, TicketError};
use super::family;
use super::guest_images::{self, GUEST_IMAGES};
use super::life::Life;
use super::lifetimes::{self, LIFETIMES};
use super::locate::NAMES;
use super::member::{Beat, HEARTBEAT};
use super::quotas::QUOTAS;
use super::remote_fork::receive::{self, Here};
use super::remote_fork::send::{CLONES, GIVE_UP};
use super::remote_fork::{DESCRIPTOR_BYTES_MAX, Descriptor};
use super::server::{Arrived, Caller, Routes};
use super::stored_routes;
use super::this_host::ThisHost;
use super::tickets::{self, LEASES, LETTERS, PlacesAsk, RELEASE};
use super::touch_feedback::{self, TOUCHED};
use vmfork_host::core::Core;
use vmfork_host::error::outcome;
use vmfork_host::vm::End;
use vmfork_rest::http::ApiError;

pub(super) const JOIN: &str = "/cluster/v1/join";

/// What newcomers and heartbeats are answered from.
#[derive(Clone)]
struct OfLife {
    life: Weak<Life>,
    context: Context,
    /// Another member has removed this host.
    removed: Arc<dyn Fn() + Send + Sync>,
}

impl OfLife {
    fn life(&self) -> Result<Arc<Life>, ClusterError> {
        self.life.upgrade().ok_or(ClusterError::Leaving)
    }
}

/// All routes of a membership. `removed` is called if another member has removed this host.
pub(super) fn of(
    this: &Arc<ThisHost>,
    life: &Arc<Life>,
    removed: impl Fn() + Send + Sync + 'static,
) -> Routes {
    let context = Context::new(this, &life.member);
    let of_life =
        OfLife { life: Arc::downgrade(life), context: context.clone(), removed: Arc::new(removed) };
    let clones = Router::new()
        .route(CLONES, post(clones))
        .layer(DefaultBodyLimit::max(DESCRIPTOR_BYTES_MAX));
    let members = Router::new()
        .route(NAMES, get(names))
        .route(family::END, post(family::end))
        .route(GIVE_UP, post(give_up))
        .route(GUEST_IMAGES, post(have_image))
        .route(LEASES, post(lease))
        .route(RELEASE, post(release))
        .route(QUOTAS, post(quota))
        .route(LETTERS, post(letter))
        .route(TOUCHED, post(touch_feedback::hear))
        .route(LIFETIMES, post(lifetimes::hear))
        .merge(clones)
        .with_state(context.clone());
    let stored = stored_routes::of(this, context);
    let heartbeats = Router::new().route(HEARTBEAT, post(heartbeat)).with_state(of_life.clone());
    let images = this.core().map(|core| guest_images::giving(core.images.clone()));
    let api = this.api.get().cloned().unwrap_or_default();
    Routes {
        // The API answers in its own way to what is no route.
        members: members
            .merge(heartbeats)
            .merge(stored)
            .merge(images.unwrap_or_default())
            .fallback_service(api),
        newcomers: Router::new().route(JOIN, post(join)).with_state(of_life),
    }
}

async fn have_image(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(wanted): Json<guest_images::Wanted>,
) -> Result<Json<guest_images::There>, ApiError> {
    let message = "take a guest image from another host";
    let (member, core) = context.parts().map_err(|error| error.to_body(message))?;
    let name = member.guest_images.take(&core.images, from, &wanted).await?;
    Ok(Json(guest_images::There { name }))
}

async fn join(
    State(of): State<OfLife>,
    Json(request): Json<JoinRequest>,
) -> Result<Json<JoinAnswer>, ApiError> {
    let message = format!("join as `{}`", request.name);
    let answer = admit_newcomer(&of, &request).map_err(|error| error.to_body(message))?;
    tracing::info!(name = request.name, id = %request.id, address = request.address, "a host has joined");
    Ok(Json(answer))
}

fn admit_newcomer(of: &OfLife, request: &JoinRequest) -> Result<JoinAnswer, ClusterError> {
    let life = of.life()?;
    let now = life.member.hosts.now();
    let (answer, written) = {
        let mut tokens = life.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = life
            .member
            .hosts
            .roster
            .change(|book| admit(request, &mut tokens, book, &life.authority, now));
        (answer, life.records.save_tokens(&tokens))
    };
    let answer = answer.map_err(ClusterError::NotAdmitted)?;
    written?;
    life.save();
    Ok(answer)
}

async fn heartbeat(
    State(of): State<OfLife>,
    Extension(Caller(from)): Extension<Caller>,
    Json(beat): Json<Beat>,
) -> Result<Json<Beat>, ApiError> {
    let answer = take_beat(&of, from, &beat);
    Ok(Json(answer.map_err(|error| error.to_body("take a heartbeat"))?))
}

fn take_beat(of: &OfLife, from: HostId, beat: &Beat) -> Result<Beat, ClusterError> {
    let (life, (_, core)) = (of.life()?, of.context.parts()?);
    let quotas = core.quotas.tally(&core.admission);
    let (answer, merged) = life.member.on_beat(from, beat, core.admission.room(), Some(quotas))?;
    life.settle(&merged);
    life.heard(from, beat);
    if merged.removed {
        (of.removed)();
    }
    Ok(answer)
}

async fn names(State(context): State<Context>) -> Result<Json<Vec<String>>, ApiError> {
    let (_, core) = context.parts().map_err(|error| error.to_body("tell the names of VMs"))?;
    Ok(Json(core.registry.all().iter().map(|vm| vm.name().to_owned()).collect()))
}

async fn clones(
    Arrived(arrived): Arrived,
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    body: Bytes,
) -> Result<Json<Vec<CloneResult>>, ApiError> {
    let message = "start another host's clones";
    let (member, core) = context.parts().map_err(|error| error.to_body(message))?;
    let forker = context.forker().map_err(|error| error.to_body(message))?;
    let descriptor = Descriptor::decode(&body).map_err(OrderError::from);
    let mut descriptor =
        descriptor.map_err(|error| RemoteForkError::from(error).to_body(message))?;
    drop(body);
    member.hosts.check_active().map_err(|error| error.to_body(message))?;
    let order = (from, descriptor.order.number);
    let begun = member.orders().begin(Instant::now(), order);
    let given_up = begun.ok_or_else(|| RemoteForkError::GivenUp.to_body(message))?;
    let _on_drop = given_up.clone().drop_guard();
    // A task of its own: QEMUs that are half-way up are ended in order, also when the client
    // disconnects.
    let task = tokio::spawn(async move {
        // Dropped last: when it is over, the end of the family finds all VMs that this fork
        // started.
        let line = descriptor.order.parent.line();
        let _under_way = core.registry.fork_begins(Arc::clone(&line), given_up.clone());
        // A change of a bound may come before the clones begin that inherit it.
        let _bounds = core.lifetimes.hold(line);
        let here = Here {
            forker: &forker,
            arrived,
            images: &member.images,
            engines: &member.engines,
            arrivals: &member.arrivals,
            source: &|image, pages| member.source(image, pages, from),
            disk_source: &|owner, pages| member.disk_source(owner, pages, from),
        };
        let had = member.guest_images.bring(&core, from, &mut descriptor.order, &given_up).await;
        let wanted = &descriptor.order;
        let snapshot = descriptor.images.last().map(|entry| entry.name);
        let watched = snapshot.filter(|_| wanted.is_watched);
        core.begin_books_after(wanted.books);
        let memory = wanted.lease.and_then(|it| member.leases.take(Instant::now(), from, it));
        let results = match had {
            Ok(()) => {
                let origin = tickets::begin((&member.hosts, &member.lines), &core, from, wanted);
                receive::start(here, descriptor, memory, origin, given_up).await
            }
            Err(error) => Err(error),
        };
        let started = results.iter().flatten().filter_map(|result| result.id.clone());
        let unwanted = member.orders().done(Instant::now(), order, started.collect());
        end_all(&core, &unwanted);
        if let (Some(snapshot), Ok(clones)) = (watched, &results) {
            touch_feedback::watch_some(&member, &core, from, snapshot, clones);
        }
        results
    });
    Ok(Json(outcome(task, message).await?))
}

async fn give_up(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(number): Json<u64>,
) -> Result<Json<()>, ApiError> {
    let message = "give up another host's order";
    let (member, core) = context.parts().map_err(|error| error.to_body(message))?;
    let unwanted = member.orders().give_up(Instant::now(), (from, number));
    end_all(&core, &unwanted);
    Ok(Json(()))
}

async fn lease(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(ask): Json<PlacesAsk>,
) -> Result<Json<u32>, ApiError> {
    let message = "make room for another host's clones";
    let (member, core) = context.parts().map_err(|error| error.to_body(message))?;
    member.hosts.check_active().map_err(|error| error.to_body(message))?;
    let turn = core.turn_of_clones(&ask.of_clones(message)).await;
    let turn = turn.map_err(|error| error.to_body(message))?;
    let accounts = (&core.admission, turn.allowed());
    let granted = member.leases.grant(Instant::now(), from, &ask, accounts);
    Ok(Json(granted.map_err(|error| error.to_body(ask.message()))?))
}

async fn quota(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(ask): Json<QuotaAsk>,
) -> Result<Json<QuotaAnswer>, ApiError> {
    let message = "count what a user has";
    let (member, core) = context.parts().map_err(|error| error.to_body(message))?;
    let kept = member.keeper.keep(&core, from, &ask, Instant::now()).map_err(TicketError::from);
    Ok(Json(kept.map_err(|error| error.to_body(message))?))
}

async fn release(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    Json(lease): Json<u64>,
) -> Result<Json<()>, ApiError> {
    let (member, _) =
        context.parts().map_err(|error| error.to_body("give another host's room back"))?;
    drop(member.leases.take(Instant::now(), from, lease));
    Ok(Json(()))
}

async fn letter(
    State(context): State<Context>,
    Extension(Caller(from)): Extension<Caller>,
    request: Request,
) -> Result<Json<u64>, ApiError> {
    let message = "hear of a ticket's clones";
    let (member, _) = context.parts().map_err(|error| error.to_body(message))?;
    let letter = member.inbox.read(request.into_body()).await;
    let heard = letter.and_then(|letter| member.lines.on_letter(from, letter.bytes.clone()));
    Ok(Json(heard.map_err(|error| error.to_body(message))?))
}

fn end_all(core: &Arc<Core>, ids: &[String]) {
    for vm in ids.iter().filter_map(|id| core.registry.find("end it", id).ok()) {
        core.end(&vm, End::killed("its start was given up"));
    }
}
