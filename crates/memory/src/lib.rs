//! VMs' memory as views of images: userfaultfd, the freeze, and the shim's keeper.
//!
//! ```text
//!   GuestMemory ──freeze, attach──► keeper (in QEMU)        vmfork-engine
//!    (a VM's RAM)                      │
//!        ├── UffdView: faults, wakes, zeros, mapped runs ──► Reader
//!        └── FrozenRange: pages that a freeze moved aside ─► Originals
//! ```
//!
//! A guest may also have persistent memory, which shows a file to it ([`GuestMemory::show_file`]).
//!
//! [`GuestMemory`] is a VM's RAM, by way of the shim's keeper: attach it to an image, freeze it
//! into a new one. The engine of the image answers its faults.
//!
//! Promises: a freeze takes the same time whatever the size of RAM. One that fails leaves RAM as it
//! was, or says that the VM must end. Moved pages are readable until they are given back.
//!
//! Left to others: caches, and how a fault is answered (`vmfork-engine`). QEMU, when to fork, and
//! what to do with a lost VM.

mod frozen;
mod guest_memory;
mod pagemap;
mod pmem;
mod stillness;
mod tap;
mod uffd;
mod view;

pub use guest_memory::{
    Attachment, ConnectError, FreezeError, FreezeTimes, GuestMemory, MemorySample, TouchScan,
    USERFAULTFD_DEVICE,
};
pub use pmem::{PMEM_FILE_OFFSET, pmem_bytes, pmem_cost_bytes};
pub use tap::{ShimEnds, Tap, TapError};
