//! The shim, the keeper and the engine on fake VMs: `examples/fake_vm.rs` under the real preloaded
//! library.

mod common;
mod faults;
mod first;
mod generations;
mod pmem;
mod remote;
mod shim;
mod stored;
mod views;
