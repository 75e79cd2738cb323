//! The real `vmfork` as a process: against a fake daemon, and without one.

mod commands;
mod events;
mod lifetime;
mod snapshots;
mod start;
mod streams;
mod support;
mod terminals;
