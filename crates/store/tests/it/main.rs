//! The store as its users see it: over a folder, and over blobs in memory that fail on command.

mod common;
mod crash;
mod create;
mod first_format;
mod flatten;
mod images;
mod profile;
mod remove;
mod transfer;
mod verify;
mod writers;
