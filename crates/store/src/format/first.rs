//! `descriptor.json` as the first version of the format has it: one image, the guest's memory.
//! It is read; what is written is of the version of [`super::descriptor`].

use serde::Deserialize;

use super::Compression;
use super::descriptor::{
    BaseRef, Counts, Descriptor, FileRef, ImageDescriptor, SCHEMA, SnapshotId,
};
use super::role::Role;

/// The layout that is read here.
pub(super) const FIRST_SCHEMA: &str = "vmfork-snapshot/1";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstBase {
    name: String,
    id: SnapshotId,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstFiles {
    table: FileRef,
    state: FileRef,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct First {
    #[serde(rename = "schema")]
    _schema: String,
    id: SnapshotId,
    name: String,
    created_unix_ms: u64,
    pages: u64,
    page_bytes: u64,
    chunk_pages: u64,
    compression: Compression,
    base: Option<FirstBase>,
    counts: Counts,
    files: FirstFiles,
    vm: serde_json::Value,
}

impl From<First> for Descriptor {
    /// What it says in the words of today. Bounds are for the caller to check.
    fn from(first: First) -> Self {
        let FirstFiles { table, state } = first.files;
        let base =
            first.base.map(|FirstBase { name, id }| BaseRef { name, id, role: Role::Memory });
        // There it counts the device state, too.
        let stored_bytes = first.counts.stored_bytes.saturating_sub(state.bytes);
        let memory = ImageDescriptor {
            role: Role::Memory,
            // What this hides is far above the bound.
            bytes: first.pages.saturating_mul(first.page_bytes),
            page_bytes: first.page_bytes,
            chunk_pages: first.chunk_pages,
            compression: first.compression,
            base,
            counts: Counts { stored_bytes, ..first.counts },
            table,
        };
        Self {
            schema: SCHEMA.to_owned(),
            id: first.id,
            name: first.name,
            created_unix_ms: first.created_unix_ms,
            images: vec![memory],
            state,
            vm: first.vm,
        }
    }
}
