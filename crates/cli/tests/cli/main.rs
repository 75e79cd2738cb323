//! The real `vmfork` as a process: against a fake daemon, and without one.

mod commands;
mod lifetime;
mod snapshots;
mod start;
mod streams;
mod support;
mod terminals;
