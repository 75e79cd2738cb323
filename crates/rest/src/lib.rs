//! The REST API of a host: requests in, calls of [`vmfork_control::Control`] out.
//!
//! It knows neither QEMU nor memory nor what a cluster is: what it serves is handed in as traits,
//! so that its tests run on a made-up host.

pub mod http;
