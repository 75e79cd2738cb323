//! What a fork sends to a host that is to run clones of it: everything but the pages.
//!
//! ```text
//!   8 bytes  "VFDESC04"
//!   4 bytes  length of the head, little endian
//!   head     JSON: facts, whose clones they are, which images; lengths of what follows
//!   then     for each image its table and its homes; each disk's table; the device state
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmfork_agent_proto::TicketClone;
use vmfork_image::ImageName;

use crate::disks::DiskEntry;
use crate::error::DescriptorError;
use crate::images::Entry;
use vmfork_fork::facts::Facts;
use vmfork_host::lifetime::LifetimeTold;
use vmfork_host::quotas::User;
use vmfork_host::vm::Job;

/// The number grows with each change of what a host must understand: disks came last.
const MAGIC: [u8; 8] = *b"VFDESC04";
/// Far above what 1024 clones take.
const HEAD_BYTES_MAX: usize = 16 << 20;
/// Of all of it: tables of a 256 GiB guest that was written to all over.
pub(crate) const DESCRIPTOR_BYTES_MAX: usize = 512 << 20;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Descriptor {
    pub order: Order,
    /// The image of the snapshot last; those that the host knows may be missing.
    pub images: Vec<Entry>,
    /// In the order of the machine's disks.
    pub disks: Vec<DiskEntry>,
    /// Device state, as QEMU loads it.
    pub state: Vec<u8>,
}

/// Whose clones, and which.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Order {
    /// By which the sender speaks of it.
    pub number: u64,
    /// The parent's ticket that they are of.
    pub ticket: Option<u64>,
    /// Places that were set aside for them.
    pub lease: Option<u64>,
    /// The engine's job that holds them.
    pub job: Option<Job>,
    /// How long each may live.
    #[serde(default)]
    pub lifetime: LifetimeTold,
    /// How many books of tickets the sender has begun: those of the clones begin above.
    pub books: u64,
    pub facts: Facts,
    pub parent: Parent,
    pub clones: Vec<CloneOrder>,
    pub all_or_nothing: bool,
    /// How long the host may take, in ms.
    pub timeout_ms: u64,
    /// Bytes per second at which all pages are fetched, for all VMs together; 0: on demand alone.
    pub hydrate_bytes_per_s: u64,
    /// What clones of the parent on other hosts waited for until now, or touched, as first pages
    /// and numbers of pages.
    pub working_set: Vec<(u64, u64)>,
    /// What some of its clones touch is to be told.
    pub is_watched: bool,
}

/// The VM that was frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parent {
    pub id: String,
    pub name: String,
    pub family: String,
    /// Whose VMs they are.
    pub user: User,
    pub ancestors: Vec<String>,
    pub snapshot: Option<String>,
}

impl Parent {
    /// The ancestors of its clones: its own, and itself.
    pub(crate) fn line(&self) -> Arc<[String]> {
        self.ancestors.iter().chain([&self.id]).cloned().collect()
    }
}

