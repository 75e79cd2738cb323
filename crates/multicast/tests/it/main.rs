//! Pages to many hosts at a time, over loopback.

#[expect(dead_code, reason = "the tests of transfer use the rest")]
#[path = "../../../transfer/tests/it/common.rs"]
mod common;
#[expect(dead_code, reason = "the tests of transfer use the rest")]
#[path = "../../../transfer/tests/it/keys.rs"]
mod keys;
mod multicast;
