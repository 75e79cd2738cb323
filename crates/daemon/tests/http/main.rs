//! The REST API over real sockets, against a host that is made up ([`fake::Fake`]).

mod client;
mod errors;
mod events;
mod exec;
mod fake;
mod fake_snapshots;
mod fake_volumes;
mod files;
mod lifecycle;
mod lifetime;
mod openapi;
mod routes;
mod snapshots;
mod sockets;
mod volumes;