/// A clone that is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CloneOrder {
    pub name: String,
    pub vmid: u32,
    pub ticket: Option<TicketClone>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    order: Order,
    images: Vec<Lengths>,
    disks: Vec<DiskLengths>,
    state_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct DiskLengths {
    host: u64,
    image: u64,
    size_bytes: u64,
    table_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Lengths {
    host: u64,
    image: u64,
    is_partial: bool,
    table_bytes: u64,
    homes_bytes: u64,
}

impl Descriptor {
    /// # Errors
    /// Never, in practice: its head is made of structs.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, DescriptorError> {
        let lengths = self.images.iter().map(|entry| Lengths {
            host: entry.name.host,
            image: entry.name.image,
            is_partial: entry.is_partial,
            table_bytes: entry.table.len() as u64,
            homes_bytes: entry.homes.len() as u64,
        });
        let disks = self.disks.iter().map(|disk| DiskLengths {
            host: disk.name.host,
            image: disk.name.image,
            size_bytes: disk.size_bytes,
            table_bytes: disk.table.len() as u64,
        });
        let head = serde_json::to_vec(&Head {
            order: self.order.clone(),
            images: lengths.collect(),
            disks: disks.collect(),
            state_bytes: self.state.len() as u64,
        })?;
        let head_bytes = u32::try_from(head.len()).map_err(|_| head_too_large(head.len()))?;
        let tables = self.images.iter().flat_map(|entry| [&entry.table, &entry.homes]);
        let rest = tables.chain(self.disks.iter().map(|disk| &disk.table)).chain([&self.state]);
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&head_bytes.to_le_bytes());
        bytes.extend_from_slice(&head);
        rest.for_each(|part| bytes.extend_from_slice(part));
        Ok(bytes)
    }

    /// # Errors
    /// The bytes are anything else: which part.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let mut rest = bytes;
        if take(&mut rest, 8, "its beginning")? != MAGIC {
            return Err(DescriptorError::Magic);
        }
        let length = take(&mut rest, 4, "its head's length")?;
        let length = length.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
        if length as usize > HEAD_BYTES_MAX {
            return Err(head_too_large(length as usize));
        }
        let head: Head = serde_json::from_slice(take(&mut rest, length.into(), "its head")?)?;
        let mut images = Vec::new();
        for lengths in head.images {
            images.push(Entry {
                name: ImageName { host: lengths.host, image: lengths.image },
                is_partial: lengths.is_partial,
                table: take(&mut rest, lengths.table_bytes, "a page table")?.to_vec(),
                homes: take(&mut rest, lengths.homes_bytes, "a list of homes")?.to_vec(),
            });
        }
        let mut disks = Vec::new();
        for lengths in head.disks {
            let DiskLengths { host, image, size_bytes, table_bytes } = lengths;
            let table = take(&mut rest, table_bytes, "a disk's page table")?.to_vec();
            disks.push(DiskEntry { name: ImageName { host, image }, size_bytes, table });
        }
        let state = take(&mut rest, head.state_bytes, "the device state")?.to_vec();
        if !rest.is_empty() {
            return Err(DescriptorError::Long { left: rest.len() as u64 });
        }
        Ok(Self { order: head.order, images, disks, state })
    }
}

fn head_too_large(bytes: usize) -> DescriptorError {
    DescriptorError::Head { bytes: bytes as u64 }
}

fn take<'a>(
    rest: &mut &'a [u8],
    wanted: u64,
    what: &'static str,
) -> Result<&'a [u8], DescriptorError> {
    let left = rest.len() as u64;
    let split = usize::try_from(wanted).ok().and_then(|wanted| rest.split_at_checked(wanted));
    let (part, after) = split.ok_or(DescriptorError::Short { what, wanted, left })?;
    *rest = after;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor() -> Descriptor {
        let entry = |image| Entry {
            name: ImageName { host: u64::MAX, image },
            is_partial: image == 1,
            table: vec![1, 2, 3],
            homes: vec![4],
        };
        Descriptor {
            order: Order {
                number: 9,
                ticket: Some(3),
                lease: None,
                job: Some(Job { host: 7, id: "12".to_owned() }),
                books: 7,
                lifetime: LifetimeTold::default(),
                facts: Facts::of_a_test(64 << 20),
                parent: Parent {
                    id: "id".to_owned(),
                    name: "web".to_owned(),
                    family: "id".to_owned(),
                    user: User::Uid(1000),
                    ancestors: vec!["root".to_owned()],
                    snapshot: None,
                },
                clones: vec![CloneOrder { name: "web.1".to_owned(), vmid: 1, ticket: None }],
                all_or_nothing: true,
                timeout_ms: 5,
                hydrate_bytes_per_s: 0,
                working_set: vec![(7, 3)],
                is_watched: true,
            },
            images: vec![entry(1), entry(2)],
            disks: vec![DiskEntry {
                name: ImageName { host: 3, image: u64::MAX },
                size_bytes: 1 << 41,
                table: vec![5, 6],
            }],
            state: b"state".to_vec(),
        }
    }

    #[test]
    fn it_comes_back_as_it_went() {
        let bytes = descriptor().encode().expect("plain");
        assert_eq!(Descriptor::decode(&bytes).expect("whole"), descriptor());
    }

    #[test]
    fn what_is_cut_or_followed_by_more_is_refused() {
        let bytes = descriptor().encode().expect("plain");
        for len in 0..bytes.len() {
            Descriptor::decode(&bytes[..len]).expect_err("cut");
        }
        let more = [bytes.as_slice(), &[0]].concat();
        assert!(matches!(Descriptor::decode(&more), Err(DescriptorError::Long { left: 1 })));
        let mut other = bytes;
        other[7] = b'1';
        assert!(matches!(Descriptor::decode(&other), Err(DescriptorError::Magic)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>, flip in any::<prop::sample::Index>(), to: u8) {
            let _any = Descriptor::decode(&bytes);
            let mut bytes = descriptor().encode().expect("plain");
            let at = flip.index(bytes.len());
            bytes[at] = to;
            let _any = Descriptor::decode(&bytes);
        }
    }
}
