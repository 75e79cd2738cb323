//! What one host sends another, and can't be read there.

use std::io;

use vmfork_disk::ImageError;
use vmfork_engine::OpenError;
use vmfork_host::disks::{DiskError, LayerError};
use vmfork_image::bytes::Flaw;
use vmfork_image::{ImageName, TableError};

/// Bytes that are no descriptor.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DescriptorError {
    #[error("it does not begin as a descriptor of this version does")]
    Magic,
    #[error("cut short: {what} needs {wanted} bytes, {left} are left")]
    Short { what: &'static str, wanted: u64, left: u64 },
    #[error("{left} bytes follow its end")]
    Long { left: u64 },
    #[error("its head of {bytes} bytes is too large")]
    Head { bytes: u64 },
    #[error("its head")]
    Json(#[from] serde_json::Error),
}

/// An image of another host can't be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    #[error("the page table of image {name}")]
    Table { name: ImageName, source: Flaw },
    #[error("the homes of image {name}")]
    Homes { name: ImageName, source: Flaw },
    #[error("image {name} names image {unknown}, which came neither with it nor before it")]
    Unknown { name: ImageName, unknown: ImageName },
    #[error("image {name} has {found} pages, the VM {pages}")]
    Size { name: ImageName, found: u64, pages: u64 },
    #[error("image {name}")]
    Open { name: ImageName, source: OpenError },
    #[error("it names no image")]
    Empty,
    #[error("disk {name} has {found} bytes, that of the VM {size_bytes}")]
    DiskSize { name: ImageName, found: u64, size_bytes: u64 },
    #[error("the VM has {specs} disks, {entries} came")]
    Disks { specs: usize, entries: usize },
    #[error("disk {name}")]
    Disk { name: ImageName, source: ImageError },
    #[error("a file for pages of its disks")]
    DiskCache(#[source] io::Error),
}

/// An image can't be lent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LendError {
    #[error("what its VM had written is not known yet")]
    NotSealed,
    #[error("its page table")]
    Table(#[from] TableError),
    #[error("what its disk lies on")]
    Disk(#[source] DiskError),
    #[error("disk `{disk}` is scattered over too many layers or pieces to be sent")]
    Scattered { disk: String },
    #[error("freeze a volume that VMs share")]
    Layer(#[source] LayerError),
}
