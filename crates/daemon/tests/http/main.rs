//! The REST API over real sockets, against a host that is made up ([`fake::Fake`]).

mod client;
mod errors;
mod exec;
mod fake;
mod files;
mod lifecycle;
mod openapi;
mod routes;
mod sockets;
