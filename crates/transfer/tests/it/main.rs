//! Pages between hosts, over TLS on loopback.

mod chaos;
mod common;
mod failing;
mod first;
mod gone;
mod keys;
mod reading;
mod strangers;
mod swarm;
mod together;
